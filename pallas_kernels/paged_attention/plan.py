"""The work list of the GPU kernels: which query tokens read which part of which block table.

Made on the host, which knows all lengths, by compiled loops (docs/decisions/018). A step's
attention is a list of **items**: the query heads of one KV head for some tokens against a range of
one table. One list expresses split-KV (several items for the same tokens), sliding windows (a late
begin), ragged batches of prefill chunks and decode rows (long and short items), and shared prefixes
(one item whose tokens belong to many requests). Where tokens have several items, their partial
results are merged afterwards.

The idea of planning on the host is FlashInfer's (https://arxiv.org/abs/2501.01005), merging partial
softmax results FlashDecoding's, sharing the reads of a prefix Hydragen's
(https://arxiv.org/abs/2402.05099).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import types

from pallas_kernels.machine_code import compiled, entry_point, once, source_version

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
_NO_WINDOW = 2**31 - 1
_SOME_PARTIAL = 0  # until partial results are numbered

_VERSION = source_version(__file__)


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
    """A plan's arrays, int32; made for a bucket by `plan_sizes`.

    Attributes:
        decode_items: `[D, 8]`; columns are this module's constants; surplus items are 0.
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
        arrays: Of the bucket's sizes; what they hold does not matter.
        tiling: What the kernels were compiled for.
        query_start_loc: First token of each row in use, and the number of tokens: `[B + 1]`.
        seq_lens: Tokens of each row in the cache after the step's write.
        block_tables: Block ids of each row, `[B, M]`.
        window: The longest of the layers that the plan is for: tokens that a token sees at most,
            itself included. `None`: there is a layer that sees all.
    """
    is_filled = compile_planner()(
        *arrays,
        np.ascontiguousarray(query_start_loc, np.int32),
        np.ascontiguousarray(seq_lens, np.int32),
        np.ascontiguousarray(block_tables, np.int32),
        tiling.block_size,
        tiling.decode_tokens,
        tiling.tile_tokens,
        tiling.decode_slots,
        tiling.tile_slots,
        tiling.fixed_split,
        tiling.can_share and window is None,
        _NO_WINDOW if window is None else window,
    )
    assert is_filled, "plan_sizes made a plan's arrays too short"


@once
def compile_planner() -> Callable[..., bool]:
    """Compiles what fills plans, or loads it from disk, once in a process.

    To be called before the first plan where its seconds would be missed.
    """
    ints, read_only = types.int32[::1], types.Array(types.int32, 1, "C", readonly=True)
    tables = types.Array(types.int32, 2, "C", readonly=True)
    items = types.int32[:, ::1]
    version = _VERSION

    @entry_point(
        types.boolean(
            *(items, items, ints, ints, ints),
            *(read_only, read_only, tables),
            *([types.intp] * 6),
            *(types.boolean, types.intp),
        )
    )
    def plan(
        decode_items, tile_items, token_index, merge_starts, merge_rows,
        query_start_loc, seq_lens, block_tables,
        block_size, decode_tokens, tile_tokens, decode_slots, tile_slots, fixed_split,
        can_share, window,
    ):  # fmt: skip
        _ = version
        items, num_decode, num_items = _cut_tokens(
            token_index, query_start_loc, seq_lens, decode_tokens, tile_tokens, window,
            len(tile_items),
        )  # fmt: skip
        rest, num_shared = items, 0
        if can_share:
            rest, num_shared = _share_prefixes(
                items, num_decode, num_items, token_index, query_start_loc, seq_lens,
                block_tables, block_size, tile_tokens, len(tile_items),
            )  # fmt: skip
        while not _cut_ranges(
            decode_items, tile_items, token_index, merge_starts, merge_rows,
            rest, num_decode, num_items + num_shared, seq_lens,
            decode_slots, tile_slots, fixed_split,
        ):  # fmt: skip
            if not num_shared:
                return False
            rest, num_shared = items, 0  # no room for the partial results of sharing
        return True

    return plan


@compiled
def _cut_tokens(
    token_index, query_start_loc, seq_lens, decode_tokens, tile_tokens, window, num_spare
):
    """Cuts a step's rows into items of few enough tokens, which read all that these see.

    Returns:
        Decode items, then tiles, then room for `num_spare` more; the number of decode items; and
        the number of both.
    """
    num_rows = len(seq_lens)
    num_tokens = query_start_loc[num_rows]
    for token in range(num_tokens):
        token_index[token] = token
    most = num_rows + num_tokens // tile_tokens + num_spare
    items = np.zeros((most, ITEM_SIZE), np.int32)
    num_items = 0
    for row in range(num_rows):
        start, end = query_start_loc[row], query_start_loc[row + 1]
        if end - start <= decode_tokens:
            begin = _first_seen(seq_lens[row] - (end - start), window)
            _set_item(items[num_items], start, end - start, row, begin, TO_THE_END)
            num_items += 1
    num_decode = num_items
    for row in range(num_rows):
        start, end = query_start_loc[row], query_start_loc[row + 1]
        if end - start <= decode_tokens:
            continue
        for first in range(start, end, tile_tokens):
            num = min(tile_tokens, end - first)
            position = seq_lens[row] - end + first
            begin = _first_seen(position, window)
            _set_item(items[num_items], first, num, row, begin, position + num)
            num_items += 1
    return items, num_decode, num_items


@compiled
def _share_prefixes(
    items, num_decode, num_items, token_index, query_start_loc, seq_lens,
    block_tables, block_size, tile_tokens, room,
):  # fmt: skip
    """Finds decode items whose tables begin with the same blocks, and has these read once.

    They are grouped by the shortest prefix that counts; each group shares what all of it have in
    common, even if half of it has more. Only what was in the cache before the step is shared.

    Returns:
        A copy of the items, in which those that share begin where their prefix ends, with tiles for
        the prefixes behind them; and the number of these, 0 if nothing is shared.
    """
    num_blocks = -(-_MIN_SHARED_TOKENS // block_size)
    # Candidates in the order of the last block of the shortest prefix.
    order = np.empty(num_decode, np.int64)
    num_candidates = 0
    for i in range(num_decode):
        row = items[i, TABLE_ROW]
        if seq_lens[row] - items[i, NUM_TOKENS] >= num_blocks * block_size:
            block_id = np.int64(block_tables[row, num_blocks - 1])
            order[num_candidates] = block_id << 32 | i
            num_candidates += 1
    order = order[:num_candidates]
    _sort(order)
    # Groups: where they begin and end among the candidates, tokens they share, tokens they have.
    # And their order, by the reads that they save.
    most = num_candidates // _MIN_SHARING_ROWS
    groups, best = np.empty((most, 4), np.int64), np.empty(most, np.int64)
    num_groups = 0
    first = 0
    while first < num_candidates:
        last = first + 1
        while last < num_candidates and order[last] >> 32 == order[first] >> 32:
            last += 1
        if last - first >= _MIN_SHARING_ROWS:
            shared, num_tokens = _find_common_prefix(
                items, order[first:last], seq_lens, block_tables, block_size
            )
            if shared >= _MIN_SHARED_TOKENS:
                group = groups[num_groups]
                group[0], group[1], group[2], group[3] = first, last, shared, num_tokens
                best[num_groups] = -((last - first - 1) * shared) << 32 | num_groups
                num_groups += 1
        first = last
    if not num_groups:
        return items, 0

    items = items.copy()
    num_tokens = query_start_loc[len(seq_lens)]
    room -= num_items - num_decode
    num_shared = 0
    # Those that save the most come first, where there is no room for all.
    best = best[:num_groups]
    _sort(best)
    for key in best:
        group = groups[key & 0xFFFFFFFF]
        first, last, shared = group[0], group[1], group[2]
        if -(-group[3] // tile_tokens) > room - num_shared:
            continue
        start = num_tokens
        for i in order[first:last]:
            item = items[i & 0xFFFFFFFF]
            item[KV_BEGIN] = shared
            item[PARTIAL_START] = _SOME_PARTIAL
            for token in range(item[INDEX_START], item[INDEX_START] + item[NUM_TOKENS]):
                token_index[num_tokens] = token
                num_tokens += 1
        row = items[order[first] & 0xFFFFFFFF, TABLE_ROW]
        for begin in range(start, num_tokens, tile_tokens):
            num = min(tile_tokens, num_tokens - begin)
            tile = items[num_items + num_shared]
            _set_item(tile, begin, num, row, 0, shared)
            tile[PARTIAL_START] = _SOME_PARTIAL
            num_shared += 1
    return items, num_shared


@compiled
def _find_common_prefix(items, members, seq_lens, block_tables, block_size):
    """Tokens that some decode items share, whole grains of them, and how many tokens they have."""
    first = items[members[0] & 0xFFFFFFFF, TABLE_ROW]
    num_tokens, shared = 0, TO_THE_END
    for i in members:
        item = items[i & 0xFFFFFFFF]
        row = item[TABLE_ROW]
        num_tokens += item[NUM_TOKENS]
        shared = min(shared, seq_lens[row] - item[NUM_TOKENS])
        for block in range(shared // block_size):
            if block_tables[row, block] != block_tables[first, block]:
                shared = block * block_size
                break
    # Whole blocks only.
    return shared // block_size * block_size // _GRAIN * _GRAIN, num_tokens


@compiled
def _cut_ranges(
    decode_items, tile_items, token_index, merge_starts, merge_rows,
    items, num_decode, num_items, seq_lens,
    decode_slots, tile_slots, fixed_split,
):  # fmt: skip
    """Cuts what items read into parts and fills a plan, or says that there is no room for them."""
    lengths = np.empty(num_items, np.int64)
    for i in range(num_items):
        end = min(items[i, KV_END], seq_lens[items[i, TABLE_ROW]])
        lengths[i] = end - items[i, KV_BEGIN]
    chunks = np.empty(num_items, np.int64)
    if fixed_split:
        # There is always room for the parts of one token per row, prompts' last tiles not counted.
        for i in range(num_items):
            is_cut = i < num_decode and items[i, NUM_TOKENS] == 1
            chunks[i] = lengths[i]
            if is_cut:
                chunks[i] = _round_up(max(fixed_split, -(-lengths[i] // _MAX_PARTS)))
    else:
        chunk = _choose_chunk(lengths[:num_decode], decode_slots, _PARTS_PER_SLOT)
        # Partial results of a tile are large: half as many.
        tile_chunk = _choose_chunk(lengths[num_decode:], tile_slots, _PARTS_PER_SLOT // 2)
        for i in range(num_items):
            chunks[i] = chunk if i < num_decode else tile_chunk
    attempts = 1 if fixed_split else 5
    for attempt in range(attempts):
        num_decode_parts, num_tile_parts, num_partials = 0, 0, 0
        for i in range(num_items):
            if attempt:  # there was no room: longer parts
                chunks[i] = lengths[i] if attempt == attempts - 1 else 2 * chunks[i]
            num_parts = -(-lengths[i] // chunks[i])
            if i < num_decode:
                num_decode_parts += num_parts
            else:
                num_tile_parts += num_parts
            if num_parts > 1 or items[i, PARTIAL_START] != NO_PARTIAL:
                num_partials += num_parts * items[i, NUM_TOKENS]
        if (
            num_decode_parts <= len(decode_items)
            and num_tile_parts <= len(tile_items)
            and num_partials <= len(merge_rows)
        ):
            num_partials = _write_parts(
                decode_items, items[:num_decode], lengths[:num_decode], chunks[:num_decode], 0
            )
            _write_parts(
                tile_items, items[num_decode:num_items], lengths[num_decode:],
                chunks[num_decode:], num_partials,
            )  # fmt: skip
            _list_merges(token_index, merge_starts, merge_rows, decode_items, tile_items)
            return True
    return False


@compiled
def _write_parts(parts, items, lengths, chunks, num_partials):
    """Writes items in parts of `chunks` tokens, the longest first; numbers partial results.

    They come in that order so that the chip does not wait for a long one at the end.

    Returns:
        How many partial results there are now.
    """
    num_parts = 0
    for i in range(len(items)):
        num_parts += -(-lengths[i] // chunks[i])
    unsorted = np.empty((num_parts, ITEM_SIZE), np.int32)
    order = np.empty(num_parts, np.int64)
    num_parts = 0
    for i in range(len(items)):
        item = items[i]
        is_merged = item[PARTIAL_START] != NO_PARTIAL or lengths[i] > chunks[i]
        for begin in range(0, lengths[i], chunks[i]):
            part = unsorted[num_parts]
            for column in range(ITEM_SIZE):
                part[column] = item[column]
            part[KV_BEGIN] += begin
            length = lengths[i] - begin
            if length > chunks[i]:
                length = chunks[i]
                part[KV_END] = part[KV_BEGIN] + length
            if is_merged:
                part[PARTIAL_START] = num_partials
                num_partials += item[NUM_TOKENS]
            order[num_parts] = (TO_THE_END - length) << 32 | num_parts
            num_parts += 1
    _sort(order)
    for i in range(len(parts)):
        for column in range(ITEM_SIZE):
            parts[i, column] = 0 if i >= num_parts else unsorted[order[i] & 0xFFFFFFFF, column]
    return num_partials


@compiled
def _list_merges(token_index, merge_starts, merge_rows, decode_items, tile_items):
    """Lists the partial results of each token."""
    for i in range(len(merge_starts)):
        merge_starts[i] = 0
    for items in (decode_items, tile_items):
        for i in range(len(items)):
            item = items[i]
            if not item[NUM_TOKENS]:
                break
            if item[PARTIAL_START] != NO_PARTIAL:
                for index in range(item[INDEX_START], item[INDEX_START] + item[NUM_TOKENS]):
                    merge_starts[token_index[index] + 1] += 1
    for token in range(1, len(merge_starts)):
        merge_starts[token] += merge_starts[token - 1]
    next_rows = merge_starts.copy()
    for items in (decode_items, tile_items):
        for i in range(len(items)):
            item = items[i]
            if not item[NUM_TOKENS]:
                break
            if item[PARTIAL_START] != NO_PARTIAL:
                for j in range(item[NUM_TOKENS]):
                    token = token_index[item[INDEX_START] + j]
                    merge_rows[next_rows[token]] = item[PARTIAL_START] + j
                    next_rows[token] += 1


@compiled
def _choose_chunk(lengths, slots, parts_per_slot):
    """Length of the parts that keeps the chip busy until the end.

    Items start in the order of their lengths, wherever there is a free slot. That balances them
    well if none is longer than a slot's share of all work; so longer ones are cut. Finer parts
    balance better: they are made where they are still long, and where at most two waves of items
    would leave a good part of the last one idle.
    """
    longest, total = 0, 0
    for length in lengths:
        longest = max(longest, length)
        total += length
    share = total // slots + 1
    num_waves = -(-len(lengths) // slots)
    is_even = num_waves > 2 or total >= 0.9 * num_waves * slots * longest
    if longest <= 2 * _MIN_SPLIT or (share >= longest and is_even):
        return max(longest, 1)
    if share >= min(longest, parts_per_slot * _LONG_PART):
        share //= parts_per_slot
    return max(_round_up(share), _MIN_SPLIT)


@compiled
def _sort(keys):
    """Sorts in place (Shell's, with the gaps of Ciura); Numba takes seconds to compile its own."""
    for gap in (701, 301, 132, 57, 23, 10, 4, 1):
        for i in range(gap, len(keys)):
            key = keys[i]
            while i >= gap and keys[i - gap] > key:
                keys[i] = keys[i - gap]
                i -= gap
            keys[i] = key


@compiled
def _set_item(item, index_start, num_tokens, table_row, kv_begin, kv_end):
    item[INDEX_START] = index_start
    item[NUM_TOKENS] = num_tokens
    item[TABLE_ROW] = table_row
    item[KV_BEGIN] = kv_begin
    item[KV_END] = kv_end
    item[PARTIAL_START] = NO_PARTIAL


@compiled
def _first_seen(position, window):
    """Where the range of an item begins whose first token stands at this position."""
    return max(position - window + 1, 0) // _GRAIN * _GRAIN


@compiled
def _round_up(length):
    return -(-length // _GRAIN) * _GRAIN
