import dataclasses

import numpy as np
import pytest

from jpaged.request import Request
from jpaged.sampling_params import SamplingParams
from tests.invariance.engines import LIMITS, assert_naive, finish, shared_engine

PARAMS = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, logprobs=0, seed=0)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_prompt_tokens", [16, 20, 32])
def test_h02_answers_to_one_prompt_do_not_write_into_each_others_blocks(
    num_prompt_tokens, enable_prefix_caching, tiny_model
):
    """H-02: n=4; each token's log-probability is that of the reference on its own prefix."""
    options = {} if enable_prefix_caching else {"enable_prefix_caching": False}
    engine = shared_engine(tiny_model("gqa"), **options)
    pool = engine.kv_cache_manager.pool
    prompt = np.random.default_rng(2).integers(0, 256, num_prompt_tokens).tolist()
    request = engine.add_request("a", prompt, dataclasses.replace(PARAMS, n=4))
    answers = [request, *request.forks]
    assert [answer.seed for answer in answers] == [0, 1, 2, 3]
    engine.step()
    # All but the prompt's last token is shared: its full blocks once, a part-filled one copied.
    num_full = (num_prompt_tokens - 1) // 16
    assert engine.scheduler.num_running == 4
    assert pool.num_shared_blocks == num_full + 1  # the block to copy from is kept until then
    num_blocks = -(-num_prompt_tokens // 16)
    assert pool.num_blocks_in_use == num_blocks + 3 * (num_blocks - num_full)
    engine.step()
    assert pool.num_shared_blocks == num_full
    finish(engine)
    assert len({tuple(answer.output_token_ids) for answer in answers}) == 4
    assert {answer.num_output_tokens for answer in answers} == {PARAMS.max_tokens}
    assert_naive(answers)
    assert pool.num_free_blocks == LIMITS["num_blocks"]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_prompt_tokens", [16, 20, 32])
def test_h02_branches_of_a_prompt_do_not_write_into_each_others_blocks(
    num_prompt_tokens, enable_prefix_caching, tiny_model
):
    """H-02: four branches, each token's log-probability that of the reference on its own prefix."""
    options = {} if enable_prefix_caching else {"enable_prefix_caching": False}
    engine = shared_engine(tiny_model("gqa"), **options)
    pool = engine.kv_cache_manager.pool
    prompt = np.random.default_rng(2).integers(0, 256, num_prompt_tokens).tolist()
    num_copies = engine.kv_cache_manager.num_copies
    branches = [engine.add_request("branch 0", prompt, PARAMS)]
    engine.step()
    for seed in (1, 2, 3):
        child = Request(
            request_id=f"branch {seed}",
            prompt_token_ids=prompt,
            params=dataclasses.replace(PARAMS, seed=seed),
            max_tokens=PARAMS.max_tokens,
            seed=seed,
        )
        assert engine.scheduler.fork("branch 0", child)
        branches.append(child)
    # All but the prompt's last token is shared: its full blocks once, a part-filled one copied.
    num_full = (num_prompt_tokens - 1) // 16
    assert pool.num_shared_blocks >= num_full
    assert engine.kv_cache_manager.num_copies - num_copies == 3
    engine.step()
    # The parent is one token ahead of its children.
    num_parent, num_child = (-(-n // 16) for n in (num_prompt_tokens + 1, num_prompt_tokens))
    assert pool.num_blocks_in_use == num_parent + 3 * (num_child - num_full)
    finish(engine)
    assert len({tuple(branch.output_token_ids) for branch in branches}) == 4
    assert {branch.num_output_tokens for branch in branches} == {PARAMS.max_tokens}
    assert_naive(branches)
    assert pool.num_free_blocks == LIMITS["num_blocks"]


def test_h02_branches_that_part_after_some_tokens_keep_what_they_share(tiny_model):
    """H-02 on forks of an answer that is under way, at every place in a block."""
    engine = shared_engine(tiny_model("gqa"))
    prompt = np.random.default_rng(3).integers(0, 256, 20).tolist()
    parent = engine.add_request("parent", prompt, PARAMS)
    branches = [parent]
    for step in range(20):
        engine.step()
        engine.scheduler.check()
        if step % 4 == 3 and len(branches) < 6:
            child = Request(
                request_id=f"after {step}",
                prompt_token_ids=prompt,
                token_ids=list(parent.token_ids),
                # As of the parent, of tokens that the child did not draw itself.
                logprobs=list(parent.logprobs),
                params=dataclasses.replace(PARAMS, temperature=0.0),
                max_tokens=PARAMS.max_tokens,
            )
            assert engine.scheduler.fork("parent", child)
            branches.append(child)
            child.prompt_token_ids = list(child.token_ids)
            child.logprobs.clear()
    finish(engine)
    assert_naive(branches)
