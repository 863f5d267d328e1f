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
_LONG_PART = 1024  # tokens; where parts stay as long as this, finer ones cost next to nothing
_MIN_SHARED_TOKENS = 1024
_MIN_SHARING_ROWS = 4
_PARTS_PER_SLOT = 4  # at most, when splitting; and one per item that is not split
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
        fixed_split: If not 0, a row of one token is cut into parts of at least so many tokens by
            its own length only, other rows are not cut, and none shares a prefix, so that a row's
            result does not depend on the batch.
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
        (_MAX_PARTS - 1) * num_rows if tiling.fixed_split else _PARTS_PER_SLOT * tiling.decode_slots
    )
    num_tiles = 0
    if is_mixed:
        num_tiles = num_tokens // tiling.tile_tokens
        num_tiles += min(num_rows, num_tokens // (tiling.decode_tokens + 1))
    num_partials = num_rows + num_parts
    if shares:
        num_partials += 8 * num_rows
    if (is_mixed and not tiling.fixed_split) or shares:
        num_tiles += _PARTS_PER_SLOT * tiling.tile_slots
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


# What a row's tokens see, read by this item alone.
_NEW_ITEM = np.array([0, 0, 0, 0, TO_THE_END, NO_PARTIAL, 0, 0], np.int32)
_SOME_PARTIAL = 0  # until partial results are numbered


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

    @property
    def firsts(self) -> np.ndarray:
        """Where each group begins in `rows`."""
        return self.sizes.cumsum() - self.sizes

    def where(self, is_kept: np.ndarray) -> "_Groups":
        """Some of the groups."""
        if is_kept.all():
            return self
        rows = self.rows[is_kept.repeat(self.sizes)]
        return _Groups(rows, self.sizes[is_kept], self.ends[is_kept])


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
        window: The longest of the layers that the plan is for: tokens that a token sees at most,
            itself included. `None`: there is a layer that sees all.
    """
    starts = query_start_loc[:-1]
    counts = query_start_loc[1:] - starts
    computed = seq_lens - counts  # tokens that were in the cache before the step
    num_rows, num_tokens = len(counts), int(query_start_loc[-1])
    numbers = np.arange(num_tokens, dtype=np.int32)
    arrays.token_index[:num_tokens] = numbers

    rows = _new_items(num_rows)
    rows[:, INDEX_START] = starts
    rows[:, NUM_TOKENS] = counts
    rows[:, TABLE_ROW] = numbers[:num_rows]
    if window is not None:
        rows[:, KV_BEGIN] = _first_seen(computed, window)
    is_short, tiles = None, rows[:0]
    if num_tokens > num_rows and counts.max() > tiling.decode_tokens:
        is_short = counts <= tiling.decode_tokens
        tiles = _cut_tokens(rows.compress(~is_short, axis=0), tiling.tile_tokens)
        # A token's position is its index and this, which depends on its row.
        positions = tiles[:, INDEX_START] + (computed - starts)[tiles[:, TABLE_ROW]]
        tiles[:, KV_END] = positions + tiles[:, NUM_TOKENS]
        if window is not None:
            tiles[:, KV_BEGIN] = _first_seen(positions, window)

    groups = None
    if tiling.can_share and window is None:
        groups = _find_shared_prefixes(tiling, computed, is_short, block_tables)
    if groups is not None:
        groups = _fit(groups, counts, tiling, len(arrays.tile_items) - len(tiles))
    if groups is not None and len(groups.sizes):
        shared = _share(arrays, tiling, groups, rows, num_tokens)
        rest = rows.copy()
        rest[groups.rows, KV_BEGIN] = groups.ends.repeat(groups.sizes)
        rest[groups.rows, PARTIAL_START] = _SOME_PARTIAL
        if _cut_and_fill(arrays, tiling, seq_lens, _select(rest, is_short), tiles, shared):
            return
    # There is nothing to share, or no room for its partial results.
    is_filled = _cut_and_fill(arrays, tiling, seq_lens, _select(rows, is_short), tiles)
    assert is_filled


def _find_shared_prefixes(
    tiling: Tiling, computed: np.ndarray, is_short: np.ndarray | None, block_tables: np.ndarray
) -> _Groups | None:
    """Finds rows whose tables begin with the same blocks.

    Rows are grouped by the shortest prefix that counts; each group shares what all of it have in
    common, even if half of it has more.

    Args:
        tiling: For the block size.
        computed: Tokens of each row that were in the cache before the step; only they are shared.
        is_short: Rows that may share; `None`: all.
        block_tables: Block ids of each row.
    """
    num_blocks = -(-_MIN_SHARED_TOKENS // tiling.block_size)
    is_candidate = computed >= num_blocks * tiling.block_size
    if is_short is not None:
        is_candidate &= is_short
    rows = is_candidate.nonzero()[0]
    if len(rows) < _MIN_SHARING_ROWS:
        return None
    # Candidates are rows that share the last block of the shortest prefix.
    last = block_tables[rows, num_blocks - 1]
    order = last.argsort(kind="stable")
    rows, last = rows[order], last[order]
    if not (last[_MIN_SHARING_ROWS - 1 :] == last[: 1 - _MIN_SHARING_ROWS]).any():
        return None
    is_first = np.empty(len(rows) + 1, bool)
    is_first[0] = is_first[-1] = True
    np.not_equal(last[1:], last[:-1], out=is_first[1:-1])
    borders = is_first.nonzero()[0]
    sizes = borders[1:] - borders[:-1]
    ends = np.minimum.reduceat(computed[rows], borders[:-1])
    groups = _Groups(rows, sizes, ends).where(sizes >= _MIN_SHARING_ROWS)
    # Blocks that each row has in common with the row before it.
    most = int(groups.ends.max()) // tiling.block_size
    tables = block_tables[groups.rows, :most]
    is_other = np.empty((len(tables), most + 1), bool)
    is_other[:, most] = True
    np.not_equal(tables[1:], tables[:-1], out=is_other[1:, :most])
    num_equal = is_other.argmax(axis=1)
    firsts = groups.firsts
    num_equal[firsts] = most
    ends = np.minimum.reduceat(num_equal, firsts) * tiling.block_size
    groups = groups._replace(ends=_round_down(np.minimum(ends, groups.ends)))
    groups = groups.where(groups.ends >= _MIN_SHARED_TOKENS)
    return groups if len(groups.sizes) else None


def _fit(groups: _Groups, counts: np.ndarray, tiling: Tiling, room: int) -> _Groups:
    """The groups for whose tiles there is room; those that save the most reads come first."""
    num_tiles = -(-np.add.reduceat(counts[groups.rows], groups.firsts) // tiling.tile_tokens)
    if num_tiles.sum() <= room:
        return groups
    order = (-(groups.sizes - 1) * groups.ends).argsort(kind="stable")
    is_kept = np.zeros(len(order), bool)
    is_kept[order] = num_tiles[order].cumsum() <= room
    return groups.where(is_kept)


def _share(
    arrays: PlanArrays, tiling: Tiling, groups: _Groups, rows: np.ndarray, num_tokens: int
) -> np.ndarray:
    """The tokens of each group against its shared prefix; lists them in `token_index`."""
    members, firsts = rows.take(groups.rows, axis=0), groups.firsts
    counts = members[:, NUM_TOKENS]
    tokens = _count_up(members[:, INDEX_START], counts)
    arrays.token_index[num_tokens : num_tokens + len(tokens)] = tokens
    items = members.take(firsts, axis=0)
    sizes = np.add.reduceat(counts, firsts)
    items[:, INDEX_START] = num_tokens + sizes.cumsum() - sizes
    items[:, NUM_TOKENS] = sizes
    items[:, KV_END] = groups.ends
    items[:, PARTIAL_START] = _SOME_PARTIAL
    return _cut_tokens(items, tiling.tile_tokens)


def _cut_and_fill(
    arrays: PlanArrays,
    tiling: Tiling,
    seq_lens: np.ndarray,
    decode: np.ndarray,
    *tiles: np.ndarray,
) -> bool:
    """Fills a plan if there is room for it, with longer parts if it must be."""
    items, num_decode = np.concatenate([decode, *tiles]), len(decode)
    lengths = _lengths(items, seq_lens)
    if tiling.fixed_split:
        chunks = _round_up(np.maximum(tiling.fixed_split, -(-lengths // _MAX_PARTS)))
        # There is always room for the parts of one token per row, prompts' last tiles not counted.
        is_cut = items[:, NUM_TOKENS] == 1
        is_cut[num_decode:] = False
        chunks = np.where(is_cut, chunks, lengths)
        return _fill(arrays, seq_lens, items, num_decode, lengths, chunks)
    chunks = np.empty_like(lengths)
    chunks[:num_decode] = _choose_chunk(lengths[:num_decode], tiling.decode_slots, _PARTS_PER_SLOT)
    # Partial results of a tile are large: half as many.
    chunks[num_decode:] = _choose_chunk(
        lengths[num_decode:], tiling.tile_slots, _PARTS_PER_SLOT // 2
    )
    for _ in range(3):
        if _fill(arrays, seq_lens, items, num_decode, lengths, chunks):
            return True
        chunks *= 2
    return _fill(arrays, seq_lens, items, num_decode, lengths, lengths)


def _fill(
    arrays: PlanArrays,
    seq_lens: np.ndarray,
    items: np.ndarray,
    num_decode: int,
    lengths: np.ndarray,
    chunks: np.ndarray,
) -> bool:
    """Cuts items into parts and fills a plan, or says that there is no room for them.

    Args:
        arrays: To be filled.
        seq_lens: As in `fill_plan`.
        items: Decode items, then tiles.
        num_decode: How many of them are decode items.
        lengths: Tokens that each item reads.
        chunks: Tokens that each of its parts reads at most.
    """
    if (lengths > chunks).any():
        num_parts = -(-lengths // chunks)
        items = _cut_ranges(items, num_parts, chunks)
        lengths = _lengths(items, seq_lens)
        num_decode = int(num_parts[:num_decode].sum())
    num_tiles = len(items) - num_decode
    if num_decode > len(arrays.decode_items) or num_tiles > len(arrays.tile_items):
        return False
    merged = (items[:, PARTIAL_START] != NO_PARTIAL).nonzero()[0]
    if len(merged):
        sizes = items[merged, NUM_TOKENS]
        tokens = arrays.token_index[_count_up(items[merged, INDEX_START], sizes)]
        if len(tokens) > len(arrays.merge_rows):
            return False
        items[merged, PARTIAL_START] = sizes.cumsum() - sizes
        arrays.merge_rows[: len(tokens)] = tokens.argsort(kind="stable")
        counts = np.bincount(tokens, minlength=len(arrays.merge_starts) - 1)
        arrays.merge_starts[1:] = counts.cumsum()
    # The longest go first, so that the chip does not wait for one of them at the end.
    order = lengths[:num_decode].argsort(kind="stable")[::-1]
    arrays.decode_items[:num_decode] = items.take(order, axis=0)
    if num_tiles:
        order = num_decode + lengths[num_decode:].argsort(kind="stable")[::-1]
        arrays.tile_items[:num_tiles] = items.take(order, axis=0)
    return True


def _cut_tokens(items: np.ndarray, size: int) -> np.ndarray:
    """Cuts items into ones of at most `size` tokens."""
    num_parts = -(-items[:, NUM_TOKENS] // size)
    parts = items.repeat(num_parts, axis=0)
    offsets = _count_up(0, num_parts) * size
    parts[:, INDEX_START] += offsets
    parts[:, NUM_TOKENS] = np.minimum(parts[:, NUM_TOKENS] - offsets, size)
    return parts


def _cut_ranges(items: np.ndarray, num_parts: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """Cuts items into so many ones each, that read `chunks` tokens; the last of each, the rest."""
    parts = items.repeat(num_parts, axis=0)
    part = _count_up(0, num_parts)
    parts[:, KV_BEGIN] += part * chunks.repeat(num_parts)
    later = part.nonzero()[0]
    parts[later - 1, KV_END] = parts[later, KV_BEGIN]
    parts[later - 1, PARTIAL_START] = _SOME_PARTIAL
    parts[later, PARTIAL_START] = _SOME_PARTIAL
    return parts


def _choose_chunk(lengths: np.ndarray, slots: int, parts_per_slot: int) -> int:
    """Length of the parts that keeps the chip busy until the end.

    Items start in the order of their lengths, wherever there is a free slot. That balances them
    well if none is longer than a slot's share of all work; so longer ones are cut. Finer parts
    balance better: they are made where they are still long, and where at most two waves of items
    would leave a good part of the last one idle.
    """
    if not len(lengths):
        return _MIN_SPLIT
    longest, total = int(lengths.max()), int(lengths.sum())
    share = total // slots + 1
    num_waves = -(-len(lengths) // slots)
    is_even = num_waves > 2 or total >= 0.9 * num_waves * slots * longest
    if longest <= 2 * _MIN_SPLIT or (share >= longest and is_even):
        return longest
    if share >= min(longest, parts_per_slot * _LONG_PART):
        share //= parts_per_slot
    return max(_round_up(share), _MIN_SPLIT)


def _new_items(num_items: int) -> np.ndarray:
    items = np.empty((num_items, ITEM_SIZE), np.int32)
    items[:] = _NEW_ITEM
    return items


def _select(items: np.ndarray, is_kept: np.ndarray | None) -> np.ndarray:
    return items if is_kept is None else items.compress(is_kept, axis=0)


def _lengths(items: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Tokens that items read."""
    ends = np.minimum(items[:, KV_END], seq_lens[items[:, TABLE_ROW]])
    return ends - items[:, KV_BEGIN]


def _first_seen(positions: np.ndarray, window: int) -> np.ndarray:
    """Where ranges begin whose first tokens stand at these positions."""
    return _round_down(np.maximum(positions - window + 1, 0))


def _round_down(lengths):
    return lengths // _GRAIN * _GRAIN


def _round_up(lengths):
    return -(-lengths // _GRAIN) * _GRAIN


def _count_up(starts: int | np.ndarray, counts: np.ndarray) -> Any:
    """`counts` numbers from each of `starts`, one range after the other; no range is empty."""
    ends = counts.cumsum()
    if ends[-1] == len(ends):
        return starts
    return np.arange(ends[-1]) + (starts - ends + counts).repeat(counts)
