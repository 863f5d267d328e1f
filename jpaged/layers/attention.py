"""Attention over the paged KV cache: writes this step's K and V, then attends through tables."""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jpaged.config import ModelConfig
from jpaged.layers.linear import Linear
from jpaged.layers.rotary import apply_rotary
from pallas_kernels.paged_attention import AttentionInputs, paged_attention, write_kv_cache


class Attention(nnx.Module):
    """Grouped-query self-attention with one fused projection for q, k and v.

    The fused weight is `[K, N / K + 2, H, D]`: for each KV head its query heads, its key and its
    value, so that tensor parallelism splits the first axis and nothing else.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype):
        """Makes zero weights for one layer of `config`."""
        self.num_kv_heads = config.num_kv_heads
        self.group = config.num_heads // config.num_kv_heads
        self.head_dim = config.head_dim
        self.qkv_proj = Linear(
            (config.num_kv_heads, self.group + 2, config.head_dim),
            config.hidden_size,
            spec=PartitionSpec("tensor", None, None, None),
            bias=config.attention_bias,
            dtype=dtype,
        )
        self.o_proj = Linear(
            (config.hidden_size,),
            config.num_heads * config.head_dim,
            spec=PartitionSpec(None, "tensor"),
            bias=config.attention_bias,
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
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        kv_cache_layer = write_kv_cache(kv_cache_layer, k, v, inputs.slot_mapping)
        out = paged_attention(q, kv_cache_layer, inputs, scale=self.head_dim**-0.5)
        return self.o_proj(out.reshape(num_tokens, -1)), kv_cache_layer
