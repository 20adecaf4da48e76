"""What marks a file of the speculators library: the names and fields that its drafts state, and no other format has."""

from __future__ import annotations

from collections.abc import Mapping

from dspark_jax.speculators_common.formats.fields import Fields

TYPE_FIELD = "speculators_model_type"
# Kind of draft -> the names in `architectures`, the library's own first.
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "dspark": ("DSparkDraftModel", "DSparkSpeculator"),
    "dflash": ("DFlashDraftModel", "DFlashSpeculator"),
}
FAMILIES: Mapping[str, str] = {"dspark": "speculators_dspark", "dflash": "speculators_dflash"}
LIBRARY_FIELDS = ("speculators_config", "aux_hidden_state_layer_ids")  # beside the type, in no draft of another library
DRAFT_FIELDS = (TYPE_FIELD, *LIBRARY_FIELDS, "dspark_config", "dflash_config", "mask_token_id", "markov_rank")


def states_library_fields(fields: Fields) -> bool:
    """Whether a config states fields of the library, whether or not it states its type."""
    return any(location.has(name) for location in (fields, fields.section("dflash_config")) for name in LIBRARY_FIELDS)


def refuse_speculators(fields: Fields, architecture: str) -> None:
    """Raise a `CheckpointError` if a config whose `architecture` is of another format states the library's type."""
    if fields.has(TYPE_FIELD):
        known = ", ".join(name for names in ARCHITECTURES.values() for name in names)
        raise fields.error(
            TYPE_FIELD,
            fields.raw[TYPE_FIELD],
            f"no such field in a draft that is read as {architecture!r}; one of the speculators library is {known}",
        )
