"""The sampler against the definition of each parameter, in NumPy and float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jpaged.runner.sampler import Sampled, find_largest, sample
from jpaged.runner.sampling_state import SamplingState
from jpaged.runner.step_inputs import RowFlag, SamplingInputs
from jpaged.sampling_params import SamplingParams
from tests.invariance import naive
from tests.oracle import NEAR_TIE

_sample = jax.jit(partial(sample, num_alternatives=2), static_argnames="num_tokens_known")


def draw(
    logits: np.ndarray,
    *,
    temperature: float | np.ndarray = 1.0,
    top_k: int | np.ndarray = 0,
    top_p: float | np.ndarray = 1.0,
    seeds: int | np.ndarray = 0,
    positions: int | np.ndarray = 0,
    wants_logprobs: bool = False,
    num_tokens_known: int | None = None,
) -> Sampled:
    """Samples `[B, V]` logits in one program; scalars hold for every row."""
    num_rows, vocab_size = logits.shape

    def rows(value, dtype) -> np.ndarray:
        return np.broadcast_to(np.asarray(value), num_rows).astype(dtype)

    seeds, zeros = rows(seeds, np.uint64), rows(0, np.int32)
    neutral = [rows(number, np.float32) for number in (0.0, 1.0, 0.0, 0.0)]
    low, high = ((seeds >> shift).astype(np.uint32).view(np.int32) for shift in (0, 32))
    flags = rows(RowFlag.LOGPROBS * wants_logprobs, np.int32)
    sampled = _sample(
        np.asarray(logits, np.float32),
        SamplingInputs(
            floats=np.stack([rows(temperature, np.float32), rows(top_p, np.float32), *neutral]),
            ints=np.stack([rows(top_k, np.int32), low, high, flags, zeros]),
            samples=zeros + 1,
            rows=zeros,
            positions=rows(positions, np.int32),
        ),
        SamplingState(np.zeros((1, vocab_size), np.int32), np.zeros((1, vocab_size), np.float32)),
        num_tokens_known=num_tokens_known or vocab_size,
    )
    return jax.tree.map(np.asarray, sampled)


def random_logits(num_rows: int, vocab_size: int, *, scale: float = 3.0, seed: int = 0):
    random = np.random.default_rng(seed)
    return (random.standard_normal((num_rows, vocab_size)) * scale).astype(np.float32)


def assert_draws(logits, params: SamplingParams, seeds, positions, token_ids) -> None:
    """Each token is the oracle's, but for the few draws that are as good as ties."""
    num_clear = 0
    rows = zip(logits.astype(np.float64), seeds, positions, token_ids, strict=True)
    for row, seed, position, token_id in rows:
        expected, margin = naive.draw(row, params, int(seed), int(position))
        if margin >= NEAR_TIE:
            assert token_id == expected, (params, seed, position, margin)
            num_clear += 1
    assert num_clear > 0.9 * len(token_ids)


def test_greedy_takes_the_best_token_and_of_equals_the_first():
    logits = random_logits(8, 300)
    logits[3, [250, 7, 90]] = 50.0
    expected = logits.argmax(axis=1)
    assert expected[3] == 7
    np.testing.assert_array_equal(draw(logits, temperature=0.0).token_ids, expected)
    # The same beside rows that sample.
    temperature = np.where(np.arange(8) % 2, 1.0, 0.0)
    token_ids = draw(logits, temperature=temperature).token_ids
    np.testing.assert_array_equal(token_ids[::2], expected[::2])


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.05])
@pytest.mark.parametrize("top_k", [0, 2, 20, 299, 300, 1000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.9])
def test_drawn_token_wins_the_race_of_the_filtered_distribution(temperature, top_k, top_p):
    logits = random_logits(64, 300)
    seeds, positions = np.arange(64) * 7919 + 2**40, np.arange(64) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampled = draw(logits, seeds=seeds, positions=positions, **options)
    assert_draws(logits, params, seeds, positions, sampled.token_ids)


def test_filters_of_one_row_do_not_touch_another():
    logits = random_logits(64, 300)
    seeds, is_filtered = np.arange(64), np.arange(64) % 2 == 0
    token_ids = draw(logits, top_k=np.where(is_filtered, 3, 0), seeds=seeds).token_ids
    every = np.array([draw(logits, top_k=k, seeds=seeds).token_ids for k in (0, 3)])
    np.testing.assert_array_equal(token_ids, np.where(is_filtered, every[1], every[0]))


