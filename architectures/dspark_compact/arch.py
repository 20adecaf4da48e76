"""Registry entry of the compact draft."""

from dspark_jax.architectures.dspark_compact.model import CompactDraft
from dspark_jax.architectures.dspark_compact.weights import compact_recipes
from dspark_jax.architectures.registry import SupportedArchitecture
from dspark_jax.speculators_common.formats.compact.format import ARCHITECTURE as NAME
from dspark_jax.speculators_common.formats.compact.format import from_compact

ARCHITECTURE = SupportedArchitecture(
    name=NAME,
    kind="draft",
    family="compact",
    parse_config=from_compact,
    build=CompactDraft,
    recipes=compact_recipes,
)
