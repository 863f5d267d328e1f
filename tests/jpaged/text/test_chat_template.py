import datetime

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from jpaged.text.chat_template import ChatTemplate
from jpaged.text.content_loops import loops_over_content

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


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
PARTS_CHAT = [{"role": "user", "content": PARTS}]
# Three kinds of templates: for strings, for parts, and for both.
FOR_STRINGS = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
FOR_PARTS = (
    "{% for m in messages %}[{% for part in m['content'] %}{{ part['text'] }};{% endfor %}]"
    "{% endfor %}"
)
FOR_BOTH = (
    "{% for m in messages %}{% if m.content is string %}<{{ m.content }}>{% else %}["
    "{% for part in m.content %}{{ part.text }};{% endfor %}]{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "content_format", "of_string", "of_parts"),
    [
        (FOR_STRINGS, "auto", "[hi]", "[one\ntwo]"),
        (FOR_PARTS, "auto", "[hi;]", "[one;two;]"),
        (FOR_BOTH, "auto", "<hi>", "[one;two;]"),
        (FOR_BOTH, "string", "<hi>", "<one\ntwo>"),
        (FOR_BOTH, "openai", "[hi;]", "[one;two;]"),
    ],
)
def test_template_gets_the_content_in_the_form_that_it_takes(
    source, content_format, of_string, of_parts
):
    assert render(source, content_format=content_format) == of_string
    assert render(source, PARTS_CHAT, content_format=content_format) == of_parts


def test_answers_of_tools_are_strings_whatever_the_template_takes():
    assert render(FOR_BOTH, [{"role": "tool", "content": PARTS}]) == "<one\ntwo>"


def test_parts_of_every_kind_of_text_are_taken():
    parts = ["a", {"text": "b"}, {"type": "input_text", "text": "c"},
             {"type": "output_text", "text": "d"}, {"type": "refusal", "refusal": "e"}]  # fmt: skip
    assert render(FOR_PARTS, [{"role": "user", "content": parts}]) == "[a;b;c;d;e;]"


def test_messages_of_the_caller_are_not_changed():
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "one"}]}]
    render(FOR_PARTS, messages, continue_final_message=True, add_generation_prompt=False)
    assert messages == [{"role": "assistant", "content": [{"type": "text", "text": "one"}]}]


@pytest.mark.parametrize(
    ("source", "loops"),
    [
        (FOR_STRINGS, False),
        (FOR_PARTS, True),
        ("{% for m in messages[1:] | reverse %}{% for p in m.content | list %}{% endfor %}"
         "{% endfor %}", True),
        ("{% set rest = messages[1:] %}{% for m in rest %}{% set x = m.content %}"
         "{% for p in x | selectattr('type', 'equalto', 'text') %}{% endfor %}{% endfor %}", True),
        ("{% for p in messages[0]['content'] %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content or [] %}"
         "{% for p in content %}{% endfor %}{% endfor %}", True),
        ("{% macro show(x) %}{% for p in x %}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ show(m.content) }}{% endfor %}", True),
        ("{% macro show(y, x=1) %}{% for p in x %}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ show(1, x=m['content']) }}{% endfor %}", True),
        ("{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ show(m.tools) }}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for call in m.tool_calls %}{% endfor %}{{ m.content }}"
         "{% endfor %}", False),
        ("{% for tool in tools %}{% for p in tool.content %}{% endfor %}{% endfor %}", False),
        ("{% for line in messages[0].content.split('x') %}{% endfor %}", False),
    ],
)  # fmt: skip
def test_loops_over_content_are_found_in_the_templates_syntax(source, loops):
    tree = jinja2.Environment().parse(source)
    assert loops_over_content(tree) is loops


# What families write around a message, in small.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = (
    "{{ bos_token }}{% for m in messages %}"
    "<start>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m['content'] | trim }}<end>\n"
    "{% endfor %}"
)
INSTRUCTIONS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% else %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
THINKS = (
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ content }}</>{% endfor %}"
)
SHOUTS = "{% for m in messages %}{{ m.content | upper }}|{% endfor %}"
DROPS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
FAMILIES = (CHATML, TRIMS, INSTRUCTIONS, THINKS, FOR_BOTH, SHOUTS, DROPS)
BEGINNINGS = (
    "The answer is", "The answer is ", "\n\n spaced  \n", "<think>so</think>\n\nYes", "hi",
    "CONTINUE_FINAL_MESSAGE_TAG twice", "CONTINUE_FINAL_MESSAGE_TAG", "日本", " ", "",
)  # fmt: skip


