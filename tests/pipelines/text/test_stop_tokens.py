"""Stop tokens: the declared ids and the `eos_token` of the tokenizer, each with its sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.pipelines.text.stop_tokens import StopToken, stop_ids, stop_reason, stop_tokens
from dspark_jax.pipelines.text.tokenizer import Tokenizer
from dspark_jax.speculators_common.errors import CheckpointError
from tests.support.tiny_tokenizer import END, loaded, text_checkpoint


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return loaded(tmp_path, {"eos_token": "<|im_end|>"})


@pytest.mark.parametrize(
    ("config", "generation_config", "declared"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": [5, 4, 5]}, (5, 4)),
        ({"eos_token_id": 7}, {"eos_token_id": 5}, (5,)),
        ({"eos_token_id": 7}, {"eos_token_id": None}, (7,)),
        ({"eos_token_id": [7, 8]}, {}, (7, 8)),
        ({"eos_token_id": 0}, {}, (0,)),
        ({"eos_token_id": [], "text_config": {"eos_token_id": 9}}, {}, (9,)),
        ({}, {}, ()),
        ({"eos_token_id": []}, {}, ()),
    ],
)
def test_stop_ids_are_those_of_the_first_file_that_declares_any_and_the_tokenizers(
    tokenizer: Tokenizer,
    tmp_path: Path,
    config: dict[str, Any],
    generation_config: dict[str, Any],
    declared: tuple[int, ...],
) -> None:
    checkpoint = text_checkpoint(tmp_path, config, generation_config)
    assert stop_ids(stop_tokens(checkpoint, tokenizer)) == (*declared, END)
    assert stop_ids(stop_tokens(checkpoint, None)) == declared


def test_an_id_that_both_name_counts_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert stop_ids(stop_tokens(text_checkpoint(tmp_path, {"eos_token_id": [END, 0]}), tokenizer)) == (END, 0)


def test_every_id_says_where_it_comes_from(tokenizer: Tokenizer, tmp_path: Path) -> None:
    own = "eos_token '<|im_end|>' of the tokenizer"
    tokens = stop_tokens(text_checkpoint(tmp_path, {}, {"eos_token_id": [1, 0]}), tokenizer)
    assert tokens == (
        StopToken(id=1, sources=("generation_config.json",)),
        StopToken(id=0, sources=("generation_config.json",)),
        StopToken(id=END, sources=(own,)),
    )
    assert stop_reason(tokens) == f"1, 0: generation_config.json; 2: {own}"
    both = stop_tokens(text_checkpoint(tmp_path, {"text_config": {"eos_token_id": END}}), tokenizer)
    assert stop_reason(both) == f"text_config of config.json and {own}"


def test_no_stop_ids_where_nothing_declares_any(tmp_path: Path) -> None:
    assert stop_tokens(text_checkpoint(tmp_path), None) == ()
    assert stop_tokens(text_checkpoint(tmp_path), loaded(tmp_path)) == ()
    assert stop_tokens(text_checkpoint(tmp_path), loaded(tmp_path, {"eos_token": "<not in the vocabulary>"})) == ()


@pytest.mark.parametrize("declared", [-1, "2", 2.0, True, [2, "3"]])
def test_malformed_stop_ids_are_refused_with_their_file(tmp_path: Path, declared: Any) -> None:
    expected = re.escape(f"eos_token_id: found {declared!r}, allowed a token id or a list of token ids")
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {expected}"):
        stop_tokens(text_checkpoint(tmp_path, {}, {"eos_token_id": declared}), None)
    with pytest.raises(CheckpointError, match=rf"/config\.json: {expected}"):
        stop_tokens(text_checkpoint(tmp_path, {"eos_token_id": declared}), None)


def test_an_id_beyond_the_vocabulary_ends_no_text_and_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    checkpoint = text_checkpoint(tmp_path, {"eos_token_id": [7, 500, 10**30]})
    assert stop_ids(stop_tokens(checkpoint, tokenizer, 100)) == tuple(token for token in (7, END) if token < 100)
    reason = stop_reason(stop_tokens(checkpoint, None, 100))
    assert reason == f"7: config.json; 500, {10**30}: config.json, not used, as it is beyond the vocabulary"
