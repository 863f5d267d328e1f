"""What the sampler keeps of each request between steps: ids it holds, biases on its logits.

Both are arrays on the device with one line per block-table row, and only lines of requests that
ask for them mean anything. A line is written whole when a request takes its row or its biases
change, which is rare; what changes at every step, the count of the id just sampled, is added by
the step itself. So a step costs the same however long the requests are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from jpaged.request import Request

IN_PROMPT = 1 << 30
"""Set in an id's count if the prompt holds it."""


class SamplingState(NamedTuple):
    """One line per block-table row (R of them).

    Attributes:
        counts: How often the answer holds each id, plus `IN_PROMPT` if the prompt does.
        biases: Added to the logits; -inf excludes an id.
    """

    counts: Int[Array, "R V"]
    biases: Float[Array, "R V"]


def allocate(num_rows: int, vocab_size: int) -> SamplingState:
    """Makes the arrays; no line means anything yet."""
    shape = (num_rows, vocab_size)
    return SamplingState(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


def num_bytes(num_rows: int, vocab_size: int) -> int:
    """Size of the arrays."""
    return num_rows * vocab_size * (4 + 4)


def set_line(array: Array, row: Int[Array, ""], line: Array) -> Array:
    """Replaces one line; the array is to be donated."""
    return array.at[row].set(line, mode="promise_in_bounds")


def build_counts(request: Request, vocab_size: int) -> Int32[np.ndarray, " V"]:
    """The line of `counts` of a request as it is now."""
    line = np.bincount(request.output_token_ids, minlength=vocab_size).astype(np.int32)
    line[request.prompt_token_ids] |= IN_PROMPT
    return line


class BiasLine:
    """The line of `biases` of one request, which changes with the request's answer.

    What stays is `allowed_token_ids`, `logit_bias` and bad words of a single id. Stop ids are
    excluded until the answer has `min_tokens` ids, and the last id of a longer bad word whenever
    the answer ends with those before it.
    """

    def __init__(self, request: Request, vocab_size: int):
        params = request.params
        line = np.zeros(vocab_size, np.float32)
        if params.allowed_token_ids is not None:
            line[:] = -np.inf
            line[list(params.allowed_token_ids)] = 0.0
        for token_id, bias in (params.logit_bias or {}).items():
            line[token_id] += bias
        line[[word[0] for word in request.bad_words if len(word) == 1]] = -np.inf
        self._fixed = line
        self._request = request
        self._long_words = [word for word in request.bad_words if len(word) > 1]
        self._excluded: frozenset[int] | None = None

    @property
    def may_change(self) -> bool:
        """Whether `update` has anything to do from now on."""
        return bool(self._long_words) or self._is_too_short

    @property
    def _is_too_short(self) -> bool:
        return self._request.num_output_tokens < self._request.params.min_tokens

    def update(self) -> Float32[np.ndarray, " V"] | None:
        """The line for the request's next token, or `None` if it is the same as last time."""
        excluded: set[int] = set()
        if self._is_too_short:
            excluded |= self._request.end_token_ids
        for *beginning, last in self._long_words:
            if _ends_with(self._request, beginning):
                excluded.add(last)
        if excluded == self._excluded:
            return None
        self._excluded = frozenset(excluded)
        line = self._fixed.copy()
        line[list(excluded)] = -np.inf
        return line


def _ends_with(request: Request, token_ids: Sequence[int]) -> bool:
    """Whether a request's answer, without the prompt, ends with these ids."""
    count = len(token_ids)
    return request.num_output_tokens >= count and request.token_ids[-count:] == token_ids
