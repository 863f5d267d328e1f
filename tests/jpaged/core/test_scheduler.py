import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jpaged.core.kv_cache_manager import NEVER, KVCacheManager, longest_request
from jpaged.core.scheduler import MAX_DEFERRALS_PER_STEP, Scheduler, cut_to_bucket
from jpaged.request import FinishReason, Request, Status, TokenLogprobs
from jpaged.sampling_params import SamplingParams

LOGPROB = TokenLogprobs(-0.5, 1)


def next_token(token_ids, seed, num_ids=3):
    """A model: the token after these depends on all of them."""
    return random.Random(f"{seed} {list(token_ids)}").randrange(num_ids)


def answer_alone(request, max_model_len):
    """What the request must answer, by the model without a cache."""
    token_ids = list(request.prompt_token_ids)
    while True:
        token_ids.append(next_token(token_ids, request.seed))
        if (
            token_ids[-1] in request.stop_token_ids
            or len(token_ids) - request.num_prompt_tokens >= request.max_tokens
            or len(token_ids) >= max_model_len
        ):
            return token_ids[request.num_prompt_tokens :]


class FakeRunner:
    """A cache that remembers what was written into each slot, and refuses to read anything else.

    A slot's content is (KV group, salt, all tokens up to it, age of the oldest weights that went
    into it).
    """

    def __init__(self, scheduler, manager):
        self.scheduler, self.manager = scheduler, manager
        self.cache = {}
        self.age = 0
        self.admitted_at_age = {}
        self.forked = set()
        self.groups = {}

    def execute(self, output):
        """Makes the copies, then writes and reads; returns the sampled tokens."""
        block_size = self.manager.block_size
        sources = {source for source, _ in output.copies}
        destinations = [destination for _, destination in output.copies]
        assert len(set(destinations)) == len(destinations) and not sources & set(destinations)
        for source, destination in output.copies:
            for offset in range(block_size):
                content = self.cache.get(source * block_size + offset)
                self.cache[destination * block_size + offset] = content
        running = set(self.scheduler._running)
        ages = self.admitted_at_age
        self.admitted_at_age = {
            request_id: ages[request_id] if request_id in ages else self.age_of_group(request_id)
            for request_id in running
        }
        written = set()
        token_ids = []
        for request, start, num_tokens, samples in output.scheduled:
            assert request.status is Status.RUNNING and start == request.num_computed_tokens
            oldest = self.age
            tables = self.manager.block_tables[:, request.row].tolist()
            for group, window in enumerate(self.manager.windows):
                for position in range(max(0, start + 1 - (window or NEVER)), start):
                    slot = slot_of(tables[group], position, block_size)
                    found_group, salt, found, age = self.cache[slot]
                    assert found_group == group, "K and V of other layers"
                    prefix = tuple(request.token_ids[: position + 1])
                    assert (salt, found) == (request.cache_salt, prefix), (
                        "K and V of another prefix"
                    )
                    admitted_at_age = self.admitted_at_age[request.request_id]
                    assert age >= admitted_at_age, "K and V of old weights"
                    oldest = min(oldest, age)
            for group, table in enumerate(tables):
                for position in range(start, start + num_tokens):
                    slot = slot_of(table, position, block_size)
                    assert slot not in written, "two tokens in one slot"
                    written.add(slot)
                    prefix = tuple(request.token_ids[: position + 1])
                    self.cache[slot] = (group, request.cache_salt, prefix, oldest)
            assert samples == (start + num_tokens == request.num_tokens)
            token_ids.append(next_token(request.token_ids, request.seed))
        return token_ids

    def age_of_group(self, request_id):
        """Of several answers to a prompt, one takes over what another has computed of it."""
        group = self.groups.get(request_id, ())
        return min([self.age, *(age for i, age in self.admitted_at_age.items() if i in group)])

    def step(self):
        output = self.scheduler.schedule()
        token_ids = self.execute(output)
        return self.scheduler.update(output, token_ids, logprobs_of(output))


