"""From logits to token ids, inside the step.

The token is drawn by a race (the Gumbel-max trick): each id gets a random number that depends on
the request's seed, the token's position and the id only, and the greatest ratio of probability to
number wins. So an answer does not depend on its neighbours, its row, the step's padding or the
vocabulary's; nor, but for one draw in a million, on how another bucket's products round, which
moves every border of a cumulative distribution (docs/decisions/019).

What a request may ask are branches of one program. A step whose rows are all greedy, without any
edit of the logits, runs none of them but the argmax.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int, UInt32

from jpaged.request import NO_TOKEN
from jpaged.runner.logits_processor import LogitsContext, LogitsProcessor
from jpaged.runner.sampling_state import IN_PROMPT, SamplingState
from jpaged.runner.step_inputs import RowFlag, SamplingInputs

_CHUNK = 256  # ids that race for the whole of them first, and then among themselves
_GROUP = 64  # ids that are represented by their greatest while the largest are searched
_NUM_NEAREST = 128  # most likely ids, among which a filter's threshold is searched first


class Logprobs(NamedTuple):
    """Log-probabilities of some token per row, and of the most likely ones.

    Attributes:
        logprobs: Of the token.
        ranks: The token's place among all, 1 for the most likely; equals share the best place.
        top_ids: Most likely tokens, best first.
        top_logprobs: Theirs.
    """

    logprobs: Float[Array, " B"]
    ranks: Int[Array, " B"]
    top_ids: Int[Array, "B J"]
    top_logprobs: Float[Array, "B J"]


class Sampled(NamedTuple):
    """What one step sampled.

    Attributes:
        token_ids: One id per row, or `NO_TOKEN`.
        logprobs: Zeros where no row of the step asked for any.
        counts: `SamplingState.counts` with the sampled ids counted.
    """

    token_ids: Int[Array, " B"]
    logprobs: Logprobs
    counts: Int[Array, "R V"]


def sample(
    logits: Float[Array, "B V"],
    sampling: SamplingInputs,
    state: SamplingState,
    *,
    num_tokens_known: int,
    num_alternatives: int,
    logprobs_mode: str = "raw_logprobs",
    processors: Sequence[LogitsProcessor] = (),
) -> Sampled:
    """Chooses one token per row.

    Args:
        logits: The model's logits, float32.
        sampling: What each row asks.
        state: Counts and biases by block-table row.
        num_tokens_known: Ids from here on are padding of the vocabulary, never chosen.
        num_alternatives: How many of the most likely tokens are reported at most.
        logprobs_mode: As `EngineConfig.logprobs_mode`.
        processors: The engine's, in order.
    """
    logits = hide_unknown(logits, num_tokens_known)
    num_rows, vocab_size = logits.shape
    flags = sampling.flags
    is_greedy = sampling.temperature == 0.0
    reports_processed = logprobs_mode.startswith("processed")

    def take_best():
        return _best(logits), logits if reports_processed else None

    def edit_and_draw():
        edited = jax.lax.cond(
            _any(flags, RowFlag.EDITS),
            lambda: _edit(logits, sampling, state, processors),
            lambda: logits,
        )
        best = _best(edited)
        token_ids, processed = jax.lax.cond(
            jnp.all(is_greedy),
            lambda: (best, edited if reports_processed else None),
            lambda: _draw(edited, best, is_greedy, sampling, reports_processed),
        )
        return token_ids, processed

    is_plain = jnp.all(is_greedy) & ~_any(flags, RowFlag.EDITS)
    token_ids, processed = jax.lax.cond(is_plain, take_best, edit_and_draw)
    values = processed if reports_processed else logits
    logprobs = jax.lax.cond(
        _any(flags, RowFlag.LOGPROBS),
        lambda: find_logprobs(
            values,
            token_ids,
            num_alternatives=num_alternatives,
            normalize=logprobs_mode.endswith("logprobs"),
            wants_alternatives=_any(flags, RowFlag.ALTERNATIVES),
        ),
        lambda: _no_logprobs(num_rows, vocab_size, num_alternatives),
    )
    is_counted = (flags & RowFlag.COUNTS != 0) & (sampling.samples != 0) & (token_ids >= 0)
    rows = jnp.where(is_counted, sampling.rows, state.counts.shape[0])  # beyond the end: dropped
    counts = state.counts.at[rows, jnp.maximum(token_ids, 0)].add(1, mode="drop")
    return Sampled(token_ids, logprobs, counts)


def hide_unknown(logits: Float[Array, "B V"], num_tokens_known: int) -> Float[Array, "B V"]:
    """Excludes the padding of the vocabulary, from this id on."""
    if num_tokens_known >= logits.shape[1]:
        return logits
    is_known = jnp.arange(logits.shape[1]) < num_tokens_known
    return jnp.where(is_known[None], logits, -jnp.inf)


def find_logprobs(
    values: Float[Array, "B V"],
    token_ids: Int[Array, " B"],
    *,
    num_alternatives: int,
    normalize: bool,
    wants_alternatives: Bool[Array, ""],
) -> Logprobs:
    """Looks up tokens in a distribution, and the most likely ones.

    Args:
        values: Logits.
        token_ids: One per row; of no meaning where negative.
        num_alternatives: How many of the most likely ones.
        normalize: Report log-probabilities; else the logits themselves.
        wants_alternatives: Whether the most likely ones are asked for; zeros if not.
    """
    chosen = jnp.take_along_axis(values, jnp.maximum(token_ids, 0)[:, None], axis=-1)
    ranks = 1 + jnp.sum(values > chosen, axis=-1, dtype=jnp.int32)
    total = jax.nn.logsumexp(values, axis=-1, keepdims=True) if normalize else 0.0

    def find_best():
        top, top_ids = find_largest(values, num_alternatives)
        return top_ids, top - total

    num_rows, vocab_size = values.shape
    nothing = _no_logprobs(num_rows, vocab_size, num_alternatives)
    top_ids, top_logprobs = jax.lax.cond(
        wants_alternatives, find_best, lambda: (nothing.top_ids, nothing.top_logprobs)
    )
    return Logprobs((chosen - total)[:, 0], ranks, top_ids, top_logprobs)


def find_largest(
    values: Float[Array, "B V"], k: int
) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """The k largest values per row and their ids; of equals, the lower id comes first.

    The k largest are in the k groups whose greatest are largest, so only those are sorted: several
    times faster than `lax.top_k` of a whole vocabulary (`benchmarks.cpu_forms logits`).
    """
    num_rows, vocab_size = values.shape
    num_groups = vocab_size // _GROUP
    if vocab_size % _GROUP or num_groups < 2 * k:
        top, ids = jax.lax.top_k(values, k)
        return top, ids.astype(jnp.int32)
    groups = values.reshape(num_rows, num_groups, _GROUP)
    _, best = jax.lax.top_k(jnp.max(groups, axis=-1), k)
    best = jnp.sort(best, axis=-1)  # equals stay in the order of their ids
    rows = jnp.arange(num_rows)[:, None]
    top, places = jax.lax.top_k(groups[rows, best].reshape(num_rows, -1), k)
    ids = best[rows, places // _GROUP] * _GROUP + places % _GROUP
    return top, ids.astype(jnp.int32)


def _no_logprobs(num_rows: int, vocab_size: int, num_alternatives: int) -> Logprobs:
    shape = (num_rows, min(num_alternatives, vocab_size))
    return Logprobs(
        jnp.zeros(num_rows, jnp.float32),
        jnp.zeros(num_rows, jnp.int32),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, jnp.float32),
    )


def _any(flags: Int[Array, " B"], flag: int) -> Bool[Array, ""]:
    return jnp.any(flags & flag != 0)


def _best(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The most likely token per row; `argmax` takes a NaN for the greatest, and so finds it."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    value = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(value), best, NO_TOKEN)


def _edit(
    logits: Float[Array, "B V"],
    sampling: SamplingInputs,
    state: SamplingState,
    processors: Sequence[LogitsProcessor],
) -> Float[Array, "B V"]:
    """Applies biases, penalties and processors, to the rows that ask for them."""
    flags, rows = sampling.flags[:, None], sampling.rows
    biases = state.biases.at[rows].get(mode="promise_in_bounds")
    logits = logits + jnp.where(flags & RowFlag.BIASES != 0, biases, 0.0)
    counts = state.counts.at[rows].get(mode="promise_in_bounds")
    counts = jnp.where(flags & RowFlag.COUNTS != 0, counts, 0)
    repetition = jnp.where(counts > 0, sampling.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    in_prompt, counts = counts & IN_PROMPT != 0, counts & (IN_PROMPT - 1)
    logits = logits - sampling.frequency_penalty[:, None] * counts.astype(jnp.float32)
    logits = logits - sampling.presence_penalty[:, None] * (counts > 0).astype(jnp.float32)
    num_output_tokens = sampling.positions - sampling.num_prompt_tokens
    context = LogitsContext(counts, in_prompt, num_output_tokens)
    start = 0
    for index, processor in enumerate(processors):
        arguments = sampling.arguments[start : start + processor.num_arguments].T
        start += processor.num_arguments
        is_asked = flags & RowFlag.processor(index) != 0

        def run(logits=logits, processor=processor, arguments=arguments, is_asked=is_asked):
            processed = jax.vmap(processor.function)(logits, arguments, context)
            return jnp.where(is_asked, processed, logits)

        logits = jax.lax.cond(jnp.any(is_asked), run, lambda logits=logits: logits)
    return logits


def _draw(
    logits: Float[Array, "B V"],
    best: Int[Array, " B"],
    is_greedy: Bool[Array, " B"],
    sampling: SamplingInputs,
    reports_processed: bool,
) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None]:
    """Draws rows that are not greedy; also gives the logits that were drawn from, if asked."""
    # The peak is subtracted before dividing: a small temperature then gives 0 for the best token
    # and -inf for the others, never inf - inf. Greedy rows are computed too, and thrown away.
    peak = jnp.max(logits, axis=-1, keepdims=True)
    temperature = jnp.where(is_greedy, 1.0, sampling.temperature)[:, None]
    distances = (peak - logits) / temperature
    probs = jnp.exp(-distances)
    is_kept = distances <= _find_threshold(distances, probs, sampling)[:, None]
    drawn = _race(jnp.where(is_kept, probs, 0.0), sampling)
    token_ids = jnp.where(is_greedy | (best == NO_TOKEN), best, drawn)
    if not reports_processed:
        return token_ids, None
    is_kept = is_kept | is_greedy[:, None]
    return token_ids, jnp.where(is_kept, logits / temperature, -jnp.inf)


def _find_threshold(
    distances: Float[Array, "B V"], probs: Float[Array, "B V"], sampling: SamplingInputs
) -> Float[Array, " B"]:
    """Tokens farther from the best than this are excluded by `min_p`, `top_k` or `top_p`.

    In this order. Tokens exactly as likely as the last one kept stay. Probabilities would not do:
    those of unlikely tokens are all 0 in float32.

    A threshold is looked for among the most likely tokens, and where it is not, among all. Which
    of the two a row takes is decided by what it asks and by its own distances, never by others.

    Args:
        distances: How far below the greatest logit each is, over temperature.
        probs: exp(-distances).
        sampling: What each row asks.
    """
    is_greedy = sampling.temperature == 0.0
    vocab_size = probs.shape[1]
    k = jnp.where((sampling.top_k <= 0) | is_greedy, vocab_size, sampling.top_k)
    top_p = jnp.where(is_greedy, 1.0, sampling.top_p)
    num_nearest = min(_NUM_NEAREST, vocab_size)
    nearest = jax.lax.cond(
        jnp.any((k < vocab_size) | (top_p < 1.0)),
        lambda: -find_largest(-distances, num_nearest)[0],
        lambda: jnp.zeros((probs.shape[0], num_nearest), jnp.float32),
    )

    threshold = jnp.take_along_axis(nearest, jnp.minimum(k, num_nearest)[:, None] - 1, axis=-1)
    threshold = jnp.where(k < vocab_size, threshold[:, 0], jnp.inf)
    is_far = (k > num_nearest) & (k < vocab_size)
    threshold = _replace_far(
        threshold,
        is_far,
        lambda keep: jnp.sum(keep, axis=-1, dtype=jnp.int32) >= k,
        distances,
    )
    threshold = jnp.minimum(threshold, -jnp.log(sampling.min_p))

    def find_nucleus():
        kept = jnp.where(distances <= threshold[:, None], probs, 0.0)
        mass = top_p * jnp.sum(kept, axis=-1)
        near = jnp.where(nearest <= threshold[:, None], jnp.exp(-nearest), 0.0)
        is_enough = jnp.cumsum(near, axis=-1) >= mass[:, None]
        first = jnp.argmax(is_enough, axis=-1)[:, None]
        nucleus = jnp.take_along_axis(nearest, first, axis=-1)[:, 0]
        is_far = ~jnp.any(is_enough, axis=-1) & (top_p < 1.0)
        nucleus = _replace_far(
            nucleus,
            is_far,
            lambda keep: jnp.sum(jnp.where(keep, kept, 0.0), axis=-1) >= mass,
            distances,
        )
        # At top_p = 1 rounding of the sums must not exclude anything.
        return jnp.where(top_p < 1.0, nucleus, jnp.inf)

    nucleus = jax.lax.cond(
        jnp.any(top_p < 1.0), find_nucleus, lambda: jnp.full_like(top_p, jnp.inf)
    )
    return jnp.minimum(threshold, nucleus)


def _replace_far(
    thresholds: Float[Array, " B"],
    is_far: Bool[Array, " B"],
    is_enough: Callable[[Bool[Array, "B V"]], Bool[Array, " B"]],
    distances: Float[Array, "B V"],
) -> Float[Array, " B"]:
    """Looks for thresholds among all tokens in rows that have theirs far away, if any has."""
    return jax.lax.cond(
        jnp.any(is_far),
        lambda: jnp.where(is_far, _smallest_threshold(is_enough, distances), thresholds),
        lambda: thresholds,
    )


def _smallest_threshold(is_enough, distances: Float[Array, "B V"]) -> Float[Array, " B"]:
    """The smallest t per row for which keeping `distances <= t` is enough; infinity always is.

    Instead of sorting, bisects the bits: floats from 0 up order like theirs, so 31 counts over
    the row find the exact value.
    """

    def bisect(i, bits):
        candidate = bits | (jnp.int32(1) << (30 - i))
        threshold = jax.lax.bitcast_convert_type(candidate, jnp.float32)
        keep: Bool[Array, "B V"] = distances < threshold[:, None]
        return jnp.where(is_enough(keep) | jnp.isnan(threshold), bits, candidate)

    bits = jax.lax.fori_loop(0, 31, bisect, jnp.zeros(distances.shape[0], jnp.int32))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _race(probs: Float[Array, "B V"], sampling: SamplingInputs) -> Int[Array, " B"]:
    """Draws an id per row, in proportion to its entries, which need not sum to 1.

    Races in two levels, first of fixed chunks of ids and then within the winner, so that few random
    numbers are needed. Padding the vocabulary adds chunks that cannot win.
    """
    num_rows, vocab_size = probs.shape
    probs = jnp.pad(probs, ((0, 0), (0, -vocab_size % _CHUNK))).reshape(num_rows, -1, _CHUNK)
    keys = _keys(sampling)
    chunks = jnp.arange(probs.shape[1], dtype=jnp.uint32)
    # The numbers of chunks are none of an id's.
    chunk = _find_winner(jnp.sum(probs, axis=-1), keys, (chunks | jnp.uint32(1 << 31))[None])
    inside = probs[jnp.arange(num_rows), chunk]
    ids = (chunk * _CHUNK)[:, None] + jnp.arange(_CHUNK, dtype=jnp.int32)[None]
    return chunk * _CHUNK + _find_winner(inside, keys, ids.astype(jnp.uint32))


def _find_winner(
    weights: Float[Array, "B N"], keys: UInt32[Array, "B 2"], numbers: UInt32[Array, "_ N"]
) -> Int[Array, " B"]:
    """The place of the greatest weight over an exponentially distributed number, by Threefry."""
    counts = jnp.broadcast_to(numbers, weights.shape)

    def one(key, counts):
        bits = threefry_2x32(key, jnp.concatenate([jnp.zeros_like(counts), counts]))
        return bits[: len(counts)]

    uniforms = (jax.vmap(one)(keys, counts).astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    # Small numbers decide; as the logarithm of what is near 1 they would be coarse.
    exponentials = -jnp.log1p(-jnp.minimum(uniforms, jnp.float32(1 - 2**-24)))
    # The greatest becomes 1, so that no ratio that may win is too small for a float.
    scaled = weights / jnp.max(weights, axis=-1, keepdims=True)
    return jnp.argmax(scaled / exponentials, axis=-1).astype(jnp.int32)


def _keys(sampling: SamplingInputs) -> UInt32[Array, "B 2"]:
    """A key per row from (seed, position), by Threefry."""

    def one(seed, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, position))

    seeds = jax.lax.bitcast_convert_type(sampling.seed.T, jnp.uint32)
    return jax.vmap(one)(seeds, sampling.positions)
