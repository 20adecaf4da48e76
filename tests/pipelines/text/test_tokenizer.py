"""Encoding and decoding: special tokens are added once, and streamed text never splits a character."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from dspark_jax.pipelines.checkpoint_data import Checkpoint
from dspark_jax.pipelines.checkpoints.checkpoint import open_target
from dspark_jax.pipelines.text.library_errors import library_errors_as
from dspark_jax.pipelines.text.stop_tokens import stop_ids, stop_tokens
from dspark_jax.pipelines.text.tokenizer import Tokenizer, open_tokenizer
from dspark_jax.speculators_common.errors import CheckpointError, RequestError
from dspark_jax.speculators_common.files.gguf_header import GGUFHeader
from tests.support.tiny_tokenizer import (
    BOS,
    CHATML,
    END,
    HELLO,
    MERGES,
    SPECIAL,
    START,
    WORDS,
    backend,
    byte_ids,
    loaded,
    text_checkpoint,
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return loaded(tmp_path, {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": CHATML})


# --- plain text ---


def test_plain_text_gets_bos_once_and_comes_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello hello")
    assert [WORDS[token] for token in ids] == ["<s>", "hello", "Ġhello"]
    assert tokenizer.decode(ids) == "hello hello"
    assert tokenizer.decode(ids, skip_special=False) == "<s>hello hello"
    assert tokenizer.vocab_size == len(WORDS)
    assert tokenizer.eos_id == END


def test_special_tokens_in_the_text_become_their_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello<|im_end|>") == [BOS, WORDS.index("hello"), END]


def test_stored_truncation_and_padding_do_not_touch_prompts(tmp_path: Path) -> None:
    limited = backend()
    limited.enable_truncation(4)
    limited.enable_padding(length=64)
    limited.save(str(tmp_path / "tokenizer.json"))
    assert len(limited.encode("hello" * 9).ids) == 64
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("hello" * 9) == [BOS] + [WORDS.index("hello")] * 9


def test_text_and_ids_that_mean_nothing_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="prompt: not valid Unicode text"):
        tokenizer.encode("\ud800")
    with pytest.raises(RequestError, match="ids: cannot be decoded"):
        tokenizer.decode([-1])
    assert tokenizer.decode([WORDS.index("hello"), len(WORDS) + 7]) == "hello"


# --- chat ---


def test_chat_is_the_rendered_template_with_special_ids_and_one_bos(tokenizer: Tokenizer) -> None:
    newline = byte_ids("\n")
    body = [START, *byte_ids("user\n"), WORDS.index("hello"), END, *newline]
    assert tokenizer.chat(HELLO) == [BOS, *body, START, *byte_ids("assistant\n")]
    assert tokenizer.chat(HELLO, add_generation_prompt=False) == [BOS, *body]


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, {"eos_token": "<|im_end|>"})
    with pytest.raises(
        RequestError, match=r"tokenizer\.json: the model has no chat template; send a plain prompt instead of messages"
    ):
        tokenizer.chat(HELLO)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "messages: found none, allowed at least one object with role and content"),
        (["hello"], "messages[0]: found a str, allowed an object with role and content"),
        ([{"role": "user"}], "messages[0].content: found None, allowed a string"),
        (
            [*HELLO, {"role": "user", "content": [{"type": "image"}]}],
            "messages[1].content[0].type: found 'image', allowed 'text'",
        ),
        ([{"content": "hello"}], "messages[0].role: found None, allowed a string"),
        ([{"role": 3, "content": "hello"}], "messages[0].role: found 3, allowed a string"),
    ],
)
def test_malformed_messages_are_refused(tokenizer: Tokenizer, messages: list[Any], expected: str) -> None:
    with pytest.raises(RequestError, match=re.escape(expected)):
        tokenizer.chat(messages)


# --- directories ---


def test_directory_without_a_tokenizer_gives_none(tmp_path: Path) -> None:
    assert Tokenizer.from_directory(tmp_path) is None


def test_tokenizer_alone_is_enough(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path)
    assert (tokenizer.eos_id, tokenizer.chat_template) == (None, None)
    assert tokenizer.encode("hello") == [BOS, WORDS.index("hello")]


def test_named_templates_use_the_default_one(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "hello"}]
    assert loaded(tmp_path, {"chat_template": named}).chat(HELLO) == [WORDS.index("hello")]


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("hello{{ eos_token }}")
    tokenizer = loaded(
        tmp_path, {"chat_template": "other", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}
    )
    assert tokenizer.chat(HELLO) == [WORDS.index("hello"), END]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"chat_template": 3}, "chat_template: found 'int', allowed a string or a list of named templates"),
        (
            {"chat_template": [{"name": "rag", "template": "x"}]},
            "chat_template: found ['rag'], allowed a list with a template named 'default'",
        ),
        (
            {"chat_template": [{"name": "default", "template": {}}]},
            "chat_template: found 'dict', allowed a string or a list of named templates",
        ),
        ({"eos_token": 3}, "eos_token: found 3, allowed a string or an object with content"),
        ({"eos_token": {"id": 3}}, "eos_token: found {'id': 3}, allowed a string or an object with content"),
        ([], "found a JSON list, allowed an object"),
    ],
)
def test_malformed_tokenizer_config_is_refused(tmp_path: Path, config: Any, expected: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"tokenizer_config.json: {expected}")):
        loaded(tmp_path, config)


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0", "model": {"type": "none of ours"}}'])
def test_malformed_tokenizer_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a valid tokenizer: "):
        Tokenizer.from_directory(tmp_path)


# --- GGUF ---

GGUF_METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [*WORDS, "12"],
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(WORDS) - len(SPECIAL) + 1),
    "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES] + ["1 2"],
    "tokenizer.ggml.bos_token_id": BOS,
    "tokenizer.ggml.eos_token_id": END,
    "tokenizer.chat_template": CHATML,
}


def gguf_header(**changes: Any) -> GGUFHeader:
    metadata = GGUF_METADATA | {f"tokenizer.{key.replace('ggml_', 'ggml.')}": value for key, value in changes.items()}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return GGUFHeader(path=Path("tiny.gguf"), size=0, metadata=kept, tensors={})


def test_gguf_tokenizer_is_byte_level_with_single_digits() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_header())
    assert [WORDS[token] for token in tokenizer.encode("hello hello12")] == ["hello", "Ġhello", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("naïve 😀 12")) == "naïve 😀 12"
    assert tokenizer.eos_id == END


def test_gguf_chat_is_that_of_the_directory(tokenizer: Tokenizer) -> None:
    assert Tokenizer.from_gguf(gguf_header()).chat(HELLO) == tokenizer.chat(HELLO)


def test_gguf_bos_is_added_only_where_the_file_asks_for_it() -> None:
    hello = WORDS.index("hello")
    assert Tokenizer.from_gguf(gguf_header(ggml_add_bos_token=False)).encode("hello") == [hello]
    assert Tokenizer.from_gguf(gguf_header(ggml_add_bos_token=True)).encode("hello") == [BOS, hello]


def test_gguf_without_a_template_refuses_chat_only() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_header(chat_template=None))
    assert tokenizer.encode("hello") == [WORDS.index("hello")]
    with pytest.raises(RequestError, match=r"tiny\.gguf: the model has no chat template"):
        tokenizer.chat(HELLO)


def test_gguf_user_tokens_are_whole_but_not_special() -> None:
    kinds: list[int] = GGUF_METADATA["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer.from_gguf(gguf_header(ggml_token_type=[*kinds[:END], 4, *kinds[END + 1 :]]))
    assert tokenizer.encode("hello<|im_end|>") == [WORDS.index("hello"), END]
    assert tokenizer.decode([WORDS.index("hello"), END]) == "hello<|im_end|>"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"ggml_model": "llama"},
            "tokenizer.ggml.model: found 'llama', allowed 'gpt2'; other tokenizers need the Hugging Face directory",
        ),
        (
            {"ggml_pre": "llama-bpe"},
            "tokenizer.ggml.pre: found 'llama-bpe', allowed 'smollm'; other tokenizers need the Hugging Face directory",
        ),
        ({"ggml_tokens": None}, "tokenizer.ggml.tokens: missing, allowed list"),
        ({"ggml_tokens": [1, 2, 3]}, "tokenizer.ggml.tokens: found other entries, allowed a list of str"),
        ({"ggml_tokens": ["a", "b", "c", "a"]}, "tokenizer.ggml.tokens: found a token twice, allowed distinct tokens"),
        (
            {"ggml_token_type": [1]},
            f"tokenizer.ggml.token_type: found '1 entries', allowed {len(WORDS) + 1}, one per token",
        ),
        (
            {"ggml_eos_token_id": 9999},
            f"tokenizer.ggml.eos_token_id: found 9999, allowed 0 to {len(WORDS)}, the tokens of the file",
        ),
        ({"ggml_merges": ["not known"]}, "tokenizer.ggml.merges: "),
        ({"ggml_merges": ["one"]}, "tokenizer.ggml.merges: "),
        ({"chat_template": 3}, "tokenizer.chat_template: found a int, allowed str"),
    ],
)
def test_gguf_tokenizer_that_is_not_understood_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"tiny.gguf: {expected}")):
        Tokenizer.from_gguf(gguf_header(**changes))


# --- checkpoints ---


def test_open_tokenizer_takes_the_one_beside_the_weights(tokenizer: Tokenizer, tmp_path: Path) -> None:
    opened = open_tokenizer(text_checkpoint(tmp_path))
    assert opened is not None
    assert opened.chat(HELLO) == tokenizer.chat(HELLO)


# --- the demo model ---


@pytest.fixture(scope="module")
def demo() -> tuple[Checkpoint, Tokenizer]:
    opened = open_target("smollm2")
    tokenizer = open_tokenizer(opened)
    assert tokenizer is not None
    return opened, tokenizer


@pytest.fixture(scope="module")
def samples() -> list[dict[str, Any]]:
    file = Path(__file__).parents[3] / "models" / "smollm2-135m-dspark" / "expected.json"
    recorded: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["samples"]
    return recorded


@pytest.mark.smollm2
def test_demo_prompts_have_the_recorded_ids(demo: tuple[Checkpoint, Tokenizer], samples: list[dict[str, Any]]) -> None:
    assert len(samples) == 5
    for sample in samples:
        assert demo[1].chat([{"role": "user", "content": sample["prompt"]}]) == sample["prompt_ids"]


@pytest.mark.smollm2
def test_demo_stops_at_the_end_of_turn(demo: tuple[Checkpoint, Tokenizer]) -> None:
    assert stop_ids(stop_tokens(*demo)) == (2,)
    assert demo[1].decode([2], skip_special=False) == "<|im_end|>"
    assert demo[1].encode("hello") == demo[1].encode("hello<|im_end|>")[:-1]


@pytest.mark.smollm2
def test_demo_answers_stream_as_they_decode(demo: tuple[Checkpoint, Tokenizer], samples: list[dict[str, Any]]) -> None:
    tokenizer = demo[1]
    assert tokenizer.decode(samples[0]["greedy_ids"]).startswith(
        "When it comes to student behavior, there are several habits "
    )
    for ids in [*(sample["greedy_ids"] for sample in samples), tokenizer.encode("a 👩‍🚀 in 日本, naïve")]:
        stream = tokenizer.stream_decoder()
        pieces = [stream.push([token]) for token in ids]
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)


def test_text_that_the_tokenizer_cannot_express_is_refused(tmp_path: Path) -> None:
    """Whole words only, and no token for unknown ones."""
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("a") == [0]
    with pytest.raises(RequestError, match="prompt: cannot be encoded: WordLevel error: Missing"):
        tokenizer.encode("b")


def test_a_panic_of_the_library_is_an_error_of_the_package() -> None:
    class PanicException(BaseException):
        """The base class that Rust code raises when it panics."""

    with (
        pytest.raises(RequestError, match=r"^prompt: index out of bounds$"),
        library_errors_as(lambda message: RequestError(message, field="prompt")),
    ):
        raise PanicException("index out of bounds\nbacktrace")
    with pytest.raises(KeyboardInterrupt), library_errors_as(RequestError):
        raise KeyboardInterrupt
