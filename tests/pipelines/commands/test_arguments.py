"""The types of arguments: each refuses wrong values with one clear sentence."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from dspark_jax.pipelines.commands.arguments import template_var


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=false", False),
        ("a=False", False),
        ("a=True", True),
        ("a=None", None),
        ("a=null", None),
        ("a=3", 3),
        ('a="3"', "3"),
        ('a="False"', "False"),
        ('a=[{"name": "look"}]', [{"name": "look"}]),
        ("a=low", "low"),
        ("a=x=y", "x=y"),
        ("a=", ""),
        ("a={broken", "{broken"),
        ("a=" + "[" * 100_000, "[" * 100_000),
    ],
)
def test_a_template_variable_is_json_or_else_text(text: str, value: Any) -> None:
    assert template_var(text) == ("a", value)


@pytest.mark.parametrize("text", ["", "a", "=3", "a-b=3", "1a=3", "a b=3"])
def test_a_template_variable_needs_a_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="allowed NAME=VALUE, as in enable_thinking=false"):
        template_var(text)