def test_tokens_as_likely_as_the_last_one_kept_are_kept_too():
    logits = np.full((512, 8), -5.0, np.float32)
    logits[:, 0] = 3.0
    logits[:, [2, 4, 6]] = 2.0
    for options in ({"top_k": 2}, {"top_p": 0.6}):
        token_ids = draw(logits, seeds=np.arange(512), **options).token_ids
        assert set(token_ids) == {0, 2, 4, 6}, options


@pytest.mark.parametrize("top_p", [1e-6, 1e-30])
def test_tiny_top_p_keeps_the_best_token(top_p):
    logits = random_logits(64, 300)
    token_ids = draw(logits, top_p=top_p, seeds=np.arange(64)).token_ids
    np.testing.assert_array_equal(token_ids, logits.argmax(axis=1))


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-5, 1e-6, 1e-8, 1e-30, 1e-45, 1e-60])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiny_temperature_is_greedy_beside_an_ordinary_neighbour(temperature, dtype):
    logits = np.asarray(random_logits(16, 300, scale=9.0).astype(jnp.dtype(dtype)), np.float32)
    top_two = np.sort(logits, axis=1)[:, -2:]
    logits[np.arange(16), logits.argmax(axis=1)] += 0.1 * (top_two[:, 0] == top_two[:, 1])
    temperatures = np.full(16, temperature)
    temperatures[5] = 1.0
    options = {"seeds": np.arange(16), "wants_logprobs": True}
    sampled = draw(logits, temperature=temperatures, **options)
    expected = logits.argmax(axis=1)
    expected[5] = draw(logits, temperature=1.0, **options).token_ids[5]
    np.testing.assert_array_equal(sampled.token_ids, expected)
    assert np.isfinite(sampled.logprobs.logprobs).all()


@pytest.mark.parametrize("temperature", [100.0, 1e30])
def test_huge_temperature_draws_evenly_among_the_known_tokens(temperature):
    logits = random_logits(2000, 16)
    token_ids = draw(
        logits, temperature=temperature, seeds=np.arange(2000), num_tokens_known=10
    ).token_ids
    counts = np.bincount(token_ids, minlength=10)
    assert len(counts) == 10 and stats.chisquare(counts).pvalue > 1e-3


def test_draws_follow_the_distribution_over_seeds_and_over_positions():
    probs = np.array([0.4, 0.05, 0.0, 0.25, 0.2, 0.1])
    logits = np.log(np.maximum(probs, 1e-30))[None].repeat(4000, axis=0)
    number = np.arange(4000)
    for options in ({"seeds": number}, {"seeds": 7, "positions": number}):
        counts = np.bincount(draw(logits, **options).token_ids, minlength=6)
        assert counts[2] == 0
        kept = probs > 0
        assert stats.chisquare(counts[kept], probs[kept] * 4000).pvalue > 1e-3, options


def test_draws_are_independent_from_one_position_to_the_next():
    logits = np.zeros((4001, 4), np.float32)
    token_ids = draw(logits, seeds=7, positions=np.arange(4001)).token_ids
    pairs = np.bincount(token_ids[:-1] * 4 + token_ids[1:], minlength=16)
    assert stats.chisquare(pairs).pvalue > 1e-3


def test_answer_depends_on_seed_and_position_only_not_on_row_or_batch():
    logits = random_logits(1, 300).repeat(32, axis=0)
    seeds, positions = np.arange(32) % 4, np.arange(32) // 16
    options = {"temperature": 1.5, "top_p": 0.9}
    token_ids = draw(logits, seeds=seeds, positions=positions, **options).token_ids
    by_key = {}
    for seed, position, token_id in zip(seeds, positions, token_ids, strict=True):
        assert by_key.setdefault((seed, position), token_id) == token_id
    assert len(set(by_key.values())) > 2  # neither seed nor position is ignored
    for (seed, position), token_id in by_key.items():
        alone = draw(logits[:1], seeds=seed, positions=position, **options).token_ids
        assert alone[0] == token_id


def test_both_halves_of_the_seed_count():
    logits = np.zeros((64, 1000), np.float32)
    low = np.arange(64, dtype=np.uint64)
    drawn = [tuple(draw(logits, seeds=s).token_ids) for s in (low, low << 32, low + (1 << 63))]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_vocabulary_is_never_sampled(temperature):
    logits = random_logits(256, 300)
    logits[:, 260:] = 1e4
    logits[0, 280], logits[1, 299] = np.inf, np.nan
    sampled = draw(
        logits, temperature=temperature, seeds=np.arange(256), num_tokens_known=260,
        wants_logprobs=True,
    )  # fmt: skip
    assert sampled.token_ids.max() < 260
    assert np.isfinite(sampled.logprobs.logprobs).all()


