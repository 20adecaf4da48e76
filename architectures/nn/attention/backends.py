"""The attention backends by name. A platform names its own; nothing else chooses."""

from __future__ import annotations

from dspark_jax.architectures.nn.attention.backend import AttentionBackend
from dspark_jax.architectures.nn.attention.xla import XlaHeadMajor, XlaSlotMajor
from dspark_jax.speculators_common.numerics.platform import Platform

BACKENDS: dict[str, type[AttentionBackend]] = {backend.name: backend for backend in (XlaHeadMajor, XlaSlotMajor)}


def attention_backend(platform: Platform) -> AttentionBackend:
    """The backend of `platform`. Raises `NotImplementedError` if it names one that does not exist."""
    if platform.attention not in BACKENDS:
        raise NotImplementedError(
            f"attention backend of platform {platform.name}: found {platform.attention!r}, allowed "
            f"{', '.join(BACKENDS)}"
        )
    return BACKENDS[platform.attention](platform)
