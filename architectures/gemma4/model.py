"""The Gemma 4 text model, as `Gemma4ForCausalLM` of the transformers library computes it.

Full and sliding layers have different head sizes. The last layers may read the keys and values of earlier layers.
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
    """The `Target` of the Gemma 4 family.

    `embed_tokens` returns unscaled rows. `forward` multiplies them by `sqrt(hidden_size)`, so tap 0 is scaled.
    """

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
        """Geometry of the KV cache that `forward` reads and writes; `page_size` is in positions.

        It has one entry for each layer that stores keys and values of its own.
        """
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
        """Hidden states after the final norm, the concatenated taps, and the cache with the batch stored.

        Tap `j` is the float32 residual stream after `j` layers, tap 0 the scaled embedding.
        """
        config = self.config
        full = rotary_angles(batch.positions, config.rope)
        sliding = rotary_angles(batch.positions, config.sliding_rope)
        # A Python scalar takes the dtype of the rows. So the factor is rounded to that dtype, as in training.
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
        """Logits of hidden states after the final norm, float32, with the soft-cap."""
        return soft_capped(self.lm_head(hidden), self.config.final_logit_softcapping)
