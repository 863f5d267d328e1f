"""Chat messages -> prompt text, through the Jinja template that comes with a model.

Templates are untrusted code from a checkpoint, so they run in Jinja's immutable sandbox; the
environment offers what transformers offers (its utils/chat_template_utils.py), because
templates are written against that.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: The Jinja source.
        special_tokens: Tokens that templates may name, e.g. `{"bos_token": "<s>"}`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _build_environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(
                f"chat_template does not compile: {error}. Repair the template of the checkpoint"
            ) from error

    def render(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Renders a conversation.

        Args:
            messages: At least one; each has a `role` and usually a `content`, a string or a list
                of text parts (`{"type": "text", "text": ...}`), which are joined by newlines
                as vLLM does it. Keys whose value is `None` count as absent.
            add_generation_prompt: End with the header of the assistant's turn.
            **template_kwargs: Further variables of the template, e.g. `tools`.

        Raises:
            ValueError: The messages are malformed, or the template refuses them.
        """
        if isinstance(messages, str) or not messages:
            raise ValueError(
                f"messages is {messages!r}; it must be a list of at least one message, e.g. "
                '[{"role": "user", "content": "Hello"}]'
            )
        variables: dict[str, Any] = {"tools": None, "documents": None}
        variables |= {**self._special_tokens, **template_kwargs}
        try:
            return self._template.render(
                messages=[_plain_message(index, message) for index, message in enumerate(messages)],
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"chat_template refuses these messages: {error}") from error


def _plain_message(index: int, message: Any) -> dict[str, Any]:
    owner = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{owner} is {message!r}; it must be an object with a 'role'")
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, (list, tuple)):
        texts: list[str] = []
        for part in cast(Sequence[Any], content):
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise ValueError(
                    f"{owner}.content holds a part of type {kind!r}; only text parts are "
                    'supported: {"type": "text", "text": ...}'
                )
            texts.append(part["text"])
        plain["content"] = "\n".join(texts)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{owner}.content is {content!r}; it must be a string or text parts")
    return plain


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


def _build_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
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
