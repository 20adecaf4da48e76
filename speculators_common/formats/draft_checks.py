"""Checks that a `DraftConfig` describes a network that can be built.

A parsed file has passed the checks of its reader. A program can also fill in a `DraftConfig` by itself, so the model
constructors check it here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dspark_jax.speculators_common.errors import DSparkError, shown
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, DraftStyle
from dspark_jax.speculators_common.formats.size_limits import INT32_MAX, MAX_BLOCK_SIZE, MAX_LAYERS, MAX_SIZE

_HEAD_TYPES = ("none", "vanilla", "gated", "rnn")
Rule = tuple[str, object, bool, str]  # field, value found, whether it is allowed, values allowed


def check_block_draft(config: DraftConfig, where: str, *, style: DraftStyle) -> None:
    """Check every field that a block draft of this `style` depends on.

    Raises a `DSparkError` for the first field with a value that is not allowed. The message begins with `where`.
    """
    for name, value, fits, allowed in itertools.chain(
        _size_rules(config), _block_rules(config), _head_rules(config), _layer_rules(config, style)
    ):
        if not fits:
            raise DSparkError(f"{where}: {name}: found {shown(value)}, allowed {allowed}")


def _size_rules(config: DraftConfig) -> Iterator[Rule]:
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "target_hidden_size",
    ):
        value = getattr(config, name)
        yield name, value, 1 <= value <= MAX_SIZE, f"1..{MAX_SIZE}"
    for name in ("vocab_size", "draft_vocab_size"):
        value = getattr(config, name)
        yield name, value, 1 <= value <= INT32_MAX, "1 or more, within int32"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    yield "num_key_value_heads", kv_heads, heads % kv_heads == 0, f"a divisor of num_attention_heads {heads}"
    yield "rms_norm_eps", config.rms_norm_eps, 0 < config.rms_norm_eps <= 1, "a number > 0 and <= 1"
    longest = config.max_position_embeddings
    yield "max_position_embeddings", longest, longest is None or longest >= 1, "None, or 1 or more"


def _block_rules(config: DraftConfig) -> Iterator[Rule]:
    smallest = 1 if config.sample_from_anchor else 2
    allowed = f"1 or more anchor-first, 2 or more fill-in, at most {MAX_BLOCK_SIZE}"
    yield "block_size", config.block_size, smallest <= config.block_size <= MAX_BLOCK_SIZE, allowed
    mask = config.mask_token_id
    yield "mask_token_id", mask, mask is not None and 0 <= mask < config.vocab_size, f"0..{config.vocab_size - 1}"
    numbers = [tap for tap in config.taps if isinstance(tap, int)]
    ordered = (
        len(numbers) == config.num_taps > 0 and numbers[0] >= 0 and all(a < b for a, b in itertools.pairwise(numbers))
    )
    yield "taps", list(config.taps), ordered, "numbers of target layers from 0 on, strictly increasing, at least one"


def _head_rules(config: DraftConfig) -> Iterator[Rule]:
    rank, kind = config.markov_rank, config.markov_head_type
    yield "markov_rank", rank, 0 <= rank <= MAX_SIZE, f"0 or more, at most {MAX_SIZE}"
    yield (
        "markov_head_type",
        kind,
        kind in _HEAD_TYPES and (kind == "none") == (rank == 0),
        "vanilla, gated, rnn, or none at markov_rank 0",
    )
    reads_markov = config.confidence_head_with_markov
    yield "confidence_head_with_markov", reads_markov, rank > 0 or not reads_markov, "False at markov_rank 0"


def _layer_rules(config: DraftConfig, style: DraftStyle) -> Iterator[Rule]:
    count = config.num_hidden_layers
    yield "style", config.style, config.style == style, style
    yield "num_hidden_layers", count, 1 <= count <= MAX_LAYERS, f"1..{MAX_LAYERS}"
    yield "layers", len(config.layers), len(config.layers) == count, f"{count} entries (num_hidden_layers)"
    for index, mask in enumerate(config.layers):
        fits = mask.window is None or 1 <= mask.window <= INT32_MAX
        yield f"layers[{index}].window", mask.window, fits, "None, or 1 or more, within int32"
    rotary_dim = config.rope.rotary_dim
    yield (
        "rope.rotary_dim",
        rotary_dim,
        rotary_dim % 2 == 0 and 2 <= rotary_dim <= config.head_dim,
        f"an even number from 2 to head_dim {config.head_dim}",
    )
