"""What CPUs run: blockwise online softmax over gathered blocks, in plain XLA.

The batch is walked as **tiles**: a run of query tokens of one request. A request with one token
this step is a tile of one row; a longer chunk is cut into tiles of `TILE` rows. Each tile walks
its context in pieces of `CHUNK` tokens with the online softmax of FlashAttention
(https://arxiv.org/abs/2205.14135). Both walks have trip counts that depend on the data, so the
time follows the tokens there are, not the bucket, and one program serves every context length.
A piece (a few hundred KiB) stays in the processor's second-level cache between the gather and
the two products; gathering the whole context of the batch first costs a trip to memory and was
slower in every form tried (benchmarks/cpu_forms.py).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.inputs import AttentionInputs

TILE = 64
CHUNK = 256


def paged_attention_xla(
    q: Float[Array, "T N H"],
    kv_cache_layer: Float[Array, "P K 2 S H"],
    inputs: AttentionInputs,
    *,
    scale: float,
) -> Float[Array, "T N H"]:
    """Attends each token to its request's cached tokens; arguments as in `paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache_layer.shape[1]
    num_requests = inputs.seq_lens.shape[0]
    starts, ends = inputs.query_start_loc[:-1], inputs.query_start_loc[1:]
    query_lens = ends - starts
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    q = q.reshape(num_tokens, num_kv_heads, -1, head_dim)

    def attend(out, row, start, tile):
        """Attends tokens `start : start + tile` of `row` and writes those that are its own."""
        tokens = lax.dynamic_slice_in_dim(q, start, tile)  # [tile, K, G, H]
        positions = inputs.seq_lens[row] - ends[row] + start + jnp.arange(tile)
        result = _attend_tile(
            tokens, positions, inputs.seq_lens[row], inputs.block_tables[row], kv_cache_layer
        )
        if tile > 1:
            is_own = start + jnp.arange(tile) < ends[row]
            before = lax.dynamic_slice_in_dim(out, start, tile)
            result = jnp.where(is_own[:, None, None, None], result, before)
        return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    if num_tokens == num_requests:  # a decode program: row i is token i
        num_rows = jnp.sum(query_lens > 0)
        out = lax.fori_loop(0, num_rows, lambda i, out: attend(out, i, i, 1), jnp.zeros_like(q))
        return out.reshape(num_tokens, num_heads, head_dim)

    # Padding at the end, so that the slice of the last tile is not shifted back.
    q = jnp.pad(q, ((0, TILE), (0, 0), (0, 0), (0, 0)))
    out = jnp.zeros_like(q)
    single_rows = jnp.argsort(query_lens != 1, stable=True)
    out = lax.fori_loop(
        0,
        jnp.sum(query_lens == 1),
        lambda i, out: attend(out, single_rows[i], starts[single_rows[i]], 1),
        out,
    )
    num_tiles = jnp.where(query_lens > 1, (query_lens + TILE - 1) // TILE, 0)
    tile_ends = jnp.cumsum(num_tiles)

    def attend_tile(i, out):
        row = jnp.searchsorted(tile_ends, i, side="right", method="compare_all")
        index_in_row = i - (tile_ends[row] - num_tiles[row])
        return attend(out, row, starts[row] + index_in_row * TILE, TILE)

    out = lax.fori_loop(0, tile_ends[-1], attend_tile, out)
    return out[:num_tokens].reshape(num_tokens, num_heads, head_dim)


def _attend_tile(
    q: Float[Array, "R K G H"],
    positions: Int[Array, " R"],
    seq_len: Int[Array, ""],
    block_table: Int[Array, " M"],
    kv_cache_layer: Float[Array, "P K 2 S H"],
) -> Float[Array, "R K G H"]:
    """Online softmax of one tile's scaled queries over its request's context."""
    tile, num_kv_heads, group, head_dim = q.shape
    num_blocks, _, _, block_size, _ = kv_cache_layer.shape
    chunk_blocks = max(1, min(CHUNK // block_size, block_table.shape[0]))
    chunk = chunk_blocks * block_size
    pieces = kv_cache_layer.reshape(num_blocks * num_kv_heads * 2, block_size * head_dim)
    heads = jnp.arange(num_kv_heads, dtype=block_table.dtype)[:, None] * 2
    table = jnp.pad(block_table, (0, -block_table.shape[0] % chunk_blocks))
    q = q.transpose(1, 2, 0, 3).reshape(num_kv_heads, group * tile, head_dim)
    row_positions = jnp.tile(positions, group)

    def attend_chunk(i, carry):
        peak, total, out = carry
        block_ids = lax.dynamic_slice_in_dim(table, i * chunk_blocks, chunk_blocks)
        key_pieces = block_ids[None] * (num_kv_heads * 2) + heads  # [K, chunk_blocks]
        k, v = (
            pieces.at[key_pieces + offset]
            .get(mode="promise_in_bounds")
            .reshape(num_kv_heads, chunk, head_dim)
            for offset in (0, 1)
        )
        context = i * chunk + jnp.arange(chunk)
        # Slots that nobody has written yet may hold anything: 0 * NaN would still be NaN.
        v = jnp.where((context < seq_len)[None, :, None], v, jnp.zeros((), v.dtype))
        scores = jnp.einsum("krh,kch->krc", q, k, preferred_element_type=jnp.float32)
        is_visible = context[None] <= row_positions[:, None]
        scores = jnp.where(is_visible[None], scores, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_peak[..., None])
        decay = jnp.exp(peak - new_peak)
        total = total * decay + jnp.sum(weights, axis=-1)
        update = jnp.einsum(
            "krc,kch->krh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return new_peak, total, out * decay[..., None] + update

    # The first piece always holds a visible token (position 0), so `peak` is finite after it;
    # a finite start keeps exp(peak - new_peak) from being NaN before.
    shape = (num_kv_heads, group * tile)
    carry = (
        jnp.full(shape, jnp.finfo(jnp.float32).min),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    num_chunks = (seq_len + chunk - 1) // chunk
    _, total, out = lax.fori_loop(0, num_chunks, attend_chunk, carry)
    out = (out / total[..., None]).reshape(num_kv_heads, group, tile, head_dim)
    return out.transpose(2, 0, 1, 3).astype(q.dtype)
