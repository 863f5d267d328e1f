"""What one step's attention reads, and where its keys and values go."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.paged_attention.plan import (
    PlanArrays,
    Tiling,
    cut_arrays,
    fill_plan,
    plan_sizes,
)  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """Which kernels attend; the static part of a plan.

    Attributes:
        backend: "mosaic", "triton" or "xla".
        tiling: How GPU kernels cut work; `None` for "xla".
        interpret: Run GPU kernels on the CPU, by the interpreter of the backend.
        prefill_backend: What takes items of many tokens, where it is not `backend`.
    """

    backend: str
    tiling: Tiling | None = None
    interpret: bool = False
    prefill_backend: str | None = None


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["kernels"])
@dataclass(frozen=True)
class AttentionPlan:
    """The work list of a step and the kernels that it was made for.

    One plan serves all layers that it was not made too short for: its window is `None`, or at least
    that of every layer. Kernels clip what they read to the window of their layer.

    Attributes:
        kernels: Not traced.
        arrays: See `plan.fill_plan`; `None` where the kernels have no tiling.
    """

    kernels: Kernels
    arrays: PlanArrays | None = None


class AttentionInputs(NamedTuple):
    """The ragged batch of one step, padded to a bucket of `T` tokens and `B` requests.

    Row `i` of the batch owns tokens `query_start_loc[i] : query_start_loc[i + 1]`, the last of
    which is the last of its `seq_lens[i]` tokens. Rows in use come first.

    Attributes:
        positions: Position of each token in its request; 0 for padding.
        slot_mapping: `block_id * block_size + offset` that each token's K and V are written to;
            padding goes to slot 0, in the block that belongs to nobody.
        query_start_loc: First token of each row, and the number of tokens in use at the end and
            in every padding row.
        seq_lens: Tokens of each row in the cache after this step's write; 0 for padding rows.
        block_tables: Block ids of each row, padded with 0.
        plan: The kernels and their work list; `None`: whatever the platform's own code is.
    """

    positions: Int[Array, " T"]
    slot_mapping: Int[Array, " T"]
    query_start_loc: Int[Array, " B1"]
    seq_lens: Int[Array, " B"]
    block_tables: Int[Array, "B M"]
    plan: AttentionPlan | None = None


def plan_attention(
    kernels: Kernels | None, inputs: AttentionInputs, *, window: int | None = None
) -> AttentionPlan | None:
    """The plan of one step, on the host; for `AttentionInputs.plan`.

    Args:
        kernels: From `choice.choose`; `None`: the platform's own code, which needs no plan.
        inputs: The step, in NumPy, padded to its bucket.
        window: The longest of the layers'; `None`: one sees all, or it is not known.
    """
    if kernels is None or kernels.tiling is None:
        return None if kernels is None else AttentionPlan(kernels)
    num_tokens, num_rows = len(inputs.positions), len(inputs.seq_lens)
    sizes = plan_sizes(kernels.tiling, num_tokens=num_tokens, num_rows=num_rows)
    arrays = cut_arrays(np.zeros(sizes.num_ints, np.int32), sizes)
    num_used = int(np.count_nonzero(np.asarray(inputs.seq_lens)))
    fill_plan(
        arrays,
        kernels.tiling,
        query_start_loc=np.asarray(inputs.query_start_loc)[: num_used + 1],
        seq_lens=np.asarray(inputs.seq_lens)[:num_used],
        block_tables=np.asarray(inputs.block_tables)[:num_used],
        window=window,
    )
    return AttentionPlan(kernels, arrays)


def unpack_plan(inputs: AttentionInputs) -> tuple[Tiling, PlanArrays, Kernels]:
    """What GPU kernels find in a step: the work list, how it was cut, and for which kernels."""
    plan = inputs.plan
    assert plan is not None and plan.arrays is not None and plan.kernels.tiling is not None
    return plan.kernels.tiling, plan.arrays, plan.kernels


def write_kv_cache(
    kv_cache_layer: Real[Array, "P K 2 S H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, " T"],
) -> Real[Array, "P K 2 S H"]:
    """Writes each token's K and V to its slot: one scatter, in place when the cache is donated.

    Slots must be in the cache: they are not checked, and what lies beyond is not defined.

    A cache of one byte per number gets the nearest that it can hold, the largest for what is
    beyond it; K and V come divided by their scales.
    """
    block_size = kv_cache_layer.shape[3]
    kv = _as_cached(jnp.stack([k, v], axis=2), kv_cache_layer.dtype)
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    return kv_cache_layer.at[block_ids, :, :, offsets].set(kv, mode="promise_in_bounds")


def _as_cached(values: Float[Array, "..."], dtype: jnp.dtype) -> Real[Array, "..."]:
    if dtype.itemsize > 1:
        return values.astype(dtype)
    values = values.astype(jnp.float32)
    if jnp.issubdtype(dtype, jnp.integer):
        values, limits = jnp.round(values), jnp.iinfo(dtype)
    else:
        limits = jnp.finfo(dtype)
    # A float8 would become NaN or infinite.
    return jnp.clip(values, float(limits.min), float(limits.max)).astype(dtype)


def kv_cache_layer_shape(
    *, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """Shape `[P, K, 2, S, H]` of one layer's cache; `num_blocks` counts block 0."""
    return (num_blocks, num_kv_heads, 2, block_size, head_dim)
