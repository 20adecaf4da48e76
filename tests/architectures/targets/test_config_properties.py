"""Every valid config of every family, in all its spellings, parses to one record.

The module that is built from it has exactly the parameters of the weight recipes. A draft's config is written as it was
read.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_jax.architectures import dspark_compact
from dspark_jax.architectures.dspark_compact.model import CompactDraft
from dspark_jax.pipelines.speculative.default_drafts import default_drafts
from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.compact.format import to_compact
from dspark_jax.speculators_common.formats.deepspec.gemma4_writer import to_deepspec_gemma4
from dspark_jax.speculators_common.formats.deepspec.writer import to_deepspec
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, LayerMask
from dspark_jax.speculators_common.formats.speculators.writer import to_speculators
from dspark_jax.speculators_common.formats.zlab.writer import to_zlab
from tests.support.config_checks import assert_buildable, entry_of, parsed
from tests.support.config_masks import masked
from tests.support.config_strategies import Sample
from tests.support.draft_strategies import DRAFTS, compact
from tests.support.target_strategies import TARGETS

FAMILIES: dict[str, Any] = {**DRAFTS, **TARGETS}
WRITERS: dict[str, Any] = {
    "speculators dspark": to_speculators,
    "speculators dflash": to_speculators,
    "deepspec qwen3": to_deepspec,
    "deepspec gemma4": to_deepspec_gemma4,
    "zlab dflash": to_zlab,
    "compact": to_compact,
}
# Each example of these tests parses several configs or builds a module, so few examples are enough.
few = settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
# Each example of these tests only parses.
many = settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("family", FAMILIES)
@few
@given(st.data())
def test_all_spellings_of_a_config_parse_to_one_record_and_stay_as_they_are(family: str, data: st.DataObject) -> None:
    sample = data.draw(FAMILIES[family])
    configs = []
    for raw in sample.spellings:
        before = copy.deepcopy(raw)
        configs.append(parsed(raw))
        assert raw == before
        assert configs[-1].unknown_fields == ()
    assert parsed(sample.raw) == configs[0]
    assert all(config == configs[0] for config in configs)


@pytest.mark.parametrize("family", FAMILIES)
@few
@given(st.data())
def test_a_config_can_be_built_and_its_weight_table_is_about_the_module_s_parameters(
    family: str, data: st.DataObject
) -> None:
    sample = data.draw(FAMILIES[family])
    assert_buildable(entry_of(sample.raw), parsed(sample.raw), sample.names)


@pytest.mark.parametrize("family", WRITERS)
@many
@given(st.data())
def test_a_draft_is_written_as_it_was_read(family: str, data: st.DataObject) -> None:
    assert_read_back(parsed(data.draw(DRAFTS[family]).raw), WRITERS[family])


def assert_read_back(config: DraftConfig, write: Any) -> None:
    """Check that a written config is read as the same draft, and is written the same again."""
    written = json.loads(json.dumps(write(config)))
    again = parsed(written)
    assert again == config
    assert (again.choices, again.unknown_fields) == ((), ())
    for name in ("family", "num_target_layers", "target_name", "target_architectures", "stores_tables"):
        assert getattr(again, name) == getattr(config, name), name
    assert default_drafts(again, "none") == default_drafts(config, "none")
    assert json.loads(json.dumps(write(again))) == written


@pytest.mark.parametrize("family", [name for name in WRITERS if name != "compact"])
@many
@given(st.data())
def test_every_window_and_causality_that_is_read_is_written_or_refused(family: str, data: st.DataObject) -> None:
    config = parsed(masked(data.draw, data.draw(DRAFTS[family]).raw))
    assert config.unknown_fields == ()
    if not family.startswith("deepspec") or all(layer == LayerMask() for layer in config.layers):
        assert_read_back(config, WRITERS[family])
        return
    windows = any(layer.window is not None for layer in config.layers)
    with pytest.raises(CheckpointError, match="layer_types: found" if windows else r"causal: found \[True"):
        WRITERS[family](config)


@pytest.mark.parametrize("write", [to_speculators, to_deepspec, to_deepspec_gemma4, to_zlab])
@many
@given(st.data())
def test_a_draft_of_any_family_is_written_as_the_same_draft_or_refused(write: Any, data: st.DataObject) -> None:
    family = data.draw(st.sampled_from([name for name in WRITERS if name != "compact"]))
    config = parsed(masked(data.draw, data.draw(DRAFTS[family]).raw))
    changes = {"stores_tables": False, "draft_vocab_size": config.vocab_size, "num_target_layers": 7}
    config = dataclasses.replace(config, **{name: x for name, x in changes.items() if data.draw(st.booleans())})
    try:
        written = write(config)
    except CheckpointError:
        return
    again = parsed(json.loads(json.dumps(written)))
    assert again == config
    assert (again.choices, again.unknown_fields, again.num_target_layers) == ((), (), config.num_target_layers)


@few
@given(compact(), st.integers(0, 2**32 - 1))
def test_a_compact_draft_is_loaded_with_the_bits_that_were_saved(sample: Sample, seed: int) -> None:
    config = parsed(sample.raw)
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: CompactDraft(config)))
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), abstract)
    with tempfile.TemporaryDirectory() as folder:
        loaded = dspark_compact.load(dspark_compact.save(nnx.merge(graphdef, state), Path(folder) / "draft"))
    assert loaded.config == config
    saved = dict(nnx.to_flat_state(state))
    found = dict(nnx.to_flat_state(nnx.state(loaded)))
    assert saved.keys() == found.keys()
    for path, variable in saved.items():
        assert np.asarray(found[path].get_value()).tobytes() == np.asarray(variable.get_value()).tobytes(), path
