"""The nouns that cross folders: one request, and one step's decisions.

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

NO_TOKEN = -1
"""Sampled where there is no token: all are excluded, the logits are not finite, none is wanted."""

NO_LIMIT = 2**63 - 1
"""More than there can be."""


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
    ERROR = "error"


class TokenLogprobs(NamedTuple):
    """Log-probability of one token, and of the most likely ones in its place.

    Attributes:
        logprob: Of the token.
        rank: Its place among all, 1 for the most likely.
        top_ids: The most likely ids, best first, as many as were asked for.
        top_logprobs: Theirs.
    """

    logprob: float
    rank: int
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


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
        end_token_ids: Ids that may not come before `params.min_tokens`: all stop ids, and
            end-of-sequence ids even if they are ignored, as in vLLM.
        bad_words: Ids of each text that the answer must not contain.
        forks: The other answers to the same prompt, which share its blocks.
        seed: Resolved seed, an unsigned 64-bit number.
        priority: Lower runs first under the "priority" policy.
        cache_salt: Requests share cached blocks only if their salts are equal.
        arrival_time: `time.monotonic()` seconds.
        scheduled_time: When it was first admitted, `time.monotonic()` seconds; 0 before.
        token_ids: Prompt and answer so far.
        logprobs: One per answer token where `params` ask for it.
        prompt_logprobs: Entry i is that of prompt token `params.prompt_logprob_start + 1 + i`.
        max_cached_tokens: Tokens that may be read from the cache at most; the others must be
            computed, since something is wanted of them.
        num_computed_tokens: Tokens whose K and V are in the cache.
        num_cached_tokens: Prompt tokens found in the cache when first admitted.
        num_preemptions: How often all its blocks were taken away.
        max_num_tokens: Prompt and answer at most, what `max_tokens` and the engine's limit leave;
            set when it is queued.
        num_logprobs: `params.num_logprobs`.
        row: Row in the block-table array while it runs, else -1.
        finish_reason: Set when it ends.
        stop_reason: The stop id or string that ended it, `None` for an end-of-sequence id.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 16
    stop_token_ids: frozenset[int] = frozenset()
    end_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    priority: int = 0
    cache_salt: str = ""
    arrival_time: float = field(default_factory=time.monotonic)

    scheduled_time: float = 0.0
    status: Status = Status.WAITING
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    forks: list["Request"] = field(default_factory=list["Request"])
    max_cached_tokens: int = NO_LIMIT
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    max_num_tokens: int = 0
    row: int = -1
    num_logprobs: int | None = field(init=False)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.num_logprobs = self.params.num_logprobs  # read at every step
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
    def token_logprobs(self) -> list[float]:
        """Log-probability of each answer token, where they are asked for."""
        return [entry.logprob for entry in self.logprobs]

    @property
    def num_unscored_tokens(self) -> int:
        """Prompt tokens whose log-probabilities are asked for and not there yet."""
        params = self.params
        if params.prompt_logprobs is None:
            return 0
        num_scored = params.prompt_logprob_start + len(self.prompt_logprobs)
        return max(0, self.num_prompt_tokens - 1 - num_scored)

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


StepOutput = tuple[Request, list[int], Sequence[TokenLogprobs]]
"""What one step brought one request: (the request, its new ids, their log-probabilities).

The engine's own unit, in token ids only. The request's state is final when it `is_finished`;
log-probabilities are empty if not asked for. A plain tuple, because a named one takes twice as
long to make, once per request and step (docs/decisions/011).
"""
