"""What a caller may ask of one request.

Names, defaults and ranges are those of vLLM's `SamplingParams`. A field that vLLM has and
jpaged does not offer is not accepted, so nothing is ignored in silence.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

# Nothing needs more, and Python refuses to print an int of over 4300 digits.
_MAX_INT = 2**63 - 1
_MAX_N = 16384
_INT_RANGES = {
    "n": (1, _MAX_N),
    "best_of": (1, _MAX_N),
    "max_tokens": (0, _MAX_INT),
    "min_tokens": (0, _MAX_INT),
    "top_k": (-1, _MAX_INT),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (-1, _MAX_INT),
    "prompt_logprobs": (-1, _MAX_INT),
    "prompt_logprob_start": (0, _MAX_INT),
}
# (lowest, highest, whether the lowest itself is allowed)
_FLOAT_RANGES = {
    "temperature": (0.0, 2.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, 1e30, False),
}
_OPTIONAL = frozenset({"best_of", "max_tokens", "seed", "logprobs", "prompt_logprobs"})
_FLAGS = (
    "ignore_eos",
    "detokenize",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "skip_reading_prefix_cache",
)
_GENERATION_CONFIG_KEYS = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
_MAX_FLOAT32 = 3.4028234e38
_MAX_BIAS = 100.0
_MIN_TEMPERATURE = 1e-5  # below it, sampling is greedy, as in vLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt.

    NumPy's numbers are as good as Python's, and are kept as Python's. What edits the logits is
    applied in this order: `allowed_token_ids`, `bad_words`, `min_tokens`, `logit_bias`, the
    penalties, processors of the engine; then `temperature`, `min_p`, `top_k`, `top_p`.

    Attributes:
        n: Answers to return. They share the prompt's blocks; answer i is seeded `seed + i`.
        best_of: Answers to generate, of which the `n` with the greatest sum of log-probabilities
            are returned, best first; `None`: `n`.
        max_tokens: Tokens to generate at most. `None`: up to the engine's `max_model_len`. 0 only
            scores the prompt, and needs `prompt_logprobs`.
        min_tokens: Neither an id nor a string may end the answer before it has this many tokens.
        temperature: 0 (and all below 1e-5) is greedy; above it, logits are divided by it.
        top_k: Sample among the k most likely tokens; 0 or -1: all.
        top_p: Sample among the fewest tokens whose probabilities sum to `top_p`.
        min_p: Sample among tokens at least `min_p` times as likely as the most likely one.
        presence_penalty: Subtracted from the logit of each id that the answer holds.
        frequency_penalty: Subtracted as often as the answer holds the id.
        repetition_penalty: Divides the logit of each id in prompt or answer if it is above 0, else
            multiplies it.
        logit_bias: Id to a number from -100 to 100, added to its logit.
        allowed_token_ids: Only these ids may come; `None`: all.
        bad_words: Texts that the answer must not contain, at the beginning of a word or not: the id
            that would complete one is excluded.
        seed: The answer is a function of prompt, parameters and seed; `None` or -1: the engine
            draws one when the request is added.
        logprobs: Returns the log-probability of each chosen token and this many alternatives'; -1:
            the whole vocabulary's; `None`: nothing.
        prompt_logprobs: The same for each prompt token but the first, given those before it.
        prompt_logprob_start: Return them from prompt token `prompt_logprob_start + 1` on only. What
            stands before may then come from the cache.
        stop: Strings that end the answer, which is cut before them.
        stop_token_ids: Ids that end the answer, besides the model's end-of-sequence ids. As in
            vLLM, they may lie beyond the vocabulary, since one list serves several models.
        ignore_eos: Go on after the model's end-of-sequence ids.
        detokenize: Whether the answer has a text.
        include_stop_str_in_output: Keep the stop string at the end of the text.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Leave the spaces that the tokenizer's decoder puts between
            special tokens that stand next to each other.
        skip_reading_prefix_cache: Compute the whole prompt, even if its prefix is cached. What
            `prompt_logprobs` need is computed in any case.
        extra_args: Arguments of the engine's logits processors, by their names: a number, or a
            sequence of as many as the processor takes. A processor runs for those who name it.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[Any, Any] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    skip_reading_prefix_cache: bool = False
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, bounds in _INT_RANGES.items():
            if name not in _OPTIONAL or getattr(self, name) is not None:
                self._set(name, _whole_number(name, getattr(self, name), *bounds))
        for name, bounds in _FLOAT_RANGES.items():
            self._set(name, _number(name, getattr(self, name), *bounds))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _error(name, getattr(self, name), "must be True or False")
        self._set("stop", _texts("stop", self.stop))
        self._set("bad_words", _texts("bad_words", self.bad_words))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise _error(
                    "allowed_token_ids", self.allowed_token_ids, "must allow something, or be None"
                )
        if self.logit_bias is not None:
            self._set("logit_bias", _biases(self.logit_bias))
        if self.extra_args is not None:
            self._set("extra_args", _arguments(self.extra_args))
        if self.seed == -1:
            self._set("seed", None)
        self._check_together()

    def _check_together(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise _error("best_of", self.best_of, f"must be at least n, which is {self.n}")
        if self.num_samples > 1 and self.temperature < _MIN_TEMPERATURE:
            name = "n" if self.n > 1 else "best_of"
            raise _error(
                name,
                self.num_samples,
                "must be 1 at temperature 0, where all answers would be the same: raise the "
                "temperature",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _error(
                "min_tokens", self.min_tokens, f"must be at most max_tokens, {self.max_tokens}"
            )
        if self.max_tokens == 0 and (self.prompt_logprobs is None or self.num_samples > 1):
            raise _error(
                "max_tokens",
                0,
                "must be at least 1, except to score a prompt, with prompt_logprobs and n = 1",
            )
        if self.prompt_logprob_start and self.prompt_logprobs is None:
            raise _error(
                "prompt_logprob_start",
                self.prompt_logprob_start,
                "must be 0 without prompt_logprobs",
            )
        if self.stop and not self.detokenize:
            raise _error(
                "stop", self.stop, "must be empty where detokenize is False: there is no text then"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < _MIN_TEMPERATURE or self.top_k == 1

    @property
    def num_samples(self) -> int:
        """Answers to generate."""
        return self.n if self.best_of is None else self.best_of

    @property
    def has_penalties(self) -> bool:
        """Whether it matters which ids prompt and answer hold."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def has_biases(self) -> bool:
        """Whether some ids are excluded or favoured, at any time."""
        return (
            self.allowed_token_ids is not None
            or bool(self.logit_bias)
            or bool(self.bad_words)
            or self.min_tokens > 0
        )

    @property
    def num_logprobs(self) -> int | None:
        """`logprobs`, or 0 where those of the chosen tokens are needed though not asked for."""
        return 0 if self.logprobs is None and self.num_samples > self.n else self.logprobs


