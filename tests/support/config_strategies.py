"""Random valid `config.json` contents of every family, tiny, with everything varied that the formats allow.

A `Sample` is one config in several spellings that mean the same, and the optional tensors that its file holds. Values
are drawn independently of the parsers: what is generated here is what the formats allow, not what the code accepts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

Raw = dict[str, Any]
Draw = Callable[..., Any]
FULL, SLIDING = "full_attention", "sliding_attention"
USUAL_ROPES = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """`spellings` describe one model; `names` are the optional tensors beside those that the config asks for."""

    spellings: tuple[Raw, ...]
    names: tuple[str, ...] = ()

    @property
    def raw(self) -> Raw:
        """The first spelling."""
        return self.spellings[0]


def ropes(draw: Draw, kinds: Sequence[str], *, share: float | None = None) -> Raw:
    """Settings of one rotation in the new layout."""
    kind = draw(st.sampled_from(kinds))
    settings: Raw = {"rope_theta": draw(st.sampled_from([1e4, 500000, 1e6, 2.5])), "rope_type": kind}
    if kind == "proportional":
        settings["partial_rotary_factor"] = draw(st.sampled_from([0.25, 0.5, 1.0]))
    elif share is not None:
        settings["partial_rotary_factor"] = share
    if kind in ("linear", "llama3", "yarn"):
        settings["factor"] = draw(st.sampled_from([1.0, 4, 8.0]))
    if kind == "llama3":
        settings |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": draw(st.sampled_from([2, 4.0])),
            "original_max_position_embeddings": 64,
        }
    if kind == "yarn":
        optional = {
            "original_max_position_embeddings": 128,
            "beta_fast": 16,
            "beta_slow": 2.0,
            "attention_factor": 1.5,
            "truncate": True,
        }
        settings |= {name: value for name, value in optional.items() if draw(st.booleans())}
    return settings


def rope_spellings(draw: Draw, settings: Raw) -> tuple[Raw, ...]:
    """The same rotation in the new layout and in the old ones."""
    theta = settings["rope_theta"]
    scaling = {name: value for name, value in settings.items() if name != "rope_theta"}
    by_type = {("type" if name == "rope_type" else name): value for name, value in scaling.items()}
    spellings = [
        {"rope_parameters": settings},
        {"rope_theta": theta, "rope_scaling": scaling},
        {"rope_theta": theta, "rope_parameters": by_type},
        {"rope_theta": theta, "rope_parameters": settings, "rope_scaling": by_type},
    ]
    if settings["rope_type"] == "default" and "partial_rotary_factor" not in settings:
        spellings += [{"rope_theta": theta}, {"rope_theta": theta, "rope_scaling": None}]
    return tuple(draw(st.permutations(spellings))[:3])


def heads_of(draw: Draw, *, head_dims: Sequence[int] = (2, 4, 8, 10)) -> Raw:
    """Heads, grouped or not, of a size of their own."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from(head_dims)),
    }


def some(draw: Draw, optional: Raw) -> Raw:
    """Some of the fields that a file may leave out."""
    return {name: value for name, value in optional.items() if draw(st.booleans())}


def layer_kinds(draw: Draw, count: int, kinds: Sequence[str] = (FULL, SLIDING)) -> list[str]:
    """The kind of each layer."""
    return draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))


def harmless(draw: Draw) -> Raw:
    """Fields that libraries write and nobody needs."""
    return some(
        draw,
        {
            "transformers_version": "5.10.2",
            "use_cache": True,
            "bos_token_id": 1,
            "eos_token_id": [2, 3],
            "pad_token_id": None,
            "initializer_range": 0.02,
            "attention_dropout": 0.0,
            "dtype": draw(st.sampled_from(["bfloat16", "float32"])),
        },
    )


# Drafts


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftParts:
    """The fields of a draft's config by where they may lie; `group` is the object that the block's values may have."""

    rest: Raw
    block: Raw
    network: Raw
    group: str

    def spellings(self) -> tuple[Raw, ...]:
        """Nested geometry, everything at the top level, and the block's values in an object of their own."""
        nested = {"transformer_layer_config": self.network}
        grouped = {self.group: self.block}
        return (
            {**self.rest, **self.block, **nested},
            {**self.rest, **self.block, **self.network},
            {**self.rest, **grouped, **nested},
            {**self.rest, **grouped, **self.network},
            {**self.rest, **self.block, **grouped, **self.network, **nested},
        )


