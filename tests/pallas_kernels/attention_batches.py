"""Steps with known answers: ragged batches over a cache in which NaN is what nobody may read."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import AttentionInputs, Kernels, plan_attention
from pallas_kernels.paged_attention.plan import Tiling
from pallas_kernels.paged_attention.shapes import ModelShape

MAX_CONTEXT = 320  # more than one piece of any implementation
NUM_FREE_BLOCKS = 4


class Batch(NamedTuple):
    """One step and its answer.

    Attributes:
        q: Queries, padding included.
        kv_cache_layer: Blocks, NaN where nobody may read.
        inputs: Which token belongs where.
        options: Keyword arguments of `paged_attention`.
        expected: Dense attention of the tokens in use, float64.
        log_sum_exp: The logarithms of its softmax sums.
    """

    q: jax.Array
    kv_cache_layer: jax.Array
    inputs: AttentionInputs
    options: dict[str, Any]
    expected: np.ndarray
    log_sum_exp: np.ndarray


def dense_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of the last `len(q)` tokens of one request, in float64.

    Returns outputs `[Q, N, H]` and the logarithms of the softmax sums, `[Q, N]`.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qnh,cnh->nqc", q.astype(np.float64), k) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    distance = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))[None]
    is_visible = (distance >= 0) & (distance < (len(k) if window is None else window))
    scores = np.where(is_visible[None], scores, -np.inf)
    peak = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks.astype(np.float64)[:, None, None] - peak)
    log_sum_exp = (peak + np.log(total))[..., 0].T
    return np.einsum("nqc,cnh->qnh", weights / total, v), log_sum_exp


def make_batch(
    rows: Sequence[tuple[int, int]],
    *,
    shape: ModelShape,
    num_tokens: int,
    num_rows: int,
    block_size: int = 16,
    dtype: str = "float32",
    cache_dtype: str | None = None,
    seed: int = 0,
    shared_blocks: int = 0,
    max_context: int = MAX_CONTEXT,
) -> Batch:
    """A step of `rows`, each (query tokens, tokens of the request), padded to a bucket.

    The first `shared_blocks` blocks of all rows are the same. The cache is of `dtype` unless it is
    given its own; integers have no NaN, and what nobody may read is the least of them.
    """
    cache_dtype = cache_dtype or dtype
    random = np.random.default_rng(seed)
    num_heads, num_kv_heads, head_dim = shape[:3]
    max_blocks = -(-max_context // block_size)
    num_blocks = 1 + num_rows * max_blocks + NUM_FREE_BLOCKS
    block_ids = random.permutation(np.arange(1, num_blocks))
    kv_cache = np.full((num_blocks, num_kv_heads, 2, block_size, head_dim), np.nan, np.float32)
    q = _rounded(random.standard_normal((num_tokens, num_heads, head_dim), np.float32), dtype)
    sinks = random.standard_normal(num_heads, np.float32) if shape.has_sinks else None
    features: dict[str, Any] = {"window": shape.window, "softcap": shape.softcap, "sinks": sinks}
    block_tables = np.zeros((num_rows, max_blocks), np.int32)
    positions, slots = np.zeros((2, num_tokens), np.int32)
    seq_lens = np.zeros(num_rows, np.int32)
    query_start_loc = np.zeros(num_rows + 1, np.int32)
    shared, block_ids = block_ids[:shared_blocks], block_ids[shared_blocks:]
    num_shared = shared_blocks * block_size
    prefix = random.standard_normal((2, num_shared, num_kv_heads, head_dim), np.float32)
    expected, end = [], 0
    for row, (query_len, seq_len) in enumerate(rows):
        num_used = -(-seq_len // block_size) - shared_blocks
        table, block_ids = np.r_[shared, block_ids[:num_used]], block_ids[num_used:]
        kv = random.standard_normal((2, seq_len, num_kv_heads, head_dim), np.float32)
        kv[:, :num_shared] = prefix
        kv = _rounded(np.round(2 * kv) if cache_dtype == "int8" else kv, cache_dtype)
        position = np.arange(seq_len)
        if shape.window is not None and not shared_blocks:
            # What no token sees any more may be another request's by now.
            position = position[max(0, seq_len - query_len - shape.window + 1) :]
        for i in range(2):
            blocks, offsets = table[position // block_size], position % block_size
            kv_cache[blocks, :, i, offsets] = kv[i, position]
        start, end = end, end + query_len
        expected.append(dense_attention(q[start:end], *kv, head_dim**-0.5, **features))
        block_tables[row, : len(table)] = table
        seq_lens[row] = seq_len
        positions[start:end] = np.arange(seq_len - query_len, seq_len)
        slots[start:end] = table[positions[start:end] // block_size] * block_size
        slots[start:end] += positions[start:end] % block_size
        query_start_loc[row + 1 :] = end
    if cache_dtype == "int8":
        kv_cache = np.nan_to_num(kv_cache, nan=-128.0)
    arrays = (positions, slots, query_start_loc, seq_lens, block_tables)
    return Batch(
        jnp.asarray(q, dtype),
        jnp.asarray(kv_cache, cache_dtype),
        AttentionInputs(*map(jnp.asarray, arrays)),
        _traced(features),
        *map(np.concatenate, zip(*expected, strict=True)),
    )


def _traced(features: dict[str, Any]) -> dict[str, Any]:
    """Those in use, arrays on the device."""
    return {
        name: jnp.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in features.items()
        if value is not None
    }


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return np.array(jnp.asarray(values, dtype).astype(jnp.float32))


def with_plan(
    batch: Batch, backend: str, *, num_sms: int = 4, interpret: bool = True, **options: Any
) -> Batch:
    """The batch with the work list of a GPU backend."""
    _, num_kv_heads, _, block_size, _ = batch.kv_cache_layer.shape
    tiling = Tiling(
        num_kv_heads=num_kv_heads,
        group=batch.q.shape[1] // num_kv_heads,
        block_size=block_size,
        num_sms=num_sms,
        **options,
    )
    inputs = batch.inputs
    plan = plan_attention(
        Kernels(backend, tiling, interpret=interpret), inputs, window=batch.options.get("window")
    )
    plan = jax.tree.map(jnp.asarray, plan)
    return batch._replace(inputs=inputs._replace(plan=plan))


@functools.cache
def decode_batches(*, num_rows: int = 6, **options) -> list[Batch]:
    """Every row one token; full, part-filled and nearly empty batches; all borders of blocks."""
    block_size = options.get("block_size", 16)
    lengths = [
        [1, block_size - 1, block_size, block_size + 1, 255, MAX_CONTEXT],
        [257],
        [MAX_CONTEXT, 1, 256],
    ]
    return [
        make_batch(
            [(1, n) for n in row], num_tokens=num_rows, num_rows=num_rows, seed=seed, **options
        )
        for seed, row in enumerate(lengths)
    ]


@functools.cache
def mixed_batches(*, num_tokens: int = 150, num_rows: int = 5, **options) -> list[Batch]:
    """Whole prompts, chunks of longer ones, and single tokens, in any order."""
    rows = [
        [(65, 65), (1, 40), (17, 300), (1, 1), (66, 130)],  # no padding
        [(150, 320)],
        [(1, 256), (2, 2), (64, 64)],
        [(16, 257), (1, 17), (63, 64), (3, 16)],
    ]
    return [
        make_batch(row, num_tokens=num_tokens, num_rows=num_rows, seed=seed, **options)
        for seed, row in enumerate(rows)
    ]
