"""One suite for every implementation, the reference included, against dense attention.

Dense attention is NumPy in float64 over each request's own keys and values, which knows nothing of
blocks. Whatever a request must not read is NaN: block 0, free blocks, and slots after its end.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import (
    AttentionInputs,
    kv_cache_layer_shape,
    paged_attention,
    write_kv_cache,
)
from pallas_kernels.paged_attention.cpu import paged_attention_cpu
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.xla import paged_attention_xla

IMPLEMENTATIONS = {
    "reference": paged_attention_reference,
    "xla": paged_attention_xla,
    "cpu": paged_attention_cpu,
}


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


# Heads of real models; where they have many, some of them: heads do not know each other.
SHAPES = {
    "smollm2-135m": Shape(9, 3, 64),
    "llama-3.2-1b": Shape(8, 2, 64),
    "phi-2": Shape(2, 2, 80),
    "phi-3-mini": Shape(2, 2, 96),
    "llama-3.1-8b": Shape(4, 1, 128),
    "gemma-3-270m": Shape(4, 1, 256),
    "multi-query-16": Shape(16, 1, 64),
}

# Absolute, of outputs around 1. float32: sums of 300 products, each rounded to 6e-8. bfloat16:
# queries are scaled and softmax weights are rounded to 8 bits (4e-3) before their products.
TOLERANCES = {"float32": 2e-5, "bfloat16": 3e-2}

MAX_CONTEXT = 320  # more than one piece of any implementation
NUM_FREE_BLOCKS = 4


class Batch(NamedTuple):
    """One step and its answer.

    Attributes:
        q: Queries, padding included.
        kv_cache_layer: Blocks, NaN where nobody may read.
        inputs: Which token belongs where.
        expected: Dense attention of the tokens in use, float64.
    """

    q: jax.Array
    kv_cache_layer: jax.Array
    inputs: AttentionInputs
    expected: np.ndarray


def dense_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Attention of the last `len(q)` tokens of one request, `[Q, N, H]`, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qnh,cnh->nqc", q.astype(np.float64), k) * scale
    is_visible = np.arange(len(k))[None] <= np.arange(len(k) - len(q), len(k))[:, None]
    scores = np.where(is_visible[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("nqc,cnh->qnh", weights, v)


def make_batch(
    rows: Sequence[tuple[int, int]],
    *,
    shape: Shape,
    num_tokens: int,
    num_rows: int,
    block_size: int = 16,
    dtype: str = "float32",
    seed: int = 0,
) -> Batch:
    """A step of `rows`, each (query tokens, tokens of the request), padded to a bucket."""
    random = np.random.default_rng(seed)
    num_heads, num_kv_heads, head_dim = shape
    max_blocks = -(-MAX_CONTEXT // block_size)
    num_blocks = 1 + num_rows * max_blocks + NUM_FREE_BLOCKS
    block_ids = random.permutation(np.arange(1, num_blocks))
    kv_cache = np.full((num_blocks, num_kv_heads, 2, block_size, head_dim), np.nan, np.float32)
    q = random.standard_normal((num_tokens, num_heads, head_dim), np.float32)
    q = np.array(jnp.asarray(q, dtype).astype(jnp.float32))
    block_tables = np.zeros((num_rows, max_blocks), np.int32)
    positions, slots = np.zeros((2, num_tokens), np.int32)
    seq_lens = np.zeros(num_rows, np.int32)
    query_start_loc = np.zeros(num_rows + 1, np.int32)
    expected, end = [], 0
    for row, (query_len, seq_len) in enumerate(rows):
        num_used = -(-seq_len // block_size)
        table, block_ids = block_ids[:num_used], block_ids[num_used:]
        kv = random.standard_normal((2, seq_len, num_kv_heads, head_dim), np.float32)
        kv = np.array(jnp.asarray(kv, dtype).astype(jnp.float32))
        for position in range(seq_len):
            block_id, offset = table[position // block_size], position % block_size
            kv_cache[block_id, :, :, offset] = kv[:, position].swapaxes(0, 1)
        start, end = end, end + query_len
        expected.append(dense_attention(q[start:end], *kv, head_dim**-0.5))
        block_tables[row, :num_used] = table
        seq_lens[row] = seq_len
        positions[start:end] = np.arange(seq_len - query_len, seq_len)
        slots[start:end] = table[positions[start:end] // block_size] * block_size
        slots[start:end] += positions[start:end] % block_size
        query_start_loc[row + 1 :] = end
    arrays = (positions, slots, query_start_loc, seq_lens, block_tables)
    return Batch(
        jnp.asarray(q, dtype),
        jnp.asarray(kv_cache, dtype),
        AttentionInputs(*map(jnp.asarray, arrays)),
        np.concatenate(expected),
    )


def assert_attends(implementation, batches: Sequence[Batch]) -> None:
    """Runs batches of equal shapes through one compiled program and compares each."""
    head_dim = batches[0].q.shape[-1]
    attend = jax.jit(lambda *args: IMPLEMENTATIONS[implementation](*args, scale=head_dim**-0.5))
    for q, kv_cache_layer, inputs, expected in batches:
        out = attend(q, kv_cache_layer, inputs)
        assert out.shape == q.shape and out.dtype == q.dtype
        out = np.asarray(out.astype(jnp.float32))
        tolerance = TOLERANCES[str(q.dtype)]
        np.testing.assert_allclose(out[: len(expected)], expected, rtol=0, atol=tolerance)
        np.testing.assert_array_equal(out[len(expected) :], 0.0)


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


BATCHES = {"decode": decode_batches, "mixed": mixed_batches}
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_program = pytest.mark.parametrize("program", BATCHES)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, "float32") for shape in SHAPES),
        *((shape, "bfloat16") for shape in ("smollm2-135m", "phi-2", "llama-3.1-8b")),
    ],
)
@every_program
@every_implementation
def test_attention_through_blocks_equals_dense_attention(implementation, program, shape, dtype):
    assert_attends(implementation, BATCHES[program](shape=SHAPES[shape], dtype=dtype))


@every_implementation
@every_program
@pytest.mark.parametrize("block_size", [8, 32])
def test_block_size_changes_nothing(implementation, program, block_size):
    batches = BATCHES[program](shape=Shape(4, 2, 16), block_size=block_size)
    assert_attends(implementation, batches)


@every_implementation
def test_any_ragged_batch_equals_dense_attention(implementation):
    random = np.random.default_rng(0)
    batches = []
    for seed in range(20):
        rows, num_tokens_left = [], 40
        while len(rows) < 5 and num_tokens_left:
            query_len = int(random.choice([1, random.integers(1, num_tokens_left + 1)]))
            rows.append((query_len, int(random.integers(query_len, MAX_CONTEXT + 1))))
            num_tokens_left -= query_len
        batches.append(
            make_batch(rows, shape=Shape(4, 2, 16), num_tokens=40, num_rows=5, seed=seed)
        )
    assert_attends(implementation, batches)


@every_implementation
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (2, 1), (17, 16)])
def test_smallest_buckets_are_attended(implementation, num_tokens, num_rows):
    rows = [(1, 30)] * min(num_rows, num_tokens - 1) or [(1, 30)]
    rows[0] = (num_tokens - len(rows) + 1, 30)
    batch = make_batch(rows, shape=Shape(4, 2, 16), num_tokens=num_tokens, num_rows=num_rows)
    assert_attends(implementation, [batch])


@every_implementation
def test_answer_does_not_depend_on_which_blocks_a_request_owns(implementation):
    [batch, *_] = mixed_batches(shape=Shape(4, 2, 16))
    order = np.r_[0, np.random.default_rng(1).permutation(batch.kv_cache_layer.shape[0] - 1) + 1]
    place = np.argsort(order).astype(np.int32)
    moved = batch.inputs._replace(block_tables=jnp.asarray(place)[batch.inputs.block_tables])
    attend = jax.jit(lambda *args: IMPLEMENTATIONS[implementation](*args, scale=0.25))
    np.testing.assert_array_equal(
        attend(batch.q, batch.kv_cache_layer, batch.inputs),
        attend(batch.q, batch.kv_cache_layer[order], moved),
    )


def test_prompt_in_chunks_equals_the_prompt_in_one_piece():
    shape, num_tokens, block_size = Shape(4, 2, 16), 50, 8
    random = np.random.default_rng(0)
    q = random.standard_normal((num_tokens, shape.num_heads, shape.head_dim), np.float32)
    k, v = random.standard_normal((2, num_tokens, shape.num_kv_heads, shape.head_dim), np.float32)
    table = np.array([[5, 2, 9, 1, 7, 3, 8]], np.int32)
    kv_cache = jnp.full((10, shape.num_kv_heads, 2, block_size, shape.head_dim), jnp.nan)

    @jax.jit
    def step(kv_cache, q, k, v, inputs):
        kv_cache = write_kv_cache(kv_cache, k, v, inputs.slot_mapping)
        return kv_cache, paged_attention(q, kv_cache, inputs, scale=0.25)

    outs = []
    for start, end in ((0, 1), (1, 14), (14, 16), (16, 32), (32, 49), (49, 50)):
        padding = ((0, 17 - (end - start)), (0, 0), (0, 0))
        positions = np.zeros(17, np.int32)
        positions[: end - start] = np.arange(start, end)
        slots = table[0, positions // block_size] * block_size + positions % block_size
        slots[end - start :] = 0
        kv_cache, out = step(
            kv_cache,
            *(np.pad(x[start:end], padding) for x in (q, k, v)),
            AttentionInputs(
                positions=positions,
                slot_mapping=slots,
                query_start_loc=np.array([0, end - start], np.int32),
                seq_lens=np.array([end], np.int32),
                block_tables=table,
            ),
        )
        outs.append(out[: end - start])
    expected = dense_attention(q, k, v, 0.25)
    np.testing.assert_allclose(np.concatenate(outs), expected, atol=TOLERANCES["float32"])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_writing_changes_its_slots_and_no_others(dtype):
    shape = kv_cache_layer_shape(num_blocks=6, num_kv_heads=2, block_size=4, head_dim=8)
    random = np.random.default_rng(0)
    before = jnp.asarray(random.standard_normal(shape, np.float32), dtype)
    k, v = (jnp.asarray(random.standard_normal((5, 2, 8), np.float32), dtype) for _ in range(2))
    slots = np.array([4 * 4 + 3, 2 * 4, 1 * 4 + 1, 0, 0], np.int32)  # two are padding
    after = np.array(jax.jit(write_kv_cache)(before, k, v, slots).astype(jnp.float32))
    expected = np.array(before.astype(jnp.float32))
    for token, slot in enumerate(slots[:3]):
        expected[slot // 4, :, 0, slot % 4] = k[token].astype(jnp.float32)
        expected[slot // 4, :, 1, slot % 4] = v[token].astype(jnp.float32)
    np.testing.assert_array_equal(after[1:], expected[1:])
    np.testing.assert_array_equal(after[0, :, :, 1:], expected[0, :, :, 1:])


@pytest.mark.parametrize(
    "feature", [{"window": 8}, {"softcap": 30.0}, {"sinks": jnp.zeros(4, jnp.float32)}]
)
def test_feature_that_is_not_offered_is_refused_by_name(feature):
    [batch, *_] = decode_batches(shape=Shape(4, 2, 16))
    [name] = feature
    with pytest.raises(NotImplementedError, match=name):
        paged_attention(batch.q, batch.kv_cache_layer, batch.inputs, scale=0.25, **feature)


def test_heads_that_do_not_divide_among_kv_heads_are_refused():
    [batch, *_] = decode_batches(shape=Shape(4, 2, 16))
    with pytest.raises(ValueError, match="q has 3 heads"):
        paged_attention(batch.q[:, :3], batch.kv_cache_layer, batch.inputs, scale=0.25)