def _vocab(draw: Draw) -> int:
    return draw(st.integers(3, 12))


def _taps(draw: Draw, lowest: int, highest: int) -> list[int]:
    return sorted(draw(st.sets(st.integers(lowest, highest), min_size=1, max_size=3)))


def _qwen3_network(draw: Draw, vocab: int, kinds: Sequence[str]) -> tuple[Raw, ...]:
    """The geometry of a Qwen3-style draft, in spellings that differ in the rotation's."""
    count = draw(st.integers(1, 3))
    network: Raw = {
        "hidden_size": draw(st.sampled_from([3, 8, 12])),
        "intermediate_size": draw(st.integers(1, 9)),
        "num_hidden_layers": count,
        **heads_of(draw),
        "vocab_size": vocab,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 0.5])),
        "max_position_embeddings": draw(st.sampled_from([1, 512, 40960])),
        "hidden_act": "silu",
        **some(
            draw,
            {"attention_bias": draw(st.booleans()), "use_sliding_window": draw(st.booleans()), "model_type": "qwen3"},
        ),
        **harmless(draw),
    }
    types = layer_kinds(draw, count, kinds)
    if SLIDING in types:
        network["sliding_window"] = draw(st.integers(1, 9))
    else:
        network |= some(draw, {"sliding_window": draw(st.sampled_from([0, 64]))})
    if SLIDING in types or draw(st.booleans()):
        network["layer_types"] = types
    share = draw(st.sampled_from([None, None, 0.25, 1.0]))
    settings = ropes(draw, USUAL_ROPES, share=share)
    nested = {"rope_parameters": {FULL: settings, SLIDING: dict(settings)}}
    return tuple({**network, **rope} for rope in (*rope_spellings(draw, settings), nested))


def _heads(draw: Draw, *, always: bool) -> Raw:
    """Markov and confidence heads; `always`: the format has no defaults for what a head needs."""
    rank = draw(st.sampled_from([0, 1, 4]))
    enabled = draw(st.booleans())
    fields: Raw = {"markov_rank": rank, "enable_confidence_head": enabled}
    if rank > 0:
        fields |= {"markov_head_type": draw(st.sampled_from(["vanilla", "gated", "rnn", "Vanilla"]))}
    if enabled or not always:
        with_markov = rank > 0 and draw(st.booleans())
        fields |= {"confidence_head_with_markov": with_markov}
    return fields


def _draft_names(draw: Draw, raw: Raw, *, stores_tables: bool, vocab: int, draft_vocab: int) -> tuple[str, ...]:
    names = [name for name in ("embed_tokens.weight", "lm_head.weight") if stores_tables and draw(st.booleans())]
    if draft_vocab < vocab:
        names += draw(st.sampled_from([["d2t"], ["t2d"], ["d2t", "t2d"]]))
    elif draft_vocab == vocab and draw(st.booleans()):
        names += ["d2t", "t2d"]
    if draw(st.booleans()):
        names.append("confidence_head.proj.bias")
    return tuple(names)


def _draft_sample(
    draw: Draw, parts: Sequence[DraftParts], *, stores_tables: bool = True, draft_vocab: int | None = None
) -> Sample:
    spellings = tuple(raw for part in parts for raw in part.spellings())
    vocab = parts[0].network["vocab_size"]
    names = _draft_names(
        draw,
        spellings[0],
        stores_tables=stores_tables,
        vocab=vocab,
        draft_vocab=vocab if draft_vocab is None else draft_vocab,
    )
    return Sample(spellings=tuple(draw(st.permutations(spellings))[:4]), names=names)


def _speculators_library(draw: Draw, kind: str, block_size: int, anchor_first: bool) -> Raw:
    tokens = block_size if anchor_first else block_size - 1
    method = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return some(
        draw,
        {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": None, "architectures": ["Qwen3ForCausalLM"]},
        },
    )


