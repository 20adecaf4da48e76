"""What a writer of configs wrote, read again; and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dspark_jax.speculators_common.errors import CheckpointError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, LayerMask

FULL, SLIDING, NON_CAUSAL, CAUSAL_FULL = (
    LayerMask(),
    LayerMask(window=6, causal=True),
    LayerMask(window=6, causal=False),
    LayerMask(causal=True),
)


def through_json(fields: dict[str, Any]) -> dict[str, Any]:
    """What is left of the fields in a file."""
    return json.loads(json.dumps(fields))


def assert_read_back(config: DraftConfig, fields: dict[str, Any], read: Any) -> None:
    """The fields are a file of this draft: an equal record, no guess, no unknown field, and the same target."""
    found = read(through_json(fields), "written/config.json")
    assert found == config
    assert (found.choices, found.unknown_fields) == ((), ())
    assert (found.num_target_layers, found.target_name, found.target_architectures) == (
        config.num_target_layers,
        config.target_name,
        config.target_architectures,
    )


def refusal(write: Any, config: DraftConfig) -> str:
    with pytest.raises(CheckpointError) as caught:
        write(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)
