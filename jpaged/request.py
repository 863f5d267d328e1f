"""The nouns that cross folders: one request, one step's decisions, one answer.

There is one `Request` object from admission to the end, changed only by the scheduler. There is
no prefill and no decode phase: a request has `num_tokens` and `num_computed_tokens`, and each
step lets some requests catch up.
"""

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jpaged.sampling_params import SamplingParams


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended; the words of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One prompt on its way to an answer.

    Invariant: `0 <= num_computed_tokens <= num_tokens`.

    Attributes:
        request_id: Unique among unfinished requests.
        prompt_token_ids: Not empty.
        params: What the caller asked.
        max_tokens: Answer tokens at most, resolved against the engine's limit.
        stop_token_ids: Ids that end the answer (end-of-sequence ids included unless ignored).
        seed: Resolved seed, an unsigned 64-bit number.
        priority: Lower runs first under the "priority" policy.
        cache_salt: Requests share cached blocks only if their salts are equal.
        arrival_time: `time.monotonic()` seconds.
        token_ids: Prompt and answer so far.
        logprobs: One per answer token when `params.logprobs` asks for it.
        num_computed_tokens: Tokens whose K and V are in the cache.
        num_cached_tokens: Prompt tokens found in the cache when first admitted.
        num_preemptions: How often all its blocks were taken away.
        max_num_tokens: Prompt and answer at most, what `max_tokens` and the engine's limit leave;
            set when it is queued.
        row: Row in the block-table array while it runs, else -1.
        finish_reason: Set when it ends.
        stop_reason: The stop id or string that ended it, `None` for an end-of-sequence id.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 16
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    priority: int = 0
    cache_salt: str = ""
    arrival_time: float = field(default_factory=time.monotonic)

    status: Status = Status.WAITING
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    max_num_tokens: int = 0
    row: int = -1
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and answer tokens so far."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Answer tokens so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Answer tokens so far, as a new list."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for any reason."""
        return self.status is Status.FINISHED


class ScheduledRequest(NamedTuple):
    """One request's share of a step.

    The step computes `request.token_ids[start : start + num_tokens]`; it samples a next token
    iff that reaches the last token the request has.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool


class SchedulerOutput(NamedTuple):
    """What one step computes.

    Attributes:
        scheduled: Requests with their token ranges, in row order.
        num_tokens: Sum over `scheduled`, before padding.
        preempted: Requests whose blocks were taken away to make room.
        copies: (source, destination) block ids to copy before the step writes.
    """

    scheduled: list[ScheduledRequest]
    num_tokens: int
    preempted: list[Request]
    copies: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt; names as in vLLM.

    Attributes:
        index: Which of the answers to the prompt.
        text: The answer's text; cut at a stop string.
        token_ids: The answer's ids.
        logprobs: Log-probability of each id, if asked for.
        cumulative_logprob: Their sum, if asked for.
        finish_reason: "stop", "length", "abort", or `None` while unfinished.
        stop_reason: The stop id or string that ended it, if one did.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt with its answers; names as in vLLM.

    Attributes:
        request_id: The request's id.
        prompt: The prompt's text, if it was given as text.
        prompt_token_ids: The prompt's ids.
        outputs: The answers.
        finished: Whether all of them have ended.
        num_cached_tokens: Prompt tokens that were read from the cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0


StepOutput = tuple[Request, list[int], Sequence[float]]
"""What one step brought one request: (the request, its new ids, their log-probabilities).

The engine's own unit, in token ids only. The request's state is final when it `is_finished`;
log-probabilities are empty if not asked for. A plain tuple, because a named one takes twice as
long to make, once per request and step (docs/decisions/011).
"""
