"""What a caller gets back. Names are vLLM's where there is a counterpart."""

import math
from dataclasses import dataclass
from typing import NamedTuple


class Logprob(NamedTuple):
    """Log-probability of one id in its place; names as in vLLM.

    Attributes:
        logprob: Natural logarithm of its probability.
        rank: Its place among all ids, 1 for the most likely.
        decoded_token: Its text; an incomplete character is U+FFFD. `None` without a tokenizer.
        token_bytes: What it adds to the text, also where that is a part of a character.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    token_bytes: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt; names as in vLLM.

    Attributes:
        index: Which of the answers to the prompt.
        text: The answer's text; cut at a stop string.
        token_ids: The answer's ids.
        logprobs: For each id, its log-probability and those of the alternatives by their ids, the
            best first after the id itself; if asked for.
        cumulative_logprob: Sum over the ids of the answer, if asked for or needed to choose it.
        finish_reason: "stop", "length", "abort", "error", or `None` while unfinished.
        stop_reason: The stop id or string that ended it, if one did; or what the error was.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def token_logprobs(self) -> list[float] | None:
        """Log-probability of each id of the answer, if asked for."""
        if self.logprobs is None:
            return None
        return [
            entry[token_id].logprob
            for token_id, entry in zip(self.token_ids, self.logprobs, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt with its answers; names as in vLLM.

    Attributes:
        request_id: The request's id.
        prompt: The prompt's text, if it was given as text.
        prompt_token_ids: The prompt's ids.
        outputs: The answers.
        finished: Whether all of them have ended.
        prompt_logprobs: For each id of the prompt, as `CompletionOutput.logprobs`; `None` for the
            first and where none is asked for.
        num_cached_tokens: Prompt tokens that were read from the cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOutput:
    """Log-probabilities of a given completion.

    Attributes:
        prompt_token_ids: What stands before it.
        token_ids: The completion.
        logprobs: Of each of its ids, given all before.
        ranks: Their places among all ids, 1 for the most likely.
        num_cached_tokens: Tokens before it that were read from the cache.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    num_cached_tokens: int = 0

    @property
    def sum(self) -> float:
        """Log-probability of the whole completion."""
        return math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy sampling would have given the completion (equals count as the best)."""
        return not math.isnan(self.sum) and all(rank == 1 for rank in self.ranks)
