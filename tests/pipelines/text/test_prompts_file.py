"""Files of prompts: both formats, and the errors of malformed files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_jax.pipelines.text.prompts_file import read_prompts_file
from dspark_jax.speculators_common.errors import RequestError


def test_a_text_file_holds_one_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('  What is "x"?\n\n{"turns": 3}\nÄ second\u2028one\r\n', encoding="utf-8")
    assert [prompt.content for prompt in read_prompts_file(file)] == [
        'What is "x"?',
        '{"turns": 3}',
        "Ä second\u2028one",
    ]


def test_a_jsonl_file_gives_prompts_conversations_and_first_turns(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    parts = [{"type": "text", "text": "five"}]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts, "name": "me"}]
    lines = [
        {"turns": ["one\ntwo", "later"], "id": 4},
        {"turns": ["three"]},
        {"prompt": "four", "messages": None},
        {"prompt": parts},
        {"turns": [parts]},
        {"messages": messages},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    prompts = read_prompts_file(file)
    assert [prompt.content for prompt in prompts] == [
        "one\ntwo",
        "three",
        "four",
        [{"role": "user", "content": parts}],
        [{"role": "user", "content": parts}],
        messages,
    ]
    assert [prompt.location for prompt in prompts] == [f"{file}:{number}" for number in (1, 3, 5, 7, 9, 11)]
    assert [prompt.later_turns for prompt in prompts] == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "prompts.jsonl:2: not valid JSON"),
        ('["a"]', "prompts.jsonl:2: found a list, allowed an object with one of prompt, messages and turns"),
        ('{"text": "a"}', "prompts.jsonl:2: found none of them, allowed an object with one of"),
        ('{"prompt": "a", "turns": ["a"]}', "prompts.jsonl:2: found prompt and turns, allowed an object with one of"),
        ('{"prompt": " "}', "prompts.jsonl:2: prompt: found ' ', allowed a text that is not blank"),
        ('{"prompt": 3}', "prompts.jsonl:2: prompt: found 3"),
        ('{"prompt": []}', r"prompts.jsonl:2: prompt: found \[\]"),
        (
            '{"prompt": [{"type": "image_url", "image_url": "x"}]}',
            r"prompts.jsonl:2: prompt\[0\].type: found 'image_url', allowed 'text'",
        ),
        ('{"turns": []}', r"prompts.jsonl:2: turns: found \[\]"),
        ('{"turns": "a"}', "prompts.jsonl:2: turns: found 'a'"),
        ('{"turns": [3]}', r"prompts.jsonl:2: turns\[0\]: found 3"),
        ('{"turns": [" "]}', r"prompts.jsonl:2: turns\[0\]: found ' '"),
        ('{"messages": "a"}', "prompts.jsonl:2: messages: found 'a', allowed a list of messages"),
        ('{"messages": []}', r"prompts.jsonl:2: messages: found \[\]"),
        ('{"messages": [{"role": "user"}]}', r"prompts.jsonl:2: messages\[0\].content: found None"),
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
