"""The oracle: dense gather and softmax in float32, one token at a time.

Slow and plain on purpose. Every implementation is compared with it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Real

from pallas_kernels.paged_attention.inputs import AttentionInputs


def paged_attention_reference(
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
    """Attends each token to all tokens of its request up to its own position.

    Arguments and result are those of `paged_attention`.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache_layer.shape[1]
    rows = jnp.searchsorted(inputs.query_start_loc, jnp.arange(num_tokens), side="right") - 1
    rows = jnp.clip(rows, 0, inputs.seq_lens.shape[0] - 1)
    is_padding = jnp.arange(num_tokens) >= inputs.query_start_loc[-1]

    def attend(q, row, position):
        kv = kv_cache_layer[inputs.block_tables[row]].astype(jnp.float32)  # [M, K, 2, S, H]
        k, v = (kv[:, :, i].swapaxes(1, 2).reshape(-1, num_kv_heads, head_dim) for i in (0, 1))
        is_visible = jnp.arange(k.shape[0]) <= position
        if window is not None:
            is_visible &= jnp.arange(k.shape[0]) > position - window
        q = q.astype(jnp.float32).reshape(num_kv_heads, -1, head_dim) * scale
        scores = jnp.einsum("kgh,ckh->kgc", q, jnp.where(is_visible[:, None, None], k, 0.0))
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(is_visible[None, None], scores, -jnp.inf)
        if sinks is not None:
            extra = sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1)
            scores = jnp.concatenate([scores, extra], axis=-1)
        log_sum_exp = jax.nn.logsumexp(scores, axis=-1).reshape(num_heads)
        weights = jax.nn.softmax(scores, axis=-1)[:, :, : k.shape[0]]
        out = jnp.einsum("kgc,ckh->kgh", weights, jnp.where(is_visible[:, None, None], v, 0.0))
        return out.reshape(num_heads, head_dim), log_sum_exp

    out, log_sum_exp = jax.lax.map(lambda args: attend(*args), (q, rows, inputs.positions))
    out = jnp.where(is_padding[:, None, None], 0.0, out).astype(q.dtype)
    log_sum_exp = jnp.where(is_padding[:, None], -jnp.inf, log_sum_exp)
    return (out, log_sum_exp) if return_log_sum_exp else out
