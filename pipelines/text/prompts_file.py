"""Files of prompts: one prompt a line, or JSONL whose objects hold a conversation's `turns`, of which the first is the
prompt.
"""

from __future__ import annotations

import json
from pathlib import Path

from dspark_jax.speculators_common.errors import RequestError


def read_prompts_file(path: Path | str) -> list[str]:
    """The prompts in the order of the file; empty lines are none. A name that ends in `.jsonl` says which of the two
    formats it is.

    Raises `RequestError` that names the file and the line.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: prompts may hold other separators
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RequestError(f"{file}: cannot be read: {reason}") from error
    is_jsonl = file.suffix == ".jsonl"
    prompts = [
        _first_turn(line, f"{file}:{number}") if is_jsonl else line.strip()
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise RequestError(f"{file}: found no prompt, allowed one a line")
    return prompts


def _first_turn(line: str, place: str) -> str:
    allowed = "an object whose turns is a list that begins with a text"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place}: not valid JSON, allowed {allowed}") from error
    if not isinstance(entry, dict):
        raise RequestError(f"{place}: found a {type(entry).__name__}, allowed {allowed}")
    if "turns" not in entry:
        raise RequestError(f"{place}: turns: missing, allowed {allowed}")
    turns = entry["turns"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise RequestError(f"{place}: turns: found {turns!r:.80}, allowed {allowed}")
    return turns[0]
