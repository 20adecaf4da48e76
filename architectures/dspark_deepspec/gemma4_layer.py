"""One Gemma 4-style layer of a block draft, as DeepSpec's Gemma 4 draft computes it.

Every attention and feed-forward part has a norm before and after it. Scores are not scaled, values are normed without a
gain, the activation is the tanh approximation of GELU, and a scalar multiplies the layer's output.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dspark_jax.architectures.drafting.block_layer import BlockAttention, BlockLayer
from dspark_jax.architectures.nn.attention.block_context import BlockContext
from dspark_jax.architectures.nn.mlp import GatedMLP
from dspark_jax.architectures.nn.norms import RMSNorm, rms_normalised
from dspark_jax.architectures.nn.rotary import Angles, rotate
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.numerics.linear import Linear
from dspark_jax.speculators_common.numerics.platform import Platform


class LayerScalar(nnx.Variable):
    """The factor of a layer's output, `[1]`. It is stored with the draft and not trained."""


class Gemma4BlockAttention(BlockAttention):
    """`BlockAttention` with normed values (without a gain) and scale 1.

    With `k_eq_v` there is no value projection: values are the output of the key projection.
    """

    def __init__(
        self, config: DraftConfig, layer: int, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs
    ) -> None:
        super().__init__(config, layer, dtype=dtype, platform=platform, rngs=rngs)
        self.k_eq_v, self.epsilon = config.k_eq_v, config.rms_norm_eps
        self.scale = 1.0
        if config.k_eq_v:
            width = config.num_key_value_heads * config.head_dim
            self.key_value = Linear(
                config.hidden_size, width, bias=config.attention_bias, dtype=dtype, platform=platform, rngs=rngs
            )

    def keys_values(
        self, x: Float[Array, "*axes d"], angles: Angles
    ) -> tuple[Float[Array, "*axes K hd"], Float[Array, "*axes K hd"]]:
        """Keys (normed and rotated) and values (normed) of `x`: context features, or the block after the input norm."""
        heads = self.key_value.float32(x).reshape(*x.shape[:-1], -1, self.head_dim)
        keys, values = (heads, heads) if self.k_eq_v else jnp.split(heads, 2, axis=-2)
        return rotate(self.key_norm(keys), angles), rms_normalised(values, self.epsilon)


class Gemma4BlockLayer(BlockLayer):
    """`x += norm(attention(norm(x))); x += norm(mlp(norm(x))); x *= layer_scalar` over the block slots."""

    def __init__(
        self, config: DraftConfig, layer: int, *, dtype: DTypeLike, platform: Platform, rngs: nnx.Rngs
    ) -> None:
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(hidden, epsilon)
        self.attention = Gemma4BlockAttention(config, layer, dtype=dtype, platform=platform, rngs=rngs)
        self.post_attention_norm = RMSNorm(hidden, epsilon)
        self.pre_feedforward_norm = RMSNorm(hidden, epsilon)
        self.mlp = GatedMLP(
            hidden, config.intermediate_size, activation="gelu_pytorch_tanh", dtype=dtype, platform=platform, rngs=rngs
        )
        self.post_feedforward_norm = RMSNorm(hidden, epsilon)
        self.layer_scalar = LayerScalar(jnp.ones((1,), jnp.float32))

    def __call__(
        self, x: Float[Array, "B W d"], angles: Angles, context: BlockContext, num_queries: int
    ) -> Float[Array, "B Wq d"]:
        """The first `num_queries` slots after this layer. All slots are keys."""
        with jax.named_scope("attention"):
            x = x[:, :num_queries] + self.post_attention_norm(
                self.attention(self.input_norm(x), angles, context, num_queries)
            )
        with jax.named_scope("mlp"):
            x = x + self.post_feedforward_norm(self.mlp(self.pre_feedforward_norm(x)))
        return x * self.layer_scalar[...][0]
