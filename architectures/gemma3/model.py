"""The Gemma 3 text model, as `Gemma3ForCausalLM` of the transformers library computes it.

Every attention and feed-forward part has a norm before and after it. The embedding is scaled, and sliding and full
layers have different rotations.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dspark_jax.architectures.decoder.dense import DecoderAttention
from dspark_jax.architectures.decoder.layer_stack import run_layers
from dspark_jax.architectures.gemma3.config import Gemma3Config
from dspark_jax.architectures.nn.attention.kv_cache import KVCache
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.architectures.nn.embedding import EmbeddingAndHead, soft_capped
from dspark_jax.architectures.nn.mlp import GatedMLP
from dspark_jax.architectures.nn.norms import RMSNorm
from dspark_jax.architectures.nn.rotary import Angles, rotary_angles
from dspark_jax.speculators_common.numerics.platform import Platform, default_platform


class Gemma3Layer(nnx.Module):
    """`x += norm(attention(norm(x))); x += norm(mlp(norm(x)))`."""

    def __init__(
        self, config: Gemma3Config, layer: int, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs
    ) -> None:
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_norm = _norm(hidden, epsilon)
        self.attention = DecoderAttention(config, layer, dtype=dtype, platform=platform, rngs=rngs)
        self.attention.query_norm = _norm(config.head_dim, epsilon)
        self.attention.key_norm = _norm(config.head_dim, epsilon)
        self.post_attention_norm = _norm(hidden, epsilon)
        self.pre_feedforward_norm = _norm(hidden, epsilon)
        self.mlp = GatedMLP(
            hidden, config.intermediate_size, activation="gelu_pytorch_tanh", dtype=dtype, platform=platform, rngs=rngs
        )
        self.post_feedforward_norm = _norm(hidden, epsilon)

    def __call__(
        self, x: Float[Array, "T H"], cache: KVCache, *, angles: Angles, batch: RaggedBatch
    ) -> tuple[Float[Array, "T H"], KVCache]:
        with jax.named_scope("attention"):
            attended, cache = self.attention(self.input_norm(x), angles, batch, cache)
            x = x + self.post_attention_norm(attended)
        with jax.named_scope("mlp"):
            return x + self.post_feedforward_norm(self.mlp(self.pre_feedforward_norm(x))), cache


class Gemma3Decoder(EmbeddingAndHead):
    """The `Target` of the Gemma 3 family.

    `embed_tokens` returns unscaled rows. `forward` multiplies them by `sqrt(hidden_size)`, so tap 0 is scaled.
    """

    def __init__(
        self,
        config: Gemma3Config,
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
        self.layers = nnx.List(
            Gemma3Layer(config, layer, dtype=dtype, platform=platform, rngs=rngs)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = _norm(config.hidden_size, config.rms_norm_eps)

    def kv_params(self, page_size: int) -> KVParams:
        """Geometry of the KV cache that `forward` reads and writes; `page_size` is in positions."""
        config = self.config
        return KVParams(
            num_layers=config.num_hidden_layers,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
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
        calls = [
            functools.partial(layer, angles=full if window is None else sliding, batch=batch)
            for layer, window in zip(self.layers, config.layer_windows, strict=True)
        ]
        # A Python scalar takes the dtype of the rows. So the factor is rounded to that dtype, as in training.
        embedded = self.embed_tokens(batch.tokens) * config.hidden_size**0.5
        x, tapped, cache = run_layers(calls, embedded, cache, taps)
        return self.norm(x), tapped, cache

    def compute_logits(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        """Logits of hidden states after the final norm, float32, with the soft-cap."""
        return soft_capped(self.lm_head(hidden), self.config.final_logit_softcapping)


def _norm(size: int, epsilon: float) -> RMSNorm:
    """A norm whose stored weight is its gain minus one."""
    return RMSNorm(size, epsilon, offset=1.0)