def slot_of(table, position, block_size):
    block_id = table[position // block_size]
    assert block_id > 0, "a token without a block"
    return block_id * block_size + position % block_size


def logprobs_of(output):
    """As the runner gives them: only for requests that ask."""
    asked = [entry.request.num_logprobs is not None for entry in output.scheduled]
    return [LOGPROB if is_asked else None for is_asked in asked]


def make(
    num_blocks=64,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=64,
    enable_prefix_caching=True,
    watermark=0.0,
    windows=(None,),
    **kwargs,
):
    manager = KVCacheManager(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        enable_prefix_caching=enable_prefix_caching,
        watermark=watermark,
        windows=windows,
        max_step_tokens=max_num_batched_tokens,
    )
    scheduler = Scheduler(
        manager,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        **kwargs,
    )
    return scheduler, manager, FakeRunner(scheduler, manager)


def make_request(request_id, prompt, **kwargs):
    """A prompt may be a number of tokens: then it is like no other request's."""
    if isinstance(prompt, int):
        prompt = [f"{request_id}/{index}".__hash__() % 10**9 + 10 for index in range(prompt)]
    kwargs.setdefault("arrival_time", 0.0)
    return Request(request_id=request_id, prompt_token_ids=list(prompt), **kwargs)


def run_all(scheduler, runner, max_steps=2000):
    outputs = []
    for _ in range(max_steps):
        if not scheduler.has_unfinished:
            return outputs
        outputs += runner.step()
        scheduler.check()
    raise AssertionError(f"not finished after {max_steps} steps")


def planned(output):
    return [(entry.request.request_id, entry.num_tokens) for entry in output.scheduled]


def advance(scheduler, runner):
    """One step; returns its plan."""
    output = scheduler.schedule()
    token_ids = runner.execute(output)
    scheduler.update(output, token_ids, logprobs_of(output))
    scheduler.check()
    return planned(output)


# Construction and refusals.


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"policy": "lifo"}, "policy is 'lifo'"),
        ({"token_buckets": (64, 16)}, "token_buckets is"),
        ({"num_blocks": 15, "max_model_len": 64}, "max_model_len is 64; .*more memory"),
    ],
)
def test_settings_that_cannot_work_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(**kwargs)


def test_more_running_requests_than_rows_are_refused():
    manager = KVCacheManager(num_blocks=8, block_size=4, max_num_seqs=2, max_model_len=8)
    with pytest.raises(ValueError, match="max_num_seqs is 3; .*2 rows"):
        Scheduler(manager, max_num_seqs=3, max_num_batched_tokens=8, max_model_len=8)


def test_request_that_can_never_run_is_refused_at_once():
    scheduler, _, _ = make(max_model_len=16)
    with pytest.raises(ValueError, match="prompt_token_ids is empty"):
        scheduler.add(make_request("a", []))
    with pytest.raises(ValueError, match="has 16 tokens; .*at most 15 .*shorten the prompt"):
        scheduler.add(make_request("a", 16))
    answered = make_request("a", 4, max_tokens=2)
    answered.token_ids += [0, 1]
    with pytest.raises(ValueError, match="max_tokens is 2"):
        scheduler.add(answered)
    assert not scheduler.has_unfinished and scheduler.num_waiting == 0
    scheduler.add(make_request("a", 15))
    with pytest.raises(ValueError, match="request_id is 'a'"):
        scheduler.add(make_request("a", 4))
    assert scheduler.num_waiting == 1


# Budget, chunks, buckets.


def test_nothing_to_do_gives_an_empty_step():
    scheduler, _, _ = make()
    assert scheduler.schedule() == ([], 0, [], [])


def test_prompts_and_decodes_share_one_step_under_the_budget():
    scheduler, _, runner = make(max_num_batched_tokens=10)
    scheduler.add(make_request("a", 4, max_tokens=9))
    scheduler.add(make_request("b", 20, max_tokens=9))
    assert advance(scheduler, runner) == [("a", 4), ("b", 6)]
    assert advance(scheduler, runner) == [("a", 1), ("b", 9)]
    assert advance(scheduler, runner) == [("a", 1), ("b", 5)]
    assert advance(scheduler, runner) == [("a", 1), ("b", 1)]


def test_only_the_last_chunk_samples():
    scheduler, _, runner = make(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 20, max_tokens=1))
    assert [len(runner.step()) for _ in range(3)] == [0, 0, 1]
    assert not scheduler.has_unfinished


def test_more_decodes_than_budget_take_turns_to_the_end():
    scheduler, _, runner = make(max_num_batched_tokens=2)
    for name in "abcd":
        scheduler.add(make_request(name, 3, max_tokens=5))
    assert len(run_all(scheduler, runner)) == 4 * 5


def test_long_prefill_threshold_caps_every_chunk():
    scheduler, _, runner = make(long_prefill_token_threshold=5)
    scheduler.add(make_request("a", 12))
    scheduler.add(make_request("b", 6))
    assert advance(scheduler, runner) == [("a", 5), ("b", 5)]
    # "b" lacks one token and comes with those that do.
    assert advance(scheduler, runner) == [("b", 1), ("a", 5)]


@pytest.mark.parametrize(
    ("num_tokens", "num_decode_tokens", "result"),
    [
        (10, 2, 10),
        (64, 2, 64),
        (65, 2, 64),
        (191, 2, 64),
        (192, 2, 192),
        (256, 2, 256),
        (100, 63, 64),
        (100, 64, 100),
        (300, 2, 300),
    ],
)
def test_mixed_step_is_cut_to_a_bucket_where_padding_would_be_wasteful(
    num_tokens, num_decode_tokens, result
):
    assert cut_to_bucket(num_tokens, num_decode_tokens, (64, 256)) == result


def test_without_buckets_nothing_is_cut():
    assert cut_to_bucket(65, 0, ()) == 65


