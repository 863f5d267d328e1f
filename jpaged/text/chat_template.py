"""Chat messages -> prompt text, through the Jinja template that comes with a model.

Templates are code from a checkpoint, so they run in Jinja's immutable sandbox, with limits; the
environment offers what transformers offers (its utils/chat_template_utils.py), because
templates are written against that.
"""

import contextvars
import datetime
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from jpaged.text.content_loops import loops_over_content

# More than any template needs: rounds of all loops of a rendering, characters or items that an
# operator makes, columns, characters of a template.
_MAX_STEPS = 1_000_000
_MAX_SIZE = 50_000_000
_MAX_WIDTH = 1_000
_MAX_SOURCE = 1 << 18
# Of a "%" format: a width or precision of four digits, or one that is an argument.
_LARGE_WIDTH = re.compile(r"%(?:\([^)]*\))?[-#0 +\d.]*(?:\*|\d{4})")
_CONTENT_FORMATS = ("auto", "string", "openai")
# Kinds of parts that are text, and the key that holds it.
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# Its last space tells whether the template trims a message. The name is transformers', so that a
# template which looks for it finds it.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: The Jinja source.
        special_tokens: Tokens that templates may name, e.g. `{"bos_token": "<s>"}`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        self._special_tokens = dict(special_tokens)
        if len(source) > _MAX_SOURCE:
            raise ValueError(
                f"chat_template has {len(source)} characters; at most {_MAX_SOURCE} are taken. "
                "Repair the template of the checkpoint"
            )
        try:
            self._template = _build_environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(
                f"chat_template does not compile: {error}. Repair the template of the checkpoint"
            ) from error

    def render(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        content_format: str = "auto",
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Renders a conversation.

        Args:
            messages: At least one; each has a `role` and usually a `content`, a string or a list
                of text parts (`{"type": "text", "text": ...}`). Keys whose value is `None` count
                as absent, and no content as an empty one, as in vLLM.
            add_generation_prompt: End with the header of the assistant's turn.
            continue_final_message: End with the content of the last message, so that the model
                continues it; `add_generation_prompt` must then be False. As in transformers, what
                the template writes after the content is cut off, with the space at the end of the
                content if the template trims it.
            content_format: What the template gets, as in vLLM. "string": a string; parts are joined
                by newlines. "openai": parts; a string becomes one. "auto": parts if the template
                loops over the content, else a string; but a string stays one if the template asks
                anything whether it is a string, since it then knows both.
            tools: Tools as JSON schemas.
            documents: Documents for the template to quote, each with e.g. a `title` and a `text`.
            **template_kwargs: Further variables of the template.

        Raises:
            ValueError: The messages are malformed, or the template refuses them.
        """
        if isinstance(messages, str) or not messages:
            raise ValueError(
                f"messages is {messages!r}; it must be a list of at least one message, e.g. "
                '[{"role": "user", "content": "Hello"}]'
            )
        if content_format not in _CONTENT_FORMATS:
            raise ValueError(
                f"content_format is {content_format!r}; it must be one of {_CONTENT_FORMATS}"
            )
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "add_generation_prompt and continue_final_message are both True; the prompt ends "
                "with a new message or with the last one. Set one of them to False"
            )
        variables: dict[str, Any] = self._special_tokens | template_kwargs
        variables |= {
            "tools": _objects("tools", tools), "documents": _objects("documents", documents)
        }  # fmt: skip
        if continue_final_message:
            _check_has_content(messages)
        plain = [
            self._plain_message(index, message, content_format)
            for index, message in enumerate(messages)
        ]
        final_text = _append_tag(plain, self.source) if continue_final_message else ""
        try:
            _steps.set([_MAX_STEPS])
            rendered = self._template.render(
                messages=plain, add_generation_prompt=add_generation_prompt, **variables
            )
        except Exception as error:  # whatever the code of the template raises
            reason = str(error) or type(error).__name__
            raise ValueError(f"chat_template refuses these messages: {reason}") from error
        return _cut_at_tag(rendered, final_text) if continue_final_message else rendered

    def _plain_message(self, index: int, message: Any, content_format: str) -> dict[str, Any]:
        owner = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{owner} is {message!r}; it must be an object with a 'role'")
        plain = {key: value for key, value in message.items() if value is not None}
        # Templates know reasoning by several names; transformers, too, offers it under two.
        for key in _REASONING_KEYS:
            if key in plain:
                plain = {"thinking": plain[key], **plain, "reasoning_content": plain[key]}
                break
        content = plain.setdefault("content", "")
        if not isinstance(content, (str, list, tuple)):
            raise ValueError(f"{owner}.content is {content!r}; it must be a string or text parts")
        takes_parts, takes_strings = self._takes(content_format)
        if isinstance(content, str):
            if not takes_strings:
                plain["content"] = [{"type": "text", "text": content}]
            return plain
        parts = [_text_part(owner, part) for part in cast(Sequence[Any], content)]
        # Templates seldom expect parts from tools; vLLM joins them always.
        if takes_parts and plain["role"] != "tool":
            plain["content"] = parts
        else:
            plain["content"] = "\n".join(part["text"] for part in parts)
        return plain

    def _takes(self, content_format: str) -> tuple[bool, bool]:
        """Whether the template is given parts, and whether it is given strings."""
        if content_format != "auto":
            return content_format == "openai", content_format == "string"
        return self._takes_by_itself

    @functools.cached_property
    def _takes_by_itself(self) -> tuple[bool, bool]:
        tree = _build_environment().parse(self.source)
        takes_parts = loops_over_content(tree)
        asks = any(test.name == "string" for test in tree.find_all(jinja2.nodes.Test))
        return takes_parts, asks or not takes_parts


def _objects(name: str, values: Any) -> list[Mapping[str, Any]] | None:
    if values is None:
        return None
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, Mapping) for v in values):
        raise ValueError(f"{name} is {values!r}; it must be a list of objects")
    return list(values)


def _text_part(owner: str, part: Any) -> dict[str, Any]:
    """A part as templates know it, from any of the kinds that OpenAI's APIs have for text."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else part
    key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    if key is None or not isinstance(part.get(key), str):
        raise ValueError(
            f"{owner}.content holds a part of type {kind!r}; only text parts are supported: "
            '{"type": "text", "text": ...}'
        )
    return {"type": "text", "text": part[key]}


def _check_has_content(messages: Sequence[Any]) -> None:
    final = messages[-1]
    if isinstance(final, Mapping) and final.get("content") in (None, []):
        raise ValueError(
            f"continue_final_message is True, but messages[{len(messages) - 1}] has no content; "
            "give it the beginning of the answer"
        )


def _append_tag(messages: list[dict[str, Any]], source: str) -> str:
    """Marks the end of the last message's content, and returns the text before the mark."""
    final = messages[-1]
    content = final["content"]
    if "content" not in source:
        raise ValueError("continue_final_message is True, but the chat_template writes no content")
    if isinstance(content, str):
        final["content"] = content + _CONTINUE_TAG
        return content
    text = content[-1]["text"]
    content[-1]["text"] = text + _CONTINUE_TAG
    return text


def _cut_at_tag(rendered: str, final_text: str) -> str:
    place = rendered.rfind(_CONTINUE_TAG.rstrip())
    if place < 0 or final_text.strip() not in rendered:
        raise ValueError(
            "continue_final_message is True, but the chat_template does not write the content of "
            "the last message as it is; end with a message of another role or form"
        )
    is_trimmed = not rendered.startswith(_CONTINUE_TAG, place)
    return rendered[:place].rstrip() if is_trimmed else rendered[:place]


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`: marks the assistant's turns for training; here just its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` that stores no underscore names, the way out of Jinja's sandbox."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")
        super().__setitem__(name, value)


class _BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which no loop or product runs away with the server.

    Loops count their rounds, and operators are looked at before they make much of little. That
    bounds what templates do by mistake, or in the ways that are known; it is no wall against
    whoever writes one to harm: serve checkpoints of people you trust.
    """

    # Also keeps Jinja from working them out when it compiles.
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Refuses what would be too large."""
        sizes = [
            len(value) if isinstance(value, (str, list, tuple)) else 0 for value in (left, right)
        ]
        numbers = [value for value in (left, right) if isinstance(value, (int, float))]
        is_large = any(abs(number) > _MAX_SIZE for number in numbers)
        match operator:
            case "*" if any(sizes):
                is_large = max(sizes) * max([1, *map(abs, numbers)]) > _MAX_SIZE
            case "**":
                is_large = is_large or any(abs(number) > 1000 for number in numbers)
            case "%" if isinstance(left, str):
                is_large = _LARGE_WIDTH.search(left) is not None
            case "+":
                is_large = sum(sizes) > _MAX_SIZE
            case _:
                is_large = False
        if is_large:
            raise jinja2.exceptions.SecurityError(f"what {operator!r} would make is too large")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            counted = jinja2.nodes.Filter(loop.iter, "_counted", [], [], None, None)
            loop.iter = counted.set_environment(self)
        return tree


_steps: contextvars.ContextVar[list[int]] = contextvars.ContextVar("steps left of a rendering")


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, values: Any) -> Any:
    """The same values, whose rounds count; a thing with a length keeps it."""
    if isinstance(values, (list, tuple, str, dict, range)):
        _count(len(values))
        return values
    return _counted_one_by_one(values)


