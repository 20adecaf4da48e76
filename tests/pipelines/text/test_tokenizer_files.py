"""The files beside tokenizer.json, in newer and older exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dspark_jax.pipelines.text.prompts import encode_prompt
from dspark_jax.pipelines.text.tokenizer import Tokenizer
from dspark_jax.speculators_common.errors import CheckpointError, RequestError
from tests.support.tiny_tokenizer import BOS, CHATML, END, HELLO, MERGES, WORDS, loaded

HELLO_ID = WORDS.index("hello")


def write(directory: Path, **files: Any) -> Path:
    """Write files: `name_json` and `name_jinja` become `name.json` and `name.jinja`."""
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{stem}.{suffix}").write_text(text)
    return directory


@pytest.mark.parametrize("as_object", [False, True])
def test_special_tokens_may_stand_in_their_map_alone(tmp_path: Path, as_object: bool) -> None:
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    stored = {name: {"content": text, "lstrip": False} if as_object else text for name, text in names.items()}
    write(tmp_path, special_tokens_map_json=stored)
    tokenizer = loaded(tmp_path, {"chat_template": CHATML})
    assert (tokenizer.bos_id, tokenizer.eos_id) == (BOS, END)
    assert tokenizer.chat(HELLO)[0] == BOS  # the template writes bos_token


def test_the_tokenizer_config_wins_over_the_map(tmp_path: Path) -> None:
    write(tmp_path, special_tokens_map_json={"eos_token": "<s>", "bos_token": "<s>"})
    tokenizer = loaded(tmp_path, {"eos_token": "<|im_end|>", "bos_token": None})
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<s>")


def test_a_malformed_map_is_named(tmp_path: Path) -> None:
    write(tmp_path, special_tokens_map_json={"eos_token": 3})
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json: eos_token: found 3"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    "stored", ["hello", {"default": "hello", "rag": "x"}, [{"name": "default", "template": "hello"}]]
)
def test_chat_templates_of_multimodal_exports_are_read(tmp_path: Path, stored: Any) -> None:
    write(tmp_path, chat_template_json={"chat_template": stored})
    assert loaded(tmp_path).chat(HELLO) == [HELLO_ID]


def test_the_template_of_the_tokenizer_wins_over_that_of_the_processor_and_a_file_over_both(tmp_path: Path) -> None:
    write(tmp_path, chat_template_json={"chat_template": "<s>"})
    assert loaded(tmp_path, {"chat_template": "hello"}).chat(HELLO) == [HELLO_ID]
    write(tmp_path, chat_template_jinja="<|im_end|>")
    assert loaded(tmp_path, {"chat_template": "hello"}).chat(HELLO) == [END]


def test_errors_name_the_file_of_the_template(tmp_path: Path) -> None:
    write(tmp_path, chat_template_json={"chat_template": "{{ raise_exception('no') }}"})
    with pytest.raises(RequestError, match=r"chat_template\.json: chat template: no"):
        loaded(tmp_path).chat(HELLO)
    write(tmp_path, chat_template_json={"chat_template": 3})
    with pytest.raises(CheckpointError, match=r"chat_template\.json: chat_template: found 'int'"):
        loaded(tmp_path)


# --- tokens that tokenizer.json lacks ---


def plain_backend() -> tokenizers.Tokenizer:
    """The tiny tokenizer whose special tokens are ordinary words."""
    made = tokenizers.Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(WORDS)}, merges=MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def older(directory: Path, **files: Any) -> Tokenizer:
    plain_backend().save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(write(directory, **files))
    assert tokenizer is not None
    return tokenizer


def test_named_ends_are_special_even_where_the_vocabulary_has_them_as_words(tmp_path: Path) -> None:
    tokenizer = older(tmp_path, special_tokens_map_json={"bos_token": "<s>", "eos_token": "<|im_end|>"})
    assert tokenizer.encode("<s>hello<|im_end|>") == [BOS, HELLO_ID, END]
    assert tokenizer.decode([BOS, HELLO_ID, END]) == "hello"


@pytest.mark.parametrize("where", ["added_tokens_decoder", "added_tokens.json"])
def test_added_tokens_beside_the_tokenizer_are_added_under_their_ids(tmp_path: Path, where: str) -> None:
    first, second = len(WORDS), len(WORDS) + 1
    tokens = {"<tool>": second, "<turn>": first}  # in any order
    if where == "added_tokens.json":
        tokenizer = older(tmp_path, added_tokens_json=tokens)
    else:
        stored = {str(index): {"content": content, "special": content == "<turn>"} for content, index in tokens.items()}
        tokenizer = older(tmp_path, tokenizer_config_json={"added_tokens_decoder": stored})
        assert tokenizer.decode([HELLO_ID, first, second]) == "hello<tool>"
    assert tokenizer.encode("hello<turn><tool>") == [HELLO_ID, first, second]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"added_tokens_json": {"<turn>": len(WORDS) + 9}},
            f"added token '<turn>': found id {len(WORDS) + 9}, allowed the first id after tokenizer.json",
        ),
        ({"added_tokens_json": {"<turn>": "9"}}, "added_tokens.json: <turn>: found '9', allowed a token id"),
        (
            {"tokenizer_config_json": {"added_tokens_decoder": [3]}},
            "added_tokens_decoder: found [3], allowed an object of ids and tokens with content",
        ),
        (
            {"tokenizer_config_json": {"added_tokens_decoder": {"x": {"content": "y"}}}},
            "added_tokens_decoder: found {'x': {'content': 'y'}}, allowed an object of ids",
        ),
    ],
)
def test_added_tokens_that_make_no_sense_are_refused(tmp_path: Path, files: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        older(tmp_path, **files)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_directory_of_another_tokenizer_says_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x0a")
    assert Tokenizer.from_directory(tmp_path) is None  # ids still work
    with pytest.raises(RequestError) as caught:
        encode_prompt("hello", None, source=str(tmp_path))
    assert str(caught.value) == (
        f"prompt: found text, allowed token ids: {tmp_path} has {name} but no tokenizer.json, the only kind that is "
        "read (transformers writes one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))"
    )
