"""The registry entry of the Llama family."""

from dspark_jax.architectures.decoder.dense import DenseDecoder
from dspark_jax.architectures.decoder.weights import decoder_recipes, ignored_tensors
from dspark_jax.architectures.llama.config import parse_llama
from dspark_jax.architectures.registry import SupportedArchitecture

ARCHITECTURES = (
    SupportedArchitecture(
        name="LlamaForCausalLM",
        kind="target",
        model_types={"llama": "LlamaForCausalLM"},
        family="llama",
        parse_config=parse_llama,
        build=DenseDecoder,
        recipes=decoder_recipes,
        ignored=ignored_tensors,
    ),
)
