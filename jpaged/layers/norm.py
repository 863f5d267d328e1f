"""Root-mean-square normalisation (https://arxiv.org/abs/1910.07467)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Scales each row to unit root mean square, then by a learned weight."""

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype):
        """Makes a weight of ones `[size]`."""
        self.weight = nnx.Param(jnp.ones((size,), dtype), spec=PartitionSpec(None))
        self.eps = eps

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Normalises in float32 and returns the dtype of `x`."""
        h = x.astype(jnp.float32)
        h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + self.eps)
        return self.weight[...][None] * h.astype(x.dtype)
