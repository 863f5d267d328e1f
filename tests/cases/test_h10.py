import dataclasses

import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams
from tests.invariance.engines import Job, answer, assert_naive, shared_engine

TEMPERATURES = (0.0, 1e-4, 1e-5, 1e-6, 1e-8, 1e-30, 1e-45)
PROMPT = np.random.default_rng(10).integers(0, 256, 20).tolist()
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=0, seed=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_h10_tiny_temperatures_are_greedy_and_do_not_touch_a_neighbour(dtype, tiny_model):
    """H-10: division by a tiny temperature neither overflows nor gives token 0 throughout."""
    engine = shared_engine(tiny_model("gqa"), **({} if dtype == "float32" else {"dtype": dtype}))
    jobs = [Job(PROMPT, dataclasses.replace(PARAMS, temperature=t)) for t in TEMPERATURES]
    neighbour = Job(PROMPT[::-1], dataclasses.replace(PARAMS, temperature=1.0))
    [alone] = answer(engine, [neighbour])
    *requests, beside = answer(engine, [*jobs, neighbour])
    for request in requests:
        assert request.output_token_ids == requests[0].output_token_ids
        assert np.isfinite(request.token_logprobs).all()
    assert beside.output_token_ids == alone.output_token_ids
    if dtype == "float32":
        assert_naive([*requests[:1], beside])


def test_h10_negative_temperature_is_refused():
    """H-10: -0.1 is a mistake of the caller."""
    with pytest.raises(ValueError, match="temperature is -0.1"):
        SamplingParams(temperature=-0.1)


@pytest.mark.parametrize("temperature", [100.0, 1e38, 1e300])
def test_h10_huge_temperature_is_refused(temperature):
    """H-10: 100 is accepted or refused; vLLM's range ends at 2."""
    with pytest.raises(ValueError, match="temperature is .*; it must be a number from 0 to 2"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize("variant", ["gqa", "padded-vocab"])
def test_h10_highest_temperature_is_answered_from_the_whole_vocabulary(variant, tiny_model):
    """H-10: never NaN, and never the same token throughout."""
    engine = shared_engine(tiny_model(variant))
    params = dataclasses.replace(PARAMS, temperature=2.0, max_tokens=100)
    [request] = answer(engine, [Job(PROMPT, params)])
    assert np.isfinite(request.token_logprobs).all()
    assert len(set(request.output_token_ids)) > 10
    assert all(0 <= token_id < 260 for token_id in request.output_token_ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_h10_tiny_temperatures_are_greedy_with_a_bias_too(dtype, tiny_model):
    """H-10: once more with logit_bias -100 on the token that comes first without it."""
    engine = shared_engine(tiny_model("gqa"), **({} if dtype == "float32" else {"dtype": dtype}))
    # In bfloat16 logits may be equal, and then a draw is free to choose.
    prompt = np.random.default_rng(12).integers(0, 256, 20).tolist()
    [plain] = answer(engine, [Job(prompt, dataclasses.replace(PARAMS, temperature=0.0))])
    banned = plain.output_token_ids[0]
    biased = dataclasses.replace(PARAMS, logit_bias={banned: -100})
    jobs = [Job(prompt, dataclasses.replace(biased, temperature=t)) for t in TEMPERATURES]
    requests = answer(engine, jobs)
    for request in requests:
        assert request.output_token_ids == requests[0].output_token_ids
        assert banned not in request.output_token_ids
        assert np.isfinite(request.token_logprobs).all()
