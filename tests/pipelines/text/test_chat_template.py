"""Chat templates get the variables that Hugging Face templates expect, cannot leave the sandbox, and fail as request
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
    "template", ["{% for %}", "{{ messages", "{{ messages | no_such_filter }}", "{" * 3, "{% x %}"]
)
def test_a_template_that_does_not_compile_says_so_before_it_is_rendered(template: str) -> None:
    fault = ChatTemplate(template, "chat_template.jinja").fault
    with pytest.raises(RequestError) as caught:
        ChatTemplate(template, "chat_template.jinja").render(HELLO)
    assert str(fault) == str(caught.value)


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{{ raise_exception('no') }}", "{{ nothing.there }}"]
)
def test_an_error_of_the_messages_is_no_fault_of_the_template(template: str) -> None:
    assert ChatTemplate(template, "chat_template.jinja").fault is None


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


# --- what messages may be ---

READS_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content }}", "one\ntwo"),
        ("{{ messages[0]['role'] + ':' + messages[0]['content'] }}", "user:one\ntwo"),
        ("{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}", "one\ntwo"),
        ("{{ messages[0].content | tojson }}", '"one\\ntwo"'),
        (READS_PARTS, "[one][two]"),
    ],
)
def test_text_parts_reach_the_template_as_it_reads_them(template: str, expected: str) -> None:
    assert rendered(template, [{"role": "user", "content": PARTS}]) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([PARTS[0], {"type": "image_url", "image_url": {}}], "messages[0].content[1].type: found 'image_url'"),
        ([{"type": "input_audio"}], "messages[0].content[0].type: found 'input_audio', allowed 'text'"),
        ([{"text": "a"}], "messages[0].content[0].type: found None, allowed 'text'"),
        ([{"type": "text", "text": 3}], "messages[0].content[0].text: found 3, allowed a string"),
        (["a"], "messages[0].content[0]: found 'a', allowed 'text'"),
        ([], "messages[0].content: found [], allowed a string or a list of text parts"),
        ({"type": "text"}, "messages[0].content: found {'type': 'text'}, allowed a string or a list of text parts"),
    ],
)
def test_parts_that_are_no_text_are_refused_by_name(content: Any, expected: str) -> None:
    with pytest.raises(RequestError, match=re.escape(expected)):
        rendered("{{ messages }}", [{"role": "user", "content": content}])


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[1].tool_calls[0].function | tojson }}", '{"name": "look", "arguments": {"at": "x"}}'),
        ("{{ messages[1].content is none }}", "True"),
        ("<{{ messages[1].content }}>", "<>"),
        ("{{ messages[2].tool_call_id }}{{ messages[2].content }}", "7seen"),
    ],
)
def test_tool_calls_may_have_a_content_of_null_and_all_keys_reach_the_template(template: str, expected: str) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    messages = [*HELLO, call, {"role": "tool", "content": "seen", "tool_call_id": 7}]
    assert rendered(template, messages) == expected
    assert call == {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    "message", [{"role": "user", "content": None}, {"role": "assistant", "content": None}, {"role": "assistant"}]
)
def test_a_message_that_says_nothing_is_refused(message: dict[str, Any]) -> None:
    expected = "messages[1].content: found None, allowed a string or a list of text parts"
    with pytest.raises(RequestError, match=re.escape(expected)):
        rendered("{{ messages }}", [*HELLO, message])


# --- variables ---

THINKING = "{% if enable_thinking is defined and enable_thinking is false %}no{% else %}yes{% endif %} {{ bos_token }}"


def test_template_variables_reach_the_template() -> None:
    template = ChatTemplate(THINKING, "file", {"bos_token": "<s>"})
    assert template.render(HELLO) == "yes <s>"
    assert template.render(HELLO, template_vars={"enable_thinking": True}) == "yes <s>"
    assert template.render(HELLO, template_vars={"enable_thinking": False, "bos_token": "<b>"}) == "no <b>"
    tools = ChatTemplate("{% for tool in tools %}{{ tool.name }}{% endfor %}", "file")
    assert tools.render(HELLO, template_vars={"tools": [{"name": "look"}]}) == "look"


@pytest.mark.parametrize(
    ("name", "allowed"), [("enable_thinkin", "bos_token, enable_thinking"), ("messages", "bos_token, enable_thinking")]
)
def test_a_variable_that_the_template_never_reads_is_refused(name: str, allowed: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(THINKING, "file").render(HELLO, template_vars={name: False})
    assert str(caught.value) == (
        f"template_vars: found '{name}', allowed a variable that the template reads: {allowed}"
    )
    assert (caught.value.field, caught.value.found) == ("template_vars", name)


def test_variables_that_the_template_sets_itself_are_not_its_readers() -> None:
    with pytest.raises(RequestError, match="found 'x', allowed a variable that the template reads: it reads none"):
        ChatTemplate("{% set x = 3 %}{{ x }}", "file").render(HELLO, template_vars={"x": 4})
    with pytest.raises(RequestError, match="file: chat template: Expected an expression"):
        ChatTemplate("{% for %}", "file").render(HELLO, template_vars={"x": 4})
