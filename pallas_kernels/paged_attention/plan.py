"""The work list of the GPU kernels: which query tokens read which part of which block table.

Pure NumPy on the host, which knows all lengths. A step's attention is a list of **items**: the
query heads of one KV head for some tokens against a range of one table. One list expresses split-KV
(several items for the same tokens), sliding windows (a late begin), ragged batches of prefill
chunks and decode rows (long and short items), and shared prefixes (one item whose tokens belong to
many requests). Where tokens have several items, their partial results are merged afterwards.

The idea of planning on the host is FlashInfer's (https://arxiv.org/abs/2501.01005), merging partial
softmax results FlashDecoding's, sharing the reads of a prefix Hydragen's
(https://arxiv.org/abs/2402.05099).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# Columns of an item.
INDEX_START, NUM_TOKENS, TABLE_ROW, KV_BEGIN, KV_END, PARTIAL_START = range(6)
ITEM_SIZE = 8  # columns, two of them spare

NO_PARTIAL = -1  # the item is its tokens' only one and writes their output itself
TO_THE_END = 2**31 - 1  # the range ends where the request does

_GRAIN = 128  # ranges begin at multiples of this many tokens, so that no kernel's tile is cut
_MIN_SPLIT = 256  # tokens of a part at least; reading and merging a part costs about 10 of them
_MIN_SHARED_TOKENS = 1024
_MIN_SHARING_ROWS = 4
_MAX_WAVES = 4  # of thread blocks over the chip, when splitting
_SHARES = 0.5 ** np.arange(0, 10, 0.25)  # of the longest row, that a part may have
_MAX_PARTS = 8  # of one row, where the split may not depend on the batch


@dataclass(frozen=True)
class Tiling:
    """How the kernels cut work; the static part of a plan.

    Attributes:
        num_kv_heads: On one device.
        group: Query heads per KV head.
        block_size: Tokens per block of the cache.
        num_sms: Streaming multiprocessors of the device, over which the work is balanced.
        decode_rows: Rows (tokens times query heads of one KV head) of a decode item.
        tile_rows: Rows of a prefill item.
        num_stages: Of the software pipeline, as Triton counts.
        fixed_split: If not 0, a row is cut into parts of at least so many tokens by its own length
            only and never shares a prefix, so that its result does not depend on the batch.
        share_prefixes: Whether a prefix that several rows share is read once for all.
    """

    num_kv_heads: int
    group: int
    block_size: int
    num_sms: int
    decode_rows: int = 16
    tile_rows: int = 128
    num_stages: int = 5
    fixed_split: int = 0
    share_prefixes: bool = True

    @property
    def padded_group(self) -> int:
        """Rows that one token takes: the group rounded up to a power of two."""
        return 1 << (self.group - 1).bit_length()

    @property
    def decode_tokens(self) -> int:
        """Tokens of a decode item at most."""
        return self.decode_rows // self.padded_group

    @property
    def tile_tokens(self) -> int:
        """Tokens of a prefill item at most."""
        return self.tile_rows // self.padded_group

    @property
    def decode_slots(self) -> int:
        """Decode items that run at the same time, all KV heads of each: two per SM."""
        return max(1, 2 * self.num_sms // self.num_kv_heads)

    @property
    def tile_slots(self) -> int:
        """Prefill items that run at the same time, all KV heads of each: one per SM."""
        return max(1, self.num_sms // self.num_kv_heads)

    @property
    def can_share(self) -> bool:
        """Whether shared prefixes are looked for."""
        return self.share_prefixes and not self.fixed_split


class PlanSizes(NamedTuple):
    """Lengths of a plan's padded arrays.

    Attributes:
        num_decode_items: Items of few tokens.
        num_tile_items: Items of many tokens.
        num_indices: Entries of `token_index`.
        num_tokens: Of the bucket.
        num_partials: Partial results of one token each.
    """

    num_decode_items: int
    num_tile_items: int
    num_indices: int
    num_tokens: int
    num_partials: int

    @property
    def num_ints(self) -> int:
        """Numbers in all arrays together."""
        num_items = self.num_decode_items + self.num_tile_items
        return num_items * ITEM_SIZE + self.num_indices + self.num_tokens + 1 + self.num_partials


class PlanArrays(NamedTuple):
    """A plan's arrays, int32, padded with 0; made for a bucket by `plan_sizes`.

    Attributes:
        decode_items: `[D, 8]`; columns are this module's constants; surplus items have 0 tokens.
        tile_items: `[E, 8]`.
        token_index: `[I]`; item tokens `INDEX_START : INDEX_START + NUM_TOKENS` are these of the
            step.
        merge_starts: `[T + 1]`; where each token's partial results begin in `merge_rows`.
        merge_rows: `[R]`; indices of partial results.
    """

    decode_items: Any
    tile_items: Any
    token_index: Any
    merge_starts: Any
    merge_rows: Any


def plan_sizes(tiling: Tiling, *, num_tokens: int, num_rows: int) -> PlanSizes:
    """Sizes that are enough for any step of a bucket."""
    is_mixed = num_tokens > num_rows
    shares = tiling.can_share and num_rows >= _MIN_SHARING_ROWS
    num_parts = (
        (_MAX_PARTS - 1) * num_rows if tiling.fixed_split else _MAX_WAVES * tiling.decode_slots
    )
    num_tiles = 0
    if is_mixed:
        num_tiles = num_tokens // tiling.tile_tokens
        num_tiles += min(num_rows, num_tokens // (tiling.decode_tokens + 1))
    num_partials = num_rows + num_parts
    if shares:
        num_partials += 8 * num_rows
    if (is_mixed and not tiling.fixed_split) or shares:
        num_tiles += _MAX_WAVES * tiling.tile_slots
    if is_mixed and not tiling.fixed_split:
        num_partials += 2 * tiling.tile_slots * tiling.tile_tokens
    return PlanSizes(
        num_decode_items=num_rows + num_parts,
        num_tile_items=num_tiles,
        num_indices=num_tokens + (num_rows * tiling.decode_tokens if shares else 0),
        num_tokens=num_tokens,
        num_partials=num_partials,
    )


def cut_arrays(buffer: Any, sizes: PlanSizes) -> PlanArrays:
    """Views of a flat int32 buffer, NumPy or traced, of `sizes.num_ints` numbers."""
    shapes = (
        (sizes.num_decode_items, ITEM_SIZE),
        (sizes.num_tile_items, ITEM_SIZE),
        (sizes.num_indices,),
        (sizes.num_tokens + 1,),
        (sizes.num_partials,),
    )
    pieces, start = [], 0
    for shape in shapes:
        end = start + int(np.prod(shape))
        pieces.append(buffer[start:end].reshape(shape))
        start = end
    return PlanArrays(*pieces)


class _Work(NamedTuple):
    """Tokens that read one range of one table; not yet cut into parts.

    Attributes:
        index_starts: First entry of `token_index`.
        num_tokens: Number of entries.
        table_rows: Row whose table is read.
        kv_begins: First token read, a multiple of the grain.
        kv_ends: End of the range.
        is_last: Whether the range ends where the row does.
        is_merged: Whether its tokens have other work.
    """

    index_starts: np.ndarray
    num_tokens: np.ndarray
    table_rows: np.ndarray
    kv_begins: np.ndarray
    kv_ends: np.ndarray
    is_last: np.ndarray
    is_merged: np.ndarray


class _Groups(NamedTuple):
    """Rows that share a prefix.

    Attributes:
        rows: Of all groups, one group after the other.
        sizes: Rows of each group.
        ends: Tokens that each group shares.
    """

    rows: np.ndarray
    sizes: np.ndarray
    ends: np.ndarray


_NOTHING = _Work(*(np.zeros(0, np.int32) for _ in _Work._fields))


def fill_plan(
    arrays: PlanArrays,
    tiling: Tiling,
    *,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    window: int | None = None,
) -> None:
    """Plans one step.

    Args:
        arrays: Zeroed arrays of the bucket's sizes, to be filled.
        tiling: What the kernels were compiled for.
        query_start_loc: First token of each row in use, and the number of tokens: `[B + 1]`.
        seq_lens: Tokens of each row in the cache after the step's write.
        block_tables: Block ids of each row, `[B, M]`.
        window: Tokens that a token sees at most, itself included; `None`: all.
    """
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    counts = ends - starts
    num_tokens = int(query_start_loc[-1])
    begins = np.zeros_like(seq_lens)
    if window is not None:
        begins = np.maximum(seq_lens - counts - window + 1, 0)
    is_short = counts <= tiling.decode_tokens
    groups = None
    if tiling.can_share and window is None and len(seq_lens) >= _MIN_SHARING_ROWS:
        groups = _find_shared_prefixes(tiling, seq_lens - counts, is_short, block_tables)

    arrays.token_index[:num_tokens] = np.arange(num_tokens)
    tiles = _long_work(tiling, starts, counts, seq_lens, is_short, window)
    if groups is not None:
        shared_ends = np.zeros_like(seq_lens)
        shared_ends[groups.rows] = np.repeat(groups.ends, groups.sizes)
        decode = _short_work(starts, counts, begins, seq_lens, is_short, shared_ends)
        shared = _shared_work(arrays, tiling, groups, starts, counts, num_tokens)
        if len(tiles.table_rows):
            pairs = zip(tiles, shared, strict=True)
            shared = _Work(*(np.concatenate(pair) for pair in pairs))
        if _try_to_fill(arrays, tiling, decode, shared):
            return
    # Sharing took too many partial results, or there is none.
    decode = _short_work(starts, counts, begins, seq_lens, is_short, None)
    is_filled = _try_to_fill(arrays, tiling, decode, tiles)
    assert is_filled


def _try_to_fill(arrays: PlanArrays, tiling: Tiling, decode: _Work, tiles: _Work) -> bool:
    """Fills a plan if there is room for it, with longer parts if it must be."""
    for chunk_factor in (1, 2, 4, 0):
        partials = _fill_items(arrays, tiling, decode, tiles, chunk_factor)
        if partials is not None:
            _fill_merge(arrays, *partials)
            return True
    return False


def _find_shared_prefixes(
    tiling: Tiling, computed: np.ndarray, is_short: np.ndarray, block_tables: np.ndarray
) -> _Groups | None:
    """Finds rows whose tables begin with the same blocks.

    Args:
        tiling: For the block size.
        computed: Tokens of each row that were in the cache before the step; only they are shared.
        is_short: Rows that may share.
        block_tables: Block ids of each row.
    """
    num_blocks = -(-_MIN_SHARED_TOKENS // tiling.block_size)
    rows = np.flatnonzero(is_short & (computed >= num_blocks * tiling.block_size))
    if len(rows) < _MIN_SHARING_ROWS:
        return None
    # Candidates are rows that share the last block of the shortest prefix that counts.
    last = block_tables[rows, num_blocks - 1]
    order = np.argsort(last, kind="stable")
    rows, last = rows[order], last[order]
    if not (last[_MIN_SHARING_ROWS - 1 :] == last[: 1 - _MIN_SHARING_ROWS]).any():
        return None
    starts = np.flatnonzero(np.r_[True, last[1:] != last[:-1]])
    sizes = np.diff(starts, append=len(rows))
    # Blocks at the beginning that each row has in common with the first row of its group.
    most = int(computed[rows].max()) // tiling.block_size
    tables = block_tables[rows, :most]
    is_other = tables != np.repeat(tables[starts], sizes, axis=0)
    num_equal = np.where(is_other.any(axis=1), is_other.argmax(axis=1), most)
    num_equal = np.minimum(num_equal, computed[rows] // tiling.block_size)
    ends = np.minimum.reduceat(num_equal, starts) * tiling.block_size // _GRAIN * _GRAIN
    is_group = (sizes >= _MIN_SHARING_ROWS) & (ends >= _MIN_SHARED_TOKENS)
    if not is_group.any():
        return None
    return _Groups(rows[np.repeat(is_group, sizes)], sizes[is_group], ends[is_group])


def _short_work(starts, counts, begins, seq_lens, is_short, shared_ends) -> _Work:
    rows = np.flatnonzero(is_short)
    kv_begins = begins[rows] // _GRAIN * _GRAIN
    is_merged = np.zeros(len(rows), bool)
    if shared_ends is not None:
        is_merged = shared_ends[rows] > 0
        kv_begins = np.maximum(kv_begins, shared_ends[rows])
    return _Work(
        index_starts=starts[rows],
        num_tokens=counts[rows],
        table_rows=rows,
        kv_begins=kv_begins,
        kv_ends=seq_lens[rows],
        is_last=np.ones(len(rows), bool),
        is_merged=is_merged,
    )


def _long_work(tiling: Tiling, starts, counts, seq_lens, is_short, window) -> _Work:
    rows = np.flatnonzero(~is_short)
    if not len(rows):
        return _NOTHING
    num_tiles = -(-counts[rows] // tiling.tile_tokens)
    table_rows = np.repeat(rows, num_tiles)
    offsets = _count_up(num_tiles) * tiling.tile_tokens
    num_tokens = np.minimum(counts[table_rows] - offsets, tiling.tile_tokens)
    first = seq_lens[table_rows] - counts[table_rows] + offsets
    begins = np.zeros_like(first)
    if window is not None:
        begins = np.maximum(first - window + 1, 0) // _GRAIN * _GRAIN
    return _Work(
        index_starts=starts[table_rows] + offsets,
        num_tokens=num_tokens,
        table_rows=table_rows,
        kv_begins=begins,
        kv_ends=first + num_tokens,
        is_last=np.zeros(len(table_rows), bool),
        is_merged=np.zeros(len(table_rows), bool),
    )


def _shared_work(
    arrays: PlanArrays, tiling: Tiling, groups: _Groups, starts, counts, num_tokens: int
) -> _Work:
    """The tokens of each group against its shared prefix; lists them in `token_index`."""
    counts = counts[groups.rows]
    tokens = np.repeat(starts[groups.rows], counts) + _count_up(counts)
    first = num_tokens
    arrays.token_index[first : first + len(tokens)] = tokens
    borders = np.cumsum(groups.sizes) - groups.sizes
    sizes = np.add.reduceat(counts, borders)
    num_tiles = -(-sizes // tiling.tile_tokens)
    offsets = _count_up(num_tiles) * tiling.tile_tokens
    begins = first + np.repeat(np.cumsum(sizes) - sizes, num_tiles) + offsets
    num_items = len(offsets)
    return _Work(
        index_starts=begins,
        num_tokens=np.minimum(np.repeat(sizes, num_tiles) - offsets, tiling.tile_tokens),
        table_rows=np.repeat(groups.rows[borders], num_tiles),
        kv_begins=np.zeros(num_items, np.int32),
        kv_ends=np.repeat(groups.ends, num_tiles),
        is_last=np.zeros(num_items, bool),
        is_merged=np.ones(num_items, bool),
    )


def _fill_items(
    arrays: PlanArrays, tiling: Tiling, decode: _Work, tiles: _Work, chunk_factor: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Cuts work into items; returns tokens and partial results, or None if there is no room.

    `chunk_factor` multiplies the length of the parts; 0 does not cut.
    """
    tokens, num_partials = [], 0
    for items, work, slots in (
        (arrays.decode_items, decode, tiling.decode_slots),
        (arrays.tile_items, tiles, tiling.tile_slots),
    ):
        if not len(work.table_rows):
            items[:] = 0
            continue
        parts = _cut(tiling, work, slots, chunk_factor, is_tile=items is arrays.tile_items)
        num_items = len(parts.table_rows)
        if num_items > len(items):
            return None
        partial_starts = np.full(num_items, NO_PARTIAL, np.int32)
        if parts.is_merged.any():
            merged = np.flatnonzero(parts.is_merged)
            sizes = parts.num_tokens[merged]
            partial_starts[merged] = num_partials + np.cumsum(sizes) - sizes
            num_partials += int(sizes.sum())
            if num_partials > len(arrays.merge_rows):
                return None
            indices = np.repeat(parts.index_starts[merged], sizes) + _count_up(sizes)
            tokens.append(arrays.token_index[indices])
        # The longest go first, so that the chip does not wait for one of them at the end.
        order = np.argsort(parts.kv_begins - parts.kv_ends, kind="stable")
        items[num_items:] = 0
        items[:num_items, INDEX_START] = parts.index_starts[order]
        items[:num_items, NUM_TOKENS] = parts.num_tokens[order]
        items[:num_items, TABLE_ROW] = parts.table_rows[order]
        items[:num_items, KV_BEGIN] = parts.kv_begins[order]
        items[:num_items, KV_END] = np.where(parts.is_last, TO_THE_END, parts.kv_ends)[order]
        items[:num_items, PARTIAL_START] = partial_starts[order]
    if not tokens:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    return np.concatenate(tokens), np.arange(num_partials)


