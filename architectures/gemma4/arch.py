"""The registry entry of Gemma 4: the text models, and the text part of the multimodal ones."""

from dspark_jax.architectures.gemma4.config import parse_gemma4
from dspark_jax.architectures.gemma4.model import Gemma4Decoder
from dspark_jax.architectures.gemma4.weights import gemma4_ignored, gemma4_recipes
from dspark_jax.architectures.registry import SupportedArchitecture

ARCHITECTURES = (
    SupportedArchitecture(
        name="Gemma4ForCausalLM",
        aliases=("Gemma4ForConditionalGeneration", "Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
        kind="target",
        model_types={
            "gemma4_text": "Gemma4ForCausalLM",
            "gemma4": "Gemma4ForConditionalGeneration",
            "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
            "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
        },
        family="gemma4",
        parse_config=parse_gemma4,
        build=Gemma4Decoder,
        recipes=gemma4_recipes,
        ignored=gemma4_ignored,
    ),
)
