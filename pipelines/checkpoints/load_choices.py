"""The choices made while loading: each value that a checkpoint or a user left open, the reason, and its flag."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.architectures.drafting.tables import DraftTables
from dspark_jax.architectures.target_config import TargetConfig
from dspark_jax.pipelines.checkpoints.loading import LoadedDraft, LoadedTarget
from dspark_jax.pipelines.speculative.sizes import EnginePlan
from dspark_jax.pipelines.text.stop_tokens import stop_reason
from dspark_jax.pipelines.text.tokenizer import Tokenizer
from dspark_jax.speculators_common.errors import RequestError
from dspark_jax.speculators_common.formats.choice import Choice
from dspark_jax.speculators_common.formats.draft_config import DraftConfig
from dspark_jax.speculators_common.formats.draft_fields import LAYOUT_FLAG, ROTARY_FLAG

_TABLE_ORIGINS = {
    "own": "the draft's own",
    "target": "the target's",
    "target_rows": "the target's rows of the draft vocabulary, copied",
}
_SHOWN_NAMES = {
    "num_speculative_tokens": "drafts per round",
    "sample_from_anchor": "layout",
    "partial_rotary_factor": "rotary width",
}
_WIDEST_VALUE = 80  # characters; longer values, such as paths, do not widen their column


def check_memory(plan: EnginePlan, available: int | None) -> None:
    """Raise `RequestError` if the caches alone need more than `available` bytes. `None` skips the check."""
    if available is not None and plan.kv_bytes > available:
        options = plan.options
        raise RequestError(
            f"found {in_bytes(plan.kv_bytes)} (batch_size {options.batch_size}, max_seq_len {options.max_seq_len}), "
            f"allowed at most the {in_bytes(available)} of this machine",
            field="kv cache",
            found=plan.kv_bytes,
            allowed=available,
        )


def load_choices(
    target: LoadedTarget, draft: LoadedDraft | None, plan: EnginePlan, k_reason: str = ""
) -> tuple[Choice, ...]:
    """All choices for this pair, in the order in which they are shown. `k_reason` says where k comes from, if the
    caller did not state it.
    """
    num_rows = plan.options.batch_size
    rows = f"{num_rows} row{'s' if num_rows > 1 else ''} of {plan.options.max_seq_len} positions"
    return (
        _choice("target", _model(target.module, target.config.architecture), str(target.checkpoint.path), "--target"),
        *(dataclasses.replace(choice, name=f"target {choice.name}") for choice in target_choices(target.config)),
        *template_choices(target.tokenizer),
        *(() if draft is None else _draft_choices(draft, plan, k_reason)),
        _choice("dtype", jnp.dtype(plan.target_params.dtype).name, "", "--dtype"),
        _choice("kv_cache", f"{in_bytes(plan.kv_bytes)} for {rows}", "", "--max-seq-len, --batch-size"),
        _choice("attention", f"{plan.target_params.platform.attention} on {plan.target_params.platform.name}"),
        _choice(
            "stop_ids",
            ", ".join(map(str, target.stop_ids)) or "none",
            stop_reason(target.stop_tokens) or "the model declares none",
            "--stop-ids",
        ),
    )


def target_choices(config: TargetConfig) -> tuple[Choice, ...]:
    """The choices that were made where a target's files leave something open or contradict each other."""
    return tuple(getattr(config, "choices", ()))


def template_choices(tokenizer: Tokenizer | None) -> tuple[Choice, ...]:
    """The choice that a chat template which does not compile leaves: prompts without it, or none. Empty for others."""
    fault = None if tokenizer is None or tokenizer.chat_template is None else tokenizer.chat_template.fault
    return () if fault is None else (_choice("chat_template", "cannot be used", str(fault), "--raw"),)


def draft_choices(config: DraftConfig, tables: DraftTables) -> tuple[Choice, ...]:
    """The choices for a draft. Some are stated by its files, others were left open there."""
    reasons = {choice.name: choice.reason for choice in config.choices}
    layout = (
        f"{'anchor-first' if config.sample_from_anchor else 'fill-in'}, block of {config.block_size} gives "
        f"{config.max_drafts} drafts"
    )
    rotated = 2 * config.rope.rotating_pairs if config.rope.kind == "proportional" else config.rope.rotary_dim
    rotary = f"{rotated} of {config.head_dim} elements of a head"
    known = {"sample_from_anchor": layout, "partial_rotary_factor": rotary}
    flags = {"sample_from_anchor": LAYOUT_FLAG, "partial_rotary_factor": ROTARY_FLAG}
    if config.style == "compact":  # this format fixes both
        flags = dict.fromkeys(known, "")
    return (
        *(_choice(name, value, reasons.get(name, ""), flags[name]) for name, value in known.items()),
        *(choice for choice in config.choices if choice.name not in known),
        _choice("taps", ", ".join(map(str, config.taps))),
        _choice("vocabulary", f"{config.num_draft_ids} draft ids of {config.vocab_size} target ids"),
        *(
            _table_choice(config, name, origin)
            for name, origin in (("embed_tokens", tables.embed_tokens), ("lm_head", tables.lm_head))
        ),
    )


def _table_choice(config: DraftConfig, name: str, origin: str) -> Choice:
    """The choice of where a table comes from. Newer exports of a format may lack tables that older ones store."""
    reason = "" if origin == "own" else "the file has none" if config.stores_tables else "the format stores none"
    return _choice(name, _TABLE_ORIGINS[origin], reason)


def choice_lines(choices: Sequence[Choice]) -> list[str]:
    """The choices as text in columns: name, value with its reason, and the flag that overrides it."""
    values = [choice.value + (f" ({choice.reason})" if choice.reason else "") for choice in choices]
    width = max((len(value) for value in values if len(value) <= _WIDEST_VALUE), default=0)
    names = [_SHOWN_NAMES.get(choice.name, choice.name).replace("_", " ") for choice in choices]
    return [
        f"{name:<18}  {value:<{width}}  {choice.flag}".rstrip()
        for name, value, choice in zip(names, values, choices, strict=True)
    ]


def in_bytes(count: int) -> str:
    """A number of bytes as text, in powers of ten: `7.9 MB`."""
    size, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{count} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"


def device_memory() -> int | None:
    """Memory of the first device in bytes, on CPU that of the machine; `None` if it is not known."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if jax.default_backend() == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _draft_choices(draft: LoadedDraft, plan: EnginePlan, k_reason: str) -> tuple[Choice, ...]:
    drafts, rule = f"{plan.num_speculative_tokens} of {draft.config.max_drafts}", plan.options.acceptance
    return (
        _choice("draft", _model(draft.module, draft.config.architecture), str(draft.checkpoint.path), "--draft"),
        _choice("num_speculative_tokens", drafts, k_reason, "--num-speculative-tokens"),
        *(() if rule is None else (_choice("acceptance", str(rule), "", "--acceptance"),)),
        *draft_choices(draft.config, draft.tables),
        *(_choice("unknown field", name, "without influence") for name in draft.config.unknown_fields),
    )


def _model(module: nnx.Module, architecture: str) -> str:
    return f"{architecture}, {in_bytes(sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(module))))} of weights"


def _choice(name: str, value: str, reason: str = "", flag: str = "") -> Choice:
    return Choice(name=name, value=value, reason=reason, flag=flag)
