"""The registry entry of dense Qwen3 targets."""

from dspark_jax.architectures.decoder.dense import DenseDecoder
from dspark_jax.architectures.decoder.weights import decoder_recipes, ignored_tensors
from dspark_jax.architectures.qwen3.config import parse_qwen3
from dspark_jax.architectures.registry import SupportedArchitecture

ARCHITECTURES = (
    SupportedArchitecture(
        name="Qwen3ForCausalLM",
        kind="target",
        model_types={"qwen3": "Qwen3ForCausalLM"},
        family="qwen3",
        parse_config=parse_qwen3,
        build=DenseDecoder,
        recipes=decoder_recipes,
        ignored=ignored_tensors,
    ),
)
