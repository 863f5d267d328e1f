"""Attention with heads split over devices equals attention on one, and sends nothing."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import triton as plt
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

from pallas_kernels.paged_attention import AttentionPlan, Kernels, paged_attention, write_kv_cache
from pallas_kernels.paged_attention.shapes import ModelShape
from pallas_kernels.paged_attention.sharded import paged_attention_sharded
from tests.pallas_kernels.attention_batches import Batch, make_batch, with_plan

PLAIN = ModelShape(8, 4, 16)
WITH_ALL = ModelShape(8, 4, 16, window=100, softcap=20.0, has_sinks=True)
ONE_JAX = pytest.mark.one_jax
MIXED = [(65, 65), (1, 40), (17, 300), (1, 1)]
HEADS_SECOND = PartitionSpec(None, "tensor")
COLLECTIVE = re.compile(
    "all.gather|all.reduce|all.to.all|reduce.scatter|collective.permute|collective.broadcast"
)


def make_mesh(num_devices: int) -> Mesh:
    return jax.make_mesh(
        (num_devices,),
        ("tensor",),
        axis_types=(AxisType.Explicit,),
        devices=jax.devices()[:num_devices],
    )


def plan_for(batch: Batch, backend: str, num_devices: int) -> Batch:
    """The batch with the plan of one of the devices; "cpu" has none."""
    if backend == "cpu":
        return batch
    if backend == "xla":
        return batch._replace(inputs=batch.inputs._replace(plan=AttentionPlan(Kernels("xla"))))
    num_kv_heads = batch.kv_cache_layer.shape[1] // num_devices
    num_heads = batch.q.shape[1] // num_devices
    part = batch._replace(
        q=batch.q[:, :num_heads], kv_cache_layer=batch.kv_cache_layer[:, :num_kv_heads]
    )
    return batch._replace(inputs=with_plan(part, backend).inputs)


def split(batch: Batch, mesh: Mesh) -> Batch:
    """The batch with its arrays on the devices of a mesh."""

    def put(spec: PartitionSpec, tree):
        return jax.device_put(tree, NamedSharding(mesh, spec))

    options = {
        name: put(PartitionSpec("tensor"), value) if isinstance(value, jax.Array) else value
        for name, value in batch.options.items()
    }
    return batch._replace(
        q=put(HEADS_SECOND, batch.q),
        kv_cache_layer=put(HEADS_SECOND, batch.kv_cache_layer),
        inputs=put(PartitionSpec(), batch.inputs),
        options=options,
    )


def attend_sharded(batch: Batch, mesh: Mesh):
    """Compiles and runs; returns the result and the program's text."""
    with jax.set_mesh(mesh):
        batch = split(batch, mesh)
        arrays = {k: v for k, v in batch.options.items() if isinstance(v, jax.Array)}
        options = {k: v for k, v in batch.options.items() if k not in arrays}
        options |= {"mesh": mesh, "axis": "tensor", "scale": 0.25}

        @jax.jit
        def attend(q, kv_cache_layer, inputs, arrays):
            return paged_attention_sharded(q, kv_cache_layer, inputs, **options, **arrays)

        arguments = (batch.q, batch.kv_cache_layer, batch.inputs, arrays)
        compiled = attend.lower(*arguments).compile()
        return compiled(*arguments), compiled.as_text()


@functools.cache
def on_one_device(backend: str, shape: ModelShape) -> tuple[Batch, jax.Array]:
    """A batch and its attention."""
    batch = make_batch(MIXED, shape=shape, num_tokens=90, num_rows=4)
    attend = jax.jit(functools.partial(paged_attention, scale=0.25, **batch.options))
    return batch, attend(batch.q, batch.kv_cache_layer, plan_for(batch, backend, 1).inputs)


