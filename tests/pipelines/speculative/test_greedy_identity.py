"""In float32 the text of speculative decoding is that of plain greedy decoding, token for token, whatever the draft
proposes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dspark_jax.pipelines.speculative.engine import Completion, Engine, EngineOptions
from tests.support.planted import BLOCK, CYCLE, DraftPlant, cycle_from, planted_pair, scripted_rounds, spoiled
from tests.support.random_pairs import (
    VOCAB,
    bigram_draft,
    frequent_successors,
    plain_greedy,
    random_draft,
    random_prompts,
    random_target,
)
from tests.support.requests import request_for
from tests.support.tiny_checkpoints import TinyCheckpoint, load_pair

NEW_TOKENS = 20
PROMPTS = tuple(random_prompts(100))

pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def _texts() -> tuple[tuple[int, ...], ...]:
    """The tokens that a bigram draft sees: the last of each prompt, and the output of plain decoding."""
    return tuple((prompt[-1], *text) for prompt, text in zip(PROMPTS, plain_greedy(PROMPTS, NEW_TOKENS), strict=True))


def _never_next() -> dict[int, int]:
    """For every token one that never follows it in these texts."""
    follows = np.zeros((VOCAB, VOCAB), bool)
    for text in _texts():
        follows[text[:-1], text[1:]] = True
    return {token: int((~row).argmax()) for token, row in enumerate(follows)}


DRAFTS: dict[str, Callable[[], TinyCheckpoint]] = {
    "bigram": lambda: bigram_draft(frequent_successors(_texts()), num_layers=1, block_size=4),
    "adversarial": lambda: bigram_draft(_never_next(), strength=1000, num_layers=1),
    "random fill-in rnn, pruned": lambda: random_draft(
        num_layers=1, markov_rank=4, markov_head_type="rnn", sample_from_anchor=False, d2t=tuple(range(1, VOCAB, 2))
    ),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings of one engine: its draft, k, the widths of prompt chunks, the batch size and the driver."""

    draft: str | None
    num_speculative_tokens: int | None = None
    batch_size: int = 8
    chunks: tuple[int, ...] = (4,)
    stream: bool = False

    def completions(self) -> list[Completion]:
        pair: tuple[Any, Any] = load_pair(random_target(), None if self.draft is None else DRAFTS[self.draft]())
        options = EngineOptions(
            num_speculative_tokens=self.num_speculative_tokens,
            max_seq_len=40,
            batch_size=self.batch_size,
            page_size=8,
            prefill_chunks=self.chunks,
            rounds_per_call=7,
        )
        requests = [request_for(prompt_ids=prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
        return Engine(*pair, options).generate(requests, stream=self.stream)


SETTINGS = [
    Setting(None),
    Setting("bigram", 4, batch_size=3, chunks=(7,), stream=True),
    Setting("bigram", 3, batch_size=1, chunks=(12,)),
    Setting("adversarial", batch_size=6, chunks=(5,)),
    Setting("random fill-in rnn, pruned", batch_size=8, chunks=(12,)),
]
MORE_SETTINGS = [
    Setting("bigram", 2, batch_size=5, chunks=(1,), stream=True),
    Setting("bigram", 1, batch_size=4, chunks=(8,)),
]


@pytest.mark.parametrize(
    "setting", [*SETTINGS, *(pytest.param(one, marks=pytest.mark.thorough) for one in MORE_SETTINGS)], ids=str
)
def test_the_text_is_that_of_plain_decoding(setting: Setting) -> None:
    completions = setting.completions()
    wanted = plain_greedy(PROMPTS, NEW_TOKENS)
    different = [index for index, completion in enumerate(completions) if tuple(completion.output_ids) != wanted[index]]
    assert different == []
    rounds = [accepted for completion in completions for _, accepted in completion.rounds]
    if setting.draft == "bigram":
        assert set(rounds) == set(range((setting.num_speculative_tokens or 0) + 1)), (
            "some accept pattern was never tried"
        )
    if setting.draft in (None, "adversarial"):
        assert set(rounds) == {0}


def test_every_scripted_accept_pattern_is_followed_exactly() -> None:
    """By both drivers, five requests over two rows."""
    markov = spoiled({0, 2, 5, 9, 14})
    options = EngineOptions(batch_size=2, max_seq_len=80, page_size=16, prefill_chunks=(4,), rounds_per_call=5)
    engine = Engine(*planted_pair(DraftPlant(markov=markov)), options)
    request = request_for(prompt_ids=cycle_from(21, 3), max_new_tokens=60)
    completions = engine.generate([request] * 3) + engine.generate([request] * 2, stream=True)
    for completion in completions:
        assert completion.output_ids == list(cycle_from(0, 60))
        scripted = scripted_rounds(markov, CYCLE[0], BLOCK, len(completion.rounds))
        assert [accepted for _, accepted in completion.rounds] == scripted
        assert scripted[:6] == [0, 1, 2, 3, 4, 5]
