"""Reference-counted pool of fixed-size KV-cache blocks.

A block is in one of three states, and `BlockPool.check` asserts that their sizes add up:

* in use  - its reference count is above 0
* cached  - nobody refers to it, but its content is indexed; it may be revived or evicted
* free    - nobody refers to it and its content is forgotten

Block 0 is never handed out: padded tokens write there, so no kernel needs a branch for them.

A free block is always taken before a cached one is evicted, and cached blocks are evicted least
recently used first. Requests give their blocks back tail first, so a chain of cached blocks
loses its tail before the head that others may share (the rule is vLLM's).

**Prefix index.** A full block's tokens and all before them are a *content*. It is found by its
key, `(parent, tokens)`: the tokens of the block and the number of the content before it, or the
request's cache salt where there is none before it. Numbers are never given twice, so by induction
two contents with equal keys have equal tokens from the first one on, and equal salts. The index is
a dict: it hashes the key and then compares it in full, so a hash collision cannot lead to the K and
V of another prefix.

A content has a block in each KV group (`jpaged.kv_groups`), as long as it is not evicted, and stays
known while any block holds it, a content follows it or a request's last full block has it. So a
chain of contents leads on behind a window, where the blocks of its layers are long gone.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count

ContentKey = tuple[int | str, tuple[int, ...]]
"""(number of the content before, or the salt; tokens of this block)."""


class Content:
    """A full block's tokens and all before them, known to the prefix index.

    Attributes:
        number: Its own, the first part of the keys of those that follow.
        key: Under which it is found.
        parent: The content before it; `None`: it begins a prompt.
        block_ids: By KV group, the block that is found for it; 0: there is none.
        num_references: Blocks that are found for it, contents that follow it, and holders.
    """

    __slots__ = ("block_ids", "key", "num_references", "number", "parent")

    def __init__(self, number: int, key: ContentKey, parent: "Content | None", num_groups: int):
        """Makes a content that no block holds yet."""
        self.number = number
        self.key = key
        self.parent = parent
        self.block_ids = [0] * num_groups
        self.num_references = 0


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
        self._index: dict[ContentKey, Content] = {}
        # By block, the content that it is found for.
        self._contents: list[Content | None] = [None] * (num_blocks + 1)
        self._new_number = count(1)

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
                if self._contents[block_id] is not None:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)

    def is_in_use(self, block_id: int) -> bool:
        """Whether somebody refers to the block."""
        return self._ref_counts[block_id] > 0

    def find(self, key: ContentKey) -> Content | None:
        """What is known under this key, though some of its blocks may be gone."""
        return self._index.get(key)

    def publish(self, parent: Content | None, key: ContentKey, block_ids: Sequence[int]) -> Content:
        """Makes full blocks in use, one of each group, findable as a content.

        Where a group has a block for it already, the new one is found instead if the other is
        merely cached (which becomes free: its copy in use lasts longer); else it is not found
        itself.

        Args:
            parent: The content before it, known.
            key: The content's.
            block_ids: By group.
        """
        content = self._index.get(key)
        if content is None:
            content = Content(next(self._new_number), key, parent, len(block_ids))
            self._index[key] = content
            if parent is not None:
                parent.num_references += 1
        ref_counts, contents, found_ids = self._ref_counts, self._contents, content.block_ids
        for group, block_id in enumerate(block_ids):
            assert ref_counts[block_id] > 0 and contents[block_id] is None, block_id
            found = found_ids[group]
            if found:
                if ref_counts[found]:
                    continue
                del self._cached[found]
                contents[found] = None
                self._free.append(found)
            else:
                content.num_references += 1
            found_ids[group] = block_id
            contents[block_id] = content
        return content

    def hold(self, content: Content) -> None:
        """Keeps a content and those before it known, whatever becomes of their blocks."""
        content.num_references += 1

    def release(self, content: Content) -> None:
        """Gives one reference back; what nothing refers to any more is forgotten."""
        last: Content | None = content
        while last is not None:
            last.num_references -= 1
            if last.num_references:
                return
            del self._index[last.key]
            last = last.parent

    def reset_prefix_cache(self) -> None:
        """Forgets all content: what is cached becomes free, what is in use is not found again.

        For when the weights change. Owners of blocks in use must not publish anything that
        rests on them afterwards, nor release what they held; `KVCacheManager.reset_prefix_cache`
        sees to it.
        """
        self._index.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        self._contents = [None] * (self.num_blocks + 1)

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        content = self._contents[block_id]
        assert content is not None, f"cached block {block_id} has no content"
        content.block_ids[content.block_ids.index(block_id)] = 0
        self._contents[block_id] = None
        self.release(content)
        return block_id

    def check(self, references: Iterable[int], held: Iterable[Content] = ()) -> None:
        """Asserts every invariant of the pool; for tests, it walks all blocks.

        Args:
            references: Block ids as the owners hold them, one entry per reference.
            held: Contents, likewise.
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
        indexed = {b for b, content in enumerate(self._contents) if content is not None}
        assert cached <= indexed, "a cached block has lost its content"
        assert not free & indexed, "a free block is still found"
        num_references = Counter(held)
        found: list[int] = []
        for key, content in self._index.items():
            assert content.key == key
            block_ids = [block_id for block_id in content.block_ids if block_id]
            assert all(self._contents[block_id] is content for block_id in block_ids)
            found += block_ids
            num_references[content] += len(block_ids)
            if content.parent is not None:
                assert key[0] == content.parent.number
                num_references[content.parent] += 1
        assert sorted(found) == sorted(indexed), "a block is found for two contents, or for none"
        contents = set(self._index.values())
        assert len({content.number for content in contents}) == len(contents)
        assert set(num_references) == contents, "a content is known that nothing refers to"
        assert all(content.num_references == n for content, n in num_references.items())
