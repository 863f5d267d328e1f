"""The blocks of each request: cached prefix, growth, fork, publication, return.

An admitted request owns a row of `block_tables`, of each KV group's one (`jpaged.kv_groups`); the
row lists its blocks in token order and is padded with block 0. The rules that make sharing safe:

* Only full blocks whose tokens are computed are ever shared, and tokens are only written at
  positions from `num_computed_tokens` on, so a shared block is never written.
* A block is published (findable by other requests) after the step that wrote it, by `commit`.
* At least one token is always left to compute, since the next token's logits come from it: of a
  prompt that is cached completely, the last block is computed again into a fresh block (as in
  vLLM) instead of writing into a shared one.
* Tables grow at their end, and a block that turns out equal to a published one is not replaced. In
  a group with a window, blocks that no token to come sees are given back as the table grows; their
  places hold block 0.
* A prefix is found as far as groups without a window have all its blocks and those with one have
  what the next token sees.
* A fork copies a part-filled last block at once, into a block of the child's own.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jpaged.core.block_pool import BlockPool, Content, ContentKey
from jpaged.request import Request

NEVER = 1 << 62
"""More tokens than any request has: the `commit_at` of a row that publishes nothing."""


def most_blocks(
    num_tokens: int, windows: Sequence[int | None], *, block_size: int, max_step_tokens: int
) -> int:
    """Blocks that one request holds at most at the same time, in all groups.

    Args:
        num_tokens: Of the request, answer included.
        windows: Of each group; `None`: it has none.
        block_size: Tokens per block.
        max_step_tokens: Tokens of one request in one step, at most.
    """
    return sum(
        _most_blocks_of_group(num_tokens, window, block_size, max_step_tokens) for window in windows
    )


def _most_blocks_of_group(
    num_tokens: int, window: int | None, block_size: int, max_step_tokens: int
) -> int:
    num_blocks = -(-num_tokens // block_size)
    if window is None:
        return num_blocks
    # What a step's tokens see, wherever it begins in a block.
    num_seen = window - 1 + max_step_tokens
    return min(num_blocks, (num_seen + block_size - 2) // block_size + 1)


def longest_request(
    num_blocks: int,
    windows: Sequence[int | None],
    *,
    block_size: int,
    max_step_tokens: int,
    limit: int,
) -> int:
    """Tokens of the longest request that a pool holds, `limit` at most; 0: none fits.

    Args:
        num_blocks: Of the pool.
        windows: As for `most_blocks`.
        block_size: Likewise.
        max_step_tokens: Likewise.
        limit: The model's.
    """

    def needed(num_tokens: int) -> int:
        return most_blocks(
            num_tokens, windows, block_size=block_size, max_step_tokens=max_step_tokens
        )

    return bisect_right(range(limit + 1), num_blocks, key=needed) - 1


_Table = tuple[int, list[int]]
"""(places behind the window, blocks)."""


class CachedPrefix(NamedTuple):
    """What a request would find in the cache.

    Attributes:
        contents: Its first full blocks.
        num_tokens: Tokens of these; always less than the request's own number of tokens.
        owner: The admitted request that is about to compute the first full block missing.
    """

    contents: list[Content]
    num_tokens: int
    owner: Request | None


class KVCacheManager:
    """Hands blocks of one pool to requests and keeps their block tables.

    Attributes:
        block_size: Tokens per block.
        max_num_seqs: Rows, that is requests admitted at the same time.
        max_model_len: Tokens of one request at most.
        windows: Of each KV group; `None`: it has none.
        block_tables: `[num_groups, max_num_seqs, ceil(max_model_len / block_size)]` int32, padded
            with 0. The runner reads the rows of a step from it.
        num_slots: By row, the tokens that its tables reach to; 0 for a row nobody owns.
        commit_at: By row, `commit` is due as soon as this many tokens are computed.
        pool: The blocks.
        prefix_cache_queries: Tokens looked up at first admissions.
        prefix_cache_hits: Tokens of those that were found.
        num_copies: Blocks copied on write so far.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
        windows: Sequence[int | None] = (None,),
        max_step_tokens: int | None = None,
    ) -> None:
        """Makes a manager with all blocks free.

        Args:
            num_blocks: Blocks that requests can use (block 0 not counted).
            block_size: Tokens per block.
            max_num_seqs: Requests that can be admitted at the same time.
            max_model_len: Tokens of one request at most.
            enable_prefix_caching: Whether blocks are published and found.
            watermark: Share of the blocks that stays free when a request is admitted beside
                others, so that growing does not preempt somebody at once.
            windows: Of each KV group, in tokens; `None`: it has none.
            max_step_tokens: Tokens of one request in one step at most; `None`: `max_model_len`.
        """
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.pool = BlockPool(num_blocks)
        self.windows = tuple(windows)
        self.block_tables: NDArray[np.int32] = np.zeros(
            (len(self.windows), max_num_seqs, -(-max_model_len // block_size)), np.int32
        )
        self.num_slots = [0] * max_num_seqs
        self.commit_at = [NEVER] * max_num_seqs
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_copies = 0
        self._max_step_tokens = max_step_tokens or max_model_len
        self._enable_prefix_caching = enable_prefix_caching
        self._num_watermark_blocks = int(watermark * num_blocks)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._requests: dict[int, Request] = {}
        self._groups = [
            _GroupTables(index, window, table, block_size)
            for index, (window, table) in enumerate(
                zip(self.windows, self.block_tables, strict=True)
            )
        ]
        self._full = [group for group in self._groups if group.window is None]
        self._windowed = [group for group in self._groups if group.window is not None]
        # By row, its published blocks from the first one on; a reference is held on the last.
        self._contents: list[list[Content]] = [[] for _ in range(max_num_seqs)]
        self._next_keys: dict[int, ContentKey] = {}
        self._owners: dict[ContentKey, Request] = {}
        self._sources: dict[int, int] = {}

    # What metrics and the scheduler read.

    @property
    def num_free_rows(self) -> int:
        """Requests that could be admitted as far as rows go."""
        return len(self._free_rows)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return self.pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks in use."""
        return self.pool.num_blocks_in_use / self.pool.num_blocks

    @property
    def num_allocated_slots(self) -> int:
        """Slots of all table entries; a block in two tables counts twice."""
        return len(self._groups) * sum(self.num_slots) - self._num_slots_behind

    @property
    def num_used_slots(self) -> int:
        """Slots of all table entries that hold a computed token."""
        num_tokens = sum(request.num_computed_tokens for request in self._requests.values())
        return len(self._groups) * num_tokens - self._num_slots_behind

    @property
    def _num_slots_behind(self) -> int:
        """Slots of all table entries that were given back, or never taken, behind windows."""
        return self.block_size * sum(group.num_behind_in_all for group in self._windowed)

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of so many tokens holds at most at the same time."""
        return most_blocks(
            num_tokens,
            self.windows,
            block_size=self.block_size,
            max_step_tokens=self._max_step_tokens,
        )

    def num_blocks_lacking(self, request: Request) -> int:
        """Blocks that the tokens an admitted request has so far still need, at most."""
        num_lacking = 0
        for group in self._groups:
            most = _most_blocks_of_group(
                request.num_tokens, group.window, self.block_size, self._max_step_tokens
            )
            num_held = len(group.block_ids[request.row]) - group.num_behind[request.row]
            num_lacking += max(0, most - num_held)
        return num_lacking

    # A request's way through the cache.

    def find_cached_prefix(self, request: Request) -> CachedPrefix:
        """Looks up the longest published prefix of a request that is not admitted.

        It covers the prompt and what was generated before a preemption, up to
        `request.max_cached_tokens`. No effect.
        """
        contents: list[Content] = []
        if not self._enable_prefix_caching:
            return CachedPrefix(contents, 0, None)
        find, block_size, token_ids = self.pool.find, self.block_size, request.token_ids
        parent: int | str = request.cache_salt
        missing: ContentKey | None = None
        limit = min(len(token_ids) - 1, request.max_cached_tokens)
        for end in range(block_size, limit + 1, block_size):
            key = (parent, tuple(token_ids[end - block_size : end]))
            content = find(key)
            if content is None:
                missing = key
                break
            contents.append(content)
            parent = content.number
        num_found = self._num_found(contents)
        if num_found < len(contents):
            missing = contents[num_found].key
            del contents[num_found:]
        owner = None if missing is None else self._owners.get(missing)
        return CachedPrefix(contents, num_found * block_size, owner)

    def _num_found(self, contents: list[Content]) -> int:
        """How many of these, from the first one on, have the blocks that a request needs."""
        num_found = len(contents)
        for group in self._full:
            for number in range(num_found):
                if not contents[number].block_ids[group.index]:
                    num_found = number
                    break
        before = -1
        while self._windowed and num_found not in (0, before):
            before = num_found
            for group in self._windowed:
                begin = group.num_unseen(num_found * self.block_size)
                for number in range(num_found - 1, begin - 1, -1):
                    if not contents[number].block_ids[group.index]:
                        # Of more blocks than these, the window would reach it as well.
                        num_found = number
                        break
        return num_found

    def admit(
        self,
        request: Request,
        prefix: CachedPrefix,
        num_tokens: int,
        *,
        num_reserved_blocks: int = 0,
    ) -> bool:
        """Gives a request a row, its cached prefix and blocks for its first tokens.

        It must fit as a whole, all tokens it has so far; beside other requests, the watermark
        and the reserved blocks must stay free too.

        Args:
            request: Gets `row` and `num_computed_tokens`.
            prefix: What `find_cached_prefix` has just returned for it.
            num_tokens: Tokens to make room for beyond the prefix.
            num_reserved_blocks: Blocks that admitted requests still need for their own prompts.

        Returns:
            Whether it was admitted; if not, nothing has changed.
        """
        pool, block_size, contents = self.pool, self.block_size, prefix.contents
        tables: list[_Table] = []
        num_new, num_needed = -(-request.num_tokens // block_size) - len(contents), 0
        for group in self._groups:
            num_behind = group.num_unseen(prefix.num_tokens)
            shared = [content.block_ids[group.index] for content in contents[num_behind:]]
            most = _most_blocks_of_group(
                request.num_tokens - num_behind * block_size,
                group.window,
                block_size,
                self._max_step_tokens,
            )
            # What others use as well takes no room, and makes none when the window leaves it.
            num_revived = sum(not pool.is_in_use(block_id) for block_id in shared)
            num_needed += min(num_new + num_revived, most)
            tables.append((num_behind, shared))
        if self._requests:
            num_needed += self._num_watermark_blocks + num_reserved_blocks
        if not self._free_rows or num_needed > pool.num_free_blocks:
            return False
        for _, shared in tables:
            pool.share(shared)
        self._occupy_row(request, tables, contents, prefix.num_tokens)
        self._grow(request.row, -(-(prefix.num_tokens + num_tokens) // block_size) - len(contents))
        if request.num_preemptions == 0:
            request.num_cached_tokens = prefix.num_tokens
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += prefix.num_tokens
        return True

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Grows an admitted request's tables by what its next tokens need.

        Blocks behind windows are given back first.

        Returns:
            Whether there are slots for `num_computed_tokens + num_tokens` tokens now; if not,
            nothing has grown.
        """
        row = request.row
        num_more = -(
            -(request.num_computed_tokens + num_tokens - self.num_slots[row]) // self.block_size
        )
        if num_more <= 0:
            return True
        if self._windowed:
            behind: list[int] = []
            for group in self._windowed:
                behind += group.give_back(row, request.num_computed_tokens)
            self.pool.free(behind)
        if num_more * len(self._groups) > self.pool.num_free_blocks:
            return False
        self._grow(row, num_more)
        return True

    def trim(self, request: Request, num_tokens: int) -> None:
        """Gives back blocks beyond `num_computed_tokens + num_tokens` tokens, not yet written."""
        num_blocks = -(-(request.num_computed_tokens + num_tokens) // self.block_size)
        self.pool.free(self._truncate(request.row, num_blocks))

    def commit(self, request: Request) -> None:
        """Publishes the blocks that became full, up to `num_computed_tokens`.

        To be called after the step that computed them; due when `commit_at[row]` is reached.
        """
        row, block_size = request.row, self.block_size
        end = self.commit_at[row]
        if end > request.num_computed_tokens:
            return
        contents, token_ids = self._contents[row], request.token_ids
        before = last = contents[-1] if contents else None
        while end <= request.num_computed_tokens:
            key = (
                request.cache_salt if last is None else last.number,
                tuple(token_ids[end - block_size : end]),
            )
            index = len(contents)
            block_ids = [group.block_ids[row][index] for group in self._groups]
            last = self.pool.publish(last, key, block_ids)
            contents.append(last)
            end += block_size
        assert last is not None
        self.pool.hold(last)
        if before is not None:
            self.pool.release(before)
        self.commit_at[row] = end
        if row in self._next_keys or end <= len(token_ids):
            self._announce(request)

    def fork(self, parent: Request, child: Request) -> bool:
        """Admits a child that shares what the parent has computed of the child's tokens.

        Leading tokens they have in common count, one token of the child always being left to
        compute. Full blocks gain a reference; a part-filled one is to be copied (`take_copies`).

        Args:
            parent: An admitted request.
            child: Gets `row` and `num_computed_tokens`; its `token_ids` are its own business.

        Returns:
            Whether a row and, where needed, blocks were free, and the parent still holds what the
            child's windows see; if not, nothing has changed.
        """
        if child.cache_salt != parent.cache_salt:
            raise ValueError(
                f"cache_salt is {child.cache_salt!r}; a fork shares blocks, so it must equal the "
                f"parent's, {parent.cache_salt!r}"
            )
        limit = min(parent.num_computed_tokens, child.num_tokens - 1)
        num_tokens = common_length(parent.token_ids, child.token_ids, limit)
        num_full, num_part_tokens = divmod(num_tokens, self.block_size)
        num_copies = len(self._groups) if num_part_tokens else 0
        if not self._free_rows or num_copies > self.pool.num_free_blocks:
            return False
        tables: list[_Table] = []
        for group in self._groups:
            num_behind = group.num_unseen(num_tokens)
            if num_behind < group.num_behind[parent.row]:
                return False
            tables.append((num_behind, group.block_ids[parent.row][num_behind:num_full]))
        for _, shared in tables:
            self.pool.share(shared)
        if num_copies:
            for group, (_, block_ids) in zip(self._groups, tables, strict=True):
                source = group.block_ids[parent.row][num_full]
                # A source that is itself a copy not yet made stands for where its content is now.
                source = self._sources.get(source, source)
                # Keeps the content until the copy is handed out, even if the parent ends before.
                self.pool.share([source])
                [destination] = self.pool.allocate(1)
                self._sources[destination] = source
                block_ids.append(destination)
            self.num_copies += num_copies
        publishes = self.commit_at[parent.row] != NEVER
        contents = self._contents[parent.row][:num_full]
        self._occupy_row(child, tables, contents, num_tokens, publishes=publishes)
        return True

    def take_copies(self) -> list[tuple[int, int]]:
        """Hands out the copies that forks asked for, as (source, destination) block ids.

        The step must make them before it writes, for a source may belong to someone else from
        now on. No block is both a source and a destination, none is a destination twice.
        """
        if not self._sources:
            return []
        copies = [(source, destination) for destination, source in self._sources.items()]
        self._sources.clear()
        self.pool.free(source for source, _ in copies)
        return copies

    def free(self, request: Request) -> None:
        """Takes an admitted request's row and blocks away, tail first."""
        row = request.row
        self._withdraw(row)
        block_ids = self._truncate(row, 0)
        self.pool.free(block_ids)
        if self._contents[row]:
            self.pool.release(self._contents[row][-1])
            self._contents[row] = []
        if self._sources:
            copies = [self._sources.pop(block_id, None) for block_id in block_ids]
            self.pool.free(source for source in copies if source is not None)
        self.commit_at[row] = NEVER
        del self._requests[row]
        self._free_rows.append(row)
        request.row = -1

    def reset_prefix_cache(self) -> None:
        """Forgets all published content, as when the weights change.

        Requests that are admitted now go on, but never publish again until they are admitted
        anew: their K and V are partly those of the old weights.
        """
        self.pool.reset_prefix_cache()
        self.commit_at[:] = [NEVER] * self.max_num_seqs
        self._contents = [[] for _ in range(self.max_num_seqs)]
        self._next_keys.clear()
        self._owners.clear()

    # Rows and announcements.

    def _occupy_row(
        self,
        request: Request,
        tables: list[_Table],
        contents: list[Content],
        num_computed_tokens: int,
        *,
        publishes: bool = True,
    ) -> None:
        row = request.row = self._free_rows.pop()
        request.num_computed_tokens = num_computed_tokens
        self._requests[row] = request
        for group, (num_behind, block_ids) in zip(self._groups, tables, strict=True):
            group.occupy(row, num_behind, block_ids)
        self.num_slots[row] = len(self._groups[0].block_ids[row]) * self.block_size
        if publishes and self._enable_prefix_caching:
            self._contents[row] = contents
            if contents:
                self.pool.hold(contents[-1])
            self.commit_at[row] = (num_computed_tokens // self.block_size + 1) * self.block_size
            self._announce(request)

    def _grow(self, row: int, num_blocks: int) -> None:
        block_ids = self.pool.allocate(num_blocks * len(self._groups))
        for group in self._groups:
            group.append(row, block_ids[:num_blocks])
            del block_ids[:num_blocks]
        self.num_slots[row] += num_blocks * self.block_size

    def _truncate(self, row: int, num_blocks: int) -> list[int]:
        """Cuts tables down to their first blocks; returns the others, last ones first."""
        block_ids: list[int] = []
        if self.num_slots[row] > num_blocks * self.block_size:
            self.num_slots[row] = num_blocks * self.block_size
            if len(self._groups) == 1:
                return self._groups[0].truncate(row, num_blocks)
            # By place in the tables, so that no group loses the beginning of a prefix before
            # another one loses its end.
            cut = [group.truncate(row, num_blocks) for group in self._groups]
            for place in zip_longest(*cut, fillvalue=0):
                block_ids += filter(None, place)
        return block_ids

    def _announce(self, request: Request) -> None:
        """Lets others know which block this request publishes next, if its tokens are known."""
        row, block_size = request.row, self.block_size
        self._withdraw(row)
        end = self.commit_at[row]
        if end <= request.num_tokens:
            contents = self._contents[row]
            parent = contents[-1].number if contents else request.cache_salt
            key = (parent, tuple(request.token_ids[end - block_size : end]))
            self._next_keys[row] = key
            self._owners.setdefault(key, request)

    def _withdraw(self, row: int) -> None:
        key = self._next_keys.pop(row, None)
        if key is not None and self._owners.get(key) is self._requests[row]:
            del self._owners[key]

    def check(self, requests: Iterable[Request]) -> None:
        """Asserts every invariant; for tests, it walks all blocks.

        Args:
            requests: All requests that are admitted.
        """
        by_row = {request.row: request for request in requests}
        assert by_row == self._requests
        assert sorted([*by_row, *self._free_rows]) == list(range(self.max_num_seqs))
        references: list[int] = list(self._sources.values())
        held: list[Content] = []
        assert not set(references) & set(self._sources), "a copy's source is not written yet"
        block_size = self.block_size
        for group in self._groups:
            assert group.num_behind_in_all == sum(group.num_behind)
        for row in range(self.max_num_seqs):
            num_blocks, rest = divmod(self.num_slots[row], block_size)
            request, contents = by_row.get(row), self._contents[row]
            assert rest == 0
            for group in self._groups:
                table = group.table[row].tolist()
                block_ids = table[group.num_behind[row] : num_blocks]
                assert table[:num_blocks] == group.block_ids[row]
                assert 0 not in block_ids and not any(table[num_blocks:])
                assert not any(table[: group.num_behind[row]])
                assert len(set(block_ids)) == len(block_ids), f"row {row} holds a block twice"
                references += block_ids
                if request is not None:
                    assert group.num_behind[row] <= group.num_unseen(request.num_computed_tokens)
            if request is None:
                assert num_blocks == 0 and self.commit_at[row] == NEVER and not contents
                continue
            num_computed_tokens = request.num_computed_tokens
            assert 0 <= num_computed_tokens <= min(self.num_slots[row], request.num_tokens)
            if self.commit_at[row] == NEVER:
                assert not contents
                continue
            assert self.commit_at[row] == (num_computed_tokens // block_size + 1) * block_size
            assert len(contents) == num_computed_tokens // block_size
            held += contents[-1:]
            parent: int | str = request.cache_salt
            for index, content in enumerate(contents):
                tokens = tuple(request.token_ids[index * block_size : (index + 1) * block_size])
                assert content.key == (parent, tokens), (
                    f"row {row}, block {index} is published with other tokens"
                )
                assert self.pool.find(content.key) is content
                parent = content.number
        self.pool.check(references, held)
        for key, owner in self._owners.items():
            assert self._next_keys[owner.row] == key and by_row[owner.row] is owner


class _GroupTables:
    """The block tables of one KV group.

    Attributes:
        index: Among the groups.
        window: Tokens that its layers see at most; `None`: all.
        table: `[max_num_seqs, M]`, the manager's.
        block_ids: By row, the same as `table`, since reading single elements of an array is slow.
        num_behind: By row, its first places that hold block 0, as no token to come sees them.
        num_behind_in_all: Their sum.
    """

    def __init__(
        self, index: int, window: int | None, table: NDArray[np.int32], block_size: int
    ) -> None:
        self.index = index
        self.window = window
        self.table = table
        self.block_ids: list[list[int]] = [[] for _ in table]
        self.num_behind = [0] * len(table)
        self.num_behind_in_all = 0
        self._block_size = block_size

    def num_unseen(self, num_computed_tokens: int) -> int:
        """Blocks that tokens from this position on do not see."""
        if self.window is None:
            return 0
        return max(0, num_computed_tokens - self.window + 1) // self._block_size

    def occupy(self, row: int, num_behind: int, block_ids: list[int]) -> None:
        """Fills an empty row: places behind the window, then blocks."""
        self.block_ids[row] = [0] * num_behind
        self._count_behind(row, num_behind)
        self.append(row, block_ids)

    def append(self, row: int, block_ids: list[int]) -> None:
        """Adds blocks at the end."""
        row_ids, table = self.block_ids[row], self.table[row]
        for block_id in block_ids:
            table[len(row_ids)] = block_id
            row_ids.append(block_id)

    def give_back(self, row: int, num_computed_tokens: int) -> list[int]:
        """Takes out blocks that tokens from here on do not see; returns them, last one first."""
        begin, end = self.num_behind[row], self.num_unseen(num_computed_tokens)
        if begin >= end:
            return []
        block_ids = self.block_ids[row][begin:end]
        self.block_ids[row][begin:end] = [0] * (end - begin)
        self.table[row, begin:end] = 0
        self._count_behind(row, end)
        block_ids.reverse()
        return block_ids

    def truncate(self, row: int, num_blocks: int) -> list[int]:
        """Cuts a table down to its first blocks; returns the others, last one first."""
        row_ids = self.block_ids[row]
        block_ids = row_ids[max(num_blocks, self.num_behind[row]) :]
        self.table[row, num_blocks : len(row_ids)] = 0
        del row_ids[num_blocks:]
        self._count_behind(row, min(self.num_behind[row], num_blocks))
        block_ids.reverse()
        return block_ids

    def _count_behind(self, row: int, num_behind: int) -> None:
        self.num_behind_in_all += num_behind - self.num_behind[row]
        self.num_behind[row] = num_behind


def common_length(left: list[int], right: list[int], limit: int) -> int:
    """How many leading tokens, `limit` at most, two lists have in common."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
