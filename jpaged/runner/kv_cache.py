"""The KV cache on the device: its size, its arrays, and copies of blocks.

The layout of an array is documented in `pallas_kernels.paged_attention`. There is one for each
layer of a KV group (`jpaged.kv_groups`), so that each is updated in place when the step donates
them; the blocks of all groups lie in the same arrays.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jpaged.config import ModelConfig
from pallas_kernels import xla_ffi
from pallas_kernels.paged_attention import kv_cache_layer_shape

KVCache = tuple[Float[Array, "P K 2 S H"], ...]


def layer_shapes(config: ModelConfig, *, num_blocks: int, block_size: int) -> list[tuple[int, ...]]:
    """Shape of each array for `num_blocks` usable blocks; block 0 comes on top."""
    shape = kv_cache_layer_shape(
        num_blocks=num_blocks + 1,
        num_kv_heads=config.num_kv_heads,
        block_size=block_size,
        head_dim=config.head_dim,
    )
    return [shape] * config.num_cached_layers


def block_bytes(config: ModelConfig, *, block_size: int, dtype: jnp.dtype) -> int:
    """Bytes that one block takes in all arrays."""
    per_layer = config.num_kv_heads * 2 * block_size * config.head_dim
    return config.num_cached_layers * per_layer * jnp.dtype(dtype).itemsize


def allocate(config: ModelConfig, *, num_blocks: int, block_size: int, dtype: jnp.dtype) -> KVCache:
    """Arrays whose slots hold nothing yet; on CPU they take memory only as they are written."""
    shapes = layer_shapes(config, num_blocks=num_blocks, block_size=block_size)
    make = xla_ffi.empty if jax.default_backend() == "cpu" else jnp.zeros
    return tuple(make(shape, dtype) for shape in shapes)


def copy_blocks(
    kv_cache: KVCache, sources: Int[Array, " C"], destinations: Int[Array, " C"]
) -> KVCache:
    """Copies whole blocks, all read before any is written; pairs of 0 are padding."""

    def copy(layer):
        blocks = layer.at[sources].get(mode="promise_in_bounds")
        return layer.at[destinations].set(blocks, mode="promise_in_bounds")

    return tuple(copy(layer) for layer in kv_cache)


def swap_out(kv_cache: KVCache, block_ids: Int[Array, " C"]) -> Float[Array, "C L K 2 S H"]:
    """Copies of whole blocks, each in one dense piece of all layers; id 0 is padding.

    Compiled with `out_shardings` of the memory kind "pinned_host", the result goes to the host in
    one transfer: pieces of a block and layer each would be too small for the bus.
    """
    blocks = [layer.at[block_ids].get(mode="promise_in_bounds") for layer in kv_cache]
    return jnp.stack(blocks, axis=1)


def swap_in(
    kv_cache: KVCache, block_ids: Int[Array, " C"], blocks: Float[Array, "C L K 2 S H"]
) -> KVCache:
    """Writes what `swap_out` has copied to other blocks; in place when the cache is donated."""
    return tuple(
        layer.at[block_ids].set(blocks[:, index], mode="promise_in_bounds")
        for index, layer in enumerate(kv_cache)
    )
