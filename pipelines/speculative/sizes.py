"""The sizes of an engine, and what follows from them. All are known before any weights are read."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from dspark_jax.architectures.nn.attention.backends.registry import attention_backend
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.protocols import Draft, Target
from dspark_jax.pipelines.sampling.checks import check_generation
from dspark_jax.pipelines.sampling.generation import Generation, Request
from dspark_jax.pipelines.sampling.rules import Rule
from dspark_jax.pipelines.speculative.state import RowSizes
from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.scalars import is_integer, plain

_SMALLEST_BUCKET = 256  # positions; every bucket costs seconds of compilation
_PACKED_SHARES = (0.6,)  # packed flat batches hold this share of all drafts that the rows can have


ProposalKind = Literal["argmax", "sampled"]
PROPOSAL_KINDS: tuple[ProposalKind, ...] = get_args(ProposalKind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes that are fixed when the engine is built."""

    num_speculative_tokens: int | None = None  # k; None = D, all that the draft's block gives
    max_seq_len: int = 2048  # tokens of prompt and output together
    batch_size: int = 1  # rows that decode together
    num_pages: int | None = None  # of the pool; None = enough for batch_size rows of max_seq_len
    page_size: int = 64  # positions per page
    prefill_chunks: tuple[int, ...] = (64, 256)  # widths in tokens that prompt chunks are padded to
    rounds_per_call: int = 32  # rounds of one device loop
    max_stop_ids: int = 8  # per request
    max_biased_ids: int = 320  # per request, banned ids included
    proposal: ProposalKind = "argmax"  # how drafts are chosen where a request samples
    acceptance: Rule | None = None  # a rule in place of exact acceptance

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))


def drafts_per_round(draft: DraftConfig | None, asked: int | None) -> int:
    """k: `asked`, or D, all that the draft's block gives, if that is `None`; 0 without a draft.

    Raises `RequestError` unless `1 <= asked <= D`.
    """
    if draft is None:
        return 0
    if asked is None:
        return draft.max_drafts
    if not is_integer(asked) or not 1 <= asked <= draft.max_drafts:
        where = f"{draft.source}: " if draft.source else ""
        raise RequestError(
            field="num_speculative_tokens",
            found=asked,
            allowed=f"1..{draft.max_drafts} ({where}block of {draft.block_size})",
        )
    return asked


