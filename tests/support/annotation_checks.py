"""Run-time checks of the package's annotations, in tests only: jaxtyping's import hook with beartype."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import beartype
import jax
from jaxtyping import install_import_hook

# An int is accepted for a float, as type checkers do.
checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def install() -> None:
    """Check every function and every dataclass field of `dspark_jax` modules that are imported from here on, until the
    process ends.
    """
    install_import_hook("dspark_jax", f"{__name__}.checked")
    jax.tree_util.register_dataclass = _register_dataclass


def _register_dataclass(
    nodetype: Any,
    data_fields: Sequence[str] | None = None,
    meta_fields: Sequence[str] | None = None,
    drop_fields: Sequence[str] = (),
) -> Any:
    """`jax.tree_util.register_dataclass`, but jax rebuilds instances with the unchecked `__init__`.

    What our code constructs is checked. What jax rebuilds may hold anything in place of an array: shapes, shardings,
    vmapped axes, sentinels.
    """
    fields = [field for field in dataclasses.fields(nodetype) if field.init and field.name not in drop_fields]
    if data_fields is None or meta_fields is None:
        data_fields = [field.name for field in fields if not field.metadata.get("static", False)]
        meta_fields = [field.name for field in fields if field.metadata.get("static", False)]
    data, meta = tuple(data_fields), tuple(meta_fields)
    if sorted((*data, *meta)) != sorted(field.name for field in fields):
        raise ValueError(f"{nodetype.__name__}: data_fields and meta_fields must name every field once")
    unchecked_init = inspect.unwrap(nodetype.__init__)

    def flatten(instance: Any) -> tuple[tuple[tuple[jax.tree_util.GetAttrKey, Any], ...], tuple[Any, ...]]:
        leaves = tuple((jax.tree_util.GetAttrKey(name), getattr(instance, name)) for name in data)
        return leaves, tuple(getattr(instance, name) for name in meta)

    def unflatten(meta_values: Iterable[Any], data_values: Iterable[Any]) -> Any:
        instance = object.__new__(nodetype)
        unchecked_init(
            instance, **dict(zip(meta, meta_values, strict=True)), **dict(zip(data, data_values, strict=True))
        )
        return instance

    jax.tree_util.register_pytree_with_keys(nodetype, flatten, unflatten)
    return nodetype
