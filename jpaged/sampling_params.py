"""What a caller may ask of one request.

Names, defaults and ranges are those of vLLM's `SamplingParams`. A field that vLLM has and
jpaged does not offer yet is not accepted, so nothing is ignored in silence.
"""

import math
import reprlib
from dataclasses import dataclass
from numbers import Integral, Real

# Nothing needs more, and Python refuses to print an int of over 4300 digits.
_MAX_INT = 2**63 - 1
_INT_RANGES = {
    "max_tokens": (1, _MAX_INT),
    "top_k": (-1, _MAX_INT),
    "seed": (-(2**63), 2**64 - 1),
}
_OPTIONAL = frozenset({"max_tokens", "seed"})
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt.

    NumPy's numbers are as good as Python's, and are kept as Python's.

    Attributes:
        max_tokens: Tokens to generate at most. `None`: up to the engine's `max_model_len`.
        temperature: 0 is greedy; above it, logits are divided by it.
        top_k: Sample among the k most likely tokens; 0 or -1: all.
        top_p: Sample among the fewest tokens whose probabilities sum to `top_p`.
        seed: The answer is a function of prompt, parameters and seed; `None`: the engine
            draws one when the request is added.
        logprobs: 0 or 1 returns the log-probability of each chosen token (of the model's own
            distribution, before temperature and filters); `None`: not returned.
        stop: Strings that end the answer, which is cut before them.
        stop_token_ids: Ids that end the answer, besides the model's end-of-sequence ids.
        ignore_eos: Go on after the model's end-of-sequence ids.
        include_stop_str_in_output: Keep the stop string at the end of the text.
        skip_special_tokens: Leave special tokens out of the text.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, (minimum, maximum) in _INT_RANGES.items():
            if name in _OPTIONAL and getattr(self, name) is None:
                continue
            value = getattr(self, name)
            if not _is_integer(value):
                raise _error(name, value, "must be a whole number")
            if not minimum <= value <= maximum:
                raise _error(name, value, f"must be between {minimum} and {maximum}")
            object.__setattr__(self, name, int(value))
        temperature, top_p = _as_float(self.temperature), _as_float(self.top_p)
        if not 0.0 <= temperature < math.inf:
            raise _error("temperature", self.temperature, "must be a finite number from 0 up")
        if not 0.0 < top_p <= 1.0:
            raise _error("top_p", self.top_p, "must be a number above 0 and at most 1")
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "top_p", top_p)
        if self.logprobs is not None:
            if not _is_integer(self.logprobs) or self.logprobs not in (0, 1):
                raise _error(
                    "logprobs",
                    self.logprobs,
                    "must be 0 or 1 (the chosen token's log-probability): alternatives are not "
                    "offered yet",
                )
            object.__setattr__(self, "logprobs", int(self.logprobs))
        if not isinstance(self.stop, (str, list, tuple)):
            raise _error("stop", self.stop, "must be a string, or a list or tuple of them")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise _error("stop", text, "must be a string, not ''", is_entry=True)
        object.__setattr__(self, "stop", stop)
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise _error("stop_token_ids", self.stop_token_ids, "must be a list or tuple of ids")
        for token_id in self.stop_token_ids:
            if not _is_integer(token_id) or not 0 <= token_id <= _MAX_INT:
                raise _error(
                    "stop_token_ids", token_id, f"must be an id from 0 to {_MAX_INT}", is_entry=True
                )
        object.__setattr__(self, "stop_token_ids", tuple(map(int, self.stop_token_ids)))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _error(name, getattr(self, name), "must be True or False")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _as_float(value: object) -> float:
    """The value; NaN, which no range holds, for what is no number or too large for a float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _error(name: str, value: object, rule: str, *, is_entry: bool = False) -> ValueError:
    try:
        text = reprlib.repr(value)
    except ValueError:  # an int of over 4300 digits
        text = "a number of thousands of digits"
    said, subject = ("holds", "each entry") if is_entry else ("is", "it")
    return ValueError(f"SamplingParams.{name} {said} {text}; {subject} {rule}")
