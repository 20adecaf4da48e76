"""Registry entry of DeepSpec's Qwen3 drafters."""

from dspark_jax.architectures.drafting.block_weights import block_draft_recipes
from dspark_jax.architectures.dspark_deepspec.model import Qwen3DSparkDraft
from dspark_jax.architectures.registry import SupportedArchitecture
from dspark_jax.speculators_common.formats.deepspec.reader import from_deepspec

ARCHITECTURE = SupportedArchitecture(
    name="Qwen3DSparkModel",
    kind="draft",
    family="deepspec_qwen3",
    parse_config=from_deepspec,
    build=Qwen3DSparkDraft,
    recipes=block_draft_recipes,
)