@pytest.mark.parametrize("options", [{}, {"top_k": 9}, {"top_p": 0.8}, {"temperature": 0.0}])
def test_size_of_the_padding_changes_nothing(options):
    logits = random_logits(64, 260)
    expected = draw(logits, seeds=np.arange(64), wants_logprobs=True, **options)
    for vocab_size in (300, 512, 513):
        padded = np.pad(logits, ((0, 0), (0, vocab_size - 260)), constant_values=7.0)
        sampled = draw(
            padded, seeds=np.arange(64), wants_logprobs=True, num_tokens_known=260, **options
        )
        np.testing.assert_array_equal(sampled.token_ids, expected.token_ids)
        np.testing.assert_allclose(sampled.logprobs.logprobs, expected.logprobs.logprobs, atol=1e-5)


def test_first_and_last_token_can_be_drawn():
    for vocab_size in (2, 256, 257, 600):
        logits = np.full((64, vocab_size), -40.0, np.float32)
        logits[:, [0, -1]] = 0.0
        token_ids = draw(logits, seeds=np.arange(64)).token_ids
        assert set(token_ids) == {0, vocab_size - 1}


@pytest.mark.parametrize(("vocab_size", "k"), [(1024, 8), (1024, 9), (1000, 3), (64, 64)])
@pytest.mark.parametrize("rarity", [0.1, 0.5, 0.99])
def test_largest_values_come_first_and_of_equals_the_lower_id(vocab_size, k, rarity):
    values = np.random.default_rng(0).geometric(rarity, (20, vocab_size)).astype(np.float32)
    values[values == 1] = -np.inf
    values[0] = -np.inf
    expected = np.argsort(-values, axis=-1, kind="stable")[:, :k]
    largest, ids = jax.jit(find_largest, static_argnums=1)(values, k)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(largest, np.take_along_axis(values, expected, axis=-1))


@pytest.mark.parametrize("peaks", [1, 127, 128, 129, 250])
def test_filters_keep_the_same_whether_few_or_many_tokens_are_likely(peaks):
    """Thresholds are searched among the 128 most likely tokens first, then among all."""
    logits = np.full((1, 300), -30.0, np.float32)
    logits[0, 300 - peaks :] = np.linspace(0.0, -1.0, peaks, dtype=np.float32)
    probs = naive.softmax(logits[0].astype(np.float64))
    num_seeds = 2000
    for top_k, top_p in [(peaks, 1.0), (0, 0.6), (0, 0.95), (140, 0.999), (128, 0.999)]:
        best = np.sort(probs)[::-1][: top_k or 300]
        kept = min(int(np.sum(np.cumsum(best / best.sum()) < top_p)) + 1, len(best))
        sampled = draw(
            np.repeat(logits, num_seeds, axis=0), top_k=top_k, top_p=top_p, seeds=range(num_seeds)
        )
        drawn = set(np.asarray(sampled.token_ids) - (300 - peaks))
        assert max(drawn) < kept
        if kept < 130:
            assert len(drawn) == kept


def test_log_probabilities_are_the_models_own_before_temperature_and_filters():
    logits = random_logits(32, 300)
    sampled = draw(logits, temperature=0.2, top_k=5, seeds=np.arange(32), wants_logprobs=True)
    expected = np.log(naive.softmax(logits.astype(np.float64)))
    expected = expected[np.arange(32), sampled.token_ids]
    np.testing.assert_allclose(sampled.logprobs.logprobs, expected, atol=1e-5)
    # One row that asks does not change what is chosen, and those that do not ask are served too.
    quiet = draw(logits, temperature=0.2, top_k=5, seeds=np.arange(32))
    np.testing.assert_array_equal(quiet.token_ids, sampled.token_ids)


def test_draws_do_not_depend_on_jax_enable_x64():
    logits = random_logits(16, 300)
    expected = draw(logits, seeds=np.arange(16)).token_ids
    with jax.enable_x64(True):
        token_ids = draw(logits, seeds=np.arange(16)).token_ids
    np.testing.assert_array_equal(token_ids, expected)


def test_rounding_of_logits_moves_hardly_a_draw():
    """What other batch mates do to products; borders of a cumulative distribution all move."""
    logits = np.tile(random_logits(1, 49152, scale=1.0), (64, 1))
    noise = np.random.default_rng(1).standard_normal(logits.shape)
    rounded = (logits * (1 + 1e-6 * noise)).astype(np.float32)
    num_moved = 0
    for first in range(0, 1024, 64):
        seeds = np.arange(first, first + 64)
        exact, moved = (draw(values, seeds=seeds).token_ids for values in (logits, rounded))
        num_moved += int((exact != moved).sum())
    assert num_moved <= 1