@pytest.mark.parametrize(
    "shape",
    [pytest.param(PLAIN, marks=ONE_JAX), WITH_ALL],
    ids=["plain", "all features"],
)
@pytest.mark.parametrize(
    "num_devices", [pytest.param(1, marks=ONE_JAX), 2, pytest.param(4, marks=ONE_JAX)]
)
@pytest.mark.parametrize("backend", ["cpu", "xla", "triton"])
def test_split_heads_give_what_one_device_gives(backend, num_devices, shape):
    """Bit by bit in the kernel, since heads do not know each other; XLA fuses as it likes."""
    batch, expected = on_one_device(backend, shape)
    out, text = attend_sharded(plan_for(batch, backend, num_devices), make_mesh(num_devices))
    assert not COLLECTIVE.search(text)
    assert out.sharding.spec[:2] == (None, "tensor")
    if backend == "triton":
        np.testing.assert_array_equal(out, expected)
    else:
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_rows_that_are_split_too_are_merged_on_each_device():
    rows = [(1, 1100), (1, 40)]
    batch = make_batch(rows, shape=PLAIN, num_tokens=2, num_rows=2, max_context=1100)
    batch = plan_for(batch, "triton", 2)
    assert batch.inputs.plan is not None and batch.inputs.plan.arrays is not None
    assert batch.inputs.plan.arrays.merge_starts[-1] > 1
    out, text = attend_sharded(batch, make_mesh(2))
    assert not COLLECTIVE.search(text)
    np.testing.assert_allclose(out, batch.expected, rtol=1e-5, atol=1e-5)


def test_lowering_for_four_gpus_has_kernels_and_no_collectives():
    batch = plan_for(make_batch(MIXED, shape=WITH_ALL, num_tokens=90, num_rows=4), "triton", 4)
    plan = batch.inputs.plan
    assert plan is not None
    kernels = dataclasses.replace(plan.kernels, interpret=False)
    inputs = batch.inputs._replace(plan=dataclasses.replace(plan, kernels=kernels))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((4,), ("tensor",), (AxisType.Explicit,), abstract_device=device)
    options = {"scale": 0.25, "window": 100, "softcap": 20.0}

    def attend(q, kv_cache_layer, inputs, sinks):
        return paged_attention_sharded(
            q, kv_cache_layer, inputs, mesh=mesh, axis="tensor", sinks=sinks, **options
        )

    def shapes(spec: PartitionSpec, tree):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    with use_abstract_mesh(mesh):
        traced = jax.jit(attend).trace(
            shapes(HEADS_SECOND, batch.q),
            shapes(HEADS_SECOND, batch.kv_cache_layer),
            shapes(PartitionSpec(), inputs),
            shapes(PartitionSpec("tensor"), batch.options["sinks"]),
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@{plt.CUSTOM_CALL_TARGET_NAME}") == 3  # prefill, decode, merge
    assert "num_partitions = 4" in text and not COLLECTIVE.search(text)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_keys_and_values_are_written_where_their_heads_are(num_devices):
    random = np.random.default_rng(0)
    cache = random.standard_normal((9, 4, 2, 16, 8), np.float32)
    k, v = random.standard_normal((2, 5, 4, 8), np.float32)
    slots = np.array([17, 18, 40, 0, 0], np.int32)
    expected = write_kv_cache(*map(jnp.asarray, (cache, k, v, slots)))
    mesh = make_mesh(num_devices)
    with jax.set_mesh(mesh):
        arguments = [jax.device_put(x, NamedSharding(mesh, HEADS_SECOND)) for x in (cache, k, v)]
        arguments.append(jax.device_put(slots, NamedSharding(mesh, PartitionSpec())))
        write = jax.jit(write_kv_cache, donate_argnums=0).lower(*arguments).compile()
        out = write(*arguments)
    assert not COLLECTIVE.search(write.as_text())
    assert out.sharding.spec[:2] == (None, "tensor")
    assert write.memory_analysis().alias_size_in_bytes == cache.nbytes // num_devices
    np.testing.assert_array_equal(out[1:], expected[1:])


def test_log_sums_are_split_too():
    batch = make_batch(MIXED, shape=WITH_ALL, num_tokens=90, num_rows=4)
    batch = batch._replace(options=batch.options | {"return_log_sum_exp": True})
    expected = paged_attention(
        batch.q, batch.kv_cache_layer, batch.inputs, **batch.options, scale=0.25
    )
    results, _ = attend_sharded(plan_for(batch, "xla", 4), make_mesh(4))
    for result, value in zip(results, expected, strict=True):
        assert result.sharding.spec[:2] == (None, "tensor")
        np.testing.assert_allclose(result[:84], value[:84], rtol=1e-5, atol=1e-6)


def test_heads_that_cannot_be_split_evenly_are_refused():
    batch = make_batch(MIXED, shape=ModelShape(6, 3, 16), num_tokens=90, num_rows=4)
    message = "3 KV heads cannot be split evenly over the 2 devices of mesh axis 'tensor'"
    with pytest.raises(ValueError, match=message):
        paged_attention_sharded(
            batch.q,
            batch.kv_cache_layer,
            batch.inputs,
            mesh=make_mesh(2),
            axis="tensor",
            scale=1.0,
        )
