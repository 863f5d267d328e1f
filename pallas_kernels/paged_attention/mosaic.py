"""PagedAttention through Pallas' Mosaic GPU lowering, for sm_90 and later.

The kernel is `mosaic_kernel.py`; `mosaic_decode.py` and `mosaic_prefill.py` say how it is built for
few and for many rows. Partial results are merged by the kernel of `merge.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Real

from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.inputs import AttentionInputs
from pallas_kernels.paged_attention.merge import merge_partials
from pallas_kernels.paged_attention.mosaic_decode import decode_form
from pallas_kernels.paged_attention.mosaic_kernel import attend
from pallas_kernels.paged_attention.mosaic_prefill import prefill_form


def paged_attention_mosaic(
    q: Float[Array, "T N H"],
    kv_cache_layer: Real[Array, "P K 2 S H"],
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    return_log_sum_exp: bool = False,
) -> Float[Array, "T N H"] | tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Attends by the step's plan; arguments and result are those of `paged_attention`.

    Raises:
        ValueError: If the cache's dtype is not that of `q`.
    """
    if kv_cache_layer.dtype != q.dtype:
        raise ValueError(
            f"the KV cache is {kv_cache_layer.dtype}; mosaic takes that of q, {q.dtype}, only"
        )
    plan = inputs.plan
    assert plan is not None and plan.arrays is not None and plan.kernels.tiling is not None
    tiling, arrays = plan.kernels.tiling, plan.arrays
    num_tokens, num_heads, head_dim = q.shape
    num_partials = arrays.merge_rows.shape[0]
    results: Any = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((num_partials, num_heads, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_partials, num_heads), jnp.float32),
    )
    if return_log_sum_exp:
        results += (jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),)
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if arrays.tile_items.shape[0]:
        args = (q, kv_cache_layer, inputs, arrays.tile_items, results)
        if plan.kernels.prefill_backend == "triton":
            results = triton.attend(*args, num_rows=tiling.tile_rows, **options)
        else:
            form = prefill_form(tiling.tile_rows, head_dim)
            results = attend(*args, form=form, name="paged_attention_prefill", **options)
    results = attend(
        q,
        kv_cache_layer,
        inputs,
        arrays.decode_items,
        results,
        form=decode_form(tiling.decode_rows, head_dim),
        name="paged_attention_decode",
        **options,
    )
    out, partials, log_sums, *rest = results
    log_sum_exp = rest[0] if rest else None
    return merge_partials(out, partials, log_sums, inputs, sinks=sinks, log_sum_exp=log_sum_exp)
