"""DFlash drafts of three libraries.

The fields of a config tell the libraries apart. The states and logits are compared with a second implementation in this
file. Unknown tensors are refused by name.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax.architectures.dspark_compact import load as load_compact
from dspark_jax.architectures.nn.attention.kv_cache import KVCache, KVPages
from dspark_jax.architectures.nn.attention.ragged_batch import RaggedBatch
from dspark_jax.pipelines.checkpoints.loading import LoadedTarget, load_draft, load_target
from dspark_jax.speculators_common.errors import CheckpointError, PairError
from dspark_jax.speculators_common.formats.deepspec.reader import from_deepspec
from tests.support.tiny_checkpoints import TinyCheckpoint, random_tensors
from tests.support.tiny_families import (
    BLOCK,
    HIDDEN,
    MASK,
    QWEN3_NETWORK,
    VOCAB,
    ZLAB_BLOCK,
    deepspec_dflash_config,
    speculators_dflash_config,
    tiny_target,
    zlab_config,
)

CONTEXT, WINDOW = 11, 6
EXTRAS = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    return load_target(tiny_target().write(tmp_path_factory.mktemp("tiny") / "target"), jnp.float32)


@functools.cache
def _tensors(seed: int = 2) -> dict[str, np.ndarray]:
    return random_tensors(zlab_config(), seed)


def _loaded(config: dict[str, Any], target: LoadedTarget, folder: Path, **changes: Any) -> Any:
    tensors = {name: tensor for name, tensor in (_tensors() | changes).items() if tensor is not None}
    return load_draft(TinyCheckpoint(config=config, tensors=tensors).write(folder), target, jnp.float32)


def _outputs(draft: Any, target: LoadedTarget) -> tuple[np.ndarray, np.ndarray]:
    """Slot states and base logits of one block after `CONTEXT` random context positions."""
    cache = KVCache(
        pages=KVPages.zeros(draft.kv_params(16), 1),
        page_table=jnp.zeros((1, 1), jnp.int32),
        lengths=jnp.asarray([CONTEXT], jnp.int32),
    )
    batch = RaggedBatch.rectangle(jnp.zeros((1, CONTEXT), jnp.int32), jnp.arange(CONTEXT, dtype=jnp.int32)[None])
    cache = draft.materialize_kv(draft.project_target_hidden(jnp.asarray(_taps())), batch, cache)
    hidden = draft.forward_block(draft.embed_block(jnp.asarray([3], jnp.int32), target.module), cache)
    return np.asarray(hidden[0]), np.asarray(draft.compute_logits(hidden, target.module)[0])


@functools.cache
def _taps() -> np.ndarray:
    return np.random.default_rng(7).normal(size=(CONTEXT, 2 * HIDDEN)).astype(np.float32)


def test_the_same_weights_in_two_formats_are_the_same_draft(target: LoadedTarget, tmp_path: Path) -> None:
    zlab = _loaded(zlab_config(), target, tmp_path / "z")
    speculators = _loaded(speculators_dflash_config(), target, tmp_path / "s")
    assert zlab.config == speculators.config
    assert (zlab.config.family, speculators.config.family) == ("zlab_dflash", "speculators_dflash")
    for ours, theirs in zip(_outputs(zlab.module, target), _outputs(speculators.module, target), strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_nested_and_flat_files_are_the_same_draft(target: LoadedTarget, tmp_path: Path) -> None:
    flat = _loaded(zlab_config(dflash_config=None, **ZLAB_BLOCK), target, tmp_path / "flat")
    nested_config = {name: value for name, value in zlab_config().items() if name not in QWEN3_NETWORK}
    nested = _loaded({**nested_config, "transformer_layer_config": QWEN3_NETWORK}, target, tmp_path / "nested")
    assert flat.config == nested.config
    for ours, theirs in zip(_outputs(flat.module, target), _outputs(nested.module, target), strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_the_layout_comes_from_the_format_and_not_from_missing_heads(target: LoadedTarget, tmp_path: Path) -> None:
    """All three have rank 0, but only DeepSpec's is anchor-first."""
    zlab = _loaded(zlab_config(), target, tmp_path / "z").module
    speculators = _loaded(speculators_dflash_config(), target, tmp_path / "s").module
    anchor_first = _loaded(speculators_dflash_config(sample_from_anchor=True), target, tmp_path / "a").module
    config = from_deepspec(deepspec_dflash_config(), "config.json")
    assert (config.markov_head_type, config.enable_confidence_head) == ("none", False)
    assert [draft.config.max_drafts for draft in (zlab, speculators, anchor_first)] == [BLOCK - 1, BLOCK - 1, BLOCK]
    assert config.max_drafts == BLOCK
    assert _outputs(zlab, target)[1].shape == (BLOCK - 1, VOCAB)
    np.testing.assert_array_equal(_outputs(anchor_first, target)[1][1:], _outputs(speculators, target)[1])


