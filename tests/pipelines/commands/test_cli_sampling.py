"""`dspark generate` with options that choose tokens: what it prints and refuses, and that a seed gives the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.text_pair import RecordedPair, assert_refused, copied, forbid_reading

IDS = ("--prompt-ids", "5,17,3", "--max-new-tokens", 12)

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "warm"], "argument --temperature: found 'warm', allowed a number"),
        (["--temperature", "nan"], "--temperature: found nan, allowed 0..100"),
        (["--temperature", "-1"], "--temperature: found -1.0, allowed 0..100"),
        (["--temperature", "1", "--top-k", "-1"], "--top-k: found -1, allowed 0 or more"),
        (["--temperature", "1", "--top-k", "2.5"], "argument --top-k: found '2.5', allowed an integer"),
        (["--temperature", "1", "--top-p", "0"], "--top-p: found 0.0, allowed above 0, at most 1"),
        (["--temperature", "1", "--min-p", "2"], "--min-p: found 2.0, allowed 0..1"),
        (["--repetition-penalty", "0"], "--repetition-penalty: found 0.0, allowed 1e-06..1e+06"),
        (["--presence-penalty", "inf"], "--presence-penalty: found inf, allowed a finite number"),
        (["--frequency-penalty=-inf"], "--frequency-penalty: found -inf, allowed a finite number"),
        (["--logit-bias", "5"], "argument --logit-bias: found '5', allowed ID=VALUE"),
        (["--logit-bias", "1,2=5"], "argument --logit-bias: found '1,2=5', allowed ID=VALUE"),
        (["--logit-bias", "x=1"], "argument --logit-bias: found 'x=1', allowed ID=VALUE"),
        (["--logit-bias", "5=inf"], "--logit-bias: found ((5, inf),), allowed pairs of a token id and a finite number"),
        (
            ["--logit-bias", "5=1", "--logit-bias", "5=2"],
            "--logit-bias: found ((5, 1.0), (5, 2.0)), allowed each id once",
        ),
        (["--logit-bias", "199=1"], "--logit-bias: found [199], allowed ids 0..198"),
        (["--ban-ids", "199"], "--ban-ids: found (199,), allowed ids 0..198"),
        (["--ban-ids", ",".join(map(str, range(199)))], "--ban-ids: found 'all 199 ids'"),
        (["--min-new-tokens", "13"], "--min-new-tokens: found 13, allowed at most max_new_tokens, 12"),
        (["--temperature", "1", "--seed", "-1"], "--seed: found -1, allowed an integer from 0 to 2^64 - 1"),
        (["--json", "--logprobs", "21"], "--logprobs: found 21, allowed 0..20"),
        (["--logprobs", "2"], "--logprobs: found without --json"),
        (["--stop", "a"], "--stop: found ('a',), allowed only with a tokenizer"),
        (["--regex", "a"], "--regex: found 'a', allowed only with a tokenizer"),
        (["--regex", " "], "--regex: found Grammar(kind='regex', text=' '), allowed a `Grammar`"),
        (["--regex", "a", "--grammar", "b"], "argument --grammar: not allowed with argument --regex"),
        (["--json-schema", "none.json"], "none.json: --json-schema: cannot be read: No such file"),
        (["--n", "2"], "--n: found 2, allowed 1 in greedy decoding"),
        (["--temperature", "1", "--n", "0"], "--n: found 0, allowed 1..1024"),
        (["--temperature", "1", "--n", "2", "--compare"], "--compare: found beside --n above 1"),
        (["--top-p", "0.5"], "--top-p: found 0.5 in greedy decoding, allowed with --temperature above 0"),
        (["--seed", "3"], "--seed: found 3 in greedy decoding"),
        (["--proposal", "sampled"], "--proposal: found sampled in greedy decoding"),
        (["--proposal", "most"], "argument --proposal: invalid choice"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_the_flag(
    run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    forbid_reading(monkeypatch)
    assert_refused(run(*IDS, *arguments), message)


def test_sampled_drafts_need_a_draft_and_the_config_file_must_exist(
    run, pair: RecordedPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forbid_reading(monkeypatch)
    sampled = run(*IDS, "--temperature", 1, "--proposal", "sampled", draft=None)
    assert_refused(sampled, "--proposal: found 'sampled', allowed only with a draft")
    target = copied(pair.target, tmp_path / "target")
    (target / "generation_config.json").unlink()
    refused = run(*IDS, "--generation-config", target=target)
    assert_refused(refused, "--generation-config: found 'no generation_config.json in")
    (target / "generation_config.json").write_text(json.dumps({"num_beams": 4}))
    refused = run(*IDS, "--generation-config", target=target)
    assert_refused(refused, f"{target / 'generation_config.json'}: num_beams: found 4, allowed 1")


def test_the_options_in_use_are_said_and_the_drawn_seed_makes_the_text_again(
    run, pair: RecordedPair, tmp_path: Path
) -> None:
    """Options come from the target's file, and a flag wins over it; without a draft the text is the same."""
    target = copied(pair.target, tmp_path / "target")
    config = {"do_sample": True, "temperature": 0.9, "top_k": 50, "repetition_penalty": 1.2, "max_length": 99}
    (target / "generation_config.json").write_text(json.dumps(config))
    asked = (*IDS, "--json", "--logprobs", 1, "--n", 2)
    first = run(*asked, "--generation-config", "--top-k", 40, target=target)
    assert first.status == 0
    results = [json.loads(line) for line in first.out.splitlines()]
    [seed] = {result["seed"] for result in results}
    assert f"temperature 0.9, top-k 40, repetition penalty 1.2, seed {seed} (drawn), argmax drafts, 2 " in first.err
    assert "generation config   temperature 0.9, top_k 50, repetition_penalty 1.2" in first.err
    assert "not used: max_length" in first.err
    assert "1 prompt, 2 continuations, 24 tokens" in first.err
    assert [result["sample"] for result in results] == [0, 1]
    for result in results:
        assert [one["id"] for one in result["logprobs"]] == result["output_ids"]
        assert all(len(one["top"]) == 1 and one["logprob"] <= 0 for one in result["logprobs"])
        assert result["usage"]["prompt_tokens"] == 3
        assert result["usage"]["completion_tokens"] == len(result["output_ids"]) == 12
        assert result["usage"]["accepted"] == sum(result["usage"]["accepted_per_position"])
    flags = ("--temperature", 0.9, "--top-k", 40, "--repetition-penalty", 1.2, "--seed", seed)
    again = run(*asked, *flags, draft=None)
    assert f"seed {seed}, 2 continuations" in again.err
    remade = [json.loads(line)["output_ids"] for line in again.out.splitlines()]
    assert remade == [result["output_ids"] for result in results]


