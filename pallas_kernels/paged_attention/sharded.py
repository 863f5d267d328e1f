"""Tensor parallelism: each device attends with its own KV heads, and no device asks another.

`q`, the cache and whatever is given per head are split over the heads; the step's inputs and its
plan are on every device. The plan is that of one device: `Tiling.num_kv_heads` counts its heads.

`write_kv_cache` needs no such wrapper: its scatter runs over blocks and slots, which are not split,
so the compiler leaves it where the heads are.
"""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Real

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.inputs import AttentionInputs


def paged_attention_sharded(
    q: Float[Array, "T N H"],
    kv_cache_layer: Real[Array, "P K 2 S H"],
    inputs: AttentionInputs,
    *,
    mesh: Mesh | AbstractMesh,
    axis: str,
    **options: Any,
) -> Any:
    """`paged_attention` with heads split over one axis of a mesh.

    Args:
        q: As in `paged_attention`; split over `N`.
        kv_cache_layer: Split over `K`.
        inputs: On every device.
        mesh: The devices.
        axis: Name of the mesh axis that splits heads; over others everything is replicated.
        **options: Those of `paged_attention`. Arrays of one dimension hold a number per head and
            are split, scalar arrays are on every device.

    Returns:
        What `paged_attention` returns, split over `N`.

    Raises:
        ValueError: If the devices cannot have equally many KV heads.
    """
    num_kv_heads, num_devices = kv_cache_layer.shape[1], mesh.shape[axis]
    if num_kv_heads % num_devices:
        raise ValueError(
            f"{num_kv_heads} KV heads cannot be split evenly over the {num_devices} devices of "
            f"mesh axis {axis!r}; give it a number of devices that divides {num_kv_heads}"
        )
    tiling = None if inputs.plan is None else inputs.plan.kernels.tiling
    assert tiling is None or tiling.num_kv_heads == num_kv_heads // num_devices

    arrays = {name: value for name, value in options.items() if isinstance(value, jax.Array)}
    statics = {name: value for name, value in options.items() if name not in arrays}
    replicated, by_head = PartitionSpec(), PartitionSpec(axis)
    heads_second = PartitionSpec(None, axis)

    def attend(q, kv_cache_layer, inputs, arrays):
        return paged_attention(q, kv_cache_layer, inputs, **statics, **arrays)

    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(
            heads_second,
            heads_second,
            replicated,
            {name: by_head if value.ndim else replicated for name, value in arrays.items()},
        ),
        # Of the output and, if asked for, of what else has tokens first and heads second.
        out_specs=heads_second,
        check_vma=False,  # Pallas' interpreter does not know which values vary over devices
    )(q, kv_cache_layer, inputs, arrays)
