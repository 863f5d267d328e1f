"""What completions and chats have in common: from generations to choices, usage and streams."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jpaged.answers import describe_logprobs
from jpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.request import TokenLogprobs
from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer
from server.errors import ApiError, bad_request, internal_error
from server.generation import Delta, Generation, read
from server.models import Models, ServedModel
from server.protocol import GenerationRequest

MAX_ANSWERS = 4096  # of one request
DONE = b"data: [DONE]\n\n"


@dataclass
class Job:
    """One request that was understood: its prompts are in the engine.

    Attributes:
        models: To abort with.
        model: That answers.
        request: What was asked.
        response_id: Of the answer, "cmpl-..." or "chatcmpl-...".
        created: Seconds since 1970.
        generations: One for each prompt.
        news: Set when there is something new of any.
    """

    models: Models
    model: ServedModel
    request: GenerationRequest
    response_id: str
    created: int
    generations: list[Generation]
    news: asyncio.Event

    @property
    def name(self) -> str:
        """What the answer calls the model: as the request did."""
        return self.request.model or self.model.name

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return self.generations[0].request.params.n

    def abort(self) -> None:
        """Ends what is unfinished."""
        for generation in self.generations:
            self.models.client.abort(self.model.index, generation)

    async def outputs(self) -> list[RequestOutput]:
        """Waits for all answers.

        Raises:
            ApiError: If a prompt was refused, or an answer ended in an error.
        """
        async for _ in read(self.generations, self.news):
            pass
        outputs = [generation.group.output() for generation in self.generations]
        for output in outputs:
            for completion in output.outputs:
                if completion.finish_reason == "error":
                    raise internal_error(_ERROR)
        return outputs

    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt counts once, however many answers it has."""
        requests = [generation.request for generation in self.generations]
        num_prompt = sum(request.num_prompt_tokens for request in requests)
        num_output = sum(
            answer.request.num_output_tokens
            for generation in self.generations
            for answer in generation.group.answers
        )
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {
                "cached_tokens": sum(request.num_cached_tokens for request in requests)
            },
        }


def check_num_answers(num_prompts: int, params: SamplingParams) -> None:
    """Refuses a request that alone would keep the server busy.

    Raises:
        ApiError: Naming `n`.
    """
    num_answers = num_prompts * params.num_samples
    if num_answers > MAX_ANSWERS:
        raise bad_request(
            f"n is {params.num_samples} for {num_prompts} prompts, {num_answers} answers; one "
            f"request may ask for {MAX_ANSWERS}: send several",
            "n",
        )


_ERROR = "the model gave no token that may come: its logits are not finite, or all were excluded"


class Interval:
    """Merges the deltas of an answer until it has `stream_interval` tokens or has ended."""

    def __init__(self, num_tokens: int):
        """Passes on deltas of at least so many tokens."""
        self._num_tokens = num_tokens
        self._held: dict[tuple[int, int], Delta] = {}

    def pass_on(self, prompt: int, delta: Delta) -> Delta | None:
        """What may be sent now."""
        if self._num_tokens <= 1:
            return delta
        key = (prompt, delta.index)
        held = self._held.pop(key, None)
        if held is not None:
            delta.pieces[:0] = held.pieces
            delta.token_ids[:0] = held.token_ids
            delta.logprobs[:0] = held.logprobs
        if delta.finish_reason is None and len(delta.token_ids) < self._num_tokens:
            self._held[key] = delta
            return None
        return delta


async def stream(
    job: Job,
    chunks: Callable[[int, Delta], Iterator[dict[str, Any]]],
    opening: Callable[[], Iterator[dict[str, Any]]],
    usage_chunk: Callable[[], dict[str, Any]],
) -> AsyncGenerator[bytes]:
    """The events of a stream; its first comes when the engine has taken the prompts.

    Args:
        job: What is answered.
        chunks: From a delta of a prompt to chunks.
        opening: Chunks before all others.
        usage_chunk: The last, if it is wanted.

    Raises:
        ApiError: If that happens before the first event; later it is an event itself.
    """
    options = job.request.stream_options
    interval = Interval(max(job.model.stream_interval, job.request.stream_interval or 1))
    includes_usage = job.model.always_includes_usage or (options and options.include_usage)
    has_begun = False
    try:
        async for found in read(job.generations, job.news):
            events: list[bytes] = []
            if not has_begun:
                events += map(to_event, opening())
                has_begun = True
            for prompt, delta in found:
                if delta.finish_reason == "error":
                    raise internal_error(_ERROR)
                ready = interval.pass_on(prompt, delta)
                if ready is None:
                    continue
                for chunk in chunks(prompt, ready):
                    if options is not None and options.continuous_usage_stats:
                        chunk["usage"] = job.usage()
                    events.append(to_event(chunk))
            if events:
                yield b"".join(events)
        if includes_usage:
            yield to_event(usage_chunk())
    except ApiError as error:
        if not has_begun:
            raise
        yield to_event(error.body)
    finally:
        job.abort()
    yield DONE


