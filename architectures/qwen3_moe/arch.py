"""The registry entry of Qwen3 mixture-of-experts targets."""

from dspark_jax.architectures.decoder.weights import ignored_tensors
from dspark_jax.architectures.qwen3_moe.config import parse_qwen3_moe
from dspark_jax.architectures.qwen3_moe.model import Qwen3MoeDecoder
from dspark_jax.architectures.qwen3_moe.weights import qwen3_moe_recipes
from dspark_jax.architectures.registry import SupportedArchitecture

ARCHITECTURES = (
    SupportedArchitecture(
        name="Qwen3MoeForCausalLM",
        kind="target",
        model_types={"qwen3_moe": "Qwen3MoeForCausalLM"},
        family="qwen3_moe",
        parse_config=parse_qwen3_moe,
        build=Qwen3MoeDecoder,
        recipes=qwen3_moe_recipes,
        ignored=ignored_tensors,
    ),
)
