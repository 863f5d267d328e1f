import pytest

from jpaged.sampling_params import SamplingParams
from tests.invariance.engines import assert_naive, finish, open_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_h04_limit_that_the_pool_cannot_hold_is_refused_at_start(tiny_model):
    """H-04: 8 blocks of 16 tokens and a model limit of 256."""
    with pytest.raises(
        ValueError, match="max_model_len is 256.*holds 128 tokens of a request.*num_blocks"
    ):
        open_engine(tiny_model("gqa"), num_blocks=8, max_model_len=256)


@pytest.mark.parametrize("num_prompt_tokens", [200, 129, 128])
def test_h04_prompt_that_never_fits_is_refused_and_the_next_is_answered(
    num_prompt_tokens, tiny_model
):
    """H-04: with no limit given it is what the pool holds; nothing waits for ever."""
    engine = open_engine(tiny_model("gqa"), num_blocks=8, max_model_len=None)
    assert engine.max_model_len == 128
    with pytest.raises(ValueError, match=f"has {num_prompt_tokens} tokens.*at most 127"):
        engine.add_request("large", [7] * num_prompt_tokens, PARAMS)
    small = engine.add_request("small", [7] * 10, PARAMS)
    finish(engine)
    assert_naive([small])
    assert engine.scheduler.num_waiting == engine.scheduler.num_running == 0


def test_h04_prompt_that_just_fits_is_answered(tiny_model):
    """H-04: the largest prompt that leaves room for one token, beside others."""
    engine = open_engine(tiny_model("gqa"), num_blocks=8, max_model_len=None)
    requests = [
        engine.add_request("first", [7] * 10, PARAMS),
        engine.add_request("full", list(range(127)), PARAMS),
        engine.add_request("last", [9] * 10, PARAMS),
    ]
    finish(engine)
    assert [request.num_output_tokens for request in requests] == [4, 1, 4]
    assert_naive(requests)
