"""The test run is as strict as `conftest.py` says: a setting that silently stops working would weaken every
other test.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jax._src import compiler
from jaxtyping import Array, Float, Int

from dspark_jax.speculators_common.errors import field_error
from dspark_jax.speculators_common.formats.draft_config import LayerMask
from tests.support.compilation import ordinary_compilation, quick_compilation, quick_options
from tests.support.hlo_text import instructions


@jaxtyping.jaxtyped(typechecker=beartype.beartype)
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
    values: Float[Array, "P page"]
    lengths: Int[Array, "P"]
    page_size: int = dataclasses.field(metadata={"static": True})


def _pages(**changes: object) -> Pages:
    fields = {"values": jnp.ones((3, 2)), "lengths": jnp.zeros(3, jnp.int32), "page_size": 2, **changes}
    return Pages(**fields)  # type: ignore[arg-type]


@pytest.fixture
def annotations_are_checked(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--annotation-checks"):
        pytest.skip("annotations are checked with --annotation-checks only")


@pytest.mark.usefixtures("annotations_are_checked")
def test_wrong_argument_types_are_refused_in_the_package() -> None:
    field_error(Path("config.json"), "block_size", 0, "at least 2")
    with pytest.raises(jaxtyping.TypeCheckError, match="file"):
        field_error(3, "block_size", 0, "at least 2")  # type: ignore[arg-type]


@pytest.mark.usefixtures("annotations_are_checked")
def test_wrong_field_types_are_refused_in_the_package() -> None:
    assert LayerMask(window=4).window == 4
    with pytest.raises(jaxtyping.TypeCheckError, match="window"):
        LayerMask(window="4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes", [{"values": jnp.ones(3)}, {"lengths": jnp.zeros(4, jnp.int32)}, {"values": 1.0}, {"page_size": 2.0}]
)
def test_a_state_that_we_construct_wrongly_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match=next(iter(changes))):
        _pages(**changes)


@pytest.mark.usefixtures("annotations_are_checked")
def test_a_state_that_jax_rebuilds_may_hold_anything() -> None:
    pages = _pages()
    assert jax.eval_shape(lambda p: p, pages).values == jax.ShapeDtypeStruct((3, 2), jnp.float32)
    assert jax.tree.map(lambda leaf: leaf.shape, pages).lengths == (3,)
    assert jax.vmap(lambda p: p.values.sum())(pages).shape == (3,)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(pages)]
    assert paths == [".values", ".lengths"]
    assert jax.tree.map(lambda leaf: leaf + 1, pages).page_size == 2
    with pytest.raises(ValueError, match="Pages"):
        jax.tree.map(lambda one, other: one, pages, _pages(page_size=4))


def test_ranks_and_dtypes_are_not_promoted_silently() -> None:
    with pytest.raises(ValueError, match="rank"):
        jnp.zeros((2, 3)) + jnp.zeros(3)
    with pytest.raises(ValueError, match="promotion"):
        jnp.zeros(2, jnp.float32) + jnp.zeros(2, jnp.bfloat16)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="virtual devices exist on cpu only")
def test_eight_devices_are_there() -> None:
    assert len(jax.devices()) == 8


def test_quick_and_ordinary_compilation_reach_xla() -> None:
    """By what jax hands to XLA: the level of optimisation, and the options that this XLA knows."""
    usual = _options_of_a_compilation()
    with quick_compilation():
        quick = _options_of_a_compilation()
        with ordinary_compilation():
            assert _options_of_a_compilation()["level"] == usual["level"]
            assert _program_text() == usual["program"]
        assert _options_of_a_compilation() == quick
    assert _options_of_a_compilation() == usual
    assert quick["level"] < usual["level"]
    assert (quick["program"] != usual["program"]) == bool(quick_options())


def _options_of_a_compilation() -> dict[str, Any]:
    gathered = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    level = gathered.executable_build_options.debug_options.xla_backend_optimization_level
    return {"level": level, "program": _program_text()}


def _program_text() -> list[str]:
    """The operations of one function after all of XLA's passes, compiled anew."""
    compiled: Any = jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x).T + x.sum()).lower(jnp.ones((4, 9))).compile()
    return [opcode for opcode, _, _ in instructions(compiled.as_text())]