def test_chunks_are_cut_from_the_last_one_so_that_the_bucket_is_full():
    scheduler, manager, runner = make(token_buckets=(16, 64), max_num_batched_tokens=64)
    for name in "abc":
        scheduler.add(make_request(name, 9))
    output = scheduler.schedule()
    assert planned(output) == [("a", 9), ("b", 7)] and output.num_tokens == 16
    assert not output.scheduled[1].samples
    # "c" is admitted, but holds no block that it does not need yet.
    assert scheduler.num_running == 3 and manager.pool.num_blocks_in_use == 3 + 2
    scheduler.update(output, runner.execute(output), logprobs_of(output))
    assert advance(scheduler, runner) == [("a", 1), ("b", 2), ("c", 9)]


def test_decodes_are_never_cut():
    scheduler, _, runner = make(token_buckets=(4, 64), max_num_seqs=8)
    for name in "abcde":
        scheduler.add(make_request(name, 1, max_tokens=9))
    advance(scheduler, runner)
    scheduler.add(make_request("f", 9))
    assert advance(scheduler, runner) == [(name, 1) for name in "abcde"] + [("f", 9)]


# Admission and order.


def test_requests_are_admitted_in_order_of_arrival_even_if_a_later_one_would_fit():
    scheduler, _, runner = make(num_blocks=16)
    scheduler.add(make_request("a", 40, max_tokens=4))
    scheduler.add(make_request("b", 40, max_tokens=4))
    scheduler.add(make_request("c", 4, max_tokens=4))
    assert advance(scheduler, runner) == [("a", 40)]
    assert advance(scheduler, runner) == [("a", 1)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    outputs = run_all(scheduler, runner)
    assert [request.request_id for request, _, _ in outputs if request.max_tokens == 4][-1] == "c"


def test_lower_priority_number_is_admitted_first_then_the_earlier_arrival():
    scheduler, _, runner = make(max_num_seqs=1, policy="priority")
    scheduler.add(make_request("late", 3, priority=1, arrival_time=2.0, max_tokens=1))
    scheduler.add(make_request("early", 3, priority=1, arrival_time=1.0, max_tokens=1))
    scheduler.add(make_request("best", 3, priority=0, arrival_time=3.0, max_tokens=1))
    outputs = run_all(scheduler, runner)
    assert [request.request_id for request, _, _ in outputs] == ["best", "early", "late"]


def test_no_more_requests_run_than_max_num_seqs():
    scheduler, _, runner = make(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 3, max_tokens=3))
    runner.step()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_head_that_did_not_fit_is_looked_up_again_only_when_blocks_come_free(monkeypatch):
    scheduler, manager, runner = make(num_blocks=16)
    scheduler.add(make_request("a", 40, max_tokens=5))
    scheduler.add(make_request("b", 40, max_tokens=1))
    looked_up = []
    find = manager.find_cached_prefix
    monkeypatch.setattr(
        manager,
        "find_cached_prefix",
        lambda request: looked_up.append(request.request_id) or find(request),
    )
    run_all(scheduler, runner)
    assert looked_up == ["a", "b", "b"]


# Preemption.


def test_latest_request_is_preempted_and_returns_first(caplog):
    scheduler, manager, runner = make(num_blocks=8, max_model_len=32)
    for name in "abc":
        scheduler.add(make_request(name, 7, max_tokens=20))
    runner.step()
    scheduler.add(make_request("d", 4, max_tokens=1))
    with caplog.at_level(logging.INFO):
        while not scheduler.num_preemptions:
            output = scheduler.schedule()
            scheduler.update(output, runner.execute(output), logprobs_of(output))
    [victim] = output.preempted
    assert victim.request_id == "c" and victim.status is Status.PREEMPTED
    assert victim.row == -1 and victim.num_computed_tokens == 0 and victim.num_preemptions == 1
    assert "c" not in dict(planned(output)) and "d" not in dict(planned(output))
    assert "Preempted request c" in caplog.text
    scheduler.finish("a", FinishReason.ABORT)
    assert [name for name, _ in advance(scheduler, runner)][:2] == ["b", "c"]
    run_all(scheduler, runner)
    assert manager.pool.num_blocks_in_use == 0


def test_request_that_came_last_preempts_itself():
    scheduler, _, runner = make(num_blocks=4, max_model_len=16, enable_prefix_caching=False)
    scheduler.add(make_request("a", 5, max_tokens=10))
    scheduler.add(make_request("b", 8, max_tokens=8))
    runner.step()
    output = scheduler.schedule()
    assert [request.request_id for request in output.preempted] == ["b"]
    assert planned(output) == [("a", 1)]
    scheduler.check()