def _speculators(draw: Draw, kind: str) -> Sample:
    vocab, is_dspark = _vocab(draw), kind == "dspark"
    draft_vocab = draw(st.sampled_from([2, vocab - 1, vocab, vocab, vocab + 3]))
    anchor_first = draw(st.booleans())
    block_size = draw(st.sampled_from([1, 2, 5, 8] if anchor_first else [2, 5, 8]))
    rest: Raw = {
        "architectures": [
            draw(
                st.sampled_from(
                    ["DSparkDraftModel", "DSparkSpeculator"] if is_dspark else ["DFlashDraftModel", "DFlashSpeculator"]
                )
            )
        ],
        "speculators_model_type": kind,
        "draft_vocab_size": draft_vocab,
        "auto_map": {"": "config.DSparkSpeculatorConfig"},
        "speculators_config": _speculators_library(draw, kind, block_size, anchor_first),
        **some(
            draw, {"speculators_version": draw(st.sampled_from(["0.7.0.2", "0.8.0"])), "tie_word_embeddings": False}
        ),
        **some(
            draw,
            {
                "sliding_window_non_causal": draw(st.booleans()),
                "causal": draw(st.booleans()),
                "target_hidden_size": draw(st.integers(1, 9)),
            },
        ),
    }
    block: Raw = {"block_size": block_size, "mask_token_id": draw(st.integers(0, vocab - 1))}
    states_layout = draw(st.booleans()) or not (
        (is_dspark and "proposal_methods" in rest["speculators_config"]) or anchor_first == is_dspark
    )
    if states_layout:
        block["sample_from_anchor"] = anchor_first
    depth = draw(st.integers(2, 6))
    rest |= some(draw, {"num_target_layers": depth})
    block["aux_hidden_state_layer_ids"] = _taps(draw, 0, depth - 1)
    block |= (
        _heads(draw, always=False) if is_dspark else some(draw, {"markov_rank": 0, "enable_confidence_head": False})
    )
    networks = _qwen3_network(draw, vocab, (FULL, SLIDING))
    parts = [DraftParts(rest=rest, block=block, network=network, group=f"{kind}_config") for network in networks]
    return _draft_sample(draw, parts, draft_vocab=draft_vocab)


@st.composite
def speculators_dspark(draw: Draw) -> Sample:
    """speculators DSpark drafts, with the tensors of 0.7 or of later layouts."""
    return _speculators(draw, "dspark")


@st.composite
def speculators_dflash(draw: Draw) -> Sample:
    """speculators DFlash drafts."""
    return _speculators(draw, "dflash")


def _deepspec_block(draw: Draw, vocab: int) -> tuple[Raw, Raw]:
    depth = draw(st.integers(2, 6))
    block: Raw = {
        "block_size": draw(st.sampled_from([1, 2, 7])),
        "mask_token_id": draw(st.integers(0, vocab - 1)),
        "target_layer_ids": _taps(draw, -1, depth - 2),
        **_heads(draw, always=True),
        **some(draw, {"num_anchors": 512}),
    }
    return {"num_target_layers": depth, **some(draw, {"tie_word_embeddings": False})}, block


@st.composite
def deepspec_qwen3(draw: Draw) -> Sample:
    """DeepSpec drafts with Qwen3 layers, DFlash ones (rank 0, no confidence head) among them."""
    vocab = _vocab(draw)
    rest, block = _deepspec_block(draw, vocab)
    rest["architectures"] = ["Qwen3DSparkModel"]
    networks = _qwen3_network(draw, vocab, (FULL,))
    return _draft_sample(
        draw, [DraftParts(rest=rest, block=block, network=network, group="dspark_config") for network in networks]
    )