def _check_rules(options: EngineOptions, draft: DraftConfig | None) -> None:
    if options.proposal not in PROPOSAL_KINDS:
        raise RequestError(field="proposal", found=options.proposal, allowed=" or ".join(PROPOSAL_KINDS))
    if options.acceptance is None:
        return
    if not isinstance(options.acceptance, Rule):
        raise RequestError(
            field="acceptance", found=options.acceptance, allowed="a rule: `Relaxed`, `Synthetic` or its text, or None"
        )
    found = str(options.acceptance)
    if draft is None:
        raise RequestError(field="acceptance", found=found, allowed="only with a draft")
    if options.proposal != "argmax":
        raise RequestError(field="acceptance", found=found, allowed=f"exact, with {options.proposal} drafts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The sizes of one engine for one pair, and the limits of its requests."""

    options: EngineOptions
    num_speculative_tokens: int  # k; 0 without a draft
    vocab_size: int  # V
    is_cut_by_confidence: bool  # a confidence head can make proposals shorter than k
    target_params: KVParams
    draft_params: KVParams | None
    draft_vocab_size: int | None  # Vd; None without a draft

    @classmethod
    def of(
        cls,
        options: EngineOptions,
        *,
        vocab_size: int,
        target_params: KVParams,
        draft: DraftConfig | None = None,
        draft_params: KVParams | None = None,
    ) -> EnginePlan:
        """The plan for a target of `vocab_size` ids, alone or with a draft. Raises `RequestError` if k is more than the
        draft's block gives, and for a proposal or rule that cannot be used.
        """
        _check_rules(options, draft)
        return cls(
            options=options,
            num_speculative_tokens=drafts_per_round(draft, options.num_speculative_tokens),
            vocab_size=vocab_size,
            is_cut_by_confidence=draft is not None and draft.enable_confidence_head,
            target_params=target_params,
            draft_params=draft_params,
            draft_vocab_size=None if draft is None else draft.num_draft_ids,
        )

    @property
    def tokens_per_round(self) -> int:
        """Positions that one verification of a row writes: the anchor and its drafts."""
        return 1 + self.num_speculative_tokens

    @property
    def pages_per_row(self) -> int:
        """Pages of a row of `max_seq_len` tokens, with one round beyond them."""
        return self.pages_of(self.options.max_seq_len + self.tokens_per_round)

    @property
    def num_pages(self) -> int:
        """Pages of the whole pool."""
        return self.options.num_pages or self.options.batch_size * self.pages_per_row

    @property
    def row_sizes(self) -> RowSizes:
        """The sizes of the per-row state."""
        return RowSizes(
            pages_per_row=self.pages_per_row,
            num_pages=self.num_pages,
            page_size=self.options.page_size,
            num_speculative_tokens=self.num_speculative_tokens,
            num_stop_ids=self.options.max_stop_ids,
            num_biased_ids=self.options.max_biased_ids,
            draft_vocab_size=self.draft_vocab_size if self.options.proposal == "sampled" else None,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of both caches."""
        params = (self.target_params, self.draft_params)
        return self.num_pages * sum(param.bytes_per_page() for param in params if param is not None)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output together. The pool must hold one round beyond them."""
        return min(self.options.max_seq_len, self.num_pages * self.options.page_size - self.tokens_per_round)

    @property
    def page_buckets(self) -> tuple[int, ...]:
        """The page counts that programs are compiled for: each twice the one before, up to `pages_per_row`.

        Only `pages_per_row` where attention reads by length, as a longer page table costs nothing there.
        """
        if attention_backend(self.target_params.platform).reads_by_length:
            return (self.pages_per_row,)
        smallest = max(1, self.pages_of(_SMALLEST_BUCKET))
        sizes = [min(smallest, self.pages_per_row)]
        while sizes[-1] < self.pages_per_row:
            sizes.append(min(2 * sizes[-1], self.pages_per_row))
        return tuple(sizes)

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """The flat batch lengths that a round is compiled for, ascending. The last one has room for every draft.

        At batch 1, or if proposals are never shorter than k, there is one length: packing would save nothing.
        """
        rows, drafts = self.options.batch_size, self.num_speculative_tokens
        shares = _PACKED_SHARES if rows > 1 and drafts and self.is_cut_by_confidence else ()
        return tuple(sorted({rows + math.ceil(rows * drafts * share) for share in (*shares, 1.0)}))

    def pages_of(self, positions: int) -> int:
        """Number of pages that hold `positions` positions."""
        return -(-positions // self.options.page_size)

    def page_bucket(self, positions: int) -> int:
        """The smallest page bucket with room for `positions` positions."""
        pages = self.pages_of(positions)
        return next((bucket for bucket in self.page_buckets if bucket >= pages), self.pages_per_row)

    def token_bucket(self, tokens: int) -> int:
        """The smallest token bucket with room for `tokens` tokens."""
        return next(bucket for bucket in self.token_buckets if bucket >= tokens)

    def tokens_of_bucket(self, bucket: int) -> range | None:
        """The numbers of tokens whose `token_bucket` is `bucket`; `None` if there is only one bucket."""
        buckets = self.token_buckets
        if len(buckets) == 1:
            return None
        smaller = [other for other in buckets if other < bucket]
        return range(smaller[-1] + 1 if smaller else 0, bucket + 1)

    def allowed_new_tokens(self, request: Request) -> int:
        """The request's budget, or what its prompt leaves of the longest sequence if that is less."""
        return min(request.generation.max_new_tokens, self.longest - len(request.prompt_ids))

    def check_generation(self, generation: Generation) -> None:
        """Raise `RequestError` for options that are out of range, whatever the prompt."""
        check_generation(
            generation,
            vocab_size=self.vocab_size,
            most_stop_ids=self.options.max_stop_ids,
            most_biased_ids=self.options.max_biased_ids,
        )

    def check(self, request: Request) -> None:
        """Raise `RequestError` for a request that cannot be served."""
        self.check_generation(request.generation)
        length = len(request.prompt_ids)
        outside = [token for token in request.prompt_ids if not is_integer(token) or not 0 <= token < self.vocab_size]
        faults = [
            (not length, "no tokens", "at least one token"),
            (bool(outside), f"token id {outside[:1]}", f"ids 0..{self.vocab_size - 1}"),
            (length >= self.longest, f"{length} tokens", f"at most {self.longest - 1} (max_seq_len, page pool)"),
        ]
        for is_fault, found, allowed in faults:
            if is_fault:
                raise RequestError(f"found {found}, allowed {allowed}", field="prompt", found=found, allowed=allowed)
        if request.generation.stop_strings and request.new_watch is None:
            raise RequestError(
                field="stop_strings",
                found=request.generation.stop_strings,
                allowed="only with `Request.new_watch`, which finds them",
            )
        if request.generation.grammar is not None and request.new_matcher is None:
            raise RequestError(
                field="grammar",
                found=request.generation.grammar.text,
                allowed="only with `Request.new_matcher`, which keeps to it",
            )
        least, most = request.generation.min_new_tokens, self.allowed_new_tokens(request)
        if least > most:
            raise RequestError(field="min_new_tokens", found=least, allowed=f"at most {most} after this prompt")


def plan_of(target: Target, draft: Draft | None, options: EngineOptions) -> EnginePlan:
    """The plan for two modules. Their parameters may be abstract (`jax.ShapeDtypeStruct`)."""
    return EnginePlan.of(
        options,
        vocab_size=int(target.config.vocab_size),
        target_params=target.kv_params(options.page_size),
        draft=None if draft is None else draft.config,
        draft_params=None if draft is None else draft.kv_params(options.page_size),
    )
