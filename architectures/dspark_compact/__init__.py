"""The compact draft: functions to make, train, save and load one."""

from dspark_jax.architectures.dspark_compact.checkpoint import load, save
from dspark_jax.architectures.dspark_compact.init import dims_of, init, init_from_dims
from dspark_jax.architectures.dspark_compact.loss import CompactLoss, compact_loss
from dspark_jax.architectures.dspark_compact.model import CompactDraft
from dspark_jax.architectures.dspark_compact.training_rows import TrainingRows, training_rows
from dspark_jax.speculators_common.formats.compact.format import CompactDims, CompactSettings

__all__ = [
    "CompactDims",
    "CompactDraft",
    "CompactLoss",
    "CompactSettings",
    "TrainingRows",
    "compact_loss",
    "dims_of",
    "init",
    "init_from_dims",
    "load",
    "save",
    "training_rows",
]
