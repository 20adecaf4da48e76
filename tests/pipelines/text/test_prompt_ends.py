"""BOS and EOS around plain prompts: the flag of the config decides, and a text never gets a token twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from dspark_jax.pipelines.text.tokenizer import Tokenizer
from dspark_jax.speculators_common.errors import CheckpointError
from tests.support.tiny_tokenizer import BOS, CHATML, END, HELLO, START, WORDS, backend, loaded

HELLO_ID = WORDS.index("hello")
NAMED = {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def tokenizer_with(directory: Path, post_processor: str, config: dict[str, Any]) -> Tokenizer:
    """Its post-processor is a template of `<s>`, `<|im_end|>` and the text `$A`."""
    tokenizer = loaded(directory, config)
    tokens = [(WORDS[token], token) for token in (BOS, START, END)]
    tokenizer.backend.post_processor = processors.TemplateProcessing(single=post_processor, special_tokens=tokens)
    return tokenizer


@pytest.mark.parametrize("post_processor", ["$A", "<s> $A", "<s> $A <|im_end|>", "<|im_start|> <s> $A"])
@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("add_eos", [None, True, False])
def test_the_flags_decide_whatever_the_post_processor_does(
    tmp_path: Path, post_processor: str, add_bos: bool | None, add_eos: bool | None
) -> None:
    tokenizer = tokenizer_with(tmp_path, post_processor, NAMED | {"add_bos_token": add_bos, "add_eos_token": add_eos})
    has_bos = "<s>" in post_processor if add_bos is None else add_bos
    start = [START] if "<|im_start|>" in post_processor else []
    expected = [*start, *([BOS] if has_bos else []), HELLO_ID, *([END] if add_eos else [])]
    assert tokenizer.encode("hello") == expected


def test_without_a_config_the_post_processor_adds_bos_and_nothing_is_appended(tmp_path: Path) -> None:
    backend().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("hello") == [BOS, HELLO_ID]
    assert tokenizer.encode("<s>hello") == [BOS, HELLO_ID]


@pytest.mark.parametrize("post_processor", ["$A", "<s> $A", "<|im_start|> <s> $A"])
def test_a_text_that_spells_bos_has_one(tmp_path: Path, post_processor: str) -> None:
    tokenizer = tokenizer_with(tmp_path, post_processor, NAMED | {"add_bos_token": True, "chat_template": CHATML})
    assert tokenizer.chat_template is not None
    rendered = tokenizer.chat_template.render(HELLO)
    assert rendered.startswith("<s>")
    start = [START] if "<|im_start|>" in post_processor else []
    assert tokenizer.encode("<s>hello") == [*start, BOS, HELLO_ID]
    assert tokenizer.encode(rendered) == [*start, *tokenizer.chat(HELLO)]
    assert tokenizer.encode(rendered).count(BOS) == 1


def test_a_text_that_begins_with_all_that_is_added_gets_none_of_it(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, "<|im_start|> <s> $A", NAMED)
    assert tokenizer.encode("<|im_start|><s>hello") == [START, BOS, HELLO_ID]


def test_a_false_flag_keeps_a_bos_that_the_text_spells(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, "<s> $A", NAMED | {"add_bos_token": False})
    assert tokenizer.encode("<s>hello") == [BOS, HELLO_ID]


def test_eos_is_not_appended_twice(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, "$A <|im_end|>", NAMED | {"add_eos_token": True})
    assert tokenizer.encode("hello<|im_end|>") == [HELLO_ID, END]


def test_an_empty_text_has_its_ends(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, "<s> $A", NAMED | {"add_eos_token": True})
    assert tokenizer.encode("") == [BOS, END]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"add_bos_token": True}, "add_bos_token: found True, allowed false where no file names a bos_token"),
        ({"add_eos_token": True}, "add_eos_token: found True, allowed false where no file names a eos_token"),
        ({"add_bos_token": "yes"}, "add_bos_token: found 'yes', allowed true, false or null"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"tokenizer_config.json: {expected}")):
        loaded(tmp_path, config)
