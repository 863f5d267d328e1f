"""The oracle of the sampler: one row at a time, NumPy, float64, from each parameter's definition.

It shares no line with jpaged. The logits it gets are those of the known ids; padding of the
vocabulary does not exist here. What edits the logits comes in this order: `allowed_token_ids`,
`bad_words`, `min_tokens`, `logit_bias`, repetition, frequency and presence penalty; what shapes
the distribution in this one: temperature, `min_p`, `top_k`, `top_p`.

**Filters** are written as "how much is more likely than this token": `top_k` keeps a token if
fewer than k tokens are, `top_p` if their mass is below `top_p`, `min_p` if none is more than
`1 / min_p` times as likely. So equally likely tokens stay or go together.

**Draws** are races: the greatest ratio of weight to random number wins, first among chunks of 256
ids that weigh what their ids do together, then among the ids of the winner. The numbers come from
outside, since only their distribution is a matter of taste.

**Doubt.** A float32 sampler may rightly choose another token where a race is as good as a tie, or a
token at the threshold of a filter. `acceptable` and `bounds` give every right
answer: they apply the filters twice, with all doubts in favour of a token and with all against
it, and allow for what rounding can move. Two *twins*, tokens with the same logit before and after
the edits, leave no doubt: they are treated alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Mode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]

CHUNK = 256
# How far float32 sums over a row may be off, relative to the whole.
BORDER = 1e-5
# Relative rounding of a float32 result of a few operations.
ROUNDING = 2.0**-22


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request at one step; a field not given asks for nothing.

    Attributes:
        prompt_token_ids: Counted by the repetition penalty only.
        output_token_ids: The answer so far.
        bad_words: Sequences of ids that the answer must not contain.
        end_token_ids: All ids that `min_tokens` forbids.
        temperature: Greedy below 1e-5, as in vLLM.
        top_k: 1 is greedy too.
    """

    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    end_token_ids: Sequence[int] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken, of equals the one with the lowest id."""
        return self.temperature < 1e-5 or self.top_k == 1


def edited_logits(logits: np.ndarray, row: Row) -> np.ndarray:
    """What is sampled from before temperature and filters; -inf is excluded."""
    logits = np.array(logits, np.float64)
    ids = np.arange(len(logits))
    if row.allowed_token_ids is not None:
        logits[~np.isin(ids, row.allowed_token_ids)] = -np.inf
    num_output = len(row.output_token_ids)
    for *before, last in row.bad_words:
        if list(row.output_token_ids[max(num_output - len(before), 0) :]) == before:
            logits[last] = -np.inf
    if num_output < row.min_tokens:
        logits[list(row.end_token_ids)] = -np.inf
    for token_id, bias in (row.logit_bias or {}).items():
        logits[token_id] += bias

    counts = np.bincount(np.array(row.output_token_ids, int), minlength=len(logits))
    is_repeated = np.isin(ids, row.prompt_token_ids) | (counts > 0)
    penalty = row.repetition_penalty
    penalized = np.where(logits > 0, logits / penalty, logits * penalty)
    logits = np.where(is_repeated, penalized, logits)
    return logits - row.frequency_penalty * counts - row.presence_penalty * (counts > 0)


def processed_logits(logits: np.ndarray, row: Row) -> np.ndarray:
    """Edited logits over temperature, -inf where a filter excludes; a greedy row has neither."""
    edited = edited_logits(logits, row)
    if row.is_greedy:
        return edited
    return np.where(_is_kept(logits, edited, row, doubt=0), edited / row.temperature, -np.inf)


def distribution(logits: np.ndarray, row: Row) -> np.ndarray:
    """Probability of each id; all zero if every id is excluded."""
    processed = processed_logits(logits, row)
    if row.is_greedy:
        processed = np.where(np.arange(len(processed)) == np.argmax(processed), processed, -np.inf)
    return np.exp(log_softmax(processed))


def values(logits: np.ndarray, row: Row, mode: Mode) -> np.ndarray:
    """What is reported of each id under a `logprobs_mode`."""
    shown = processed_logits(logits, _shown_row(row, mode))
    return log_softmax(shown) if "logprobs" in mode else shown


def acceptable(logits: np.ndarray, row: Row, numbers: Callable[[int, int], np.ndarray]) -> set[int]:
    """Every id that a sampler in float32 may choose; one id where there is no doubt.

    Args:
        logits: Of the known ids.
        row: What is asked.
        numbers: The random numbers, exponentially distributed, from the first on, so many. That of
            an id has the id's number, that of a chunk its own and 2**31.
    """
    edited = edited_logits(logits, row)
    if not (edited > -np.inf).any():
        return {-1}
    if row.is_greedy:
        is_best = ~_is_beaten(logits, edited, row, doubt=1).any(axis=1)
        has_lower_twin = np.tril(_is_twin(logits, edited), -1).any(axis=1)
        return set(np.flatnonzero(is_best & ~has_lower_twin).tolist())
    doubt = _doubt(logits, row)
    slack = doubt.rounding + BORDER
    scaled = doubt.scaled - doubt.scaled.max()
    least = np.where(doubt.is_surely_kept, scaled - slack, -np.inf)
    most = np.where(doubt.is_kept, scaled + slack, -np.inf)
    chunks = [slice(start, start + CHUNK) for start in range(0, len(logits), CHUNK)]
    scores = -np.log(numbers(2**31, len(chunks)))
    best = max(_log_sum(least[c]) + s for c, s in zip(chunks, scores, strict=True))
    right: set[int] = set()
    for chunk, score in zip(chunks, scores, strict=True):
        if _log_sum(most[chunk]) + score < best:
            continue
        inside = -np.log(numbers(chunk.start, len(logits[chunk])))
        is_right = most[chunk] + inside >= max(least[chunk] + inside)
        is_right &= most[chunk] > -80.0  # what float32 takes for nothing beside the best
        right |= set((chunk.start + np.flatnonzero(is_right)).tolist())
    return right


def bounds(logits: np.ndarray, row: Row, mode: Mode) -> tuple[np.ndarray, np.ndarray]:
    """Least and greatest value that may rightly be reported of each id, in float32."""
    scaled, rounding, is_kept, is_surely_kept = _doubt(logits, _shown_row(row, mode))
    kept, surely_kept = (np.where(mask, scaled, -np.inf) for mask in (is_kept, is_surely_kept))
    slack = rounding + ROUNDING * np.abs(np.where(is_kept, scaled, 0.0))
    if "logprobs" not in mode:
        slack[scaled == logits] = 0.0
        return surely_kept - slack, kept + slack
    slack += BORDER + ROUNDING * np.abs(kept.max(initial=-1e300))
    slack += np.exp(log_softmax(kept)) @ np.minimum(rounding, 1.0)
    return surely_kept - _log_sum(kept) - slack, kept - _log_sum(surely_kept) + slack


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """-inf throughout if every logit is."""
    return logits - _log_sum(logits) if logits.max() > -np.inf else logits


def _log_sum(logits: np.ndarray) -> float:
    peak = max(logits.max(), -1e300)
    return peak + np.log(max(np.sum(np.exp(logits - peak)), 1e-300))


def _shown_row(row: Row, mode: Mode) -> Row:
    """Raw values are those of a row that asks for nothing."""
    return row if "processed" in mode else Row(temperature=0.0)


class _Doubt(NamedTuple):
    """What a float32 sampler may make of a row.

    Attributes:
        scaled: Edited logits over temperature.
        rounding: How far each may be off.
        is_kept: Which ids a sampler may keep.
        is_surely_kept: Which ids it must keep.
    """

    scaled: np.ndarray
    rounding: np.ndarray
    is_kept: np.ndarray
    is_surely_kept: np.ndarray


def _doubt(logits: np.ndarray, row: Row) -> _Doubt:
    edited = edited_logits(logits, row)
    return _Doubt(
        edited if row.is_greedy else edited / row.temperature,
        _rounding(logits, edited, row),
        _is_kept(logits, edited, row, doubt=1),
        _is_kept(logits, edited, row, doubt=-1),
    )


def _is_kept(logits: np.ndarray, edited: np.ndarray, row: Row, *, doubt: int) -> np.ndarray:
    """Whether each id passes the filters; `doubt` 1 keeps what is near a threshold, -1 does not."""
    is_kept = edited > -np.inf
    if row.is_greedy:
        return is_kept
    if row.min_p > 0.0:
        factor = np.log(row.min_p)
        is_kept &= ~_is_beaten(logits, edited, row, doubt=doubt, log_factor=factor).any(axis=1)
    is_beaten = _is_beaten(logits, edited, row, doubt=doubt)
    if row.top_k > 0:
        is_kept &= (is_beaten & is_kept).sum(axis=1) < row.top_k
    if row.top_p < 1.0:
        probs = np.exp(log_softmax(np.where(is_kept, edited / row.temperature, -np.inf)))
        is_kept &= is_beaten @ probs < row.top_p * (1 + doubt * BORDER)
    return is_kept


def _is_beaten(
    logits: np.ndarray, edited: np.ndarray, row: Row, *, doubt: int, log_factor: float = 0.0
) -> np.ndarray:
    """`[i, j]`: whether j, its probability times exp(`log_factor`), is more likely than i."""
    rounding = _rounding(logits, edited, row)
    slack = doubt * (rounding[:, None] + rounding[None, :])
    scaled = edited if row.is_greedy else edited / row.temperature
    is_more = scaled[None, :] + log_factor > scaled[:, None] + slack
    return is_more & ~_is_twin(logits, edited)


def _is_twin(logits: np.ndarray, edited: np.ndarray) -> np.ndarray:
    """`[i, j]`: whether any right sampler gives i and j the same probability."""
    return (logits[:, None] == logits[None, :]) & (edited[:, None] == edited[None, :])


def _rounding(logits: np.ndarray, edited: np.ndarray, row: Row) -> np.ndarray:
    """How far rounding may move each logit over temperature, relative to the greatest.

    A logit without edits is exact; before the division the greatest is subtracted.
    """
    is_finite = edited > -np.inf
    sizes = np.where(edited == logits, 0.0, 10.0 + np.abs(logits) + np.abs(edited))
    if row.is_greedy:
        return np.where(is_finite, ROUNDING * sizes, 0.0)
    distances = edited.max(initial=-1e300) - edited
    return np.where(is_finite, ROUNDING * (1.0 + (sizes + distances) / row.temperature), 0.0)
