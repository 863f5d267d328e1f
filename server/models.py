"""The models that a server offers: names, tokenizer, defaults; from text to the engine and back."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer
from server.engine_client import EngineClient
from server.errors import ApiError, bad_request, not_found
from server.generation import Generation
from server.protocol import GenerationRequest

# Longer texts are encoded beside the event loop, which they would hold up for milliseconds.
_LONG_TEXT = 4000

# Variables that requests set by fields of their own, or not at all.
RESERVED_VARIABLES = frozenset(
    {
        "messages", "chat_template", "content_format", "add_generation_prompt",
        "continue_final_message", "documents", "tools", "self",
    }
)  # fmt: skip


@dataclass
class ServedModel:
    """One model.

    Attributes:
        index: Of its engine.
        names: That requests may call it by; the first is told.
        path: Where it came from.
        tokenizer: Its own.
        defaults: Fields of `SamplingParams`, from its generation_config.json.
        chat_template: Instead of the tokenizer's.
        content_format: What the template takes: "auto", "string" or "openai".
        trusts_templates: Whether requests may bring their own.
        template_kwargs: Variables of the template that requests need not give.
        created: Seconds since 1970, of the server's start.
        takes_priorities: Whether its scheduler looks at priorities.
        max_logprobs: Alternatives that may be asked for; -1: all.
        stream_interval: Tokens of an event of a stream at least.
        always_includes_usage: Whether streams that do not ask for their usage end with it too.
    """

    index: int
    names: Sequence[str]
    path: str
    tokenizer: Tokenizer
    defaults: Mapping[str, Any]
    created: int
    chat_template: str | None = None
    content_format: str = "auto"
    trusts_templates: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    takes_priorities: bool = False
    max_logprobs: int = 20
    stream_interval: int = 1
    always_includes_usage: bool = False

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


class Models:
    """All models of a server and the process that runs them."""

    def __init__(self, models: Sequence[ServedModel], client: EngineClient):
        """Takes models in the order of their engines."""
        self.all = list(models)
        self.client = client
        self._by_name = {name: model for model in models for name in model.names}
        # So that a few requests with huge texts do not take all threads and memory.
        self._long_work = asyncio.Semaphore(2)

    async def beside_if_long[Result](
        self, size: int, work: Callable[[], Result], param: str
    ) -> Result:
        """What `work` gives, done beside the event loop if it reads many characters.

        Raises:
            ApiError: If it refuses them.
        """
        try:
            if size < _LONG_TEXT:
                return work()
            async with self._long_work:
                return await asyncio.to_thread(work)
        except (ValueError, TypeError) as error:
            message = str(error).removeprefix("SamplingParams.")
            raise bad_request(message, param) from None

    def find(self, name: str | None) -> ServedModel:
        """The model of a request; without a name, the first.

        Raises:
            ApiError: If there is none of that name.
        """
        model = self.all[0] if not name else self._by_name.get(name)
        if model is None:
            known = ", ".join(self._by_name)
            raise not_found(f"The model `{name}` does not exist. Here are: {known}.", "model")
        return model

    def max_model_len(self, model: ServedModel) -> int | None:
        """Tokens of prompt and answer together; `None` before its engine is ready."""
        limits = self.client.states[model.index].limits
        return None if limits is None else limits.max_model_len

    async def encode(
        self, model: ServedModel, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Token ids of texts.

        Raises:
            ApiError: If one is no text.
        """

        def encode() -> list[list[int]]:
            return [
                model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
                for text in texts
            ]

        return await self.beside_if_long(sum(map(len, texts)), encode, "prompt")

    async def encode_bad_words(
        self, model: ServedModel, request: GenerationRequest
    ) -> tuple[tuple[int, ...], ...]:
        """Token ids of what may not be said.

        Raises:
            ApiError: If it has none.
        """
        words = request.bad_words or ()

        def encode() -> tuple[tuple[int, ...], ...]:
            return model.tokenizer.encode_bad_words(words)

        return await self.beside_if_long(100 * sum(map(len, words)), encode, "bad_words")

    def check_length(self, model: ServedModel, request: Any, text: str, param: str) -> None:
        """Refuses a text that no tokenizer could make fit, before it is worked on.

        Raises:
            ApiError: As for what does not fit.
        """
        limit = self.max_model_len(model)
        if limit is None or request.truncate_prompt_tokens is not None:
            return
        least = len(text) // model.tokenizer.longest_token
        if least > limit:
            raise self.too_long(limit, least, None, param)

    async def render(
        self, model: ServedModel, request: Any, *, param: str = "messages"
    ) -> tuple[str, list[int]]:
        """Text and ids of a conversation.

        Raises:
            ApiError: If the model has no template, or it refuses the messages.
        """
        tokenizer = model.tokenizer
        if request.chat_template is not None and not model.trusts_templates:
            raise bad_request(
                "chat_template is given; the server takes templates from requests only if started "
                "with --trust-request-chat-template",
                "chat_template",
            )
        template = request.chat_template or model.chat_template
        if template is None and tokenizer.chat_template is None:
            raise bad_request(
                f"{model.name} has no chat template; use /v1/completions, or start the server with "
                "--chat-template",
                param,
            )
        kwargs: dict[str, Any] = {**model.template_kwargs, **(request.chat_template_kwargs or {})}
        for name in kwargs.keys() & RESERVED_VARIABLES:
            raise bad_request(
                f"chat_template_kwargs holds {name!r}, which is no variable of the template's own; "
                "set the field of the request instead, where there is one",
                "chat_template_kwargs",
            )

        def render() -> tuple[str, list[int]]:
            text = tokenizer.render_chat(
                request.messages,
                chat_template=template,
                content_format=model.content_format,
                add_generation_prompt=bool(request.add_generation_prompt),
                continue_final_message=bool(request.continue_final_message),
                documents=getattr(request, "documents", None),
                tools=getattr(request, "tools", None),
                **kwargs,
            )
            # The template has written the special tokens.
            return text, tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens))

        size = sum(len(str(message.get("content"))) for message in request.messages)
        if isinstance(request, GenerationRequest):
            limit = self.max_model_len(model)
            # A template may leave messages out, but hardly all.
            if limit is not None and size // model.tokenizer.longest_token > 16 * limit:
                raise self.too_long(limit, size // model.tokenizer.longest_token, None, param)
        return await self.beside_if_long(size, render, param)

    @staticmethod
    def check_logprobs(model: ServedModel, param: str, count: int | None) -> None:
        """Refuses more log-probabilities than there may be.

        Raises:
            ApiError: Naming the field.
        """
        limit = model.max_logprobs
        if count is not None and limit >= 0 and not 0 <= count <= limit:
            raise bad_request(
                f"{param} is {count}; it must be from 0 to {limit}, unless the server is started "
                "with another --max-logprobs",
                param,
            )

    def cut_prompt(
        self, model: ServedModel, request: GenerationRequest, token_ids: list[int], param: str
    ) -> list[int]:
        """The prompt as it was asked to be cut; refuses what does not fit.

        Raises:
            ApiError: If it is empty or too long.
        """
        limit = self.max_model_len(model)
        wanted = request.truncate_prompt_tokens
        if wanted is not None:
            if wanted < -1 or wanted == 0:
                raise bad_request(
                    f"truncate_prompt_tokens is {wanted}; it must be -1 or at least 1",
                    "truncate_prompt_tokens",
                )
            count = wanted
            if wanted == -1:  # what fits, with room for an answer
                room = 1 if request.max_tokens is None else request.max_tokens
                count = max(1, limit - room) if limit is not None else len(token_ids)
            from_left = request.truncation_side != "right"
            token_ids = token_ids[-count:] if from_left else token_ids[:count]
        if not token_ids:
            raise bad_request(f"{param} is empty; give at least one token", param)
        if limit is not None and len(token_ids) + bool(request.max_tokens != 0) > limit:
            raise self.too_long(limit, len(token_ids), None, param)
        return token_ids

    def check_room(
        self, model: ServedModel, num_tokens: int, max_tokens: int | None, param: str
    ) -> None:
        """Refuses an answer that is asked for and does not fit behind its prompt.

        Raises:
            ApiError: As OpenAI's API words it.
        """
        limit = self.max_model_len(model)
        if limit is not None and max_tokens is not None and num_tokens + max_tokens > limit:
            raise self.too_long(limit, num_tokens, max_tokens, param)

    @staticmethod
    def too_long(limit: int, num_tokens: int, max_tokens: int | None, param: str) -> ApiError:
        """The refusal."""
        asked = "" if max_tokens is None else f" and {max_tokens} for the answer"
        return bad_request(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains "
            f"{num_tokens} input tokens{asked}. Shorten the prompt"
            + ("" if max_tokens is None else " or lower max_tokens"),
            param,
        )

    def submit(
        self,
        model: ServedModel,
        request: GenerationRequest,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        bad_words: tuple[tuple[int, ...], ...],
        news: asyncio.Event,
        prompt: str | None = None,
    ) -> Generation:
        """Sends a prompt to the engine.

        Raises:
            ApiError: If the model cannot serve, or its scheduler knows no priorities.
        """
        if request.priority and not model.takes_priorities:
            raise bad_request(
                f"priority is {request.priority}; the server looks at priorities only if started "
                "with --scheduling-policy priority",
                "priority",
            )
        return self.client.submit(
            model.index,
            token_ids,
            params,
            model.tokenizer,
            request_id=request_id,
            bad_words=bad_words,
            news=news,
            prompt=prompt,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
        )
