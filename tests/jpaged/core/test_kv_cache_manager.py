import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.core.kv_cache_manager import NEVER, KVCacheManager, common_length
from jpaged.request import Request


def make_manager(num_blocks=16, block_size=4, max_num_seqs=4, max_model_len=64, **kwargs):
    kwargs.setdefault("watermark", 0.0)
    return KVCacheManager(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        **kwargs,
    )


def make_request(request_id, token_ids, **kwargs):
    return Request(request_id=request_id, prompt_token_ids=list(token_ids), **kwargs)


def admit(manager, request, num_tokens=None):
    prefix = manager.find_cached_prefix(request)
    if num_tokens is None:
        num_tokens = request.num_tokens - prefix.num_tokens
    return manager.admit(request, prefix, num_tokens)


def compute(manager, request, num_tokens=None):
    """What a step does: all tokens (or some) are computed, then full blocks published."""
    if num_tokens is None:
        num_tokens = request.num_tokens - request.num_computed_tokens
    assert manager.allocate(request, num_tokens)
    request.num_computed_tokens += num_tokens
    manager.commit(request)


def run_through(manager, request):
    assert admit(manager, request)
    compute(manager, request)
    manager.free(request)


def blocks_of(manager, request):
    return [int(b) for b in manager.block_tables[0, request.row] if b]


def test_table_row_lists_the_blocks_and_is_padded_with_block_0():
    manager = make_manager()
    request = make_request("a", range(9))
    assert admit(manager, request)
    table = manager.block_tables[0, request.row]
    assert manager.block_tables.dtype == np.int32 and table.shape == (16,)
    assert np.count_nonzero(table[:3]) == 3 and not table[3:].any()
    assert manager.num_slots[request.row] == 12
    manager.check([request])


def test_blocks_are_taken_only_when_a_token_needs_one():
    manager = make_manager(enable_prefix_caching=False)
    request = make_request("a", range(4))
    assert admit(manager, request)
    counts = []
    for token_id in range(9):
        compute(manager, request)
        request.token_ids.append(token_id)
        counts.append(manager.pool.num_blocks_in_use)
    assert counts == [1, 2, 2, 2, 2, 3, 3, 3, 3]


def test_allocation_that_does_not_fit_changes_nothing():
    manager = make_manager(num_blocks=3)
    request = make_request("a", range(9))
    assert admit(manager, request, 4)
    before = blocks_of(manager, request)
    request.num_computed_tokens = 4
    assert not manager.allocate(request, 9)
    assert blocks_of(manager, request) == before and manager.num_free_blocks == 2
    assert manager.allocate(request, 5)


def test_admission_that_does_not_fit_changes_nothing():
    manager = make_manager(num_blocks=3)
    first, second = make_request("a", range(8)), make_request("b", range(50, 58))
    assert admit(manager, first)
    assert not admit(manager, second)
    assert second.row == -1 and manager.num_free_rows == 3 and manager.num_free_blocks == 1
    manager.check([first])


def test_admission_needs_room_for_all_tokens_though_it_takes_blocks_for_the_first_chunk():
    manager = make_manager(num_blocks=4)
    request = make_request("a", range(16))
    assert admit(manager, request, 4)
    assert manager.pool.num_blocks_in_use == 1
    assert not admit(manager, make_request("b", range(50, 66)), 4)


def test_admission_needs_a_free_row_and_rows_are_used_again():
    manager = make_manager(max_num_seqs=1)
    first, second = make_request("a", range(4)), make_request("b", range(50, 54))
    assert admit(manager, first)
    row = first.row
    assert not admit(manager, second)
    manager.free(first)
    assert first.row == -1
    assert admit(manager, second) and second.row == row


def test_watermark_stays_free_beside_others_but_not_for_a_lone_request():
    manager = make_manager(num_blocks=8, watermark=0.25)
    first, second = make_request("a", range(24)), make_request("b", range(50, 54))
    assert admit(manager, first)
    assert not admit(manager, second)
    manager.free(first)
    assert admit(manager, make_request("c", range(32)))


