"""Token embedding, and the output head when both share one matrix."""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jpaged.layers.linear import matmul


class Embedding(nnx.Module):
    """A table `[vocab_size, size]`, read by row or multiplied as a head."""

    def __init__(self, vocab_size: int, size: int, *, spec: PartitionSpec, dtype: jnp.dtype):
        """Makes a zero table partitioned by `spec`."""
        self.weight = nnx.Param(jnp.zeros((vocab_size, size), dtype), spec=spec)

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Reads one row per id; ids must be below `vocab_size`."""
        return self.weight[...].at[token_ids].get(mode="promise_in_bounds")

    def attend(self, x: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Logits of every id, as a tied head gives them."""
        return matmul(x, self.weight[...])
