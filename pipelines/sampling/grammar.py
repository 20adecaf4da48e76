"""The form that a text must have, as a request states it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

GrammarKind = Literal["json_schema", "regex", "lark"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What the whole output must match: a JSON schema, a regular expression or a Lark grammar, as text."""

    kind: GrammarKind
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that a schema allows. `schema` is the schema or its JSON text."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def regex(cls, text: str) -> Grammar:
        """Text that a regular expression matches from its first character to its last."""
        return cls("regex", text)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text that the rule `start` of a Lark grammar derives."""
        return cls("lark", text)
