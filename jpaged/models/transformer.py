"""The decoder that all families share; what they differ in, their `ModelConfig` says."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jpaged.config import ModelConfig
from jpaged.layers.attention import Attention
from jpaged.layers.embedding import Embedding
from jpaged.layers.linear import Linear
from jpaged.layers.mlp import MLP
from jpaged.layers.norm import RMSNorm
from jpaged.layers.rotary import inverse_frequencies, rotary_tables
from pallas_kernels.paged_attention import AttentionInputs

KVCache = tuple[Float[Array, "P K 2 S H"], ...]


def _norm(config: ModelConfig, dtype: jnp.dtype) -> RMSNorm:
    return RMSNorm(
        config.hidden_size, eps=config.rms_norm_eps, adds_one=config.norm_adds_one, dtype=dtype
    )


class DecoderLayer(nnx.Module):
    """One transformer layer; attention and MLP each have norms before, after or around them."""

    def __init__(self, config: ModelConfig, *, window: int | None, dtype: jnp.dtype):
        """Makes zero weights for one layer of `config`, whose tokens see `window` at most."""

        def norm(is_there: bool) -> RMSNorm | None:
            return _norm(config, dtype) if is_there else None

        self.residual_scale = config.residual_scale
        self.attention_in_norm = norm(config.norm_before)
        self.attention = Attention(config, window=window, dtype=dtype)
        self.attention_out_norm = norm(config.norm_after)
        self.mlp_in_norm = norm(config.norm_before)
        self.mlp = MLP(config, dtype=dtype)
        self.mlp_out_norm = norm(config.norm_after)

    def __call__(
        self,
        x: Float[Array, "T D"],
        cos: Float[Array, "T F"],
        sin: Float[Array, "T F"],
        kv_cache_layer: Float[Array, "P K 2 S H"],
        inputs: AttentionInputs,
    ) -> tuple[Float[Array, "T D"], Float[Array, "P K 2 S H"]]:
        """Returns the layer's output and its cache with this step's tokens written."""
        with jax.named_scope("attention"):
            out, kv_cache_layer = self.attention(
                _apply(self.attention_in_norm, x), cos, sin, kv_cache_layer, inputs
            )
            x = x + self._scaled(_apply(self.attention_out_norm, out))
        with jax.named_scope("mlp"):
            out = self.mlp(_apply(self.mlp_in_norm, x))
            return x + self._scaled(_apply(self.mlp_out_norm, out)), kv_cache_layer

    def _scaled(self, out: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return out if self.residual_scale == 1.0 else out * self.residual_scale


def _apply(norm: RMSNorm | None, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    return x if norm is None else norm(x)


@jax.jit(static_argnums=0)
def _call_layer(graphdef, state, *args):
    return nnx.merge(graphdef, state)(*args)


class Transformer(nnx.Module):
    """A decoder-only transformer with rotary positions, grouped queries and gated MLPs."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype):
        """Makes zero weights in `dtype`; build it under `nnx.eval_shape` to allocate nothing."""
        self.config = config
        self.embed = Embedding(
            config.vocab_size, config.hidden_size, spec=PartitionSpec("tensor", None), dtype=dtype
        )
        self.layers = nnx.List(
            [
                DecoderLayer(config, window=config.window(layer), dtype=dtype)
                for layer in range(config.num_layers)
            ]
        )
        self.norm = _norm(config, dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(
                (config.vocab_size,),
                config.hidden_size,
                spec=PartitionSpec("tensor", None),
                dtype=dtype,
            )
        )

    def __call__(
        self,
        token_ids: Int[Array, " T"],
        positions: Int[Array, " T"],
        kv_cache: KVCache,
        inputs: tuple[AttentionInputs, ...],
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Returns final hidden states and the cache with this step's tokens written.

        Args:
            token_ids: Of the step.
            positions: Of each token in its request.
            kv_cache: One array for each layer of the largest KV group: `config.num_cached_layers`.
            inputs: One for each group of `config.kv_groups`.
        """
        config = self.config
        groups = config.kv_groups
        if len(inputs) != len(groups) or len(kv_cache) != config.num_cached_layers:
            raise ValueError(
                f"inputs and kv_cache have {len(inputs)} and {len(kv_cache)} entries; this model "
                f"needs {len(groups)}, one for each KV group, and {config.num_cached_layers}, one "
                "for each layer of the largest group"
            )
        places = {
            layer: (group, index)
            for group, (_, layers) in enumerate(groups)
            for index, layer in enumerate(layers)
        }
        max_model_len = config.max_model_len or config.max_position_embeddings
        tables = {
            rope: rotary_tables(
                positions,
                inverse_frequencies(config.head_dim, rope, max_model_len=max_model_len),
                scale=rope.attention_factor,
            )
            for rope in dict.fromkeys(map(config.rope_of, range(config.num_layers)))
        }
        x = self.embed(token_ids)
        if config.embedding_scale != 1.0:
            # Rounded as the weights are, as transformers does.
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        arrays = list(kv_cache)
        # Unrolled: a scan over stacked weights would copy each layer's slice every step. The
        # inner jit is traced and lowered once for all layers of a kind.
        for number, layer in enumerate(self.layers):
            cos, sin = tables[config.rope_of(number)]
            group, index = places[number]
            x, arrays[index] = _call_layer(
                *nnx.split(layer), x, cos, sin, arrays[index], inputs[group]
            )
        return self.norm(x), tuple(arrays)

    def logits(self, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Logits of every id, in float32."""
        head = self.embed.attend if self.lm_head is None else self.lm_head
        logits = head(hidden).astype(jnp.float32)
        if self.config.logits_scale != 1.0:
            logits = logits * self.config.logits_scale
        if self.config.logits_softcap is not None:
            logits = self.config.logits_softcap * jnp.tanh(logits / self.config.logits_softcap)
        return logits
