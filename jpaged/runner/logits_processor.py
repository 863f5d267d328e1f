"""Functions of a user's own that edit logits inside the step, for research code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class LogitsContext(NamedTuple):
    """What a processor may know of its request, besides the logits.

    Attributes:
        counts: How often the answer so far holds each id.
        in_prompt: Whether the prompt holds each id.
        num_output_tokens: Length of the answer so far.
    """

    counts: Int[Array, " V"]
    in_prompt: Bool[Array, " V"]
    num_output_tokens: Int[Array, ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessor:
    """A function that is traced into every step, and runs for requests that name it.

    It sees one request's logits after biases and penalties and before the temperature, and
    returns them edited; -inf excludes an id. It must be JAX-traceable and a function of its
    arguments only.

    Attributes:
        name: What a request names it by, in `SamplingParams.extra_args`.
        function: `(logits, arguments, context) -> logits`; float32 of shapes `[V]` and
            `[num_arguments]`, and a `LogitsContext`.
        num_arguments: Numbers that a request gives it, which become float32.
    """

    name: str
    function: Callable[[Float[Array, " V"], Float[Array, " A"], LogitsContext], Float[Array, " V"]]
    num_arguments: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.num_arguments, int) or self.num_arguments < 0:
            raise ValueError(
                f"LogitsProcessor.num_arguments is {self.num_arguments!r}; it must be a whole "
                "number from 0 up"
            )
