"""The Llama family: Llama 2 and 3, SmolLM2, Mistral without a window."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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


class DecoderLayer(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype):
        """Makes zero weights for one layer of `config`."""
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(config.hidden_size, eps=eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype)
        self.post_attention_norm = RMSNorm(config.hidden_size, eps=eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype)

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
                self.input_norm(x), cos, sin, kv_cache_layer, inputs
            )
        x = x + out
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_attention_norm(x)), kv_cache_layer


@jax.jit(static_argnums=0)
def _call_layer(graphdef, state, *args):
    return nnx.merge(graphdef, state)(*args)


class Llama(nnx.Module):
    """A decoder-only transformer with rotary positions, grouped queries and gated MLPs."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype):
        """Makes zero weights in `dtype`; build it under `nnx.eval_shape` to allocate nothing."""
        self.config = config
        self.embed = Embedding(
            config.vocab_size, config.hidden_size, spec=PartitionSpec("tensor", None), dtype=dtype
        )
        self.layers = nnx.List(
            [DecoderLayer(config, dtype=dtype) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
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
        inputs: AttentionInputs,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Returns final hidden states and the cache with this step's tokens written."""
        config = self.config
        inv_freq = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        cos, sin = rotary_tables(positions, inv_freq)
        x = self.embed(token_ids)
        new_cache = []
        # Unrolled: a scan over stacked weights would copy each layer's slice every step. The
        # inner jit is traced and lowered once for all layers of a kind.
        for layer, kv_cache_layer in zip(self.layers, kv_cache, strict=True):
            x, kv_cache_layer = _call_layer(*nnx.split(layer), x, cos, sin, kv_cache_layer, inputs)
            new_cache.append(kv_cache_layer)
        return self.norm(x), tuple(new_cache)

    def logits(self, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Logits of every id, in float32."""
        head = self.embed.attend if self.lm_head is None else self.lm_head
        return head(hidden).astype(jnp.float32)


class LeafSource(NamedTuple):
    """How one leaf is put together from a checkpoint's tensors.

    Attributes:
        names: Hugging Face tensor names.
        build: Makes the leaf from those tensors; the shapes are the checkpoint's.
    """

    names: tuple[str, ...]
    build: Callable[..., np.ndarray]


def _same(w: np.ndarray) -> np.ndarray:
    return w


def leaf_sources(config: ModelConfig) -> dict[str, LeafSource]:
    """Where each leaf (by its path, joined with dots) comes from in a Hugging Face checkpoint."""
    kv_heads, head_dim = config.num_kv_heads, config.head_dim
    group = config.num_heads // kv_heads

    def fuse_qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        rest = q.shape[1:]
        q = q.reshape(kv_heads, group, head_dim, *rest)
        k, v = (w.reshape(kv_heads, 1, head_dim, *rest) for w in (k, v))
        return np.concatenate([q, k, v], axis=1)

    def stack(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return np.stack([gate, up])

    sources = {
        "embed.weight": LeafSource(("model.embed_tokens.weight",), _same),
        "norm.weight": LeafSource(("model.norm.weight",), _same),
    }
    if not config.tie_word_embeddings:
        sources["lm_head.weight"] = LeafSource(("lm_head.weight",), _same)
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        attn, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        sources[f"{ours}.input_norm.weight"] = LeafSource(
            (f"{theirs}.input_layernorm.weight",), _same
        )
        sources[f"{ours}.post_attention_norm.weight"] = LeafSource(
            (f"{theirs}.post_attention_layernorm.weight",), _same
        )
        for kind, present in (("weight", True), ("bias", config.attention_bias)):
            if present:
                sources[f"{ours}.attention.qkv_proj.{kind}"] = LeafSource(
                    tuple(f"{attn}.{p}_proj.{kind}" for p in "qkv"), fuse_qkv
                )
                sources[f"{ours}.attention.o_proj.{kind}"] = LeafSource(
                    (f"{attn}.o_proj.{kind}",), _same
                )
        for kind, present in (("weight", True), ("bias", config.mlp_bias)):
            if present:
                sources[f"{ours}.mlp.gate_up_proj.{kind}"] = LeafSource(
                    (f"{mlp}.gate_proj.{kind}", f"{mlp}.up_proj.{kind}"), stack
                )
                sources[f"{ours}.mlp.down_proj.{kind}"] = LeafSource(
                    (f"{mlp}.down_proj.{kind}",), _same
                )
    return sources
