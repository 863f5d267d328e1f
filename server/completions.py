"""POST /v1/completions."""

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
from server.protocol import DEFAULT_MAX_TOKENS, MAX_PROMPTS, CompletionRequest


async def start(models: Models, request: CompletionRequest, request_id: str) -> Job:
    """Reads the prompts and sends them to the engine.

    Raises:
        ApiError: Naming what cannot be done.
    """
    request.check()
    model = models.find(request.model)
    is_given = request.max_tokens is not None
    max_tokens = request.max_tokens if is_given else DEFAULT_MAX_TOKENS
    if max_tokens is not None and max_tokens < 0:
        raise bad_request(f"max_tokens is {max_tokens}; it must be at least 0", "max_tokens")
    models.check_logprobs(model, "logprobs", request.logprobs)
    models.check_logprobs(model, "prompt_logprobs", request.prompt_logprobs)
    asked = request
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        asked = request.model_copy(update={"prompt_logprobs": request.logprobs})
    params = asked.sampling_params(model.defaults, max_tokens=max_tokens, logprobs=request.logprobs)
    given = _prompts(request)
    check_num_answers(len(given), params)
    bad_words = await models.encode_bad_words(model, request)
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    for text in texts:
        models.check_length(model, request, text, "prompt")
    encoded = iter(
        await models.encode(
            model, texts, add_special_tokens=request.add_special_tokens is not False
        )
    )
    prompts: list[tuple[str | None, list[int]]] = []
    for prompt in given:
        text, token_ids = (prompt, next(encoded)) if isinstance(prompt, str) else (None, prompt)
        token_ids = models.cut_prompt(model, request, token_ids, "prompt")
        if is_given:
            models.check_room(model, len(token_ids), max_tokens, "max_tokens")
        prompts.append((text, token_ids))
    job = Job(models, model, request, f"cmpl-{request_id}", int(time.time()), [], asyncio.Event())
    try:
        for text, token_ids in prompts:
            job.generations.append(
                models.submit(
                    model, request, token_ids, params,
                    request_id=job.response_id, bad_words=bad_words, news=job.news, prompt=text,
                )
            )  # fmt: skip
            await asyncio.sleep(0)  # others have their turn
    except BaseException:
        job.abort()
        raise
    return job


def _prompts(request: CompletionRequest) -> list[str] | list[list[int]]:
    prompt: Any = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt is empty; give a text or token ids", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"prompt has {len(prompt)} entries; it may have {MAX_PROMPTS}", "prompt")
    return prompt


async def answer(job: Job) -> dict[str, Any]:
    """The whole answer.

    Raises:
        ApiError: If a prompt was refused.
    """
    outputs = await job.outputs()
    choices = [
        _choice(job, position * job.num_choices + completion.index, output, completion)
        for position, output in enumerate(outputs)
        for completion in output.outputs
    ]
    return _body(job) | {"choices": choices, "usage": job.usage()}


def _body(job: Job) -> dict[str, Any]:
    return {
        "id": job.response_id,
        "object": "text_completion",
        "created": job.created,
        "model": job.name,
    }


def _writer(job: Job) -> LogprobWriter:
    request = job.request
    assert isinstance(request, CompletionRequest)
    as_ids = bool(request.return_tokens_as_token_ids)
    return LogprobWriter(job.model.tokenizer, request.logprobs or 0, as_ids=as_ids)


def _echoed(job: Job, output: RequestOutput) -> str:
    if output.prompt is not None:
        return output.prompt
    return job.model.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


def _choice(
    job: Job, index: int, output: RequestOutput, completion: CompletionOutput
) -> dict[str, Any]:
    request = job.request
    assert isinstance(request, CompletionRequest)
    text, token_ids = completion.text, list(completion.token_ids)
    described: list[Any] = list(completion.logprobs or ())
    if request.echo:
        text = _echoed(job, output) + text
        token_ids = output.prompt_token_ids + token_ids
        described = list(output.prompt_logprobs or ()) + described
    logprobs = None
    if request.logprobs is not None:
        logprobs = _writer(job).legacy(token_ids, described)
    choice = {"index": index, "text": text, "logprobs": logprobs, **choice_end(completion)}
    if request.prompt_logprobs is not None:
        choice["prompt_logprobs"] = describe_prompt_logprobs(output)
    if request.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice | _prompt_fields(job, output)


def _prompt_fields(job: Job, output: RequestOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if job.request.return_token_ids:
        fields["prompt_token_ids"] = output.prompt_token_ids
    if job.request.return_prompt_text:
        fields["prompt_text"] = _echoed(job, output)
    return fields


def events(job: Job) -> AsyncGenerator[bytes]:
    """The answer as a stream of events."""
    request = job.request
    assert isinstance(request, CompletionRequest)
    writers: dict[int, LogprobWriter] = {}
    begun: set[int] = set()

    def chunk(index: int, text: str, **more: Any) -> dict[str, Any]:
        entry = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if index not in begun:
            begun.add(index)
            generation = job.generations[index // job.num_choices]
            entry |= _prompt_fields(job, generation.group.output())
        return _body(job) | {"choices": [entry | more]}

    def opening() -> Iterator[dict[str, Any]]:
        if not request.echo:
            return
        for position, generation in enumerate(job.generations):
            output = generation.group.output()
            text = _echoed(job, output)
            for index in range(job.num_choices):
                index += position * job.num_choices
                more: dict[str, Any] = {}
                if request.logprobs is not None:
                    writer = writers[index] = _writer(job)
                    described = output.prompt_logprobs or ()
                    more["logprobs"] = writer.legacy(output.prompt_token_ids, described)
                yield chunk(index, text, **more)

    def chunks(position: int, delta: Delta) -> Iterator[dict[str, Any]]:
        index = position * job.num_choices + delta.index
        more: dict[str, Any] = {}
        if request.logprobs is not None and delta.token_ids:
            writer = writers.setdefault(index, _writer(job))
            described = writer.describe(delta.token_ids, delta.logprobs)
            more["logprobs"] = writer.legacy(delta.token_ids, described)
        if request.return_token_ids:
            more["token_ids"] = delta.token_ids
        if delta.finish_reason is not None:
            more |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if delta.text or more:
            yield chunk(index, delta.text, **more)

    return stream(job, chunks, opening, lambda: _body(job) | {"choices": [], "usage": job.usage()})
