import datetime

import pytest

from jpaged.text.chat_template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages=USER, **variables) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **variables)


def test_blocks_leave_no_lines_behind():
    source = (
        "{% for message in messages %}\n  {% if true %}\n{{ message.content }}\n  {% endif %}\n"
        "{% endfor %}"
    )
    assert render(source) == "hi\n"


def test_special_tokens_and_further_variables_reach_the_template():
    assert render("{{ bos_token }}{{ mood }}", mood="good") == "<s>good"


@pytest.mark.parametrize(("add", "expected"), [(True, "A:"), (False, "")])
def test_generation_prompt_is_optional(add, expected):
    source = "{% if add_generation_prompt %}A:{% endif %}"
    assert render(source, add_generation_prompt=add) == expected


def test_text_parts_are_joined_by_newlines():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    source = "{{ messages[0]['content'] }}"
    assert render(source, [{"role": "user", "content": parts}]) == "one\ntwo"


def test_keys_without_value_count_as_absent():
    source = "{% if 'tool_calls' in messages[0] %}calls{% else %}none{% endif %}"
    assert render(source, [{"role": "user", "content": "", "tool_calls": None}]) == "none"


def test_tojson_keeps_html_and_other_scripts():
    assert render("{{ x | tojson }}", x={"a": "<é>"}) == '{"a": "<é>"}'


def test_loop_controls_and_generation_tags_work():
    source = (
        "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}"
        "{% break %}{% endfor %}"
    )
    assert render(source, USER * 2) == "hi"


def test_strftime_now_gives_the_date():
    assert render("{{ strftime_now('%Y') }}") in {
        str(datetime.datetime.now().year),
        str(datetime.datetime.now().year - 1),
    }


def test_what_the_template_refuses_is_a_value_error_with_its_words():
    with pytest.raises(ValueError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_template_cannot_leave_the_sandbox(source):
    with pytest.raises(ValueError, match="refuses"):
        render(source)


def test_template_that_does_not_compile_is_refused():
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "no role"}], r"messages\[0\]"),
        (["hi"], r"messages\[0\]"),
        ([*USER, {"role": "user", "content": 3}], r"messages\[1\]\.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages, named):
    with pytest.raises(ValueError, match=named):
        render("{{ messages }}", messages)
