"""One suite for every implementation, the reference included, against dense attention.

Dense attention is NumPy in float64 over each request's own keys and values, which knows nothing of
blocks. Whatever a request must not read is NaN: block 0, free blocks, and slots after its end.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

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
from pallas_kernels.paged_attention.shapes import SHAPES, ModelShape
from pallas_kernels.paged_attention.triton import paged_attention_triton
from pallas_kernels.paged_attention.xla import paged_attention_xla
from tests.pallas_kernels.attention_batches import (
    MAX_CONTEXT,
    Batch,
    decode_batches,
    dense_attention,
    make_batch,
    mixed_batches,
    with_plan,
)

IMPLEMENTATIONS = {
    "reference": paged_attention_reference,
    "xla": paged_attention_xla,
    "cpu": paged_attention_cpu,
    "triton": paged_attention_triton,
}
PLANNED = ("triton",)  # those that need a work list

# Absolute, of outputs around 1. float32: sums of 300 products, each rounded to 6e-8. bfloat16:
# queries are scaled and softmax weights are rounded to 8 bits (4e-3) before their products.
TOLERANCES = {"float32": 2e-5, "bfloat16": 3e-2}

TINY = ModelShape(4, 2, 16)
ONE_JAX = pytest.mark.one_jax


def assert_attends(
    implementation, batches: Sequence[Batch], *, return_log_sum_exp: bool = False, **tiling
) -> None:
    """Runs batches of equal shapes through one compiled program and compares each."""
    head_dim = batches[0].q.shape[-1]
    arguments = {"scale": head_dim**-0.5}
    if return_log_sum_exp:
        arguments["return_log_sum_exp"] = True
    attend = jax.jit(
        partial({**IMPLEMENTATIONS, "op": paged_attention}[implementation], **arguments),
        static_argnames=[name for name in ("window", "softcap") if name in batches[0].options],
        # The interpreter makes large programs, which take longer to compile than to run.
        compiler_options={"xla_backend_optimization_level": 0} if implementation in PLANNED else {},
    )
    for batch in batches:
        if implementation in PLANNED:
            batch = with_plan(batch, implementation, **tiling)
        q, kv_cache_layer, inputs, options, expected, expected_log = batch
        out = attend(q, kv_cache_layer, inputs, **options)
        count, tolerance = len(expected), TOLERANCES[str(q.dtype)]
        if return_log_sum_exp:
            out, log_sum_exp = out
            assert log_sum_exp.shape == q.shape[:2] and log_sum_exp.dtype == jnp.float32
            np.testing.assert_allclose(log_sum_exp[:count], expected_log, rtol=0, atol=tolerance)
            np.testing.assert_array_equal(log_sum_exp[count:], -np.inf)
        assert out.shape == q.shape and out.dtype == q.dtype
        out = np.asarray(out.astype(jnp.float32))
        np.testing.assert_allclose(out[:count], expected, rtol=0, atol=tolerance)
        np.testing.assert_array_equal(out[count:], 0.0)


BATCHES = {"decode": decode_batches, "mixed": mixed_batches}
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_program = pytest.mark.parametrize("program", BATCHES)


def cases_of_shapes() -> list[Any]:
    """(implementation, program, shape, dtype); groups of 2, 5 and 8 are for GPU kernels only."""
    cases = []
    for name, shape in SHAPES.items():
        for implementation in IMPLEMENTATIONS:
            is_planned = implementation in PLANNED
            if name in ("llama-3.1-70b", "qwen3-14b", "qwen3-0.6b") and not is_planned:
                continue
            if name == "llama-3.2-1b" and is_planned:
                continue  # groups of 4 are Llama 3.1's, heads of 64 SmolLM2's
            if implementation == "cpu" and shape != ModelShape(*shape[:3]):
                continue  # the compiled CPU kernel is for plain attention; XLA's takes the rest
            for program in BATCHES:
                cases.append((implementation, program, name, "float32"))
                if name in ("smollm2-135m", "llama-3.1-8b"):
                    cases.append((implementation, program, name, "bfloat16"))
    return [pytest.param(*case, marks=[] if on_each_jax(*case) else ONE_JAX) for case in cases]


def on_each_jax(implementation: str, program: str, shape: str, dtype: str) -> bool:
    """All features at once, bfloat16, and programs of one kernel: what JAX traces otherwise."""
    if shape == "gpt-oss-20b":
        return program == "mixed" or implementation in PLANNED
    return shape == "smollm2-135m" and program == "mixed" and dtype == "bfloat16"


@pytest.mark.parametrize(("implementation", "program", "shape", "dtype"), cases_of_shapes())
def test_attention_through_blocks_equals_dense_attention(implementation, program, shape, dtype):
    # A window that the batches' contexts go beyond; none where there is none.
    model_shape = SHAPES[shape].with_kv_heads(2)
    if model_shape.window is not None:
        model_shape = model_shape._replace(window=100)
    # Where no prefixes are shared, a decode step needs no prefill kernel, and is compiled sooner.
    batches = BATCHES[program](shape=model_shape, dtype=dtype)
    assert_attends(implementation, batches, share_prefixes=program != "decode")


@every_implementation
@every_program
@pytest.mark.parametrize("block_size", [pytest.param(8, marks=ONE_JAX), 32])
def test_block_size_changes_nothing(implementation, program, block_size):
    batches = BATCHES[program](shape=TINY, block_size=block_size)
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
        batches.append(make_batch(rows, shape=TINY, num_tokens=40, num_rows=5, seed=seed))
    assert_attends(implementation, batches)


@pytest.mark.parametrize(
    ("implementation", "cache_dtype", "shape"),
    [
        ("reference", "int8", TINY),
        ("xla", "int8", TINY),
        pytest.param("xla", "float8_e4m3fn", TINY, marks=ONE_JAX),
        ("triton", "int8", TINY),
        ("triton", "float8_e4m3fn", TINY),
        pytest.param("triton", "float8_e5m2", TINY, marks=ONE_JAX),
        pytest.param("triton", "float8_e4m3fn", SHAPES["phi-2"].with_kv_heads(2), marks=ONE_JAX),
    ],
)
def test_cache_may_have_one_byte_per_number(implementation, cache_dtype, shape):
    assert_attends(implementation, mixed_batches(shape=shape, cache_dtype=cache_dtype))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [
        ("float16", 16, "kv_cache_layer has dtype float16"),
        ("int8", 15, "triton takes an even head_dim in a cache of int8, here is 15"),
    ],
)
def test_cache_that_the_gpu_kernel_cannot_read_is_refused(dtype, head_dim, reason):
    shape = TINY._replace(head_dim=head_dim)
    batch = make_batch(
        [(1, 9)], shape=shape, num_tokens=2, num_rows=2, cache_dtype=dtype, max_context=16
    )
    q, kv_cache_layer, inputs, *_ = with_plan(batch, "triton")
    with pytest.raises(ValueError, match=reason):
        paged_attention(q, kv_cache_layer, inputs, scale=0.25)


@every_implementation
@pytest.mark.parametrize(
    ("num_tokens", "num_rows"),
    [(1, 1), *(pytest.param(*sizes, marks=ONE_JAX) for sizes in ((2, 1), (17, 16)))],
)
def test_smallest_buckets_are_attended(implementation, num_tokens, num_rows):
    rows = [(1, 30)] * min(num_rows, num_tokens - 1) or [(1, 30)]
    rows[0] = (num_tokens - len(rows) + 1, 30)
    batch = make_batch(rows, shape=TINY, num_tokens=num_tokens, num_rows=num_rows)
    assert_attends(implementation, [batch])


@every_implementation
def test_answer_does_not_depend_on_which_blocks_a_request_owns(implementation):
    [batch, *_] = mixed_batches(shape=TINY)
    order = np.r_[0, np.random.default_rng(1).permutation(batch.kv_cache_layer.shape[0] - 1) + 1]
    place = np.argsort(order).astype(np.int32)
    moved = batch.inputs._replace(block_tables=jnp.asarray(place)[batch.inputs.block_tables])
    attend = jax.jit(lambda *args: IMPLEMENTATIONS[implementation](*args, scale=0.25))
    batches = [batch, batch._replace(kv_cache_layer=batch.kv_cache_layer[order], inputs=moved)]
    if implementation in PLANNED:
        batches = [with_plan(each, implementation) for each in batches]
    here, there = (attend(each.q, each.kv_cache_layer, each.inputs) for each in batches)
    np.testing.assert_array_equal(here, there)


def test_prompt_in_chunks_equals_the_prompt_in_one_piece():
    shape, num_tokens, block_size = TINY, 50, 8
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
    expected, _ = dense_attention(q, k, v, 0.25)
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
    ("dtype", "expected"),
    [
        ("float8_e4m3fn", [0.0, 1.0, -0.3125, 448.0, 448.0, -448.0]),
        ("float8_e5m2", [0.0, 1.0, -0.3125, 448.0, 57344.0, -57344.0]),
        ("int8", [0.0, 1.0, 0.0, 127.0, 127.0, -128.0]),
    ],
)
def test_bytes_keep_the_nearest_that_they_can(dtype, expected):
    values = jnp.array([0.0, 1.1 if dtype == "int8" else 1.01, -0.32, 460.0, 1e30, -jnp.inf])
    k = jnp.broadcast_to(values, (1, 1, 6))
    before = jnp.zeros((1, 1, 2, 1, 6), dtype)
    after = write_kv_cache(before, k, k, jnp.zeros(1, jnp.int32)).astype(jnp.float32)
    np.testing.assert_array_equal(after[0, 0, :, 0], np.broadcast_to(expected, (2, 6)))


@pytest.mark.parametrize(
    "shape",
    [
        "gemma-2-9b",
        *(pytest.param(name, marks=ONE_JAX) for name in ("gpt-oss-20b", "llama-3.1-8b")),
    ],
)
def test_op_without_a_plan_takes_every_feature(shape):
    model_shape = SHAPES[shape].with_kv_heads(1)
    if model_shape.window is not None:
        model_shape = model_shape._replace(window=100)
    for batch in mixed_batches(shape=model_shape)[:2]:
        q, kv_cache_layer, inputs, options, expected, _ = batch
        scale = model_shape.head_dim**-0.5
        out = paged_attention(q, kv_cache_layer, inputs, scale=scale, **options)
        np.testing.assert_allclose(out[: len(expected)], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(TINY, marks=ONE_JAX),
        TINY._replace(window=100, softcap=5.0, has_sinks=True),
    ],
)
@pytest.mark.parametrize("implementation", ["reference", "triton", "op"])
def test_log_sum_exp_is_returned_on_request(implementation, shape):
    # "op": on a CPU, whose own kernel hands this to XLA.
    assert_attends(implementation, mixed_batches(shape=shape), return_log_sum_exp=True)


def test_heads_that_do_not_divide_among_kv_heads_are_refused():
    [batch, *_] = decode_batches(shape=TINY)
    with pytest.raises(ValueError, match="q has 3 heads"):
        paged_attention(batch.q[:, :3], batch.kv_cache_layer, batch.inputs, scale=0.25)
