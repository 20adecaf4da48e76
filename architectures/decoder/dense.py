"""The dense pre-norm decoder of the Llama and Qwen3 families, with a paged cache and taps.

It computes what `LlamaForCausalLM` and `Qwen3ForCausalLM` of the transformers library compute. The layers are unrolled
and each has its own arrays: a scan over stacked arrays would make XLA copy every slice (`docs/performance.md`).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dspark_jax.architectures.decoder.layer_stack import run_layers
from dspark_jax.architectures.nn.attention.kv_cache import KVCache
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.architectures.nn.embedding import EmbeddingAndHead
from dspark_jax.architectures.nn.mlp import GatedMLP
from dspark_jax.architectures.nn.norms import RMSNorm
from dspark_jax.architectures.nn.rotary import Angles, rotary_angles, rotate
from dspark_jax.speculators_common.formats.choice import Choice
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.numerics.linear import Linear
from dspark_jax.speculators_common.numerics.platform import Platform, default_platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The config of a dense decoder. The `config.py` of each family reads it from `config.json`."""

    hidden_size: int  # H
    intermediate_size: int  # F
    num_hidden_layers: int
    num_attention_heads: int  # N
    num_key_value_heads: int  # K
    head_dim: int  # hd
    rms_norm_eps: float
    vocab_size: int  # V
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    use_qk_norm: bool  # an RMSNorm on every query head and key head, before the rotation
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_pre_attn_scalar: float | None = None  # the attention scale is 1 / sqrt of this; None: of head_dim
    layer_windows: tuple[int | None, ...]  # sliding window of each layer in positions; None: full attention

    architecture: str = dataclasses.field(compare=False)
    family: str = dataclasses.field(compare=False)
    source: str = dataclasses.field(default="", compare=False)
    choices: tuple[Choice, ...] = dataclasses.field(default=(), compare=False)
    # Dotted paths of fields that the file states and no reader knows. They have no influence.
    unknown_fields: tuple[str, ...] = dataclasses.field(default=(), compare=False)


class DecoderAttention(nnx.Module):
    """Grouped-query attention over the cached row. One kernel has the columns of q, k and v, in this order."""

    def __init__(
        self, config: DecoderConfig, layer: int, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs
    ) -> None:
        self.layer = layer
        self.window = config.layer_windows[layer]
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = Linear(
            config.hidden_size, width, bias=config.attention_bias, dtype=dtype, platform=platform, rngs=rngs
        )
        self.output = Linear(
            self.num_heads * self.head_dim,
            config.hidden_size,
            bias=config.output_bias,
            dtype=dtype,
            platform=platform,
            rngs=rngs,
        )
        self.query_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.use_qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.use_qk_norm else None

    def __call__(
        self, x: Float[Array, "T H"], angles: Angles, batch: RaggedBatch, cache: KVCache
    ) -> tuple[Float[Array, "T H"], KVCache]:
        heads = self.qkv.float32(x).reshape(x.shape[0], -1, self.head_dim)
        rotating, value = jnp.split(heads, [self.num_heads + self.num_kv_heads], axis=1)
        query, key = jnp.split(rotate(self._normed(rotating), angles), [self.num_heads], axis=1)
        cache = cache.write(self.layer, batch, key, value)
        out = cache.paged_attention(self.layer, query, batch, scale=self.scale, window=self.window)
        return self.output(out.reshape(x.shape[0], -1)), cache

    def _normed(self, heads: Float[Array, "T NK hd"]) -> Float[Array, "T NK hd"]:
        """The query and key norms of each head; the heads themselves if the family has no such norms."""
        if self.query_norm is None or self.key_norm is None:
            return heads
        query, key = jnp.split(heads, [self.num_heads], axis=1)
        return jnp.concatenate([self.query_norm(query), self.key_norm(key)], axis=1)


class DecoderLayer(nnx.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        mlp: nnx.Module,
        *,
        dtype: DTypeLike,
        platform: Platform,
        rngs: nnx.Rngs,
    ) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = DecoderAttention(config, layer, dtype=dtype, platform=platform, rngs=rngs)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def __call__(
        self, x: Float[Array, "T H"], cache: KVCache, *, angles: Angles, batch: RaggedBatch
    ) -> tuple[Float[Array, "T H"], KVCache]:
        with jax.named_scope("attention"):
            attended, cache = self.attention(self.input_norm(x), angles, batch, cache)
        with jax.named_scope("mlp"):
            x = x + attended
            return x + self.mlp(self.post_attention_norm(x)), cache


class DenseDecoder(EmbeddingAndHead):
    """The `Target` of the Llama and Qwen3 families: embedding, layers, final norm, head."""

    def __init__(
        self,
        config: DecoderConfig,
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
            DecoderLayer(config, layer, self.make_mlp(config, layer, rngs), dtype=dtype, platform=platform, rngs=rngs)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def make_mlp(self, config: DecoderConfig, layer: int, rngs: nnx.Rngs) -> nnx.Module:
        """The feed-forward module of `layer`. Families with another one override this method."""
        return GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            bias=config.mlp_bias,
            dtype=self.dtype,
            platform=self.platform,
            rngs=rngs,
        )

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

        Tap `j` is the float32 residual stream after `j` layers, tap 0 the embedding output.
        """
        angles = rotary_angles(batch.positions, self.config.rope)
        calls = [functools.partial(layer, angles=angles, batch=batch) for layer in self.layers]
        x, tapped, cache = run_layers(calls, self.embed_tokens(batch.tokens), cache, taps)
        return self.norm(x), tapped, cache

    def compute_logits(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        """Logits of hidden states after the final norm, float32."""
        return self.lm_head(hidden)