def test_victim_that_was_already_scheduled_leaves_the_step_and_gives_its_budget_back():
    scheduler, manager, runner = make(
        num_blocks=6, max_model_len=24, max_num_batched_tokens=8, policy="priority"
    )
    scheduler.add(make_request("worse", 4, priority=1, max_tokens=20))
    runner.step()
    scheduler.add(make_request("better", 12, priority=0, max_tokens=5))
    assert advance(scheduler, runner) == [("worse", 1), ("better", 7)]
    manager.pool.allocate(manager.num_free_blocks)
    output = scheduler.schedule()
    assert [request.request_id for request in output.preempted] == ["worse"]
    assert planned(output) == [("better", 5)] and output.num_tokens == 5


def test_lowest_priority_is_preempted_first():
    scheduler, _, runner = make(num_blocks=6, max_model_len=24, policy="priority")
    scheduler.add(make_request("worse", 7, priority=2, max_tokens=12))
    scheduler.add(make_request("better", 7, priority=1, max_tokens=12))
    scheduler.add(make_request("best", 7, priority=0, max_tokens=12))
    while not scheduler.num_preemptions:
        output = scheduler.schedule()
        scheduler.update(output, runner.execute(output), logprobs_of(output))
    assert [request.request_id for request in output.preempted] == ["worse"]
    run_all(scheduler, runner)


# Results.


def test_stop_ids_end_the_answer_and_only_those_asked_for_are_reported():
    params = SamplingParams(stop_token_ids=[7])
    for token_id, stop_reason in ((7, 7), (2, None)):
        scheduler, _, _ = make()
        request = make_request("a", 3, params=params, stop_token_ids=frozenset({2, 7}))
        scheduler.add(request)
        output = scheduler.schedule()
        [result] = scheduler.update(output, [token_id], logprobs_of(output))
        assert result[0] is request and result[1] == [token_id]
        assert request.finish_reason is FinishReason.STOP and request.stop_reason == stop_reason
        assert request.output_token_ids == [token_id]


def test_answer_ends_at_max_tokens_and_at_max_model_len():
    scheduler, manager, runner = make(max_model_len=16, num_blocks=8)
    short = make_request("a", 4, max_tokens=3)
    long = make_request("b", 4, max_tokens=99)
    scheduler.add(short)
    scheduler.add(long)
    run_all(scheduler, runner)
    assert short.finish_reason is long.finish_reason is FinishReason.LENGTH
    assert (short.num_output_tokens, long.num_tokens) == (3, 16)
    assert manager.pool.num_blocks_in_use == 0


def test_logprobs_are_kept_only_where_asked_for():
    scheduler, _, runner = make()
    asked = make_request("a", 4, max_tokens=2, params=SamplingParams(logprobs=0))
    other = make_request("b", 4, max_tokens=2)
    scheduler.add(asked)
    scheduler.add(other)
    outputs = run_all(scheduler, runner)
    assert asked.logprobs == [LOGPROB, LOGPROB] and other.logprobs == []
    assert [list(logprobs) for _, _, logprobs in outputs] == [[LOGPROB], [], [LOGPROB], []]


def test_no_token_ends_the_request_with_a_reason_and_adds_nothing():
    scheduler, manager, _ = make()
    request = make_request("a", 4)
    scheduler.add(request)
    [result] = scheduler.update(scheduler.schedule(), [-1], [None])
    assert result == (request, [], ())
    assert request.finish_reason is FinishReason.ERROR and "no token" in request.stop_reason
    assert request.output_token_ids == [] and manager.pool.num_blocks_in_use == 0


def with_forks(request_id, num_prompt_tokens, num_samples, **options):
    prompt = [index % 3 for index in range(num_prompt_tokens)]
    first, *others = (
        make_request(f"{request_id}{index}", prompt, seed=index, **options)
        for index in range(num_samples)
    )
    first.forks = others
    return first


def test_answers_to_one_prompt_compute_it_once_and_share_its_blocks():
    scheduler, manager, runner = make(block_size=4, num_blocks=64, max_num_batched_tokens=8)
    request = with_forks("a", 18, 4, max_tokens=3)
    scheduler.add(request)
    assert scheduler.num_waiting == 4
    plans = [advance(scheduler, runner) for _ in range(3)]
    assert plans == [[("a0", 8)], [("a0", 8)], [("a0", 2)]]
    # Four full blocks once, the part-filled one once each.
    assert scheduler.num_running == 4 and manager.pool.num_blocks_in_use == 4 + 4
    assert advance(scheduler, runner) == [("a0", 1), ("a1", 1), ("a2", 1), ("a3", 1)]
    run_all(scheduler, runner)
    for entry in (request, *request.forks):
        assert entry.output_token_ids == answer_alone(entry, 64)
    assert manager.pool.num_blocks_in_use == 0


