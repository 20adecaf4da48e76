"""The DSpark draft of the speculators format, with the constructor of the published module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dspark_jax.architectures.drafting.block_draft import BlockDraft
from dspark_jax.architectures.drafting.tables import DraftTables
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.speculators_common.errors import DSparkError
from dspark_jax.speculators_common.formats.draft_checks import check_block_draft
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, LayerMask, MarkovHeadType
from dspark_jax.speculators_common.formats.draft_fields import MARKOV_HEAD_TYPES
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.formats.size_limits import MAX_LAYERS
from dspark_jax.speculators_common.formats.speculators.names import ARCHITECTURES, FAMILIES
from dspark_jax.speculators_common.numerics.platform import Platform


class DSparkSpeculatorsDraft(BlockDraft):
    """A draft module for any target. It can be a part of any target's compiled step.

    The constructor has the arguments of the published module. The keyword arguments after `dtype` allow what the
    published module does not: rank 0, gated and rnn Markov heads, and both sliding and full layers in one draft.
    `from_config` builds the same module from the config of a checkpoint.
    """

    def __init__(
        self,
        hidden_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        intermediate_size: int,
        rms_norm_eps: float,
        rope_theta: float,
        sliding_window: int | None,
        layer_causal: Sequence[bool],
        vocab_size: int,
        draft_vocab_size: int,
        markov_rank: int,
        block_size: int,
        sample_from_anchor: bool,
        mask_token_id: int,
        num_context_features: int,
        max_seq_len: int | None,
        kv_params: KVParams | None = None,
        devices: Sequence[jax.Device] | None = None,
        dtype: DTypeLike = jnp.float32,
        *,
        layer_sliding: Sequence[bool] | None = None,
        markov_head_type: str = "vanilla",
        enable_confidence_head: bool = True,
        confidence_head_with_markov: bool | None = None,
        attention_bias: bool = False,
        target_hidden_size: int | None = None,
        taps: Sequence[int] | None = None,
        rope: RopeConfig | None = None,
        config: DraftConfig | None = None,
        tables: DraftTables | None = None,
        platform: Platform | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        """A draft with randomly initialised parameters.

        `sliding_window` is in context positions. `layer_sliding[i]` says whether it applies to layer i; by default it
        applies to every layer. `layer_causal[i]` says whether the block slots of layer i see only the slots up to their
        own. `num_context_features` is the number of taps m. `taps` are the tapped target layers, by default 1..m.
        `rope` replaces `rope_theta` if the rotation is scaled or partial.

        `config` replaces all keyword arguments that describe the network, and the positional arguments must agree with
        it. `kv_params` is only compared with the geometry of the draft's cache. The parameters are put on `devices`, a
        copy on each; by default they are on JAX's default device.

        Raises `DSparkError` for arguments that do not fit together.
        """
        layer_causal = tuple(layer_causal)
        if config is not None:
            arguments = locals()
            for name, value in _arguments(config).items():
                _check(name, arguments[name], arguments[name] == value, f"{value!r}, as in the config")
        else:
            slides = [sliding_window is not None] * num_hidden_layers if layer_sliding is None else list(layer_sliding)
            reads_markov = markov_rank > 0 if confidence_head_with_markov is None else confidence_head_with_markov
            _check_layers(num_hidden_layers, layer_causal, slides, sliding_window, num_context_features)
            head_type = _checked_head_type(markov_head_type, markov_rank, reads_markov)
            config = DraftConfig(
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                num_hidden_layers=num_hidden_layers,
                num_attention_heads=num_attention_heads,
                num_key_value_heads=num_key_value_heads,
                head_dim=head_dim,
                rms_norm_eps=rms_norm_eps,
                attention_bias=attention_bias,
                vocab_size=vocab_size,
                draft_vocab_size=draft_vocab_size,
                target_hidden_size=target_hidden_size or hidden_size,
                taps=tuple(taps) if taps is not None else tuple(range(1, num_context_features + 1)),
                block_size=block_size,
                sample_from_anchor=sample_from_anchor,
                mask_token_id=mask_token_id,
                markov_rank=markov_rank,
                markov_head_type=head_type,
                enable_confidence_head=enable_confidence_head,
                confidence_head_with_markov=reads_markov and enable_confidence_head,
                layers=tuple(
                    LayerMask(window=sliding_window if sliding else None, causal=causal)
                    for sliding, causal in zip(slides, layer_causal, strict=True)
                ),
                rope=rope or RopeConfig(theta=rope_theta, rotary_dim=head_dim),
                max_position_embeddings=max_seq_len,
                architecture=ARCHITECTURES["dspark"][0],
                family=FAMILIES["dspark"],
            )
            _check(
                "taps", list(config.taps), config.num_taps == num_context_features, f"{num_context_features} entries"
            )
        super().__init__(config, dtype=dtype, tables=tables, platform=platform, rngs=rngs)
        if kv_params is not None:
            expected = self.kv_params(kv_params.page_size)
            same = (kv_params.num_layers, kv_params.num_key_value_heads, kv_params.head_dim)
            wanted = (expected.num_layers, expected.num_key_value_heads, expected.head_dim)
            _check("kv_params (layers, K, hd)", same, same == wanted, wanted)
        if devices:
            _replicate(self, devices)

    @classmethod
    def from_config(
        cls,
        config: DraftConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        tables: DraftTables | None = None,
        platform: Platform | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> DSparkSpeculatorsDraft:
        """The module for any `DraftConfig` of the Qwen3 style. Raises `DSparkError` if such a draft cannot have it."""
        check_block_draft(config, config.source or cls.__name__, style=cls.style)
        return cls(**_arguments(config), config=config, dtype=dtype, tables=tables, platform=platform, rngs=rngs)


def _arguments(config: DraftConfig) -> dict[str, Any]:
    """The published constructor arguments for this config. They cannot express every config."""
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "sliding_window": next((layer.window for layer in config.layers if layer.window is not None), None),
        "layer_causal": tuple(layer.causal for layer in config.layers),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "markov_rank": config.markov_rank,
        "block_size": config.block_size,
        "sample_from_anchor": config.sample_from_anchor,
        "mask_token_id": config.mask_token_id,
        "num_context_features": config.num_taps,
        "max_seq_len": config.max_position_embeddings,
    }


def _check_layers(
    num_layers: int,
    layer_causal: Sequence[bool],
    layer_sliding: Sequence[bool],
    sliding_window: int | None,
    num_context_features: int,
) -> None:
    """Raise `DSparkError` for arguments about layers and taps that do not fit together."""
    for name, entries in (("layer_causal", layer_causal), ("layer_sliding", layer_sliding)):
        _check(name, len(entries), len(entries) == num_layers, f"{num_layers} entries")
    is_window = sliding_window is None or sliding_window > 0
    _check("sliding_window", sliding_window, is_window, "None or a positive integer")
    has_window = sliding_window is not None or not any(layer_sliding)
    _check("sliding_window", sliding_window, has_window, "a window, as layer_sliding names layers")
    is_number = 0 < num_context_features <= MAX_LAYERS
    _check("num_context_features", num_context_features, is_number, f"1 or more, at most {MAX_LAYERS}")


def _checked_head_type(name: str, rank: int, reads_markov: bool) -> MarkovHeadType:
    """The type of the Markov head called `name`; at rank 0 there is none.

    Raises `DSparkError` for an unknown name, and if the confidence head reads a Markov head of rank 0.
    """
    head_type = next((known for known in MARKOV_HEAD_TYPES if known == name), None)
    is_known = head_type is not None or (rank == 0 and name == "none")
    _check("markov_head_type", name, is_known, f"{', '.join(MARKOV_HEAD_TYPES)}, or none at markov_rank 0")
    is_readable = rank != 0 or not reads_markov
    _check("confidence_head_with_markov", reads_markov, is_readable, "False at markov_rank 0")
    return head_type if head_type is not None and rank else "none"


def _replicate(module: nnx.Module, devices: Sequence[jax.Device]) -> None:
    """Put a copy of the module's parameters on each device."""
    mesh = jax.sharding.Mesh(list(devices), ("replica",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    nnx.update(module, jax.device_put(nnx.state(module), replicated))


def _check(name: str, found: object, fits: bool, allowed: object) -> None:
    """Raise `DSparkError` for the argument `name` unless it `fits`."""
    if not fits:
        raise DSparkError(f"DSparkSpeculatorsDraft: {name}: found {found!r}, allowed {allowed}")
