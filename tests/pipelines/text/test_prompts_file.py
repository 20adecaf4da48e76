"""Files of prompts: both formats, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_jax.pipelines.text.prompts_file import read_prompts_file
from dspark_jax.speculators_common.errors import RequestError


def test_a_text_file_holds_one_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('  What is "x"?\n\n{"turns": 3}\nÄ second\u2028one\r\n', encoding="utf-8")
    assert read_prompts_file(file) == ['What is "x"?', '{"turns": 3}', "Ä second\u2028one"]


def test_a_jsonl_file_gives_first_turns(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["one\\ntwo", "later"], "id": 4}\n\n{"turns": ["three"]}\n', encoding="utf-8")
    assert read_prompts_file(file) == ["one\ntwo", "three"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "prompts.jsonl:2: not valid JSON"),
        ('["a"]', "prompts.jsonl:2: found a list, allowed an object whose turns"),
        ('{"prompt": "a"}', "prompts.jsonl:2: turns: missing"),
        ('{"turns": []}', r"prompts.jsonl:2: turns: found \[\]"),
        ('{"turns": "a"}', "prompts.jsonl:2: turns: found 'a'"),
        ('{"turns": [3]}', r"prompts.jsonl:2: turns: found \[3\]"),
        ('{"turns": [" "]}', r"prompts.jsonl:2: turns: found \[' '\]"),
    ],
)
def test_a_faulty_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["fine"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(RequestError, match=message):
        read_prompts_file(file)


@pytest.mark.parametrize(
    ("content", "message"), [(b"\n \n", "found no prompt"), (b"\xff\xfe", "not UTF-8 text"), (None, "No such file")]
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RequestError, match=rf"prompts.txt: .*{message}"):
        read_prompts_file(file)
