"""PagedAttention through Pallas' Triton lowering, one source for sm_80 to sm_120.

One kernel, compiled twice: a decode item's rows are a token's query heads (16 rows, the least that
a tensor core takes), a prefill item's those of some dozens of tokens. Per item the keys and values
of one KV head pass by once, in tiles of `tile_tokens`, with the softmax kept online in base 2 and
in float32 (FlashAttention, https://arxiv.org/abs/2205.14135).

The cache is passed whole and read row by row through the table: Triton turns the loads of a tile
into asynchronous copies of 16 bytes, so the block size hardly matters. Every load is masked or in
range by construction, since a GPU does not clamp. Products of float32 are TF32's, as XLA's are on a
GPU by default.

A cache of one byte per number (float8_e4m3fn, float8_e5m2, int8) is passed as pairs of bytes, and
a kernel takes the even and the odd columns of a head as two **planes**, each with products of its
own. So an offset stays below 2^31 for arrays up to 4 GiB; in larger ones Pallas computes offsets
with 64 bits. (It goes by bytes, and would let offsets of single bytes wrap around from 2 GiB on.)
Numbers become those of the queries' dtype by shifts and masks, exactly and on any chip; only the
NaNs of float8_e4m3fn read as 480.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Real

from pallas_kernels.paged_attention import plan as work
from pallas_kernels.paged_attention.inputs import AttentionInputs, unpack_plan
from pallas_kernels.paged_attention.merge import merge_partials, result_shapes
from pallas_kernels.paged_attention.tiles import LOG2_E, MASKED, full_range, tile_range

# Dtypes of one byte that a cache may have, and what `_planes` leaves out as a factor.
UNITS = {"float8_e4m3fn": 256.0, "float8_e5m2": 1.0, "int8": 1.0}


def paged_attention_triton(
    q: Float[Array, "T N H"],
    kv_cache_layer: Real[Array, "P K 2 S H"],
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    return_log_sum_exp: bool = False,
) -> Float[Array, "T N H"] | tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Attends by the step's plan; arguments and result are those of `paged_attention`."""
    tiling, arrays, _ = unpack_plan(inputs)
    results: Any = result_shapes(q, inputs, return_log_sum_exp=return_log_sum_exp)
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    for items, num_rows in (
        (arrays.tile_items, tiling.tile_rows),
        (arrays.decode_items, tiling.decode_rows),
    ):
        if items.shape[0]:
            results = attend(
                q, kv_cache_layer, inputs, items, results, num_rows=num_rows, **options
            )
    return merge_partials(results, inputs, sinks=sinks)


