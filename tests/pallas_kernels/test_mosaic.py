"""Mosaic's kernels, interpreted with race detection: few and small cases, since each takes seconds.

The interpreter has no `mma`, nor `wgmma` with an operand in registers: products are NumPy's here.
Layouts, instructions and registers are proven by compilation (scripts/aot) only.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention import plan as work
from pallas_kernels.paged_attention.compat import races
from pallas_kernels.paged_attention.mosaic_decode import decode_form
from pallas_kernels.paged_attention.mosaic_prefill import prefill_form
from pallas_kernels.paged_attention.shapes import ModelShape
from tests.pallas_kernels.attention_batches import Batch, make_batch, with_plan

TINY = ModelShape(4, 1, 64)
FULL = ModelShape(3, 1, 64, window=70, softcap=20.0, has_sinks=True)
WIDE = FULL._replace(window=900)
NOT_SHARED = {"share_prefixes": False}  # spares the prefill kernel where all its items are empty
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
ONE_JAX = pytest.mark.one_jax


def plan(rows, *, shape=TINY, num_tokens=None, num_rows=None, num_sms=1, tiling=None, **options):
    """A batch for Mosaic, of a bucket no larger than need be."""
    num_tokens = num_tokens or sum(count for count, _ in rows)
    longest = max(length for _, length in rows)
    batch = make_batch(
        rows,
        shape=shape,
        num_tokens=num_tokens,
        num_rows=num_rows or len(rows),
        max_context=options.pop("max_context", longest + 16),
        **options,
    )
    return _trim(with_plan(batch, "mosaic", num_sms=num_sms, **(tiling or {})))


def _trim(batch: Batch) -> Batch:
    """Leaves one surplus item of each kind: the interpreter takes its time for empty ones too."""
    planned = batch.inputs.plan
    assert planned is not None and planned.arrays is not None
    arrays = planned.arrays
    for name in ("decode_items", "tile_items"):
        items = getattr(arrays, name)
        num_used = int((items[:, work.NUM_TOKENS] > 0).sum())
        arrays = arrays._replace(**{name: items[: num_used + 1]})
    planned = replace(planned, arrays=arrays)
    return batch._replace(inputs=batch.inputs._replace(plan=planned))


def attend(batch: Batch, **options):
    """Runs the op by the batch's plan."""
    scale = batch.q.shape[-1] ** -0.5

    @jax.jit
    def run(q, kv_cache_layer, inputs):
        return paged_attention(q, kv_cache_layer, inputs, scale=scale, **batch.options, **options)

    return run(batch.q, batch.kv_cache_layer, batch.inputs)


def assert_attends(batch: Batch) -> None:
    """The answer is dense attention's, padding is zero, and no thread raced another."""
    results = []
    assert not races(lambda: results.append(attend(batch)) or results)
    out = np.asarray(results[0].astype(jnp.float32))
    num_tokens = len(batch.expected)
    tolerance = TOLERANCES[batch.q.dtype.name]
    np.testing.assert_allclose(out[:num_tokens], batch.expected, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(out[num_tokens:], 0.0)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=ONE_JAX),
        pytest.param({"shape": FULL}, marks=ONE_JAX),
        {"shape": TINY._replace(num_kv_heads=2), "dtype": "bfloat16"},
        pytest.param(
            {"shape": ModelShape(16, 1, 128), "block_size": 32, "dtype": "float16"}, marks=ONE_JAX
        ),
        pytest.param({"shape": ModelShape(1, 1, 256), "block_size": 64}, marks=ONE_JAX),
        pytest.param({"shape": ModelShape(7, 1, 64), "block_size": 128}, marks=ONE_JAX),
        {"shape": FULL, "tiling": {"decode_rows": 64, **NOT_SHARED}},
    ],
    ids=str,
)
def test_decode_rows_attend(options):
    """Lengths at borders of blocks and tiles, more tiles than fit the ring, and padding."""
    rows = [(1, 1), (1, 65), (1, 448)]
    assert_attends(plan(rows, num_tokens=4, num_rows=4, **{"tiling": NOT_SHARED} | options))


