"""A target whose logits depend on the previous token alone, and drafts for it with the real chain of a draft. Fifty
thousand rows of such a pair run in one program, and the exact distribution of their texts can be written down.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from dspark_jax.architectures.drafting.draft_chain import DraftChain, VocabTable
from dspark_jax.architectures.drafting.tables import DraftTables
from dspark_jax.architectures.nn.attention.block_context import BlockContext
from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.kv_params import KVParams
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.architectures.protocols import TargetTables
from dspark_jax.pipelines.sampling.controls import Controls, request_controls
from dspark_jax.pipelines.sampling.generation import Generation
from dspark_jax.pipelines.sampling.policy import Policy
from dspark_jax.pipelines.sampling.token_masks import TokenMasks
from dspark_jax.pipelines.speculative.state import RoundState, Rows, RowSizes, empty_rows
from dspark_jax.pipelines.speculative.step import StepConfig, speculative_step
from dspark_jax.speculators_common.formats.draft_config import DraftConfig, LayerMask, MarkovHeadType
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.heads.confidence_head import ConfidenceHead
from dspark_jax.speculators_common.heads.markov_head import make_markov_head
from dspark_jax.speculators_common.numerics.platform import Platform

VOCAB, WIDTH, LENGTH = 6, 4, 3  # ids of the target, block slots, tokens of each text
KEPT_IDS = (5, 0, 3, 2)  # target ids of a pruned draft
NUM_BIASED_IDS, NUM_STOP_IDS = 4, 2
_CPU = Platform.of("cpu")
_PAGE = KVParams(num_layers=1, num_key_value_heads=1, head_dim=1, page_size=16, platform=_CPU)
# Which tokens may follow each token, where a request states a grammar: about three of six.
FOLLOWS = np.random.default_rng(8).random((VOCAB, VOCAB)) < 0.5
TABLE = np.random.default_rng(2).normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)  # [previous, next]


class BigramTarget:
    """`Target`: the logits after token t are `TABLE[t]`."""

    config = cast(Any, types.SimpleNamespace(vocab_size=VOCAB, hidden_size=VOCAB, num_hidden_layers=1))

    def kv_params(self, page_size: int) -> KVParams:
        return dataclasses.replace(_PAGE, page_size=page_size)

    def embed_tokens(self, ids: Int32[Array, "*axes"]) -> Float[Array, "*axes H"]:
        return jax.nn.one_hot(ids, VOCAB)

    def lm_head(self, hidden: Float[Array, "*axes H"]) -> Float[Array, "*axes V"]:
        return hidden @ jnp.asarray(TABLE)

    compute_logits = lm_head

    def forward(
        self, batch: RaggedBatch, cache: KVCache, taps: tuple[int, ...]
    ) -> tuple[Float[Array, "T H"], Float[Array, "T mH"], KVCache]:
        hidden = self.embed_tokens(batch.tokens)
        return hidden, hidden, cache


class ChainDraft(DraftChain):
    """`Draft` without a network: the states of a block are a row of the anchor plus a row of the slot. Markov head,
    confidence head and vocabulary map are the real ones, with random values.
    """

    def __init__(self, head: MarkovHeadType, *, pruned: bool, sample_from_anchor: bool) -> None:
        self.config = config = _config(head, pruned, sample_from_anchor)
        self.tables, self.platform = DraftTables(), _CPU
        rngs = nnx.Rngs(0)
        kwargs: dict[str, Any] = {"platform": _CPU, "rngs": rngs}
        self.markov_head = make_markov_head(config, dtype=jnp.float32, **kwargs)
        self.confidence_head = ConfidenceHead(config, **kwargs)
        self.draft_to_target = VocabTable(jnp.asarray(KEPT_IDS, jnp.int32)) if pruned else None
        ids = list(KEPT_IDS) if pruned else list(range(VOCAB))
        random = np.random.default_rng(5)
        # Like the target's logits, but not the same: drafts are accepted often, not always.
        self.head = nnx.Param(jnp.asarray(TABLE[:, ids] + random.normal(0, 0.7, (VOCAB, len(ids))), jnp.float32))
        self.anchor_rows = nnx.Param(jnp.eye(VOCAB))
        self.slot_rows = nnx.Param(jnp.asarray(random.normal(0, 0.3, (WIDTH, VOCAB)), jnp.float32))
        for _, parameter in nnx.to_flat_state(nnx.state((self.markov_head, self.confidence_head), nnx.Param)):
            parameter[...] = jnp.asarray(random.normal(0, 0.8, parameter[...].shape), jnp.float32)

    def kv_params(self, page_size: int) -> KVParams:
        return dataclasses.replace(_PAGE, page_size=page_size)

    def project_target_hidden(self, taps: Float[Array, "T mH"]) -> Float[Array, "T d"]:
        return taps

    def materialize_kv(self, context: Float[Array, "T d"], batch: RaggedBatch, cache: KVCache) -> KVCache:
        return cache

    def embed_block(self, anchor: Int32[Array, "B"], target: TargetTables) -> Float[Array, "B W d"]:
        return self.anchor_rows[...][anchor][:, None] + self.slot_rows[...][None]

    def forward_block(
        self, embeds: Float[Array, "B W d"], context: BlockContext, num_slots: int | None = None
    ) -> Float[Array, "B Ws d"]:
        return embeds[:, :num_slots]

    def compute_logits(self, hidden: Float[Array, "B Ws d"], target: TargetTables) -> Float[Array, "B Ds Vd"]:
        return self._drafting(hidden) @ self.head[...]


def _config(head: MarkovHeadType, pruned: bool, sample_from_anchor: bool) -> DraftConfig:
    return DraftConfig(
        hidden_size=VOCAB,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=1,
        rms_norm_eps=1e-6,
        attention_bias=False,
        vocab_size=VOCAB,
        draft_vocab_size=len(KEPT_IDS) if pruned else VOCAB,
        target_hidden_size=VOCAB,
        taps=(1,),
        block_size=WIDTH,
        sample_from_anchor=sample_from_anchor,
        mask_token_id=0,
        markov_rank=0 if head == "none" else 3,
        markov_head_type=head,
        enable_confidence_head=True,
        confidence_head_with_markov=head != "none",
        layers=(LayerMask(),),
        rope=RopeConfig(theta=1.0, rotary_dim=0),
        max_position_embeddings=None,
        architecture="",
        family="",
    )


@dataclasses.dataclass(frozen=True)
class Pair:
    """A pair and its round: the draft, the kind of proposal, and the share of all drafts that a round verifies."""

    head: MarkovHeadType = "vanilla"
    proposal: str = "argmax"
    pruned: bool = False
    sample_from_anchor: bool = True
    verified_share: float = 1.0  # below 1 verification is packed and some drafts are dropped
    masked: bool = False  # tokens must follow `FOLLOWS`
    keeps_refused: bool = False  # the first draft that must not follow is the last one that is verified, not cut

    def program(self) -> Any:
        """A jitted `rows -> (texts [B, LENGTH], accepted drafts in all)`.

        The prompt, token 0, is the anchor of the first round, which has no drafts yet. Every round emits a token or
        more, so `LENGTH` rounds complete all texts.
        """
        draft = ChainDraft(self.head, pruned=self.pruned, sample_from_anchor=self.sample_from_anchor)
        target, drafts = BigramTarget(), draft.config.max_drafts

        def run(rows: Any) -> tuple[Int32[Array, "B n"], Int32[Array, ""]]:
            count = rows.num_rows
            num_tokens = count + int(count * drafts * self.verified_share) if self.verified_share < 1 else None
            policy = Policy(samples=True, edits=True, masks=self.masked)
            config = StepConfig(num_speculative_tokens=drafts, num_pages=1, num_tokens=num_tokens, policy=policy)
            step = speculative_step(target, draft, config)
            pages = KVPages.zeros(target.kv_params(_PAGE.page_size), 1)

            def round_of(_: Any, carry: Any) -> Any:
                state, texts, length, accepted = carry
                state, output = step(state, None, self._masks(state.rows) if self.masked else None)
                place = length[:, None] + jnp.arange(output.tokens.shape[1])[None]
                place = jnp.where(output.tokens >= 0, place, LENGTH)
                texts = texts.at[jnp.arange(count)[:, None], place].set(output.tokens, mode="drop")
                return state, texts, length + output.num_tokens, accepted + jnp.sum(output.accepted, dtype=jnp.int32)

            state = RoundState(target_pages=pages, draft_pages=pages, rows=rows)
            start = (
                state,
                jnp.zeros((count, LENGTH), jnp.int32),
                jnp.zeros((count,), jnp.int32),
                jnp.zeros((), jnp.int32),
            )
            _, texts, _, accepted = jax.lax.fori_loop(0, LENGTH, round_of, start)
            return texts, accepted

        return jax.jit(run)

    def _masks(self, rows: Rows) -> TokenMasks:
        """What the host of an engine would find for rows that all have the grammar."""
        words = jnp.asarray(FOLLOWS @ (1 << np.arange(VOCAB)), jnp.uint32)
        tokens = jnp.concatenate([rows.anchor[:, None], rows.proposal.tokens], axis=1)
        may_follow = jnp.asarray(FOLLOWS)[tokens[:, :-1], tokens[:, 1:]]
        count = jnp.sum(jnp.cumprod(may_follow.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        lengths = jnp.minimum(count + int(self.keeps_refused), may_follow.shape[1])
        return TokenMasks(words[tokens][:, :, None], lengths)

    def rows(self, generations: list[Generation], first_seed: int = 0) -> Any:
        """One live row for each generation, row b with the seed `first_seed + b`; the prompt is token 0."""
        count, pruned = len(generations), len(KEPT_IDS) if self.pruned else VOCAB
        drafts = WIDTH - (not self.sample_from_anchor)
        sizes = RowSizes(
            pages_per_row=1,
            num_pages=1,
            page_size=_PAGE.page_size,
            num_speculative_tokens=drafts,
            num_stop_ids=NUM_STOP_IDS,
            num_biased_ids=NUM_BIASED_IDS,
            draft_vocab_size=pruned if self.proposal == "sampled" else None,
        )
        rows, kinds = empty_rows(count, sizes), list(dict.fromkeys(generations))
        kind = np.asarray([kinds.index(one) for one in generations])
        controls = jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[kind], *map(_controls, kinds))
        seeds = np.stack(
            [np.zeros(count, np.uint32), np.arange(first_seed, first_seed + count, dtype=np.uint32)], axis=1
        )
        stops = [[*(one.stop_ids or ()), *[-1] * NUM_STOP_IDS][:NUM_STOP_IDS] for one in kinds]
        return dataclasses.replace(
            rows,
            page_table=jnp.zeros_like(rows.page_table),
            remaining=jnp.full((count,), LENGTH, jnp.int32),
            finished=jnp.zeros((count,), bool),
            stop_ids=jnp.asarray(stops, jnp.int32)[kind],
            confidence_threshold=jnp.asarray([one.confidence_threshold for one in kinds], jnp.float32)[kind],
            controls=dataclasses.replace(controls, seed=jnp.asarray(seeds)),
        )


@functools.cache
def _controls(generation: Generation) -> Controls:
    return request_controls(generation, np.zeros((2,), np.uint32), 1, NUM_BIASED_IDS)
