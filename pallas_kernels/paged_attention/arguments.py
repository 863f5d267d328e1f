"""What `paged_attention` refuses. On a GPU, an index that is off reads somebody else's memory."""

import math
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.choice import Shape, why_not
from pallas_kernels.paged_attention.inputs import AttentionInputs, AttentionPlan

ONE_BYTE_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")


def check_arguments(
    q: Any,
    kv_cache_layer: Any,
    inputs: AttentionInputs,
    *,
    window: Any,
    softcap: Any,
    sinks: Any,
) -> None:
    """Checks all that is known when a program is traced: shapes, dtypes, static options.

    Raises:
        ValueError: Naming the argument, what it is and what it must be.
    """
    _check_ranks(q=(q, "T N H"), kv_cache_layer=(kv_cache_layer, "P K 2 S H"))
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, two, block_size, cache_dim = kv_cache_layer.shape
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q has dtype {q.dtype}; it must be a float")
    if kv_cache_layer.dtype != q.dtype and str(kv_cache_layer.dtype) not in ONE_BYTE_DTYPES:
        raise ValueError(
            f"kv_cache_layer has dtype {kv_cache_layer.dtype}; it must be that of q, {q.dtype}, "
            f"or one of {', '.join(ONE_BYTE_DTYPES)}"
        )
    if two != 2:
        raise ValueError(
            f"kv_cache_layer has shape {kv_cache_layer.shape}; its third axis must be 2, keys and "
            "values (kv_cache_layer_shape gives the whole)"
        )
    if cache_dim != head_dim:
        raise ValueError(
            f"q has head_dim {head_dim}, and kv_cache_layer {cache_dim}; they must be equal"
        )
    if not num_kv_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_heads} heads; it must be a multiple of the cache's {num_kv_heads} KV heads"
        )
    _check_inputs(inputs, num_tokens)
    if window is not None and (not isinstance(window, Integral) or window < 1):
        raise ValueError(f"window is {window!r}; it must be None or a whole number from 1 on")
    if softcap is not None and not (isinstance(softcap, Real) and 0 < float(softcap) < math.inf):
        raise ValueError(f"softcap is {softcap!r}; it must be None or a number above 0")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(
            f"sinks has shape {sinks.shape}; it must be ({num_heads},), a number for each head of q"
        )
    if inputs.plan is not None:
        shape = Shape(
            num_heads, num_kv_heads, head_dim, block_size, str(q.dtype), str(kv_cache_layer.dtype)
        )
        _check_plan(inputs.plan, shape, num_tokens)


def _check_ranks(**arrays: tuple[Any, str]) -> None:
    for name, (array, axes) in arrays.items():
        if not isinstance(array, jax.Array):
            raise ValueError(f"{name} is a {type(array).__name__}; it must be a JAX array")
        if array.ndim != len(axes.split()):
            raise ValueError(f"{name} has shape {array.shape}; it must have the axes [{axes}]")


def _check_inputs(inputs: AttentionInputs, num_tokens: int) -> None:
    num_rows = inputs.seq_lens.shape[0] if inputs.seq_lens.ndim == 1 else -1
    expected = {
        "positions": (num_tokens,),
        "slot_mapping": (num_tokens,),
        "seq_lens": (num_rows,),
        "query_start_loc": (num_rows + 1,),
    }
    for name, shape in expected.items():
        array = getattr(inputs, name)
        if array.shape != shape:
            what = "[B]" if num_rows < 0 else f"{shape}, for {num_tokens} tokens in q"
            raise ValueError(f"inputs.{name} has shape {array.shape}; it must be {what}")
    tables = inputs.block_tables
    if tables.ndim != 2 or tables.shape[0] != num_rows:
        raise ValueError(
            f"inputs.block_tables has shape {tables.shape}; it must be [B, M] with B = {num_rows}, "
            "as seq_lens has"
        )
    for name in (*expected, "block_tables"):
        dtype = getattr(inputs, name).dtype
        if dtype != jnp.int32:
            raise ValueError(f"inputs.{name} has dtype {dtype}; it must be int32")


def _check_plan(plan: AttentionPlan, shape: Shape, num_tokens: int) -> None:
    kernels, tiling = plan.kernels, plan.kernels.tiling
    if kernels.backend == "xla":
        return
    if kernels.backend not in ("triton", "mosaic"):
        raise ValueError(
            f"inputs.plan is for the backend {kernels.backend!r}; it must be 'xla', 'triton' or "
            "'mosaic'"
        )
    if tiling is None or plan.arrays is None:
        raise ValueError(
            f"inputs.plan is for {kernels.backend} and has no tiling or no arrays; `choose` gives "
            "the one, `plan_attention` the others"
        )
    group = shape.num_heads // shape.num_kv_heads
    cut_for = (tiling.num_kv_heads, tiling.group, tiling.block_size)
    if cut_for != (shape.num_kv_heads, group, shape.block_size):
        raise ValueError(
            "inputs.plan was made for (KV heads, query heads of each, block size) = "
            f"{cut_for}; q and kv_cache_layer have {(shape.num_kv_heads, group, shape.block_size)}"
        )
    # Items may be fewer than the bucket has room for, as tests of slow interpreters have it.
    if plan.arrays.merge_starts.shape != (num_tokens + 1,):
        raise ValueError(
            f"inputs.plan was made for {plan.arrays.merge_starts.shape[0] - 1} tokens; q has "
            f"{num_tokens}"
        )
    problem = why_not(kernels.backend, shape, interpret=kernels.interpret)
    if problem is not None:
        raise ValueError(f"inputs.plan is for {kernels.backend}: {problem}")
