"""PagedAttention through Pallas' Mosaic GPU lowering, for sm_90 and later.

The kernel is `mosaic_kernel.py`; `mosaic_decode.py` and `mosaic_prefill.py` say how it is built for
few and for many rows. Partial results are merged by the kernel of `merge.py`.
"""

from typing import Any

from jaxtyping import Array, Float, Real

from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.inputs import AttentionInputs, unpack_plan
from pallas_kernels.paged_attention.merge import merge_partials, result_shapes
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
    """Attends by the step's plan; arguments and result are those of `paged_attention`."""
    tiling, arrays, kernels = unpack_plan(inputs)
    head_dim = q.shape[2]
    results: Any = result_shapes(q, inputs, return_log_sum_exp=return_log_sum_exp)
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if arrays.tile_items.shape[0]:
        args = (q, kv_cache_layer, inputs, arrays.tile_items, results)
        if kernels.prefill_backend == "triton":
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
    return merge_partials(results, inputs, sinks=sinks)