@pytest.mark.parametrize("num_prompt_tokens", [16, 18])
def test_answers_that_find_no_row_wait_and_read_the_prompt_from_the_cache(num_prompt_tokens):
    scheduler, _, runner = make(block_size=4, max_num_seqs=2)
    request = with_forks("a", num_prompt_tokens, 4, max_tokens=2)
    scheduler.add(request)
    plans = []
    while scheduler.has_unfinished:
        plans.append(advance(scheduler, runner))
    num_computed = sum(num_tokens for plan in plans for _, num_tokens in plan)
    # The first computes the prompt and one token; one shares all but the prompt's last token; the
    # two others share full blocks, one token being left to compute.
    num_in_part = num_prompt_tokens - (num_prompt_tokens - 1) // 4 * 4
    assert num_computed == num_prompt_tokens + 1 + 2 + 2 * (num_in_part + 1)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_next_answer_takes_the_place_of_one_that_left_before_the_prompt_was_computed(num_steps):
    scheduler, _, runner = make(max_num_batched_tokens=8)
    request = with_forks("a", 18, 4, max_tokens=3)
    scheduler.add(request)
    for _ in range(num_steps):
        advance(scheduler, runner)
    scheduler.finish("a2", FinishReason.ABORT)
    scheduler.finish("a0", FinishReason.ABORT)
    scheduler.check()
    assert scheduler.num_waiting == 2
    run_all(scheduler, runner)
    _, _, aborted, _ = (request, *request.forks)
    for entry in (request.forks[0], request.forks[2]):
        assert entry.output_token_ids == answer_alone(entry, 64)
    assert aborted.output_token_ids == []


def test_answer_that_is_over_at_its_first_token_leaves_the_prompt_to_the_others():
    scheduler, manager, runner = make(block_size=4, enable_prefix_caching=False)
    request = with_forks("a", 18, 3, max_tokens=1)
    scheduler.add(request)
    assert [advance(scheduler, runner) for _ in range(2)] == [[("a0", 18)], [("a1", 1), ("a2", 1)]]
    assert not scheduler.has_unfinished and manager.pool.num_blocks_in_use == 0


def test_ids_of_all_answers_must_be_free_or_none_is_queued():
    scheduler, _, _ = make()
    scheduler.add(make_request("a1", 4))
    with pytest.raises(ValueError, match="request_id is 'a1'"):
        scheduler.add(with_forks("a", 4, 3))
    assert list(scheduler.requests) == ["a1"]


# Ends at any moment.


def test_abort_frees_at_once_wherever_the_request_is():
    scheduler, manager, runner = make(max_num_seqs=2, long_prefill_token_threshold=4)
    prefix = [5] * 9
    scheduler.add(make_request("running", prefix))
    scheduler.add(make_request("deferred", prefix))
    scheduler.add(make_request("other", 4))
    scheduler.add(make_request("waiting", 4))
    runner.step()
    assert scheduler.num_running == 2 and "running" in scheduler._deferred
    for name in ("waiting", "deferred", "running", "other"):
        request = scheduler.finish(name, FinishReason.ABORT)
        assert request is not None and request.finish_reason is FinishReason.ABORT
        assert name not in scheduler.requests
        scheduler.check()
    assert scheduler.finish("waiting", FinishReason.ABORT) is None
    assert scheduler.finish("nobody", FinishReason.ABORT) is None
    assert not scheduler.has_unfinished and manager.pool.num_blocks_in_use == 0
    assert scheduler.schedule().scheduled == []


def test_request_aborted_while_its_step_runs_gets_nothing():
    scheduler, manager, runner = make()
    first, second = make_request("a", 4), make_request("b", 4)
    scheduler.add(first)
    scheduler.add(second)
    output = scheduler.schedule()
    token_ids = runner.execute(output)
    scheduler.finish("a", FinishReason.ABORT)
    [(request, _, _)] = scheduler.update(output, token_ids, logprobs_of(output))
    assert request is second and first.num_output_tokens == 0
    scheduler.check()
    scheduler.finish("b", FinishReason.ABORT)
    assert manager.pool.num_blocks_in_use == 0


def test_id_of_an_aborted_request_can_be_used_again_while_its_step_runs():
    scheduler, _, runner = make()
    scheduler.add(make_request("a", 4))
    output = scheduler.schedule()
    token_ids = runner.execute(output)
    scheduler.finish("a", FinishReason.ABORT)
    again = make_request("a", 5, max_tokens=2)
    scheduler.add(again)
    assert scheduler.update(output, token_ids, logprobs_of(output)) == []
    assert [request for request, _, _ in run_all(scheduler, runner)] == [again, again]


def test_requests_aborted_while_waiting_do_not_pile_up():
    scheduler, _, runner = make(max_num_seqs=1)
    scheduler.add(make_request("a", 4))
    runner.step()
    for index in range(1000):
        scheduler.add(make_request(str(index), [1]))
        scheduler.finish(str(index), FinishReason.ABORT)
    assert scheduler.num_waiting == 0
    assert len(scheduler._waiting) < 100


# Equal prefixes that arrive together.


