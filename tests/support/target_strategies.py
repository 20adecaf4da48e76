"""Random valid `config.json` contents of every target family, as in `config_strategies`."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.support.config_strategies import (
    FULL,
    SLIDING,
    USUAL_ROPES,
    Draw,
    Raw,
    Sample,
    harmless,
    heads_of,
    layer_kinds,
    rope_spellings,
    ropes,
    some,
)

GEMMA_DEFAULTS = {"tie_word_embeddings": True, "attention_bias": False}


def _sizes(draw: Draw, **activation: str) -> Raw:
    return {
        "hidden_size": draw(st.sampled_from([3, 8, 12])),
        "intermediate_size": draw(st.integers(1, 9)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "vocab_size": draw(st.integers(1, 12)),
        "max_position_embeddings": draw(st.sampled_from([1, 512, 131072])),
        **some(draw, {"rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])), **activation}),
        **harmless(draw),
    }


def _sample(draw: Draw, spellings: list[Raw], names: tuple[str, ...] = ()) -> Sample:
    return Sample(spellings=tuple(draw(st.permutations(spellings))[:4]), names=names)


@st.composite
def llama(draw: Draw) -> Sample:
    """Llama and SmolLM2: head sizes of their own or not, grouped heads or not, biases."""
    raw = {"architectures": ["LlamaForCausalLM"], **_sizes(draw, hidden_act="silu"), **heads_of(draw)}
    raw |= some(draw, {name: draw(st.booleans()) for name in ("attention_bias", "mlp_bias", "tie_word_embeddings")})
    if draw(st.booleans()):
        raw["hidden_size"] = raw["num_attention_heads"] * raw["head_dim"]
    shorter = dict(raw)
    if raw["hidden_size"] == raw["num_attention_heads"] * raw["head_dim"]:
        del shorter["head_dim"]
    if raw["num_key_value_heads"] == raw["num_attention_heads"]:
        del shorter["num_key_value_heads"]
    settings = ropes(draw, USUAL_ROPES, share=draw(st.sampled_from([None, 1.0])))
    return _sample(draw, [{**base, **rope} for base in (raw, shorter) for rope in rope_spellings(draw, settings)])


@st.composite
def qwen3(draw: Draw) -> Sample:
    """Dense Qwen3, with windows said by layer or by where they begin."""
    raw = {"architectures": ["Qwen3ForCausalLM"], **_sizes(draw, hidden_act="silu"), **heads_of(draw)}
    raw |= some(draw, {name: draw(st.booleans()) for name in ("attention_bias", "tie_word_embeddings")})
    count = raw["num_hidden_layers"]
    first = draw(st.integers(0, count + 1))
    types = [SLIDING if layer >= first else FULL for layer in range(count)]
    by_layer: Raw = {"layer_types": types, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 28}
    by_start: Raw = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": first}
    windows = (
        [by_layer, by_start]
        if first < count
        else [by_layer, by_start, {"use_sliding_window": False, "sliding_window": 5}, {}]
    )
    settings = ropes(draw, USUAL_ROPES)
    return _sample(draw, [{**raw, **window, **rope} for window in windows for rope in rope_spellings(draw, settings)])


@st.composite
def qwen3_moe(draw: Draw) -> Sample:
    """Qwen3 with experts in all, some or no layers."""
    raw = {"architectures": ["Qwen3MoeForCausalLM"], **_sizes(draw, hidden_act="silu"), **heads_of(draw)}
    experts = draw(st.integers(1, 4))
    raw |= {"moe_intermediate_size": draw(st.integers(1, 5)), "num_experts_per_tok": draw(st.integers(1, experts))}
    dense = sorted(draw(st.sets(st.integers(0, raw["num_hidden_layers"] - 1))))
    raw |= some(
        draw,
        {
            "mlp_only_layers": dense,
            "decoder_sparse_step": draw(st.integers(1, 3)),
            "norm_topk_prob": draw(st.booleans()),
        },
    )
    raw |= some(
        draw,
        {
            "attention_bias": draw(st.booleans()),
            "tie_word_embeddings": draw(st.booleans()),
            "router_aux_loss_coef": 0.001,
        },
    )
    if draw(st.booleans()):
        raw |= {"use_sliding_window": True, "sliding_window": draw(st.integers(1, 9))}
    counts: list[Raw] = [
        {"num_experts": experts},
        {"num_local_experts": experts},
        {"num_experts": experts, "num_local_experts": experts},
    ]
    settings = ropes(draw, USUAL_ROPES)
    return _sample(draw, [{**raw, **count, **rope} for count in counts for rope in rope_spellings(draw, settings)])


def _multimodal(draw: Draw, text: Raw, architectures: list[str]) -> Raw:
    """The text model inside a checkpoint with towers."""
    inner = {name: value for name, value in text.items() if name != "architectures"}
    outside = (
        some(draw, {"tie_word_embeddings": text["tie_word_embeddings"], "image_token_id": 5})
        if "tie_word_embeddings" in text
        else {}
    )
    return {
        "architectures": architectures,
        "text_config": inner,
        "vision_config": {"hidden_size": 7, "num_hidden_layers": 3},
        **outside,
    }


@st.composite
def gemma3(draw: Draw) -> Sample:
    """Gemma 3, alone or with towers, its two rotations in new and old layouts, layer kinds listed or by pattern."""
    raw = {
        "architectures": ["Gemma3ForCausalLM"],
        **_sizes(draw, hidden_activation="gelu_pytorch_tanh"),
        **heads_of(draw),
    }
    raw |= some(draw, {"query_pre_attn_scalar": 24, "final_logit_softcapping": 30.0, "attn_logit_softcapping": None})
    raw |= some(
        draw,
        {
            "tie_word_embeddings": draw(st.booleans()),
            "attention_bias": draw(st.booleans()),
            "use_bidirectional_attention": False,
        },
    )
    count, pattern = raw["num_hidden_layers"], draw(st.integers(1, 6))
    raw["sliding_window"] = draw(st.integers(1, 9))
    by_pattern = [SLIDING if (layer + 1) % pattern else FULL for layer in range(count)]
    kinds: list[Raw] = [
        {"layer_types": by_pattern},
        {"sliding_window_pattern": pattern},
        {"_sliding_window_pattern": pattern},
    ]
    if draw(st.booleans()):
        kinds = [{"layer_types": layer_kinds(draw, count)}]
    full = ropes(draw, ("default", "linear"))
    old = {
        "rope_theta": full["rope_theta"],
        "rope_local_base_freq": 1e4,
        "rope_scaling": {k: v for k, v in full.items() if k != "rope_theta"},
    }
    rotations = [{"rope_parameters": {FULL: full, SLIDING: {"rope_theta": 1e4, "rope_type": "default"}}}, old]
    spellings = [{**raw, **kind, **rope} for kind in kinds for rope in rotations]
    return _with_towers(draw, spellings, ["Gemma3ForConditionalGeneration"])


@st.composite
def gemma4(draw: Draw) -> Sample:
    """Gemma 4 text and unified models: two head sizes, values that are keys, shared caches, inputs per layer."""
    raw = {
        "architectures": ["Gemma4ForCausalLM"],
        **_sizes(draw, hidden_activation="gelu_pytorch_tanh"),
        **heads_of(draw),
    }
    is_unified = draw(st.booleans())
    raw |= {
        "model_type": "gemma4_unified_text" if is_unified else "gemma4_text",
        "sliding_window": draw(st.integers(1, 9)),
    }
    per_layer = draw(st.sampled_from([0, 3]))
    if per_layer or not is_unified:
        raw |= {"hidden_size_per_layer_input": per_layer, "vocab_size_per_layer_input": draw(st.integers(1, 9))}
    count, heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    raw["layer_types"] = [*layer_kinds(draw, count - 1), FULL]
    raw["global_head_dim"] = draw(st.sampled_from([4, 8]))
    global_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    raw |= some(
        draw,
        {
            "attention_k_eq_v": draw(st.booleans()),
            "num_global_key_value_heads": global_heads,
            "final_logit_softcapping": 30.0,
        },
    )
    raw |= some(
        draw,
        {
            "tie_word_embeddings": draw(st.booleans()),
            "attention_bias": False,
            "enable_moe_block": False,
            "num_experts": 8,
        },
    )
    raw |= some(draw, {"use_bidirectional_attention": "vision", "use_double_wide_mlp": draw(st.booleans())})
    raw |= some(draw, {"num_kv_shared_layers": _shared(draw, raw["layer_types"])})
    full = ropes(draw, ("default", "linear", "proportional"), share=draw(st.sampled_from([None, 0.5])))
    sliding = ropes(draw, ("default", "linear", "proportional"))
    raw["rope_parameters"] = {FULL: full, SLIDING: sliding}
    names = ["Gemma4UnifiedForConditionalGeneration" if is_unified else "Gemma4ForConditionalGeneration"]
    return _with_towers(draw, [raw], names)


def _shared(draw: Draw, kinds: list[str]) -> int:
    """How many of the last layers may read earlier caches: each must find an earlier layer of its kind that
    keeps one.
    """
    fits = [
        shared for shared in range(len(kinds)) if set(kinds[len(kinds) - shared :]) <= set(kinds[: len(kinds) - shared])
    ]
    return draw(st.sampled_from(fits))


def _with_towers(draw: Draw, spellings: list[Raw], architectures: list[str]) -> Sample:
    if not draw(st.booleans()):
        return _sample(draw, spellings)
    prefix = draw(st.sampled_from(["model.language_model.", "language_model.model."]))
    return _sample(
        draw, [_multimodal(draw, raw, architectures) for raw in spellings], (f"{prefix}embed_tokens.weight",)
    )


TARGETS: dict[str, Any] = {
    "llama": llama(),
    "qwen3": qwen3(),
    "qwen3_moe": qwen3_moe(),
    "gemma3": gemma3(),
    "gemma4": gemma4(),
}
