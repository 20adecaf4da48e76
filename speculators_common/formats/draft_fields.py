"""Reading the values that all draft formats state: sizes, taps, heads, rotation, mask token and block layout.

The formats differ in the location of a value and in their defaults. The rules that a value must satisfy are the same
and are checked here. Every function raises `CheckpointError` for a value that is not allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from dspark_jax.speculators_common.errors import field_error
from dspark_jax.speculators_common.formats.choice import Choice
from dspark_jax.speculators_common.formats.draft_config import DraftOverrides, MarkovHeadType
from dspark_jax.speculators_common.formats.fields import Fields, agreed
from dspark_jax.speculators_common.formats.quantised import refuse_quantised
from dspark_jax.speculators_common.formats.rope.config import RopeConfig, RopeKind
from dspark_jax.speculators_common.formats.rope.fields import (
    COMMON_KINDS,
    parse_rope,
    stated_partial_rotary_factor,
    theta_choice,
    usable_length,
)
from dspark_jax.speculators_common.formats.size_limits import MAX_BLOCK_SIZE, MAX_LAYERS, MAX_SIZE

LAYOUT_FLAG = "--sample-from-anchor/--no-sample-from-anchor"
ROTARY_FLAG = "--partial-rotary-factor"
DEFAULT_THETA = 10_000.0  # `rope_theta` of a Qwen3 config that does not state it
MARKOV_HEAD_TYPES: tuple[MarkovHeadType, ...] = ("vanilla", "gated", "rnn")

# Fields that libraries write and that never change the network: they describe training, text generation or the writer.
HARMLESS_FIELDS = frozenset(
    {
        "_name_or_path",
        "accept_tolerance",
        "add_cross_attention",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "label2id",
        "max_anchors",
        "model_type",
        "norm_topk_prob",  # about expert layers; drafts have dense layers
        "num_anchors",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "proposal_type",
        "pruned_heads",
        "return_dict",
        "sep_token_id",
        "speculators_version",
        "tie_encoder_decoder",
        "tie_word_embeddings",
        "tokenizer_class",
        "torchscript",
        "transformers_version",
        "use_bfloat16",
        "use_cache",
        "verifier_accept_k",
    }
)

# Fields about the network -> values that are true of every draft here.
NEUTRAL_FIELDS: Mapping[str, tuple[object, ...]] = {"use_qk_norm": (True,), "qk_norm": (True,)}


class Geometry(TypedDict):
    """The fields of `DraftConfig` that hold sizes of the network."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    vocab_size: int
    target_hidden_size: int
    max_position_embeddings: int


class Heads(TypedDict):
    """The fields of `DraftConfig` that describe the Markov head and the confidence head."""

    markov_rank: int
    markov_head_type: MarkovHeadType
    enable_confidence_head: bool
    confidence_head_with_markov: bool


NO_HEADS = Heads(
    markov_rank=0, markov_head_type="none", enable_confidence_head=False, confidence_head_with_markov=False
)


