"""What only planned kernels do: split rows, share prefixes, and give equal bits in any batch."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.shapes import ModelShape
from pallas_kernels.paged_attention.triton import UNITS, _planes
from tests.pallas_kernels.attention_batches import Batch, make_batch, with_plan

TINY = ModelShape(4, 2, 16)
WITH_SINKS = TINY._replace(has_sinks=True)
ONE_JAX = pytest.mark.one_jax
with_and_without_sinks = pytest.mark.parametrize(
    "shape", [pytest.param(TINY, marks=ONE_JAX), WITH_SINKS]
)


def attend(batch: Batch, **options) -> Any:
    """Runs the op by the batch's plan."""

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(q, kv_cache_layer, inputs):
        return paged_attention(q, kv_cache_layer, inputs, scale=0.25, **batch.options, **options)

    results = run(batch.q, batch.kv_cache_layer, batch.inputs)
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float32), results)


def assert_attends(batch: Batch) -> None:
    """Compares outputs and the logarithms of softmax sums, and looks at the padding."""
    out, log_sum_exp = attend(batch, return_log_sum_exp=True)
    count = len(batch.expected)
    np.testing.assert_allclose(out[:count], batch.expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(log_sum_exp[:count], batch.log_sum_exp, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(out[count:], 0.0)
    np.testing.assert_array_equal(log_sum_exp[count:], -np.inf)


@with_and_without_sinks
def test_split_rows_are_merged(shape):
    rows = [(1, 3000), (1, 10), (1, 900)]
    batch = make_batch(rows, shape=shape, num_tokens=4, num_rows=4, max_context=3008)
    planned = with_plan(batch, "triton", num_sms=16)
    plan = planned.inputs.plan
    assert plan is not None and plan.arrays is not None and plan.arrays.merge_starts[-1] > 4
    assert_attends(planned)


@with_and_without_sinks
def test_rows_that_share_a_prefix_are_answered_as_if_alone(shape):
    rows = [(1, 1100), (1, 1089), (1, 1500), (1, 1041), (1, 1600), (1, 1090)]
    batch = make_batch(
        rows, shape=shape, num_tokens=8, num_rows=8, shared_blocks=65, max_context=1600
    )
    planned = with_plan(batch, "triton")
    plan = planned.inputs.plan
    assert plan is not None and plan.arrays is not None and plan.arrays.tile_items.any()
    assert_attends(planned)
    assert_attends(with_plan(batch, "triton", share_prefixes=False))


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=ONE_JAX), "bfloat16"])
def test_half_precision_is_close(dtype):
    batch = make_batch(
        [(1, 700), (40, 300), (2, 2)], shape=TINY, num_tokens=48, num_rows=4, dtype=dtype,
        max_context=704,
    )  # fmt: skip
    out = attend(with_plan(batch, "triton"))
    np.testing.assert_allclose(out[:43], batch.expected, rtol=0, atol=3e-2)


def test_fixed_split_gives_the_same_bits_in_any_batch():
    """A row's own blocks and query, first among two crowds and then among many other rows."""
    lengths = [(1, 2000), (1, 900), (1, 1300), (1, 40), (1, 2000)]
    batch = make_batch(lengths, shape=TINY, num_tokens=8, num_rows=8, max_context=2000)
    whole = attend(with_plan(batch, "triton", fixed_split=512))
    for count in (1, 3):
        inputs = batch.inputs._replace(
            seq_lens=batch.inputs.seq_lens.at[count:].set(0),
            query_start_loc=jnp.minimum(batch.inputs.query_start_loc, count),
        )
        some = attend(with_plan(batch._replace(inputs=inputs), "triton", fixed_split=512))
        np.testing.assert_array_equal(some[:count], whole[:count])
        np.testing.assert_array_equal(some[count:], 0.0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_every_byte_is_read_as_what_it_stands_for(dtype):
    pairs = np.arange(2**16, dtype=np.uint16)
    expected = pairs.view(np.uint8).view(dtype).astype(np.float32).reshape(-1, 2).T
    is_known = np.isfinite(expected)
    for read in ("float32", "float16", "bfloat16"):
        planes = _planes(jnp.asarray(pairs.view(np.int16)), dtype, jnp.dtype(read))
        values = np.stack([np.asarray(plane).astype(np.float32) for plane in planes])
        np.testing.assert_array_equal(values[is_known] * UNITS[dtype], expected[is_known])


@pytest.mark.parametrize(
    "window", [20, *(pytest.param(window, marks=ONE_JAX) for window in (300, 1050))]
)
def test_windows_that_the_plan_does_not_know_are_kept(window):
    """Layers of one model may differ; items that end before a layer's window give nothing."""
    rows = [(1, 1100), (1, 1089), (1, 1500), (1, 1041), (60, 1560)]
    options = {"num_tokens": 64, "num_rows": 8, "shared_blocks": 65, "max_context": 1600}
    planned = with_plan(make_batch(rows, shape=TINY, **options), "triton", num_sms=16)
    plan = planned.inputs.plan
    assert plan is not None and plan.arrays is not None and plan.arrays.tile_items.any()
    windowed = make_batch(rows, shape=TINY._replace(window=window), **options)
    out = attend(windowed._replace(inputs=windowed.inputs._replace(plan=plan)))
    np.testing.assert_allclose(out[:64], windowed.expected, rtol=0, atol=2e-5)
