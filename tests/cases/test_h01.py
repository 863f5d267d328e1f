import numpy as np

from jpaged.sampling_params import SamplingParams
from tests.invariance.engines import Job, answer, assert_naive, shared_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=5)
LENGTHS = (15, 16, 17, 32, 33)


def make_prompts() -> list[list[int]]:
    """Each prompt three times in a row, then the one of 32 tokens continued, twice."""
    random = np.random.default_rng(1)
    prompts = [random.integers(0, 256, length).tolist() for length in LENGTHS]
    longer = prompts[LENGTHS.index(32)] + random.integers(0, 256, 16).tolist()
    return [prompt for prompt in prompts for _ in range(3)] + [longer] * 2


def test_h01_a_cache_hit_changes_speed_only(tiny_model):
    """H-01: a prompt that is cached as a whole still computes one token, and answers the same."""
    prompts = make_prompts()
    engines = [
        shared_engine(tiny_model("gqa"), enable_prefix_caching=is_on) for is_on in (True, False)
    ]
    cached, plain = (
        [answer(engine, [Job(prompt, PARAMS)])[0] for prompt in prompts] for engine in engines
    )
    assert_naive(cached)
    for with_cache, without in zip(cached, plain, strict=True):
        assert with_cache.output_token_ids == without.output_token_ids
        np.testing.assert_allclose(with_cache.token_logprobs, without.token_logprobs, atol=1e-4)
        for entry, other in zip(with_cache.logprobs, without.logprobs, strict=True):
            assert set(entry.top_ids) == set(other.top_ids) and len(entry.top_ids) == 5
            np.testing.assert_allclose(entry.top_logprobs, other.top_logprobs, atol=1e-4)
        assert without.num_cached_tokens == 0
    for index, length in enumerate(LENGTHS):
        first, second, third = (r.num_cached_tokens for r in cached[3 * index : 3 * index + 3])
        # Whole blocks, and never the last token.
        assert first == 0 and second == third == (length - 1) // 16 * 16
    assert [request.num_cached_tokens for request in cached[-2:]] == [32, 32]
