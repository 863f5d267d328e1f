import dataclasses

import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams
from tests import tiny_models
from tests.invariance import naive
from tests.invariance.engines import Job, answer, assert_naive, shared_engine

PROMPT = np.random.default_rng(6).integers(0, 256, 100).tolist()
PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("budget", [16, 17, 33, 400])
def test_h06_log_probabilities_of_a_prompt_do_not_depend_on_its_chunks(budget, tiny_model):
    """H-06: 99 entries after the first token, equal to the reference in chunks of any size."""
    engine = shared_engine(
        tiny_model("gqa"), max_num_batched_tokens=budget, mixed_buckets=(budget,)
    )
    params = dataclasses.replace(PARAMS, prompt_logprobs=3)
    logits = naive.tiny_model("gqa").logits(PROMPT)[:-1, : tiny_models.NUM_TOKENS_KNOWN]
    expected = np.log(naive.softmax(logits))
    best = np.argsort(-expected, axis=-1, kind="stable")[:, :3]
    for _ in range(2):  # the second time its blocks are cached
        [request] = answer(engine, [Job(PROMPT, params)])
        assert len(request.prompt_logprobs) == 99 and request.num_cached_tokens == 0
        chosen = [entry.logprob for entry in request.prompt_logprobs]
        np.testing.assert_allclose(chosen, expected[np.arange(99), PROMPT[1:]], atol=1e-4)
        ranks = 1 + (expected > expected[np.arange(99), PROMPT[1:]][:, None]).sum(axis=-1)
        assert [entry.rank for entry in request.prompt_logprobs] == ranks.tolist()
        top_ids = [entry.top_ids for entry in request.prompt_logprobs]
        np.testing.assert_array_equal(top_ids, best)
        top = [entry.top_logprobs for entry in request.prompt_logprobs]
        np.testing.assert_allclose(top, np.take_along_axis(expected, best, axis=-1), atol=1e-4)
        assert request.num_output_tokens == 3
        assert_naive([request])


@pytest.mark.parametrize("budget", [16, 17, 33, 400])
def test_h06_only_the_last_chunk_of_a_prompt_gives_a_token(budget, tiny_model):
    """H-06: a prompt of 100 tokens in chunks; no empty or invalid token before the first."""
    engine = shared_engine(
        tiny_model("gqa"), max_num_batched_tokens=budget, mixed_buckets=(budget,)
    )
    request = engine.add_request("a", PROMPT, PARAMS)
    brought = []
    while engine.has_unfinished_requests:
        brought.append(engine.step())
    num_silent = -(-100 // budget) - 1
    assert brought[:num_silent] == [[]] * num_silent
    tokens = [token_ids for [(_, token_ids, _)] in brought[num_silent:]]
    assert tokens == [[token_id] for token_id in request.output_token_ids] and len(tokens) == 3
    assert_naive([request])