def test_equal_prefix_is_computed_once_and_others_pass():
    scheduler, manager, runner = make(max_num_batched_tokens=8, num_blocks=32)
    prefix = [5] * 12
    for name, tail in (("a", [1]), ("b", [2]), ("c", [3])):
        scheduler.add(make_request(name, prefix + tail, max_tokens=4))
    scheduler.add(make_request("other", 3, max_tokens=4))
    assert advance(scheduler, runner) == [("a", 8)]
    assert advance(scheduler, runner) == [("a", 5), ("other", 3)]
    assert advance(scheduler, runner) == [("a", 1), ("other", 1), ("b", 1), ("c", 1)]
    assert manager.pool.num_shared_blocks == 3
    assert [r.num_cached_tokens for r in scheduler.requests.values()] == [0, 12, 12, 0]
    run_all(scheduler, runner)


def test_deferred_request_computes_the_prefix_itself_if_its_owner_ends():
    scheduler, _, runner = make(long_prefill_token_threshold=8)
    scheduler.add(make_request("a", [5] * 20, max_tokens=4))
    deferred = make_request("b", [5] * 20, max_tokens=4)
    scheduler.add(deferred)
    assert advance(scheduler, runner) == [("a", 8)]
    assert "a" in scheduler._deferred
    scheduler.finish("a", FinishReason.ABORT)
    scheduler.check()
    assert advance(scheduler, runner) == [("b", 8)]
    assert deferred.num_cached_tokens == 8
    run_all(scheduler, runner)
    assert deferred.output_token_ids == answer_alone(deferred, 64)


def test_deferred_request_goes_on_if_its_owner_is_preempted():
    scheduler, manager, runner = make(policy="priority", long_prefill_token_threshold=4)
    scheduler.add(make_request("old", 3, priority=0, max_tokens=20))
    scheduler.add(make_request("owner", [5] * 20, priority=2, max_tokens=4))
    scheduler.add(make_request("deferred", [5] * 20, priority=2, max_tokens=4))
    advance(scheduler, runner)
    assert "owner" in scheduler._deferred
    thief = manager.pool.allocate(manager.num_free_blocks)
    while not scheduler.num_preemptions:
        output = scheduler.schedule()
        scheduler.update(output, runner.execute(output), logprobs_of(output))
    assert [request.request_id for request in output.preempted] == ["owner"]
    assert not scheduler._deferred
    manager.pool.free(thief)
    run_all(scheduler, runner)


def test_deferred_request_does_not_wait_for_what_a_reset_has_made_stale():
    scheduler, _, runner = make(long_prefill_token_threshold=8)
    scheduler.add(make_request("a", [5] * 20, max_tokens=4))
    scheduler.add(make_request("b", [5] * 20, max_tokens=4))
    advance(scheduler, runner)
    assert "a" in scheduler._deferred
    scheduler.reset_prefix_cache()
    runner.age += 1
    assert advance(scheduler, runner) == [("a", 8), ("b", 8)]
    run_all(scheduler, runner)


def test_deferrals_per_step_are_bounded():
    scheduler, _, runner = make(max_num_seqs=8, max_num_batched_tokens=48)
    for index in range(3 * MAX_DEFERRALS_PER_STEP):
        scheduler.add(make_request(str(index), [5] * 40, max_tokens=1))
    output = scheduler.schedule()
    assert sum(map(len, scheduler._deferred.values())) == MAX_DEFERRALS_PER_STEP
    scheduler.update(output, runner.execute(output), logprobs_of(output))
    run_all(scheduler, runner)


# Forks.


def test_fork_continues_from_the_parents_tokens():
    scheduler, manager, runner = make()
    parent = make_request("a", 6, max_tokens=5)
    scheduler.add(parent)
    runner.step()
    child = make_request("b", parent.prompt_token_ids, max_tokens=5, seed=1)
    child.token_ids = [*parent.prompt_token_ids, 9]
    assert scheduler.fork("a", child)
    scheduler.check()
    output = scheduler.schedule()
    assert planned(output) == [("a", 1), ("b", 1)] and len(output.copies) == 1
    assert manager.pool.num_shared_blocks == 1
    scheduler.update(output, runner.execute(output), logprobs_of(output))
    run_all(scheduler, runner)
    assert child.num_output_tokens == 5


def test_fork_survives_the_abort_of_its_parent_before_the_copy():
    scheduler, manager, runner = make(num_blocks=4, max_model_len=16)
    parent = make_request("a", 3, max_tokens=9)
    scheduler.add(parent)
    runner.step()
    child = make_request("b", parent.prompt_token_ids, max_tokens=9, seed=1)
    assert scheduler.fork("a", child)
    scheduler.finish("a", FinishReason.ABORT)
    scheduler.add(make_request("c", 4, max_tokens=1))
    scheduler.check()
    run_all(scheduler, runner)
    assert child.output_token_ids == answer_alone(child, 16)
    assert manager.pool.num_blocks_in_use == 0


