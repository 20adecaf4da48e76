"""`dspark info`, and the command around the subcommands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dspark_jax
from dspark_jax.pipelines import cli
from tests.support import text_pair
from tests.support.hub_server import cached
from tests.support.text_pair import RecordedPair, copied, dspark

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def pair(data_dir: Path) -> RecordedPair:
    return text_pair.recorded_pair(data_dir)


def _fields(out: str) -> dict[str, str]:
    """The fields of the output: first words of a line -> the rest, which begins after two blanks or more."""
    return {name: value.strip() for name, _, value in (line.strip().partition("  ") for line in out.splitlines())} | {
        line.split()[0]: line.split()[1] for line in out.splitlines() if len(line.split()) == 2
    }


def test_a_draft_is_described_one_field_a_line(capsys: Capture, pair: RecordedPair) -> None:
    finished = dspark(capsys, "info", pair.draft)
    assert (finished.status, finished.err) == (0, "")
    assert finished.out.startswith(f"{pair.draft}\n")
    fields = _fields(finished.out)
    assert fields["architecture"] == "Qwen3DSparkModel"
    assert fields["kind"] == "draft, family deepspec_qwen3"
    assert fields["layout"].startswith("anchor-first, block of 5 gives 5 drafts")
    assert fields["layout"].endswith("--sample-from-anchor/--no-sample-from-anchor")
    assert fields["rotary width"].endswith("--partial-rotary-factor")
    assert fields["taps"] == "2, 3, 5"
    assert fields["vocabulary"] == "199 draft ids of 199 target ids"
    assert fields["attention backend"] == "xla-head-major"
    assert fields["unknown fields"] == "none"
    assert fields["markov_head_type"] == "vanilla"
    assert fields["layers"] == "2 x (all context, bidirectional in the block)"


def test_parameters_are_counted_from_the_headers(capsys: Capture, pair: RecordedPair) -> None:
    tensors = load_file(pair.draft / "model.safetensors")
    [described] = json.loads(dspark(capsys, "info", pair.draft, "--json").out)["checkpoints"]
    assert described["num_parameters"] == sum(tensor.size for tensor in tensors.values())
    assert described["num_tensors"] == len(tensors)
    assert described["bytes_on_disk"] == (pair.draft / "model.safetensors").stat().st_size
    assert described["stored_as"] == {"float32": len(tensors)}


def test_tables_of_a_pruned_fill_in_draft(capsys: Capture, data_dir: Path) -> None:
    draft = data_dir / "C_speculators" / "pruned_noanchor_sliding_gated_noconf"
    [described] = json.loads(dspark(capsys, "info", draft, "--json").out)["checkpoints"]
    choices = {choice["name"]: choice["value"] for choice in described["choices"]}
    assert choices["sample_from_anchor"] == "fill-in, block of 5 gives 4 drafts"
    assert choices["vocabulary"] == "61 draft ids of 199 target ids"
    assert choices["embed_tokens"] == "the target's"
    assert choices["lm_head"] == "the draft's own"
    assert described["config"]["layers"] == [{"window": 6, "causal": True}] * 2
    stored = load_file(draft / "model.safetensors")
    assert described["num_parameters"] == sum(tensor.size for tensor in stored.values() if tensor.dtype == np.float32)


def test_a_head_that_the_file_lacks_is_the_targets(capsys: Capture, data_dir: Path, tmp_path: Path) -> None:
    draft = copied(data_dir / "C_speculators" / "pruned_noanchor_full_vanilla", tmp_path / "draft")
    tensors = load_file(draft / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, draft / "model.safetensors")
    finished = dspark(capsys, "info", "--target", data_dir / "C_speculators" / "verifier", "--draft", draft)
    assert finished.status == 0
    assert "the target's rows of the draft vocabulary" in finished.out
    assert finished.out.endswith("\nthe draft fits the target\n")


def test_a_target_tells_of_its_text_and_its_head(capsys: Capture, pair: RecordedPair, tmp_path: Path) -> None:
    without = _fields(dspark(capsys, "info", pair.target).out)
    assert without["kind"] == "target, family qwen3"
    assert without["tokenizer"] == "none: prompts are token ids"
    assert without["lm head"] == "tied to embed_tokens"
    texts = text_pair.with_text(pair, tmp_path, eos=7)
    fields = _fields(dspark(capsys, "info", texts.target).out)
    assert fields["tokenizer"].endswith("tokens, with chat template")
    assert re.split("  +", fields["stop ids"]) == ["7 (generation_config.json)", "--stop-ids"]


def test_a_chat_template_that_does_not_compile_is_told_as_generate_tells_it(
    capsys: Capture, pair: RecordedPair, tmp_path: Path
) -> None:
    target = text_pair.with_text(pair, tmp_path, template="{% for %}{{ messages }}").target
    described = dspark(capsys, "info", target)
    refused = dspark(capsys, "generate", "--target", target, "--prompt", "hello")
    assert (described.status, refused.status) == (0, 2)
    error = refused.error.removeprefix("dspark: error: ")
    assert error.startswith(f"{target / 'tokenizer_config.json'}: chat template: Expected an expression")
    assert f"chat template       cannot be used ({error})  --raw" in described.out
    choices = json.loads(dspark(capsys, "info", target, "--json").out)["checkpoints"][0]["choices"]
    assert {"name": "chat_template", "value": "cannot be used", "reason": error, "flag": "--raw"} in choices


def test_stop_ids_of_files_and_tokenizer_are_shown_with_their_sources(
    capsys: Capture, pair: RecordedPair, tmp_path: Path
) -> None:
    target = text_pair.with_text(pair, tmp_path, eos=7).target
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|im_end|>"}))
    fields = _fields(dspark(capsys, "info", target).out)
    shown = "7, 2 (7: generation_config.json; 2: eos_token '<|im_end|>' of the tokenizer)"
    assert re.split("  +", fields["stop ids"]) == [shown, "--stop-ids"]


def test_another_kind_of_tokenizer_is_named(capsys: Capture, pair: RecordedPair, tmp_path: Path) -> None:
    target = text_pair.copied(pair.target, tmp_path / "target")
    (target / "tokenizer.model").write_bytes(b"")
    shown = _fields(dspark(capsys, "info", target).out)["tokenizer"]
    assert shown.startswith(
        "none: prompts are token ids (the directory has tokenizer.model but no tokenizer.json, the only kind that"
    )


def test_models_may_be_named_by_their_hugging_face_ids(
    capsys: Capture, pair: RecordedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    draft = cached(tmp_path, "org/draft", pair.draft)
    cached(tmp_path, "org/target", pair.target, refs=("v2",))
    finished = dspark(capsys, "info", "--target", "org/target@v2", "--draft", "org/draft")
    assert finished.status == 0
    assert finished.out.endswith("the draft fits the target\n")
    assert dspark(capsys, "info", draft.parents[1]).out.startswith(f"{draft}\n")
    missing = dspark(capsys, "info", "org/target")
    assert missing.status == 2
    assert "org/target: no such directory, and as a Hugging Face id not in the cache" in missing.error


def test_unknown_fields_are_named(capsys: Capture, pair: RecordedPair, tmp_path: Path) -> None:
    draft = copied(pair.draft, tmp_path / "draft", shiny_new_field=3)
    assert _fields(dspark(capsys, "info", draft).out)["unknown fields"] == "shiny_new_field"


def test_several_checkpoints_and_a_pair(capsys: Capture, pair: RecordedPair, data_dir: Path) -> None:
    other = data_dir / "E_targets" / "qwen3_tied"
    finished = dspark(capsys, "info", other, "--target", pair.target, "--draft", pair.draft, "--json")
    told = json.loads(finished.out)
    assert [described["path"] for described in told["checkpoints"]] == [str(other), str(pair.target), str(pair.draft)]
    assert told["pair"] == {"fits": True, "reason": None}


def test_a_pair_that_does_not_fit_is_described_and_refused(capsys: Capture, pair: RecordedPair, tmp_path: Path) -> None:
    draft = copied(pair.draft, tmp_path / "draft", target_hidden_size=96)
    (draft / "model.safetensors").write_bytes(_with_wider_taps(pair.draft, 96))
    finished = dspark(capsys, "info", "--target", pair.target, "--draft", draft, "--json")
    assert finished.status == 2
    assert json.loads(finished.out)["pair"]["fits"] is False
    assert finished.error.startswith(f"dspark: error: {draft / 'config.json'}: does not fit the target")
    assert "hidden size: the draft expects 96, the target has 64" in finished.error


def _with_wider_taps(draft: Path, width: int) -> bytes:
    from safetensors.numpy import save

    tensors = load_file(draft / "model.safetensors")
    rows, columns = tensors["fc.weight"].shape
    return save({**tensors, "fc.weight": np.zeros((rows, columns // 64 * width), np.float32)})


def test_every_tensor_fault_is_in_the_one_error(capsys: Capture, pair: RecordedPair, tmp_path: Path) -> None:
    draft = copied(pair.draft, tmp_path / "draft")
    tensors = load_file(draft / "model.safetensors")
    tensors["spare.weight"] = tensors.pop("norm.weight")
    tensors["fc.weight"] = np.ascontiguousarray(tensors["fc.weight"][:, :-1])
    save_file(tensors, draft / "model.safetensors")
    finished = dspark(capsys, "info", draft)
    assert (finished.status, finished.out) == (2, "")
    assert finished.err.count("\n") == 1
    assert finished.error.startswith(f"dspark: error: {draft}: ")
    for fault in (
        "tensor norm.weight: missing",
        "tensor spare.weight: unexpected",
        "tensor fc.weight: found shape [64, 191], expected [64, 192]",
    ):
        assert fault in finished.error


def test_a_broken_checkpoint_does_not_hide_the_sound_ones(capsys: Capture, pair: RecordedPair, tmp_path: Path) -> None:
    finished = dspark(capsys, "info", tmp_path / "nowhere", pair.draft, tmp_path / "nowhere_else")
    assert finished.status == 2
    assert "Qwen3DSparkModel" in finished.out
    assert (
        finished.error
        == f"dspark: error: {tmp_path / 'nowhere'}: no such directory; {tmp_path / 'nowhere_else'}: no such directory"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "info: found no checkpoint"),
        (["--target", "{draft}"], "a draft, allowed a target"),
        (["--draft", "{target}"], "a target, allowed a draft"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_wrong_arguments_are_one_error(capsys: Capture, pair: RecordedPair, arguments: list[str], message: str) -> None:
    finished = dspark(
        capsys, "info", *(argument.format(target=pair.target, draft=pair.draft) for argument in arguments)
    )
    assert (finished.status, finished.out) == (2, "")
    assert message in finished.error
    assert "Traceback" not in finished.err


def test_the_command_knows_its_version_and_its_subcommands(capsys: Capture) -> None:
    assert dspark(capsys, "--version").out == f"dspark-jax {dspark_jax.__version__}\n"
    finished = dspark(capsys, "--help")
    assert finished.status == 0
    assert all(name in finished.out and summary in finished.out for name, (_, summary) in cli.COMMANDS.items())


@pytest.mark.parametrize("arguments", [[], ["generat"], ["--unknown"]])
def test_no_or_another_subcommand_is_an_error(capsys: Capture, arguments: list[str]) -> None:
    finished = dspark(capsys, *arguments)
    assert (finished.status, finished.out) == (2, "")
    assert finished.error.startswith("dspark: error: ")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_subcommand_explains_itself(capsys: Capture, name: str) -> None:
    finished = dspark(capsys, name, "--help")
    assert finished.status == 0
    assert f"usage: dspark {name}" in finished.out


@pytest.mark.parametrize("arguments", ["--help", "--version", "generate --help", "info --help", "generate --target"])
def test_help_and_wrong_arguments_do_not_wait_for_jax(arguments: str) -> None:
    probe = (
        "import sys\nfrom dspark_jax.pipelines import cli\n"
        f"try: cli.main({arguments.split()!r})\nexcept SystemExit: pass\nprint('jax' in sys.modules, 'numpy' in "
        "sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "False False"


def test_a_path_that_the_system_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "a" * 5000]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dspark: error: ")
    assert error.count("\n") == 1
    assert "File name too long" in error
    assert len(error) < 2100
