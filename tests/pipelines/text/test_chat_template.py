"""Chat templates: they see what Hugging Face templates are written for, cannot leave the sandbox, and fail as request
errors.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from dspark_jax.pipelines.text.chat_template import ChatTemplate
from dspark_jax.speculators_common.errors import RequestError

HELLO = [{"role": "user", "content": "hello"}]


def rendered(template: str, messages: Any = HELLO, **tokens: str) -> str:
    return ChatTemplate(template, "tokenizer_config.json", tokens).render(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ (messages | first).update({'role': 'system'}) }}",
        "{{ messages.append(3) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_template_cannot_leave_the_sandbox(template: str) -> None:
    with pytest.raises(RequestError, match=r"tokenizer_config\.json: chat template: .*(unsafe|too big)"):
        rendered(template)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 3 }}", 'can only concatenate str (not "int") to str'),
        ("{{ nothing.there }}", "'nothing' is undefined"),
        ("{% for %}", "Expected an expression, got 'end of statement block'"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_template_errors_are_request_errors_in_one_line(template: str, expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        rendered(template)
    assert str(caught.value).startswith(f"tokenizer_config.json: chat template: {expected}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<ü> & \'\\""}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "<ü> & \'\\""\n}'),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% if true %}\na\n    {% endif %}\nb", "a\nb"),
        ("a{% generation %}{{ messages[0].role }}{% endgeneration %}b", "auserb"),
        ("{{ tools is none and documents is none and add_generation_prompt }}", "True"),
    ],
)
def test_templates_see_what_they_are_written_for(template: str, expected: str) -> None:
    assert rendered(template, [{"role": "user", "content": "<ü> & '\""}], bos_token="<s>") == expected


def test_templates_can_ask_for_the_date() -> None:
    assert re.fullmatch(r"2\d\d\d-[01]\d", rendered("{{ strftime_now('%Y-%m') }}"))
