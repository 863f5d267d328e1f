"""The Triton IR of the kernels against dense attention and against `interpret=True`."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import AttentionInputs, paged_attention
from pallas_kernels.paged_attention.shapes import ModelShape
from tests.pallas_kernels.attention_batches import Batch, make_batch, with_plan
from tests.pallas_kernels.triton_ir import Access, OutOfBoundsError, execute

TINY = ModelShape(4, 2, 16)
KV_ROWS = 6  # the cache among the operands of the kernels that attend
ONE_JAX = pytest.mark.one_jax
FAR = 1_000_003  # a block id outside every cache, also where its offset wraps around

CASES = {
    "decode": (TINY, {"rows": [(1, 1), (1, 15), (1, 16), (1, 17), (1, 200)]}),
    "mixed": (TINY, {"rows": [(70, 70), (1, 40), (17, 140), (2, 2)]}),
    "blocks of 64": (TINY, {"rows": [(1, 65), (20, 130)], "block_size": 64}),
    "window": (TINY._replace(window=50), {"rows": [(1, 180), (30, 150)]}),
    "window, softcap and sinks": (
        TINY._replace(window=70, softcap=5.0, has_sinks=True),
        {"rows": [(1, 180), (30, 150), (1, 3)]},
    ),
    "head_dim 80 and a group of 3": (ModelShape(6, 2, 80), {"rows": [(1, 70), (20, 80)]}),
    "bfloat16": (TINY, {"rows": [(1, 180), (30, 150)], "dtype": "bfloat16"}),
    "float8": (
        ModelShape(6, 2, 80),
        {"rows": [(1, 70), (20, 80)], "dtype": "bfloat16", "cache_dtype": "float8_e4m3fn"},
    ),
    "split": (TINY._replace(has_sinks=True), {"rows": [(1, 1100), (1, 10), (1, 600)]}),
    "shared prefix": (
        TINY,
        {"rows": [(1, 1041), (1, 1060), (1, 1089), (1, 1100)], "shared_blocks": 65},
    ),
}


def make_case(name: str) -> Batch:
    """A batch in a bucket that it does not fill; nobody may look behind the end of a table."""
    shape, options = CASES[name]
    rows = options["rows"]
    batch = make_batch(
        shape=shape,
        num_tokens=sum(count for count, _ in rows) + 2,
        num_rows=len(rows) + 1,
        max_context=max(length for _, length in rows) + 100,
        **options,
    )
    block_size = options.get("block_size", 16)
    inputs = batch.inputs
    num_used = -(-np.asarray(inputs.seq_lens) // block_size)
    is_used = np.arange(inputs.block_tables.shape[1]) < num_used[:, None]
    tables = jnp.where(is_used, inputs.block_tables, FAR)
    return batch._replace(inputs=inputs._replace(block_tables=tables))


def attend(batch: Batch, run, **options):
    scale = batch.q.shape[-1] ** -0.5

    def attend(q, kv_cache_layer, inputs: AttentionInputs):
        return paged_attention(q, kv_cache_layer, inputs, scale=scale, **batch.options, **options)

    results = run(attend, batch.q, batch.kv_cache_layer, batch.inputs)
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float32), results)


@cache
def attend_lowered(name: str, **options):
    """A case with its plan, and what the lowered kernels answer."""
    num_sms = 16 if name == "split" else 4
    batch = with_plan(make_case(name), "triton", num_sms=num_sms, interpret=False)
    return batch, attend(batch, execute, **options)


# What is lowered otherwise; the rest differs in numbers, or is part of another case.
ON_EACH_JAX = ("mixed", "window, softcap and sinks", "bfloat16", "float8", "split", "shared prefix")


@pytest.mark.parametrize(
    "name",
    [name if name in ON_EACH_JAX else pytest.param(name, marks=ONE_JAX) for name in CASES],
)
def test_lowered_kernels_attend(name):
    batch, out = attend_lowered(name)
    count = len(batch.expected)
    tolerance = 3e-2 if batch.q.dtype == jnp.bfloat16 else 2e-5
    np.testing.assert_allclose(out[:count], batch.expected, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(out[count:], 0.0)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    # float32: the order of sums. bfloat16: softmax weights, then outputs round elsewhere.
    [("window, softcap and sinks", 2e-6), pytest.param("bfloat16", 2**-8, marks=ONE_JAX)],
)
def test_lowered_kernels_answer_as_interpreted_ones(name, tolerance):
    _, out = attend_lowered(name)

    def run(function, *args):
        return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})(*args)

    interpreted = attend(with_plan(make_case(name), "triton"), run)
    np.testing.assert_allclose(out, interpreted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["mixed", "split"])
def test_lowered_kernels_return_the_log_sum_exp(name):
    batch, (out, log_sum_exp) = attend_lowered(name, return_log_sum_exp=True)
    count = len(batch.expected)
    np.testing.assert_allclose(out[:count], batch.expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(log_sum_exp[:count], batch.log_sum_exp, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(log_sum_exp[count:], -np.inf)


def test_batches_cover_splits_and_shared_prefixes():
    for name, num_sms in (("split", 16), ("shared prefix", 4)):
        plan = with_plan(make_case(name), "triton", num_sms=num_sms).inputs.plan
        assert plan is not None and plan.arrays is not None
        assert plan.arrays.merge_starts[-1] > 4
        assert plan.arrays.tile_items.any() == (name == "shared prefix")


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_what_is_not_a_number_stays_so(name):
    """A model that has diverged must not look healthy on a GPU, whose maximum ignores NaN."""
    batch = with_plan(make_case(name), "triton", interpret=False)
    out = attend(batch._replace(q=batch.q.at[0].set(jnp.nan)), execute)
    assert np.isnan(out[0]).all() and not np.isnan(out[1:]).any()


@pytest.mark.parametrize(("name", "block_id"), [("decode", -1), ("mixed", FAR)])
def test_block_that_is_not_in_the_cache_is_reported(name, block_id):
    batch = make_case(name)
    tables = batch.inputs.block_tables.at[1, 0].set(block_id)
    batch = batch._replace(inputs=batch.inputs._replace(block_tables=tables))
    with pytest.raises(OutOfBoundsError, match=f"tt.load of array {KV_ROWS}"):
        attend(with_plan(batch, "triton", interpret=False), execute)


@pytest.mark.parametrize("gib", [3, 5])
def test_offsets_reach_the_end_of_large_caches_of_bytes(gib):
    """Memory that nobody touches is not there, so that a cache of zeros may be of any size."""
    rows = [(1, 40), (1, 16), (3, 50)]
    batch = make_batch(
        rows, shape=TINY, num_tokens=5, num_rows=3, cache_dtype="int8", max_context=64
    )
    small = np.asarray(batch.kv_cache_layer)
    num_blocks = (gib << 30) // small[0].nbytes
    kv_cache_layer = np.zeros((num_blocks, *small.shape[1:]), np.int8)
    # At the end, around the 31st bit of an offset, and at the beginning.
    far = [*range(num_blocks - 6, num_blocks), (1 << 31) // small[0].nbytes]
    place = np.arange(len(small))
    used = np.unique(batch.inputs.block_tables)[1:]
    place[used[: len(far)]] = far
    kv_cache_layer[place] = small
    tables = place[batch.inputs.block_tables].astype(np.int32)
    batch = batch._replace(
        kv_cache_layer=kv_cache_layer, inputs=batch.inputs._replace(block_tables=tables)
    )
    trace: list[Access] = []
    out = attend(with_plan(batch, "triton", interpret=False), partial(execute, trace=trace))
    np.testing.assert_allclose(out, batch.expected, rtol=0, atol=2e-5)
    pairs = np.concatenate([access.offsets for access in trace if access.buffer == KV_ROWS])
    assert set(2 * pairs // small[0].nbytes) == set(place[used])
