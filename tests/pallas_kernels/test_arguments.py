"""What the op refuses, and the example in its docstring."""

import textwrap
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.paged_attention as op
from pallas_kernels.paged_attention import choice, paged_attention
from pallas_kernels.paged_attention.arguments import check_arguments
from pallas_kernels.paged_attention.choice import Shape, choose
from pallas_kernels.paged_attention.shapes import ModelShape
from tests.pallas_kernels.attention_batches import Batch, dense_attention, make_batch, with_plan

TINY = ModelShape(4, 2, 16)


def tiny_batch(**options) -> Batch:
    options = {"shape": TINY, "num_tokens": 3, "num_rows": 2, "max_context": 32} | options
    return make_batch([(1, 9), (2, 20)], **options)


def check(batch: Batch, **options):
    """What the op does first; in tests, its own annotations would catch some of this before."""
    options = {"window": None, "softcap": None, "sinks": None} | options
    check_arguments(batch.q, batch.kv_cache_layer, batch.inputs, **options)


def test_the_op_checks_its_arguments():
    batch = tiny_batch()
    with pytest.raises(ValueError, match="window is 0"):
        paged_attention(batch.q, batch.kv_cache_layer, batch.inputs, scale=0.25, window=0)
    check(batch)
    check(with_plan(batch, "triton"), window=9, softcap=3.0, sinks=jnp.zeros(4))


def narrowed(batch: Batch, **inputs) -> Batch:
    return batch._replace(inputs=batch.inputs._replace(**inputs))


