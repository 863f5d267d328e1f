"""PagedAttention (https://arxiv.org/abs/2309.06180): attention through block tables.

**Cache layout**, documented here and nowhere else. One array per layer, `[P, K, 2, S, H]`:

* `P` blocks; block 0 belongs to nobody and takes the writes of padding tokens.
* `K` KV heads, the axis that tensor parallelism splits.
* 2: keys, then values.
* `S` tokens per block, `H` dimensions per head: contiguous, so that a kernel moves the keys of
  one block and head in one piece, and one scatter writes keys and values.

A **slot** is `block_id * S + offset`. A **block table** lists the blocks of one request in the
order of its tokens.

GPU kernels need a plan of each step, made on the host. Here two requests of 7 and 20 tokens decode
one token each, in blocks of 16:

    shape = choice.Shape(num_heads=8, num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
    kernels, reason = choice.choose(shape, jax.devices()[0])  # once; backend="triton": by name
    inputs = AttentionInputs(
        positions=np.array([6, 19], np.int32),
        slot_mapping=np.array([1 * 16 + 6, 3 * 16 + 3], np.int32),
        query_start_loc=np.array([0, 1, 2], np.int32),
        seq_lens=np.array([7, 20], np.int32),
        block_tables=np.array([[1, 0], [2, 3]], np.int32),
    )
    inputs = jax.device_put(inputs._replace(plan=plan_attention(kernels, inputs)))
    kv_cache_layer = write_kv_cache(kv_cache_layer, k, v, inputs.slot_mapping)  # [2 2 64] each
    out = paged_attention(q, kv_cache_layer, inputs, scale=64**-0.5)  # q and out: [2 8 64]
"""

import functools
from typing import Any, Literal, overload

import jax
from jaxtyping import Array, Float, Real

from pallas_kernels.paged_attention.arguments import check_arguments
from pallas_kernels.paged_attention.cpu import DTYPES, paged_attention_cpu
from pallas_kernels.paged_attention.inputs import (
    AttentionInputs,
    AttentionPlan,
    Kernels,
    kv_cache_layer_shape,
    plan_attention,
    write_kv_cache,
)
from pallas_kernels.paged_attention.mosaic import paged_attention_mosaic
from pallas_kernels.paged_attention.triton import paged_attention_triton
from pallas_kernels.paged_attention.xla import paged_attention_xla

__all__ = [
    "AttentionInputs",
    "AttentionPlan",
    "Kernels",
    "kv_cache_layer_shape",
    "paged_attention",
    "plan_attention",
    "write_kv_cache",
]

IMPLEMENTATIONS = {
    "mosaic": paged_attention_mosaic,
    "triton": paged_attention_triton,
    "xla": paged_attention_xla,
}


@overload
def paged_attention(
    q: Float[Array, "T N H"],
    kv_cache_layer: Real[Array, "P K 2 S H"],
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    return_log_sum_exp: Literal[False] = False,
) -> Float[Array, "T N H"]: ...


@overload
def paged_attention(
    q: Float[Array, "T N H"],
    kv_cache_layer: Real[Array, "P K 2 S H"],
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    return_log_sum_exp: Literal[True],
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]: ...


def paged_attention(
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
    """Attends each token of a ragged batch to its request's cached tokens, itself included.

    Args:
        q: Queries, not yet scaled. `N` is a multiple of `K` (grouped-query attention).
        kv_cache_layer: One layer's blocks, in which this step's K and V are already written; in
            the dtype of `q` or one of a byte (float8_e4m3fn, float8_e5m2, int8).
        inputs: Which tokens belong to which request, and its block table.
        scale: Multiplies the logits; usually `H ** -0.5`.
        window: Tokens that a token sees at most, itself included; `None`: all.
        softcap: Bounds the logits smoothly; `None`: not.
        sinks: One extra logit per head that only adds to the denominator.
        return_log_sum_exp: Whether to return the logarithm of the denominator too.

    What is off costs nothing: options are static. On a CPU, `sinks` and `return_log_sum_exp` take
    the plain XLA code instead of the CPU's own kernel, and so may change the last bits.

    Returns:
        Attention output in the dtype of `q`; zeros for padding tokens. With `return_log_sum_exp`
        a second array: the natural logarithm of the sum over what each token sees of the
        exponentials of its logits, sinks included where there are sinks, in float32; -inf for
        padding tokens.

    Raises:
        ValueError: Naming the argument whose shape, dtype or value does not fit. Numbers in arrays
            are not looked at: ids and slots must be in the cache.
    """
    check_arguments(q, kv_cache_layer, inputs, window=window, softcap=softcap, sinks=sinks)
    if window is not None and window >= inputs.block_tables.shape[1] * kv_cache_layer.shape[3]:
        window = None  # no request is longer
    options: dict[str, Any] = {
        "scale": scale, "window": window, "softcap": softcap, "sinks": sinks
    }  # fmt: skip
    if return_log_sum_exp:
        options["return_log_sum_exp"] = True
    attend_xla = functools.partial(paged_attention_xla, **options)
    if inputs.plan is not None:
        attend = IMPLEMENTATIONS[inputs.plan.kernels.backend]
        return attend(q, kv_cache_layer, inputs, **options)
    attend_cpu = functools.partial(paged_attention_cpu, scale=scale, window=window, softcap=softcap)
    is_plain = sinks is None and not return_log_sum_exp
    if not is_plain or q.dtype != kv_cache_layer.dtype or q.dtype not in DTYPES:
        attend_cpu = attend_xla
    return jax.lax.platform_dependent(q, kv_cache_layer, inputs, cpu=attend_cpu, default=attend_xla)
