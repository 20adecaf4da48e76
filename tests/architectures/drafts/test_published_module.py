"""`DSparkSpeculatorsDraft`: published constructor arguments, methods and flags, and the arguments that it refuses."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.architectures.drafting.tables import DraftTables
from dspark_jax.architectures.dspark_draft.model import DSparkSpeculatorsDraft
from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages, KVParams
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.architectures.protocols import Draft
from dspark_jax.speculators_common.errors import DSparkError
from dspark_jax.speculators_common.formats.draft_config import LayerMask
from dspark_jax.speculators_common.formats.rope.config import RopeConfig
from dspark_jax.speculators_common.numerics.matmul import kernel_values

ARGUMENTS: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "layer_causal": [False, True],
    "vocab_size": 20,
    "draft_vocab_size": 20,
    "markov_rank": 4,
    "block_size": 4,
    "sample_from_anchor": True,
    "mask_token_id": 19,
    "num_context_features": 2,
    "max_seq_len": 64,
}
PUBLISHED_ARGUMENTS = [*ARGUMENTS, "kv_params", "devices", "dtype"]
ROWS = 2

pytestmark = pytest.mark.usefixtures("quick_compilation")


def _draft(**changes: Any) -> DSparkSpeculatorsDraft:
    """A draft with random parameters.

    They are drawn here, because the constructor would compile one program for each.
    """
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: DSparkSpeculatorsDraft(**{**ARGUMENTS, **changes})))
    rng = np.random.default_rng(0)
    draft: DSparkSpeculatorsDraft = nnx.merge(
        graphdef, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) / 4, leaf.dtype), abstract)
    )
    return draft


def _block(draft: DSparkSpeculatorsDraft) -> tuple[Any, Any]:
    """(slot states, anchors) of a block after a context of three positions."""
    anchors = jnp.asarray([3, 7], jnp.int32)
    return jax.jit(lambda: _block_states(draft, anchors))(), anchors


def _block_states(draft: DSparkSpeculatorsDraft, anchors: Any) -> Any:
    cache = KVCache(
        pages=KVPages.zeros(draft.kv_params(4), ROWS),
        page_table=jnp.asarray([[1], [0]], jnp.int32),
        lengths=jnp.full((ROWS,), 3, jnp.int32),
    )
    positions = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32)[None], (ROWS, 3))
    taps = jax.random.normal(jax.random.key(0), (ROWS * 3, draft.config.num_taps * draft.config.target_hidden_size))
    context = draft.project_target_hidden(taps)
    cache = draft.materialize_kv(context, RaggedBatch.rectangle(jnp.zeros((ROWS, 3), jnp.int32), positions), cache)
    return draft.forward_block(draft.embed_block(anchors), cache)


def test_the_constructor_takes_the_published_arguments_in_their_order() -> None:
    names = list(inspect.signature(DSparkSpeculatorsDraft.__init__).parameters)
    assert names[1 : 1 + len(PUBLISHED_ARGUMENTS)] == PUBLISHED_ARGUMENTS
    by_position: list[Any] = [*ARGUMENTS.values(), None, None, jnp.float32]
    draft = DSparkSpeculatorsDraft(*by_position)
    assert draft.config == _draft().config
    assert nnx.graphdef(draft) == nnx.graphdef(_draft())


def test_the_config_says_what_the_arguments_say() -> None:
    config = _draft(sliding_window=6, layer_sliding=[False, True], taps=[0, 3], target_hidden_size=12).config
    assert config.layers == (LayerMask(), LayerMask(window=6, causal=True))
    assert (config.taps, config.target_hidden_size, config.num_taps) == ((0, 3), 12, 2)
    assert (config.max_drafts, config.is_pruned, config.markov_head_type) == (4, False, "vanilla")
    assert config.rope == RopeConfig(theta=10000.0, rotary_dim=8)


def test_a_window_is_every_layer_s_and_taps_count_from_one_by_default() -> None:
    config = _draft(sliding_window=6).config
    assert [layer.window for layer in config.layers] == [6, 6]
    assert config.taps == (1, 2)


def test_the_module_is_a_draft_with_the_published_methods() -> None:
    draft = _draft()
    assert isinstance(draft, Draft)
    for name in ("project_target_hidden", "materialize_kv", "forward_block", "sample_draft_tokens"):
        assert callable(getattr(draft, name))
    chain = list(inspect.signature(draft.sample_draft_tokens).parameters)
    assert chain[:3] == ["base_logits", "anchor_tokens", "sampler"]


@pytest.mark.parametrize(("sample_from_anchor", "drafts"), [(True, 4), (False, 3)])
def test_all_slots_are_returned_and_the_drafting_ones_get_logits(sample_from_anchor: bool, drafts: int) -> None:
    draft = _draft(sample_from_anchor=sample_from_anchor)
    hidden, anchors = _block(draft)
    assert hidden.shape == (ROWS, 4, 16)
    logits = draft.compute_logits(hidden)
    assert (logits.shape, logits.dtype) == ((ROWS, drafts, 20), jnp.float32)
    tokens = draft.sample_draft_tokens(logits, anchors)
    assert (tokens.shape, tokens.dtype) == ((ROWS, drafts), jnp.int32)
    confidence = draft.predict_confidence(hidden, anchors, tokens)
    assert confidence is not None
    assert confidence.shape == (ROWS, drafts)


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 2}, {"markov_head_type": "gated"}, {"markov_rank": 0}, {"block_size": 1}], ids=str
)
def test_what_the_published_module_refuses_works_here(changes: dict[str, Any]) -> None:
    draft = _draft(**changes)
    hidden, anchors = _block(draft)
    tokens = draft.sample_draft_tokens(draft.compute_logits(hidden), anchors, hidden=hidden)
    assert tokens.shape == (ROWS, draft.config.max_drafts)
    assert bool(((tokens >= 0) & (tokens < 20)).all())


REFUSED = [
    ("layer_causal", {"layer_causal": [True]}, "2 entries"),
    ("layer_sliding", {"layer_sliding": [True], "sliding_window": 4}, "2 entries"),
    ("sliding_window", {"sliding_window": 0}, "None or a positive integer"),
    ("sliding_window", {"layer_sliding": [True, False]}, "a window"),
    ("draft_vocab_size", {"draft_vocab_size": 0}, "1 or more"),
    ("markov_rank", {"markov_rank": -1}, "0 or more"),
    ("block_size", {"block_size": 0}, "1 or more anchor-first, 2 or more fill-in"),
    ("block_size", {"block_size": 1, "sample_from_anchor": False}, "1 or more anchor-first, 2 or more fill-in"),
    ("mask_token_id", {"mask_token_id": 20}, "0..19"),
    ("mask_token_id", {"mask_token_id": -1}, "0..19"),
    ("num_context_features", {"num_context_features": 0}, "1 or more"),
    ("taps", {"taps": [1, 2, 3]}, "2 entries"),
    ("taps", {"taps": [2, 1]}, "strictly increasing"),
    ("taps", {"taps": [1, 1]}, "strictly increasing"),
    ("taps", {"taps": [-1, 1]}, "from 0 on"),
    ("num_context_features", {"num_context_features": 10**9}, "at most 1024"),
    ("num_key_value_heads", {"num_key_value_heads": 0}, "1.."),
    ("num_key_value_heads", {"num_attention_heads": 3, "num_key_value_heads": 2}, "a divisor of num_attention_heads 3"),
    ("num_hidden_layers", {"num_hidden_layers": 0, "layer_causal": []}, "1..1024"),
    ("block_size", {"block_size": 257}, "at most 256"),
    ("markov_head_type", {"markov_head_type": "lstm"}, "vanilla, gated, rnn"),
    ("markov_head_type", {"markov_head_type": "tanh_rnn"}, "vanilla, gated, rnn"),
    ("markov_head_type", {"markov_head_type": "none"}, "vanilla, gated, rnn"),
    ("rope.rotary_dim", {"head_dim": 7}, "an even number"),
    ("rms_norm_eps", {"rms_norm_eps": 0.0}, "a number > 0"),
    ("max_position_embeddings", {"max_seq_len": 0}, "1 or more"),
    ("hidden_size", {"hidden_size": -1}, "1.."),
    ("confidence_head_with_markov", {"markov_rank": 0, "confidence_head_with_markov": True}, "False at markov_rank 0"),
    ("kv_params", {"kv_params": KVParams(num_layers=1, num_key_value_heads=1, head_dim=8)}, r"\(2, 1, 8\)"),
]


@pytest.mark.parametrize(
    ("name", "changes", "allowed"), REFUSED, ids=[f"{name} {changes}" for name, changes, _ in REFUSED]
)
def test_a_wrong_value_is_refused_by_name(name: str, changes: dict[str, Any], allowed: str) -> None:
    with pytest.raises(DSparkError, match=f"{name}.*: found .*, allowed .*{allowed}"):
        _draft(**changes)


def test_a_fitting_cache_is_accepted_at_any_page_size() -> None:
    draft = _draft(kv_params=KVParams(num_layers=2, num_key_value_heads=1, head_dim=8, page_size=128))
    assert draft.kv_params(16) == KVParams(
        num_layers=2, num_key_value_heads=1, head_dim=8, page_size=16, dtype=draft.dtype
    )


def test_several_devices_hold_the_parameters() -> None:
    devices = jax.devices()[:2]
    draft = DSparkSpeculatorsDraft(**ARGUMENTS, devices=devices)
    assert draft.fc.kernel[...].sharding.device_set == set(devices)
    assert draft.fc.kernel[...].sharding.is_fully_replicated


@pytest.mark.parametrize("embed", ["own", "target"])
@pytest.mark.parametrize("head", ["own", "target"])
def test_the_flags_say_which_tables_are_its_own_and_the_others_are_the_target_s(embed: Any, head: Any) -> None:
    draft = _draft(tables=DraftTables(embed_tokens=embed, lm_head=head))
    assert (draft.has_own_embed_tokens, draft.has_own_lm_head) == (embed == "own", head == "own")
    target = _Tables()
    anchors, hidden = jnp.asarray([3, 7], jnp.int32), jnp.ones((ROWS, 4, 16))
    embeds, logits = draft.embed_block(anchors, target), draft.compute_logits(hidden, target)
    assert bool((embeds[:, 0] == jnp.asarray([[3.0], [7.0]])).all()) == (embed == "target")
    assert bool((embeds[:, 1:] == 19.0).all()) == (embed == "target")
    assert bool((logits == 5.0).all()) == (head == "target")


@dataclasses.dataclass(frozen=True)
class _Tables:
    """A target whose embedding rows repeat the id, and whose logits are all 5."""

    def embed_tokens(self, ids: jax.Array) -> jax.Array:
        return jnp.broadcast_to(ids[..., None].astype(jnp.float32), (*ids.shape, 16))

    def lm_head(self, hidden: jax.Array) -> jax.Array:
        return jnp.full((*hidden.shape[:-1], 20), 5.0)

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        return self.lm_head(hidden)


def test_a_missing_target_is_named() -> None:
    draft = _draft(tables=DraftTables(embed_tokens="target", lm_head="target"))
    with pytest.raises(ValueError, match=r"embed_tokens.*pass the target as `target`"):
        draft.embed_block(jnp.asarray([3], jnp.int32))
    with pytest.raises(ValueError, match=r"lm_head.*pass the target as `target`"):
        draft.compute_logits(jnp.ones((1, 4, 16)))


def test_a_sampler_chooses_draft_ids_slot_by_slot_and_its_choice_conditions_the_next_slot() -> None:
    draft: Any = _draft(draft_vocab_size=6)
    table = jnp.asarray([2, 3, 5, 8, 13, 17], jnp.int32)
    draft.draft_to_target[...] = table
    base_logits = jax.random.normal(jax.random.key(1), (ROWS, 4, 6))
    seen = []

    def second_best(logits: jax.Array, slot: int) -> jax.Array:
        seen.append((slot, np.asarray(logits)))
        return jnp.argsort(logits, axis=-1)[:, -2].astype(jnp.int32)

    anchors = jnp.asarray([3, 7], jnp.int32)
    tokens = draft.sample_draft_tokens(base_logits, anchors, second_best)
    assert [slot for slot, _ in seen] == [0, 1, 2, 3]
    previous = anchors
    for slot, logits in seen:
        bias = draft.markov_head.w1[...][previous] @ kernel_values(draft.markov_head.w2.kernel)
        np.testing.assert_allclose(logits, base_logits[:, slot] + bias, rtol=0, atol=1e-5)
        previous = table[np.argsort(logits, axis=-1)[:, -2]]
        assert tokens[:, slot].tolist() == previous.tolist()
    greedy = draft.sample_draft_tokens(base_logits, anchors)
    assert greedy.tolist() != tokens.tolist()
    assert set(np.asarray(greedy).ravel().tolist()) <= set(table.tolist())


@pytest.mark.parametrize("head_type", ["gated", "rnn"])
def test_a_head_that_reads_slot_states_says_so_when_they_are_missing(head_type: str) -> None:
    draft = _draft(markov_head_type=head_type)
    with pytest.raises(ValueError, match=f"{head_type} Markov head: .*hidden="):
        draft.sample_draft_tokens(jnp.zeros((ROWS, 4, 20)), jnp.asarray([3, 7], jnp.int32))


def test_without_a_confidence_head_there_is_no_confidence() -> None:
    draft = _draft(enable_confidence_head=False)
    hidden, anchors = _block(draft)
    assert draft.predict_confidence(hidden, anchors, jnp.zeros((ROWS, 4), jnp.int32)) is None


def test_from_config_is_the_inverse_of_the_constructor() -> None:
    draft = _draft(
        sliding_window=6, layer_sliding=[True, False], taps=[0, 3], markov_head_type="rnn", draft_vocab_size=9
    )
    again = nnx.eval_shape(
        lambda: DSparkSpeculatorsDraft.from_config(dataclasses.replace(draft.config, source="somewhere/config.json"))
    )
    assert again.config == draft.config
    assert again.config.source == "somewhere/config.json"
    assert nnx.graphdef(nnx.eval_shape(lambda: DSparkSpeculatorsDraft.from_config(draft.config))) == nnx.graphdef(draft)


def test_from_config_takes_what_the_published_arguments_cannot_say() -> None:
    windows = (LayerMask(window=6, causal=True), LayerMask(window=3))
    config = dataclasses.replace(
        _draft().config, window_origin="query", layers=windows, embedding_scale=2.0, final_logit_softcapping=5.0
    )
    draft = nnx.eval_shape(lambda: DSparkSpeculatorsDraft.from_config(config))
    assert type(draft) is DSparkSpeculatorsDraft
    assert draft.config == config
    assert [layer.attention.origin for layer in draft.layers] == ["query", "query"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layers": (LayerMask(),)}, "layers: found 1, allowed 2 entries"),
        ({"layers": (LayerMask(), LayerMask(window=0))}, r"layers\[1\].window: found 0, allowed None, or 1 or more"),
        ({"style": "gemma4"}, "style: found 'gemma4', allowed qwen3"),
        ({"taps": (0, "final")}, r"taps: found \[0, 'final'\], allowed numbers of target layers"),
        ({"mask_token_id": None}, r"mask_token_id: found None, allowed 0\.\.19"),
        (
            {"markov_head_type": "none"},
            "markov_head_type: found 'none', allowed vanilla, gated, rnn, or none at markov_rank 0",
        ),
    ],
)
def test_from_config_refuses_by_file_and_field(changes: dict[str, Any], expected: str) -> None:
    config = dataclasses.replace(_draft().config, source="somewhere/config.json", **changes)
    with pytest.raises(DSparkError, match=f"somewhere/config.json: {expected}"):
        nnx.eval_shape(lambda: DSparkSpeculatorsDraft.from_config(config))
