"""From logits to token ids, inside the step.

The token is drawn by the inverse of the cumulative distribution, in token-id order, at one
uniform number that depends on the request's seed and the token's position only. So an answer
does not depend on its neighbours, its row, the step's padding or the vocabulary's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jpaged.runner.step_inputs import SamplingInputs

_CHUNK = 256  # ids per partial sum of the cumulative distribution


class Sampled(NamedTuple):
    """What one step sampled.

    Attributes:
        token_ids: One id per row.
        logprobs: Log-probability of that id in the model's own distribution (before temperature
            and filters); 0 where no row of the step asked for it.
    """

    token_ids: Int[Array, " B"]
    logprobs: Float[Array, " B"]


def sample(
    logits: Float[Array, "B V"], sampling: SamplingInputs, *, num_tokens_known: int
) -> Sampled:
    """Chooses one token per row.

    Args:
        logits: The model's logits, float32.
        sampling: What each row asks; `top_k` and `top_p` apply after the temperature.
        num_tokens_known: Ids from here on are padding of the vocabulary, never chosen.
    """
    is_known = jnp.arange(logits.shape[1]) < num_tokens_known
    logits = jnp.where(is_known[None], logits, -jnp.inf)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_greedy = sampling.temperature == 0.0
    token_ids = jax.lax.cond(
        jnp.all(is_greedy),
        lambda: greedy,
        lambda: jnp.where(is_greedy, greedy, _draw(logits, sampling)),
    )

    def chosen_logprobs():
        chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    logprobs = jax.lax.cond(
        jnp.any(sampling.wants_logprobs != 0),
        chosen_logprobs,
        lambda: jnp.zeros(logits.shape[0], jnp.float32),
    )
    return Sampled(token_ids, logprobs)


def _draw(logits: Float[Array, "B V"], sampling: SamplingInputs) -> Int[Array, " B"]:
    # The peak is subtracted before dividing: a tiny temperature then gives 0 for the best token
    # and -inf for the others, never inf - inf. Greedy rows are computed too, and thrown away.
    peak = jnp.max(logits, axis=-1, keepdims=True)
    temperature = jnp.where(sampling.temperature == 0.0, 1.0, sampling.temperature)
    probs = jnp.exp((logits - peak) / temperature[:, None])
    probs = jax.lax.cond(
        jnp.any((sampling.top_k > 0) | (sampling.top_p < 1.0)),
        lambda: _filter(probs, sampling.top_k, sampling.top_p),
        lambda: probs,
    )
    return _invert_cdf(probs, _uniforms(sampling))


def _filter(
    probs: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Zeroes what `top_k`, then `top_p` exclude; tokens as likely as the last kept one stay.

    Instead of sorting, bisects the bits of the lowest probability to keep: floats from 0 up
    order like their bits, so 31 counts over the row find the exact value.
    """
    vocab_size = probs.shape[1]
    k = jnp.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)
    kth = _largest_threshold(lambda keep: jnp.sum(keep, axis=-1, dtype=jnp.int32) >= k, probs)
    probs = jnp.where(probs >= kth[:, None], probs, 0.0)
    mass = top_p * jnp.sum(probs, axis=-1)
    nucleus = _largest_threshold(
        lambda keep: jnp.sum(jnp.where(keep, probs, 0.0), axis=-1) >= mass, probs
    )
    # At top_p = 1 rounding of the sums must not exclude anything.
    nucleus = jnp.where(top_p < 1.0, nucleus, 0.0)
    return jnp.where(probs >= nucleus[:, None], probs, 0.0)


def _largest_threshold(is_enough, probs: Float[Array, "B V"]) -> Float[Array, " B"]:
    """The largest t per row for which keeping `probs >= t` is enough; 0 always is."""

    def bisect(i, bits):
        candidate = bits | (jnp.int32(1) << (30 - i))
        threshold = jax.lax.bitcast_convert_type(candidate, jnp.float32)
        keep: Bool[Array, "B V"] = probs >= threshold[:, None]
        return jnp.where(is_enough(keep), candidate, bits)

    bits = jax.lax.fori_loop(0, 31, bisect, jnp.zeros(probs.shape[0], jnp.int32))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _invert_cdf(probs: Float[Array, "B V"], uniforms: Float[Array, " B"]) -> Int[Array, " B"]:
    """First id whose cumulative probability exceeds the row's uniform number times the total.

    Sums in two levels, over fixed chunks of ids, so that padding the vocabulary adds zeros at
    the end and changes no sum before them.
    """
    num_rows, vocab_size = probs.shape
    probs = jnp.pad(probs, ((0, 0), (0, -vocab_size % _CHUNK))).reshape(num_rows, -1, _CHUNK)
    chunk_ends = jnp.cumsum(jnp.sum(probs, axis=-1), axis=-1)
    # Strictly below the total, so that a chunk with mass always exceeds it.
    target = jnp.minimum(uniforms * chunk_ends[:, -1], jnp.nextafter(chunk_ends[:, -1], 0.0))
    chunk = jnp.sum(chunk_ends <= target[:, None], axis=-1, dtype=jnp.int32)
    row = jnp.arange(num_rows)
    before = jnp.where(chunk > 0, chunk_ends[row, jnp.maximum(chunk - 1, 0)], 0.0)
    inside = probs[row, chunk]
    is_passed = before[:, None] + jnp.cumsum(inside, axis=-1) <= target[:, None]
    # Where rounding lets the target pass every token of the chunk, take its last possible one.
    last = _CHUNK - 1 - jnp.argmax(inside[:, ::-1] > 0, axis=-1).astype(jnp.int32)
    offset = jnp.minimum(jnp.sum(is_passed, axis=-1, dtype=jnp.int32), last)
    return chunk * _CHUNK + offset


def _uniforms(sampling: SamplingInputs) -> Float[Array, " B"]:
    """One number in [0, 1) per row from (seed, position), by Threefry."""

    def one(seed, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        # The dtype is named: under jax_enable_x64 the default would be another number.
        return jax.random.uniform(jax.random.fold_in(key, position), dtype=jnp.float32)

    seeds = jax.lax.bitcast_convert_type(sampling.seed.T, jnp.uint32)
    return jax.vmap(one)(seeds, sampling.positions)
