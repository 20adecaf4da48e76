"""The Qwen3 mixture-of-experts target: the dense Qwen3 decoder with experts as the feed-forward part of most layers."""

from __future__ import annotations

from flax import nnx

from dspark_jax.architectures.decoder.dense import DecoderConfig, DenseDecoder
from dspark_jax.architectures.qwen3_moe.config import Qwen3MoeConfig
from dspark_jax.architectures.qwen3_moe.experts import ExpertsMLP


class Qwen3MoeDecoder(DenseDecoder):
    """The `Target` of the Qwen3 mixture-of-experts family."""

    def make_mlp(self, config: DecoderConfig, layer: int, rngs: nnx.Rngs) -> nnx.Module:
        """The feed-forward module of `layer`: experts, or a `GatedMLP` if the layer is dense."""
        assert isinstance(config, Qwen3MoeConfig)
        if not config.layer_is_sparse[layer]:
            return super().make_mlp(config, layer, rngs)
        return ExpertsMLP(
            config.hidden_size,
            config.moe_intermediate_size,
            num_experts=config.num_experts,
            num_picked=config.num_experts_per_tok,
            normalised=config.norm_topk_prob,
            dtype=self.dtype,
            platform=self.platform,
            rngs=rngs,
        )
