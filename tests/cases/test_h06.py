import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams
from tests.invariance.engines import assert_naive, shared_engine

PROMPT = np.random.default_rng(6).integers(0, 256, 100).tolist()
PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0)


def test_h06_prompt_log_probabilities_are_refused_by_name_until_they_are_offered():
    """H-06 asks for them; what is not offered must not be ignored."""
    with pytest.raises(TypeError, match="'prompt_logprobs'"):
        SamplingParams(prompt_logprobs=1)


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
