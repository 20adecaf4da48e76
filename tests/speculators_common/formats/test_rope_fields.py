"""Rotary settings in the new and the old layout give the same `RopeConfig`; unsupported settings are refused."""

from __future__ import annotations

import dataclasses

import pytest

from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.fields import Fields
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.rope.fields import parse_rope, stated_partial_rotary_factor

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
NESTED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "rope_theta": None,
    "rope_type": "default",
}


def parsed(raw: dict, **options) -> RopeConfig:
    return parse_rope(Fields(raw, "config.json"), head_dim=64, **options)


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 500000}},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "type": "default", "rope_type": "default"}},
    ],
)
def test_default_rotation_in_every_layout(raw):
    assert parsed(raw) == RopeConfig(theta=5e5, rotary_dim=64)


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ],
)
def test_linear_scaling_in_every_layout(raw):
    assert parsed(raw) == RopeConfig(theta=1e4, rotary_dim=64, kind="linear", factor=4.0)


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    ],
)
def test_llama3_scaling_in_every_layout(raw):
    expected = RopeConfig(
        theta=5e5,
        rotary_dim=64,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    assert parsed(raw) == expected


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_parameters": YARN},
        {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        {"rope_theta": 1e4, "max_position_embeddings": 32768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ],
)
def test_yarn_scaling_in_every_layout(raw):
    rope = parsed(raw)
    assert rope.attention_factor == pytest.approx(1.138629436)
    expected = RopeConfig(theta=1e4, rotary_dim=64, kind="yarn", factor=4.0, original_max_position_embeddings=32768)
    assert dataclasses.replace(rope, attention_factor=1.0) == expected
    assert (expected.beta_fast, expected.beta_slow) == (32.0, 1.0)


def test_yarn_settings_that_are_stated_win_over_the_usual_ones():
    rope = parsed({"rope_parameters": YARN | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5}})
    assert (rope.beta_fast, rope.beta_slow, rope.attention_factor) == (16.0, 2.0, 1.5)


def test_a_family_that_knows_it_may_turn_a_proportion_of_the_pairs_of_a_whole_head():
    raw = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25}}
    assert parsed(raw, kinds=("default", "proportional")) == RopeConfig(
        theta=1e6, rotary_dim=64, kind="proportional", rotating_pairs=8
    )
    with pytest.raises(CheckpointError, match="found 'proportional', allowed default as RoPE type"):
        parsed(raw, kinds=("default",))
    with pytest.raises(
        CheckpointError, match=r"rope_parameters\.rope_type: found 'default', allowed linear as RoPE type"
    ):
        parsed({"rope_parameters": {"rope_theta": 1e6}}, kinds=("linear",))


def test_settings_nested_per_layer_kind_are_taken_from_the_first_kind_asked_for():
    raw = {"rope_parameters": NESTED}
    assert parsed(raw) == RopeConfig(theta=1e6, rotary_dim=16, kind="linear", factor=8.0)
    assert parsed(raw, layer_types=("sliding_attention", "full_attention")) == RopeConfig(theta=1e4, rotary_dim=64)
    only_full = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
    assert parsed(only_full, layer_types=("sliding_attention", "full_attention")).theta == 1e6


def test_an_entry_of_an_unknown_layer_kind_is_an_unknown_field():
    fields = Fields(
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6},
                "sliding": {"rope_theta": 1e4},
                "rope_theta": None,
            }
        },
        "config.json",
    )
    parse_rope(fields, head_dim=64)
    assert [path for path, _ in fields.unread_items()] == ["rope_parameters.sliding"]


def test_a_proportion_of_an_odd_head_is_refused():
    fields = Fields({"rope_parameters": {"rope_theta": 1e6, "rope_type": "proportional"}}, "config.json")
    with pytest.raises(
        CheckpointError, match="global_head_dim: found 7, allowed a head whose rotary part is an even number"
    ):
        parse_rope(fields, head_dim=7, head_dim_name="global_head_dim", kinds=("default", "proportional"))


