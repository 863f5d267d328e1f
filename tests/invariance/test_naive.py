import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams
from tests import tiny_models
from tests.invariance import naive

GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize("variant", [*tiny_models.VARIANTS, *tiny_models.FAMILY_VARIANTS])
def test_the_naive_oracle_agrees_with_transformers(variant, goldens):
    model = naive.tiny_model(variant)
    for golden in goldens(f"tiny-{variant}").get("answers", ()):
        prompt = golden["prompt_token_ids"]
        naive.assert_answer(model, prompt, GREEDY, golden["token_ids"], golden["logprobs"])
        if "logits_after_prompt" in golden:
            logits = model.logits(prompt)[-1, : tiny_models.NUM_TOKENS_KNOWN]
            np.testing.assert_allclose(logits, golden["logits_after_prompt"], atol=1e-3)
    for golden in goldens(f"tiny-{variant}").get("sequences", ()):
        model = naive.tiny_model(variant, len(golden["token_ids"]))
        logits = model.logits(golden["token_ids"])[:, golden["shown_ids"]]
        np.testing.assert_allclose(logits, golden["logits"], atol=2e-4)


def test_the_naive_oracle_refuses_another_token_and_another_log_probability(goldens):
    model, golden = naive.tiny_model("gqa"), goldens("tiny-gqa")["answers"][3]
    prompt, token_ids = golden["prompt_token_ids"], list(golden["token_ids"])
    logprobs = list(golden["logprobs"])
    logprobs[5] += 0.002
    with pytest.raises(AssertionError, match="step 5: log-probability"):
        naive.assert_answer(model, prompt, GREEDY, token_ids, logprobs)
    token_ids[7] ^= 1
    with pytest.raises(AssertionError, match="step 7: token"):
        naive.assert_answer(model, prompt, GREEDY, token_ids)


def test_draws_follow_what_is_kept():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    kept = {
        (1.0, 0): [1, 4, 2, 3],
        (1.0, 2): [0, 4, 0, 3],
        (0.65, 0): [0, 4, 0, 3],
        (0.75, 0): [0, 4, 2, 3],
        (0.75, 2): [0, 4, 0, 3],
        (0.3, 0): [0, 1, 0, 0],
    }
    for (top_p, top_k), weights in kept.items():
        params = SamplingParams(top_p=top_p, top_k=top_k)
        draws = [naive.draw(logits, params, seed, 5).token_id for seed in range(1000)]
        counts = np.bincount(draws, minlength=4)
        # Four standard deviations of a share of a thousand are 0.064.
        np.testing.assert_allclose(counts / 1000, np.array(weights) / sum(weights), atol=0.064)
        assert (counts[np.array(weights) == 0] == 0).all()
