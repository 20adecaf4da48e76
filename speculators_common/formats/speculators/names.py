"""Names of the speculators format: architectures, families, and fields by which a file of the library is recognised."""

from __future__ import annotations

from collections.abc import Mapping

from dspark_jax.speculators_common.formats.fields import Fields

TYPE_FIELD = "speculators_model_type"
# `speculators_model_type` -> names in `architectures`; the first is the one that the library writes.
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "dspark": ("DSparkDraftModel", "DSparkSpeculator"),
    "dflash": ("DFlashDraftModel", "DFlashSpeculator"),
}
FAMILIES: Mapping[str, str] = {"dspark": "speculators_dspark", "dflash": "speculators_dflash"}
LIBRARY_FIELDS = ("speculators_config", "aux_hidden_state_layer_ids")  # only this library writes them
DRAFT_FIELDS = (TYPE_FIELD, *LIBRARY_FIELDS, "dspark_config", "dflash_config", "mask_token_id", "markov_rank")


def states_library_fields(fields: Fields) -> bool:
    """Whether a config states fields that only this library writes, `speculators_model_type` not counted."""
    return any(location.has(name) for location in (fields, fields.section("dflash_config")) for name in LIBRARY_FIELDS)


def refuse_speculators(fields: Fields, architecture: str) -> None:
    """Raise `CheckpointError` if a config with an `architecture` of another format has `speculators_model_type`."""
    if fields.has(TYPE_FIELD):
        known = ", ".join(name for names in ARCHITECTURES.values() for name in names)
        raise fields.error(
            TYPE_FIELD,
            fields.raw[TYPE_FIELD],
            f"no such field in a draft that is read as {architecture!r}; one of the speculators library is {known}",
        )