def test_the_released_deepspec_dflash_config_parses() -> None:
    """The published fields of `dflash_qwen3_4b_block7`: no Markov head, no confidence head, anchor-first."""
    config = from_deepspec(
        {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_hidden_layers": 5,
            "num_target_layers": 36,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            "tie_word_embeddings": False,
            "block_size": 7,
            "mask_token_id": 151669,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "num_anchors": 512,
            "markov_rank": 0,
            "enable_confidence_head": False,
            "dtype": "bfloat16",
        },
        "config.json",
    )
    assert (config.max_drafts, config.sample_from_anchor, config.taps) == (7, True, (2, 10, 18, 26, 34))
    assert (config.markov_rank, config.markov_head_type, config.confidence_head_with_markov, config.unknown_fields) == (
        0,
        "none",
        False,
        (),
    )


@pytest.mark.parametrize("fields", [{}, SLIDING, {**SLIDING, "is_causal": False}, {"is_causal": True}], ids=str)
def test_a_block_is_what_an_independent_twin_computes(
    fields: dict[str, Any], target: LoadedTarget, tmp_path: Path
) -> None:
    draft = _loaded(zlab_config(dflash_config={**ZLAB_BLOCK, **EXTRAS}, **fields), target, tmp_path / "draft").module
    hidden, logits = _outputs(draft, target)
    twin_hidden, twin_logits = _Twin(fields).outputs(target)
    np.testing.assert_allclose(hidden, twin_hidden, rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits, twin_logits[1:], rtol=0, atol=1e-4)


def test_windows_are_counted_from_the_query_slot(target: LoadedTarget, tmp_path: Path) -> None:
    """A speculators draft counts the same window from the anchor, so slot 0 sees one position more."""
    zlab = _loaded(zlab_config(**SLIDING), target, tmp_path / "z").module
    network = {**{name: QWEN3_NETWORK[name] for name in QWEN3_NETWORK}, **SLIDING}
    speculators = _loaded(speculators_dflash_config(transformer_layer_config=network), target, tmp_path / "s").module
    assert (zlab.config.window_origin, speculators.config.window_origin) == ("query", "anchor")
    assert np.abs(_outputs(zlab, target)[0] - _outputs(speculators, target)[0]).max() > 1e-2