def _counted_one_by_one(values: Any) -> Iterator[Any]:
    for value in values:
        _count(1)
        yield value


def _count(num_steps: int) -> None:
    left = _steps.get()
    left[0] -= num_steps
    if left[0] < 0:
        raise jinja2.exceptions.SecurityError(
            f"its loops take more than {_MAX_STEPS} rounds in all"
        )


def _bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's whose numbers may not be large; never worked out in advance."""

    @jinja2.pass_context
    def bounded(context: jinja2.runtime.Context, *args: Any, **kwargs: Any) -> Any:
        for value in (*args[1:], *kwargs.values()):
            if isinstance(value, (int, float)) and abs(value) > _MAX_WIDTH:
                raise jinja2.exceptions.SecurityError(f"{value} is too wide")
        if filter is jinja2.filters.do_format and _LARGE_WIDTH.search(str(args[0])):
            raise jinja2.exceptions.SecurityError("a format is too wide")
        return filter(*args, **kwargs)

    return bounded


def _build_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["_counted"] = _counted
    for name, filter in (
        ("center", jinja2.filters.do_center),
        ("indent", jinja2.filters.do_indent),
        ("format", jinja2.filters.do_format),
    ):
        environment.filters[name] = _bounded(filter)
    del environment.globals["lipsum"]  # text by the mile
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > _MAX_WIDTH:
        raise jinja2.exceptions.SecurityError(f"indent {indent} is too wide")
    # Jinja's own filter escapes HTML characters, which models were not trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
