"""`dspark generate`: each refusal is one line, before any weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.text_pair import RecordedPair, assert_refused, copied, forbid_reading

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--prompt", "abc", "--confidence-threshold", "1.5"],
            "argument --confidence-threshold: found '1.5', allowed a number >= 0 and <= 1",
        ),
        (["--prompt", "abc", "--confidence-threshold", "nan"], "argument --confidence-threshold: found 'nan'"),
        (
            ["--prompt", "abc", "--max-new-tokens", "0"],
            "argument --max-new-tokens: found '0', allowed a whole number >= 1",
        ),
        (["--prompt", "abc", "--max-new-tokens", "many"], "argument --max-new-tokens: found 'many'"),
        (["--prompt", "abc", "--num-speculative-tokens", "0"], "argument --num-speculative-tokens: found '0'"),
        (
            ["--prompt", "abc", "--partial-rotary-factor", "0"],
            "argument --partial-rotary-factor: found '0', allowed a number > 0 and <= 1",
        ),
        (["--prompts-file", ""], "argument --prompts-file: found '', allowed the name of a file or directory"),
        (["--prompt", "abc", "--draft", ""], "argument --draft: found ''"),
        (["--prompt", "abc", "--target", ""], "argument --target: found ''"),
        (["--prompt", "abc", "--dtype", "float16"], "argument --dtype: invalid choice"),
        (["--prompt-ids", "5,,3"], "argument --prompt-ids: found '5,,3', allowed token ids with commas between them"),
        (["--prompt-ids", "-5"], "argument --prompt-ids"),
        (["--prompt", "abc", "--stop-ids", "x"], "argument --stop-ids: found 'x'"),
        (["--prompt", "abc", "--template-var", "x"], "argument --template-var: found 'x', allowed NAME=VALUE"),
        (["--prompt", "abc", "--template-var", "a-b=3"], "argument --template-var: found 'a-b=3', allowed NAME=VALUE"),
        (["--prompt", "abc", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--prompt", "abc", "--max-new", "3"], "unrecognized arguments: --max-new"),
        (["--prompt", "abc", "--prompt-ids", "5"], "not allowed with argument"),
        ([], "one of the arguments --prompt --prompts-file --prompt-ids is required"),
    ],
)
def test_a_wrong_argument_is_refused_at_the_parser(run, arguments: list[str], message: str) -> None:
    finished = run(*arguments)
    assert finished.status == 2
    assert finished.out == ""
    assert message in finished.error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "abc", "--system", "no", "--raw"], "--system: found beside --raw"),
        (["--prompt-ids", "5", "--raw"], "--raw: found beside --prompt-ids"),
        (["--prompt-ids", "5", "--system", "no"], "--system: found beside --prompt-ids"),
        (["--prompt", "abc", "--template-var", "a=1", "--raw"], "--template-var: found beside --raw"),
        (["--prompt-ids", "5", "--template-var", "a=1"], "--template-var: found beside --prompt-ids"),
        (
            ["--prompt", "abc", "--template-var", "a=1", "--template-var", "a=2"],
            "--template-var: found a twice, allowed each variable once",
        ),
        (["--prompt", "abc", "--stream", "--json"], "--stream: found beside --json"),
        (["--prompt", "abc", "--stream", "--batch-size", "2"], "--stream: found beside --batch-size above 1"),
        (["--prompt", "abc", "--compare", "--batch-size", "2"], "--compare: found beside --batch-size above 1"),
        (["--prompts-file", "no_such_file.txt"], "no_such_file.txt: cannot be read: No such file"),
        (["--prompt", "abc"], "error: --prompt: found text, allowed token ids: "),
        (["--prompt", ""], "error: --prompt: found no text"),
        (["--prompt-ids", "5,199"], "error: --prompt-ids: found token id [199], allowed ids 0..198"),
        (["--prompt-ids", "5", "--stop-ids", "199"], "error: --stop-ids: found (199,), allowed ids 0..198"),
        (
            ["--prompt-ids", "5", "--num-speculative-tokens", "6"],
            "error: --num-speculative-tokens: found 6, allowed 1..5",
        ),
        (["--prompt-ids", "5", "--max-seq-len", "513"], "error: --max-seq-len: found 513, allowed 2..512"),
        (["--prompt-ids", "5,17,3", "--max-seq-len", "3"], "error: --prompt-ids: found 3 tokens, allowed at most 2"),
        (["--prompt-ids", "5", "--batch-size", "1000000000"], "error: --batch-size, --max-seq-len: kv cache: found"),
        (
            ["--prompt-ids", "5", "--compilation-cache", "/dev/null/x"],
            "--compilation-cache: found /dev/null/x (Not a directory)",
        ),
    ],
)
def test_what_cannot_be_served_is_one_line_before_weights_are_read(
    run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    forbid_reading(monkeypatch)
    assert_refused(run(*arguments), message)


def test_flags_about_the_draft_need_one(run, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_reading(monkeypatch)
    assert_refused(run("--prompt-ids", "5", "--compare", draft=None), "--compare: found without --draft")
    assert_refused(
        run("--prompt-ids", "5", "--num-speculative-tokens", 2, draft=None),
        "--num-speculative-tokens: found 2, allowed only with a draft",
    )
    assert_refused(
        run("--prompt-ids", "5", "--confidence-threshold", 0.5, draft=None),
        "--confidence-threshold: found 0.5, allowed only with a draft",
    )


def test_a_threshold_needs_a_confidence_head(run, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_reading(monkeypatch)
    draft = data_dir / "A_deepspec_qwen3" / "rank0_noconf"
    refused = run("--prompt-ids", "5", "--confidence-threshold", 0.5, draft=draft)
    assert_refused(
        refused,
        f"--confidence-threshold: found 0.5, allowed 0: {draft / 'config.json'} describes a draft without confidence "
        "head",
    )


def test_a_bad_prompt_in_a_file_is_named(
    run, texts: RecordedPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forbid_reading(monkeypatch)
    file = tmp_path / "prompts.txt"
    file.write_text("abc\nwith blanks\n")
    assert_refused(run("--prompts-file", file, target=texts.target), f"{file}:2: prompt: found token id")
    file.write_text("\n")
    assert_refused(run("--prompts-file", file, target=texts.target), f"{file}: found no prompt")


def test_a_broken_checkpoint_is_named(run, pair: RecordedPair, tmp_path: Path) -> None:
    ids = ("--prompt-ids", "5")
    assert_refused(run(*ids, target=tmp_path / "nowhere"), f"{tmp_path / 'nowhere'}: no such directory")
    assert_refused(run(*ids, target=pair.draft), "architectures: found 'Qwen3DSparkModel', a draft, allowed a target")
    assert_refused(run(*ids, draft=pair.target), "architectures: found 'Qwen3ForCausalLM', a target, allowed a draft")
    unknown = copied(pair.target, tmp_path / "unknown", architectures=["Qwen3ForCausalML"])
    assert_refused(
        run(*ids, target=unknown),
        f"{unknown / 'config.json'}: architectures: unknown architecture 'Qwen3ForCausalML' (did you mean",
    )
    later = copied(pair.draft, tmp_path / "later", architectures=["DFlash2DraftModel"])
    assert_refused(
        run(*ids, draft=later),
        f"{later / 'config.json'}: architectures: unsupported architecture 'DFlash2DraftModel': DFlash2 drafts",
    )
    broken = copied(pair.draft, tmp_path / "broken")
    content = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert_refused(run(*ids, draft=broken), f"{broken / 'model.safetensors'}: ")
    (broken / "config.json").write_text("{")
    assert_refused(run(*ids, draft=broken), f"{broken / 'config.json'}: invalid JSON")


def test_a_draft_for_another_target_is_refused(run, pair: RecordedPair, tmp_path: Path) -> None:
    wider = copied(pair.draft, tmp_path / "wider", target_hidden_size=96)
    assert_refused(
        run("--prompt-ids", "5", draft=wider),
        f"{wider / 'config.json'}: does not fit the target",
        "hidden size: the draft expects 96",
    )
    longer = copied(pair.draft, tmp_path / "longer", vocab_size=211)
    assert_refused(run("--prompt-ids", "5", draft=longer), "vocabulary: the draft expects 211, the target has 199")
