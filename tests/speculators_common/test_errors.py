"""Error lines are never too long, and they name and count every kind of fault, whatever a file holds."""

from __future__ import annotations

import pytest

from dspark_jax.speculators_common.errors import CheckpointError, collected_error, field_error

LIMIT = 2000


@pytest.mark.parametrize(("length", "count"), [(10, 1), (10, 6), (10, 40_000), (1000, 6), (1_700_000, 3)])
def test_a_line_is_bounded_and_every_kind_of_fault_is_named_and_counted(length: int, count: int) -> None:
    kinds = {
        "missing": [f"tensor m{index}{'x' * length}: missing" for index in range(count)],
        "unexpected": ["tensor extra: unexpected"],
        "of another shape": [f"tensor s{index}: found shape" for index in range(count)],
        "of another dtype": [],
    }
    error = collected_error("folder/model.safetensors", kinds)
    message = str(error)
    assert len(message) <= LIMIT
    assert "\n" not in message
    assert message.startswith("folder/model.safetensors: tensor m0")
    assert "tensor extra: unexpected" in message
    assert "tensor s0: found shape" in message
    assert (f"and {count - 3} more missing" in message) == (count > 3)
    assert (f"and {count - 3} more of another shape" in message) == (count > 3)
    assert error.file == "folder/model.safetensors"


def test_a_plain_list_is_one_kind() -> None:
    assert str(collected_error("f", ["a", "b"])) == "f: a; b"
    assert str(collected_error("f", [str(index) for index in range(8)])) == "f: 0; 1; 2; 3; 4; and 3 more"


@pytest.mark.parametrize(
    "error",
    [
        field_error("f" * 5000, "field", "x" * 10**6, "y" * 10**6),
        CheckpointError("z" * 10**6),
        collected_error("f" * 5000, {"missing": ["m" * 5000] * 9, "unexpected": ["u" * 5000] * 9}),
    ],
)
def test_no_line_is_longer_than_the_limit(error: CheckpointError) -> None:
    assert len(str(error)) <= LIMIT
