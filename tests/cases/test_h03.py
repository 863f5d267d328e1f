import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams
from tests.invariance.engines import Job, add, answer, assert_naive, finish, shared_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
LENGTHS = (1, 15, 16, 17, 31, 33, 64, 65)
JOBS = [
    Job(np.random.default_rng(length).integers(0, 256, length).tolist(), PARAMS)
    for length in LENGTHS
]
OTHER_BUCKETS = {"decode_buckets": (1, 3), "mixed_buckets": (9, 40)}


@pytest.mark.parametrize("buckets", [{}, OTHER_BUCKETS], ids=["one ladder", "another"])
def test_h03_padding_reads_and_writes_nothing_of_a_request(buckets, tiny_model):
    """H-03: prompts of unequal lengths in one call, in reverse, and each alone."""
    engine = shared_engine(tiny_model("gqa"), **buckets)
    together = answer(engine, JOBS)
    in_reverse = answer(engine, JOBS[::-1])[::-1]
    engine.reset_prefix_cache()
    alone = [answer(engine, [job])[0] for job in JOBS]
    for requests in (together, in_reverse, alone):
        assert_naive(requests)
        for request, other in zip(requests, alone, strict=True):
            np.testing.assert_allclose(request.token_logprobs, other.token_logprobs, atol=1e-3)


def test_h03_waves_that_overlap_answer_like_the_first_one(tiny_model):
    """H-03: twenty waves of the eight prompts, the next one arriving before the last has ended."""
    engine = shared_engine(tiny_model("gqa"))
    waves = []
    for wave in range(20):
        waves.append(add(engine, JOBS, name=f"wave {wave}, job"))
        for _ in range(5):
            engine.step()
    finish(engine)
    assert_naive(waves[0])
    for requests in waves[1:]:
        for request, first in zip(requests, waves[0], strict=True):
            assert request.output_token_ids == first.output_token_ids
            np.testing.assert_allclose(request.token_logprobs, first.token_logprobs, atol=1e-3)