INT = jnp.int32
CASES = {
    "head_dim of q": (
        lambda b: b._replace(q=b.q[:, :, :8]), "q has head_dim 8, and kv_cache_layer 16"
    ),
    "axes of q": (lambda b: b._replace(q=b.q[0]), r"q has shape \(4, 16\); it must have the axes"),
    "whole numbers": (lambda b: b._replace(q=b.q.astype(INT)), "q has dtype int32"),
    "heads": (lambda b: b._replace(q=b.q[:, :3]), "q has 3 heads; it must be a multiple"),
    "tokens": (lambda b: b._replace(q=b.q[:2]), r"inputs.positions has shape \(3,\); .* 2 tokens"),
    "axes of the cache": (
        lambda b: b._replace(kv_cache_layer=b.kv_cache_layer[0]), "kv_cache_layer has shape"
    ),
    "keys without values": (
        lambda b: b._replace(kv_cache_layer=b.kv_cache_layer[:, :, :1]), "third axis must be 2"
    ),
    "dtype of the cache": (
        lambda b: b._replace(kv_cache_layer=b.kv_cache_layer.astype(jnp.float16)),
        "kv_cache_layer has dtype float16; it must be that of q, float32",
    ),
    "NumPy cache": (
        lambda b: b._replace(kv_cache_layer=np.asarray(b.kv_cache_layer)),
        "kv_cache_layer is a ndarray; it must be a JAX array",
    ),
    "float tables": (
        lambda b: narrowed(b, block_tables=b.inputs.block_tables.astype(jnp.float32)),
        "inputs.block_tables has dtype float32; it must be int32",
    ),
    "rows of tables": (
        lambda b: narrowed(b, block_tables=b.inputs.block_tables[:1]), r"\[B, M\] with B = 2"
    ),
    "starts": (
        lambda b: narrowed(b, query_start_loc=b.inputs.query_start_loc[:-1]),
        r"inputs.query_start_loc has shape \(2,\); it must be \(3,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", [None, "triton"])
def test_arguments_that_do_not_fit_are_refused_by_name(case, backend):
    change, message = CASES[case]
    batch = tiny_batch()
    if backend is not None:
        batch = with_plan(batch, backend)
    with pytest.raises(ValueError, match=message):
        check(change(batch))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window is 0; it must be None or a whole number from 1 on"),
        ({"window": -3}, "window is -3"),
        ({"window": 2.5}, "window is 2.5"),
        ({"softcap": 0.0}, "softcap is 0.0; it must be None or a number above 0"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"sinks": jnp.zeros(3)}, r"sinks has shape \(3,\); it must be \(4,\)"),
        ({"sinks": jnp.zeros((4, 1))}, "sinks has shape"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        check(tiny_batch(), **options)


def with_kernels(batch: Batch, **fields) -> Batch:
    plan = batch.inputs.plan
    assert plan is not None
    return narrowed(batch, plan=replace(plan, kernels=replace(plan.kernels, **fields)))


def test_plans_for_something_else_are_refused():
    batch = with_plan(tiny_batch(), "triton")
    other_heads = with_plan(tiny_batch(shape=ModelShape(4, 4, 16)), "triton")
    other_blocks = with_plan(tiny_batch(block_size=32), "triton")
    other_bucket = with_plan(tiny_batch(num_tokens=4), "triton")
    for refused, message in (
        (with_kernels(batch, backend="nonsense"), "the backend 'nonsense'"),
        (with_kernels(batch, tiling=None), "has no tiling"),
        (with_kernels(batch, backend="mosaic"), "mosaic takes head_dim 64, 128 and 256"),
        (narrowed(batch, plan=other_heads.inputs.plan), r"= \(4, 1, 16\); .* have \(2, 2, 16\)"),
        (narrowed(batch, plan=other_blocks.inputs.plan), "block size"),
        (narrowed(batch, plan=other_bucket.inputs.plan), "made for 4 tokens; q has 3"),
    ):
        with pytest.raises(ValueError, match=message):
            check(refused)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (Shape(4, 2, 64, 16, "float12"), {}, "Shape.dtype is 'float12', no dtype"),
        (Shape(4, 0, 64, 16, "float32"), {}, "Shape.num_kv_heads is 0"),
        (Shape(5, 2, 64, 16, "float32"), {}, "Shape.num_heads is 5; it must be a multiple"),
        (Shape(4, 2, 64, 16, "float32"), {"fixed_split": -1}, "fixed_split is -1"),
    ],
)
def test_shapes_that_are_none_are_refused(shape, options, message):
    with pytest.raises(ValueError, match=message):
        choose(shape, jax.devices()[0], **options)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_the_docstring_shows_how_to_plan(backend):
    """Its lines run as they stand, and give dense attention."""
    text = str(op.__doc__)
    example = textwrap.dedent(text[text.index("    shape = ") :])
    example = example.replace(
        "jax.devices()[0])", f"jax.devices()[0], backend={backend!r})"
    ).replace("bfloat16", "float32")
    random = np.random.default_rng(0)
    lengths = (7, 20)
    k, v = (random.standard_normal((2, 32, 2, 64), np.float32) for _ in range(2))
    cache = np.zeros((4, 2, 2, 16, 64), np.float32)
    for row, blocks in enumerate(([1], [2, 3])):
        for position in range(lengths[row] - 1):  # the example writes the last
            block, offset = blocks[position // 16], position % 16
            cache[block, :, 0, offset], cache[block, :, 1, offset] = (
                k[row, position],
                v[row, position],
            )
    q = random.standard_normal((2, 8, 64), np.float32)
    last = [(row, length - 1) for row, length in enumerate(lengths)]
    names = {
        "jax": jax, "np": np, "choice": choice, "AttentionInputs": op.AttentionInputs,
        "plan_attention": op.plan_attention, "paged_attention": op.paged_attention,
        "write_kv_cache": op.write_kv_cache, "kv_cache_layer": jnp.asarray(cache),
        "k": jnp.stack([k[at] for at in last]), "v": jnp.stack([v[at] for at in last]),
        "q": jnp.asarray(q),
    }  # fmt: skip
    exec(example, names)
    for row, length in enumerate(lengths):
        expected, _ = dense_attention(q[row : row + 1], k[row, :length], v[row, :length], 64**-0.5)
        np.testing.assert_allclose(names["out"][row], expected[0], atol=1e-5)