class _Twin:
    """A second implementation of the network for one block, in float64 numpy, directly from the tensors."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.kinds = fields.get("layer_types", ["full_attention"] * 2)
        self.is_causal = fields.get("is_causal")
        self.tensors = {name: tensor.astype(np.float64) for name, tensor in _tensors().items()}

    def outputs(self, target: LoadedTarget) -> tuple[np.ndarray, np.ndarray]:
        tables = {name: np.asarray(source.read(), np.float64) for name, source in target.checkpoint.tensors.items()}
        context = self._norm(_taps() @ self.tensors["fc.weight"].T, "hidden_norm")
        x = 2.0 * tables["model.embed_tokens.weight"][[3] + [MASK] * (BLOCK - 1)]
        for layer in range(2):
            prefix = f"layers.{layer}"
            x = x + self._attention(prefix, self._norm(x, f"{prefix}.input_layernorm"), context, self.kinds[layer])
            normed = self._norm(x, f"{prefix}.post_attention_layernorm")
            gate, up = (normed @ self.tensors[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.tensors[f"{prefix}.mlp.down_proj.weight"].T
        hidden = self._norm(x, "norm")
        return hidden, 3.0 * np.tanh(0.5 * (hidden @ tables["lm_head.weight"].T) / 3.0)

    def _attention(self, prefix: str, x: np.ndarray, context: np.ndarray, kind: str) -> np.ndarray:
        def heads(rows: np.ndarray, name: str) -> np.ndarray:
            return (rows @ self.tensors[f"{prefix}.self_attn.{name}_proj.weight"].T).reshape(len(rows), -1, 8)

        rows = np.concatenate([context, x])
        query = self._rotated(self._norm(heads(x, "q"), f"{prefix}.self_attn.q_norm"), CONTEXT)
        key = self._rotated(self._norm(heads(rows, "k"), f"{prefix}.self_attn.k_norm"), 0)
        key, value = (np.repeat(part, 2, axis=1) for part in (key, heads(rows, "v")))
        scores = np.einsum("qnh,snh->nqs", query, key) / np.sqrt(8)
        weights = np.exp(np.where(self._visible(kind), scores, -np.inf))
        weights /= weights.sum(axis=-1, keepdims=True)
        return (
            np.einsum("nqs,snh->qnh", weights, value).reshape(len(x), -1)
            @ self.tensors[f"{prefix}.self_attn.o_proj.weight"].T
        )

    def _visible(self, kind: str) -> np.ndarray:
        """Slot k is at position `CONTEXT + k`.

        It sees the keys within the window around it. It sees keys after it only if the block is not causal.
        """
        sliding = kind == "sliding_attention"
        causal = sliding if self.is_causal is None else self.is_causal
        query, key = CONTEXT + np.arange(BLOCK)[:, None], np.arange(CONTEXT + BLOCK)[None, :]
        near = abs(query - key) < WINDOW if sliding else np.ones((BLOCK, CONTEXT + BLOCK), bool)
        return near & ((key <= query) if causal else True)

    def _rotated(self, x: np.ndarray, first: int) -> np.ndarray:
        angles = (first + np.arange(len(x)))[:, None] * 10000.0 ** (-np.arange(4) / 4)
        turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, None]
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * self.tensors[f"{name}.weight"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embed_tokens.weight", (VOCAB, HIDDEN)),
        ("lm_head.weight", (VOCAB, HIDDEN)),
        ("layers.0.attention_conv.weight", (HIDDEN, 3)),
        ("layers.1.mlp_conv.weight", (HIDDEN, 3)),
        ("candidate_selector.weight", (4, HIDDEN)),
        ("layers.0.self_attn.qkv_proj.weight", (64, HIDDEN)),
        ("layers.0.self_attn.g_proj.weight", (32, HIDDEN)),
        ("aux_hidden_norms.0.weight", (HIDDEN,)),
        ("layers.0.self_attn.sinks", (4,)),
        ("mask_embedding", (HIDDEN,)),
        ("layers.0.self_attn.q_proj.scales", (32, 1)),
        ("mtp.0.norm.weight", (HIDDEN,)),
        ("markov_head.markov_w1.weight", (VOCAB, 4)),
    ],
)
def test_tensors_of_other_networks_are_refused_by_name(
    name: str, shape: tuple[int, ...], target: LoadedTarget, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"tensor {name}: unexpected"):
        _loaded(zlab_config(), target, tmp_path / "draft", **{name: np.zeros(shape, np.float32)})


def test_missing_and_misshapen_tensors_are_named(target: LoadedTarget, tmp_path: Path) -> None:
    fc = np.zeros((HIDDEN, 3 * HIDDEN), np.float32)
    with pytest.raises(
        CheckpointError,
        match=r"tensor norm.weight: missing.*tensor fc.weight: found shape \[32, 96\], expected \[32, 64\]",
    ):
        _loaded(zlab_config(), target, tmp_path / "draft", **{"norm.weight": None, "fc.weight": fc})


def test_a_mask_embedding_in_a_file_of_its_own_is_refused(target: LoadedTarget, tmp_path: Path) -> None:
    _loaded(zlab_config(), target, tmp_path / "draft")
    save_file({"row": np.zeros((HIDDEN,), np.float32)}, tmp_path / "draft" / "mask_embedding.safetensors")
    with pytest.raises(
        CheckpointError, match=r"mask_embedding.safetensors: a mask embedding in a file of its own is not supported"
    ):
        load_draft(tmp_path / "draft", target, jnp.float32)


def test_a_draft_without_tables_needs_a_target_of_its_width(target: LoadedTarget, tmp_path: Path) -> None:
    wide = {**zlab_config(), "hidden_size": 40, "target_hidden_size": HIDDEN}
    tensors = random_tensors(wide, 3)
    with pytest.raises(
        PairError, match="hidden_size: found 40, allowed 32: embed_tokens and lm_head would be the target's"
    ):
        load_draft(TinyCheckpoint(config=wide, tensors=tensors).write(tmp_path / "wide"), target, jnp.float32)


def test_a_training_copy_of_the_target_is_passed_over_only_where_a_library_writes_it(
    target: LoadedTarget, tmp_path: Path
) -> None:
    copy = {"verifier_norm.weight": np.ones((HIDDEN,), np.float32)}
    assert _loaded(speculators_dflash_config(), target, tmp_path / "s", **copy).config.family == "speculators_dflash"
    with pytest.raises(CheckpointError, match=r"tensor verifier_norm.weight: unexpected"):
        _loaded(zlab_config(), target, tmp_path / "z", **copy)


def test_a_dflash_directory_is_no_compact_draft(target: LoadedTarget, tmp_path: Path) -> None:
    _loaded(zlab_config(), target, tmp_path / "draft")
    with pytest.raises(CheckpointError, match=r"dspark.json: missing"):
        load_compact(tmp_path / "draft")
    (tmp_path / "draft" / "dspark.json").write_text(json.dumps({"kind": "something else"}))
    with pytest.raises(CheckpointError, match="kind: found 'something else', allowed dspark-drafter"):
        load_draft(tmp_path / "draft", target, jnp.float32)
