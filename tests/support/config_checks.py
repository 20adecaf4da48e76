"""Checks of a parsed config: a module can be built from it, and its weight recipes are for exactly the parameters of
that module.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from flax import nnx

from dspark_jax.architectures.drafting.tables import tables_of
from dspark_jax.architectures.nn.rotary import inverse_frequencies
from dspark_jax.architectures.registry import SupportedArchitecture, retrieve
from dspark_jax.speculators_common.formats.compact.format import ARCHITECTURE as COMPACT
from dspark_jax.speculators_common.formats.recipes import Recipe
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.numerics.matmul import OutputMajorKernel

FILE = "folder/config.json"
_FEW_ELEMENTS = 100_000


def entry_of(raw: Mapping[str, Any]) -> SupportedArchitecture:
    """The registry entry of a config that names its architecture; a `dspark.json` names none."""
    return retrieve(raw["architectures"][0] if "architectures" in raw else COMPACT)


def parsed(raw: Mapping[str, Any], entry: SupportedArchitecture | None = None) -> Any:
    """The config that `raw` describes."""
    return (entry or entry_of(raw)).parse_config(raw, FILE, None)


def assert_buildable(entry: SupportedArchitecture, config: Any, names: Collection[str] = ()) -> None:
    """The module can be built, its rotations are finite, and the table for a file with the tensors `names` has one
    recipe of the right shape for every parameter and none besides.
    """
    assert_finite_rotations(config)
    options = {}
    if entry.kind == "draft":
        options["tables"] = tables_of(config, names)
        if options["tables"].lm_head == "target_rows":
            names = (*names, "lm_head.weight")  # taken from the target's before the draft is loaded
    module = nnx.eval_shape(lambda: entry.build(config, dtype=np.float32, **options))
    shapes = {".".join(map(str, path)): _shape_of(variable) for path, variable in nnx.to_flat_state(nnx.state(module))}
    recipes = entry.recipes(config, names)
    assert set(shapes) <= set(recipes), "a parameter without a recipe"
    checks_only = {"draft_to_target"} if "d2t" in names else set()
    assert set(recipes) - set(shapes) <= checks_only, "a recipe without a parameter"
    for path, shape in shapes.items():
        if sum(np.prod(stored, dtype=float) for stored in recipes[path].tensors.values()) < _FEW_ELEMENTS:
            assert assembled(recipes[path], num_first_ids=getattr(config, "num_draft_ids", 0)).shape == shape, path


def _shape_of(parameter: nnx.Param) -> tuple[int, ...]:
    """What a recipe makes for it; kernels may be stored the other way round."""
    shape: tuple[int, ...] = parameter.get_value().shape
    return shape[::-1] if isinstance(parameter, OutputMajorKernel) else shape


def assembled(recipe: Recipe, num_first_ids: int = 0) -> np.ndarray:
    """What a recipe makes of tensors of the shapes that it asks for: zeros, and a vocabulary map to the first
    `num_first_ids` ids.
    """
    content = {"d2t": lambda shape: np.zeros(shape, np.int64), "t2d": lambda shape: np.arange(shape[0]) < num_first_ids}
    tensors = [
        content.get(name, lambda shape: np.zeros(shape, np.float32))(shape) for name, shape in recipe.tensors.items()
    ]
    return np.asarray(recipe.assemble(tensors))


def assert_finite_rotations(config: Any) -> None:
    """Every rotation of `config` has finite frequencies, computed without a warning."""
    for field in dataclasses.fields(config):
        rope = getattr(config, field.name)
        if isinstance(rope, RopeConfig) and rope.rotary_dim:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                frequencies = inverse_frequencies(rope)
            assert frequencies.shape == (rope.rotary_dim // 2,)
            assert np.isfinite(frequencies).all()
            assert np.isfinite(np.float32(rope.attention_factor))
