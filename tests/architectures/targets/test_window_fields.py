"""Window fields of a target that contradict each other: read as the format does, which is a choice, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.architectures.registry import retrieve
from dspark_jax.speculators_common.errors import CheckpointError

DATA = Path(__file__).parents[2] / "data" / "E_targets"
QWEN3, MOE, LLAMA, GEMMA3, GEMMA4 = (
    "qwen3_tied",
    "qwen3_moe",
    "llama_untied_llama3rope",
    "gemma3_text",
    "gemma4_text_12b_like",
)
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT = "the file does not say; default of the format"
UNUSED = {"sliding_window": ("not used", "the file says 8, and no layer slides")}


def parsed(folder: str, **changes: Any) -> Any:
    raw = json.loads((DATA / folder / "config.json").read_text()) | changes
    raw = {name: value for name, value in raw.items() if value is not ...}
    return retrieve(raw["architectures"][0]).parse_config(raw, "config.json", None)


def windows(config: Any) -> list[int | None]:
    return [layer.window for layer in config.layers] if hasattr(config, "layers") else list(config.layer_windows)


def decided(value: str, others: str) -> dict[str, tuple[str, str]]:
    return {"layer_types": (value, f"the file says {others} too; layer_types decides")}


@pytest.mark.parametrize(
    ("folder", "changes", "expected_windows", "expected"),
    [
        (QWEN3, {}, [None] * 6, {}),
        (QWEN3, {"sliding_window": 8}, [None] * 6, {}),  # use_sliding_window is false
        (QWEN3, {"sliding_window": 8, "use_sliding_window": ...}, [None] * 6, UNUSED),
        (QWEN3, {"sliding_window": 8, "use_sliding_window": ..., "layer_types": ...}, [None] * 6, UNUSED),
        (
            QWEN3,
            {"sliding_window": 8, "use_sliding_window": ..., "layer_types": [FULL] * 5 + [SLIDING]},
            [None] * 5 + [8],
            {"use_sliding_window": ("true", "the file does not say; its layer_types has sliding layers")},
        ),
        (
            QWEN3,
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4},
            [None] * 6,
            decided("full_attention in every layer", "use_sliding_window true") | UNUSED,
        ),
        (
            QWEN3,
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ..., "max_window_layers": ...},
            [None] * 6,
            {"max_window_layers": ("28", DEFAULT)} | UNUSED,
        ),
        (MOE, {"sliding_window": 8}, [None] * 6, {}),
        (MOE, {"sliding_window": 8, "use_sliding_window": ...}, [None] * 6, UNUSED),
        (LLAMA, {"sliding_window": 8, "layer_types": [FULL] * 6}, [None] * 6, UNUSED),
        (LLAMA, {"sliding_window": 8, "use_sliding_window": False}, [None] * 6, {}),
        (GEMMA3, {"_sliding_window_pattern": 3, "use_sliding_window": True}, [8, 8, None] * 2, {}),
        (
            GEMMA3,
            {"_sliding_window_pattern": 6},
            [8, 8, None] * 2,
            {},
        ),  # transformers writes it whatever the layers are
        (GEMMA3, {"sliding_window_pattern": 3}, [8, 8, None] * 2, {}),
        (
            GEMMA3,
            {"_sliding_window_pattern": 6, "sliding_window_pattern": 2},
            [8, 8, None] * 2,
            decided("sliding_attention in 4 of 6 layers", "sliding_window_pattern 2"),
        ),
        (GEMMA3, {"layer_types": [FULL] * 6, "_sliding_window_pattern": ...}, [None] * 6, UNUSED),
        (GEMMA4, {"layer_types": [FULL] * 6, "use_sliding_window": False}, [None] * 6, UNUSED),
    ],
)
def test_what_the_format_decides_is_a_choice_where_the_file_says_something_else(
    folder: str,
    changes: dict[str, Any],
    expected_windows: list[int | None],
    expected: dict[str, tuple[str, str]],
) -> None:
    config = parsed(folder, **changes)
    assert windows(config) == expected_windows
    found = {choice.name: (choice.value, choice.reason) for choice in config.choices}
    assert found == expected
    assert config.unknown_fields == ()


@pytest.mark.parametrize(
    ("folder", "changes", "expected"),
    [
        (
            QWEN3,
            {"sliding_window": 8, "layer_types": [FULL] * 5 + [SLIDING]},
            "use_sliding_window: found False, allowed true, as layer_types has sliding layers",
        ),
        (QWEN3, {"sliding_window_pattern": 6}, "sliding_window_pattern: found 6, allowed no such field"),
        (MOE, {"sliding_window": 8, "layer_types": [SLIDING] * 6}, "layer_types: found"),
        (
            LLAMA,
            {"use_sliding_window": True, "layer_types": [FULL] * 6},
            "use_sliding_window: found True, allowed false: the family has no windows",
        ),
        (
            LLAMA,
            {"use_sliding_window": True, "sliding_window": 8},
            "use_sliding_window: found True, allowed false: the family has no windows",
        ),
        (
            GEMMA3,
            {"use_sliding_window": False},
            "use_sliding_window: found False, allowed true, as there is sliding_attention in 4 of 6 layers",
        ),
        (
            GEMMA4,
            {"use_sliding_window": False},
            "use_sliding_window: found False, allowed true, as there is sliding_attention in 3 of 6 layers",
        ),
        (
            GEMMA4,
            {"use_sliding_window": True, "layer_types": [FULL] * 6},
            "use_sliding_window: found True, allowed false, as there is full_attention in every layer",
        ),
        (
            GEMMA3,
            {"layer_types": ..., "sliding_window_pattern": 2, "_sliding_window_pattern": 3},
            "sliding_window_pattern: found 2, but _sliding_window_pattern is 3, allowed the same value at both places",
        ),
    ],
)
def test_a_contradiction_without_a_meaning_is_refused_by_name(
    folder: str, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        parsed(folder, **changes)
    assert str(caught.value).startswith(f"config.json: {expected}")
