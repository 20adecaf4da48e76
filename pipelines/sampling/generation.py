"""How a prompt is to be continued: one object, handed on from the command line or Python call down to the row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from dspark_jax.pipelines.sampling.grammar import Grammar
from dspark_jax.pipelines.sampling.text_watch import NewWatch
from dspark_jax.pipelines.sampling.token_matcher import NewMatcher
from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.scalars import plain

DEFAULT_MAX_NEW_TOKENS = 256
MOST_LOGPROBS = 20  # of one token
_LISTS = {
    "stop_ids": "token ids",
    "stop_strings": "texts",
    "banned_ids": "token ids",
    "logit_bias": "pairs of a token id and a number",
}
_NUMBERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The options of one continuation. The defaults are greedy decoding without changes to the logits.

    `docs/sampling.md` says how each option acts, and in which order.
    """

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0  # no stop token is chosen, and no stop string counts, before this many tokens
    stop_ids: tuple[int, ...] | None = None  # tokens that end the text; None = those of the model
    stop_strings: tuple[str, ...] = ()  # texts that end the text, and are no part of it
    confidence_threshold: float = 0.0  # a proposal ends before the first draft below it; 0 = the draft decides
    temperature: float = 0.0  # 0 = greedy: the most probable token
    top_k: int = 0  # choose among the k most probable tokens; 0 = all
    top_p: float = 1.0  # choose among the most probable tokens that have this probability together
    min_p: float = 0.0  # choose among tokens with this share of the largest probability
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or output, multiplies negative ones
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # subtracted for each time that the output has the token
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number to add to its logit)
    banned_ids: tuple[int, ...] = ()  # tokens that are never chosen
    seed: int | None = None  # of the random numbers; None = one is drawn for every request
    grammar: Grammar | None = None  # the form that the text must have
    num_logprobs: int | None = None  # log-probabilities of each output token and of this many most probable ones

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random."""
        return self.temperature > 0

    @property
    def described(self) -> str:
        """How tokens are chosen, in words: `greedy`, or `temperature 0.8, top_p 0.9`. Seeds and ids are left out."""
        neutral = Generation()
        changed = [name for name in _NUMBERS if getattr(self, name) != getattr(neutral, name)]
        said = [f"{name} {getattr(self, name):g}" for name in changed]
        return ", ".join(said if self.samples else ["greedy", *said])

    @property
    def edits_logits(self) -> bool:
        """Whether the options change logits before temperature and filters."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.min_new_tokens or self.logit_bias or self.banned_ids) or penalties != (1, 0, 0)


class GenerationFields(TypedDict, total=False):
    """The fields of `Generation` as keyword arguments of `Pipeline.generate`."""

    max_new_tokens: int
    min_new_tokens: int
    stop_ids: Sequence[int] | None
    stop_strings: Sequence[str]
    confidence_threshold: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    banned_ids: Sequence[int]
    seed: int | None
    grammar: Grammar | None
    num_logprobs: int | None


def changed(generation: Generation, changes: GenerationFields) -> Generation:
    """`generation` with some fields replaced. Lists become tuples; raises `RequestError` where a list is needed."""
    fields: dict[str, Any] = dict(changes)
    if isinstance(biases := fields.get("logit_bias"), Mapping):
        fields["logit_bias"] = tuple(biases.items())
    for name, what in _LISTS.items():
        value = fields.get(name)
        if value is None and (name not in fields or name == "stop_ids"):
            continue
        if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
            raise RequestError(field=name, found=value, allowed=f"a list of {what}")
        fields[name] = tuple(value)
    return dataclasses.replace(generation, **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt as token ids, and the options of its continuation."""

    prompt_ids: tuple[int, ...]
    generation: Generation = Generation()
    sample: int = 0  # number of this continuation among several of one prompt: each has random numbers of its own
    new_watch: NewWatch | None = None  # makes the watch that ends the text at a stop string
    new_matcher: NewMatcher | None = None  # makes the matcher of the text's grammar

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", plain(self.prompt_ids))
        object.__setattr__(self, "sample", plain(self.sample))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end the text. `None` in `generation` means none here: an engine does not know the model's."""
        return self.generation.stop_ids or ()

    def seed_words(self) -> np.ndarray:
        """Two uint32 words from which all random numbers of the request follow. Without a seed they differ from call to
        call.
        """
        return np.random.SeedSequence(self.generation.seed, spawn_key=(self.sample,)).generate_state(2, np.uint32)
