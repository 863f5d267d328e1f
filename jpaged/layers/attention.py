"""Attention over the paged KV cache: writes this step's K and V, then attends through tables."""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jpaged.config import ModelConfig
from jpaged.layers.linear import Linear
from jpaged.layers.norm import RMSNorm
from jpaged.layers.rotary import apply_rotary
from pallas_kernels.paged_attention import AttentionInputs, paged_attention, write_kv_cache


def _norm(config: ModelConfig, num_heads: int, dtype: jnp.dtype) -> RMSNorm | None:
    """Over so many heads together, if queries and keys have norms."""
    if config.qk_norm is None:
        return None
    size = num_heads * config.head_dim
    return RMSNorm(size, eps=config.rms_norm_eps, adds_one=config.norm_adds_one, dtype=dtype)


class Attention(nnx.Module):
    """Grouped-query self-attention with one fused projection for q, k and v.

    The fused weight is `[K, N / K + 2, H, D]`: for each KV head its query heads, its key and its
    value, so that tensor parallelism splits the first axis and nothing else.
    """

    def __init__(self, config: ModelConfig, *, window: int | None, dtype: jnp.dtype):
        """Makes zero weights for one layer of `config`, whose tokens see `window` at most."""
        self.num_kv_heads = config.num_kv_heads
        self.group = config.num_heads // config.num_kv_heads
        self.head_dim = config.head_dim
        self.window = window
        self.softcap = config.attention_softcap
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.qkv_proj = Linear(
            (config.num_kv_heads, self.group + 2, config.head_dim),
            config.hidden_size,
            spec=PartitionSpec("tensor", None, None, None),
            bias=config.qkv_bias,
            dtype=dtype,
        )
        is_row = config.qk_norm == "row"
        self.q_norm = _norm(config, config.num_heads if is_row else 1, dtype)
        self.k_norm = _norm(config, config.num_kv_heads if is_row else 1, dtype)
        self.o_proj = Linear(
            (config.hidden_size,),
            config.num_heads * config.head_dim,
            spec=PartitionSpec(None, "tensor"),
            bias=config.o_bias,
            dtype=dtype,
        )

    def __call__(
        self,
        x: Float[Array, "T D"],
        cos: Float[Array, "T F"],
        sin: Float[Array, "T F"],
        kv_cache_layer: Float[Array, "P K 2 S H"],
        inputs: AttentionInputs,
    ) -> tuple[Float[Array, "T D"], Float[Array, "P K 2 S H"]]:
        """Returns the layer's output and its cache with this step's tokens written."""
        num_tokens = x.shape[0]
        qkv = self.qkv_proj(x)
        q = qkv[:, :, : self.group].reshape(num_tokens, -1, self.head_dim)
        k, v = qkv[:, :, self.group], qkv[:, :, self.group + 1]
        if self.q_norm is not None and self.k_norm is not None:
            # Over one head, or over all.
            width = self.q_norm.weight.shape[0]
            q = self.q_norm(q.reshape(num_tokens, -1, width)).reshape(q.shape)
            width = self.k_norm.weight.shape[0]
            k = self.k_norm(k.reshape(num_tokens, -1, width)).reshape(k.shape)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        kv_cache_layer = write_kv_cache(kv_cache_layer, k, v, inputs.slot_mapping)
        out = paged_attention(
            q, kv_cache_layer, inputs, scale=self.scale, window=self.window, softcap=self.softcap
        )
        return self.o_proj(out.reshape(num_tokens, -1)), kv_cache_layer
