"""What runs anywhere: blockwise online softmax over gathered blocks, in plain XLA.

Requests are walked in two kinds of **tiles**, each a few query tokens that attend at once:

* rows with one token this step, `ROWS` requests to a tile, longest contexts first;
* chunks of a prompt, `TILE` tokens of one request to a tile.

A tile walks its context in pieces with the online softmax of FlashAttention
(https://arxiv.org/abs/2205.14135). Both walks have trip counts that depend on the data, so time
follows the tokens there are, not the bucket, and one program serves every context length.

The sizes are measured on CPU (benchmarks/cpu_forms.py). A piece stays in the processor's cache
between the gather and the two products; gathering the context of the whole batch first costs a
trip to memory. A gather of several requests is large enough for XLA to spread over cores, that of
one is not.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.paged_attention.inputs import AttentionInputs

ROWS = 8
ROW_CHUNK = 128
TILE = 64
TILE_CHUNK = 64


class _Results(NamedTuple):
    """What tiles write.

    Attributes:
        out: Output of each token.
        log_sum_exp: Logarithm of each token's softmax sum; `None`: nobody asks.
    """

    out: Float[Array, "T2 K G H"]
    log_sum_exp: Float[Array, "T2 K G"] | None


class _Options(NamedTuple):
    """As in `paged_attention`."""

    window: int | None
    softcap: float | None
    sinks: Float[Array, " N"] | None


def paged_attention_xla(
    q: Float[Array, "T N H"],
    kv_cache_layer: Real[Array, "P K 2 S H"],
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    return_log_sum_exp: bool = False,
) -> Float[Array, "T N H"] | tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Attends each token to its request's cached tokens; arguments as in `paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    num_requests = inputs.seq_lens.shape[0]
    options = _Options(window, softcap, sinks)
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    q = q.reshape(num_tokens, kv_cache_layer.shape[1], -1, head_dim)
    # Rows at the end take what tiles write beyond their own tokens.
    q = jnp.pad(q, ((0, TILE), (0, 0), (0, 0), (0, 0)))
    log_sum_exp = jnp.full(q.shape[:-1], -jnp.inf) if return_log_sum_exp else None
    results = _Results(jnp.zeros_like(q), log_sum_exp)
    results = _attend_rows(results, q, kv_cache_layer, inputs, options)
    if num_tokens > num_requests:  # not a decode program: there may be chunks
        results = _attend_chunks(results, q, kv_cache_layer, inputs, options)
    out = results.out[:num_tokens].reshape(num_tokens, num_heads, head_dim)
    if results.log_sum_exp is None:
        return out
    return out, results.log_sum_exp[:num_tokens].reshape(num_tokens, num_heads)


def _attend_rows(
    results: _Results,
    q: Float[Array, "T2 K G H"],
    kv_cache_layer: Real[Array, "P K 2 S H"],
    inputs: AttentionInputs,
    options: _Options,
) -> _Results:
    """Writes the outputs of all requests that have one token this step."""
    num_requests = inputs.seq_lens.shape[0]
    starts, ends = inputs.query_start_loc[:-1], inputs.query_start_loc[1:]
    is_row = ends - starts == 1
    rows = min(ROWS, num_requests)
    # Requests of similar length share a tile, whose walk is as long as the longest of them.
    order = jnp.argsort(jnp.where(is_row, -inputs.seq_lens, 1), stable=True)
    order = jnp.pad(order, (0, rows - 1))
    num_rows = jnp.sum(is_row)

    def attend(i, results):
        index = i * rows + jnp.arange(rows)
        row = lax.dynamic_slice_in_dim(order, i * rows, rows)
        token = jnp.where(index < num_rows, starts[row], q.shape[0] - 1)
        seq_lens = jnp.where(index < num_rows, inputs.seq_lens[row], 0)
        tile = _attend_tile(
            q.at[token].get(mode="promise_in_bounds")[:, None],
            (seq_lens - 1)[:, None],
            seq_lens,
            inputs.block_tables[row],
            kv_cache_layer,
            ROW_CHUNK,
            options,
        )
        return jax.tree.map(
            lambda all_, new: all_.at[token].set(new[:, 0], mode="promise_in_bounds"),
            results,
            _wanted(tile, results),
        )

    return lax.fori_loop(0, (num_rows + rows - 1) // rows, attend, results)


def _attend_chunks(
    results: _Results,
    q: Float[Array, "T2 K G H"],
    kv_cache_layer: Real[Array, "P K 2 S H"],
    inputs: AttentionInputs,
    options: _Options,
) -> _Results:
    """Writes the outputs of all requests that have several tokens this step."""
    starts, ends = inputs.query_start_loc[:-1], inputs.query_start_loc[1:]
    query_lens = ends - starts
    num_tiles = jnp.where(query_lens > 1, (query_lens + TILE - 1) // TILE, 0)
    tile_ends = jnp.cumsum(num_tiles)

    def attend(i, results):
        row = jnp.searchsorted(tile_ends, i, side="right", method="compare_all")
        start = starts[row] + (i - tile_ends[row] + num_tiles[row]) * TILE
        tokens = start + jnp.arange(TILE)
        positions = inputs.seq_lens[row] - ends[row] + tokens
        tile = _attend_tile(
            lax.dynamic_slice_in_dim(q, start, TILE)[None],
            positions[None],
            jnp.minimum(positions[-1] + 1, inputs.seq_lens[row])[None],
            inputs.block_tables[row][None],
            kv_cache_layer,
            TILE_CHUNK,
            options,
        )

        def write(all_, new):
            is_written = (tokens < ends[row]).reshape(-1, *[1] * (all_.ndim - 1))
            new = jnp.where(is_written, new[0], lax.dynamic_slice_in_dim(all_, start, TILE))
            return lax.dynamic_update_slice_in_dim(all_, new, start, axis=0)

        return jax.tree.map(write, results, _wanted(tile, results))

    return lax.fori_loop(0, tile_ends[-1], attend, results)


def _wanted(tile: tuple[Array, Array], results: _Results) -> _Results:
    out, log_sum_exp = tile
    return _Results(out, None if results.log_sum_exp is None else log_sum_exp)


def _attend_tile(
    q: Float[Array, "R Q K G H"],
    positions: Int[Array, "R Q"],
    seq_lens: Int[Array, " R"],
    block_tables: Int[Array, "R M"],
    kv_cache_layer: Real[Array, "P K 2 S H"],
    chunk: int,
    options: _Options,
) -> tuple[Float[Array, "R Q K G H"], Float[Array, "R Q K G"]]:
    """Attends `Q` scaled queries of each of `R` requests to their first `seq_lens` tokens.

    Returns outputs and the logarithms of their softmax sums.
    """
    window, softcap, sinks = options
    rows, queries, num_kv_heads, group, head_dim = q.shape
    num_blocks, _, _, block_size, _ = kv_cache_layer.shape
    chunk_blocks = max(1, min(chunk // block_size, block_tables.shape[1]))
    chunk = chunk_blocks * block_size
    pieces = kv_cache_layer.reshape(num_blocks * num_kv_heads * 2, block_size * head_dim)
    heads = jnp.arange(num_kv_heads, dtype=block_tables.dtype)[None, :, None] * 2
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % chunk_blocks)))
    q = q.transpose(0, 2, 3, 1, 4).reshape(rows, num_kv_heads, group * queries, head_dim)
    positions = jnp.tile(positions, (1, group))

    def attend_chunk(i, carry):
        peak, total, out = carry
        block_ids = lax.dynamic_slice_in_dim(tables, i * chunk_blocks, chunk_blocks, axis=1)
        key_pieces = block_ids[:, None] * (num_kv_heads * 2) + heads  # [R, K, chunk_blocks]
        k, v = (
            pieces.at[key_pieces + offset]
            .get(mode="promise_in_bounds")
            .reshape(rows, num_kv_heads, chunk, head_dim)
            .astype(q.dtype)
            for offset in (0, 1)
        )
        context = i * chunk + jnp.arange(chunk)
        # Slots that are not written yet, or that no window reaches any more, may hold anything:
        # 0 * NaN would still be NaN.
        is_own = context[None] < seq_lens[:, None]
        if window is not None:
            is_own &= context[None] > positions.min(axis=1, keepdims=True) - window
        v = jnp.where(is_own[:, None, :, None], v, jnp.zeros((), v.dtype))
        scores = jnp.einsum("rkqh,rkch->rkqc", q, k, preferred_element_type=jnp.float32)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        is_visible = context[None, None] <= positions[:, :, None]
        if window is not None:
            is_visible &= context[None, None] > positions[:, :, None] - window
        scores = jnp.where(is_visible[:, None], scores, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_peak[..., None])
        decay = jnp.exp(peak - new_peak)
        total = total * decay + jnp.sum(weights, axis=-1)
        update = jnp.einsum(
            "rkqc,rkch->rkqh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return new_peak, total, out * decay[..., None] + update

    # Finite, so that a row which sees nothing in a piece gets weights of 0, not NaN.
    shape = q.shape[:-1]
    carry = (
        jnp.full(shape, jnp.finfo(jnp.float32).min),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, group), queries, axis=1)
        carry = (jnp.broadcast_to(sinks, shape), jnp.ones(shape, jnp.float32), carry[2])
    first_chunk = 0
    if window is not None:
        # Tokens of padding have no positions; they stand where they do not matter.
        least = jnp.min(jnp.where(seq_lens[:, None] > 0, positions, jnp.iinfo(jnp.int32).max))
        first_chunk = jnp.maximum(least - window + 1, 0) // chunk
    num_chunks = (jnp.max(seq_lens) + chunk - 1) // chunk
    peak, total, out = lax.fori_loop(first_chunk, num_chunks, attend_chunk, carry)
    out = out / jnp.where(total == 0.0, 1.0, total)[..., None]
    out = out.reshape(rows, num_kv_heads, group, queries, head_dim)
    log_sum_exp = peak + jnp.log(total)
    log_sum_exp = log_sum_exp.reshape(rows, num_kv_heads, group, queries)
    return out.transpose(0, 3, 1, 2, 4).astype(q.dtype), log_sum_exp.transpose(0, 3, 1, 2)