def test_the_entries_of_other_layer_kinds_are_known_fields():
    fields = Fields(
        {"rope_parameters": NESTED | {"sliding_attention": {"rope_theta": 1e4, "surprise": 1}}}, "config.json"
    )
    parse_rope(fields, head_dim=64, layer_types=("sliding_attention",))
    assert [path for path, _ in fields.unread_items()] == ["rope_parameters.sliding_attention.surprise"]


def test_the_rotating_share_comes_from_the_argument_or_else_from_the_file():
    beside = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    inside = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    for raw in (beside, inside):
        assert stated_partial_rotary_factor(Fields(raw, "config.json")) == 0.5
        assert parsed(raw).rotary_dim == 32
        assert parsed(raw, partial_rotary_factor=1.0).rotary_dim == 64
    assert stated_partial_rotary_factor(Fields({"rope_theta": 1e4}, "config.json")) is None


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope", "factor": 4.0}},
            "rope_parameters.rope_type: found 'longrope', allowed default, linear, llama3, yarn as RoPE type",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "proportional"}},
            "rope_type: found 'proportional', allowed default, linear, llama3, yarn",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "factor": 4.0}},
            "rope_parameters.rope_type: missing, allowed default, linear, llama3, yarn, as factor",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 0.5}},
            "rope_scaling.factor: found 0.5, allowed a finite number >= 1",
        ),
        ({"rope_theta": 1}, "rope_theta: found 1, allowed a finite number > 1"),
        ({"rope_theta": 1e300}, "rope_theta: found 1e+300, allowed a finite number > 1, within the range of float32"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}},
            "rope_parameters.factor: missing, allowed a finite number >= 1",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}},
            "max_position_embeddings: missing, allowed an integer >= 1",
        ),
        ({"rope_parameters": YARN | {"mscale": 0.7}}, "rope_parameters.mscale: found 0.7, allowed no such field"),
        ({"rope_parameters": YARN | {"truncate": False}}, "rope_parameters.truncate: found False, allowed true"),
        (
            {"rope_parameters": YARN | {"beta_fast": 1}},
            "rope_parameters.beta_fast: found 1.0, allowed a finite number > 1.0",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.type: found 'dynamic', allowed default, linear",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters.rope_theta or rope_theta: missing, allowed a finite number",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "(RoPE type 'linear')"),
        ({}, "rope_parameters.rope_theta or rope_theta: missing"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta: found 0, allowed a finite number > 1"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters.rope_theta: found 1000000.0, but rope_theta is 10000.0",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "type": "linear"}},
            "rope_parameters.rope_type: found 'default', but rope_parameters.type is 'linear'",
        ),
        (
            {
                "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            "rope_parameters.rope_type: found 'default', but rope_scaling.rope_type is 'linear'",
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": -1}},
            "rope_scaling.factor: found -1, allowed a finite number >= 1",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "rope_parameters.high_freq_factor: found 1.0, allowed a finite number > 1.0",
        ),
        (
            {
                "rope_parameters": {
                    "rope_theta": 1e4,
                    "rope_type": "llama3",
                    **LLAMA3,
                    "original_max_position_embeddings": None,
                }
            },
            "rope_parameters.original_max_position_embeddings: found None, allowed an integer >= 1",
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 1.5},
            "partial_rotary_factor: found 1.5, allowed a finite number > 0 and <= 1",
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.02},
            "head_dim: found 64, allowed a head whose rotary part is an even number >= 2, found 1",
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor: found 0.5, but rope_parameters.partial_rotary_factor is 0.25",
        ),
        ({"rope_theta": 1e4, "rope_is_neox_style": False}, "rope_is_neox_style: found False, allowed true"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_interleave": True}},
            "rope_parameters.rope_interleave: found True, allowed false",
        ),
        (
            {"rope_parameters": {"chunked_attention": {"rope_theta": 1e4}}},
            "rope_parameters: found ['chunked_attention'], allowed an entry for full",
        ),
    ],
)
def test_unsupported_or_contradicting_settings_are_refused_by_field(raw, expected):
    with pytest.raises(CheckpointError) as caught:
        parsed(raw)
    assert str(caught.value).startswith("config.json: ")
    assert expected in str(caught.value)
