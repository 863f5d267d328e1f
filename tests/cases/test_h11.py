import dataclasses

import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams
from tests import tiny_models
from tests.invariance.engines import Job, answer, finish, shared_engine

PROMPT = np.random.default_rng(11).integers(0, 256, 20).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
NUM_KNOWN = tiny_models.NUM_TOKENS_KNOWN


@pytest.mark.parametrize("variant", ["gqa", "padded-vocab"])
@pytest.mark.parametrize("bias", [{NUM_KNOWN: 1.0}, {-1: 1.0}, {"abc": 1.0}, {5: 101}])
def test_h11_bad_bias_is_refused_by_name_and_a_neighbour_does_not_notice(bias, variant, tiny_model):
    """H-11: an id outside the vocabulary must neither be dropped nor wrap round in silence."""
    engine = shared_engine(tiny_model(variant))
    [alone] = answer(engine, [Job(PROMPT, GREEDY)])
    beside = engine.add_request("beside", PROMPT, GREEDY)
    engine.step()
    with pytest.raises(ValueError, match="logit_bias"):
        engine.add_request("bad", PROMPT, dataclasses.replace(GREEDY, logit_bias=bias))
    finish(engine)
    assert beside.output_token_ids == alone.output_token_ids


@pytest.mark.parametrize("field", ["allowed_token_ids", "bad_words"])
def test_h11_no_other_field_takes_an_id_outside_the_vocabulary(field, tiny_model):
    """H-11 for all fields that hold ids."""
    engine = shared_engine(tiny_model("padded-vocab"))
    if field == "bad_words":
        params, words = dataclasses.replace(GREEDY, bad_words=["x"]), [[5, NUM_KNOWN]]
    else:
        params, words = dataclasses.replace(GREEDY, allowed_token_ids=[5, NUM_KNOWN]), []
    with pytest.raises(ValueError, match=f"{field} holds the id {NUM_KNOWN}; ids go from 0 to"):
        engine.add_request("bad", PROMPT, params, bad_words=words)
    assert not engine.has_unfinished_requests


def test_h11_bias_does_what_it_says(tiny_model):
    """H-11: +100 yields the token at each step, -100 removes the first choice."""
    engine = shared_engine(tiny_model("gqa"))
    [plain] = answer(engine, [Job(PROMPT, GREEDY)])
    first = plain.output_token_ids[0]
    favoured, banned, beside = answer(
        engine,
        [
            Job(PROMPT, dataclasses.replace(GREEDY, logit_bias={77: 100})),
            Job(PROMPT, dataclasses.replace(GREEDY, logit_bias={first: -100})),
            Job(PROMPT, GREEDY),
        ],
    )
    assert favoured.output_token_ids == [77] * 8
    assert first not in banned.output_token_ids
    assert beside.output_token_ids == plain.output_token_ids
