"""Valid configs with one wrong field.

The field has no influence, or it has the meaning that the format gives it, or the config is refused. A refusal is one
message with the file and the field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jaxtyping
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_jax.speculators_common.errors import CheckpointError
from tests.support.config_checks import FILE, assert_buildable, entry_of, parsed
from tests.support.config_corruptions import (
    WRONG_VALUES,
    Path,
    dotted,
    field_name,
    paths,
    removed,
    renamed,
    replaced,
    value_at,
)
from tests.support.config_strategies import SLIDING, Raw
from tests.support.draft_strategies import DRAFTS
from tests.support.target_strategies import TARGETS

FAMILIES: dict[str, Any] = {**DRAFTS, **TARGETS}
few = settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])

VALUES_PER_FIELD, BUILDS_PER_CONFIG = 6, 2
REFUSED = object()
ANY = object()  # a default that depends on other fields, or that no value can express
EVERYWHERE: dict[str, Any] = {
    "attention_bias": False,
    "attention_factor": ANY,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "layer_types": ANY,
    "original_max_position_embeddings": ANY,
    "partial_rotary_factor": 1.0,
    "rope_parameters": {},
    "rope_scaling": {},
    "rope_type": "default",
    "truncate": True,
    "type": "default",
}
SPECULATORS: dict[str, Any] = {
    "draft_vocab_size": 32000,
    "block_size": 8,
    "sliding_window_non_causal": False,
    "causal": ANY,
    "target_hidden_size": ANY,
}
SPECULATORS |= {
    "sample_from_anchor": ANY,
    "speculative_tokens": ANY,
    "speculators_config": {},
    "proposal_methods": [],
    "rope_theta": 1e4,
    SLIDING: ANY,
}
HEADS: dict[str, Any] = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
ZLAB: dict[str, Any] = {
    "block_size": 16,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": ANY,
    "is_causal": ANY,
    "rope_theta": 1e4,
    SLIDING: ANY,
}
COMPACT: dict[str, Any] = {
    "gamma": 5,
    "dDraft": 1024,
    "nLayers": 5,
    "nHeads": 8,
    "markovRank": 256,
    "ffMult": 2,
    "tapLayers": [20, 31, 41, 42],
    "seqHead": "markov",
}
DECODER: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1e4}
GEMMA: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
GEMMA |= {"max_position_embeddings": 131_072, "final_logit_softcapping": ANY}
# Field -> its default, if a config that omits the field means something else than before. All other fields are
# mandatory.
DEFAULTS: dict[str, dict[str, Any]] = {
    "speculators dspark": {**SPECULATORS, **HEADS},
    "speculators dflash": SPECULATORS,
    "deepspec qwen3": {},
    "deepspec gemma4": {"final_logit_softcapping": ANY},
    "zlab dflash": ZLAB,
    "compact": {**COMPACT, "sts": ANY},
    "llama": {**DECODER, "num_key_value_heads": ANY, "head_dim": ANY, "mlp_bias": False},
    "qwen3": {**DECODER, "head_dim": 128, "use_sliding_window": False, "max_window_layers": 28},
    "qwen3_moe": {
        **DECODER,
        "head_dim": ANY,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
    },
    "gemma3": {
        **GEMMA,
        "vocab_size": 262_208,
        "query_pre_attn_scalar": 256.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "_sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_parameters": ANY,  # without it the config has the old layout, in which every field has a default
    },
    "gemma4": {
        **GEMMA,
        "vocab_size": 262_144,
        "sliding_window": 512,
        "global_head_dim": 512,
        "num_global_key_value_heads": ANY,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": ANY,
        "vocab_size_per_layer_input": 262_144,
        "model_type": ANY,
    },
}
# Other fields that a message may name: a changed switch needs another field, or contradicts one.
_LAYOUT = ("sample_from_anchor",)
SWITCHES = {
    "attention_k_eq_v": ("num_key_value_heads", "num_global_key_value_heads"),
    "model_type": ("hidden_size_per_layer_input",),
    "speculators_config": _LAYOUT,
    "proposal_methods": _LAYOUT,
    "speculative_tokens": _LAYOUT,
}


@pytest.fixture(scope="module", autouse=True)
def _without_annotation_checks() -> Iterator[None]:
    """Without run-time annotation checks, as for a user. This is also ten times as fast."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def outcome(raw: Raw, path: Path, original: Any) -> Any:
    """The parsed config, or `REFUSED` if the config is refused.

    The message must be one line of readable length. It must name the file and the field at `path`, or a field below it.
    """
    try:
        return parsed(raw, entry_of_valid(raw, path, original))
    except CheckpointError as error:
        message = str(error)
    assert message.startswith(f"{FILE}: ")
    assert "\n" not in message
    assert len(message) < 2000
    name = field_name(path)
    names = {
        name,
        *SWITCHES.get(name, ()),
        *(key for below in paths(original) for key in below if isinstance(key, str)),
    }
    assert any(name in message for name in names), f"{path}: {message}"
    return REFUSED


