"""The special tokens around a plain prompt: begin-of-text before it, in some models end-of-text after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tokenizers

_PROBE = "a"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptEnds:
    """The token ids before and after a plain prompt."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    bos: int | None = None  # the begin-of-text id, if the tokenizer names one

    @classmethod
    def of(
        cls,
        backend: tokenizers.Tokenizer,
        *,
        bos: int | None,
        eos: int | None,
        add_bos: bool | None,
        add_eos: bool | None,
    ) -> PromptEnds:
        """The ends of prompts for `backend`. `add_bos` and `add_eos` are the flags of the tokenizer's config.

        A flag overrides the post-processor of the tokenizer. Without a flag, the post-processor decides about BOS, and
        no EOS is added, because the prompt is to be continued. `bos` and `eos` are ids; a true flag needs its id.
        """
        before, after = _of_post_processor(backend)
        if add_bos is not None and bos is not None:
            has_bos = bos in before
            if add_bos and not has_bos:
                before = (bos, *before)
            elif not add_bos and has_bos:
                before = tuple(token for token in before if token != bos)
        if not add_eos:
            after = ()
        elif eos is not None and eos not in after:
            after = (*after, eos)
        return cls(before=before, after=after, bos=bos)

    def around(self, ids: Sequence[int]) -> list[int]:
        """`ids` with the ends added. An end that `ids` has already is not added again."""
        before, after, text = self.before, self.after, tuple(ids)
        if text[: len(before)] == before:
            before = ()
        elif text[:1] == (self.bos,):
            before = tuple(token for token in before if token != self.bos)
        if text[len(text) - len(after) :] == after:
            after = ()
        return [*before, *text, *after]


def _of_post_processor(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor adds before and after a text, found by encoding one letter."""
    body = tuple(backend.encode(_PROBE, add_special_tokens=False).ids)
    whole = tuple(backend.encode(_PROBE, add_special_tokens=True).ids)
    for start in range(len(whole) - len(body) + 1):
        if body and whole[start : start + len(body)] == body:
            return whole[:start], whole[start + len(body) :]
    return (), ()