@pytest.mark.parametrize("shape", [pytest.param(TINY, marks=ONE_JAX), FULL], ids=str)
def test_prompt_chunks_attend_beside_decode_rows(shape):
    assert_attends(plan([(70, 200), (1, 100), (3, 3)], num_tokens=80, shape=shape))


@ONE_JAX
def test_one_warpgroup_attends_to_a_prompt():
    assert_attends(plan([(30, 130)], shape=ModelShape(4, 1, 256), tiling={"tile_rows": 64}))


@pytest.mark.parametrize("shape", [TINY, pytest.param(WIDE, marks=ONE_JAX)], ids=str)
def test_split_rows_are_merged(shape):
    batch = plan([(1, 1000), (1, 10)], shape=shape, num_sms=2)
    assert_split(batch)
    assert_attends(batch)


@ONE_JAX
def test_rows_that_share_a_prefix_are_answered_as_if_alone():
    shape = TINY._replace(has_sinks=True)
    rows = [(1, 1041), (1, 1100), (1, 1060), (1, 1048)]
    batch = plan(rows, shape=shape, shared_blocks=65)
    assert batch.inputs.plan.arrays.tile_items.any()
    assert_attends(batch)


@ONE_JAX
def test_windows_that_the_plan_does_not_know_are_kept():
    """Layers of one model may differ; items that end before a layer's window give nothing."""
    rows = [(1, 1041), (1, 1100), (1, 1060), (1, 1048)]
    planned = plan(rows, shape=TINY, shared_blocks=65).inputs.plan
    assert planned.arrays.tile_items.any()
    windowed = plan(rows, shape=TINY._replace(window=20), shared_blocks=65)
    assert_attends(windowed._replace(inputs=windowed.inputs._replace(plan=planned)))


@ONE_JAX
def test_triton_may_take_the_prefill():
    batch = plan([(40, 100), (1, 30)], num_tokens=48)
    kernels = batch.inputs.plan.kernels
    mixed = replace(batch.inputs.plan, kernels=replace(kernels, prefill_backend="triton"))
    assert_attends(batch._replace(inputs=batch.inputs._replace(plan=mixed)))


@ONE_JAX
def test_log_sum_exp_is_returned_on_request():
    rows = [(20, 90), (1, 700), (1, 5)]
    batch = plan(rows, shape=WIDE, num_tokens=24, num_sms=2)
    assert_split(batch)
    xla = batch._replace(inputs=batch.inputs._replace(plan=None))
    for mine, theirs in zip(
        attend(batch, return_log_sum_exp=True), attend(xla, return_log_sum_exp=True), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5)


def test_race_detection_would_notice_what_is_missing(monkeypatch):
    """The tests above can fail: without fences, copies overtake the loads before them."""
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    assert races(lambda: attend(plan([(1, 460)])))


def assert_split(batch: Batch) -> None:
    """Some token has more than one partial result."""
    starts = np.asarray(batch.inputs.plan.arrays.merge_starts)
    assert (np.diff(starts) > 1).any()


def test_forms_of_other_sizes_are_refused():
    with pytest.raises(ValueError, match="decode_rows is 32; Mosaic takes 16 or 64"):
        decode_form(32, 128)
    with pytest.raises(ValueError, match="with head_dim 256 Mosaic takes 16, since 64 spill"):
        decode_form(64, 256)
    with pytest.raises(ValueError, match="tile_rows is 256; Mosaic takes 64 or 128"):
        prefill_form(256, 128)


def test_caches_of_another_dtype_are_refused():
    batch = plan([(1, 20)])
    cache = batch.kv_cache_layer.astype(jnp.int8)
    with pytest.raises(ValueError, match="mosaic cannot read a cache of int8"):
        paged_attention(batch.q, cache, batch.inputs, scale=1.0)
