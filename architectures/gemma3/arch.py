"""The registry entry of Gemma 3: the text models, and the text part of the multimodal ones."""

from dspark_jax.architectures.gemma3.config import parse_gemma3
from dspark_jax.architectures.gemma3.model import Gemma3Decoder
from dspark_jax.architectures.gemma3.weights import gemma3_ignored, gemma3_recipes
from dspark_jax.architectures.registry import SupportedArchitecture

ARCHITECTURES = (
    SupportedArchitecture(
        name="Gemma3ForCausalLM",
        aliases=("Gemma3ForConditionalGeneration",),
        kind="target",
        model_types={"gemma3_text": "Gemma3ForCausalLM", "gemma3": "Gemma3ForConditionalGeneration"},
        family="gemma3",
        parse_config=parse_gemma3,
        build=Gemma3Decoder,
        recipes=gemma3_recipes,
        ignored=gemma3_ignored,
    ),
)
