"""A random Qwen3-style target, drafts for it, and its greedy text by a naive twin without cache, batches and JAX."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support.tiny_checkpoints import TinyCheckpoint, draft_config, random_tensors, target_config

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, WINDOW = 61, 32, 4, 2, 8, 2, 9
MASK = VOCAB - 1
BLOCK = 5


@functools.cache
def random_target() -> TinyCheckpoint:
    """Two layers, the second one with a sliding window; an untied head. Attention is weakened, so that the previous
    token says much.
    """
    config = target_config(
        "Qwen3ForCausalLM",
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        layer_types=["full_attention", "sliding_attention"],
        use_sliding_window=True,
        sliding_window=WINDOW,
    )
    tensors = random_tensors(config, seed=1)
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] *= np.float32(0.4)
    return TinyCheckpoint(config=config, tensors=tensors)


def random_draft(
    seed: int = 2, *, num_layers: int = 2, d2t: Sequence[int] | None = None, **fields: Any
) -> TinyCheckpoint:
    """Layers of another width than the target's, in turn full and sliding; `fields` change the config, `d2t` are the
    draft's target ids.
    """
    config = draft_config(
        network={
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": VOCAB,
            "layer_types": ["full_attention", "sliding_attention"][:num_layers],
            "sliding_window": 6,
        },
        **{
            "target_hidden_size": HIDDEN,
            "aux_hidden_state_layer_ids": [0, 1],
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "markov_rank": VOCAB,
            "sample_from_anchor": True,
            "draft_vocab_size": VOCAB if d2t is None else len(d2t),
            **fields,
        },
    )
    tensors = random_tensors(config, seed, "embed_tokens.weight", "lm_head.weight", *(() if d2t is None else ("d2t",)))
    if d2t is not None:
        tensors["d2t"] = np.asarray(d2t, np.int64) - np.arange(len(d2t))
    return TinyCheckpoint(config=config, tensors=tensors)


def bigram_draft(successors: dict[int, int], *, strength: float = 4, **fields: Any) -> TinyCheckpoint:
    """A draft that mostly proposes `successors[previous]`. Its layers add noise, so that taps and context matter."""
    draft = random_draft(**fields)
    w2 = np.zeros((VOCAB, VOCAB), np.float32)
    for token, following in successors.items():
        w2[following, token] = strength
    changes = {
        "markov_head.markov_w1.weight": np.eye(VOCAB, dtype=np.float32),
        "markov_head.markov_w2.weight": w2,
        "lm_head.weight": draft.tensors["lm_head.weight"] * np.float32(0.5),
    }
    return TinyCheckpoint(config=draft.config, tensors={**draft.tensors, **changes})


def random_prompts(count: int, *, seed: int = 3, longest: int = 12) -> list[tuple[int, ...]]:
    """Prompts of 1 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    return [tuple(int(token) for token in rng.integers(0, VOCAB, rng.integers(1, longest + 1))) for _ in range(count)]


@functools.cache
def plain_greedy(prompts: tuple[tuple[int, ...], ...], new_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Greedy continuation of every prompt by `random_target`: the whole text is computed anew, in float64, for every
    token.
    """
    tensors = {name: tensor.astype(np.float64) for name, tensor in random_target().tensors.items()}
    lengths = np.asarray([len(prompt) for prompt in prompts])
    ids = np.zeros((len(prompts), lengths.max() + new_tokens), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    rows = np.arange(len(prompts))
    for _ in range(new_tokens):
        logits = _logits(tensors, ids[:, : lengths.max()])[rows, lengths - 1]
        top = np.sort(logits, axis=-1)
        assert (top[:, -1] - top[:, -2]).min() > 1e-4, "a near tie: float32 may decide otherwise, take another seed"
        ids[rows, lengths] = logits.argmax(axis=-1)
        lengths = lengths + 1
    return tuple(
        tuple(line[len(prompt) : len(prompt) + new_tokens].tolist()) for line, prompt in zip(ids, prompts, strict=True)
    )


def next_logits(ids: Sequence[int]) -> np.ndarray:
    """The logits of `random_target` after these ids, in float64."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in random_target().tensors.items()}
    return _logits(tensors, np.asarray([ids]))[0, -1]


def successors_in(prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> dict[int, int]:
    """For every token the one that follows it most often, in the last tokens of the prompts and their continuations."""
    return frequent_successors([(prompt[-1], *text) for prompt, text in zip(prompts, texts, strict=True)])


def frequent_successors(texts: Sequence[Sequence[int]]) -> dict[int, int]:
    """For every token the one that follows it most often."""
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    for text in texts:
        np.add.at(counts, (np.asarray(text[:-1]), np.asarray(text[1:])), 1)
    return {token: int(row.argmax()) for token, row in enumerate(counts) if row.any()}


def _logits(tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    x = tensors["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        window = WINDOW if layer == 1 else ids.shape[1]
        x = x + _attention(
            tensors, f"{prefix}.self_attn", _norm(x, tensors[f"{prefix}.input_layernorm.weight"]), window
        )
        normed = _norm(x, tensors[f"{prefix}.post_attention_layernorm.weight"])
        gate, up = (normed @ tensors[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ tensors[f"{prefix}.mlp.down_proj.weight"].T
    return _norm(x, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T


def _attention(tensors: dict[str, np.ndarray], prefix: str, x: np.ndarray, window: int) -> np.ndarray:
    batch, length, _ = x.shape
    query, key, value = (
        (x @ tensors[f"{prefix}.{name}_proj.weight"].T).reshape(batch, length, heads, HEAD_DIM)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    query = _rotated(_norm(query, tensors[f"{prefix}.q_norm.weight"]))
    key = _rotated(_norm(key, tensors[f"{prefix}.k_norm.weight"]))
    key, value = (np.repeat(heads, HEADS // KV_HEADS, axis=2) for heads in (key, value))
    query, key, value = (heads.swapaxes(1, 2) for heads in (query, key, value))
    scores = query @ key.swapaxes(2, 3) / np.sqrt(HEAD_DIM)
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = (weights @ value).swapaxes(1, 2).reshape(batch, length, -1)
    return out @ tensors[f"{prefix}.o_proj.weight"].T


def _rotated(x: np.ndarray) -> np.ndarray:
    half = HEAD_DIM // 2
    angles = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[None, :, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight
