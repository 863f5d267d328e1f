"""PagedAttention through Pallas' Mosaic GPU lowering, for sm_90 and later.

A thread block takes one item for one KV head. Its last warpgroup fetches tiles of keys and values
into a ring of `num_slots` slots of shared memory, page by page, the keys of a page by one copy of
the tensor memory accelerator and its values by another; the others compute, each on its own rows,
with the softmax kept online in base 2 and in float32. The division of labour is that of
FlashAttention-3 (https://arxiv.org/abs/2407.08608).

`mosaic_decode.py` and `mosaic_prefill.py` say with which rows and which tensor-core instruction.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import compat
from pallas_kernels.paged_attention import plan as work
from pallas_kernels.paged_attention.inputs import AttentionInputs, unpack_plan
from pallas_kernels.paged_attention.tiles import LOG2_E, MASKED, full_range, tile_range


@dataclass(frozen=True)
class Form:
    """How a thread block is built.

    Attributes:
        num_rows: Rows of a computing warpgroup: 16 with "mma", 64 with "wgmma".
        num_computing: Computing warpgroups.
        tile_tokens: Tokens of a tile of keys and values.
        num_slots: Tiles of the ring in shared memory.
        product: Tensor-core instruction.
        has_full_tiles: Whether tiles that every token sees whole have a loop without masks.
    """

    num_rows: int
    num_computing: int
    tile_tokens: int
    num_slots: int
    product: str
    has_full_tiles: bool


class _Mma:
    """`mma.sync` of 16 rows, columns spread over the four warps; any GPU since sm_80.

    Left operands are read from shared memory in pieces, each time: that takes few enough registers
    for two thread blocks per SM.
    """

    keeps_left = False
    q_columns = 64  # a multiple of what the swizzle takes
    v_tokens = 32

    def __init__(self, dtype):
        self.accumulator = plgpu.Layout.MMA_ACC(dtype, m_warps=1)
        self.left = plgpu.Layout.MMA_LHS(dtype, m_warps=1)
        self.right = plgpu.Layout.MMA_RHS(dtype, m_warps=1)

    def __call__(self, accumulated, left, right_ref):
        right = plgpu.load(right_ref, layout=self.right, optimized=False)
        return plgpu.mma(accumulated, left, right)


class _Wgmma:
    """`wgmma` of 64 rows with the left operand in registers; sm_90 only."""

    keeps_left = True

    def __init__(self, dtype):
        del dtype
        self.accumulator = self.left = plgpu.Layout.WGMMA

    def __call__(self, accumulated, left, right_ref):
        return compat.wgmma(accumulated, left, right_ref)


_PRODUCTS = {"mma": _Mma, "wgmma": _Wgmma}


def _multiply_interpreted(accumulated, left, right_ref):
    """Stands in for tensor-core instructions that the interpreter lacks."""
    return accumulated + jnp.dot(left, right_ref[...], preferred_element_type=jnp.float32)


def attend(
    q,
    kv_cache_layer,
    inputs: AttentionInputs,
    items,
    results,
    *,
    form: Form,
    name: str,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks,
):
    """Runs the kernel over a list of items.

    Args:
        q: As in `paged_attention`.
        kv_cache_layer: Likewise.
        inputs: Likewise.
        items: `[D, 8]`, of the plan.
        results: Outputs, partial results, their logarithms of sums and, if asked for, those of
            outputs: arrays that another kernel has begun, or their shapes.
        form: How a thread block is built.
        name: Of the kernel.
        scale: As in `paged_attention`.
        window: Likewise.
        softcap: Likewise.
        sinks: Likewise.
    """
    tiling, arrays, kernels = unpack_plan(inputs)
    interpret = kernels.interpret
    _, num_kv_heads, _, block_size, head_dim = kv_cache_layer.shape
    dtype, rows = q.dtype, form.num_rows * form.num_computing
    shape = _Shape(tiling.group, tiling.padded_group, num_kv_heads, block_size, head_dim, interpret)
    options = _Options(
        scale * LOG2_E, window, None if softcap is None else softcap * LOG2_E, sinks is not None
    )

    def run(*refs, **scratch):
        _kernel(_Refs(*refs), _Scratch(**scratch), form, shape, options)

    run.__name__ = name
    num_copies = max(1, form.tile_tokens // block_size)
    ring = compat.swizzled_smem((form.num_slots, form.tile_tokens, head_dim), dtype)
    scratch = _Scratch(
        q=plgpu.SMEM((rows, head_dim), dtype),
        k=ring,
        v=ring,
        partials=plgpu.SMEM((rows, head_dim), jnp.float32),
        log_sums=plgpu.SMEM((rows,), jnp.float32),
        q_ready=plgpu.Barrier(
            num_arrivals=form.num_rows // tiling.padded_group, num_barriers=form.num_computing
        ),
        kv_ready=plgpu.Barrier(num_arrivals=2 * num_copies, num_barriers=form.num_slots),
        unclear_ready=plgpu.Barrier(num_arrivals=2 * num_copies),
        kv_free=plgpu.Barrier(num_arrivals=form.num_computing, num_barriers=form.num_slots),
    )
    if form.product == "mma":
        scratch = scratch._replace(weights=plgpu.SMEM((rows, form.tile_tokens), dtype))
    are_begun = not isinstance(results[0], jax.ShapeDtypeStruct)
    # Written in place: a kernel's result can be an argument only as a reference.
    begun = [jax.new_ref(result) for result in results] if are_begun else []
    written = plgpu.kernel(
        run,
        out_type=[] if are_begun else list(results),
        grid=(items.shape[0], num_kv_heads),
        grid_names=("item", "head"),
        num_threads=form.num_computing + 1,
        thread_name="warpgroup",
        scratch_types={name: x for name, x in scratch._asdict().items() if x is not None},
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # For sums over several warps, which "wgmma" has no need of.
            reduction_scratch_bytes=2048 if form.product == "mma" else 128,
        ),
        interpret=compat.interpreter() if interpret else None,
    )(
        items,
        arrays.token_index,
        inputs.positions,
        inputs.seq_lens,
        inputs.block_tables,
        q,
        kv_cache_layer.reshape(-1, block_size, head_dim),
        jnp.zeros(1, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        *begun,
    )
    return tuple(map(jax.freeze, begun)) if are_begun else tuple(written)


class _Shape(NamedTuple):
    """What the kernel is compiled for, besides its form."""

    group: int
    padded_group: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    interpret: bool


class _Options(NamedTuple):
    """Of `paged_attention`, in base 2."""

    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


class _Refs(NamedTuple):
    """Arrays in global memory; those from `out` on are written."""

    items: Any
    index: Any
    positions: Any
    seq_lens: Any
    tables: Any
    q: Any
    kv: Any
    sinks: Any
    out: Any
    partials: Any
    log_sums: Any
    log_sum_exp: Any = None


class _Scratch(NamedTuple):
    """Shared memory and barriers of a thread block.

    `q_ready` has a barrier for each computing warpgroup, `kv_ready` and `kv_free` for each slot of
    the ring. `weights` is there for "mma" only.
    """

    q: Any
    k: Any
    v: Any
    partials: Any
    log_sums: Any
    q_ready: Any
    kv_ready: Any
    unclear_ready: Any
    kv_free: Any
    weights: Any = None


class _Item(NamedTuple):
    """The item of a thread block, and the tiles that it reads."""

    head: Any
    index_start: Any
    num_tokens: Any
    table_row: Any
    first_seen: Any
    kv_end: Any
    begin: Any
    end: Any
    partial_start: Any


def _kernel(refs: _Refs, scratch: _Scratch, form: Form, shape: _Shape, options: _Options):
    item, head = lax.axis_index("item"), lax.axis_index("head")
    warpgroup = lax.axis_index("warpgroup")
    num_tokens = refs.items[item, work.NUM_TOKENS]

    @pl.when(num_tokens > 0)
    def _():
        index_start = refs.items[item, work.INDEX_START]
        table_row = refs.items[item, work.TABLE_ROW]
        kv_begin = refs.items[item, work.KV_BEGIN]
        kv_end = jnp.minimum(refs.items[item, work.KV_END], refs.seq_lens[table_row])
        first = jnp.int32(2**31 - 1)
        if options.window is not None:
            for i in range(form.num_rows * form.num_computing // shape.padded_group):
                first = jnp.minimum(first, _position(refs, index_start, num_tokens, i))
        begin, end, first_seen = tile_range(
            kv_begin, kv_end, first, tile_tokens=form.tile_tokens, window=options.window
        )
        this = _Item(
            head=head,
            index_start=index_start,
            num_tokens=num_tokens,
            table_row=table_row,
            kv_end=kv_end,
            first_seen=first_seen,
            begin=begin,
            end=end,
            partial_start=refs.items[item, work.PARTIAL_START],
        )

        @pl.when(warpgroup == form.num_computing)
        def _():
            if form.num_computing > 1:  # three warpgroups: those that compute take more registers
                plgpu.set_max_registers(40, action="decrease")
            _fetch(this, refs, scratch, form, shape, has_window=options.window is not None)

        @pl.when(warpgroup < form.num_computing)
        def _():
            if form.num_computing > 1:
                plgpu.set_max_registers(232, action="increase")
            _compute(this, warpgroup, refs, scratch, form, shape, options)


def _token(refs: _Refs, index_start, num_tokens, i):
    """Token `i` of an item; behind its end, its last."""
    return refs.index[index_start + jnp.minimum(i, num_tokens - 1)]


def _position(refs: _Refs, index_start, num_tokens, i):
    return refs.positions[_token(refs, index_start, num_tokens, i)]


def _fetch(
    item: _Item, refs: _Refs, scratch: _Scratch, form: Form, shape: _Shape, *, has_window: bool
):
    """Fills the ring with the item's tiles.

    What lies behind the end of the range, or before the window, may be anything, and zero times NaN
    is NaN: such values are cleared before others hear of the tile.
    """
    span = min(shape.block_size, form.tile_tokens)  # tokens of one copy
    starts = range(0, form.tile_tokens, span)

    def find_pages(tile):
        """Block ids of a tile; behind the end of the range, its last block."""
        return tuple(
            refs.tables[
                item.table_row,
                lax.div(
                    jnp.minimum(tile * form.tile_tokens + start, item.kv_end - 1), shape.block_size
                ),
            ]
            for start in starts
        )

    def copy(tile, pages, barrier):
        step = tile - item.begin
        slot = lax.rem(step, form.num_slots)

        @pl.when(step >= form.num_slots)
        def _():
            plgpu.barrier_wait(scratch.kv_free.at[slot])

        for start, page in zip(starts, pages, strict=True):
            offset = lax.rem(tile * form.tile_tokens + start, shape.block_size)
            for i, ring in enumerate((scratch.k, scratch.v)):
                plgpu.copy_gmem_to_smem(
                    refs.kv.at[
                        (page * shape.num_kv_heads + item.head) * 2 + i, pl.ds(offset, span)
                    ],
                    ring.at[slot, pl.ds(start, span)],
                    barrier(slot),
                )

    def fetch(tile, pages):
        following = find_pages(tile + 1)  # one tile ahead, since a look-up takes its time
        copy(tile, pages, lambda slot: scratch.kv_ready.at[slot])
        return following

    chunk = max(16, 2048 // shape.head_dim)  # tokens; what a layout takes at least
    layout = plgpu.Layout.SMEM_GMEM_COPY((chunk, shape.head_dim), refs.q.dtype, 128)

    def fetch_and_clear(tile):
        copy(tile, find_pages(tile), lambda _: scratch.unclear_ready)
        slot = lax.rem(tile - item.begin, form.num_slots)
        plgpu.barrier_wait(scratch.unclear_ready)

        @pl.loop(0, form.tile_tokens // chunk)
        def clear(i):
            v = scratch.v.at[slot, pl.ds(i * chunk, chunk)]
            values = plgpu.load(v, layout=layout)
            kv = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
            start = tile * form.tile_tokens + i * chunk
            is_seen = kv < item.kv_end - start
            if has_window:
                is_seen = is_seen & (kv >= item.first_seen - start)
            v[...] = jnp.where(is_seen, values, jnp.zeros_like(values))

        plgpu.commit_smem()
        for _ in range(2 * len(starts)):
            plgpu.barrier_arrive(scratch.kv_ready.at[slot])

    whole_begin = item.begin
    if has_window:
        is_cut = item.first_seen > item.begin * form.tile_tokens

        @pl.when(is_cut & (item.begin < item.end))
        def _():
            fetch_and_clear(item.begin)

        whole_begin = jnp.minimum(item.begin + is_cut.astype(jnp.int32), item.end)
    whole_end = jnp.maximum(lax.div(item.kv_end, form.tile_tokens), whole_begin)
    whole_end = jnp.minimum(whole_end, item.end)
    lax.fori_loop(whole_begin, whole_end, fetch, find_pages(whole_begin))

    @pl.when(whole_end < item.end)
    def _():
        fetch_and_clear(whole_end)


def _compute(
    item: _Item,
    warpgroup,
    refs: _Refs,
    scratch: _Scratch,
    form: Form,
    shape: _Shape,
    options: _Options,
):
    """Attends with the rows of one warpgroup to the item's tiles, and writes the result."""
    product = _PRODUCTS[form.product](refs.q.dtype)
    multiply = _multiply_interpreted if shape.interpret else product
    layout, by_row = product.accumulator, product.accumulator.reduce(1)
    num_rows, tile_tokens = form.num_rows, form.tile_tokens
    tile_shape, out_shape = (num_rows, tile_tokens), (num_rows, shape.head_dim)
    first_head, group = item.head * shape.group, shape.group
    tokens = range(num_rows // shape.padded_group)
    first_token = warpgroup * len(tokens)
    rows = pl.ds(warpgroup * num_rows, num_rows)

    def rows_of(i):
        return pl.ds(warpgroup * num_rows + i * shape.padded_group, group)

    for i in tokens:
        token = _token(refs, item.index_start, item.num_tokens, first_token + i)
        plgpu.copy_gmem_to_smem(
            refs.q.at[token, pl.ds(first_head, group)],
            scratch.q.at[rows_of(i)],
            scratch.q_ready.at[warpgroup],
        )

    def spread(values, to):
        return plgpu.layout_cast(lax.broadcast_in_dim(values, to, [0]), layout)

    row = plgpu.broadcasted_iota(jnp.int32, (num_rows,), 0, layout=by_row)
    row_token, member = lax.div(row, shape.padded_group), lax.rem(row, shape.padded_group)
    position = plgpu.layout_cast(jnp.zeros(num_rows, jnp.int32), by_row)
    first, last = jnp.int32(2**31 - 1), jnp.int32(0)
    for i in tokens:
        value = _position(refs, item.index_start, item.num_tokens, first_token + i)
        position = jnp.where(row_token == i, value, position)
        first, last = jnp.minimum(first, value), jnp.maximum(last, value)
    row_end = jnp.minimum(position + 1, item.kv_end)
    offset = plgpu.broadcasted_iota(jnp.int32, tile_shape, 1, layout=layout)
    plgpu.barrier_wait(scratch.q_ready.at[warpgroup])

    def load_left(ref):
        return plgpu.load(ref, layout=product.left, optimized=False)

    q = load_left(scratch.q.at[rows]) if product.keeps_left else None

    def step(tile, carry, *, is_masked: bool):
        accumulated, peak, total = carry
        slot = lax.rem(tile - item.begin, form.num_slots)
        tile_begin = tile * tile_tokens
        plgpu.barrier_wait(scratch.kv_ready.at[slot])
        k, v = scratch.k.at[slot], scratch.v.at[slot]
        logits = plgpu.layout_cast(jnp.zeros(tile_shape, jnp.float32), layout)
        if q is not None:
            logits = multiply(logits, q, k.transpose((1, 0)))
        else:
            for start in range(0, shape.head_dim, product.q_columns):
                piece = pl.ds(start, product.q_columns)
                q_piece = load_left(scratch.q.at[:, piece])
                logits = multiply(logits, q_piece, k.at[:, piece].transpose((1, 0)))
        if options.softcap is None:
            logits = logits * options.scale
        else:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), by one exponential
            twice = jnp.exp2(logits * (2 * options.scale * LOG2_E / options.softcap))
            logits = options.softcap * (1.0 - 2.0 / (twice + 1.0))
        is_seen = None
        if is_masked:
            is_seen = offset < spread(row_end - tile_begin, tile_shape)
            if options.window is not None:
                row_begin = position - (tile_begin + options.window)
                is_seen = is_seen & (offset > spread(row_begin, tile_shape))
            logits = jnp.where(is_seen, logits, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - spread(new_peak, tile_shape))
        if is_seen is not None:  # a row that has seen nothing has the peak of what is masked
            weights = jnp.where(is_seen, weights, 0.0)
        shrink = jnp.exp2(peak - new_peak)
        total = total * shrink + jnp.sum(weights, axis=1)
        accumulated = accumulated * spread(shrink, out_shape)
        weights = weights.astype(refs.q.dtype)
        if product.keeps_left:
            accumulated = multiply(accumulated, weights, v)
        else:  # one warp's columns are another's terms
            scratch.weights[...] = weights
            plgpu.commit_smem()
            for start in range(0, tile_tokens, product.v_tokens):
                piece = pl.ds(start, product.v_tokens)
                weights = load_left(scratch.weights.at[:, piece])
                accumulated = multiply(accumulated, weights, v.at[piece])

        @pl.when(tile + form.num_slots < item.end)  # nobody waits for the last slots
        def _():
            if not product.keeps_left or shape.interpret:
                plgpu.commit_smem()  # loads come before the copies that write over what they read
            plgpu.barrier_arrive(scratch.kv_free.at[slot])

        return accumulated, new_peak, total

    carry = (
        plgpu.layout_cast(jnp.zeros(out_shape, jnp.float32), layout),
        plgpu.layout_cast(jnp.full(num_rows, MASKED, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros(num_rows, jnp.float32), by_row),
    )
    masked = functools.partial(step, is_masked=True)
    full = functools.partial(step, is_masked=False)
    full_begin = full_end = item.begin
    if form.has_full_tiles:
        full_begin, full_end = full_range(
            item.begin,
            item.end,
            item.kv_end,
            first,
            last,
            tile_tokens=tile_tokens,
            window=options.window,
        )
        if options.window is not None:
            carry = lax.fori_loop(item.begin, full_begin, masked, carry)
        carry = lax.fori_loop(full_begin, full_end, full, carry)
    accumulated, peak, total = lax.fori_loop(full_end, item.end, masked, carry)

    def store(source, target, place):
        """Writes the rows of each token; `place` tells where."""
        for i in tokens:

            @pl.when(first_token + i < item.num_tokens)
            def _(i=i):
                plgpu.copy_smem_to_gmem(
                    source.at[rows_of(i)],
                    target.at[place(first_token + i), pl.ds(first_head, group)],
                )

        plgpu.wait_smem_to_gmem(0)

    def store_numbers(source, target, place):
        """The same of one number per row, which is too little for the copies of `store`."""
        for i in tokens:

            @pl.when(first_token + i < item.num_tokens)
            def _(i=i):
                for j in range(group):
                    value = source[warpgroup * num_rows + i * shape.padded_group + j]
                    target[place(first_token + i), first_head + j] = value

    def place_of_token(i):
        return refs.index[item.index_start + i]

    @pl.when(item.partial_start == work.NO_PARTIAL)
    def _():
        best, sum_, values = peak, total, accumulated
        if options.has_sinks:
            sink = plgpu.layout_cast(jnp.zeros(num_rows, jnp.float32), by_row)
            for i in range(group):
                sink = jnp.where(member == i, refs.sinks[first_head + i] * LOG2_E, sink)
            best = jnp.maximum(peak, sink)
            shrink = jnp.exp2(peak - best)
            sum_ = total * shrink + jnp.exp2(sink - best)
            values = accumulated * spread(shrink, out_shape)
        sum_ = jnp.where(sum_ > 0.0, sum_, 1.0)
        scratch.q[rows, :] = (values / spread(sum_, out_shape)).astype(refs.q.dtype)
        if refs.log_sum_exp is not None:
            scratch.log_sums[rows] = (best + jnp.log2(sum_)) * (1 / LOG2_E)
        plgpu.commit_smem()
        store(scratch.q, refs.out, place_of_token)
        if refs.log_sum_exp is not None:
            store_numbers(scratch.log_sums, refs.log_sum_exp, place_of_token)

    @pl.when(item.partial_start != work.NO_PARTIAL)
    def _():
        sum_ = jnp.where(total > 0.0, total, 1.0)
        scratch.partials[rows, :] = accumulated / spread(sum_, out_shape)
        scratch.log_sums[rows] = jnp.where(total > 0.0, peak + jnp.log2(sum_), MASKED)
        plgpu.commit_smem()
        store(scratch.partials, refs.partials, lambda i: item.partial_start + i)
        store_numbers(scratch.log_sums, refs.log_sums, lambda i: item.partial_start + i)
