"""`dspark info` on every recorded checkpoint: each choice is shown once, with the flag that overrides it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.text_pair import copied, dspark

Capture = pytest.CaptureFixture[str]

DATA = Path(__file__).parents[2] / "data"
CHECKPOINTS = sorted(file.parent.relative_to(DATA).as_posix() for file in DATA.glob("*/*/config.json"))
DRAFT_FAMILIES = {
    "A_deepspec_qwen3": "deepspec_qwen3",
    "B_deepspec_gemma4": "deepspec_gemma4",
    "C_speculators": "speculators_dspark",
}
DRAFT_FAMILIES |= {"D_loop": "deepspec_qwen3", "H_compact": "compact"}
TARGETS = {"C_speculators/verifier": "qwen3", "D_loop/target": "qwen3"}
LAYOUT_FLAG, ROTARY_FLAG = "--sample-from-anchor/--no-sample-from-anchor", "--partial-rotary-factor"


def _family(name: str, config: dict[str, Any]) -> tuple[str, str]:
    if name.startswith("E_targets/"):
        kind = Path(name).name
        return "target", next(
            family for family in ("qwen3_moe", "qwen3", "gemma3", "gemma4", "llama") if kind.startswith(family)
        )
    return ("target", TARGETS[name]) if name in TARGETS else ("draft", DRAFT_FAMILIES[name.split("/")[0]])


def _layout(directory: Path, config: dict[str, Any]) -> str:
    """The expected layout, read from the raw file by the rules of the format."""
    compact = directory / "dspark.json"
    width = json.loads(compact.read_text())["config"]["gamma"] if compact.is_file() else config["block_size"]
    is_anchor_first = config.get("sample_from_anchor", True)
    return (
        f"{'anchor-first' if is_anchor_first else 'fill-in'}, block of {width} gives "
        f"{width if is_anchor_first else width - 1} drafts"
    )


def _lines(out: str, shown_name: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith(f"  {shown_name}  ")]


def _choices(capsys: Capture, *arguments: object) -> dict[str, dict[str, str]]:
    finished = dspark(capsys, "info", *arguments, "--json")
    assert (finished.status, finished.err) == (0, "")
    [described] = json.loads(finished.out)["checkpoints"]
    return {choice["name"]: choice for choice in described["choices"]}


def test_every_recorded_set_with_checkpoints_is_covered() -> None:
    assert {name.split("/")[0] for name in CHECKPOINTS} == {*DRAFT_FAMILIES, "E_targets"}
    assert len(CHECKPOINTS) == 34


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_recorded_checkpoint_is_told_completely(capsys: Capture, name: str) -> None:
    directory = DATA / name
    config = json.loads((directory / "config.json").read_text())
    finished = dspark(capsys, "info", directory)
    assert (finished.status, finished.err) == (0, "")
    kind, family = _family(name, config)
    assert _lines(finished.out, "kind")[0].split(None, 1)[1] == f"{kind}, family {family}"
    assert _lines(finished.out, "architecture")[0].split()[1] == config["architectures"][0]
    assert _lines(finished.out, "unknown fields")[0].split()[2:] == ["none"]
    stored = load_file(directory / "model.safetensors")
    [parameters] = _lines(finished.out, "parameters")
    assert f" in {len(stored)} tensors (" in parameters
    for choice in ("embed tokens", "lm head"):
        assert len(_lines(finished.out, choice)) == 1
    if kind == "draft":
        [layout], [rotary] = _lines(finished.out, "layout"), _lines(finished.out, "rotary width")
        assert layout.split(None, 1)[1].startswith(_layout(directory, config))
        open_to_flags = family != "compact"
        assert layout.endswith(LAYOUT_FLAG) is open_to_flags
        assert rotary.endswith(ROTARY_FLAG) is open_to_flags


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("C_speculators/legacy_full_anchor_mixed_gated", ("embed_tokens", "lm_head")),
        ("C_speculators/pruned_anchor_full_vanilla", ("lm_head",)),
        ("C_speculators/full_anchor_mixed_rnn", ()),
        ("H_compact/markov", ()),
    ],
)
def test_older_and_newer_exports_differ_in_the_tables_that_they_hold(
    capsys: Capture, name: str, own: tuple[str, ...]
) -> None:
    choices = _choices(capsys, DATA / name)
    for table in ("embed_tokens", "lm_head"):
        expected = "the draft's own" if table in own else "the target's"
        assert choices[table]["value"] == expected
        without = "the format stores none" if name.startswith("H_") else "the file has none"
        assert choices[table]["reason"] == ("" if table in own else without)


@pytest.mark.parametrize(
    ("speculative_tokens", "layout", "why"),
    [(5, "anchor-first", "imply"), (4, "fill-in", "imply"), (None, "anchor-first", "default")],
)
def test_a_layout_that_the_file_leaves_open_is_told_once_and_overruled_by_flag(
    capsys: Capture, tmp_path: Path, speculative_tokens: int | None, layout: str, why: str
) -> None:
    source = DATA / "C_speculators" / "full_noanchor_mixed_rnn"
    library = json.loads((source / "config.json").read_text())["speculators_config"]
    for method in library["proposal_methods"]:
        method["speculative_tokens"] = speculative_tokens
        if speculative_tokens is None:
            del method["speculative_tokens"]
    draft = copied(source, tmp_path / "draft", sample_from_anchor=None, speculators_config=library)
    out = dspark(capsys, "info", draft).out
    [line] = _lines(out, "layout")
    assert f"{layout}, block of 5" in line
    assert "the file does not say" in line
    assert why in line
    assert out.count("the file does not say") == 1
    for flag, stated in (("--sample-from-anchor", "anchor-first"), ("--no-sample-from-anchor", "fill-in")):
        choice = _choices(capsys, draft, flag)["sample_from_anchor"]
        assert choice["value"].startswith(stated)
        assert choice["reason"] == "stated by the user; the file says nothing"
        assert choice["flag"] == LAYOUT_FLAG


def test_a_rotary_factor_copied_from_a_target_is_told_once_and_overruled_by_flag(
    capsys: Capture, tmp_path: Path
) -> None:
    source = DATA / "C_speculators" / "full_anchor_mixed_rnn"
    network = json.loads((source / "config.json").read_text())["transformer_layer_config"]
    network["partial_rotary_factor"] = 0.25
    draft = copied(source, tmp_path / "draft", transformer_layer_config=network)
    out = dspark(capsys, "info", draft).out
    [line] = _lines(out, "rotary width")
    assert "16 of 16 elements of a head (the file says 0.25" in line
    assert out.count("the file says 0.25") == 1
    choice = _choices(capsys, draft, "--partial-rotary-factor", "0.25")["partial_rotary_factor"]
    assert (choice["value"], choice["flag"]) == ("4 of 16 elements of a head", ROTARY_FLAG)
    assert choice["reason"] == "stated by the user; the file says 0.25"


def test_flags_about_a_draft_need_one_that_leaves_the_choice(capsys: Capture) -> None:
    refused = dspark(capsys, "info", DATA / "D_loop" / "target", "--no-sample-from-anchor")
    assert (refused.status, refused.error) == (
        2,
        "dspark: error: --sample-from-anchor: found False, allowed only with a draft",
    )
    refused = dspark(capsys, "info", DATA / "H_compact" / "markov", "--partial-rotary-factor", "0.5")
    assert refused.status == 2
    assert (
        "partial_rotary_factor: found 0.5 stated by the user, allowed nothing: a compact draft leaves no such choice"
        in refused.error
    )


def test_an_unknown_architecture_is_told_with_its_file(capsys: Capture, tmp_path: Path) -> None:
    stranger = copied(DATA / "D_loop" / "target", tmp_path / "stranger", architectures=["Qwen3ForCausalML"])
    refused = dspark(capsys, "info", stranger)
    assert refused.error.startswith(
        f"dspark: error: {stranger / 'config.json'}: architectures: unknown architecture 'Qwen3ForCausalML' (did you "
        "mean"
    )


def test_a_misshapen_tensor_is_told_with_its_file(capsys: Capture, tmp_path: Path) -> None:
    draft = copied(DATA / "D_loop" / "draft", tmp_path / "draft")
    tensors = load_file(draft / "model.safetensors")
    save_file({**tensors, "norm.weight": np.zeros(3, np.float32)}, draft / "model.safetensors")
    refused = dspark(capsys, "info", draft)
    assert (
        refused.error
        == f"dspark: error: {draft}: model.safetensors: tensor norm.weight: found shape [3], expected [64]"
    )
