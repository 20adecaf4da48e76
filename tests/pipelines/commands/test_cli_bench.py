"""`dspark bench` as a command: what it refuses, before any weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_jax.pipelines.checkpoints import loading
from tests.support import text_pair
from tests.support.hub_server import cached
from tests.support.text_pair import RecordedPair, dspark


@pytest.fixture
def pair(data_dir: Path, tmp_path: Path) -> RecordedPair:
    return text_pair.with_text(text_pair.recorded_pair(data_dir), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-speculative-tokens", "2,6"], "error: --num-speculative-tokens: found 6, allowed 1..5 ("),
        (
            ["--num-speculative-tokens", "5", "--no-sample-from-anchor"],
            "error: --num-speculative-tokens: found 5, allowed 1..4 (",
        ),
        (["--max-new-tokens", "600"], "prompts: prompt 1: found 22 tokens and 600 new ones, allowed 512 together"),
        (["--prompts-file", ""], "error: argument --prompts-file: found ''"),
        (
            ["--partial-rotary-factor", "2"],
            "error: argument --partial-rotary-factor: found '2', allowed a number > 0 and <= 1",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line_before_weights_are_read(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pair: RecordedPair,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    _assert_refused(
        capsys, monkeypatch, tmp_path, ["--target", pair.target, "--draft", pair.draft, *arguments], message
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-speculative-tokens", "2"], "error: --num-speculative-tokens: found 2, allowed only with a draft"),
        (["--confidence-threshold", "0.5"], "error: --confidence-threshold: found 0.5, allowed only with a draft"),
        (["--sample-from-anchor"], "error: --sample-from-anchor: found True, allowed only with a draft"),
        (["--partial-rotary-factor", "0.5"], "error: --partial-rotary-factor: found 0.5, allowed only with a draft"),
        (["--draft", ""], "error: argument --draft: found ''"),
    ],
)
def test_flags_about_the_draft_need_one(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pair: RecordedPair,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    _assert_refused(capsys, monkeypatch, tmp_path, ["--target", pair.target, *arguments], message)


def test_models_may_be_named_by_their_hugging_face_ids(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pair: RecordedPair, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cached(cache, "org/target", pair.target)
    cached(cache, "org/draft", pair.draft)
    models = ["--target", "org/target", "--draft", "org/draft"]
    message = "prompts: prompt 1: found 22 tokens and 600 new ones, allowed 512 together"  # both were opened
    _assert_refused(capsys, monkeypatch, tmp_path, [*models, "--max-new-tokens", "600"], message)


def test_a_prompt_that_cannot_be_encoded_is_named_with_its_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pair: RecordedPair, tmp_path: Path
) -> None:
    message = (
        f"{tmp_path / 'prompts.txt'}:1: template_vars: found 'thinking', allowed a variable that the template reads"
    )
    _assert_refused(capsys, monkeypatch, tmp_path, ["--target", pair.target, "--template-var", "thinking=1"], message)


def _assert_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    arguments: list[object],
    message: str,
) -> None:
    def read(*arguments: object, **options: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "fill_module", read)
    (folder / "prompts.txt").write_text("abc\n")
    finished = dspark(capsys, "bench", "--prompts-file", folder / "prompts.txt", *arguments)
    assert (finished.status, finished.out) == (2, "")
    assert message in finished.error
