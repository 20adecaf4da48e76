"""A draft family that nobody knows becomes one by its folders alone, one of architectures and one of formats. It is
opened, described, loaded, run and saved through the public path.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dspark_jax
from dspark_jax import architectures
from dspark_jax.architectures.module_saving import save_draft
from dspark_jax.architectures.registry import built_in, implied_name, known_names, own_config_files, retrieve
from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint
from dspark_jax.pipelines.checkpoints.loading import load_draft, load_target
from dspark_jax.speculators_common import formats
from dspark_jax.speculators_common.errors import CheckpointError
from tests.support import tiny_families
from tests.support.draft_conversions import Capture, assert_same_bits
from tests.support.text_pair import dspark
from tests.support.tiny_checkpoints import random_tensors

FORMAT = '''
"""A format of its own: another file, other names, a count of slots that leaves the anchor out."""

import dataclasses

from dspark_jax.speculators_common.formats.deepspec.reader import from_deepspec
from dspark_jax.speculators_common.formats.deepspec.writer import to_deepspec
from dspark_jax.speculators_common.formats.fields import Fields

ARCHITECTURE, FAMILY, FILE = "AcmeDraftModel", "acme", {file!r}


def from_acme(raw, file, overrides=None):
    top = Fields(raw, file)
    masks = top.integer("acme_masks", minimum=0)
    network = dict(raw["network"], architectures=["Qwen3DSparkModel"], block_size=masks + 1)
    config = from_deepspec(network, file, overrides)
    return dataclasses.replace(config, architecture=ARCHITECTURE, family=FAMILY)


def to_acme(config, *, dtype=None):
    network = to_deepspec(config, dtype=dtype)
    masks = network.pop("block_size") - 1
    del network["architectures"]
    return {{FILE: {{"architectures": [ARCHITECTURE], "acme_type": "v1", "acme_masks": masks, "network": network}}}}
'''
ARCH = """
from dspark_jax.architectures.acme_draft.model import AcmeDraft
from dspark_jax.architectures.drafting.block_weights import block_draft_recipes
from dspark_jax.architectures.registry import SupportedArchitecture
from dspark_jax.speculators_common.formats.acme.format import ARCHITECTURE, FAMILY, FILE, from_acme, to_acme

ARCHITECTURES = (
    SupportedArchitecture(
        name=ARCHITECTURE,
        kind="draft",
        family=FAMILY,
        type_field="acme_type",
        model_types={"v1": ARCHITECTURE},
        draft_fields=("acme_type", "acme_masks"),
        config_file=FILE,
        parse_config=from_acme,
        build=AcmeDraft,
        recipes=block_draft_recipes,
        write_config=to_acme,
    ),
)
"""
MODEL = '''
from dspark_jax.architectures.drafting.block_draft import BlockDraft


class AcmeDraft(BlockDraft):
    """A network of Qwen3 layers."""
'''
TABLES = ("embed_tokens.weight", "lm_head.weight")


def _forget() -> None:
    built_in.cache_clear()
    for name in [name for name in sys.modules if "architectures.acme_draft" in name or "formats.acme" in name]:
        del sys.modules[name]
    for package, folder in ((architectures, "acme_draft"), (formats, "acme")):
        if hasattr(package, folder):
            delattr(package, folder)


@pytest.fixture(params=["config.json", "acme.json"])
def family(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The two folders beside those that are there; the name of the file that describes such a draft."""
    file: str = request.param
    for package, folder, modules in (
        (architectures, "acme_draft", {"arch": ARCH, "model": MODEL}),
        (formats, "acme", {"format": FORMAT.format(file=file)}),
    ):
        place = tmp_path / package.__name__ / folder
        place.mkdir(parents=True)
        (place / "__init__.py").touch()
        for name, source in modules.items():
            (place / f"{name}.py").write_text(source)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(place.parent)])
    _forget()
    yield file
    _forget()


def _written(folder: Path, file: str, **fields: object) -> Path:
    """A draft of this family for the target of `tiny_families`."""
    network = tiny_families.deepspec_dflash_config()
    folder.mkdir()
    save_file(random_tensors(network, 5, *TABLES), folder / "model.safetensors")
    masks = network.pop("block_size") - 1
    del network["architectures"]
    raw = {"architectures": ["AcmeDraftModel"], "acme_type": "v1", "acme_masks": masks, "network": network, **fields}
    (folder / file).write_text(json.dumps(raw))
    return folder


@pytest.mark.usefixtures("quick_compilation")
def test_folders_alone_make_a_family(family: str, tmp_path: Path, capsys: Capture) -> None:
    target, draft = tiny_families.tiny_target().write(tmp_path / "target"), _written(tmp_path / "draft", family)
    described = dspark(capsys, "info", "--json", "--target", target, "--draft", draft)
    assert described.status == 0, described.err
    content = json.loads(described.out)
    assert content["pair"] == {"fits": True, "reason": None}
    assert {name: content["checkpoints"][1][name] for name in ("architecture", "kind", "family", "unknown_fields")} == {
        "architecture": "AcmeDraftModel",
        "kind": "draft",
        "family": "acme",
        "unknown_fields": [],
    }
    pipeline = dspark_jax.load(target, draft, dtype="float32", num_speculative_tokens=2)
    plain = dspark_jax.load(target, dtype="float32")
    prompt = [3, 1, 4]
    [result], [alone] = (p.generate(prompt, max_new_tokens=6, stop_ids=()) for p in (pipeline, plain))
    assert result.output_ids == alone.output_ids
    loaded = load_draft(draft, load_target(target, np.float32), np.float32)
    save_draft(loaded.module, tmp_path / "again", stored=loaded.checkpoint.tensors)
    assert (tmp_path / "again" / family).is_file()
    assert load_draft(tmp_path / "again", load_target(target, np.float32), np.float32).config == loaded.config
    assert_same_bits(*(load_file(folder / "model.safetensors") for folder in (draft, tmp_path / "again")))


def test_a_name_may_be_left_out_and_errors_know_the_family(family: str, tmp_path: Path) -> None:
    draft = _written(tmp_path / "draft", family, architectures=None, model_type="qwen3")
    assert open_checkpoint(draft).architecture == "AcmeDraftModel"
    assert implied_name({"acme_masks": 3, "model_type": "qwen3"}) is None, "a draft, not the target of its model_type"
    assert implied_name({"model_type": "qwen3"}) == "Qwen3ForCausalLM"
    assert ("acme.json" in own_config_files()) is (family == "acme.json")
    with pytest.raises(CheckpointError, match=r"did you mean AcmeDraftModel\?"):
        retrieve("AcmeDraftModl")


def test_it_is_gone_with_its_folders() -> None:
    assert "AcmeDraftModel" not in known_names()
    assert dict(own_config_files()) == {"dspark.json": "DsparkDrafter"}
