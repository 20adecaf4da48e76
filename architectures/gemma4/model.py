"""The Gemma 4 text model: layers of two geometries, of which the last ones may read the keys and values of earlier
ones.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dspark_jax.architectures.decoder.layer_stack import run_layers
from dspark_jax.architectures.gemma4.config import Gemma4Config
from dspark_jax.architectures.gemma4.layer import Gemma4Layer, PerLayerInputs
from dspark_jax.architectures.nn.attention.kv_cache import KVCache
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.architectures.nn.embedding import EmbeddingAndHead, soft_capped
from dspark_jax.architectures.nn.norms import RMSNorm
from dspark_jax.architectures.nn.rotary import rotary_angles
from dspark_jax.speculators_common.numerics.platform import Platform, default_platform


class Gemma4Decoder(EmbeddingAndHead):
    """A `Target`. `embed_tokens` gives raw rows; `forward` scales its own input, tap 0, by `sqrt(hidden_size)`."""

    def __init__(
        self,
        config: Gemma4Config,
        *,
        dtype: DTypeLike = jnp.float32,
        platform: Platform | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        platform, rngs = platform or default_platform(), rngs or nnx.Rngs(0)
        super().__init__(
            config.vocab_size,
            config.hidden_size,
            tied=config.tie_word_embeddings,
            dtype=dtype,
            platform=platform,
            rngs=rngs,
        )
        self.config = config
        self.per_layer_inputs = (
            PerLayerInputs(config, dtype=dtype, platform=platform, rngs=rngs) if config.per_layer_input_size else None
        )
        self.layers = nnx.List(
            Gemma4Layer(config, layer, dtype=dtype, platform=platform, rngs=rngs)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def kv_params(self, page_size: int) -> KVParams:
        """Geometry of the cache that `forward` writes: one entry for each layer with keys and values of its own."""
        storing = self.config.storing_layers
        return KVParams(
            num_layers=len(storing),
            num_key_value_heads=tuple(layer.num_key_value_heads for layer in storing),
            head_dim=tuple(layer.head_dim for layer in storing),
            page_size=page_size,
            dtype=self.dtype,
            platform=self.platform,
        )

    def forward(
        self, batch: RaggedBatch, cache: KVCache, taps: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "T H"], Float[Array, "T mH"], KVCache]:
        """Final-normed hidden states, the residual stream after each of `taps` layers (0 = scaled embedding) side by
        side, and the cache with the batch written.
        """
        config = self.config
        full = rotary_angles(batch.positions, config.rope)
        sliding = rotary_angles(batch.positions, config.sliding_rope)
        # A Python scalar takes the dtype of the rows: the factor is rounded to it, as the family was trained.
        embedded = self.embed_tokens(batch.tokens) * config.hidden_size**0.5
        inputs = None if self.per_layer_inputs is None else self.per_layer_inputs(batch.tokens, embedded)
        calls = [
            functools.partial(
                layer,
                angles=full if shape.window is None else sliding,
                batch=batch,
                layer_input=None if inputs is None else inputs[:, index],
            )
            for index, (layer, shape) in enumerate(zip(self.layers, config.layers, strict=True))
        ]
        x, tapped, cache = run_layers(calls, embedded, cache, taps)
        return self.norm(x), tapped, cache

    def compute_logits(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        """Logits of final-normed hidden states, float32, soft-cap included."""
        return soft_capped(self.lm_head(hidden), self.config.final_logit_softcapping)
