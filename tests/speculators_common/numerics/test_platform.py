"""A `Platform` can be compared and hashed, and is made from its name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.numerics.platform import Platform, default_platform

NAMES = ("cpu", "tpu", "gpu")


def test_platforms_are_values() -> None:
    assert len({Platform.of(name) for name in (*NAMES, *NAMES)}) == 3
    assert [Platform.of(name).name for name in NAMES] == list(NAMES)


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(RequestError, match="platform: found 'vpu', allowed cpu, tpu, gpu") as caught:
        Platform.of("vpu")
    assert (caught.value.field, caught.value.found) == ("platform", "vpu")


@pytest.mark.parametrize(
    ("backend", "name"), [("cpu", "cpu"), ("tpu", "tpu"), ("gpu", "gpu"), ("cuda", "gpu"), ("rocm", "gpu")]
)
def test_the_default_is_what_jax_compiles_for(monkeypatch: pytest.MonkeyPatch, backend: str, name: str) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert default_platform() == Platform.of(name)


@pytest.mark.parametrize("name", NAMES)
def test_only_bfloat16_rows_on_a_cpu_are_stored_as_bits(name: str) -> None:
    platform = Platform.of(name)
    assert platform.row_dtype(jnp.float32) == jnp.float32
    assert platform.row_dtype(jnp.int8) == jnp.int8
    assert platform.row_dtype(jnp.bfloat16) == (jnp.uint16 if name == "cpu" else jnp.bfloat16)