def test_blocks_reserved_for_prompts_under_way_are_not_given_to_a_new_request():
    manager = make_manager(num_blocks=8)
    first, second = make_request("a", range(24)), make_request("b", range(50, 62))
    assert admit(manager, first, 4)
    prefix = manager.find_cached_prefix(second)
    assert not manager.admit(second, prefix, 12, num_reserved_blocks=5)
    assert manager.admit(second, prefix, 12, num_reserved_blocks=4)


@pytest.mark.parametrize(
    ("num_tokens", "num_cached"),
    [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)],
)
def test_full_hit_leaves_the_last_block_to_compute(num_tokens, num_cached):
    manager = make_manager()
    run_through(manager, make_request("a", range(num_tokens)))
    again = make_request("b", range(num_tokens))
    assert manager.find_cached_prefix(again).num_tokens == num_cached
    assert admit(manager, again)
    assert again.num_computed_tokens == again.num_cached_tokens == num_cached
    manager.check([again])


def test_full_hit_does_not_break_the_chain_for_a_longer_prompt():
    manager = make_manager()
    for request_id in "abc":
        run_through(manager, make_request(request_id, range(8)))
    longer = make_request("d", range(12))
    assert manager.find_cached_prefix(longer).num_tokens == 8


def test_answer_to_a_fully_cached_prompt_is_found_after_the_first_answer_is_evicted():
    manager = make_manager(num_blocks=5)
    run_through(manager, make_request("a", range(8)))
    again = make_request("b", range(8))
    assert admit(manager, again)
    compute(manager, again)
    again.token_ids += range(50, 55)
    compute(manager, again)
    other = make_request("c", range(60, 64))
    assert admit(manager, other)
    assert manager.num_free_blocks == 0
    assert manager.find_cached_prefix(make_request("d", again.token_ids)).num_tokens == 12
    manager.check([again, other])


def test_find_has_no_effect():
    manager = make_manager()
    run_through(manager, make_request("a", range(9)))
    again = make_request("b", range(9))
    assert manager.find_cached_prefix(again) == manager.find_cached_prefix(again)
    assert again.row == -1 and again.num_computed_tokens == 0
    assert manager.pool.num_blocks_in_use == 0 and manager.prefix_cache_queries == 9


def test_block_is_found_only_after_the_step_that_wrote_it():
    manager = make_manager()
    first, second = make_request("a", range(9)), make_request("b", range(9))
    assert admit(manager, first)
    assert manager.find_cached_prefix(second).num_tokens == 0
    compute(manager, first, 5)
    assert manager.find_cached_prefix(second).num_tokens == 4
    compute(manager, first)
    assert manager.find_cached_prefix(second).num_tokens == 8


def test_who_is_about_to_compute_the_missing_block_is_named():
    manager = make_manager()
    first = make_request("a", range(12))
    second = make_request("b", [*range(8), 77, 77, 77, 77, 77])
    assert admit(manager, first)
    assert manager.find_cached_prefix(second).owner is first
    compute(manager, first, 4)
    assert manager.find_cached_prefix(second).owner is first
    compute(manager, first, 4)
    assert manager.find_cached_prefix(second).owner is None
    manager.free(first)
    assert admit(manager, first)
    manager.free(first)
    assert manager.find_cached_prefix(make_request("c", range(12))).owner is None


def test_generated_tokens_are_found_after_a_preemption():
    manager = make_manager()
    request = make_request("a", range(4))
    assert admit(manager, request)
    for token_id in range(50, 59):
        compute(manager, request)
        request.token_ids.append(token_id)
    manager.free(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert admit(manager, request)
    assert request.num_computed_tokens == 12
    assert request.num_cached_tokens == 0
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (4, 0)


def test_shared_prefix_is_stored_once():
    manager = make_manager()
    run_through(manager, make_request("a", range(9)))
    requests = [make_request(str(i), range(9)) for i in range(4)]
    assert all(admit(manager, request) for request in requests)
    assert manager.pool.num_blocks_in_use == 2 + 4
    assert manager.pool.num_shared_blocks == 2
    assert manager.num_allocated_slots == 4 * 12
    assert manager.num_used_slots == 4 * 8
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (5 * 9, 4 * 8)
    manager.check(requests)


def test_revived_blocks_count_as_taken_at_admission():
    manager = make_manager(num_blocks=3)
    run_through(manager, make_request("a", range(9)))
    other = make_request("b", range(50, 54))
    assert admit(manager, other)
    assert not admit(manager, make_request("c", range(9)))
    manager.check([other])


def test_salts_do_not_share():
    manager = make_manager()
    run_through(manager, make_request("a", range(9), cache_salt="tenant a"))
    other = make_request("b", range(9), cache_salt="tenant b")
    assert manager.find_cached_prefix(other).num_tokens == 0
    same = make_request("c", range(9), cache_salt="tenant a")
    assert manager.find_cached_prefix(same).num_tokens == 8


def test_without_prefix_caching_nothing_is_found():
    manager = make_manager(enable_prefix_caching=False)
    run_through(manager, make_request("a", range(9)))
    assert manager.find_cached_prefix(make_request("b", range(9))).num_tokens == 0
    assert manager.pool.num_cached_blocks == 0


def test_freed_tail_is_evicted_before_the_head():
    manager = make_manager(num_blocks=3)
    run_through(manager, make_request("a", range(12)))
    assert admit(manager, make_request("b", [99]))
    assert manager.find_cached_prefix(make_request("c", range(13))).num_tokens == 8


def test_trim_gives_back_blocks_that_were_not_written():
    manager = make_manager()
    request = make_request("a", range(16))
    assert admit(manager, request)
    manager.trim(request, 5)
    assert manager.num_slots[request.row] == 8 and manager.pool.num_blocks_in_use == 2
    manager.trim(request, 5)
    manager.check([request])
    assert manager.pool.num_blocks_in_use == 2


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_shared", "num_copies"), [(8, 2, 0), (9, 2, 1), (3, 0, 1)]
)
def test_fork_shares_full_blocks_and_copies_a_part_filled_one(
    num_prompt_tokens, num_shared, num_copies
):
    manager = make_manager()
    parent = make_request("a", range(num_prompt_tokens))
    assert admit(manager, parent)
    compute(manager, parent)
    child = make_request("b", range(num_prompt_tokens))
    child.token_ids.append(77)
    assert manager.fork(parent, child)
    assert child.num_computed_tokens == num_prompt_tokens
    mine, its = blocks_of(manager, parent), blocks_of(manager, child)
    assert mine[:num_shared] == its[:num_shared]
    assert manager.pool.num_shared_blocks == num_shared + num_copies
    copies = manager.take_copies()
    assert copies == [(mine[-1], its[-1])] * num_copies
    assert manager.pool.num_shared_blocks == num_shared
    assert manager.num_copies == num_copies
    assert manager.take_copies() == []
    manager.check([parent, child])


def test_fork_shares_only_the_tokens_in_common_and_leaves_one_to_compute():
    manager = make_manager()
    parent = make_request("a", range(12))
    assert admit(manager, parent)
    compute(manager, parent)
    child = make_request("b", [*range(6), 77, 77, 77])
    same = make_request("c", range(8))
    assert manager.fork(parent, child) and manager.fork(parent, same)
    assert child.num_computed_tokens == 6
    assert same.num_computed_tokens == 7
    manager.check([parent, child, same])


def test_fork_shares_nothing_that_the_parent_has_not_computed():
    manager = make_manager()
    parent = make_request("a", range(12))
    assert admit(manager, parent)
    compute(manager, parent, 6)
    child = make_request("b", range(12))
    assert manager.fork(parent, child)
    assert child.num_computed_tokens == 6
    manager.check([parent, child])


def test_fork_without_a_free_block_or_row_changes_nothing():
    manager = make_manager(num_blocks=2, max_num_seqs=2)
    parent = make_request("a", range(5))
    assert admit(manager, parent)
    compute(manager, parent)
    child = make_request("b", [*range(5), 77])
    assert not manager.fork(parent, child)
    assert child.row == -1 and manager.take_copies() == []
    manager.check([parent])
    even = make_request("c", [*range(4), 77])
    assert manager.fork(parent, even)
    assert not manager.fork(parent, make_request("d", [*range(4), 78]))
    manager.check([parent, even])


def test_fork_with_another_salt_is_refused():
    manager = make_manager()
    parent = make_request("a", range(5), cache_salt="x")
    assert admit(manager, parent)
    with pytest.raises(ValueError, match="cache_salt is 'y'"):
        manager.fork(parent, make_request("b", range(5), cache_salt="y"))


def test_source_of_a_copy_is_kept_until_the_copy_is_handed_out():
    manager = make_manager(num_blocks=2, block_size=4, max_model_len=8)
    parent = make_request("a", range(3))
    assert admit(manager, parent)
    compute(manager, parent)
    child = make_request("b", [*range(3), 77])
    assert manager.fork(parent, child)
    [source] = blocks_of(manager, parent)
    manager.free(parent)
    assert manager.num_free_blocks == 0
    manager.check([child])
    assert manager.take_copies() == [(source, *blocks_of(manager, child))]
    assert manager.num_free_blocks == 1
    manager.check([child])


def test_copy_for_a_child_that_ended_is_not_made():
    manager = make_manager()
    parent = make_request("a", range(3))
    assert admit(manager, parent)
    compute(manager, parent)
    child = make_request("b", [*range(3), 77])
    assert manager.fork(parent, child)
    manager.free(child)
    assert manager.take_copies() == []
    manager.check([parent])


def test_fork_of_a_fork_copies_from_where_the_content_is_now():
    manager = make_manager()
    parent = make_request("a", range(3))
    assert admit(manager, parent)
    compute(manager, parent)
    child, grandchild = (make_request(name, [*range(3), 77]) for name in "bc")
    assert manager.fork(parent, child) and manager.fork(child, grandchild)
    [source] = blocks_of(manager, parent)
    manager.free(child)
    assert manager.take_copies() == [(source, *blocks_of(manager, grandchild))]
    manager.check([parent, grandchild])


def test_request_running_across_a_reset_never_publishes():
    manager = make_manager()
    request = make_request("a", range(9))
    assert admit(manager, request)
    compute(manager, request, 5)
    manager.reset_prefix_cache()
    compute(manager, request)
    child = make_request("b", [*range(9), 77, 77, 77])
    assert manager.fork(request, child)
    manager.take_copies()
    compute(manager, child)
    assert manager.commit_at[request.row] == manager.commit_at[child.row] == NEVER
    assert manager.find_cached_prefix(make_request("c", range(13))).num_tokens == 0
    manager.check([request, child])
    manager.free(request)
    manager.free(child)
    assert manager.pool.num_cached_blocks == 0
    request.num_computed_tokens = 0
    run_through(manager, request)
    assert manager.find_cached_prefix(make_request("c", range(9))).num_tokens == 8


@pytest.mark.parametrize(
    "break_manager",
    [
        lambda manager: manager.block_tables.__setitem__((0, 0, 0), 7),
        lambda manager: manager.block_tables.__setitem__((0, 3, 0), 1),
        lambda manager: manager.num_slots.__setitem__(0, 16),
        lambda manager: manager.commit_at.__setitem__(0, 4),
        lambda manager: manager._free_rows.append(0),
    ],
)
def test_check_notices_a_broken_table(break_manager):
    manager = make_manager()
    request = make_request("a", range(9))
    assert admit(manager, request)
    compute(manager, request)
    manager.check([request])
    assert request.row == 0
    break_manager(manager)
    with pytest.raises(AssertionError):
        manager.check([request])


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)), st.integers(0, 9))
def test_common_length_equals_counting(left, right, limit):
    limit = min(limit, len(left), len(right))
    counted = 0
    while counted < limit and left[counted] == right[counted]:
        counted += 1
    assert common_length(left, right, limit) == counted
