"""`dspark generate`: its outputs on stdout and stderr, its ways to give a prompt, and interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import text_pair, tiny_tokenizer
from tests.support.hub_server import cached
from tests.support.text_pair import RecordedPair, assert_refused, forbid_reading

NEW_TOKENS = 24

pytestmark = pytest.mark.usefixtures("quick_compilation")


def _ids(ids: list[int]) -> str:
    return ",".join(map(str, ids))


def test_json_is_one_object_on_stdout_and_the_recorded_text(run, pair: RecordedPair) -> None:
    arguments = ("--json", "--max-new-tokens", NEW_TOKENS, "--num-speculative-tokens", 5)
    finished = run("--prompt-ids", _ids(pair.prompt(1)), *arguments)
    assert finished.status == 0
    [line] = finished.out.splitlines()
    result = json.loads(line)
    assert result["prompt_ids"] == pair.prompt(1)
    assert result["output_ids"] == pair.greedy(1, NEW_TOKENS)
    assert result["text"] is None
    assert result["finish_reason"] == "length"
    assert [entry["accepted"] for entry in result["rounds"][:4]] == pair.expected["p1.thr0.accepted_draft_lengths"][
        :4
    ].tolist()
    assert all(entry.keys() == {"proposed", "accepted"} for entry in result["rounds"])
    assert result["tau"] == pytest.approx(
        sum(entry["accepted"] + 1 for entry in result["rounds"]) / len(result["rounds"])
    )
    assert result["seconds"] > 0
    assert result["tokens_per_second"] > 0


def test_choices_and_figures_are_said_once_on_stderr(run, pair: RecordedPair, cache: Path) -> None:
    finished = run("--prompt-ids", "5,17,3", "--json", "--max-new-tokens", 4, "--num-speculative-tokens", 5)
    for said in (
        "drafts per round",
        "5 of 5",
        "anchor-first, block of 5",
        "--sample-from-anchor/--no-sample-from-anchor",
        "kv cache",
        "xla-head-major on cpu",
    ):
        assert finished.err.count(said) == 1
    assert str(cache) in finished.err
    assert "4 tokens (length)" in finished.err
    assert "load " in finished.err
    assert "compile " in finished.err
    assert "first token " in finished.err


def test_a_model_without_text_streams_ids(run, pair: RecordedPair) -> None:
    finished = run("--prompt-ids", _ids(pair.prompt(0)), "--max-new-tokens", NEW_TOKENS)
    assert finished.out == _ids(pair.greedy(0, NEW_TOKENS)) + "\n"


def test_streamed_text_is_the_collected_text(run, texts: RecordedPair) -> None:
    arguments = ("--prompt", "abc", "--max-new-tokens", NEW_TOKENS)
    streamed = run(*arguments, target=texts.target)
    collected = run(*arguments, "--no-stream", target=texts.target)
    as_json = run(*arguments, "--json", target=texts.target)
    assert streamed.status == collected.status == as_json.status == 0
    assert streamed.out == collected.out == json.loads(as_json.out)["text"] + "\n"
    assert len(streamed.out) > 1


def test_a_file_of_prompts_gives_outputs_in_its_order(run, texts: RecordedPair, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("abc\n\nxyz\nno\n")
    one_by_one = [
        run("--prompt", prompt, "--json", "--max-new-tokens", 6, target=texts.target) for prompt in ("abc", "xyz", "no")
    ]
    expected = [json.loads(finished.out)["output_ids"] for finished in one_by_one]
    together = run(
        "--prompts-file",
        tmp_path / "prompts.txt",
        "--json",
        "--max-new-tokens",
        6,
        "--batch-size",
        2,
        target=texts.target,
    )
    assert [json.loads(line)["output_ids"] for line in together.out.splitlines()] == expected
    assert "3 prompts, 18 tokens" in together.err


def test_conversations_give_their_first_turn_and_that_is_said(run, texts: RecordedPair, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["abc", "more"]}\n')
    finished = run("--prompts-file", tmp_path / "prompts.jsonl", "--json", "--max-new-tokens", 2, target=texts.target)
    direct = run("--prompt", "abc", "--json", "--max-new-tokens", 2, target=texts.target)
    assert json.loads(finished.out)["prompt_ids"] == json.loads(direct.out)["prompt_ids"]
    assert "the first of each conversation's turns is the prompt" in finished.err


def test_template_variables_and_messages_reach_the_template(
    run, pair: RecordedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% if thinking is false %}no{% else %}yes{% endif %}{{ messages[-1].content }}{{ word }}"
    target = text_pair.with_text(pair, tmp_path, template=template).target
    lines = [{"prompt": "ab"}, {"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shown = ["--json", "--max-new-tokens", 1]

    def prompt_ids(*arguments: object) -> list[list[int]]:
        finished = run(*arguments, *shown, target=target)
        assert finished.status == 0
        return [json.loads(line)["prompt_ids"] for line in finished.out.splitlines()]

    variables = ("--template-var", "thinking=false", "--template-var", "word=x=y")
    expected = tiny_tokenizer.byte_ids("noabx=y")
    assert prompt_ids("--prompts-file", tmp_path / "prompts.jsonl", *variables) == [expected, expected]
    assert prompt_ids("--prompt", "ab") == [tiny_tokenizer.byte_ids("yesab")]
    forbid_reading(monkeypatch)
    assert_refused(
        run("--prompt", "ab", "--template-var", "thinkin=1", target=target),
        "error: --template-var: found 'thinkin', allowed a variable that the template reads: thinking, word",
    )


def test_models_may_be_named_by_their_hugging_face_ids(
    run, pair: RecordedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = cached(tmp_path, "org/target", pair.target)
    cached(tmp_path, "org/draft", pair.draft, refs=("v2",))
    finished = run(
        "--prompt-ids",
        _ids(pair.prompt(0)),
        "--max-new-tokens",
        4,
        target=Path("org/target"),
        draft=Path("org/draft@v2"),
    )
    assert finished.out == _ids(pair.greedy(0, 4)) + "\n"
    assert str(snapshot) in finished.err
    forbid_reading(monkeypatch)
    assert_refused(
        run("--prompt-ids", "5", target=Path("org/target"), draft=Path("org/draft")),
        f"org/draft: no such directory, and as a Hugging Face id not in the cache {tmp_path}; HF_HUB_OFFLINE forbids",
    )


def test_a_prompt_can_come_from_stdin_raw_or_after_a_system_message(
    run, texts: RecordedPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stdin").write_text("abc")
    with (tmp_path / "stdin").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        raw = run("--prompt", "-", "--raw", "--json", "--max-new-tokens", 1, target=texts.target)
    system = run("--prompt", "abc", "--system", "no", "--json", "--max-new-tokens", 1, target=texts.target)
    assert len(json.loads(raw.out)["prompt_ids"]) == len("abc") + 1  # and BOS
    assert len(json.loads(system.out)["prompt_ids"]) > len("system:nouser:abcassistant:")


def test_a_model_without_template_continues_the_text_and_says_so(run, pair: RecordedPair, tmp_path: Path) -> None:
    target = text_pair.with_text(pair, tmp_path, template=None).target
    finished = run("--prompt", "abc", "--json", "--max-new-tokens", 1, target=target)
    assert len(json.loads(finished.out)["prompt_ids"]) == len("abc") + 1
    assert "no chat template; the prompt is continued as it is" in finished.err


def test_stated_stop_ids_end_the_output(run, pair: RecordedPair) -> None:
    stop = pair.greedy(0, 5)[-1]
    finished = run("--prompt-ids", _ids(pair.prompt(0)), "--json", "--stop-ids", f"198,{stop}")
    result = json.loads(finished.out)
    assert result["finish_reason"] == "stop"
    assert result["output_ids"] == pair.greedy(0, 5)


def test_comparing_shows_both_ways_and_that_they_agree(run, pair: RecordedPair) -> None:
    arguments = ("--json", "--compare", "--max-new-tokens", NEW_TOKENS, "--num-speculative-tokens", 5)
    finished = run("--prompt-ids", _ids(pair.prompt(2)), *arguments)
    [line] = finished.out.splitlines()
    comparison = json.loads(line)["comparison"]
    assert comparison["parts_at"] is None
    assert comparison["plain"]["tau"] == 1
    assert comparison["plain"]["rounds"] == NEW_TOKENS - 1
    rounds = json.loads(line)["rounds"]
    assert comparison["speculative"]["offered"] == [
        sum(entry["proposed"] > place for entry in rounds) for place in range(5)
    ]
    assert comparison["speculative"]["accepted"] == [
        sum(entry["accepted"] > place for entry in rounds) for place in range(5)
    ]
    assert "times plain" in finished.err
    assert "outputs are equal, token for token" in finished.err


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Make interrupts work: processes that a shell starts in the background ignore them, and so do their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX systems")
@pytest.mark.parametrize(("ends_by", "status"), [("a closed pipe", 141), ("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.usefixtures("interruptible")
def test_a_run_that_is_cut_off_ends_quietly(
    pair: RecordedPair, tmp_path: Path, cache: Path, ends_by: str, status: int
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n" * 2000)  # it would go on for minutes
    target = text_pair.with_text(pair, tmp_path).target
    command = [
        sys.executable,
        "-m",
        "dspark_jax",
        "generate",
        "--target",
        target,
        "--draft",
        pair.draft,
        "--prompts-file",
        prompts,
        "--stream",
    ]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with subprocess.Popen(
        [str(part) for part in (*command, "--compilation-cache", cache)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        if ends_by.startswith("SIG"):
            process.send_signal(getattr(signal, ends_by))
            process.stdout.read()
        else:
            process.stdout.close()
        err = process.stderr.read().decode()
        assert process.wait(60) == status
    assert "Traceback" not in err
    assert "Error" not in err
