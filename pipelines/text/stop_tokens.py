"""The tokens that end a text, and the files that declare them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from dspark_jax.pipelines.checkpoint_data import Checkpoint
from dspark_jax.pipelines.text.tokenizer import Tokenizer
from dspark_jax.speculators_common.errors import field_error, shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopToken:
    """A token id that ends a text."""

    id: int
    sources: tuple[str, ...]  # the files, or the field of the tokenizer, that declare it
    is_in_vocabulary: bool = True  # otherwise the model cannot say it, and it is left out


def stop_tokens(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None, vocab_size: int | None = None
) -> tuple[StopToken, ...]:
    """The stop tokens of a model: the declared ids and the tokenizer's `eos_token`; empty if there are none.

    The declared ids are `eos_token_id` of generation_config.json, else of config.json, else of its `text_config`. Many
    models declare only the end of text there, while `eos_token` is the end of a turn, or the other way round; so both
    are stop tokens. Ids of `vocab_size` and more are marked.

    Raises `CheckpointError` for an `eos_token_id` that is not an id or a list of ids.
    """
    sources: dict[int, list[str]] = {}
    for token, source in _declared(checkpoint):
        if source not in sources.setdefault(token, []):
            sources[token].append(source)
    if tokenizer is not None and tokenizer.eos_id is not None:
        sources.setdefault(tokenizer.eos_id, []).append(f"eos_token {tokenizer.eos_token!r} of the tokenizer")
    return tuple(
        StopToken(id=token, sources=tuple(names), is_in_vocabulary=vocab_size is None or token < vocab_size)
        for token, names in sources.items()
    )


def stop_ids(tokens: Sequence[StopToken]) -> tuple[int, ...]:
    """The ids of those tokens that are in the vocabulary."""
    return tuple(token.id for token in tokens if token.is_in_vocabulary)


def stop_reason(tokens: Sequence[StopToken]) -> str:
    """The sources of the ids as text: `1, 106: config.json; 107: eos_token '</s>' of the tokenizer`.

    If all ids have the same sources, the ids are left out. Ids beyond the vocabulary are named, since no text ends by
    them. Empty for no tokens.
    """
    groups: dict[str, list[str]] = {}
    for token in tokens:
        beyond = "" if token.is_in_vocabulary else ", not used, as it is beyond the vocabulary"
        groups.setdefault(" and ".join(token.sources) + beyond, []).append(shown(token.id))
    if len(groups) == 1 and tokens[0].is_in_vocabulary:
        return next(iter(groups))
    return "; ".join(f"{', '.join(ids)}: {sources}" for sources, ids in groups.items())


def _declared(checkpoint: Checkpoint) -> Iterator[tuple[int, str]]:
    """(id, name of the file) for the first of the configs that declares any id."""
    generation_file = checkpoint.path / "generation_config.json" if checkpoint.path.is_dir() else checkpoint.path
    config_file = Path(checkpoint.config_file)
    text = checkpoint.config.get("text_config")
    configs = [
        (checkpoint.generation_config, generation_file, generation_file.name),
        (checkpoint.config, config_file, config_file.name),
    ]
    if isinstance(text, dict):
        configs.append((text, config_file, f"text_config of {config_file.name}"))
    for config, file, name in configs:
        declared = config.get("eos_token_id")
        if declared is None:
            continue
        ids = declared if isinstance(declared, list) else [declared]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise field_error(file, "eos_token_id", declared, "a token id or a list of token ids")
        if ids:
            yield from ((token, name) for token in ids)
            return
