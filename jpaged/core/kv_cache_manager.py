"""The blocks of each request: cached prefix, growth, fork, publication, return.

An admitted request owns a row of `block_tables`; the row lists its blocks in token order and is
padded with block 0. The rules that make sharing safe:

* Only full blocks whose tokens are computed are ever shared, and tokens are only written at
  positions from `num_computed_tokens` on, so a shared block is never written.
* A block is published (findable by other requests) after the step that wrote it, by `commit`.
* At least one token is always left to compute, since the next token's logits come from it: of a
  prompt that is cached completely, the last block is computed again into a fresh block (as in
  vLLM) instead of writing into a shared one.
* Tables are append-only: a block that turns out equal to a published one is not replaced.
* A fork copies a part-filled last block at once, into a block of the child's own.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jpaged.core.block_pool import BlockKey, BlockPool
from jpaged.request import Request

NEVER = 1 << 62
"""More tokens than any request has: the `commit_at` of a row that publishes nothing."""


class CachedPrefix(NamedTuple):
    """What a request would find in the cache.

    Attributes:
        block_ids: Blocks that hold its first `num_tokens` tokens.
        num_tokens: Always less than the request's own number of tokens.
        owner: The admitted request that is about to compute the first full block missing.
    """

    block_ids: list[int]
    num_tokens: int
    owner: Request | None


class KVCacheManager:
    """Hands blocks of one pool to requests and keeps their block tables.

    Attributes:
        block_size: Tokens per block.
        max_num_seqs: Rows, that is requests admitted at the same time.
        max_model_len: Tokens of one request at most.
        block_tables: `[max_num_seqs, ceil(max_model_len / block_size)]` int32, padded with 0.
            The runner reads the rows of a step from it.
        num_slots: By row, the tokens that its blocks can hold; 0 for a row nobody owns.
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
        """
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.pool = BlockPool(num_blocks)
        self.block_tables: NDArray[np.int32] = np.zeros(
            (max_num_seqs, -(-max_model_len // block_size)), np.int32
        )
        self.num_slots = [0] * max_num_seqs
        self.commit_at = [NEVER] * max_num_seqs
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_copies = 0
        self._enable_prefix_caching = enable_prefix_caching
        self._num_watermark_blocks = int(watermark * num_blocks)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._requests: dict[int, Request] = {}
        # The same as `block_tables`, since reading single elements of an array is slow.
        self._block_ids: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._next_keys: dict[int, BlockKey] = {}
        self._owners: dict[BlockKey, Request] = {}
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
        return sum(self.num_slots)

    @property
    def num_used_slots(self) -> int:
        """Slots of all table entries that hold a computed token."""
        return sum(request.num_computed_tokens for request in self._requests.values())

    # A request's way through the cache.

    def find_cached_prefix(self, request: Request) -> CachedPrefix:
        """Looks up the longest published prefix of a request that is not admitted.

        It covers the prompt and what was generated before a preemption, up to
        `request.max_cached_tokens`. No effect.
        """
        block_ids: list[int] = []
        if not self._enable_prefix_caching:
            return CachedPrefix(block_ids, 0, None)
        block_size, token_ids = self.block_size, request.token_ids
        parent: int | str = request.cache_salt
        owner = None
        limit = min(len(token_ids) - 1, request.max_cached_tokens)
        for end in range(block_size, limit + 1, block_size):
            key = (parent, tuple(token_ids[end - block_size : end]))
            block_id = self.pool.find(key)
            if block_id is None:
                owner = self._owners.get(key)
                break
            block_ids.append(block_id)
            parent = self.pool.content_id(block_id)
        return CachedPrefix(block_ids, len(block_ids) * block_size, owner)

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
        pool, block_size = self.pool, self.block_size
        num_prefix_blocks = len(prefix.block_ids)
        num_revived = sum(not pool.is_in_use(block_id) for block_id in prefix.block_ids)
        num_needed = -(-request.num_tokens // block_size) - num_prefix_blocks + num_revived
        if self._requests:
            num_needed += self._num_watermark_blocks + num_reserved_blocks
        if not self._free_rows or num_needed > pool.num_free_blocks:
            return False
        pool.share(prefix.block_ids)
        num_blocks = -(-(prefix.num_tokens + num_tokens) // block_size)
        block_ids = prefix.block_ids + pool.allocate(num_blocks - num_prefix_blocks)
        self._occupy_row(request, block_ids, prefix.num_tokens)
        if request.num_preemptions == 0:
            request.num_cached_tokens = prefix.num_tokens
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += prefix.num_tokens
        return True

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Grows an admitted request's table by what its next tokens need.

        Returns:
            Whether there are slots for `num_computed_tokens + num_tokens` tokens now; if not,
            nothing has changed.
        """
        row, block_size = request.row, self.block_size
        first = len(self._block_ids[row])
        last = -(-(request.num_computed_tokens + num_tokens) // block_size)
        if last <= first:
            return True
        if last - first > self.pool.num_free_blocks:
            return False
        self._append(row, self.pool.allocate(last - first))
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
        block_ids, token_ids = self._block_ids[row], request.token_ids
        index = end // block_size - 1
        parent = self._parent(request, index)
        while end <= request.num_computed_tokens:
            key = (parent, tuple(token_ids[end - block_size : end]))
            parent = self.pool.publish(block_ids[index], key)
            index += 1
            end += block_size
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
            Whether a row and, where needed, a block was free; if not, nothing has changed.
        """
        if child.cache_salt != parent.cache_salt:
            raise ValueError(
                f"cache_salt is {child.cache_salt!r}; a fork shares blocks, so it must equal the "
                f"parent's, {parent.cache_salt!r}"
            )
        limit = min(parent.num_computed_tokens, child.num_tokens - 1)
        num_tokens = common_length(parent.token_ids, child.token_ids, limit)
        num_full, num_part_tokens = divmod(num_tokens, self.block_size)
        needs_copy = num_part_tokens > 0
        if not self._free_rows or (needs_copy and not self.pool.num_free_blocks):
            return False
        block_ids = self._block_ids[parent.row][:num_full]
        self.pool.share(block_ids)
        if needs_copy:
            source = self._block_ids[parent.row][num_full]
            # A source that is itself a copy not yet made stands for where its content is now.
            source = self._sources.get(source, source)
            # Keeps the content until the copy is handed out, even if the parent ends before.
            self.pool.share([source])
            [destination] = self.pool.allocate(1)
            self._sources[destination] = source
            self.num_copies += 1
            block_ids.append(destination)
        publishes = self.commit_at[parent.row] != NEVER
        self._occupy_row(child, block_ids, num_tokens, publishes=publishes)
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
        self._next_keys.clear()
        self._owners.clear()

    # Rows and announcements.

    def _occupy_row(
        self,
        request: Request,
        block_ids: list[int],
        num_computed_tokens: int,
        *,
        publishes: bool = True,
    ) -> None:
        row = request.row = self._free_rows.pop()
        request.num_computed_tokens = num_computed_tokens
        self._requests[row] = request
        self._append(row, block_ids)
        if publishes and self._enable_prefix_caching:
            self.commit_at[row] = (num_computed_tokens // self.block_size + 1) * self.block_size
            self._announce(request)

    def _append(self, row: int, block_ids: list[int]) -> None:
        table = self._block_ids[row]
        for block_id in block_ids:
            self.block_tables[row, len(table)] = block_id
            table.append(block_id)
        self.num_slots[row] = len(table) * self.block_size

    def _truncate(self, row: int, num_blocks: int) -> list[int]:
        """Cuts a table down to its first blocks; returns the others, last one first."""
        table = self._block_ids[row]
        block_ids = table[num_blocks:]
        block_ids.reverse()
        if block_ids:
            self.block_tables[row, num_blocks : len(table)] = 0
            del table[num_blocks:]
            self.num_slots[row] = num_blocks * self.block_size
        return block_ids

    def _parent(self, request: Request, block_index: int) -> int | str:
        """First part of the key of the request's block at this index."""
        if block_index == 0:
            return request.cache_salt
        content_id = self.pool.content_id(self._block_ids[request.row][block_index - 1])
        assert content_id, f"block {block_index - 1} of {request.request_id} is not published"
        return content_id

    def _announce(self, request: Request) -> None:
        """Lets others know which block this request publishes next, if its tokens are known."""
        row, block_size = request.row, self.block_size
        self._withdraw(row)
        end = self.commit_at[row]
        if end <= request.num_tokens:
            parent = self._parent(request, end // block_size - 1)
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
        assert not set(references) & set(self._sources), "a copy's source is not written yet"
        block_size = self.block_size
        for row, table in enumerate(self.block_tables.tolist()):
            num_blocks, rest = divmod(self.num_slots[row], block_size)
            block_ids = table[:num_blocks]
            assert block_ids == self._block_ids[row]
            assert rest == 0 and 0 not in block_ids and not any(table[num_blocks:])
            assert len(set(block_ids)) == num_blocks, f"row {row} holds a block twice"
            references += block_ids
            request = by_row.get(row)
            if request is None:
                assert num_blocks == 0 and self.commit_at[row] == NEVER
                continue
            num_computed_tokens = request.num_computed_tokens
            assert 0 <= num_computed_tokens <= min(self.num_slots[row], request.num_tokens)
            if self.commit_at[row] == NEVER:
                continue
            assert self.commit_at[row] == (num_computed_tokens // block_size + 1) * block_size
            for block_index in range(num_computed_tokens // block_size):
                start = block_index * block_size
                tokens = tuple(request.token_ids[start : start + block_size])
                # `None`: another block holds the same content and is found instead.
                assert self.pool.content_id(block_ids[block_index]) and self.pool.find_key(
                    block_ids[block_index]
                ) in (None, (self._parent(request, block_index), tokens)), (
                    f"row {row}, block {block_index} is published with other tokens"
                )
        self.pool.check(references)
        for key, owner in self._owners.items():
            assert self._next_keys[owner.row] == key and by_row[owner.row] is owner


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