def test_fork_without_room_waits_like_any_other():
    scheduler, _, runner = make(max_num_seqs=1)
    parent = make_request("a", 6, max_tokens=5)
    scheduler.add(parent)
    runner.step()
    child = make_request("b", parent.prompt_token_ids, max_tokens=5, seed=1)
    assert not scheduler.fork("a", child)
    assert scheduler.num_waiting == 1
    run_all(scheduler, runner)
    assert child.output_token_ids == answer_alone(child, 64)
    assert child.num_cached_tokens == 4


def test_fork_of_nobody_is_refused():
    scheduler, _, _ = make()
    with pytest.raises(ValueError, match="request_id is 'nobody'"):
        scheduler.fork("nobody", make_request("a", 4))
    assert not scheduler.has_unfinished


# Cases of public bug reports.


@pytest.mark.parametrize("num_prompt_tokens", [15, 16, 17, 32, 33])
def test_h01_whole_prompt_already_cached(num_prompt_tokens):
    scheduler, _, runner = make(block_size=16, max_num_batched_tokens=256)
    prompt = make_request("prompt", num_prompt_tokens).prompt_token_ids
    sends = [make_request(str(i), prompt, max_tokens=8) for i in range(3)]
    for request in sends:
        scheduler.add(request)
        run_all(scheduler, runner)
    expected = answer_alone(sends[0], 64)
    assert all(request.output_token_ids == expected for request in sends)
    hits = (num_prompt_tokens - 1) // 16 * 16
    assert [request.num_cached_tokens for request in sends] == [0, hits, hits]
    longer = make_request("longer", prompt + [1] * 16, max_tokens=8)
    scheduler.add(longer)
    run_all(scheduler, runner)
    assert longer.num_cached_tokens >= num_prompt_tokens // 16 * 16
    assert longer.output_token_ids == answer_alone(longer, 64)


def test_h04_request_larger_than_the_pool_is_refused_and_the_next_one_runs():
    scheduler, _, runner = make(num_blocks=8, block_size=16, max_model_len=128)
    for num_prompt_tokens in (200, 129, 128):
        with pytest.raises(ValueError, match="at most 127 leave room"):
            scheduler.add(make_request("large", num_prompt_tokens, max_tokens=1))
    scheduler.add(make_request("small", 10, max_tokens=2))
    scheduler.add(make_request("full", 127, max_tokens=1))
    assert len(run_all(scheduler, runner)) == 3
    assert scheduler.num_waiting == 0


def test_h04_model_limit_above_the_pool_is_refused_at_start():
    with pytest.raises(ValueError, match="max_model_len is 256; .*8 blocks of 16 tokens"):
        make(num_blocks=8, block_size=16, max_model_len=256)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_h05_preempted_request_returns_with_the_same_tokens(enable_prefix_caching):
    answers = {}
    for num_blocks in (14, 64):
        scheduler, _, runner = make(
            num_blocks=num_blocks,
            block_size=16,
            max_model_len=200,
            max_num_batched_tokens=256,
            enable_prefix_caching=enable_prefix_caching,
        )
        requests = [make_request(name, 40, max_tokens=120) for name in "abc"]
        for request in requests:
            scheduler.add(request)
        outputs = run_all(scheduler, runner)
        assert (scheduler.num_preemptions > 0) == (num_blocks == 14)
        for request in requests:
            streamed = [t for owner, new, _ in outputs if owner is request for t in new]
            assert streamed == request.output_token_ids and len(streamed) == 120
        answers[num_blocks] = [request.output_token_ids for request in requests]
    assert answers[14] == answers[64]


# Anything in any order.