def read_geometry(
    top: Fields, nested: Fields, *, kv_heads_name: str = "num_key_value_heads", head_dim_name: str = "head_dim"
) -> Geometry:
    """Read the sizes from the top level and from `transformer_layer_config` (`nested`).

    A value that both state must be the same. The exceptions are `num_hidden_layers` and `vocab_size`: the nested value
    is used, because the one at the top level may be the target's. `kv_heads_name` and `head_dim_name` are the fields of
    the draft's head sizes, for a format that also keeps those of the target. Raises `CheckpointError`.
    """
    both = top.joined(nested)
    num_layers, vocab = (
        next((location for location in (nested, top) if location.has(name)), both)
        for name in ("num_hidden_layers", "vocab_size")
    )
    top.ignore("num_hidden_layers", "vocab_size")
    heads, kv_heads = (
        both.integer(name, minimum=1, maximum=MAX_SIZE) for name in ("num_attention_heads", kv_heads_name)
    )
    if heads % kv_heads:
        raise both.error(kv_heads_name, kv_heads, f"a divisor of num_attention_heads {heads}")
    hidden_size = both.integer("hidden_size", minimum=1, maximum=MAX_SIZE)
    return Geometry(
        hidden_size=hidden_size,
        intermediate_size=both.integer("intermediate_size", minimum=1, maximum=MAX_SIZE),
        num_hidden_layers=num_layers.integer("num_hidden_layers", minimum=1, maximum=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=both.integer(head_dim_name, minimum=1, maximum=MAX_SIZE),
        rms_norm_eps=both.number("rms_norm_eps", above=0, maximum=1),
        attention_bias=both.boolean("attention_bias", default=False),
        vocab_size=vocab.integer("vocab_size", minimum=1),
        target_hidden_size=top.integer("target_hidden_size", minimum=1, maximum=MAX_SIZE, default=hidden_size),
        max_position_embeddings=both.integer("max_position_embeddings", minimum=1),
    )


def read_taps(
    fields: Fields, name: str, *, shift: int, num_target_layers: int | None, convention: str
) -> tuple[int, ...]:
    """Read the list of layer ids `name` as taps: tap j is the residual stream after j target layers.

    `shift` is what must be added to an id of the format to get the tap. `convention` describes the ids of the format in
    messages. Without `num_target_layers` the largest tap is checked later, by `pair_checks`. The output of the target's
    last layer is refused, because the formats do not define whether it is taken before or after the final norm. Raises
    `CheckpointError` unless the ids are in range and strictly increasing.
    """
    ids = fields.int_list(name)
    taps = tuple(x + shift for x in ids)
    unordered = any(later <= earlier for earlier, later in itertools.pairwise(taps))
    beyond = any(tap >= (num_target_layers or MAX_LAYERS) for tap in taps)
    if not taps or unordered or taps[0] < 0 or beyond:
        end = (
            "below the target's last layer"
            if num_target_layers is None
            else f"{num_target_layers - 1 - shift} for a target of {num_target_layers} layers (num_target_layers)"
        )
        raise fields.error(
            name, list(ids), f"a non-empty, strictly increasing list of ids from {-shift} to {end}, {convention}"
        )
    return taps


def read_mask_token(fields: Fields, vocab_size: int) -> int:
    """Read `mask_token_id`, an id of the target vocabulary.

    It is mandatory and never guessed from the ids of other special tokens. Raises `CheckpointError`.
    """
    allowed = f"0 <= id < {vocab_size} (vocab_size)"
    if not fields.has("mask_token_id"):
        raise fields.missing("mask_token_id", allowed)
    mask_token_id = fields.integer("mask_token_id")
    if not 0 <= mask_token_id < vocab_size:
        raise fields.error("mask_token_id", mask_token_id, allowed)
    return mask_token_id


def read_heads(fields: Fields, *, rank: int, head_type: str, enabled: bool, with_markov: bool) -> Heads:
    """Check the values of both heads and normalise them, so that equal networks have equal configs.

    With `markov_rank` 0 the head type is `none`. Without a confidence head `confidence_head_with_markov` is false.
    Raises `CheckpointError` about `fields`.
    """
    if rank < 0:
        raise fields.error("markov_rank", rank, f"an integer >= 0 (markov_head_type is {head_type!r})")
    if rank > MAX_SIZE:
        raise fields.error("markov_rank", rank, f"an integer <= {MAX_SIZE}")
    known = next((name for name in MARKOV_HEAD_TYPES if name == head_type.lower()), None)
    if known is None:
        raise fields.error("markov_head_type", head_type, f"{', '.join(MARKOV_HEAD_TYPES)} (markov_rank is {rank})")
    if rank == 0 and enabled and with_markov:
        raise fields.error(
            "confidence_head_with_markov",
            True,
            "false when markov_rank is 0: there is no Markov embedding to feed the confidence head",
        )
    return Heads(
        markov_rank=rank,
        markov_head_type=known if rank else "none",
        enable_confidence_head=enabled,
        confidence_head_with_markov=enabled and with_markov,
    )


def with_usable_length(geometry: Geometry, rope: RopeConfig, file: Path | str) -> Geometry:
    """The sizes with `max_position_embeddings` replaced by the `usable_length` of this rotation, in tokens."""
    return {**geometry, "max_position_embeddings": usable_length(geometry["max_position_embeddings"], rope, file)}


def read_rope(
    fields: Fields,
    *,
    head_dim: int,
    layer_types: Sequence[str],
    overrides: DraftOverrides | None,
    head_dim_name: str = "head_dim",
    kinds: Collection[RopeKind] = COMMON_KINDS,
    is_trained_factor: bool = False,
    default_theta: float | None = None,
) -> tuple[RopeConfig, tuple[Choice, ...]]:
    """Read the rotary settings of the draft, and the choices that were made.

    `head_dim_name`, `layer_types`, `kinds` and `default_theta` are those of `parse_rope`. `is_trained_factor` states
    that `partial_rotary_factor` in this format is the factor that the draft was trained with. In the other formats it
    is copied from the target's config and ignored, because their training code rotates all elements of a head.
    `overrides` replaces the factor. A factor other than the stated one is a choice, and so is `default_theta`. Raises
    `CheckpointError`.
    """
    stated = stated_partial_rotary_factor(fields, layer_types)
    factor = stated if is_trained_factor else 1.0
    choices: tuple[Choice, ...] = ()
    override = None if overrides is None else overrides.partial_rotary_factor
    if override is not None:
        if not 0 < override <= 1:
            raise field_error(fields.file, ROTARY_FLAG, override, "a number > 0 and <= 1")
        reason = f"stated by the user; the file says {'nothing' if stated is None else stated}"
        factor, choices = (
            override,
            (Choice(name="partial_rotary_factor", value=str(override), reason=reason, flag=ROTARY_FLAG),),
        )
    elif stated not in (None, factor):
        reason = f"the file says {stated}, as copied from a target; drafts are trained with the whole head rotated"
        choices = (Choice(name="partial_rotary_factor", value="1.0", reason=reason, flag=ROTARY_FLAG),)
    rope = parse_rope(
        fields,
        head_dim=head_dim,
        head_dim_name=head_dim_name,
        partial_rotary_factor=factor,
        layer_types=layer_types,
        kinds=kinds,
        default_theta=default_theta,
    )
    return rope, (*choices, *theta_choice(fields, layer_types, rope.theta))


def read_fixed_layout(
    block: Fields, block_size: int, overrides: DraftOverrides | None, *, anchor_first: bool
) -> tuple[bool, tuple[Choice, ...]]:
    """Read `sample_from_anchor` in a format that allows only one value, `anchor_first`. `overrides` may replace it.

    Returns the value and the choice made by the user, if any. Raises `CheckpointError`.
    """
    kind = "anchor-first" if anchor_first else "fill-in"
    if block.boolean("sample_from_anchor", default=anchor_first) is not anchor_first:
        raise block.error(
            "sample_from_anchor", not anchor_first, f"{str(anchor_first).lower()}: drafts of this format are {kind}"
        )
    override = None if overrides is None else overrides.sample_from_anchor
    chosen = anchor_first if override is None else override
    check_block_size(block, block_size, chosen)
    if override is None:
        return chosen, ()
    reason = f"stated by the user; the format is {kind}"
    return chosen, (Choice(name="sample_from_anchor", value=str(chosen).lower(), reason=reason, flag=LAYOUT_FLAG),)


def check_block_size(fields: Fields, block_size: int, sample_from_anchor: bool) -> None:
    """Raise `CheckpointError` unless `block_size` fits the layout.

    A fill-in block needs two slots, because slot 0 proposes nothing. The maximum limits the size of compiled programs:
    every slot is unrolled.
    """
    if block_size > MAX_BLOCK_SIZE:
        raise fields.error("block_size", block_size, f"an integer <= {MAX_BLOCK_SIZE}")
    if block_size < 2 and not sample_from_anchor:
        raise fields.error(
            "block_size",
            block_size,
            "an integer >= 2 for the fill-in layout (sample_from_anchor false), whose slot 0 proposes nothing",
        )


def refuse_unsupported(fields: Fields, *, supported: str = "silu") -> None:
    """Refuse settings of a network that is not supported.

    These are DeepSeek-V4 layers, an activation other than `supported`, quantised weights, and two different values of
    `dtype` and `torch_dtype`. Raises `CheckpointError`.
    """
    for location in fields.locations:
        model_type = location.string("model_type", default="")
        if model_type.startswith("deepseek_v4"):
            allowed = "the model type of a dense draft; DeepSeek-V4 drafts are not supported"
            raise location.error("model_type", model_type, allowed)
    names = ("hidden_act", "hidden_activation")
    activation = next((name for name in names if fields.has(name)), None)
    fields.ignore(*names)
    if activation is not None and fields.string(activation) != supported:
        raise fields.error(activation, fields.string(activation), supported)
    refuse_quantised(fields.raw, fields.file)
    dtypes = [(fields.dotted_path(name), fields.string(name)) for name in ("dtype", "torch_dtype") if fields.has(name)]
    fields.ignore("dtype", "torch_dtype")
    if dtypes:
        agreed(fields.file, dtypes)
