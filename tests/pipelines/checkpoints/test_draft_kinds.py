"""Which draft a directory holds: no single string decides, contradictions and drafts that are not supported are refused
by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax.architectures.registry import known_names, retrieve
from dspark_jax.pipelines.checkpoints.checkpoint import open_checkpoint
from dspark_jax.pipelines.checkpoints.loading import parse_checkpoint
from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.deepspec.gemma4_reader import from_deepspec_gemma4
from dspark_jax.speculators_common.formats.deepspec.reader import from_deepspec
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators
from dspark_jax.speculators_common.formats.zlab.reader import from_zlab
from tests.support import tiny_families

DSPARK = tiny_families.speculators_dspark_config()
DFLASH = tiny_families.speculators_dflash_config()
ZLAB = tiny_families.zlab_config()
DEEPSPEC = tiny_families.deepspec_dflash_config()
COMPACT_FILE = Path(__file__).parents[2] / "data" / "H_compact" / "markov" / "dspark.json"


def named(*names: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": list(names), **fields}


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return tiny_families.without(raw, *names)


def kind_of(folder: Path, raw: dict[str, Any] | None, *, has_dspark_json: bool = False) -> tuple[str, str]:
    """Entry and family of a directory with this `config.json`; its tensors are not looked at."""
    if raw is not None:
        (folder / "config.json").write_text(json.dumps(raw))
    if has_dspark_json:
        (folder / "dspark.json").write_bytes(COMPACT_FILE.read_bytes())
    save_file({"norm.weight": np.ones(2, np.float32)}, folder / "model.safetensors")
    entry, config = parse_checkpoint(open_checkpoint(folder), "draft")
    return entry.family, config.family


@pytest.mark.parametrize(
    ("raw", "entry", "family"),
    [
        (DSPARK, "speculators_dspark", "speculators_dspark"),
        (DSPARK | named("DSparkSpeculator"), "speculators_dspark", "speculators_dspark"),
        (without(DSPARK, "architectures"), "speculators_dspark", "speculators_dspark"),
        (DFLASH, "dflash", "speculators_dflash"),
        (DFLASH | named("DFlashSpeculator"), "dflash", "speculators_dflash"),
        (without(DFLASH, "architectures"), "dflash", "speculators_dflash"),
        (DFLASH | {"architectures": None, "model_type": "qwen3"}, "dflash", "speculators_dflash"),
        (ZLAB, "dflash", "zlab_dflash"),
        (DEEPSPEC, "deepspec_qwen3", "deepspec_qwen3"),
        (tiny_families.gemma4_config(), "deepspec_gemma4", "deepspec_gemma4"),
    ],
)
def test_the_type_decides_and_then_the_name(raw: dict[str, Any], entry: str, family: str, tmp_path: Path) -> None:
    assert kind_of(tmp_path, raw) == (entry, family)


@pytest.mark.parametrize("label", [named("DsparkDrafter"), named("DSparkDraftModel"), {}, None])
def test_a_dspark_json_decides_before_everything_else(label: dict[str, Any] | None, tmp_path: Path) -> None:
    assert kind_of(tmp_path, label, has_dspark_json=True) == ("compact", "compact")


KNOWN = (
    "DFlashDraftModel, DFlashSpeculator, DSparkDraftModel, DSparkSpeculator, DsparkDrafter, Gemma3ForCausalLM, "
    "Gemma3ForConditionalGeneration, Gemma4DSparkModel"
)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (named("SomethingElse"), "architectures: unknown architecture 'SomethingElse'; known: " + KNOWN),
        (DSPARK | named("SomethingElse"), "architectures: unknown architecture 'SomethingElse'; known: " + KNOWN),
        (named("DSparkDraftModl"), "unknown architecture 'DSparkDraftModl' (did you mean DSparkDraftModel?)"),
        ({}, "architectures: missing, allowed a list of exactly one architecture name"),
        (
            without(ZLAB, "architectures") | {"model_type": "qwen3"},
            "architectures: missing, allowed a list of exactly one architecture name",
        ),
        (
            without(DSPARK, "architectures") | {"speculators_model_type": "eagle3"},
            "architectures: missing, allowed a list",
        ),
        (named(), "architectures: found [], allowed a list of exactly one architecture name"),
        (named("A", "B"), "architectures: found ['A', 'B'], allowed a list of exactly one architecture name"),
        (
            {"architectures": "DSparkDraftModel"},
            "architectures: found 'DSparkDraftModel', allowed a list of exactly one",
        ),
        (
            without(DSPARK, "speculators_model_type"),
            "speculators_model_type: missing, allowed dspark beside the architecture 'DSparkDraftModel'",
        ),
        (
            without(DFLASH, "speculators_model_type") | named("DFlashSpeculator"),
            "speculators_model_type: missing, allowed dflash beside the architecture 'DFlashSpeculator'",
        ),
        (
            without(DFLASH, "speculators_model_type"),
            "speculators_model_type: missing, allowed dflash, as speculators_config or aux_hidden_state_layer_ids is "
            "stated, or neither of them in a z-lab draft",
        ),
        (
            without(DFLASH, "speculators_model_type", "aux_hidden_state_layer_ids") | {"speculators_config": {}},
            "speculators_model_type: missing, allowed dflash, as speculators_config or aux_hidden_state_layer_ids is",
        ),
        (
            ZLAB | {"dflash_config": tiny_families.ZLAB_BLOCK | {"aux_hidden_state_layer_ids": [1, 2]}},
            "speculators_model_type: missing, allowed dflash, as speculators_config or aux_hidden_state_layer_ids is",
        ),
        (
            DSPARK | {"speculators_model_type": "eagle3"},
            "speculators_model_type: found 'eagle3', allowed dspark, dflash",
        ),
        (
            DSPARK | {"speculators_model_type": "dflash"},
            "architectures: found 'DSparkDraftModel', allowed DFlashDraftModel or DFlashSpeculator beside "
            "speculators_model_type 'dflash'",
        ),
        (
            DFLASH | {"speculators_model_type": "dspark"},
            "architectures: found 'DFlashDraftModel', allowed DSparkDraftModel or DSparkSpeculator beside "
            "speculators_model_type 'dspark'",
        ),
        (
            DSPARK | named("Qwen3DSparkModel"),
            "speculators_model_type: found 'dspark', allowed no such field in a draft that is read as "
            "'Qwen3DSparkModel'; one of the speculators library is DSparkDraftModel, DSparkSpeculator, DFlash",
        ),
        (
            DSPARK | named("DSparkDeepseekV4Model"),
            "unsupported architecture 'DSparkDeepseekV4Model': DeepSeek-V4 drafts are not supported; known: " + KNOWN,
        ),
        (named("DFlash2DraftModel"), "unsupported architecture 'DFlash2DraftModel': DFlash2 drafts are not supported"),
        (named("LlamaForCausalLMEagle3"), "unsupported architecture 'LlamaForCausalLMEagle3': Eagle drafts are not"),
        (
            DSPARK | {"model_type": "deepseek_v4"},
            "model_type: found 'deepseek_v4', allowed the model type of a dense draft; DeepSeek-V4 drafts are not "
            "supported",
        ),
        (
            DSPARK
            | {"transformer_layer_config": DSPARK["transformer_layer_config"] | {"model_type": "deepseek_v4_dspark"}},
            "transformer_layer_config.model_type: found 'deepseek_v4_dspark', allowed the model type of a dense draft",
        ),
        (ZLAB | {"model_type": "deepseek_v4"}, "model_type: found 'deepseek_v4', allowed the model type of a dense"),
        (
            DEEPSPEC | {"model_type": "deepseek_v4"},
            "model_type: found 'deepseek_v4', allowed the model type of a dense",
        ),
    ],
)
def test_unknown_unsupported_and_contradicting_names_are_refused(
    raw: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        kind_of(tmp_path, raw)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


READERS = {
    from_speculators: (DSPARK, "DSparkDraftModel, DSparkSpeculator, DFlashDraftModel, DFlashSpeculator"),
    from_deepspec: (DEEPSPEC, "Qwen3DSparkModel"),
    from_deepspec_gemma4: (tiny_families.gemma4_config(), "Gemma4DSparkModel"),
    from_zlab: (ZLAB, "DFlashDraftModel"),
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (named("SomethingElse"), "architectures: found 'SomethingElse', allowed {names}"),
        (named("Qwen3ForCausalLM"), "architectures: found 'Qwen3ForCausalLM', allowed {names}"),
        (named(), "architectures: found [], allowed a list of exactly one name"),
        (named("A", "B"), "architectures: found ['A', 'B'], allowed a list of exactly one name"),
        ({"architectures": "A"}, "architectures: found 'A', allowed a list of strings"),
        ({}, "architectures: missing, allowed a list of strings"),
    ],
)
def test_a_reader_takes_the_names_of_its_format_alone(read: Any, names: dict[str, Any], expected: str) -> None:
    raw, allowed = READERS[read]
    with pytest.raises(CheckpointError) as caught:
        read(without(raw, "architectures", "speculators_model_type") | names, "draft/config.json")
    assert str(caught.value) == f"draft/config.json: {expected.format(names=allowed)}"


def test_a_name_has_one_entry_whichever_format_the_file_is_of() -> None:
    drafts = [name for name in known_names() if retrieve(name).kind == "draft"]
    assert {name: retrieve(name).family for name in drafts} == {
        "DFlashDraftModel": "dflash",
        "DFlashSpeculator": "dflash",
        "DSparkDraftModel": "speculators_dspark",
        "DSparkSpeculator": "speculators_dspark",
        "DsparkDrafter": "compact",
        "Gemma4DSparkModel": "deepspec_gemma4",
        "Qwen3DSparkModel": "deepspec_qwen3",
    }