PROMPTS = st.builds(
    lambda num_shared, tail: [0, 1, 1, 0, 1, 0, 0, 1, 1, 0][:num_shared] + tail,
    st.sampled_from([10, 10, 7, 4, 0]),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests over few tokens, so that prefixes meet, in pools that are too small for them."""

    @initialize(
        num_blocks=st.integers(9, 16),
        block_size=st.sampled_from([1, 2, 3]),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.sampled_from([1, 3, 8, 24]),
        token_buckets=st.sampled_from([(), (4, 8, 24), (2, 16)]),
        threshold=st.sampled_from([0, 1, 3, 5]),
        policy=st.sampled_from(["fcfs", "priority"]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        watermark=st.sampled_from([0.0, 0.2]),
        windows=st.sampled_from([(None,), (None, 3), (4,), (1, None), (5, 2, None, 5)]),
    )
    def start(
        self,
        num_blocks,
        block_size,
        max_num_seqs,
        max_num_batched_tokens,
        token_buckets,
        threshold,
        policy,
        enable_prefix_caching,
        watermark,
        windows,
    ):
        num_blocks *= len(windows)
        self.max_model_len = longest_request(
            num_blocks,
            windows,
            block_size=block_size,
            max_step_tokens=max_num_batched_tokens,
            limit=20,
        )
        self.budget = max_num_batched_tokens
        self.scheduler, self.manager, self.runner = make(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=self.max_model_len,
            token_buckets=token_buckets,
            long_prefill_token_threshold=threshold,
            policy=policy,
            enable_prefix_caching=enable_prefix_caching,
            watermark=watermark,
            windows=windows,
        )
        self.num_requests = 0
        self.answers = {}
        self.under_way = None

    def new_id(self):
        self.num_requests += 1
        return str(self.num_requests)

    def draw_unfinished(self, data):
        return data.draw(st.sampled_from(sorted(self.scheduler.requests)))

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        seed=st.integers(0, 1),
        salt=st.sampled_from(["", "", "", "salt"]),
        priority=st.integers(0, 2),
        stop_token_ids=st.sampled_from([frozenset(), frozenset({2})]),
        num_samples=st.sampled_from([1, 1, 2, 4]),
    )
    def add(self, prompt, max_tokens, seed, salt, priority, stop_token_ids, num_samples):
        requests = [
            make_request(
                self.new_id(),
                prompt[: self.max_model_len - 1],
                max_tokens=max_tokens,
                seed=seed + 10 * index,
                cache_salt=salt,
                priority=priority,
                stop_token_ids=stop_token_ids,
            )
            for index in range(num_samples)
        ]
        requests[0].forks = requests[1:]
        ids = {request.request_id for request in requests}
        self.runner.groups |= dict.fromkeys(ids, ids)
        self.scheduler.add(requests[0])

    @precondition(lambda self: self.under_way is None)
    @rule()
    def schedule(self):
        running = set(self.scheduler._running)
        output = self.scheduler.schedule()
        assert output.num_tokens == sum(entry.num_tokens for entry in output.scheduled)
        assert output.num_tokens <= self.budget
        assert bool(output.scheduled) == self.scheduler.has_unfinished
        names = [entry.request.request_id for entry in output.scheduled]
        assert len(set(names)) == len(names)
        if output.preempted:
            assert set(names) <= running
        self.under_way = output, self.runner.execute(output)

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def update(self):
        output, token_ids = self.under_way
        self.under_way = None
        for request, new, _ in self.scheduler.update(output, token_ids, logprobs_of(output)):
            streamed = self.answers.setdefault(
                request.request_id, request.output_token_ids[: -len(new)]
            )
            streamed += new
            assert streamed == request.output_token_ids
            if request.is_finished and request.request_id not in self.runner.forked:
                assert streamed == answer_alone(request, self.max_model_len)

    @rule()
    def step(self):
        if self.under_way is None:
            self.schedule()
        self.update()

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = self.draw_unfinished(data)
        request = self.scheduler.finish(request_id, FinishReason.ABORT)
        assert request is not None and request.is_finished and request.row == -1

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data(), seed=st.integers(2, 3), num_kept=st.integers(0, 12))
    def fork(self, data, seed, num_kept):
        parent = self.scheduler.requests[self.draw_unfinished(data)]
        child = make_request(
            self.new_id(),
            parent.prompt_token_ids,
            max_tokens=parent.max_tokens,
            seed=seed,
            cache_salt=parent.cache_salt,
        )
        child.token_ids += parent.output_token_ids[:num_kept]
        self.runner.forked.add(child.request_id)
        if self.scheduler.fork(parent.request_id, child):
            ages, parent_id = self.runner.admitted_at_age, parent.request_id
            age = ages[parent_id] if parent_id in ages else self.runner.age_of_group(parent_id)
            self.runner.admitted_at_age[child.request_id] = age

    @rule()
    def reset(self):
        self.scheduler.reset_prefix_cache()
        self.runner.age += 1

    @invariant()
    def everything_is_sound(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # All tokens ten times over, one per step: time for many preemptions at the least budget.
        for _ in range(10 * self.max_model_len * (len(self.scheduler.requests) + 1)):
            if not self.scheduler.has_unfinished and self.under_way is None:
                break
            self.step()
            self.scheduler.check()
        assert not self.scheduler.has_unfinished, "somebody starves"
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert self.manager.pool.num_blocks_in_use == 0
        assert self.manager.num_allocated_slots == self.manager.num_used_slots == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestSchedulerMachine.pytestmark = [pytest.mark.one_jax]  # it knows no JAX, and takes its time


@settings(max_examples=20, deadline=None)
@given(prompts=st.lists(PROMPTS, min_size=1, max_size=8), budget=st.integers(1, 30))
def test_answers_do_not_depend_on_budget_and_company(prompts, budget):
    scheduler, _, runner = make(
        num_blocks=12, block_size=2, max_model_len=24, max_num_batched_tokens=budget
    )
    requests = [make_request(str(i), prompt, max_tokens=8) for i, prompt in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    run_all(scheduler, runner)
    for request in requests:
        assert request.output_token_ids == answer_alone(request, 24)