def of_transformers(source, messages, **options):
    """What transformers renders, or `None` where it refuses."""
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    try:
        [rendered], _ = render_jinja_template([messages], chat_template=source, **names, **options)
    except (ValueError, jinja2.TemplateError):
        return None
    return rendered


@pytest.mark.parametrize("source", FAMILIES)
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_continued_message_ends_the_prompt_as_in_transformers(source, beginning):
    messages = [*USER, {"role": "assistant", "content": beginning}]
    expected = of_transformers(source, messages, continue_final_message=True)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    if expected is None:
        with pytest.raises(ValueError, match="continue_final_message"):
            template.render(messages, **options)
    else:
        assert template.render(messages, **options) == expected


def test_continued_message_ends_with_its_last_part():
    messages = [*USER, {"role": "assistant", "content": PARTS}]
    for source in (FOR_PARTS, FOR_BOTH):
        rendered = render(
            source, messages, add_generation_prompt=False, continue_final_message=True
        )
        assert rendered.endswith("[one;two")
        if source is FOR_BOTH:
            assert rendered == of_transformers(source, messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "final", "options", "message"),
    [
        (CHATML, "hi", {"add_generation_prompt": True}, "both True"),
        (CHATML, None, {}, r"messages\[1\] has no content"),
        (FOR_PARTS, [], {}, r"messages\[1\] has no content"),
        ("{{ messages | length }}", "hi", {}, "writes no content"),
        (SHOUTS, "hi", {}, "as it is"),
        (DROPS, "hi", {}, "as it is"),
    ],
)
def test_message_that_cannot_be_continued_is_refused(source, final, options, message):
    messages = [*USER, {"role": "assistant", "content": final}]
    options = {"add_generation_prompt": False, "continue_final_message": True} | options
    with pytest.raises(ValueError, match=message):
        render(source, messages, **options)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_known_by_its_several_names_as_in_transformers(key):
    source = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}"
    messages = [*USER, {"role": "assistant", "content": "x", key: "why"}]
    assert render(source, messages) == of_transformers(source, messages) == "|;why|why;"


def test_tools_and_documents_reach_the_template():
    source = "{{ tools | tojson }}{{ documents[0].text }}"
    rendered = render(source, tools=[{"name": "add"}], documents=[{"text": "D"}])
    assert rendered == '[{"name": "add"}]D'
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"


@pytest.mark.parametrize("name", ["tools", "documents"])
@pytest.mark.parametrize("value", ["text", [print]])
def test_tools_and_documents_must_be_objects(name, value):
    with pytest.raises(ValueError, match=f"{name} is .*a list of objects"):
        render("{{ tools }}", **{name: value})


def test_unknown_content_format_is_refused():
    with pytest.raises(ValueError, match="content_format is 'parts'"):
        render("x", content_format="parts")


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
        "{{ range(999999999) | list }}",
        "{{ 1 / 0 }}",
        "{{ [][3].x }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_template_cannot_leave_the_sandbox_or_raise_anything_else(source):
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
        ([{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}], "input_audio"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "type 'text'"),
        ([{"role": "user", "content": [7]}], "type 7"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], r"type \['text'\]"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages, named):
    with pytest.raises(ValueError, match=named):
        render("{{ messages }}", messages)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{% if messages %}{{ '%09999999999d' % 1 }}{% endif %}",
        "{{ '%09999999999d'|format(1) }}",
        "{{ '%(n)09999999999d' % {'n': 1} }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ 'a' * (2 * 10**9) }}",
        "{{ 2 ** 10 ** 9 }}",
        "{{ lipsum(n=10**7) }}",
        "{{ messages|tojson(indent=10**9) }}",
        "{{ 'a'|center(10**9) }}",
        "{{ 1 }}" * 200_000,
    ],
)  # fmt: skip
def test_template_that_runs_away_is_stopped(source):
    """Whoever loads it, and whoever shares a server with it, goes on."""
    with pytest.raises(ValueError, match="chat_template"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "Hello"}])


def test_limits_leave_what_templates_do():
    source = (
        "{% for message in messages %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{% endfor %}"
        "{{ 'ab' * 2 + '%s-%d' % ('x', 3) }}{{ 7 % 4 * 2 ** 3 }}"
        "{{ (messages[:1] + messages)|length }}{% for c in missing %}{% endfor %}"
        "{% for k, v in {'k': 1}.items() %}{{ k ~ v }}{% endfor %}"
        "{% for x in [1, 2]|map('string') %}{{ x }}{% endfor %}{{ '* %s' % 'item' }}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    text = ChatTemplate(source, {}).render(messages)
    assert text == "0False21True2ababx-3243k112* item"
