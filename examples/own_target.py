"""Embed a DSpark draft in the compiled step of a model of your own.

`Model` is an example of a user's Flax model: it has no cache and does not use this package. `speculate` is the whole
integration: one jitted function that runs the model, reads its taps with `nnx.capture`, decides which drafts are
accepted, stores the draft's context and drafts the next block. Run it: `python examples/own_target.py`.

The draft is not trained here. Its Markov head is the model's embedding and head, so it proposes the tokens that the
model would give if they depended on the last token only.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.architectures.dspark_draft.model import DSparkSpeculatorsDraft
from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.architectures.proposal import Proposal
from dspark_jax.pipelines.speculative.acceptance import accept_equal
from dspark_jax.speculators_common.numerics.matmul import set_kernel_values

VOCAB, WIDTH, LENGTH, BLOCK = 512, 64, 128, 5


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.norm, self.mlp = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + 0.1 * self.attention(x, mask=nnx.make_causal_mask(x[..., 0]))
        return x + 0.1 * jax.nn.gelu(self.mlp(self.norm(x)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=jax.nn.initializers.normal(1.0), rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)
        self.layers = nnx.List(Layer(rngs) for _ in range(3))

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Tap(nnx.Intermediate):
    """The variable type under which `nnx.capture` stores the layers' outputs."""


def make_draft(model: Model) -> DSparkSpeculatorsDraft:
    """A draft with taps 1 and 3, a Markov head made of the model's tables, and a head that is zero."""
    draft = DSparkSpeculatorsDraft(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        sliding_window=None,
        layer_causal=[False],
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        markov_rank=WIDTH,
        block_size=BLOCK,
        sample_from_anchor=True,
        mask_token_id=0,
        num_context_features=2,
        max_seq_len=LENGTH,
        taps=(1, 3),
        enable_confidence_head=False,
    )
    assert draft.markov_head is not None
    assert draft.head is not None
    draft.markov_head.w1[...] = model.embed.embedding[...]
    set_kernel_values(draft.markov_head.w2.kernel, model.head.kernel[...])
    draft.head.kernel[...] = jnp.zeros_like(draft.head.kernel[...])
    return draft


@jax.jit
def speculate(
    model: Model,
    draft: DSparkSpeculatorsDraft,
    ids: jax.Array,
    start: jax.Array,
    anchor_at: jax.Array,
    drafts: jax.Array,
    cache: KVCache,
):
    """One round. `ids` [LENGTH] is the text up to the anchor at `anchor_at`.

    Positions `start..anchor_at - 1`, which are prompt tokens, become context independently of what is accepted.
    """
    ids = jax.lax.dynamic_update_slice(ids, drafts[0], (anchor_at + 1,))
    logits, captured = nnx.capture(model, Tap, method_outputs=Tap)(ids[None])
    taps = jnp.concatenate(
        [captured["layers"][tap - 1]["__call__"].get_value()[0][0] for tap in draft.config.taps], axis=-1
    )
    target_tokens = jax.lax.dynamic_slice(jnp.argmax(logits[0], axis=-1).astype(jnp.int32), (anchor_at,), (BLOCK + 1,))
    accepted, anchor = accept_equal(Proposal(drafts, jnp.full((1,), BLOCK, jnp.int32)), target_tokens[None])

    anchor_at = anchor_at + accepted[0] + 1
    position = jnp.arange(LENGTH, dtype=jnp.int32)
    batch = RaggedBatch.rectangle(
        ids[None], jnp.where((position >= start) & (position < anchor_at), position, -1)[None]
    )
    cache = draft.materialize_kv(
        draft.project_target_hidden(taps), batch, dataclasses.replace(cache, lengths=anchor_at[None])
    )
    hidden = draft.forward_block(draft.embed_block(anchor), cache)
    drafts = draft.sample_draft_tokens(draft.compute_logits(hidden), anchor, hidden=hidden)
    return jax.lax.dynamic_update_slice(ids, anchor, (anchor_at,)), anchor_at, drafts, cache, accepted[0]


def main() -> None:
    model, prompt, new_tokens = Model(nnx.Rngs(7)), jnp.array([3, 141, 59, 26, 5], jnp.int32), 60
    draft = make_draft(model)
    cache = KVCache(
        pages=KVPages.zeros(draft.kv_params(page_size=LENGTH), 1),
        page_table=jnp.zeros((1, 1), jnp.int32),
        lengths=jnp.zeros((1,), jnp.int32),
    )
    ids, end = jnp.zeros((LENGTH,), jnp.int32).at[: len(prompt)].set(prompt), jnp.asarray(len(prompt) - 1, jnp.int32)
    drafts, start, rounds = jnp.full((1, BLOCK), VOCAB - 1, jnp.int32), jnp.asarray(0, jnp.int32), []
    while end + 1 < len(prompt) + new_tokens:
        ids, after, drafts, cache, accepted = speculate(model, draft, ids, start, end, drafts, cache)
        start, end = after, after
        rounds.append(int(accepted) + 1)
    plain, total = jnp.zeros((LENGTH,), jnp.int32).at[: len(prompt)].set(prompt), len(prompt) + new_tokens
    predict = nnx.jit(lambda model, ids, last: model(ids[None])[0, last].argmax())
    for length in range(len(prompt), total):
        plain = plain.at[length].set(predict(model, plain, jnp.asarray(length - 1)))
    same = bool(jnp.array_equal(ids[:total], plain[:total]))
    print(
        f"{new_tokens} tokens in {len(rounds)} rounds, tau {sum(rounds) / len(rounds):.2f}, equal to plain decoding: "
        f"{same}"
    )
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