def to_event(chunk: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(chunk) + b"\n\n"


def to_json(value: Any) -> bytes:
    """As short as it can be; what is no character is replaced."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="replace")


class LogprobWriter:
    """Log-probabilities of one choice in the two forms of OpenAI's API, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, num_alternatives: int, *, as_ids: bool):
        """Writes so many alternatives of each token; `as_ids`: tokens as "token_id:N"."""
        self._tokenizer = tokenizer
        self._num_alternatives = num_alternatives
        self._as_ids = as_ids
        self._offset = 0

    def describe(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> list[dict[int, Logprob] | None]:
        """Of tokens as the engine has given them."""
        pairs = zip(token_ids, entries, strict=True)
        return [describe_logprobs(token_id, entry, self._tokenizer) for token_id, entry in pairs]

    def _token(self, token_id: int, entry: Logprob) -> str:
        return f"token_id:{token_id}" if self._as_ids else entry.decoded_token or ""

    def legacy(
        self, token_ids: Sequence[int], described: Sequence[dict[int, Logprob] | None]
    ) -> dict[str, Any]:
        """As /v1/completions gives them; the first token of a prompt has none."""
        tokens: list[str] = []
        offsets: list[int] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, entries in zip(token_ids, described, strict=True):
            if entries is None:
                text = self._tokenizer.token_text(token_id)
                tokens.append(f"token_id:{token_id}" if self._as_ids else text)
                values.append(None)
                tops.append(None)
            else:
                chosen = entries[token_id]
                text = chosen.decoded_token or ""
                tokens.append(self._token(token_id, chosen))
                values.append(finite(chosen.logprob))
                tops.append(
                    {
                        self._token(other, entry): finite(entry.logprob)
                        for other, entry in self._best(entries, token_id)
                    }
                )
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": tops if self._num_alternatives else None,
        }

    def chat(
        self, token_ids: Sequence[int], described: Sequence[dict[int, Logprob] | None]
    ) -> dict[str, Any]:
        """As /v1/chat/completions gives them."""
        content: list[dict[str, Any]] = []
        for token_id, entries in zip(token_ids, described, strict=True):
            assert entries is not None
            content.append(
                self._chat_entry(token_id, entries[token_id])
                | {
                    "top_logprobs": [
                        self._chat_entry(other, entry) for other, entry in self._best(entries, None)
                    ]
                }
            )
        return {"content": content, "refusal": None}

    def _chat_entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        return {
            "token": self._token(token_id, entry),
            "logprob": finite(entry.logprob),
            "bytes": None if entry.token_bytes is None else list(entry.token_bytes),
        }

    def _best(self, entries: dict[int, Logprob], chosen: int | None) -> list[tuple[int, Logprob]]:
        """The best, and the chosen one if it is to be among them and is not."""
        count = self._num_alternatives
        ranked = sorted(entries.items(), key=lambda item: item[1].rank or 0)
        return [
            (token_id, entry)
            for token_id, entry in ranked
            if count < 0 or (entry.rank or 0) <= count or token_id == chosen
        ]


def finite(logprob: float) -> float:
    """JSON has no infinity; vLLM writes this instead."""
    return max(logprob, -9999.0)


def describe_prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs` of vLLM's answers."""
    if output.prompt_logprobs is None:
        return None
    described: list[dict[str, Any] | None] = []
    for entries in output.prompt_logprobs:
        if entries is None:
            described.append(None)
            continue
        described.append(
            {
                str(token_id): {
                    "logprob": finite(entry.logprob),
                    "rank": entry.rank,
                    "decoded_token": entry.decoded_token,
                }
                for token_id, entry in entries.items()
            }
        )
    return described


def choice_end(completion: CompletionOutput) -> dict[str, Any]:
    """What ends a choice."""
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
