"""The Python interface, against the recorded texts of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

import dspark_jax
from dspark_jax.pipelines import api
from dspark_jax.pipelines.api import Pipeline, PromptFormat, Round, StreamPiece, load
from dspark_jax.pipelines.checkpoints import loading
from dspark_jax.pipelines.checkpoints.load_choices import choice_lines, in_bytes
from dspark_jax.speculators_common.errors import DSparkError, PairError, RequestError
from dspark_jax.speculators_common.formats.choice import Choice
from tests.support import text_pair, tiny_tokenizer
from tests.support.text_pair import RecordedPair

NEW_TOKENS = 48

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def pair(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> RecordedPair:
    recorded = text_pair.recorded_pair(data_dir)
    return text_pair.with_text(recorded, tmp_path_factory.mktemp("text_pair"), eos=recorded.stop_id(0))


@pytest.fixture(scope="module")
def pipeline(pair: RecordedPair) -> Pipeline:
    return load(pair.target, pair.draft, dtype="float32", num_speculative_tokens=5)


def test_the_package_offers_the_interface() -> None:
    assert dspark_jax.load is load
    assert dspark_jax.Pipeline is Pipeline
    assert dspark_jax.GenerationResult is api.GenerationResult
    assert dspark_jax.DSparkError is DSparkError
    assert dspark_jax.PromptFormat is PromptFormat


def test_output_is_the_recorded_greedy_text(pipeline: Pipeline, pair: RecordedPair) -> None:
    prompts = [pair.prompt(index) for index in range(4)]
    results = pipeline.generate(prompts, max_new_tokens=NEW_TOKENS, stop_ids=())
    assert [list(result.prompt_ids) for result in results] == prompts
    assert [list(result.output_ids) for result in results] == [pair.greedy(index, NEW_TOKENS) for index in range(4)]
    assert {result.finish_reason for result in results} == {"length"}


def test_one_prompt_of_ids_is_one_prompt(pipeline: Pipeline, pair: RecordedPair) -> None:
    results = pipeline.generate(tuple(pair.prompt(1)), max_new_tokens=5, stop_ids=())
    assert [list(result.output_ids) for result in results] == [pair.greedy(1, 5)]


def test_the_models_own_stop_token_ends_an_output_unless_others_are_stated(
    pipeline: Pipeline, pair: RecordedPair
) -> None:
    [stopped] = pipeline.generate(pair.prompt(0), max_new_tokens=NEW_TOKENS)
    assert stopped.finish_reason == "stop"
    assert stopped.output_ids[-1] == pair.stop_id(0)
    assert pair.stop_id(0) not in stopped.output_ids[:-1]
    [stopped_later] = pipeline.generate(pair.prompt(0), max_new_tokens=NEW_TOKENS, stop_ids=[pair.greedy(0, 40)[-1]])
    assert stopped_later.output_ids[-1] == pair.greedy(0, 40)[-1]


def test_text_goes_through_the_chat_template_unless_raw(pipeline: Pipeline) -> None:
    [chat] = pipeline.generate("abc", max_new_tokens=3)
    [messages] = pipeline.generate([{"role": "user", "content": "abc"}], max_new_tokens=3)
    [raw] = pipeline.generate("abc", max_new_tokens=3, prompt_format=PromptFormat(raw=True))
    [with_system] = pipeline.generate("abc", max_new_tokens=3, prompt_format=PromptFormat(system="short"))
    tokenizer = pipeline.target.tokenizer
    assert tokenizer is not None
    assert (
        tokenizer.decode(chat.prompt_ids, skip_special=False)
        == "<s><|im_start|>user:abc<|im_end|><|im_start|>assistant:"
    )
    assert messages.prompt_ids == chat.prompt_ids
    assert tokenizer.decode(raw.prompt_ids, skip_special=False) == "<s>abc"
    assert "system:short<|im_end|><|im_start|>user:abc" in tokenizer.decode(with_system.prompt_ids, skip_special=False)


def test_template_variables_reach_the_template(pair: RecordedPair, tmp_path: Path) -> None:
    template = "{% if thinking is false %}no{% else %}yes{% endif %}{{ messages[0].content }}"
    target = text_pair.with_text(pair, tmp_path, template=template).target
    prompts: list[Any] = ["ab", [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]]
    prepared = api.prepare(target)
    for template_vars, said in (({"thinking": False}, "no"), (None, "yes")):
        expected = tuple(tiny_tokenizer.byte_ids(said + "ab"))
        prompt_format = PromptFormat(template_vars=template_vars or {})
        requests = prepared.requests(prompts, prompt_format=prompt_format)
        assert [request.prompt_ids for request in requests] == [expected, expected]
    for prompt, raw in (([5], False), ("ab", True)):
        with pytest.raises(
            RequestError, match=r"template_vars: found thinking beside .*, allowed where a chat template"
        ):
            prepared.requests(prompt, prompt_format=PromptFormat(raw=raw, template_vars={"thinking": False}))


def test_several_prompts_of_any_kind_keep_their_order(pipeline: Pipeline, pair: RecordedPair) -> None:
    prompts: list[Any] = ["abc", pair.prompt(2), [{"role": "user", "content": "abc"}]]
    results = pipeline.generate(prompts, max_new_tokens=4, stop_ids=())
    assert list(results[1].prompt_ids) == pair.prompt(2)
    assert list(results[1].output_ids) == pair.greedy(2, 4)
    assert results[0].output_ids == results[2].output_ids


def test_streamed_pieces_together_are_the_result(pipeline: Pipeline, pair: RecordedPair) -> None:
    prompts: list[Any] = [pair.prompt(3), "abc"]
    results = pipeline.generate(prompts, max_new_tokens=NEW_TOKENS, stop_ids=())
    pieces: list[StreamPiece] = list(pipeline.stream(prompts, max_new_tokens=NEW_TOKENS, stop_ids=()))
    assert list(results[0].output_ids) == pair.greedy(3, NEW_TOKENS)
    for index, collected in enumerate(results):
        own = [piece for piece in pieces if piece.index == index]
        result = own[-1].result
        assert result is not None
        assert (result.text, result.output_ids, result.rounds) == (
            collected.text,
            collected.output_ids,
            collected.rounds,
        )
        assert [piece.finish_reason for piece in own] == [*[None] * (len(own) - 1), "length"]
        assert len([piece for piece in own if piece.ids]) == len(result.rounds) + 1
        assert tuple(token for piece in own for token in piece.ids) == result.output_ids
        assert "".join(piece.text for piece in own) == result.text


def test_rounds_and_tau_account_for_every_token(pipeline: Pipeline, pair: RecordedPair) -> None:
    [result] = pipeline.generate(pair.prompt(3), max_new_tokens=NEW_TOKENS, stop_ids=())
    lengths = pair.expected["p3.thr0.accepted_draft_lengths"].tolist()
    recorded = [int(length) for length in lengths]
    assert [pair_.accepted for pair_ in result.rounds[:-1]] == recorded[: len(result.rounds) - 1]
    assert all(isinstance(pair_, Round) and pair_.proposed == 5 for pair_ in result.rounds)
    assert result.tau == pytest.approx(sum(pair_.accepted + 1 for pair_ in result.rounds) / len(result.rounds))


def test_a_confidence_threshold_cuts_proposals_and_not_the_text(pipeline: Pipeline, pair: RecordedPair) -> None:
    [all_drafts] = pipeline.generate(pair.prompt(0), max_new_tokens=NEW_TOKENS, stop_ids=())
    [sure_drafts] = pipeline.generate(pair.prompt(0), max_new_tokens=NEW_TOKENS, stop_ids=(), confidence_threshold=0.5)
    assert sure_drafts.output_ids == all_drafts.output_ids
    assert [pair_.proposed for pair_ in sure_drafts.rounds[:10]] == pair.expected["p0.thr05.proposal_lengths"][
        :10
    ].tolist()


def test_compilation_is_told_apart_from_decoding(pipeline: Pipeline, pair: RecordedPair) -> None:
    fresh = Pipeline(pipeline._prepared, pipeline.target, pipeline.draft)
    [first] = fresh.generate(pair.prompt(0), max_new_tokens=20, stop_ids=())
    [second] = fresh.generate(pair.prompt(0), max_new_tokens=20, stop_ids=())
    assert first.compile_seconds > 0
    assert second.compile_seconds == 0
    assert first.output_ids == second.output_ids
    assert second.seconds == second.first_token_seconds + second.decode_seconds
    assert second.tokens_per_second == pytest.approx(19 / second.decode_seconds)


def test_a_single_token_has_no_rate_and_no_tau(pipeline: Pipeline, pair: RecordedPair) -> None:
    [result] = pipeline.generate(pair.prompt(0), max_new_tokens=1)
    assert (len(result.output_ids), result.rounds, result.tau, result.tokens_per_second) == (1, (), None, None)


def test_without_draft_is_the_same_target_and_the_same_text(pipeline: Pipeline, pair: RecordedPair) -> None:
    plain = pipeline.without_draft()
    assert plain.target is pipeline.target
    assert plain.draft is None
    [result] = plain.generate(pair.prompt(1), max_new_tokens=NEW_TOKENS, stop_ids=())
    assert list(result.output_ids) == pair.greedy(1, NEW_TOKENS)
    assert result.tau == 1.0
    with pytest.raises(RequestError, match=r"confidence_threshold: found 0\.5, allowed only with a draft"):
        plain.generate(pair.prompt(1), confidence_threshold=0.5)


def test_choices_are_data_and_announced_before_the_caches(pair: RecordedPair) -> None:
    announced: list[tuple[Choice, ...]] = []
    pipeline = load(
        pair.target, pair.draft, num_speculative_tokens=3, max_seq_len=100, batch_size=2, announce=announced.append
    )
    assert announced == [pipeline.choices]
    choices = {choice.name: choice for choice in pipeline.choices}
    assert choices["num_speculative_tokens"].value == "3 of 5"
    assert choices["sample_from_anchor"].value.startswith("anchor-first, block of 5")
    assert choices["partial_rotary_factor"].value.startswith("16 of 16")
    assert choices["taps"].value == "2, 3, 5"
    assert choices["embed_tokens"].value == choices["lm_head"].value == "the draft's own"
    assert choices["dtype"].value == "bfloat16"
    assert choices["kv_cache"].value == f"{in_bytes(pipeline.plan.kv_bytes)} for 2 rows of 100 positions"
    assert choices["attention"].value == "xla-head-major on cpu"
    assert choices["stop_ids"].value == str(pair.stop_id(0))
    flags = {
        "--num-speculative-tokens",
        "--sample-from-anchor/--no-sample-from-anchor",
        "--partial-rotary-factor",
        "--dtype",
        "--stop-ids",
    }
    assert flags <= {choice.flag for choice in pipeline.choices}
    assert all(
        choice.value in line and line.endswith(choice.flag)
        for choice, line in zip(pipeline.choices, choice_lines(pipeline.choices), strict=True)
    )


def test_what_overrules_the_files_is_a_choice_with_its_reason(pair: RecordedPair) -> None:
    pipeline = load(
        pair.target, pair.draft, dtype="float32", sample_from_anchor=False, partial_rotary_factor=0.5, max_seq_len=64
    )
    choices = {choice.name: choice for choice in pipeline.choices}
    assert choices["sample_from_anchor"].value == "fill-in, block of 5 gives 4 drafts"
    assert "stated by the user" in choices["sample_from_anchor"].reason
    assert choices["partial_rotary_factor"].value == "8 of 16 elements of a head"
    assert "stated by the user" in choices["partial_rotary_factor"].reason


@pytest.mark.parametrize("options", [{}, {"num_speculative_tokens": 2, "max_seq_len": 127, "batch_size": 3}])
def test_the_announced_cache_is_the_allocated_one(pair: RecordedPair, options: dict[str, Any]) -> None:
    pipeline = load(pair.target, pair.draft, dtype="float32", **options)
    assert pipeline.draft is not None
    for one in (pipeline, pipeline.without_draft()):
        assert one.plan.kv_bytes == one.engine.runner.num_cache_bytes


def test_the_default_length_is_what_the_target_was_made_for(pipeline: Pipeline) -> None:
    assert pipeline.target.config.max_position_embeddings == 512
    assert pipeline.plan.options.max_seq_len == 512


def test_loading_leaves_the_global_configuration_alone(pair: RecordedPair) -> None:
    def values() -> dict[str, Any]:
        return dict(jax.config.values)

    before = values()
    load(pair.target, pair.draft, dtype="float32", max_seq_len=64)
    assert values() == before


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt: found no text"),
        (" \n", "prompt: found no text"),
        ([], "prompts: found none"),
        ([5, 199], r"prompt: found token id \[199\], allowed ids 0\.\.198"),
        ([5, -1], r"prompt: found token id \[-1\]"),
        ([1] * 512, "prompt: found 512 tokens, allowed at most 511"),
        ([[5, 17], []], r"prompts\[1\]: prompt: found an empty list"),
        (["abc", " "], r"prompts\[1\]: prompt: found no text"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_one_clear_error(pipeline: Pipeline, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pipeline.generate(prompts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: found 0"),
        ({"stop_ids": [199]}, "stop_ids"),
        ({"stop_ids": "75"}, "stop_ids: found '75', allowed a list of token ids"),
        ({"stop_ids": 5}, "stop_ids: found 5, allowed a list of token ids"),
        ({"stop_ids": range(9)}, "stop_ids: found 9 ids"),
        ({"confidence_threshold": 1.5}, r"confidence_threshold: found 1\.5, allowed 0\.\.1"),
        ({"prompt_format": PromptFormat(raw=True, system="short")}, "system: found a system message beside text"),
    ],
)
def test_an_option_that_cannot_be_served_is_one_clear_error(
    pipeline: Pipeline, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        pipeline.generate("abc", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype: found float16, allowed bfloat16 or float32"),
        ({"dtype": "no_dtype"}, "dtype: found no_dtype"),
        ({"num_speculative_tokens": 6}, r"num_speculative_tokens: found 6, allowed 1\.\.5"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: found 0"),
        ({"max_seq_len": 513}, r"max_seq_len: found 513, allowed 2\.\.512 .*config\.json: max_position_embeddings"),
        ({"max_seq_len": 1}, "max_seq_len: found 1"),
        ({"batch_size": 0}, "batch_size: found 0"),
        ({"batch_size": 10**9}, r"kv cache: found .* TB \(batch_size 1000000000, max_seq_len 512\), allowed at most"),
        ({"partial_rotary_factor": 1.5}, r"--partial-rotary-factor: found 1\.5"),
    ],
)
def test_a_wrong_argument_of_load_is_one_clear_error(pair: RecordedPair, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DSparkError, match=message):
        load(pair.target, pair.draft, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "nowhere"}, "nowhere: no such directory"),
        (
            {"num_speculative_tokens": 6},
            r"num_speculative_tokens: found 6, allowed 1\.\.5 \(.*config\.json: block of 5\)",
        ),
        (
            {"num_speculative_tokens": 5, "sample_from_anchor": False},
            r"num_speculative_tokens: found 5, allowed 1\.\.4",
        ),
        ({"max_seq_len": 513}, "max_seq_len: found 513"),
    ],
)
def test_what_the_configs_tell_is_told_before_weights_are_read(
    pair: RecordedPair, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    def read(*arguments: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "fill_module", read)
    with pytest.raises(DSparkError, match=message):
        load(pair.target, **{"draft": pair.draft, **options})


def test_memory_that_runs_out_is_an_error_with_its_size(pair: RecordedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*arguments: object, **options: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(api, "Engine", exhausted)
    with pytest.raises(RequestError, match=r"kv cache: no memory left for .* kB \(batch_size 2, max_seq_len 64\)"):
        load(pair.target, max_seq_len=64, batch_size=2)


@pytest.mark.parametrize(
    "options", [{"num_speculative_tokens": 3}, {"sample_from_anchor": True}, {"partial_rotary_factor": 0.5}]
)
def test_an_argument_about_the_draft_needs_a_draft(pair: RecordedPair, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(options))}: found .*, allowed only with a draft"):
        load(pair.target, **options)


def test_a_threshold_needs_a_confidence_head(pair: RecordedPair, data_dir: Path) -> None:
    pipeline = load(pair.target, data_dir / "A_deepspec_qwen3" / "rank0_noconf", dtype="float32", max_seq_len=64)
    with pytest.raises(
        RequestError,
        match=r"confidence_threshold: found 0\.5, allowed 0: .*config\.json describes a draft without confidence head",
    ):
        pipeline.generate([5, 17], confidence_threshold=0.5)


def test_a_model_without_tokenizer_takes_and_gives_ids(data_dir: Path) -> None:
    recorded = text_pair.recorded_pair(data_dir)
    pipeline = load(recorded.target, dtype="float32", max_seq_len=64)
    prompts: Sequence[Any] = ["abc", [{"role": "user", "content": "abc"}]]
    for prompt in prompts:
        with pytest.raises(RequestError, match=r"allowed token ids: .*target has no tokenizer"):
            pipeline.generate(prompt)
    [result] = pipeline.generate(recorded.prompt(0), max_new_tokens=1)
    assert result.text is None


def test_a_draft_of_another_target_is_refused(pair: RecordedPair, tmp_path: Path) -> None:
    stranger = text_pair.copied(pair.draft, tmp_path / "draft", num_target_layers=8)
    with pytest.raises(PairError, match="number of layers: the draft expects 8, the target has 6"):
        load(pair.target, stranger)
