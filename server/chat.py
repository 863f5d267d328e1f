"""POST /v1/chat/completions."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from jpaged.outputs import CompletionOutput, RequestOutput
from server.answers import (
    Job,
    LogprobWriter,
    check_num_answers,
    choice_end,
    describe_prompt_logprobs,
    stream,
)
from server.errors import bad_request
from server.generation import Delta
from server.models import Models
from server.protocol import ChatRequest


async def start(models: Models, request: ChatRequest, request_id: str) -> Job:
    """Renders the conversation and sends it to the engine.

    Raises:
        ApiError: Naming what cannot be done.
    """
    request.check()
    model = models.find(request.model)
    if request.add_generation_prompt and request.continue_final_message:
        if "add_generation_prompt" in request.model_fields_set:
            raise bad_request(
                "add_generation_prompt and continue_final_message are both true; set one to false",
                "continue_final_message",
            )
        request.add_generation_prompt = False
    top = request.top_logprobs
    if top and not request.logprobs:
        raise bad_request(f"top_logprobs is {top} without logprobs; set it true", "top_logprobs")
    models.check_logprobs(model, "top_logprobs", top)
    models.check_logprobs(model, "prompt_logprobs", request.prompt_logprobs)
    max_tokens = request.max_completion_tokens
    param = "max_completion_tokens"
    if max_tokens is None:
        max_tokens, param = request.max_tokens, "max_tokens"
    if max_tokens is not None and max_tokens < 1:
        raise bad_request(f"{param} is {max_tokens}; it must be at least 1", param)
    params = request.sampling_params(
        model.defaults, max_tokens=max_tokens, logprobs=(top or 0) if request.logprobs else None
    )
    check_num_answers(1, params)
    bad_words = await models.encode_bad_words(model, request)
    text, token_ids = await models.render(model, request)
    token_ids = models.cut_prompt(model, request, token_ids, "messages")
    models.check_room(model, len(token_ids), max_tokens, param)
    job = Job(
        models, model, request, f"chatcmpl-{request_id}", int(time.time()), [], asyncio.Event()
    )
    job.generations.append(
        models.submit(
            model, request, token_ids, params,
            request_id=job.response_id, bad_words=bad_words, news=job.news, prompt=text,
        )
    )  # fmt: skip
    return job


def _body(job: Job, kind: str) -> dict[str, Any]:
    return {
        "id": job.response_id, "object": kind, "created": job.created, "model": job.name
    }  # fmt: skip


def _writer(job: Job) -> LogprobWriter:
    request = job.request
    assert isinstance(request, ChatRequest)
    as_ids = bool(request.return_tokens_as_token_ids)
    return LogprobWriter(job.model.tokenizer, request.top_logprobs or 0, as_ids=as_ids)


def _echoed(request: ChatRequest) -> str:
    """The last message, if the answer goes on with it."""
    last = request.messages[-1]
    content = last.get("content")
    is_own = last.get("role") == "assistant" and isinstance(content, str)
    return str(content) if request.echo and is_own else ""


async def answer(job: Job) -> dict[str, Any]:
    """The whole answer.

    Raises:
        ApiError: If the prompt was refused.
    """
    (output,) = await job.outputs()
    request = job.request
    assert isinstance(request, ChatRequest)
    body = _body(job, "chat.completion") | {
        "choices": [_choice(job, request, completion) for completion in output.outputs],
        "usage": job.usage(),
    }
    return body | _prompt_fields(request, output)


def _prompt_fields(request: ChatRequest, output: RequestOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if request.prompt_logprobs is not None:
        fields["prompt_logprobs"] = describe_prompt_logprobs(output)
    if request.return_token_ids:
        fields["prompt_token_ids"] = output.prompt_token_ids
    if request.return_prompt_text:
        fields["prompt_text"] = output.prompt
    return fields


def _choice(job: Job, request: ChatRequest, completion: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if request.logprobs:
        logprobs = _writer(job).chat(completion.token_ids, completion.logprobs or ())
    message = {
        "role": "assistant", "content": _echoed(request) + completion.text, "refusal": None
    }  # fmt: skip
    choice: dict[str, Any] = {"index": completion.index, "message": message, "logprobs": logprobs}
    if request.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice | choice_end(completion)


def events(job: Job) -> AsyncGenerator[bytes]:
    """The answer as a stream of events."""
    request = job.request
    assert isinstance(request, ChatRequest)
    writer = _writer(job)

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        entry = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return _body(job, "chat.completion.chunk") | {"choices": [entry | more]}

    def opening() -> Iterator[dict[str, Any]]:
        for index in range(job.num_choices):
            first = chunk(index, {"role": "assistant", "content": ""})
            yield first | _prompt_fields(request, job.generations[0].group.output())
            if echoed := _echoed(request):
                yield chunk(index, {"content": echoed})

    def chunks(_: int, delta: Delta) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {}
        if request.logprobs and delta.token_ids:
            described = writer.describe(delta.token_ids, delta.logprobs)
            more["logprobs"] = writer.chat(delta.token_ids, described)
        if request.return_token_ids:
            more["token_ids"] = delta.token_ids
        if delta.finish_reason is not None:
            more |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        text = delta.text
        if text or more:
            yield chunk(delta.index, {"content": text} if text else {}, **more)

    kind = "chat.completion.chunk"
    return stream(
        job, chunks, opening, lambda: _body(job, kind) | {"choices": [], "usage": job.usage()}
    )
