"""The decoding options of generation_config.json: what is taken, what is named, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.pipelines.checkpoint_data import Checkpoint
from dspark_jax.pipelines.checkpoints.generation_config import stated_generation
from dspark_jax.speculators_common.errors import CheckpointError, RequestError
from tests.support.tiny_tokenizer import text_checkpoint

VOCAB = 300


def _checkpoint(directory: Path, config: dict[str, Any]) -> Checkpoint:
    (directory / "generation_config.json").write_text(json.dumps(config))
    return text_checkpoint(directory, generation_config=config)


@pytest.mark.parametrize(
    ("config", "taken"),
    [
        ({}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
        ),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}),
        ({"temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"max_new_tokens": 9, "min_new_tokens": 2}, {"max_new_tokens": 9, "min_new_tokens": 2}),
        ({"do_sample": True, "temperature": None, "top_k": None}, {"temperature": 1.0}),
        ({"stop_strings": "ab"}, {"stop_strings": ["ab"]}),
        ({"suppress_tokens": [4, 5], "bad_words_ids": [[5], [6]]}, {"banned_ids": (4, 5, 6)}),
        ({"num_beams": 1, "no_repeat_ngram_size": 0, "forced_eos_token_id": None, "typical_p": 1.0}, {}),
    ],
)
def test_what_the_file_states_is_taken(tmp_path: Path, config: dict[str, Any], taken: dict[str, Any]) -> None:
    stated = stated_generation(_checkpoint(tmp_path, config), VOCAB)
    assert stated.fields == taken
    assert stated.do_sample == bool(config.get("do_sample"))
    assert stated.unused == ()


def test_what_has_no_influence_is_named(tmp_path: Path) -> None:
    config = {"max_length": 100, "eos_token_id": 3, "use_cache": True, "_from_model_config": True, "unheard_of": 1}
    assert stated_generation(_checkpoint(tmp_path, config), VOCAB).unused == ("max_length", "unheard_of")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"temperature": "hot"}, r"generation_config\.json: temperature: found 'hot', allowed 0\.\.100"),
        ({"top_p": 0}, "top_p: found 0, allowed above 0"),
        ({"do_sample": 1}, "do_sample: found 1, allowed true or false"),
        ({"num_beams": 4}, "num_beams: found 4, allowed 1: there is no such rule"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size: found 3, allowed 0"),
        ({"begin_suppress_tokens": [4]}, r"begin_suppress_tokens: found \[4\], allowed nothing"),
        ({"suppress_tokens": [4.5]}, r"suppress_tokens: found \[4\.5\], allowed a list of token ids"),
        (
            {"suppress_tokens": [4, 300]},
            r"config\.json: suppress_tokens: found \[4, 300\], allowed ids 0\.\.299",
        ),
        ({"bad_words_ids": [[-1]]}, r"generation_config\.json: bad_words_ids: found \[-1\], allowed ids 0\.\.299"),
        ({"stop_strings": 5}, r"generation_config\.json: stop_strings: found 5, allowed texts"),
        ({"stop_strings": False}, "stop_strings: found False, allowed texts"),
        ({"stop_strings": [""]}, r"stop_strings: found \[''\], allowed texts"),
        ({"bad_words_ids": [[4, 5]]}, r"bad_words_ids: found \[\[4, 5\]\], allowed a list of lists of one token id"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        stated_generation(_checkpoint(tmp_path, config), VOCAB)


def test_a_target_without_the_file_is_refused(tmp_path: Path) -> None:
    checkpoint = text_checkpoint(tmp_path)
    for one in (checkpoint, dataclasses.replace(checkpoint, path=tmp_path / "model.gguf")):
        with pytest.raises(RequestError, match=r"generation_config: found 'no generation_config\.json in"):
            stated_generation(one, VOCAB)
