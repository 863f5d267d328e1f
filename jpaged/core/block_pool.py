"""Reference-counted pool of fixed-size KV-cache blocks.

A block is in one of three states, and `BlockPool.check` asserts that their sizes add up:

* in use  - its reference count is above 0
* cached  - nobody refers to it, but its content is indexed; it may be revived or evicted
* free    - nobody refers to it and its content is forgotten

Block 0 is never handed out: padded tokens write there, so no kernel needs a branch for them.

A free block is always taken before a cached one is evicted, and cached blocks are evicted least
recently used first. Requests give their blocks back tail first, so a chain of cached blocks
loses its tail before the head that others may share (the rule is vLLM's).

**Prefix index.** A full block is found by its key, `(parent, tokens)`: its own tokens and the
*content id* of the block before it, or the request's cache salt where there is none before it.
A content id is drawn once for each newly published content and never again, so by induction two
blocks with equal keys have equal tokens from the first one on, and equal salts. The index is a
dict: it hashes the key and then compares it in full, so a hash collision cannot lead to the K and
V of another prefix.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import count

BlockKey = tuple[int | str, tuple[int, ...]]
"""(content id of the block before, or the salt; tokens of this block)."""


class BlockPool:
    """Who owns which block: reference counts, eviction order, prefix index.

    Every operation takes time in proportion to the blocks it names, whatever the pool's size.

    Attributes:
        num_blocks: Blocks that can be handed out; their ids are 1 to `num_blocks`.
        num_shared_blocks: Blocks with two references or more.
    """

    def __init__(self, num_blocks: int) -> None:
        """Makes a pool whose blocks are all free.

        Args:
            num_blocks: Blocks that requests can use, at least 1. The device array has one more,
                block 0.
        """
        if num_blocks < 1:
            raise ValueError(
                f"num_blocks is {num_blocks}; it must be at least 1: give the KV cache more memory"
            )
        self.num_blocks = num_blocks
        self.num_shared_blocks = 0
        self._ref_counts = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = [None] * (num_blocks + 1)
        self._content_ids = [0] * (num_blocks + 1)
        self._new_content_id = count(1)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks nobody refers to, kept for their content."""
        return len(self._cached)

    @property
    def num_blocks_in_use(self) -> int:
        """Blocks somebody refers to; a shared block counts once."""
        return self.num_blocks - len(self._free) - len(self._cached)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks for one owner, evicting cached content where no block is free.

        Args:
            num_blocks: At most `num_free_blocks`; asking for more is the caller's bug.

        Returns:
            Block ids, each with one reference and without content.
        """
        assert num_blocks <= self.num_free_blocks, (num_blocks, self.num_free_blocks)
        block_ids: list[int] = []
        free, ref_counts = self._free, self._ref_counts
        for _ in range(num_blocks):
            block_id = free.pop() if free else self._evict()
            ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Takes one more reference on each block; a cached block is revived."""
        ref_counts = self._ref_counts
        for block_id in block_ids:
            ref_counts[block_id] += 1
            if ref_counts[block_id] == 1:
                del self._cached[block_id]
            elif ref_counts[block_id] == 2:
                self.num_shared_blocks += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Gives one reference back on each block, in the order in which they may be evicted."""
        ref_counts = self._ref_counts
        for block_id in block_ids:
            assert ref_counts[block_id] > 0, f"block {block_id} is freed once too often"
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 1:
                self.num_shared_blocks -= 1
            elif ref_counts[block_id] == 0:
                if self._keys[block_id] is not None:
                    self._cached[block_id] = None
                else:
                    self._content_ids[block_id] = 0
                    self._free.append(block_id)

    def is_in_use(self, block_id: int) -> bool:
        """Whether somebody refers to the block."""
        return self._ref_counts[block_id] > 0

    def content_id(self, block_id: int) -> int:
        """What stands for the block's tokens and all before them; 0 if it was not published."""
        return self._content_ids[block_id]

    def find(self, key: BlockKey) -> int | None:
        """The block that holds this content, in use or cached."""
        return self._index.get(key)

    def find_key(self, block_id: int) -> BlockKey | None:
        """The key under which the block is found, if it is."""
        return self._keys[block_id]

    def publish(self, block_id: int, key: BlockKey) -> int:
        """Indexes the content of a full block in use.

        If the content is indexed already, the block gets the same content id, so that blocks
        after it can be published. It is found instead of the other block if that one is merely
        cached (which becomes free: its copy in use lasts longer); else it is not found itself.

        Returns:
            The content id, the parent of the next block's key.
        """
        assert self._ref_counts[block_id] > 0 and self._content_ids[block_id] == 0, block_id
        indexed = self._index.setdefault(key, block_id)
        if indexed == block_id:
            content_id = next(self._new_content_id)
            self._keys[block_id] = key
        else:
            content_id = self._content_ids[indexed]
            if self._ref_counts[indexed] == 0:
                del self._cached[indexed]
                self._forget(indexed)
                self._free.append(indexed)
                self._index[key] = block_id
                self._keys[block_id] = key
        self._content_ids[block_id] = content_id
        return content_id

    def reset_prefix_cache(self) -> None:
        """Forgets all content: what is cached becomes free, what is in use is not found again.

        For when the weights change. Owners of blocks in use must not publish anything that
        rests on them afterwards; `KVCacheManager.reset_prefix_cache` sees to it.
        """
        self._index.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        self._keys = [None] * (self.num_blocks + 1)
        self._content_ids = [0] * (self.num_blocks + 1)

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        self._forget(block_id)
        return block_id

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        assert key is not None, f"cached block {block_id} has no key"
        del self._index[key]
        self._keys[block_id] = None
        self._content_ids[block_id] = 0

    def check(self, references: Iterable[int]) -> None:
        """Asserts every invariant of the pool; for tests, it walks all blocks.

        Args:
            references: Block ids as the owners hold them, one entry per reference.
        """
        expected = Counter(references)
        assert 0 not in expected, "block 0 belongs to nobody"
        for block_id, ref_count in enumerate(self._ref_counts):
            assert ref_count == expected[block_id], (
                f"block {block_id} counts {ref_count} references, owners hold {expected[block_id]}"
            )
        free, cached = set(self._free), set(self._cached)
        in_use = set(expected)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert len(free) + len(cached) + len(in_use) == self.num_blocks
        assert free | cached | in_use == set(range(1, self.num_blocks + 1))
        assert self.num_blocks_in_use == len(in_use)
        assert self.num_shared_blocks == sum(n > 1 for n in self._ref_counts)
        indexed = {b for b, key in enumerate(self._keys) if key is not None}
        assert cached <= indexed, "a cached block has lost its key"
        assert not free & indexed, "a free block is still indexed"
        assert len(self._index) == len(indexed)
        for key, block_id in self._index.items():
            assert self._keys[block_id] == key, f"block {block_id} is indexed under another key"
        contents = [self._content_ids[block_id] for block_id in indexed]
        assert 0 not in contents and len(set(contents)) == len(contents)
        assert all(self._content_ids[block_id] == 0 for block_id in free)
