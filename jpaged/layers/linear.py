"""Products with weights: the one place that knows how a weight meets an activation.

A weight is stored as `[out axes..., in axis]`, the layout of Hugging Face checkpoints, so loading
never transposes. Each weight carries a `PartitionSpec` as the metadata `spec` beside its shape.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float


def matmul_weight_left(x: Float[Array, "T D"], w: Float[Array, "O D"]) -> Float[Array, "T O"]:
    """The form that XLA:CPU runs fast on few rows: the weight as the left operand.

    Eigen packs the right operand of a product before it multiplies. With the weight on the left
    only the small activation is packed: 58 instead of 33 GFLOP/s at 16 rows of 576 x 1536 on two
    Zen cores (benchmarks/cpu_forms.py). Without the barrier the compiler folds the transpose back
    into the product and the gain is lost. A one-row bfloat16 product falls to a scalar loop, ten
    times slower than two rows.
    """
    rows = x.shape[0]
    if rows == 1 and x.dtype != jnp.float32:
        x = jnp.concatenate([x, x])
    y = jax.lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y.astype(x.dtype)).T[:rows]


def _matmul(x: Float[Array, "T D"], w: Float[Array, "O D"]) -> Float[Array, "T O"]:
    y = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def _matmul_cpu(x: Float[Array, "T D"], w: Float[Array, "O D"]) -> Float[Array, "T O"]:
    # From 128 rows on nothing is gained. The transposed logits of a vocabulary leave the caches,
    # and what reads them transposes them again: they lose from 64 rows on (decision 007).
    is_small = x.shape[0] < (128 if w.shape[0] < 16384 else 64)
    return matmul_weight_left(x, w) if is_small else _matmul(x, w)


def matmul(x: Float[Array, "T D"], w: Float[Array, "O D"]) -> Float[Array, "T O"]:
    """`x @ w.T`, accumulated in float32, in the form that suits the platform compiled for."""
    return jax.lax.platform_dependent(x, w, cpu=_matmul_cpu, default=_matmul)


class Linear(nnx.Module):
    """A product over the last axis of the weight, with an optional bias.

    Several output axes keep a fused projection (q, k and v; gate and up) sharded along one of
    them, which a flat concatenation of rows would not allow.
    """

    def __init__(
        self,
        out_shape: tuple[int, ...],
        in_size: int,
        *,
        spec: PartitionSpec,
        bias: bool = False,
        dtype: jnp.dtype,
    ):
        """Makes zero weights `[*out_shape, in_size]` in `dtype`, partitioned by `spec`."""
        self.weight = nnx.Param(jnp.zeros((*out_shape, in_size), dtype), spec=spec)
        self.bias = (
            nnx.Param(jnp.zeros(out_shape, dtype), spec=PartitionSpec(*spec[:-1])) if bias else None
        )

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T ..."]:
        """Multiplies each row of `x`."""
        w = self.weight[...]
        out_shape = w.shape[:-1]
        y = matmul(x, w.reshape(math.prod(out_shape), w.shape[-1]))
        y = y.reshape(x.shape[0], *out_shape)
        return y if self.bias is None else y + self.bias[...][None]
