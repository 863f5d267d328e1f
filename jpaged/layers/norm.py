"""Root-mean-square normalisation (https://arxiv.org/abs/1910.07467)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Scales the last axis to unit root mean square, then by a learned weight."""

    def __init__(self, size: int, *, eps: float, adds_one: bool = False, dtype: jnp.dtype):
        """Makes a weight `[size]` that changes nothing; it scales by one plus it if `adds_one`."""
        self.adds_one = adds_one
        self.weight = nnx.Param(
            jnp.full((size,), 0 if self.adds_one else 1, dtype), spec=PartitionSpec(None)
        )
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalises in float32 and returns the dtype of `x`."""
        h = x.astype(jnp.float32)
        h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        if self.adds_one:  # in float32: 16 bits would round most of the weight away
            return (h * (1 + weight.astype(jnp.float32))).astype(x.dtype)
        return weight * h.astype(x.dtype)