def _cut(tiling: Tiling, work: _Work, slots: int, chunk_factor: int, *, is_tile: bool) -> _Work:
    """Cuts work into parts; `chunk_factor` as in `_fill_items`."""
    lengths = work.kv_ends - work.kv_begins
    if chunk_factor == 0 or (tiling.fixed_split and is_tile):
        return work
    if tiling.fixed_split:
        chunks = _round_up(np.maximum(tiling.fixed_split, -(-lengths // _MAX_PARTS)))
        num_parts = -(-lengths // chunks)
    else:
        chunk = _choose_chunk(lengths, slots) * chunk_factor
        if chunk >= lengths.max():
            return work
        chunks = np.full_like(lengths, chunk)
        num_parts = -(-lengths // chunk)
    source = np.repeat(np.arange(len(lengths)), num_parts)
    part = _count_up(num_parts)
    chunks, num_parts = chunks[source], num_parts[source]
    cut = _Work(*(column[source] for column in work))
    kv_begins = cut.kv_begins + part * chunks
    return cut._replace(
        kv_begins=kv_begins,
        kv_ends=np.minimum(kv_begins + chunks, cut.kv_ends),
        is_last=cut.is_last & (part == num_parts - 1),
        is_merged=cut.is_merged | (num_parts > 1),
    )


def _fill_merge(arrays: PlanArrays, tokens: np.ndarray, partials: np.ndarray) -> None:
    """Lists each token's partial results, in the order of the ranges they read."""
    if not len(partials):
        arrays.merge_starts[:] = 0
        return
    order = np.argsort(tokens, kind="stable")
    arrays.merge_rows[: len(partials)] = partials[order]
    counts = np.bincount(tokens, minlength=len(arrays.merge_starts) - 1)
    np.cumsum(counts, out=arrays.merge_starts[1:])


def _choose_chunk(lengths: np.ndarray, slots: int) -> int:
    """Length of the parts that keeps the chip busiest, by the number of waves that it takes.

    Compares what the parts hold with what as many full waves of the longest part would hold, for
    some twenty lengths from the shortest part to no cut at all. Of equals, the longest part.
    """
    longest, total = int(lengths.max()), int(lengths.sum())
    uncut = int(_round_up(max(longest, 1)))
    # Many waves come out even by themselves, unless one row is long.
    is_even = len(lengths) > _MAX_WAVES * slots and total > slots * longest
    if longest <= 2 * _MIN_SPLIT or is_even:
        return uncut
    chunks = _round_up((longest * _SHARES).astype(np.int64))
    chunks = chunks[chunks >= _MIN_SPLIT]
    num_parts = (-(-lengths // chunks[:, None])).sum(axis=1)
    waves = -(-num_parts // slots)
    efficiency = total / (waves * slots * chunks)
    efficiency[1:][waves[1:] > _MAX_WAVES] = 0.0  # there may be no room for so many items
    return int(chunks[np.argmax(efficiency >= 0.97 * efficiency.max())])


def _round_up(lengths):
    return -(-lengths // _GRAIN) * _GRAIN


def _count_up(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... up to each count, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
