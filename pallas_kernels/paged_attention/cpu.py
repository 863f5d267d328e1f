"""What CPUs run: a compiled loop over block tables, called from the XLA program.

The work is cut into **tiles**: one KV head and a few consecutive tokens of one request (one, when
it decodes). A tile walks its context in pieces with the online softmax of FlashAttention
(https://arxiv.org/abs/2205.14135); keys and values are read where they lie, block by block, so
nothing is gathered. Threads take tiles as they come free. One program serves every context length.

Against `xla.py`, which gathers: docs/decisions/012.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numba import types

from pallas_kernels import xla_ffi
from pallas_kernels.machine_code import callback, compiled, once, source_version
from pallas_kernels.paged_attention.inputs import AttentionInputs

DTYPES = ("float32", "bfloat16")

_VERSION = source_version(__file__, xla_ffi.__file__)

_TARGET = "jpaged_paged_attention"
_TASK = "jpaged_paged_attention_task"

# Scores of a tile stay in the second-level cache. Speed hardly depends on either: within 5 % from
# 24 to 192 rows and from 32 to 256 tokens (Zen 1, SmolLM2's heads).
TILE_ROWS = 48  # query rows (tokens x query heads of one KV head) of a tile
PIECE = 128  # tokens of context

# Below this many multiplications of queries and keys, waking a thread costs more than it brings.
_PARALLEL_PRODUCTS = 200_000

_LOWEST = np.float32(-3e38)
_NO_WINDOW = 2**31 - 1


def paged_attention_cpu(
    q: Float[Array, "T N H"],
    kv_cache_layer: Float[Array, "P K 2 S H"],
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "T N H"]:
    """Attends each token to its request's cached tokens; arguments as in `paged_attention`.

    Raises:
        ValueError: If the dtypes of `q` and the cache differ or are not float32 or bfloat16.
    """
    if q.dtype != kv_cache_layer.dtype or q.dtype not in DTYPES:
        raise ValueError(
            f"q is {q.dtype} and the KV cache {kv_cache_layer.dtype}; both must be float32 or both "
            "bfloat16"
        )
    _register()
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(
        q,
        kv_cache_layer,
        inputs.query_start_loc.astype(jnp.int32),
        inputs.seq_lens.astype(jnp.int32),
        inputs.block_tables.astype(jnp.int32),
        np.array([scale, softcap or 0.0], np.float32),
        np.array([_NO_WINDOW if window is None else window], np.int32),
    )


@once
def _register() -> None:
    """Compiles the handler, or loads it from disk, and tells XLA its name, once in a process."""
    # Made here and not at import, which must stay cheap.
    version = _VERSION

    @callback(types.void(types.intp))
    def task(job):
        _ = version
        _attend_tiles(job)
        xla_ffi.leave(job)

    xla_ffi.name_task(_TASK, task)

    @callback(types.intp(types.intp))
    def handler(frame):
        _ = version
        if not xla_ffi.is_metadata_query(frame):
            _attend(frame)
        return 0

    xla_ffi.register(_TARGET, handler)


_run_task, _task_address = xla_ffi.named_task(_TASK)


@compiled
def _attend(frame):
    """Cuts a step into tiles, shares them out, and zeroes the padding."""
    q, kv, out = xla_ffi.argument(frame, 0), xla_ffi.argument(frame, 1), xla_ffi.result(frame, 0)
    num_tokens, num_heads, head_dim = xla_ffi.dim(q, 0), xla_ffi.dim(q, 1), xla_ffi.dim(q, 2)
    num_kv_heads = xla_ffi.dim(kv, 1)
    query_start_loc, seq_lens, _ = _rows(frame)
    tile_tokens = _tile_tokens(num_heads // num_kv_heads)
    window = _window(frame)
    num_tiles, num_products = 0, 0
    for row in range(len(seq_lens)):
        count = query_start_loc[row + 1] - query_start_loc[row]
        num_tiles += (count + tile_tokens - 1) // tile_tokens * num_kv_heads
        num_products += count * min(seq_lens[row], window) * num_heads * head_dim
    num_tasks = 0
    if num_products >= _PARALLEL_PRODUCTS:
        num_tasks = max(0, min(num_tiles, xla_ffi.num_pool_threads(frame)) - 1)
    job = xla_ffi.open_job(frame, num_tiles, _task_address(), num_tasks)
    halves = num_heads * head_dim * xla_ffi.itemsize(q) // 2  # of a token, in two bytes each
    padding = xla_ffi.array_at(xla_ffi.address(out), num_tokens * halves, np.int16)
    for i in range(query_start_loc[len(seq_lens)] * halves, num_tokens * halves):
        padding[i] = 0
    xla_ffi.join(job)
    _run_task(job)
    xla_ffi.wait(job)
    xla_ffi.leave(job)


@compiled
def _rows(frame):
    """The arguments `query_start_loc`, `seq_lens` and `block_tables`."""
    starts, lens = xla_ffi.argument(frame, 2), xla_ffi.argument(frame, 3)
    tables = xla_ffi.argument(frame, 4)
    num_rows, num_blocks = xla_ffi.dim(tables, 0), xla_ffi.dim(tables, 1)
    return (
        xla_ffi.array_at(xla_ffi.address(starts), num_rows + 1, np.int32),
        xla_ffi.array_at(xla_ffi.address(lens), num_rows, np.int32),
        xla_ffi.array_at(xla_ffi.address(tables), (num_rows, num_blocks), np.int32),
    )


@compiled
def _window(frame):
    """The argument of that name."""
    return np.int64(xla_ffi.array_at(xla_ffi.address(xla_ffi.argument(frame, 6)), 1, np.int32)[0])


@compiled
def _tile_tokens(group):
    return max(1, TILE_ROWS // group)


@compiled
def _attend_tiles(job):
    """Works on tiles until there are no more."""
    tile = xla_ffi.claim(job)
    if tile < 0:  # the call may be over: its frame must not be read
        return
    frame = xla_ffi.job_frame(job)
    q, kv, out = xla_ffi.argument(frame, 0), xla_ffi.argument(frame, 1), xla_ffi.result(frame, 0)
    num_kv_heads, block_size, head_dim = xla_ffi.dim(kv, 1), xla_ffi.dim(kv, 3), xla_ffi.dim(kv, 4)
    group = xla_ffi.dim(q, 1) // num_kv_heads
    query_start_loc, seq_lens, block_tables = _rows(frame)
    factors = xla_ffi.array_at(xla_ffi.address(xla_ffi.argument(frame, 5)), 2, np.float32)
    scale, softcap, window = factors[0], factors[1], _window(frame)
    itemsize = xla_ffi.itemsize(q)
    q, kv, out = xla_ffi.address(q), xla_ffi.address(kv), xla_ffi.address(out)

    tile_tokens = _tile_tokens(group)
    num_rows = tile_tokens * group
    piece = max(1, PIECE // block_size) * block_size
    tile_q = np.empty((num_rows, head_dim), np.float32)
    tile_out = np.empty((num_rows, head_dim), np.float32)
    scores = np.empty((num_rows, piece), np.float32)
    softmax = np.empty((2, num_rows), np.float32)
    block = np.empty((block_size, head_dim), np.float32)
    row, row_begin, row_end = -1, 0, 0  # the tiles of the current row
    while tile >= 0:
        while tile >= row_end:
            row += 1
            count = query_start_loc[row + 1] - query_start_loc[row]
            row_begin = row_end
            row_end += (count + tile_tokens - 1) // tile_tokens * num_kv_heads
        part, head = divmod(tile - row_begin, num_kv_heads)
        begin = query_start_loc[row] + part * tile_tokens
        end = min(begin + tile_tokens, query_start_loc[row + 1])
        for token in range(begin, end):
            queries = tile_q[(token - begin) * group : (token - begin + 1) * group]
            heads = ((token * num_kv_heads) + head) * group * head_dim * itemsize
            _load(queries, q + heads, itemsize, scale)
        num_rows = (end - begin) * group
        _attend_tile(
            tile_out[:num_rows],
            tile_q[:num_rows],
            kv + head * 2 * block_size * head_dim * itemsize,
            num_kv_heads * 2 * block_size * head_dim * itemsize,
            itemsize,
            block_tables[row],
            seq_lens[row] - query_start_loc[row + 1] + begin,
            group,
            window,
            softcap,
            scores,
            softmax,
            block,
        )
        for token in range(begin, end):
            heads = ((token * num_kv_heads) + head) * group * head_dim * itemsize
            answers = tile_out[(token - begin) * group : (token - begin + 1) * group]
            _store(answers, out + heads, itemsize)
        xla_ffi.complete(job)
        tile = xla_ffi.claim(job)


@compiled
def _attend_tile(
    out, q, kv, block_bytes, itemsize, block_table, position, group, window, softcap, scores,
    softmax, block,
):  # fmt: skip
    """Attends a tile's queries to their context.

    Args:
        out: Where the result goes, `[R, H]` for `R` query rows.
        q: Scaled queries `[R, H]`; row `r` belongs to token `r // group` of the tile.
        kv: Address of the KV head in block 0.
        block_bytes: From one block to the next.
        itemsize: Bytes of a cached number: 4 or 2.
        block_table: Blocks of the request.
        position: Position of the tile's first token.
        group: Query heads of one KV head.
        window: Tokens that a token sees at most.
        softcap: Bound of scores; 0: none.
        scores: Scratch memory `[R, piece]`.
        softmax: Scratch memory `[2, R]`: running maximum and running sum.
        block: Scratch memory `[S, H]`.
    """
    num_rows, head_dim = q.shape
    block_size, piece = block.shape[0], scores.shape[1]
    peaks, totals = softmax[0], softmax[1]
    context_len = position + num_rows // group
    for r in range(num_rows):
        peaks[r], totals[r] = _LOWEST, 0
        for h in range(head_dim):
            out[r, h] = 0
    # What no token of the tile sees may be anything by now, of anybody: it is not read.
    seen_begin = max(0, position + 1 - window)
    for start in range(seen_begin // block_size * block_size, context_len, piece):
        end = min(start + piece, context_len)
        for first in range(start, end, block_size):
            skip = max(0, seen_begin - first)
            address = kv + block_table[first // block_size] * block_bytes
            k = _as_float32(address, itemsize, block)[skip:]
            count = min(block_size, end - first) - skip
            _multiply_keys(scores, q, k, first - start + skip, count)
        for r in range(num_rows):
            last = position + r // group
            num_visible = max(0, min(end, last + 1) - start)
            num_hidden = min(max(0, last + 1 - window - start), num_visible)
            weights = scores[r]
            for i in range(num_hidden):
                weights[i] = 0
            for i in range(num_visible, end - start):
                weights[i] = 0
            weights = weights[num_hidden:num_visible]
            if softcap > 0:
                _cap(weights, softcap)
            peak = _maximum(weights, len(weights), peaks[r])
            decay = _exp(peaks[r] - peak)
            peaks[r] = peak
            totals[r] = totals[r] * decay + _exponentiate(weights, len(weights), peak)
            for h in range(head_dim):
                out[r, h] *= decay
        for first in range(start, end, block_size):
            skip = max(0, seen_begin - first)
            address = kv + block_table[first // block_size] * block_bytes
            v = _as_float32(address + block_size * head_dim * itemsize, itemsize, block)[skip:]
            count = min(block_size, end - first) - skip
            _add_values(out, scores, v, first - start + skip, count)
    for r in range(num_rows):
        norm = np.float32(1) / totals[r]
        for h in range(head_dim):
            out[r, h] *= norm


@compiled
def _multiply_keys(scores, q, k, column, count):
    """`scores[:, column : column + count] = q @ k[:count].T`, in registers of 2 x 4 sums."""
    num_rows, head_dim = q.shape
    for s in range(0, count - 3, 4):
        c = column + s
        k0, k1, k2, k3 = k[s], k[s + 1], k[s + 2], k[s + 3]
        for r in range(0, num_rows - 1, 2):
            qa, qb = q[r], q[r + 1]
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
            for h in range(head_dim):
                a0 += qa[h] * k0[h]
                a1 += qa[h] * k1[h]
                a2 += qa[h] * k2[h]
                a3 += qa[h] * k3[h]
                b0 += qb[h] * k0[h]
                b1 += qb[h] * k1[h]
                b2 += qb[h] * k2[h]
                b3 += qb[h] * k3[h]
            scores[r, c], scores[r, c + 1], scores[r, c + 2], scores[r, c + 3] = a0, a1, a2, a3
            r += 1
            scores[r, c], scores[r, c + 1], scores[r, c + 2], scores[r, c + 3] = b0, b1, b2, b3
        if num_rows % 2:
            r = num_rows - 1
            qa = q[r]
            a0 = a1 = a2 = a3 = np.float32(0)
            for h in range(head_dim):
                a0 += qa[h] * k0[h]
                a1 += qa[h] * k1[h]
                a2 += qa[h] * k2[h]
                a3 += qa[h] * k3[h]
            scores[r, c], scores[r, c + 1], scores[r, c + 2], scores[r, c + 3] = a0, a1, a2, a3
    for s in range(count // 4 * 4, count):
        for r in range(num_rows):
            total = np.float32(0)
            for h in range(head_dim):
                total += q[r, h] * k[s, h]
            scores[r, column + s] = total


@compiled
def _add_values(out, weights, v, column, count):
    """`out += weights[:, column : column + count] @ v[:count]`, four tokens at a time."""
    num_rows, head_dim = out.shape
    for s in range(0, count - 3, 4):
        c = column + s
        v0, v1, v2, v3 = v[s], v[s + 1], v[s + 2], v[s + 3]
        for r in range(num_rows):
            w = weights[r]
            w0, w1, w2, w3 = w[c], w[c + 1], w[c + 2], w[c + 3]
            target = out[r]
            for h in range(head_dim):
                target[h] += (w0 * v0[h] + w1 * v1[h]) + (w2 * v2[h] + w3 * v3[h])
    for s in range(count // 4 * 4, count):
        for r in range(num_rows):
            w0 = weights[r, column + s]
            for h in range(head_dim):
                out[r, h] += w0 * v[s, h]


@compiled
def _maximum(x, count, start):
    """The largest of `start` and `x[:count]`, as four maxima that need not wait for each other."""
    a = b = c = d = start
    for i in range(0, count - 3, 4):
        a = x[i] if x[i] > a else a
        b = x[i + 1] if x[i + 1] > b else b
        c = x[i + 2] if x[i + 2] > c else c
        d = x[i + 3] if x[i + 3] > d else d
    for i in range(count // 4 * 4, count):
        a = x[i] if x[i] > a else a
    a = b if b > a else a
    c = d if d > c else c
    return c if c > a else a


@compiled
def _exponentiate(x, count, peak):
    """Makes `x[:count]` exp(x - peak) and returns its sum."""
    total = np.float32(0)
    for i in range(count):
        weight = _exp(x[i] - peak)
        x[i] = weight
        total += weight
    return total


@compiled
def _cap(x, softcap):
    """Makes x `softcap * tanh(x / softcap)`."""
    for i in range(len(x)):
        y = x[i] / softcap
        shrunk = _exp(np.float32(-2) * (y if y > 0 else -y))
        size = softcap * (np.float32(1) - shrunk) / (np.float32(1) + shrunk)
        x[i] = size if y > 0 else -size


@compiled
def _exp(x):
    """exp(x) for x <= 0, within 2e-7 of its value, without a call, so that loops use vectors.

    Cephes' polynomial (https://www.netlib.org/cephes/) over half an octave, times a power of two.
    """
    x = np.float32(-87) if x < np.float32(-87) else x
    octaves = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    x = x - octaves * np.float32(0.693359375) + octaves * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * x + np.float32(1.3981999507e-3)
    y = y * x + np.float32(8.3334519073e-3)
    y = y * x + np.float32(4.1665795894e-2)
    y = y * x + np.float32(1.6666665459e-1)
    y = y * x + np.float32(5.0000001201e-1)
    y = y * x * x + x + np.float32(1)
    exponent = (np.int32(octaves) + np.int32(127)) << np.int32(23)
    return y * xla_ffi.float_of_bits(np.int32(exponent))


@compiled
def _as_float32(address, itemsize, scratch):
    """The array at an address, of the shape of `scratch`, as float32: there or in `scratch`."""
    if itemsize == 4:
        return xla_ffi.array_at(address, scratch.shape, np.float32)
    _load(scratch, address, itemsize, np.float32(1))
    return scratch


@compiled
def _load(target, address, itemsize, scale):
    """Reads the array at an address, of the shape of `target`, and multiplies it."""
    if itemsize == 4:
        floats = xla_ffi.array_at(address, target.size, np.float32)
        for i in range(target.size):
            target.flat[i] = floats[i] * scale
    else:  # the 16 bits of a bfloat16 are the upper half of a float32
        halves = xla_ffi.array_at(address, target.size, np.uint16)
        for i in range(target.size):
            bits = np.int32(np.uint32(halves[i]) << np.uint32(16))
            target.flat[i] = xla_ffi.float_of_bits(bits) * scale


@compiled
def _store(source, address, itemsize):
    """Writes an array to an address, rounded to bfloat16 if items have two bytes."""
    if itemsize == 4:
        floats = xla_ffi.array_at(address, source.size, np.float32)
        for i in range(source.size):
            floats[i] = source.flat[i]
    else:
        halves = xla_ffi.array_at(address, source.size, np.uint16)
        for i in range(source.size):
            bits = np.int64(xla_ffi.bits_of_float(source.flat[i])) & 0xFFFFFFFF
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
            is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
            halves[i] = 0x7FC0 if is_nan else rounded