def entry_of_valid(raw: Raw, path: Path, original: Any) -> Any:
    """The registry entry that the config had before its field at `path` was changed."""
    return entry_of({"architectures": original} if path == ("architectures",) else raw)


def is_same_type(value: Any, original: Any) -> bool:
    """Whether `value` has the JSON type of `original`. An integer counts as a number."""
    if isinstance(original, bool) or isinstance(value, bool):
        return isinstance(original, bool) and isinstance(value, bool)
    if isinstance(original, (int, float)):
        return isinstance(value, (int, float))
    return isinstance(value, type(original))


def every_field(raw: Raw) -> list[tuple[Path, Any]]:
    """Path and value of every field that is stated. A null field counts as not stated."""
    return [(path, value_at(raw, path)) for path in paths(raw) if value_at(raw, path) is not None]


@pytest.mark.parametrize("family", FAMILIES)
@few
@given(st.data())
def test_a_wrong_value_has_no_influence_or_a_meaning_that_can_be_built_or_is_refused(
    family: str, data: st.DataObject
) -> None:
    sample, kinds = data.draw(FAMILIES[family]), data.draw(st.permutations(list(WRONG_VALUES)))
    valid, built = parsed(sample.raw), 0
    for number, (path, original) in enumerate(every_field(sample.raw)):
        for kind in (kinds * 2)[number % len(kinds) :][:VALUES_PER_FIELD]:
            wrong = WRONG_VALUES[kind]
            config = outcome(replaced(sample.raw, path, wrong), path, original)
            if config is REFUSED or config == valid or wrong is None or wrong == {}:
                continue
            assert is_same_type(wrong, original), f"{path}: {wrong!r} was taken for another value than {original!r}"
            if built < BUILDS_PER_CONFIG:
                built += 1
                assert_buildable(
                    entry_of_valid(sample.raw, path, original),
                    config,
                    ("d2t",) if getattr(config, "is_pruned", False) else (),
                )


@pytest.mark.parametrize("family", FAMILIES)
@few
@given(st.data())
def test_a_field_that_is_not_stated_has_the_meaning_that_the_format_gives_it_or_is_refused(
    family: str, data: st.DataObject
) -> None:
    sample, defaults = data.draw(FAMILIES[family]), {**EVERYWHERE, **DEFAULTS[family]}
    raw, valid = sample.raw, parsed(sample.raw)
    for path, original in every_field(raw):
        if not isinstance(path[-1], str):
            continue
        config = outcome(removed(raw, path), path, original)
        assert outcome(replaced(raw, path, None), path, original) == config, f"{path}: null is not absence"
        if config is REFUSED or config == valid:
            continue
        if getattr(config, "sample_from_anchor", None) != getattr(valid, "sample_from_anchor", None):
            assert [choice.name for choice in config.choices if choice.name == "sample_from_anchor"], (
                f"{path}: a guess that nobody is told of"
            )
        name = field_name(path)
        assert name in defaults, f"{path}: silently {original!r} -> another value"
        if defaults[name] is not ANY:
            assert outcome(replaced(raw, path, defaults[name]), path, original) == config, (
                f"{path}: not {defaults[name]!r}"
            )


@pytest.mark.parametrize("family", FAMILIES)
@few
@given(st.data())
def test_a_misspelt_field_is_refused_or_listed_as_unknown_or_had_no_influence(family: str, data: st.DataObject) -> None:
    sample = data.draw(FAMILIES[family])
    raw, valid = sample.raw, parsed(sample.raw)
    for path, original in every_field(raw):
        if isinstance(path[-1], str):
            misspelt, new_path = renamed(raw, path)
            config = outcome(misspelt, path, original)
            assert config is REFUSED or config == valid or dotted(new_path) in config.unknown_fields, (
                f"{path}: unnoticed"
            )
