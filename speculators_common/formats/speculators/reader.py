"""Reading the `config.json` of a DSpark or DFlash draft of the speculators library, from release 0.7 on.

The fields did not change since 0.7; only the saved tensors did. The layers are always Qwen3 layers, whatever
`model_type` in `transformer_layer_config` states.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.speculators_common.errors import field_error
from dspark_jax.speculators_common.formats.choice import DEFAULT_REASON, Choice, default_choices
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftOverrides, LayerMask
from dspark_jax.speculators_common.formats.draft_fields import (
    DEFAULT_THETA,
    HARMLESS_FIELDS,
    LAYOUT_FLAG,
    NEUTRAL_FIELDS,
    NO_HEADS,
    Heads,
    check_block_size,
    read_geometry,
    read_heads,
    read_mask_token,
    read_rope,
    read_taps,
    refuse_unsupported,
    with_usable_length,
)
from dspark_jax.speculators_common.formats.fields import Fields, only_architecture
from dspark_jax.speculators_common.formats.layer_masks import FULL, SLIDING, read_layer_masks
from dspark_jax.speculators_common.formats.speculators.names import ARCHITECTURES, FAMILIES, TYPE_FIELD
from dspark_jax.speculators_common.formats.unknown_fields import unknown_fields

_DEFAULTS = {"block_size": 8, "draft_vocab_size": 32000}
_MARKOV_RANK, _HEAD_TYPE = 256, "vanilla"


def from_speculators(raw: Mapping[str, Any], file: Path | str, overrides: DraftOverrides | None = None) -> DraftConfig:
    """Read the config of a speculators draft. `raw` is the content of `file`.

    Fields of the layers may be in `transformer_layer_config` or at the top level. Fields of the block may be at the top
    level, in `dspark_config` or in `dflash_config`. `overrides` are values stated by the user. Raises `CheckpointError`
    for a missing field and for a value that the format does not allow.
    """
    top = Fields(raw, file)
    kind, architecture = _kind(top)
    nested = top.section("transformer_layer_config")
    block = top.joined(top.section("dspark_config"), top.section("dflash_config"))
    network = top.joined(nested)
    refuse_unsupported(network)
    geometry = read_geometry(top, nested)
    library = top.section("speculators_config")
    _check_algorithm(library, kind)
    block_size = block.integer("block_size", minimum=1, default=_DEFAULTS["block_size"])
    heads, head_choices = _heads(block, is_dspark=kind == "dspark")
    sample_from_anchor, layout_choices = _layout(block, library, block_size, overrides, is_dspark=kind == "dspark")
    rope, rope_choices = read_rope(
        network,
        head_dim=geometry["head_dim"],
        layer_types=(SLIDING, FULL),
        overrides=overrides,
        default_theta=DEFAULT_THETA,
    )
    num_target_layers = top.integer("num_target_layers", minimum=1, default=None)
    layers, mask_choices = read_layer_masks(block, network, geometry["num_hidden_layers"])
    verifier = library.section("verifier")
    return DraftConfig(
        **with_usable_length(geometry, rope, file),
        draft_vocab_size=_draft_vocab_size(top, geometry["vocab_size"]),
        taps=read_taps(
            block,
            "aux_hidden_state_layer_ids",
            shift=0,
            num_target_layers=num_target_layers,
            convention="counted as speculators does (0 = embedding output, x = residual stream after x layers)",
        ),
        block_size=block_size,
        sample_from_anchor=sample_from_anchor,
        mask_token_id=read_mask_token(block, geometry["vocab_size"]),
        **heads,
        layers=layers,
        window_origin="anchor",
        rope=rope,
        architecture=architecture,
        family=FAMILIES[kind],
        source=str(file),
        stated_drafts=min((count for _, count in _declared_drafts(library, block_size)), default=None),
        num_target_layers=num_target_layers,
        target_name=verifier.string("name_or_path", default=None),
        target_architectures=verifier.string_list("architectures", default=()),
        choices=(
            *default_choices(block, _DEFAULTS),
            *layout_choices,
            *head_choices,
            *rope_choices,
            *mask_choices,
            *_causality_choices(block.joined(nested), layers),
        ),
        unknown_fields=unknown_fields(top, HARMLESS_FIELDS, NEUTRAL_FIELDS),
    )


def _kind(top: Fields) -> tuple[str, str]:
    """The `speculators_model_type` and the architecture. The default architecture is the one the library writes."""
    if not top.has(TYPE_FIELD):
        names = [name for known in ARCHITECTURES.values() for name in known]
        architecture = only_architecture(top, names=names)
        fitting = (kind for kind, known in ARCHITECTURES.items() if architecture in known)
        raise top.missing(TYPE_FIELD, f"{' or '.join(fitting)} beside the architecture {architecture!r}")
    kind = top.string(TYPE_FIELD, allowed=tuple(ARCHITECTURES))
    architecture = only_architecture(top, default=ARCHITECTURES[kind][0])
    if architecture not in ARCHITECTURES[kind]:
        allowed = f"{' or '.join(ARCHITECTURES[kind])} beside {TYPE_FIELD} {kind!r}"
        raise top.error("architectures", architecture, allowed)
    return kind, architecture


def _check_algorithm(library: Fields, kind: str) -> None:
    algorithm = library.string("algorithm", default=kind)
    if algorithm != kind:
        raise library.error("algorithm", algorithm, f"{kind}, the speculators_model_type of the file")


def _heads(block: Fields, *, is_dspark: bool) -> tuple[Heads, tuple[Choice, ...]]:
    """Read both heads, and the choices of their defaults. A DSpark draft has them by default; a DFlash draft is the
    same network without heads.
    """
    if is_dspark:
        heads = read_heads(
            block,
            rank=block.integer("markov_rank", default=_MARKOV_RANK),
            head_type=block.string("markov_head_type", default=_HEAD_TYPE),
            enabled=block.boolean("enable_confidence_head", default=True),
            with_markov=block.boolean("confidence_head_with_markov", default=True),
        )
        defaults: dict[str, object] = {"markov_rank": _MARKOV_RANK}
        if heads["markov_rank"]:
            defaults["markov_head_type"] = _HEAD_TYPE
        defaults["enable_confidence_head"] = True
        if heads["enable_confidence_head"]:
            defaults["confidence_head_with_markov"] = True
        return heads, default_choices(block, defaults)
    rank = block.integer("markov_rank", default=0)
    if rank != 0:
        raise block.error("markov_rank", rank, "0 beside speculators_model_type 'dflash': such drafts have no heads")
    if block.boolean("enable_confidence_head", default=False):
        raise block.error(
            "enable_confidence_head", True, "false beside speculators_model_type 'dflash': such drafts have no heads"
        )
    block.ignore("markov_head_type", "confidence_head_with_markov")
    return NO_HEADS, ()


def _causality_choices(fields: Fields, layers: tuple[LayerMask, ...]) -> tuple[Choice, ...]:
    """The choice that sliding layers are causal, if the file does not say whether they are."""
    slides = any(layer.window is not None and layer.causal for layer in layers)
    is_stated = fields.has("causal") or fields.has("is_causal")
    return default_choices(fields, {"sliding_window_non_causal": False}) if slides and not is_stated else ()


def _layout(
    block: Fields, library: Fields, block_size: int, overrides: DraftOverrides | None, *, is_dspark: bool
) -> tuple[bool, tuple[Choice, ...]]:
    """Whether the block is anchor-first, and the choice if the file does not state `sample_from_anchor`.

    The default of a DSpark file follows from `speculative_tokens`: `block_size` means anchor-first, one less means
    fill-in. Without a conclusive number it is anchor-first. The default of a DFlash file is fill-in, whatever its
    `speculative_tokens`: files from before the field existed are fill-in and state `block_size` there.
    """
    stated = block.boolean("sample_from_anchor", default=None)
    override = None if overrides is None else overrides.sample_from_anchor
    declared = [(path, count) for path, count in _declared_drafts(library, block_size) if count >= block_size - 1]
    if override is not None:
        chosen, reason = override, f"stated by the user; the file says {'nothing' if stated is None else _json(stated)}"
    elif stated is not None:
        chosen, reason = stated, ""
    elif not is_dspark:
        chosen, reason = False, DEFAULT_REASON
    elif declared:
        chosen = declared[0][1] == block_size
        reason = f"the file does not say; its speculative_tokens {declared[0][1]} of block_size {block_size} imply it"
    else:
        chosen, reason = True, DEFAULT_REASON
    check_block_size(block, block_size, chosen)
    if override is None and (is_dspark or stated is not None):
        _check_declared_drafts(block, declared, block_size, chosen)
    return chosen, (
        Choice(name="sample_from_anchor", value=_json(chosen), reason=reason, flag=LAYOUT_FLAG),
    ) if reason else ()


def _declared_drafts(library: Fields, block_size: int) -> list[tuple[str, int]]:
    """Dotted path and value of every `speculative_tokens`.

    `block_size` or `block_size - 1` is the number of drafts of a block and determines the layout. A smaller value is
    the recommended number of drafts per round. Raises `CheckpointError` for a larger value.
    """
    library.ignore("default_proposal_method")
    methods = library.sections("proposal_methods")
    declared = [
        (method.dotted_path("speculative_tokens"), method.integer("speculative_tokens", minimum=1))
        for method in methods
        if method.has("speculative_tokens")
    ]
    for path, value in declared:
        if value > block_size:
            allowed = (
                f"{block_size} (anchor-first layout), {block_size - 1} (fill-in layout) or fewer, as block_size "
                f"{block_size} implies"
            )
            raise field_error(library.file, path, value, allowed)
    return declared


def _check_declared_drafts(
    block: Fields, declared: list[tuple[str, int]], block_size: int, sample_from_anchor: bool
) -> None:
    """Raise `CheckpointError` if a declared number of drafts is that of the other layout."""
    implied = block_size if sample_from_anchor else block_size - 1
    layout = "anchor-first" if sample_from_anchor else "fill-in"
    for path, value in declared:
        if value != implied:
            allowed = (
                f"{implied}, as block_size {block_size} and the {layout} layout (sample_from_anchor "
                f"{_json(sample_from_anchor)}) imply"
            )
            raise field_error(block.file, path, value, allowed)


def _draft_vocab_size(top: Fields, vocab_size: int) -> int:
    """Read Vd. It may be larger than V: then the head is padded, and draft ids equal target ids."""
    draft_vocab_size = top.integer("draft_vocab_size", default=_DEFAULTS["draft_vocab_size"])
    if draft_vocab_size < 1:
        raise top.error("draft_vocab_size", draft_vocab_size, f"an integer >= 1 (vocab_size is {vocab_size})")
    return draft_vocab_size


def _json(value: bool) -> str:
    return str(value).lower()
