"""Registry entry of the speculators-format draft."""

from dspark_jax.architectures.drafting.block_weights import block_draft_recipes
from dspark_jax.architectures.dspark_draft.model import DSparkSpeculatorsDraft
from dspark_jax.architectures.registry import SupportedArchitecture
from dspark_jax.speculators_common.formats.speculators.reader import from_speculators

ARCHITECTURE = SupportedArchitecture(
    name="DSparkDraftModel",
    aliases=("DSparkSpeculator",),
    kind="draft",
    family="speculators_dspark",
    parse_config=from_speculators,
    build=DSparkSpeculatorsDraft.from_config,
    recipes=block_draft_recipes,
    ignored=lambda config: ("verifier_lm_head.weight", "verifier_norm.weight"),
)
