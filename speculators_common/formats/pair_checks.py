"""Checks that a draft fits a target. A wrong pair could run, but the target would accept almost no draft."""

from __future__ import annotations

from pathlib import Path

from dspark_jax.speculators_common.errors import PairError
from dspark_jax.speculators_common.formats.draft_config import DraftConfig


def check_pair(
    draft: DraftConfig,
    *,
    hidden_size: int,
    vocab_size: int,
    num_layers: int,
    target_architecture: str,
    target_file: Path | str,
) -> None:
    """Check that `draft` fits a loaded target.

    Compared are the hidden size H, the vocabulary size V, the number of layers, the taps and the mask token.
    `target_architecture` and `target_file` are used in the message. Raises one `PairError` that lists every mismatch.
    """
    faults = _faults(draft, hidden_size=hidden_size, vocab_size=vocab_size, num_layers=num_layers)
    if faults:
        raise PairError(
            f"{draft.source}: does not fit the target {target_file} ({target_architecture}): " + "; ".join(faults)
        )


def check_dims(draft: DraftConfig, *, hidden_size: int, vocab_size: int, num_layers: int | None) -> None:
    """Check that `draft` fits a target of these sizes; `num_layers` is `None` if it is not known.

    Raises one `PairError` that lists every mismatch.
    """
    faults = _faults(draft, hidden_size=hidden_size, vocab_size=vocab_size, num_layers=num_layers)
    if faults:
        raise PairError(f"{draft.source}: does not fit the target: " + "; ".join(faults))


def _faults(draft: DraftConfig, *, hidden_size: int, vocab_size: int, num_layers: int | None) -> list[str]:
    faults = []
    for name, stated, live in (
        ("hidden size", draft.target_hidden_size, hidden_size),
        ("vocabulary", draft.vocab_size, vocab_size),
        ("number of layers", draft.num_target_layers, num_layers),
    ):
        if stated is not None and live is not None and stated != live:
            faults.append(f"{name}: the draft expects {stated}, the target has {live}")
    if num_layers is not None:
        faults += _tap_faults(draft, num_layers)
    if draft.mask_token_id is not None and not 0 <= draft.mask_token_id < vocab_size:
        faults.append(f"mask_token_id: found {draft.mask_token_id}, allowed 0 <= id < {vocab_size}")
    return faults


def _tap_faults(draft: DraftConfig, num_layers: int) -> list[str]:
    taps = [tap for tap in draft.for_target(num_layers).taps if isinstance(tap, int)]
    convention = (
        f"taps {list(draft.taps)} count the residual stream after x of the target's {num_layers} layers (0 = "
        "embedding output)"
    )
    if draft.taps_reach_final:
        beyond = [tap for tap in taps if not 1 <= tap <= num_layers]
        convention += f", {num_layers + 1} the state after the final norm"
        return [f"taps: found {beyond}, allowed 1 <= x <= {num_layers + 1}; {convention}"] if beyond else []
    faults = []
    beyond = [tap for tap in taps if not 0 <= tap <= num_layers]
    if beyond:
        faults.append(f"taps: found {beyond}, allowed 0 <= x < {num_layers}; {convention}")
    if num_layers in taps:
        reason = "files differ in taking the last layer's output before or after the final norm"
        faults.append(f"taps: found {num_layers}, allowed 0 <= x < {num_layers} ({reason}); {convention}")
    return faults