@pytest.mark.thorough
def test_comparing_sampled_texts_and_streaming_several(run) -> None:
    """With argmax drafts the texts of a seed are compared; with drawn drafts that is said instead."""
    sampled = (*IDS, "--temperature", 1.2, "--seed", 4)
    compared = run(*sampled, "--compare")
    assert "12 tokens, temperature 1.2, seed 4, float32" in compared.err
    assert "outputs are equal, token for token" in compared.err
    drawn = run(*sampled, "--compare", "--proposal", "sampled")
    assert "seed 4, sampled drafts" in drawn.err
    assert "outputs are not compared" in drawn.err
    several = run(*sampled, "--n", 2, "--stream")
    assert several.out.splitlines()[0] == compared.out.splitlines()[0]
    assert "prompt 1 of 1, continuation 2 of 2" in several.err


@pytest.mark.thorough
def test_a_stop_string_ends_the_printed_text(run, texts: RecordedPair) -> None:
    whole = json.loads(run("--prompt", "abc", "--json", "--max-new-tokens", 12, target=texts.target).out)["text"]
    string = next(letter for letter in whole if letter != "\ufffd")
    arguments = ("--prompt", "abc", "--max-new-tokens", 12, "--stop", "nowhere", "--stop", string)
    finished = run(*arguments, target=texts.target)
    assert finished.out == whole[: whole.index(string)] + "\n"
    assert "(stop)" in finished.err


def test_json_follows_a_schema(run, texts: RecordedPair, tmp_path: Path) -> None:
    schema, wrong = tmp_path / "schema.json", tmp_path / "wrong.json"
    schema.write_text('{"type": "array", "items": {"enum": ["a", 17]}, "minItems": 2, "maxItems": 2}')
    asked = ("--prompt-ids", "5,17,3", "--max-new-tokens", 40, "--json", "--stop-ids", 2)
    found = run(*asked, "--json-schema", schema, target=texts.target)
    assert found.status == 0
    assert set(json.loads(json.loads(found.out)["text"])) <= {"a", 17}
    assert "greedy, text of a JSON schema" in found.err
    wrong.write_text('{"type": "arr"}')
    refused = run(*asked, "--json-schema", wrong, target=texts.target)
    assert_refused(refused, "--json-schema: found a json_schema that llguidance refuses: Invalid type: arr")