def read_generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` that a model brings defaults for, as vLLM reads them.

    Args:
        config: generation_config.json. What in it does not belong to sampling is passed over, and
            so is `do_sample`, as in vLLM.

    Raises:
        ValueError: If a value is out of range.
    """
    fields = {
        name: config[key]
        for key, name in _GENERATION_CONFIG_KEYS.items()
        if config.get(key) is not None
    }
    try:
        SamplingParams(**fields)
    except ValueError as error:
        raise ValueError(
            f"generation_config.json: {error}. Correct it with override_generation_config"
        ) from error
    return fields


def _whole_number(name: str, value: object, minimum: int, maximum: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise _error(name, value, "must be a whole number")
    if not minimum <= int(value) <= maximum:
        raise _error(name, value, f"must be between {minimum} and {maximum}")
    return int(value)


def _number(name: str, value: object, low: float, high: float, is_low_allowed: bool) -> float:
    number = _as_float(value)
    if not (low <= number if is_low_allowed else low < number) or not number <= high:
        range_text = f"from {low:g} to" if is_low_allowed else f"above {low:g} and at most"
        raise _error(name, value, f"must be a number {range_text} {high:g}")
    return number


def _as_float(value: object) -> float:
    """The value; NaN, which no range holds, for what is no number or too large for a float."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _texts(name: str, value: object) -> tuple[str, ...]:
    """A string or several as a tuple without repetitions."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)):
        raise _error(name, value, "must be a string, or a list or tuple of them")
    for text in value:
        if not isinstance(text, str) or not text:
            raise _error(name, text, "must be a string that is not empty", is_entry=True)
    return tuple(dict.fromkeys(value))


def _ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if hasattr(value, "tolist"):  # an array
        value = value.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(value, (list, tuple)):
        raise _error(name, value, "must be a list or tuple of ids")
    return tuple(dict.fromkeys(_id(name, token_id) for token_id in value))


def _id(name: str, value: object) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) <= _MAX_INT:
        return int(value)
    raise _error(name, value, f"must be an id from 0 to {_MAX_INT}", is_entry=True)


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _error("logit_bias", value, "must map ids to numbers")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # JSON has no whole numbers as keys.
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token_id = _id("logit_bias", int(key) if digits else key)
        if token_id in biases:
            raise _error("logit_bias", {key: bias}, "must have an id of its own", is_entry=True)
        number = _as_float(bias)
        if not -_MAX_BIAS <= number <= _MAX_BIAS:
            raise _error(
                "logit_bias",
                {token_id: bias},
                f"must have a value from {-_MAX_BIAS:g} to {_MAX_BIAS:g}",
                is_entry=True,
            )
        biases[token_id] = number
    return biases


def _arguments(value: object) -> dict[str, tuple[float, ...]]:
    if not isinstance(value, Mapping):
        raise _error("extra_args", value, "must map names of logits processors to numbers")
    arguments: dict[str, tuple[float, ...]] = {}
    for name, entry in value.items():
        entry = entry.tolist() if hasattr(entry, "tolist") else entry
        numbers = tuple(map(_as_float, entry if isinstance(entry, (list, tuple)) else (entry,)))
        if not isinstance(name, str) or not all(abs(x) <= _MAX_FLOAT32 for x in numbers):
            raise _error(
                "extra_args",
                {name: entry},
                "must be a name with a number that float32 can hold, or a sequence of them",
                is_entry=True,
            )
        arguments[name] = numbers
    return arguments


def _error(name: str, value: object, rule: str, *, is_entry: bool = False) -> ValueError:
    try:
        text = reprlib.repr(value)
    except ValueError:  # an int of over 4300 digits
        text = "a number of thousands of digits"
    said, subject = ("holds", "each entry") if is_entry else ("is", "it")
    return ValueError(f"SamplingParams.{name} {said} {text}; {subject} {rule}")
