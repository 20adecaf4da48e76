"""The recorded pair of `tests/data/D_loop` with a tokenizer, a chat template and a stop token, and the command line,
run in this process.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.pipelines import cli
from dspark_jax.pipelines.checkpoints import loading
from tests.support import tiny_tokenizer
from tests.support.recorded_tensors import load_recorded

# No blank and no line end: their tokens are beyond the vocabulary of the recorded target, and so are those of "he" and
# "ll".
TEMPLATE = (
    "{{bos_token}}{% for message in messages %}<|im_start|>{{message.role}}:{{message.content}}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedPair:
    """The directories of the pair, and the recorded results for prompt `i`."""

    target: Path
    draft: Path
    expected: dict[str, np.ndarray]

    def prompt(self, index: int) -> list[int]:
        """Token ids of a recorded prompt."""
        return self.expected[f"p{index}.prompt"].tolist()

    def greedy(self, index: int, count: int) -> list[int]:
        """The first `count` ids of plain greedy decoding."""
        return self.expected[f"p{index}.greedy_ids"].tolist()[len(self.prompt(index)) :][:count]

    def stop_id(self, index: int) -> int:
        """An id that occurs in the greedy continuation of prompt `index`, as the reference used it."""
        return int(self.expected[f"p{index}.stop.stop_token_ids"][0])


def recorded_pair(data_dir: Path) -> RecordedPair:
    """The pair without text."""
    folder = data_dir / "D_loop"
    return RecordedPair(target=folder / "target", draft=folder / "draft", expected=load_recorded(folder))


def with_text(
    pair: RecordedPair, folder: Path, *, template: str | None = TEMPLATE, eos: int | None = None
) -> RecordedPair:
    """The pair with a copy of its target in `folder` that has a tokenizer, and `eos` as its stop token."""
    target = folder / "target"
    shutil.copytree(pair.target, target)
    tiny_tokenizer.loaded(target, {"bos_token": "<s>", **({} if template is None else {"chat_template": template})})
    if eos is not None:
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return dataclasses.replace(pair, target=target)


def copied(source: Path, destination: Path, **config_fields: object) -> Path:
    """A copy of a checkpoint directory with other values in its config.json; `None` removes a field."""
    shutil.copytree(source, destination)
    file = destination / "config.json"
    config = {**json.loads(file.read_text()), **config_fields}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return destination


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """The result of a command."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The last line on stderr."""
        return self.err.rstrip("\n").split("\n")[-1]


def dspark(capsys: pytest.CaptureFixture[str], *arguments: object) -> Finished:
    """Run the command in this process."""
    capsys.readouterr()
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as error:
        status = int(error.code or 0)
    captured = capsys.readouterr()
    return Finished(status=status, out=captured.out, err=captured.err)


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the reading of weights fail."""

    def read(*arguments: object, **options: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "fill_module", read)


def assert_refused(finished: Finished, *messages: str) -> None:
    """The command ended with status 2 and one error line that holds all `messages`."""
    assert finished.status == 2
    assert finished.out == ""
    assert "Traceback" not in finished.err
    assert finished.error.startswith("dspark: error: ")
    for message in messages:
        assert message in finished.error
