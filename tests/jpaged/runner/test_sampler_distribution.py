"""Thousands of draws of each row of a mixed batch against the oracle's distribution.

The seeds are fixed, so a test that passes once always passes. Chi-square at one in a million: a
right sampler does not fail by chance when seeds or shapes change, and a wrong one is noticed at
this many draws.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jpaged.runner.sampler import sample
from tests.jpaged.runner import sampling_oracle as oracle
from tests.jpaged.runner.sampler_steps import Steps, make_request
from tests.jpaged.runner.sampling_oracle import Row

pytestmark = pytest.mark.optimized

NUM_TOKENS_KNOWN = 290
VOCAB_SIZE = 300
NUM_POSITIONS = 8192
SIGNIFICANCE = 1e-6

PROMPT = [0, 1, 2, 3, 40, 41, 288]
OUTPUT = [1, 1, 1, 2, 5, 5, 42, 43, 289]  # some of them in the prompt, some not
LIKELY = [0, 1, 2, 5, 7, 40, 42, 43, 100, 255, 256, 288, 289]

ASKED = {
    "plain": Row(),
    "cold": Row(temperature=0.6),
    "hot": Row(temperature=1.7),
    "top_k": Row(top_k=5),
    "top_k hot": Row(top_k=40, temperature=2.0),
    "top_p": Row(top_p=0.8),
    "top_p hot": Row(top_p=0.5, temperature=2.0),
    "min_p": Row(min_p=0.1),
    "min_p hot": Row(min_p=0.02, temperature=1.5),
    "min_p and top_p": Row(min_p=0.25, top_p=0.8),
    "all filters": Row(top_k=8, top_p=0.85, min_p=0.05, temperature=1.3),
    "repetition": Row(repetition_penalty=1.6),
    "reward": Row(repetition_penalty=0.7),
    "frequency": Row(frequency_penalty=0.7),
    "presence": Row(presence_penalty=1.2),
    "all penalties": Row(repetition_penalty=1.3, frequency_penalty=-0.4, presence_penalty=0.8),
    "biases": Row(logit_bias={7: 2.0, 42: -3.0, 200: 6.0, 289: 1.0}),
    "biases and repetition": Row(
        repetition_penalty=1.8, logit_bias={1: 2.0, 2: 2.0, 5: 2.0, 42: 2.0}
    ),
    "allowed": Row(allowed_token_ids=LIKELY[:9] + [150]),
    "excluded": Row(bad_words=[[5], [43, 289, 2], [7, 0]], min_tokens=99, end_token_ids=[0, 256]),
    "everything": Row(
        temperature=1.4,
        top_k=9,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.4,
        logit_bias={2: 1.5, 7: 1.0, 42: -1.5},
        allowed_token_ids=[*LIKELY, 8, 9],
        bad_words=[[289, 256]],
        min_tokens=20,
        end_token_ids=[5],
    ),
}
ROWS = {
    name: dataclasses.replace(row, prompt_token_ids=PROMPT, output_token_ids=OUTPUT)
    for name, row in ASKED.items()
}


def make_logits() -> np.ndarray:
    """Rows of which a dozen tokens take most, in all places of the vocabulary, some below 0."""
    random = np.random.default_rng(7)
    logits = random.standard_normal((len(ROWS), NUM_TOKENS_KNOWN)) - 4.0
    likely = np.tile(np.linspace(-1.0, 2.0, len(LIKELY)), (len(ROWS), 1))
    logits[:, LIKELY] = random.permuted(likely, axis=1)
    logits[:, LIKELY[3]] = logits[:, LIKELY[4]]  # a tie
    return logits.astype(np.float32)


@pytest.fixture(scope="module")
def counts() -> np.ndarray:
    """How often each row of one mixed batch drew each id, over as many positions."""
    steps = Steps(num_rows=len(ROWS), num_lines=len(ROWS) + 1, vocab_size=VOCAB_SIZE)
    requests = [
        make_request(row, seed=index * 2**33 + 11, line=index)
        for index, row in enumerate(ROWS.values())
    ]
    sampling = steps.build(requests)
    logits = np.pad(
        make_logits(), ((0, 0), (0, VOCAB_SIZE - NUM_TOKENS_KNOWN)), constant_values=50.0
    )

    @jax.jit
    def draw_all(logits, sampling, state):
        def draw(position):
            now = sampling._replace(positions=sampling.positions + position)
            known = {"num_tokens_known": NUM_TOKENS_KNOWN, "num_alternatives": 1}
            return sample(logits, now, state, **known).token_ids

        return jax.lax.map(draw, jnp.arange(NUM_POSITIONS))

    drawn = np.asarray(draw_all(logits, sampling, steps.state))
    return np.array([np.bincount(ids, minlength=VOCAB_SIZE) for ids in drawn.T])


@pytest.mark.parametrize("index", range(len(ROWS)), ids=list(ROWS))
def test_draws_follow_the_distribution_that_was_asked_for(index, counts):
    probs = oracle.distribution(make_logits()[index], list(ROWS.values())[index])
    drawn = counts[index]
    assert drawn[NUM_TOKENS_KNOWN:].sum() == 0
    drawn = drawn[:NUM_TOKENS_KNOWN]
    assert drawn[probs == 0].sum() == 0
    assert pvalue(drawn, probs) > SIGNIFICANCE


def pvalue(drawn: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square's, with the rare ids in one bin so that no bin expects fewer than 5."""
    expected = probs * drawn.sum()
    is_common = expected >= 5
    bins = np.array([*drawn[is_common], drawn[~is_common].sum()])
    expected_bins = np.array([*expected[is_common], expected[~is_common].sum()])
    if expected_bins[-1] < 5:  # too rare to be counted apart
        bins, expected_bins = bins[:-1], expected_bins[:-1]
        expected_bins = expected_bins * (bins.sum() / expected_bins.sum())
    return float(stats.chisquare(bins, expected_bins).pvalue)