def attend(
    q,
    kv_cache_layer,
    inputs: AttentionInputs,
    items,
    results,
    *,
    num_rows: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks,
):
    """Runs one kernel over a list of items; writes into the results of the other, if any."""
    tiling, arrays, kernels = unpack_plan(inputs)
    _, num_kv_heads, _, block_size, head_dim = kv_cache_layer.shape
    is_decode = num_rows < 64
    kv_rows = kv_cache_layer.reshape(-1, head_dim)
    packed = kv_cache_layer.dtype.name if kv_cache_layer.dtype.name in UNITS else None
    if packed is not None:
        kv_rows = jax.lax.bitcast_convert_type(kv_rows.reshape(-1, head_dim // 2, 2), jnp.int16)
    kernel = functools.partial(
        _kernel,
        num_rows=num_rows,
        tile_tokens=_tile_tokens(head_dim, q.dtype),
        num_kv_heads=num_kv_heads,
        group=tiling.group,
        padded_group=tiling.padded_group,
        block_size=block_size,
        head_dim=head_dim,
        scale=scale * LOG2_E,
        window=window,
        softcap=None if softcap is None else softcap * LOG2_E,
        has_sinks=sinks is not None,
        packed=packed,
    )
    operands = [
        items,
        arrays.token_index,
        inputs.positions,
        inputs.seq_lens,
        inputs.block_tables,
        q,
        kv_rows,
        jnp.zeros(1, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
    ]
    num_operands, aliases = len(operands), {}
    if not isinstance(results[0], jax.ShapeDtypeStruct):
        aliases = {num_operands + i: i for i in range(len(results))}
        operands += results
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        # Results come as inputs too where another kernel has begun them; they are written only.
        lambda *refs: kernel(*refs[:num_operands], *refs[-len(results) :]),
        grid=(num_kv_heads, items.shape[0]),
        in_specs=[whole] * len(operands),
        out_specs=[whole] * len(results),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(
            num_warps=4 if num_rows < 128 else 8, num_stages=tiling.num_stages
        ),
        interpret=kernels.interpret,
        name="paged_attention_decode" if is_decode else "paged_attention_prefill",
    )(*operands)


def _tile_tokens(head_dim: int, dtype) -> int:
    """Tokens of a tile of keys or values, which shared memory holds several of."""
    row_bytes = (1 << (head_dim - 1).bit_length()) * dtype.itemsize
    return max(16, min(64, 16 * 1024 // row_bytes))


def _kernel(
    items_ref,
    index_ref,
    positions_ref,
    seq_lens_ref,
    tables_ref,
    q_ref,
    kv_ref,
    sinks_ref,
    out_ref,
    partial_ref,
    log_sum_ref,
    log_sum_exp_ref=None,
    *,
    num_rows: int,
    tile_tokens: int,
    num_kv_heads: int,
    group: int,
    padded_group: int,
    block_size: int,
    head_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    packed: str | None,
):
    head, item = pl.program_id(0), pl.program_id(1)
    num_tokens = items_ref[item, work.NUM_TOKENS]

    @pl.when(num_tokens > 0)
    def _():
        table_row = items_ref[item, work.TABLE_ROW]
        kv_begin = items_ref[item, work.KV_BEGIN]
        kv_end = jnp.minimum(items_ref[item, work.KV_END], seq_lens_ref[table_row])
        partial_start = items_ref[item, work.PARTIAL_START]

        rows = jnp.arange(num_rows)
        token, member = rows // padded_group, rows % padded_group
        is_token = token < num_tokens
        is_used = is_token & (member < group)
        # Rows without a token point behind the end: the interpreter writes masked elements back.
        index = plt.load(
            index_ref.at[items_ref[item, work.INDEX_START] + token],
            mask=is_token,
            other=positions_ref.shape[0],
        )
        position = plt.load(positions_ref.at[index], mask=is_token, other=0)
        heads = head * group + member
        num_columns = head_dim if packed is None else head_dim // 2
        width = max(16, 1 << (num_columns - 1).bit_length())  # products take no less
        columns = jnp.arange(width)
        is_column = (columns < num_columns)[None, :]
        # Of queries and outputs, those of each plane.
        planes = [columns] if packed is None else [2 * columns, 2 * columns + 1]
        unit = 1.0 if packed is None else UNITS[packed]
        q = [
            plt.load(
                q_ref.at[index[:, None], heads[:, None], plane[None, :]],
                mask=is_used[:, None] & is_column,
                other=0.0,
            )
            for plane in planes
        ]

        first = jnp.min(jnp.where(is_token, position, 2**31 - 1))
        last = jnp.max(jnp.where(is_token, position, 0))
        kv_end = jnp.minimum(kv_end, last + 1)
        limits = {"tile_tokens": tile_tokens, "window": window}
        begin, end, first_seen = tile_range(kv_begin, kv_end, first, **limits)

        def step(tile, carry, *, is_masked: bool):
            accumulated, peak, total = carry
            kv = tile * tile_tokens + jnp.arange(tile_tokens)
            is_kv = kv < kv_end
            if window is not None:  # before it, blocks may be others' by now
                is_kv = is_kv & (kv >= first_seen)
            row_mask = is_kv if is_masked else None
            block = plt.load(
                tables_ref.at[table_row, kv // block_size],
                mask=row_mask,
                other=0 if is_masked else None,
            )
            k_row = ((block * num_kv_heads + head) * 2) * block_size + kv % block_size
            mask = None
            if is_masked or width != num_columns:
                mask = jnp.broadcast_to(is_column, (tile_tokens, width))
                if is_masked:
                    mask = mask & is_kv[:, None]

            def load(row):
                tile = plt.load(
                    kv_ref.at[row[:, None], columns[None, :]],
                    mask=mask,
                    other=None if mask is None else 0,
                )
                return [tile] if packed is None else _planes(tile, packed, q[0].dtype)

            products = [plt.dot(a, b, trans_b=True) for a, b in zip(q, load(k_row), strict=True)]
            logits = functools.reduce(jnp.add, products)
            if softcap is None:
                logits = logits * (scale * unit)
            else:
                # tanh(x) = 1 - 2 / (exp(2 x) + 1), by one exponential
                twice = jnp.exp2(logits * (2 * scale * unit * LOG2_E / softcap))
                logits = softcap * (1.0 - 2.0 / (twice + 1.0))
            is_seen = None
            if is_masked:
                is_seen = is_kv[None, :] & (kv[None, :] <= position[:, None])
                if window is not None:
                    is_seen = is_seen & (kv[None, :] > position[:, None] - window)
                logits = jnp.where(is_seen, logits, MASKED)
            new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
            weights = jnp.exp2(logits - new_peak[:, None])
            if is_seen is not None:  # a row that has seen nothing has the peak of what is masked
                weights = jnp.where(is_seen, weights, 0.0)
            shrink = jnp.exp2(peak - new_peak)
            total = total * shrink + jnp.sum(weights, axis=1)
            accumulated = [
                plane * shrink[:, None] + plt.dot(weights.astype(v.dtype), v)
                for plane, v in zip(accumulated, load(k_row + block_size), strict=True)
            ]
            return accumulated, new_peak, total

        # Tiles in the middle are seen whole by every token, so that only those at the ends need
        # masks. A decode item waits for memory, not for masks: one loop, half the code, and a
        # quarter fewer registers.
        carry = (
            [jnp.zeros((num_rows, width), jnp.float32) for _ in planes],
            jnp.full(num_rows, MASKED, jnp.float32),
            jnp.zeros(num_rows, jnp.float32),
        )
        masked = functools.partial(step, is_masked=True)
        full = functools.partial(step, is_masked=False)
        full_begin = full_end = begin
        if num_rows >= 64:
            full_begin, full_end = full_range(begin, end, kv_end, first, last, **limits)
            if window is not None:
                carry = jax.lax.fori_loop(begin, full_begin, masked, carry)
            carry = jax.lax.fori_loop(full_begin, full_end, full, carry)
        accumulated, peak, total = jax.lax.fori_loop(full_end, end, masked, carry)

        is_stored = is_used[:, None] & is_column
        if unit != 1.0:
            accumulated = [values * unit for values in accumulated]

        @pl.when(partial_start == work.NO_PARTIAL)
        def _():
            best, sum_, shrink = peak, total, None
            if has_sinks:
                sink = plt.load(sinks_ref.at[heads], mask=is_used, other=0.0) * LOG2_E
                best = jnp.maximum(peak, sink)
                shrink = jnp.exp2(peak - best)
                sum_ = total * shrink + jnp.exp2(sink - best)
            if log_sum_exp_ref is not None:
                plt.store(
                    log_sum_exp_ref.at[index, heads],
                    (best + jnp.log2(sum_)) * (1 / LOG2_E),
                    mask=is_used,
                )
            for plane, values in zip(planes, accumulated, strict=True):
                if shrink is not None:
                    values = values * shrink[:, None]
                values = values / jnp.where(sum_ > 0.0, sum_, 1.0)[:, None]
                plt.store(
                    out_ref.at[index[:, None], heads[:, None], plane[None, :]],
                    values.astype(out_ref.dtype),
                    mask=is_stored,
                )

        @pl.when(partial_start != work.NO_PARTIAL)
        def _():
            slot = partial_start + token
            for plane, values in zip(planes, accumulated, strict=True):
                values = values / jnp.where(total > 0.0, total, 1.0)[:, None]
                plt.store(
                    partial_ref.at[slot[:, None], heads[:, None], plane[None, :]],
                    values,
                    mask=is_stored,
                )
            plt.store(
                log_sum_ref.at[slot, heads],
                jnp.where(total > 0.0, peak + jnp.log2(total), MASKED),
                mask=is_used,
            )


def _planes(pairs, packed: str, dtype):
    """The lower and the upper of each pair of bytes, as numbers of `dtype`, in `UNITS`."""
    planes = []
    for byte in (pairs << 8, pairs):  # in the upper half of 16 bits
        if packed == "int8":
            planes.append((byte >> 8).astype(dtype))
            continue
        # float8_e5m2 is the upper half of a float16. float8_e4m3fn has one bit less of exponent,
        # whose bias is 8 less.
        bits = byte & -(1 << 8) if packed == "float8_e5m2" else (byte >> 1) & ~0x407F
        planes.append(jax.lax.bitcast_convert_type(bits, jnp.float16).astype(dtype))
    return planes
