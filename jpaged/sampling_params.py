"""What a caller may ask of one request.

Names, defaults and ranges are those of vLLM's `SamplingParams`. A field that vLLM has and
jpaged does not offer yet is not accepted, so nothing is ignored in silence.
"""

import math
from dataclasses import dataclass

from jpaged.config import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt.

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
        owner = "SamplingParams"
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise ValueError(f"{owner}.{name} is {value!r}; it must be of type {wanted}")
        for name in ("temperature", "top_p"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{owner}.{name} is {getattr(self, name)!r}; it must be finite")
        check_range(owner, "max_tokens", self.max_tokens, minimum=1)
        check_range(owner, "temperature", self.temperature, minimum=0.0)
        check_range(owner, "top_k", self.top_k, minimum=-1)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"{owner}.top_p is {self.top_p!r}; it must be above 0 and at most 1")
        check_range(owner, "seed", self.seed, minimum=-(2**63), maximum=2**64 - 1)
        if self.logprobs not in (None, 0, 1):
            raise ValueError(
                f"{owner}.logprobs is {self.logprobs!r}; it must be 0 or 1 (the chosen token's "
                "log-probability): alternatives are not offered yet"
            )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(
                    f"{owner}.stop holds {text!r}; each entry must be a string, not ''"
                )
        object.__setattr__(self, "stop", stop)
        for token_id in self.stop_token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ValueError(
                    f"{owner}.stop_token_ids holds {token_id!r}; each entry must be an id from 0 up"
                )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1


_OPTIONAL = frozenset({"max_tokens", "seed", "logprobs"})
_KINDS: dict[str, tuple[type, ...]] = {
    "max_tokens": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "seed": (int,),
    "logprobs": (int,),
    "stop": (str, list, tuple),
    "stop_token_ids": (list, tuple),
    "ignore_eos": (bool,),
    "include_stop_str_in_output": (bool,),
    "skip_special_tokens": (bool,),
}
