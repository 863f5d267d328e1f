"""The gated feed-forward layer (SwiGLU and GeGLU, https://arxiv.org/abs/2002.05202)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jpaged.config import ModelConfig
from jpaged.layers.linear import Linear


class MLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))` with gate and up in one product `[2, F, D]`."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype):
        """Makes zero weights for one layer of `config`."""
        self.activation = config.activation
        self.gate_up_proj = Linear(
            (2, config.intermediate_size),
            config.hidden_size,
            spec=PartitionSpec(None, "tensor", None),
            bias=config.mlp_bias,
            dtype=dtype,
        )
        self.down_proj = Linear(
            (config.hidden_size,),
            config.intermediate_size,
            spec=PartitionSpec(None, "tensor"),
            bias=config.mlp_bias,
            dtype=dtype,
        )

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Applies the layer to each row."""
        gate_up = self.gate_up_proj(x)
        gate = gate_up[:, 0]
        gate = jax.nn.silu(gate) if self.activation == "silu" else jax.nn.gelu(gate)
        return self.down_proj(gate * gate_up[:, 1])