@st.composite
def deepspec_gemma4(draw: Draw) -> Sample:
    """DeepSpec drafts with Gemma4 layers."""
    vocab, count, k_eq_v = _vocab(draw), draw(st.integers(1, 3)), draw(st.booleans())
    rest, block = _deepspec_block(draw, vocab)
    rest["architectures"] = ["Gemma4DSparkModel"]
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    used, unused = ("num_global_key_value_heads", "num_key_value_heads")[:: 1 if k_eq_v else -1]
    full = ropes(draw, ("default", "proportional"), share=draw(st.sampled_from([None, 0.5])))
    network: Raw = {
        "hidden_size": draw(st.sampled_from([3, 8, 12])),
        "intermediate_size": draw(st.integers(1, 9)),
        "num_hidden_layers": count,
        "num_attention_heads": kv_heads * group,
        used: kv_heads,
        **some(draw, {unused: 7, "head_dim": 5, "sliding_window": 512, "use_bidirectional_attention": "vision"}),
        "global_head_dim": draw(st.sampled_from([4, 8, 16])),
        "attention_k_eq_v": k_eq_v,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            FULL: full,
            SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
            "rope_theta": None,
            "rope_type": "default",
        },
        **some(
            draw,
            {"attention_bias": draw(st.booleans()), "final_logit_softcapping": 30.0, "layer_types": [FULL] * count},
        ),
        **some(
            draw,
            {
                "enable_moe_block": False,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 18,
                "use_double_wide_mlp": True,
            },
        ),
        **harmless(draw),
    }
    return _draft_sample(draw, [DraftParts(rest=rest, block=block, network=network, group="dspark_config")])


@st.composite
def zlab_dflash(draw: Draw) -> Sample:
    """z-lab DFlash drafts."""
    vocab, depth = _vocab(draw), draw(st.integers(2, 6))
    block: Raw = {
        "mask_token_id": draw(st.integers(0, vocab - 1)),
        "target_layer_ids": _taps(draw, 0, depth - 2),
        **some(draw, {"block_size": draw(st.sampled_from([2, 8])), "is_causal": draw(st.booleans())}),
        **some(draw, {"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 30}),
    }
    rest: Raw = {
        "architectures": ["DFlashDraftModel"],
        **some(draw, {"num_target_layers": depth, "tie_word_embeddings": True}),
    }
    networks = _qwen3_network(draw, vocab, (FULL, SLIDING))
    parts = [DraftParts(rest=rest, block=block, network=network, group="dflash_config") for network in networks]
    return _draft_sample(draw, parts, stores_tables=False)


@st.composite
def compact(draw: Draw) -> Sample:
    """`dspark.json` of compact drafts."""
    heads, is_rnn, gamma = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.integers(1, 6))
    hidden, vocab, layers = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    config: Raw = {
        "gamma": gamma,
        "dDraft": heads * draw(st.integers(1, 4)),
        "nLayers": layers,
        "nHeads": heads,
        "markovRank": draw(st.integers(1, 5)),
        "ffMult": draw(st.integers(1, 3)),
        "tapLayers": _taps(draw, 0, 6),
    }
    if draw(st.booleans()):
        levels = draw(st.lists(st.sampled_from([0, 0.25, 1.0]), min_size=gamma, max_size=gamma))
        config["sts"] = {"thresholds": levels, **some(draw, {"target": 0.5, "samples": 64})}
    per_layer = [
        f"bb.{layer}.{name}"
        for layer in range(layers)
        for name in ("attn_norm", *"qkvo", "ff_norm", "gate", "up", "down")
    ]
    shared = [
        "W_c",
        "ctx_norm",
        "tok_proj",
        "mask_emb",
        "block_pos",
        "out_norm",
        "out_proj",
        "markov.w1",
        "markov.w2",
        "conf.w",
        "conf.b",
    ]
    raw: Raw = {
        "kind": "dspark-drafter",
        "variant": "dspark",
        "version": 1,
        "target_id": draw(st.sampled_from([f"tiny@{hidden}x{vocab}", "some model"])),
        "config": {**config, "seqHead": "rnn"} if is_rnn else config,
        "dims": {"hiddenSize": hidden, "vocabSize": vocab, "eps": draw(st.sampled_from([1e-6, 1]))},
        "param_names": [*per_layer, *shared, *(["rnn.wH", "rnn.bH", "rnn.wO"] if is_rnn else [])],
    }
    spellings = [raw, {**raw, "variant": "dflash"}, {**raw, "param_names": raw["param_names"][::-1]}]
    return Sample(spellings=(*spellings, *([] if is_rnn else [{**raw, "config": {**config, "seqHead": "markov"}}])))


DRAFTS: dict[str, st.SearchStrategy[Sample]] = {
    "speculators dspark": speculators_dspark(),
    "speculators dflash": speculators_dflash(),
    "deepspec qwen3": deepspec_qwen3(),
    "deepspec gemma4": deepspec_gemma4(),
    "zlab dflash": zlab_dflash(),
    "compact": compact(),
}
