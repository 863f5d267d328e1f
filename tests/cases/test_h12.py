import dataclasses

import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams
from tests import tiny_models
from tests.invariance import naive
from tests.invariance.engines import Job, answer, shared_engine

PROMPT = np.random.default_rng(12).integers(0, 256, 20).tolist()
PARAMS = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True, seed=3)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_h12_the_chosen_token_always_counts_and_the_best_ones_come_beside_it(count, tiny_model):
    """H-12: 0 is not off; n gives the n best. Values are those of the reference."""
    engine = shared_engine(tiny_model("gqa"))
    [request] = answer(engine, [Job(PROMPT, dataclasses.replace(PARAMS, logprobs=count))])
    token_ids = request.output_token_ids
    logits = naive.tiny_model("gqa").logits([*PROMPT, *token_ids])[19:-1]
    expected = np.log(naive.softmax(logits[:, : tiny_models.NUM_TOKENS_KNOWN]))
    assert len(request.logprobs) == 8
    for row, token_id, entry in zip(expected, token_ids, request.logprobs, strict=True):
        assert abs(entry.logprob - row[token_id]) < 1e-3
        assert entry.rank == 1 + (row > row[token_id]).sum()
        assert list(entry.top_ids) == np.argsort(-row, kind="stable")[:count].tolist()
        np.testing.assert_allclose(entry.top_logprobs, np.sort(row)[::-1][:count], atol=1e-3)
    assert {entry.rank for entry in request.logprobs} != {1}


def test_h12_nothing_is_reported_where_nothing_is_asked(tiny_model):
    """H-12: left out and None are the same."""
    engine = shared_engine(tiny_model("gqa"))
    requests = answer(engine, [Job(PROMPT, dataclasses.replace(PARAMS, logprobs=None))] * 2)
    assert [request.logprobs for request in requests] == [[], []]


@pytest.mark.parametrize(("count", "message"), [(-1, "is -1; .* allow 0 to 20"), (21, "is 21")])
@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_h12_more_than_the_engine_reports_is_refused(field, count, message, tiny_model):
    """H-12: -1, the whole vocabulary, is refused unless the engine was started for it."""
    engine = shared_engine(tiny_model("gqa"))
    with pytest.raises(ValueError, match=f"SamplingParams.{field} {message}"):
        engine.add_request("a", PROMPT, dataclasses.replace(PARAMS, **{field: count}))


def test_h12_an_engine_started_for_it_reports_the_whole_vocabulary(tiny_model):
    """H-12: with max_logprobs=-1."""
    engine = shared_engine(tiny_model("padded-vocab"), max_logprobs=-1)
    params = dataclasses.replace(PARAMS, logprobs=-1, prompt_logprobs=-1, max_tokens=2)
    [request] = answer(engine, [Job(PROMPT, params)])
    for entry in [*request.logprobs, *request.prompt_logprobs]:
        assert sorted(entry.top_ids) == list(range(tiny_models.NUM_TOKENS_KNOWN))
        assert abs(sum(np.exp(entry.top_logprobs)) - 1) < 1e-4
    num_known = tiny_models.NUM_TOKENS_KNOWN
    with pytest.raises(ValueError, match=f"logprobs is {num_known + 1}; .*allow -1 to {num_known}"):
        engine.add_request("a", PROMPT, dataclasses.replace(PARAMS, logprobs=num_known + 1))


def test_h12_room_for_more_than_the_vocabulary_is_room_for_the_vocabulary(tiny_model):
    """H-12: with max_logprobs beyond it."""
    engine = shared_engine(tiny_model("padded-vocab"), max_logprobs=1000)
    num_known = tiny_models.NUM_TOKENS_KNOWN
    [request] = answer(engine, [Job(PROMPT, dataclasses.replace(PARAMS, logprobs=num_known))])
    assert sorted(request.logprobs[0].top_ids) == list(range(num_known))
    with pytest.raises(ValueError, match=f"allow 0 to {num_known}"):
        engine.add_request("a", PROMPT, dataclasses.replace(PARAMS, logprobs=num_known + 1))
