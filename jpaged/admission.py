"""Checks what a request asks against what the model and the engine offer.

What is wrong whatever the model is, `SamplingParams` has refused already.
"""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.runner.logits_processor import LogitsContext, LogitsProcessor
from jpaged.runner.step_inputs import RowFlag
from jpaged.sampling_params import SamplingParams


def index_processors(
    processors: Sequence[LogitsProcessor], vocab_size: int
) -> dict[str, LogitsProcessor]:
    """The engine's logits processors by name, each tried on shapes.

    Raises:
        ValueError: If there are too many, two of a name, or something else among them, or one does
            not return what it must.
    """
    if len(processors) > RowFlag.MAX_PROCESSORS:
        raise ValueError(
            f"logits_processors has {len(processors)} entries; an engine takes at most "
            f"{RowFlag.MAX_PROCESSORS}"
        )
    by_name: dict[str, LogitsProcessor] = {}
    for processor in processors:
        if not isinstance(processor, LogitsProcessor):
            raise ValueError(f"logits_processors holds {processor!r}; give LogitsProcessor objects")
        if processor.name in by_name:
            raise ValueError(f"logits_processors holds two of the name {processor.name!r}")
        _check_result(processor, vocab_size)
        by_name[processor.name] = processor
    return by_name


def _check_result(processor: LogitsProcessor, vocab_size: int) -> None:
    def shape(dtype: jnp.dtype, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    logits = shape(jnp.dtype("float32"), vocab_size)
    context = LogitsContext._make(
        [
            shape(jnp.dtype("int32"), vocab_size),
            shape(jnp.dtype("bool"), vocab_size),
            shape(jnp.dtype("int32")),
        ]
    )
    arguments = shape(jnp.dtype("float32"), processor.num_arguments)
    result = jax.eval_shape(processor.function, logits, arguments, context)
    got = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(result)]
    if not isinstance(result, jax.ShapeDtypeStruct) or got != [f"float32[{vocab_size}]"]:
        raise ValueError(
            f"logits processor {processor.name!r} returns {', '.join(got) or None}; it must return "
            f"float32[{vocab_size}], as it was given"
        )


def check_ids(name: str, token_ids: Any) -> list[int]:
    """Token ids, of any kind of whole number, as a list of Python's.

    Raises:
        ValueError: If something else is given.
    """
    if hasattr(token_ids, "tolist"):  # an array
        token_ids = token_ids.tolist()
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
        raise ValueError(f"{name} is {reprlib.repr(token_ids)}; it must be a list of token ids")
    checked: list[int] = []
    for token_id in token_ids:
        if not isinstance(token_id, Integral) or isinstance(token_id, bool):
            raise ValueError(
                f"{name} holds {reprlib.repr(token_id)}; each entry must be a whole number"
            )
        checked.append(int(token_id))
    return checked


def check_params(
    params: SamplingParams,
    bad_words: tuple[tuple[int, ...], ...],
    end_token_ids: frozenset[int],
    *,
    num_tokens_known: int,
    max_logprobs: int,
    logprobs_mode: str,
    processors: Mapping[str, LogitsProcessor],
) -> None:
    """Checks ids, numbers of log-probabilities and arguments of logits processors.

    Args:
        params: What is asked for.
        bad_words: The ids of `params.bad_words`.
        end_token_ids: Ids that `params.min_tokens` excludes at first.
        num_tokens_known: Ids from here on can never be sampled.
        max_logprobs: As `EngineConfig.max_logprobs`.
        logprobs_mode: As `EngineConfig.logprobs_mode`.
        processors: The engine's, by name.

    Raises:
        ValueError: Naming field, value and range.
    """
    _check_ids(params, bad_words, num_tokens_known)
    if params.allowed_token_ids is not None:
        excluded = {word[0] for word in bad_words if len(word) == 1}
        if params.min_tokens:
            excluded |= end_token_ids
        if excluded.issuperset(params.allowed_token_ids):
            raise ValueError(
                f"SamplingParams.allowed_token_ids is {params.allowed_token_ids}; bad_words, or "
                "stop ids with min_tokens, exclude all of them: allow another id"
            )
    if params.num_samples > params.n and logprobs_mode.endswith("logits"):
        raise ValueError(
            f"SamplingParams.best_of is {params.best_of}; it compares log-probabilities, but "
            f"EngineConfig.logprobs_mode is {logprobs_mode!r}: start the engine with "
            f"{logprobs_mode.replace('logits', 'logprobs')!r}, or give n alone"
        )
    lowest = 0 if max_logprobs >= 0 else -1
    highest = min(max_logprobs, num_tokens_known) if max_logprobs >= 0 else num_tokens_known
    for name, asked in (
        ("logprobs", params.logprobs),
        ("prompt_logprobs", params.prompt_logprobs),
    ):
        if asked is not None and not lowest <= asked <= highest:
            raise ValueError(
                f"SamplingParams.{name} is {asked}; EngineConfig.max_logprobs, {max_logprobs}, and "
                f"a vocabulary of {num_tokens_known} allow {lowest} to {highest}: ask for less, or "
                "start the engine with more (-1: the whole vocabulary)"
            )
    for name, arguments in (params.extra_args or {}).items():
        processor = processors.get(name)
        if processor is None:
            raise ValueError(
                f"SamplingParams.extra_args names {name!r}; the engine's logits processors are "
                f"{sorted(processors)}"
            )
        if len(arguments) != processor.num_arguments:
            raise ValueError(
                f"SamplingParams.extra_args holds {len(arguments)} numbers for {name!r}; this "
                f"logits processor takes {processor.num_arguments}"
            )


def _check_ids(
    params: SamplingParams, bad_words: tuple[tuple[int, ...], ...], num_tokens_known: int
) -> None:
    if params.bad_words and not bad_words:
        raise ValueError(
            f"SamplingParams.bad_words is {params.bad_words}; the engine needs their ids too, as "
            "bad_words= of add_request (Tokenizer.encode_bad_words makes them)"
        )
    if bad_words and not params.bad_words:
        raise ValueError(
            f"bad_words is {bad_words}, ids without texts; give SamplingParams.bad_words too"
        )
    if not all(bad_words):
        raise ValueError("bad_words holds a text without ids; leave it out")
    for name, token_ids in (
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words", [token_id for word in bad_words for token_id in word]),
    ):
        for token_id in token_ids:
            if not 0 <= token_id < num_tokens_known:
                raise ValueError(
                    f"SamplingParams.{name} holds the id {token_id}; ids go from 0 to "
                    f"{num_tokens_known - 1}"
                )
