import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jpaged.core.block_pool import BlockPool, Content


class CollidingToken(int):
    """A token id whose hash equals every other's."""

    def __hash__(self) -> int:
        return 7


def key_after(parent: Content | None, tokens: tuple[int, ...], salt: str = ""):
    return (salt if parent is None else parent.number, tokens)


def publish_chain(pool: BlockPool, block_ids: list[int], tokens: list[tuple[int, ...]], salt=""):
    """Returns the last content."""
    parent = None
    for block_id, block_tokens in zip(block_ids, tokens, strict=True):
        parent = pool.publish(parent, key_after(parent, block_tokens, salt), [block_id])
    assert parent is not None
    return parent


def find_block(pool: BlockPool, *chain: tuple[int, ...], salt: str = "", group: int = 0):
    """The block that is found for the last of these blocks' tokens; `None`: they are not known."""
    content = None
    for tokens in chain:
        content = pool.find(key_after(content, tokens, salt))
        if content is None:
            return None
    return content.block_ids[group] if content else None


def test_pool_of_no_blocks_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"num_blocks is 0; .*more memory"):
        BlockPool(0)


def test_every_block_but_the_padding_block_is_handed_out_once():
    pool = BlockPool(5)
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free_blocks == 0
    with pytest.raises(AssertionError):
        pool.allocate(1)


def test_free_blocks_are_taken_before_cached_ones_are_evicted():
    pool = BlockPool(4)
    head, tail = pool.allocate(2)
    publish_chain(pool, [head, tail], [(1, 2), (3, 4)])
    pool.free([tail, head])
    assert not {head, tail} & set(pool.allocate(2))
    assert find_block(pool, (1, 2)) == head


def test_freed_prefix_is_revived_before_it_is_evicted():
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    publish_chain(pool, [block], [(1, 2)])
    pool.free([block])
    assert pool.num_cached_blocks == 1
    pool.share([block])
    pool.allocate(1)
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (0, 0)
    assert find_block(pool, (1, 2)) == block


def test_tail_of_a_chain_is_evicted_before_its_head():
    pool = BlockPool(3)
    block_ids = pool.allocate(3)
    publish_chain(pool, block_ids, [(1,), (2,), (3,)])
    pool.free(reversed(block_ids))
    assert pool.allocate(3) == block_ids[::-1]


def test_least_recently_used_block_is_evicted_first():
    pool = BlockPool(3)
    block_ids = pool.allocate(3)
    for block_id in block_ids:
        publish_chain(pool, [block_id], [(block_id,)])
    pool.free(block_ids)
    pool.share([block_ids[0]])
    pool.free([block_ids[0]])
    assert pool.allocate(3) == [block_ids[1], block_ids[2], block_ids[0]]


def test_evicted_content_is_not_found():
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    publish_chain(pool, [block], [(1,)])
    pool.free([block])
    pool.allocate(1)
    assert pool.find(("", (1,))) is None


def test_equal_tokens_after_different_prefixes_are_different_content():
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    publish_chain(pool, [a, c], [(1, 1), (9, 9)])
    publish_chain(pool, [b], [(2, 2)])
    assert find_block(pool, (2, 2), (9, 9)) is None
    assert find_block(pool, (1, 1), (9, 9)) == c


def test_other_salt_finds_nothing():
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    publish_chain(pool, [block], [(1,)], salt="tenant a")
    assert find_block(pool, (1,), salt="tenant b") is None
    assert find_block(pool, (1,), salt="tenant a") == block


def test_hash_collision_does_not_lead_to_other_content():
    pool = BlockPool(2)
    mine = tuple(map(CollidingToken, (1, 2, 3)))
    other = tuple(map(CollidingToken, (4, 5, 6)))
    assert hash(("", mine)) == hash(("", other))
    [block, other_block] = pool.allocate(2)
    publish_chain(pool, [block], [mine])
    assert find_block(pool, other) is None
    publish_chain(pool, [other_block], [other])
    assert find_block(pool, mine) == block
    assert find_block(pool, other) == other_block


def test_second_block_of_equal_content_is_not_indexed_but_continues_the_chain():
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    publish_chain(pool, [first], [(1,)])
    publish_chain(pool, [second, third], [(1,), (2,)])
    assert find_block(pool, (1,)) == first
    assert find_block(pool, (1,), (2,)) == third
    pool.free([second])
    assert pool.num_cached_blocks == 0
    pool.check([first, third])


def test_block_in_use_takes_over_from_a_cached_one_of_equal_content():
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    content = publish_chain(pool, [first], [(1,)])
    pool.free([first])
    assert publish_chain(pool, [second], [(1,)]) is content
    assert find_block(pool, (1,)) == second
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (0, 2)
    pool.check([second])


