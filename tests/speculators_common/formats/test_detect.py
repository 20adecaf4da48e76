"""Which family a config belongs to: no single string decides, contradictions and unsupported families are refused by
name.
"""

from __future__ import annotations

import pytest

from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.detect import draft_family

DSPARK = {"architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark"}
DFLASH = {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash"}


@pytest.mark.parametrize(
    ("raw", "options", "family"),
    [
        (DSPARK, {}, "speculators_dspark"),
        (DSPARK | {"architectures": ["DSparkSpeculator"]}, {}, "speculators_dspark"),
        (DFLASH, {}, "speculators_dflash"),
        (DFLASH | {"architectures": ["DFlashSpeculator"]}, {}, "speculators_dflash"),
        ({"architectures": ["DFlashDraftModel"]}, {}, "zlab_dflash"),
        ({"architectures": ["Qwen3DSparkModel"]}, {}, "deepspec_qwen3"),
        ({"architectures": ["Gemma4DSparkModel"]}, {}, "deepspec_gemma4"),
        ({"architectures": ["DsparkDrafter"]}, {}, "compact"),
        (DSPARK, {"has_dspark_json": True}, "compact"),
        ({}, {"has_dspark_json": True}, "compact"),
    ],
)
def test_the_family_is_decided_by_side_file_then_type_then_architecture(raw, options, family):
    assert draft_family(raw, "config.json", **options) == family


KNOWN = (
    "DFlashDraftModel, DFlashSpeculator, DSparkDraftModel, DSparkSpeculator, DsparkDrafter, Gemma4DSparkModel, "
    "Qwen3DSparkModel"
)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"architectures": ["SomethingElse"]}, f"architectures: found 'SomethingElse', allowed {KNOWN}"),
        (DSPARK | {"architectures": ["SomethingElse"]}, f"architectures: found 'SomethingElse', allowed {KNOWN}"),
        ({"architectures": ["DSparkDraftModl"]}, f"allowed {KNOWN} (did you mean DSparkDraftModel?)"),
        ({}, "architectures: missing, allowed a list of strings"),
        ({"architectures": []}, "architectures: found [], allowed a list of exactly one name"),
        ({"architectures": ["A", "B"]}, "architectures: found ['A', 'B'], allowed a list of exactly one name"),
        ({"architectures": "DSparkDraftModel"}, "architectures: found 'DSparkDraftModel', allowed a list of strings"),
        (
            {"architectures": ["DSparkDraftModel"]},
            "speculators_model_type: missing, allowed dspark or dflash beside the architecture 'DSparkDraftModel'",
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
            DSPARK | {"architectures": ["Qwen3DSparkModel"]},
            "architectures: found 'Qwen3DSparkModel', allowed DSparkDraftModel or DSparkSpeculator beside "
            "speculators_model_type 'dspark'",
        ),
        (
            {"architectures": ["DSparkDeepseekV4Model"]},
            f"architectures: found 'DSparkDeepseekV4Model', allowed {KNOWN}; DeepSeek-V4 drafts are not supported",
        ),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2 drafts are not supported"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "Eagle drafts are not supported"),
        (
            DSPARK | {"model_type": "deepseek_v4"},
            "model_type: found 'deepseek_v4', allowed the model type of a dense draft; DeepSeek-V4 drafts "
            "('DSparkDraftModel') are not supported",
        ),
        (
            DSPARK | {"transformer_layer_config": {"model_type": "deepseek_v4"}},
            "transformer_layer_config.model_type: found 'deepseek_v4'",
        ),
    ],
)
def test_unknown_unsupported_and_contradicting_names_are_refused(raw, expected):
    with pytest.raises(CheckpointError) as caught:
        draft_family(raw, "config.json")
    assert str(caught.value).startswith("config.json: ")
    assert expected in str(caught.value)
