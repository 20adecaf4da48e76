"""The attention backends by name. `Platform.attention` names the backend of a platform; nothing else selects one."""

from __future__ import annotations

from dspark_jax.architectures.nn.attention.backends.backend import AttentionBackend
from dspark_jax.architectures.nn.attention.backends.tpu import PagedTpu
from dspark_jax.architectures.nn.attention.backends.xla import XlaHeadMajor, XlaSlotMajor
from dspark_jax.speculators_common.numerics.platform import Platform

BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend for backend in (XlaHeadMajor, XlaSlotMajor, PagedTpu)
}


def attention_backend(platform: Platform) -> AttentionBackend:
    """The backend that `platform.attention` names. Raises `NotImplementedError` for an unknown name."""
    if platform.attention not in BACKENDS:
        raise NotImplementedError(
            f"attention backend of platform {platform.name}: found {platform.attention!r}, allowed "
            f"{', '.join(BACKENDS)}"
        )
    return BACKENDS[platform.attention](platform)