def test_content_is_known_as_long_as_anything_follows_it_or_holds_it():
    pool = BlockPool(3)
    head, tail = pool.allocate(2)
    last = publish_chain(pool, [head, tail], [(1,), (2,)])
    pool.free([head, tail])
    pool.allocate(2)  # one that was free, and the head
    assert find_block(pool, (1,)) == 0 and find_block(pool, (1,), (2,)) == tail
    pool.hold(last)
    pool.allocate(1)
    assert find_block(pool, (1,), (2,)) == 0
    pool.check([1, 2, 3], [last])
    pool.release(last)
    assert find_block(pool, (1,)) is None
    pool.check([1, 2, 3])


def test_content_forgotten_and_published_anew_is_not_the_old_one():
    pool = BlockPool(2)
    head, tail = pool.allocate(2)
    old = publish_chain(pool, [head, tail], [(1,), (2,)])
    pool.free([tail, head])
    again, _ = pool.allocate(2)
    new = publish_chain(pool, [again], [(1,)])
    assert new.number != old.number
    assert find_block(pool, (1,), (2,)) is None


def test_each_group_has_a_block_of_its_own_for_a_content():
    pool = BlockPool(4)
    content = pool.publish(None, ("", (1,)), pool.allocate(2))
    first, second = content.block_ids
    pool.free([first])
    pool.allocate(3)  # evicts it
    assert content.block_ids == [0, second] and find_block(pool, (1,), group=1) == second
    pool.free([second])
    again = pool.allocate(1)
    assert again == [second] and pool.find(("", (1,))) is None


def test_shared_block_counts_once_and_stays_until_its_last_owner_frees_it():
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.share([block])
    assert (pool.num_blocks_in_use, pool.num_shared_blocks) == (1, 1)
    pool.free([block])
    assert (pool.num_blocks_in_use, pool.num_shared_blocks) == (1, 0)
    pool.free([block])
    assert pool.num_blocks_in_use == 0
    with pytest.raises(AssertionError, match="freed once too often"):
        pool.free([block])


def test_reset_forgets_cached_blocks_and_blocks_in_use():
    pool = BlockPool(3)
    cached, used = pool.allocate(2)
    publish_chain(pool, [cached, used], [(1,), (2,)])
    pool.free([cached])
    pool.reset_prefix_cache()
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (0, 2)
    assert pool.find(("", (1,))) is None
    pool.check([used])
    pool.free([used])
    pool.check([])
    assert pool.num_cached_blocks == 0


@pytest.mark.parametrize(
    "break_pool",
    [
        lambda pool: pool._ref_counts.__setitem__(1, 5),
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.pop(),
        lambda pool: pool._index.clear(),
        lambda pool: pool._contents.__setitem__(pool._free[0], pool.find(("", (1,)))),
        lambda pool: pool.find(("", (1,))).block_ids.__setitem__(0, 0),
        lambda pool: pool.hold(pool.find(("", (1,)))),
        lambda pool: setattr(pool, "num_shared_blocks", 1),
    ],
)
def test_check_notices_a_broken_pool(break_pool):
    pool = BlockPool(4)
    [block] = pool.allocate(1)
    publish_chain(pool, [block], [(1,)])
    pool.check([block])
    break_pool(pool)
    with pytest.raises(AssertionError):
        pool.check([block])


class PoolMachine(RuleBasedStateMachine):
    """Owners of chains of one-token blocks over two tokens; content is tracked independently."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(6)
        self.tables: list[list[int]] = []
        self.written: dict[int, tuple[int, ...]] = {}

    @rule(
        chain=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple),
        num_found=st.integers(0, 4),
    )
    def admit(self, chain, num_found):
        """Uses what is found of the first blocks and writes the others, found or not."""
        parent = None
        block_ids: list[int] = []
        for token in chain[:num_found]:
            content = self.pool.find(key_after(parent, (token,)))
            if content is None or not content.block_ids[0]:
                break
            [block_id] = content.block_ids
            assert self.written[block_id] == chain[: len(block_ids) + 1]
            block_ids.append(block_id)
            parent = content
        self.pool.share(block_ids)
        num_missing = len(chain) - len(block_ids)
        if num_missing > self.pool.num_free_blocks:
            self.pool.free(reversed(block_ids))
            return
        for block_id in self.pool.allocate(num_missing):
            block_ids.append(block_id)
            self.written[block_id] = chain[: len(block_ids)]
            key = key_after(parent, (chain[len(block_ids) - 1],))
            parent = self.pool.publish(parent, key, [block_id])
        self.tables.append(block_ids)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data):
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.free(reversed(self.tables.pop(index)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data):
        table = data.draw(st.sampled_from(self.tables))
        self.pool.share(table)
        self.tables.append(list(table))

    @rule()
    def reset(self):
        self.pool.reset_prefix_cache()

    @invariant()
    def pool_is_sound(self):
        self.pool.check(block_id for table in self.tables for block_id in table)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
