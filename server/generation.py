"""One prompt on its way through the engine process, and what came of it so far."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from jpaged.answers import AnswerGroup
from jpaged.request import FinishReason, Request, Status, TokenLogprobs
from jpaged.text.tokenizer import Tokenizer
from server.errors import ApiError
from server.messages import FirstToken, Tokens


@dataclass(slots=True)
class Delta:
    """What is new of one answer.

    Attributes:
        index: Which of the answers to the prompt.
        pieces: New text.
        token_ids: New ids.
        logprobs: Theirs, if asked for.
        finish_reason: With the last delta: "stop", "length", "abort" or "error".
        stop_reason: What ended it, if a stop id or string did.
    """

    index: int
    pieces: list[str]
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """New text."""
        return "".join(self.pieces)


@dataclass
class Times:
    """Moments of a prompt, `time.monotonic()` seconds; 0: not yet.

    Attributes:
        arrival: When it was handed to the engine process.
        scheduled: When its first step began.
        first_token: When its first token came back.
        last_token: When its latest did.
        intervals: Seconds between tokens of an answer, not yet observed.
        is_counted: Whether the first token was.
    """

    arrival: float = field(default_factory=time.monotonic)
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    intervals: list[float] = field(default_factory=list[float])
    is_counted: bool = False


class Generation:
    """All answers to one prompt.

    The engine process deals in ids; here they become text, and a stop string is looked for as soon
    as they come, whether the client reads or not. What a slow client has not read yet is merged
    into one delta an answer, so that it holds no more than the answers themselves.

    Attributes:
        group: Requests like the engine's own, and their texts.
        times: For metrics.
        ids: Of the unfinished answers.
        trace_headers: Of the request that brought it, for a trace.
    """

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer, news: asyncio.Event
    ):
        """Takes a request with its forks, as `Engine.add_request` makes them.

        Generations that one client reads together share `news`.
        """
        self.group = AnswerGroup(0, prompt, request, tokenizer)
        self.times = Times()
        self.trace_headers: Mapping[str, str] = {}
        self._last_times = [0.0] * len(self.group.answers)
        self.ids = {
            answer.request.request_id: index for index, answer in enumerate(self.group.answers)
        }
        self._pending: dict[int, Delta] = {}
        self._error: ApiError | None = None
        self._news = news

    @property
    def request(self) -> Request:
        """That of the first answer."""
        return self.group.request

    @property
    def is_finished(self) -> bool:
        """Whether all answers have ended, for whatever reason."""
        return not self.ids

    def take(self, tokens: Tokens, now: float) -> str | None:
        """Takes what a step brought one answer; returns the stop string if that ends it."""
        index = self.ids[tokens.request_id]
        answer = self.group.answers[index]
        request = answer.request
        if tokens.first is not None:
            self._take_first(request, tokens.first, now)
        if tokens.token_ids:
            if self._last_times[index]:
                self.times.intervals.append(now - self._last_times[index])
            self._last_times[index] = self.times.last_token = now
        request.token_ids += tokens.token_ids
        request.logprobs += tokens.logprobs
        if tokens.finish_reason is not None:
            request.status = Status.FINISHED
            request.finish_reason, request.stop_reason = tokens.finish_reason, tokens.stop_reason
        text = answer.add(tokens.token_ids)
        found = answer.stop_reason if not request.is_finished else None
        if found is not None:
            request.status, request.finish_reason = Status.FINISHED, FinishReason.STOP
        if request.is_finished:
            del self.ids[tokens.request_id]
        self._add_delta(index, text, tokens)
        return found

    def _take_first(self, request: Request, first: FirstToken, now: float) -> None:
        request.num_cached_tokens = first.num_cached_tokens
        request.prompt_logprobs += first.prompt_logprobs
        if not self.times.first_token:
            self.times.first_token = now
            self.times.scheduled = first.scheduled_time

    def _add_delta(self, index: int, text: str, tokens: Tokens) -> None:
        delta = self._pending.get(index)
        if delta is None:
            delta = self._pending[index] = Delta(index, [], [], [])
        if text:
            delta.pieces.append(text)
        delta.token_ids += tokens.token_ids
        delta.logprobs += tokens.logprobs
        answer = self.group.answers[index]
        if answer.request.is_finished:
            delta.finish_reason = answer.finish_reason
            delta.stop_reason = answer.final_stop_reason

    def end(self, reason: FinishReason) -> None:
        """Ends what is unfinished, as it is."""
        now = time.monotonic()
        for request_id in list(self.ids):
            self.take(Tokens(request_id, [], (), reason), now)

    def fail(self, error: ApiError) -> None:
        """Ends it with an error, which whoever reads it gets."""
        self._error = error
        self.ids.clear()

    def wake(self) -> None:
        """Lets the reader see what is new."""
        self._news.set()

    def new_deltas(self) -> list[Delta]:
        """What is new, one delta at most for each answer.

        Raises:
            ApiError: If the prompt was refused or the engine failed.
        """
        if self._error is not None:
            raise self._error
        pending, self._pending = self._pending, {}
        return list(pending.values())


async def read(
    generations: Sequence[Generation], news: asyncio.Event
) -> AsyncIterator[list[tuple[int, Delta]]]:
    """Yields what is new, each with the index of its generation, until all have ended.

    Raises:
        ApiError: If a prompt was refused or the engine failed.
    """
    open_ones = dict(enumerate(generations))
    while open_ones:
        await news.wait()
        news.clear()
        found: list[tuple[int, Delta]] = []
        for index, generation in list(open_ones.items()):
            is_finished = generation.is_finished
            found += [(index, delta) for delta in generation.new_deltas()]
            if is_finished:
                del open_ones[index]
        if found:
            yield found
