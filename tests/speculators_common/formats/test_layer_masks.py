"""Every field by which writers state the windows and the causality of draft layers is read or refused."""

from __future__ import annotations

import pytest

from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.draft_config import LayerMask
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators
from dspark_jax.speculators_common.formats.speculators.writer import to_speculators
from tests.support.changed_drafts import DRAFTS, FULL, PLAIN, SLIDING, speculators, zlab


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("section", [None, "dflash_config", "dspark_config"])
@pytest.mark.parametrize("causal", [None, False, True])
def test_use_swa_puts_a_window_on_every_layer_of_a_draft_without_sliding_layers(draft, section, causal):
    fields = {"use_swa": True, "swa_window_size": 512} | ({} if causal is None else {"causal": causal})
    parse = DRAFTS[draft]
    count = parse().num_hidden_layers
    stated = fields if section is None else {section: fields}
    if draft == "zlab" and section == "dspark_config":  # no section of the format
        with pytest.raises(CheckpointError, match=r"dspark_config\.use_swa: found True, allowed no such field"):
            parse(**stated)
        return
    config = parse(layer_types=[FULL] * count, **stated)
    assert config.layers == (LayerMask(window=512, causal=bool(causal)),) * count
    assert config.unknown_fields == parse().unknown_fields


@pytest.mark.parametrize("parse", [speculators, zlab])
def test_the_window_of_use_swa_is_its_own_or_else_the_sliding_window(parse):
    window = [layer.window for layer in parse(use_swa=True, sliding_window=64).layers]
    assert window == [64, 64]
    both = parse(use_swa=True, sliding_window=64, dflash_config={"swa_window_size": 32})
    assert [layer.window for layer in both.layers] == [32, 32]


@pytest.mark.parametrize("parse", [speculators, zlab])
def test_use_swa_beside_sliding_layers_says_what_layer_types_says(parse):
    config = parse(layer_types=[SLIDING, FULL], sliding_window=64, use_swa=True, swa_window_size=64)
    assert config.layers == (LayerMask(window=64, causal=True), PLAIN)
    assert parse(layer_types=[SLIDING, FULL], use_swa=True, swa_window_size=64) == config


@pytest.mark.parametrize("parse", [speculators, zlab])
@pytest.mark.parametrize("location", ["top", "section"])
@pytest.mark.parametrize("name", ["causal", "is_causal"])
def test_causal_overrides_every_layer_wherever_it_lies(parse, location, name):
    for causal in (True, False):
        stated = {name: causal} if location == "top" else {"dflash_config": {name: causal}}
        config = parse(layer_types=[SLIDING, FULL], sliding_window=64, **stated)
        assert [layer.causal for layer in config.layers] == [causal, causal]
        assert config.unknown_fields == parse().unknown_fields


def test_sliding_layers_may_be_bidirectional_in_every_place_that_says_so():
    for stated in ({"sliding_window_non_causal": True}, {"dspark_config": {"sliding_window_non_causal": True}}):
        config = speculators(
            layer_types=[SLIDING, FULL], sliding_window=64, **({"sliding_window_non_causal": ...} | stated)
        )
        assert config.layers == (LayerMask(window=64, causal=False), PLAIN)


@pytest.mark.parametrize("parse", [speculators, zlab])
def test_files_without_layer_types_say_from_which_layer_on_windows_begin(parse):
    fields = {"layer_types": ..., "use_sliding_window": True, "sliding_window": 64}
    assert parse(**fields, max_window_layers=1).layers == (PLAIN, LayerMask(window=64, causal=True))
    assert parse(**fields, max_window_layers=2).layers == parse(**fields).layers == (PLAIN, PLAIN)
    assert parse(**fields | {"use_sliding_window": False}, max_window_layers=0).layers == (PLAIN, PLAIN)


def test_a_window_on_every_layer_is_written_as_sliding_layers():
    config = speculators(use_swa=True, swa_window_size=32)
    assert from_speculators(to_speculators(config), "written") == config


@pytest.mark.parametrize("parse", [speculators, zlab])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"swa_window_size": 32}, "swa_window_size: found 32, allowed use_swa or a sliding layer beside it"),
        ({"use_swa": True}, "swa_window_size: missing, allowed an integer >= 1, here or as sliding_window"),
        ({"use_swa": True, "swa_window_size": 0}, "swa_window_size: found 0, allowed an integer >= 1"),
        ({"use_swa": "yes"}, "use_swa: found 'yes', allowed true or false"),
        ({"causal": True, "is_causal": False}, "causal: found True, but is_causal is False"),
        ({"causal": True, "dflash_config": {"causal": False}}, "causal: found True, but dflash_config.causal is False"),
        (
            {"layer_types": [SLIDING] * 2, "sliding_window": 8, "swa_window_size": 9},
            "sliding_window: found 8, but swa_window_size is 9",
        ),
    ],
)
def test_combinations_without_a_meaning_are_refused_by_name(parse, changes, expected):
    with pytest.raises(CheckpointError) as caught:
        parse(**changes)
    assert expected in str(caught.value)
