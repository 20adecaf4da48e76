"""The decoding options that a target's generation_config.json states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from dspark_jax.pipelines.checkpoint_data import Checkpoint
from dspark_jax.pipelines.sampling.checks import check_option
from dspark_jax.pipelines.sampling.generation import GenerationFields
from dspark_jax.speculators_common.errors import RequestError, field_error
from dspark_jax.speculators_common.scalars import is_integer

_NAME = "generation_config.json"
_TAKEN = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_new_tokens",
    "min_new_tokens",
)
# Rules that choose other tokens, with the value at which they do nothing.
_NOT_KEPT: Mapping[str, Any] = {
    "num_beams": 1,
    "typical_p": 1,
    "top_h": 0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "penalty_alpha": 0,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1,
    "sequence_bias": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "forced_decoder_ids": None,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
    "dola_layers": None,
}
# Read elsewhere, or not about decoding.
_SILENT = frozenset({"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "use_cache", "do_sample"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatedGeneration:
    """What one file states."""

    file: str
    fields: GenerationFields
    do_sample: bool  # false, also where the file does not say: decoding is greedy
    unused: tuple[str, ...]  # names of further fields, which have no influence


def stated_generation(checkpoint: Checkpoint, vocab_size: int) -> StatedGeneration:
    """Read the decoding options of a target of `vocab_size` ids.

    Without `do_sample` decoding is greedy, as in transformers, and options that need a temperature are not taken. A
    field that the file does not state keeps its default here; in particular top-k is off, where transformers has 50.
    Raises `RequestError` if there is no file, `CheckpointError` for values out of range and for rules that would choose
    other tokens and that this package does not have.
    """
    file = checkpoint.path / _NAME
    if not checkpoint.path.is_dir() or not file.exists():
        raise RequestError(
            field="generation_config", found=f"no {_NAME} in {checkpoint.path}", allowed="a target that has one"
        )
    stated = {name: value for name, value in checkpoint.generation_config.items() if value is not None}
    for name, neutral in _NOT_KEPT.items():
        value = stated.get(name)
        if value is not None and value is not False and value != neutral and value != []:
            raise field_error(file, name, value, f"{'nothing' if neutral is None else neutral}: there is no such rule")
    do_sample = stated.get("do_sample", False)
    if not isinstance(do_sample, bool):
        raise field_error(file, "do_sample", do_sample, "true or false")
    fields = {name: _checked(file, name, stated[name]) for name in _TAKEN if name in stated}
    if banned := _banned_ids(stated, file, vocab_size):
        fields["banned_ids"] = banned
    if "stop_strings" in stated:
        strings = stated["stop_strings"]
        fields["stop_strings"] = _checked(file, "stop_strings", [strings] if isinstance(strings, str) else strings)
    if do_sample:
        fields.setdefault("temperature", 1.0)
    else:
        fields = {
            name: value for name, value in fields.items() if name not in ("temperature", "top_k", "top_p", "min_p")
        }
    known = {*_TAKEN, *_NOT_KEPT, *_SILENT, "suppress_tokens", "bad_words_ids", "stop_strings"}
    others = [name for name, value in stated.items() if name not in known and value is not False and value != []]
    unused = tuple(name for name in others if not name.startswith("_"))
    return StatedGeneration(file=str(file), fields=cast(GenerationFields, fields), do_sample=do_sample, unused=unused)


def _checked(file: Path, name: str, value: Any) -> Any:
    try:
        check_option(name, value)
    except RequestError as error:
        raise field_error(file, name, value, error.allowed) from None
    return value


def _banned_ids(stated: Mapping[str, Any], file: Path, vocab_size: int) -> tuple[int, ...]:
    """The ids of `suppress_tokens`, and the words of `bad_words_ids`, if each of them is one token."""
    suppressed = stated.get("suppress_tokens", [])
    if not isinstance(suppressed, list) or not all(map(is_integer, suppressed)):
        raise field_error(file, "suppress_tokens", suppressed, "a list of token ids")
    words = stated.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(
        isinstance(word, list) and len(word) == 1 and is_integer(word[0]) for word in words
    ):
        raise field_error(
            file, "bad_words_ids", words, "a list of lists of one token id: there is no rule for sequences"
        )
    for name, ids in (("suppress_tokens", suppressed), ("bad_words_ids", [word[0] for word in words])):
        if any(not 0 <= token < vocab_size for token in ids):
            raise field_error(file, name, ids, f"ids 0..{vocab_size - 1}")
    return tuple(dict.fromkeys([*suppressed, *(word[0] for word in words)]))
