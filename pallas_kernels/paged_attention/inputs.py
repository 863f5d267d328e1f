"""What one step's attention reads, and where its keys and values go."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class AttentionInputs(NamedTuple):
    """The ragged batch of one step, padded to a bucket of `T` tokens and `B` requests.

    Row `i` of the batch owns tokens `query_start_loc[i] : query_start_loc[i + 1]`, the last of
    which is the last of its `seq_lens[i]` tokens. Rows in use come first.

    Attributes:
        positions: Position of each token in its request; 0 for padding.
        slot_mapping: `block_id * block_size + offset` that each token's K and V are written to;
            padding goes to slot 0, in the block that belongs to nobody.
        query_start_loc: First token of each row, and the number of tokens in use at the end and
            in every padding row.
        seq_lens: Tokens of each row in the cache after this step's write; 0 for padding rows.
        block_tables: Block ids of each row, padded with 0.
        plan: Work list of the GPU kernels; `None` on the XLA path, which needs only the rest.
    """

    positions: Int[Array, " T"]
    slot_mapping: Int[Array, " T"]
    query_start_loc: Int[Array, " B1"]
    seq_lens: Int[Array, " B"]
    block_tables: Int[Array, "B M"]
    plan: Any = None


def write_kv_cache(
    kv_cache_layer: Float[Array, "P K 2 S H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, " T"],
) -> Float[Array, "P K 2 S H"]:
    """Writes each token's K and V to its slot: one scatter, in place when the cache is donated."""
    block_size = kv_cache_layer.shape[3]
    kv = jnp.stack([k, v], axis=2).astype(kv_cache_layer.dtype)
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    return kv_cache_layer.at[block_ids, :, :, offsets].set(kv, mode="promise_in_bounds")


def kv_cache_layer_shape(
    *, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """Shape `[P, K, 2, S, H]` of one layer's cache; `num_blocks` counts block 0."""
    return (num_blocks, num_kv_heads, 2, block_size, head_dim)
