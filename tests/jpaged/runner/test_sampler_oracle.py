"""The sampler, with what the host prepares for it, against `sampling_oracle`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.request import NO_TOKEN, Request
from jpaged.runner.sampler import Sampled, sample
from tests.invariance import naive
from tests.jpaged.runner import sampling_oracle as oracle
from tests.jpaged.runner.sampler_steps import Steps, make_request
from tests.jpaged.runner.sampling_oracle import Row

NUM_ROWS = 8
NUM_LINES = NUM_ROWS + 3
NUM_TOKENS_KNOWN = 290
VOCAB_SIZE = 300  # two chunks of the sampler's sums, the second not full
MODES: list[oracle.Mode] = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]

_sample = jax.jit(sample, static_argnames=("num_tokens_known", "num_alternatives", "logprobs_mode"))


class Asked(NamedTuple):
    """One row of a batch: its logits of the known ids, what it asks, its seed."""

    kind: str
    scale: float
    logits_seed: int
    num_tokens_known: int
    row: Row
    seed: int

    @property
    def logits(self) -> np.ndarray:
        return make_logits(*self[:4])

    @property
    def acceptable(self) -> set[int]:
        position = len(self.row.prompt_token_ids) + len(self.row.output_token_ids)
        numbers = functools.partial(naive.exponentials, self.seed, position)
        return oracle.acceptable(self.logits, self.row, numbers)


def make_logits(kind: str, scale: float, seed: int, num_tokens: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    logits = random.standard_normal(num_tokens) * scale
    if kind == "tied":
        logits = np.round(logits)
    if kind == "excluded":
        logits = np.where(random.random(num_tokens) < 0.8, -np.inf, logits)
    if kind == "one":
        logits = np.where(np.arange(num_tokens) == random.integers(num_tokens), logits, -np.inf)
    return logits.astype(np.float32) + np.float32(0)  # no -0: it ranks below 0 until it is edited


def pad(logits: np.ndarray, vocab_size: int) -> np.ndarray:
    """Padding of the vocabulary that would win every draw and spoil every sum."""
    padding = np.tile([1e4, np.nan, np.inf], vocab_size)[: vocab_size - logits.shape[1]]
    return np.hstack([logits, np.tile(padding, (len(logits), 1))]).astype(np.float32)


def run(
    batch: Sequence[Asked],
    *,
    mode: oracle.Mode = "processed_logits",
    lines: Sequence[int] = range(NUM_LINES),
    num_rows: int = NUM_ROWS,
    vocab_size: int = VOCAB_SIZE,
    num_alternatives: int = VOCAB_SIZE,
    num_devices: int = 1,
) -> Sampled:
    """Samples a batch by the first step of new requests, in these lines of the state."""
    steps = Steps(num_rows=num_rows, num_lines=NUM_LINES, vocab_size=vocab_size)
    return run_step(
        steps,
        make_requests(batch, lines),
        batch,
        mode=mode,
        num_alternatives=num_alternatives,
        num_devices=num_devices,
    )


def make_requests(batch: Sequence[Asked], lines: Sequence[int]) -> list[Request]:
    return [
        make_request(asked.row, seed=asked.seed, line=line, num_logprobs=5)
        for asked, line in zip(batch, lines, strict=False)
    ]


def run_step(
    steps: Steps,
    requests: Sequence[Request],
    batch: Sequence[Asked],
    *,
    mode: oracle.Mode = "processed_logits",
    num_alternatives: int = VOCAB_SIZE,
    num_devices: int = 1,
    samples: bool = True,
) -> Sampled:
    """Samples one step of requests; of a batch that is not full, the last rows are padding."""
    sampling = steps.build(requests, samples=samples)
    num_known = len(batch[0].logits)
    vocab_size = steps.state.counts.shape[1]
    logits = np.zeros((steps.bucket.num_rows, num_known), np.float32)
    logits[: len(batch)] = [asked.logits for asked in batch]
    logits, state = pad(logits, vocab_size), steps.state
    if num_devices > 1:
        mesh = Mesh(np.array(jax.devices()[:num_devices]), "x")
        sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
        logits, state = jax.device_put((logits, state), sharding)
    sampled = _sample(
        logits,
        sampling,
        state,
        num_tokens_known=num_known,
        num_alternatives=min(num_alternatives, vocab_size),
        logprobs_mode=mode,
    )
    return jax.tree.map(np.asarray, sampled)


def floats(low: float, high: float, **options: bool) -> st.SearchStrategy[float]:
    """What float32 holds; subnormal numbers are 0 on the device."""
    low, high = float(np.float32(low)), float(np.float32(high))
    return st.floats(low, high, width=32, allow_subnormal=False, **options)


def asked_values(name: str, n: int, prompt: list[int], output: list[int]) -> st.SearchStrategy[Any]:
    """What a field may hold, with `n` known ids, after a prompt and an answer so far."""
    ids = st.integers(0, n - 1)
    match name:
        case "temperature":
            return st.sampled_from([0.0, 1e-6, 2e-5, 1e-3, 0.05]) | floats(0.25, 2)
        case "top_k":
            return st.sampled_from([1, 2, 3, 5, n - 1, n, n + 7, 2**40])
        case "top_p":
            return st.sampled_from([1e-30, 0.5, 0.999999]) | floats(0, 1, exclude_min=True)
        case "min_p":
            return st.sampled_from([1e-30, 1e-3, 0.5, 1.0]) | floats(0, 1)
        case "presence_penalty" | "frequency_penalty":
            return floats(-2, 2)
        case "repetition_penalty":
            return floats(0.1, 10)
        case "logit_bias":
            return st.dictionaries(ids, floats(-100, 100) | floats(-3, 3), min_size=1, max_size=8)
        case "allowed_token_ids":
            return st.lists(ids, min_size=1, max_size=12, unique=True)
        case "bad_words":
            # Half of them go on where the answer ends; some begin in the prompt and do not count.
            tail = [*prompt, *output][-3:]
            before = st.integers(0, len(tail)).map(lambda start: tail[start:])
            word = st.builds(lambda before, last: [*before, last], before, ids)
            return st.lists(word | st.lists(ids, min_size=1, max_size=3), min_size=1, max_size=5)
        case "min_tokens":
            return st.integers(0, len(output) + 2)
    raise AssertionError(name)


FIELDS = [
    field.name
    for field in dataclasses.fields(Row)
    if field.name not in ("prompt_token_ids", "output_token_ids", "end_token_ids")
]


@st.composite
def rows(draw, n: int, fields: Sequence[str] | None = None) -> Row:
    """A row that asks for some fields, or exactly the given ones."""
    few = st.integers(0, min(n, 6) - 1)  # so that ids come more than once
    ids = st.lists(few | st.integers(0, n - 1), max_size=12)
    prompt, output = draw(ids.filter(bool)), draw(ids)
    if fields is None:
        fields = draw(st.lists(st.sampled_from(FIELDS), unique=True, max_size=len(FIELDS)))
    asked = {name: draw(asked_values(name, n, prompt, output)) for name in fields}
    end_token_ids = draw(st.lists(few, max_size=3))
    return Row(
        prompt_token_ids=prompt, output_token_ids=output, end_token_ids=end_token_ids, **asked
    )


def batches(
    n: int = NUM_TOKENS_KNOWN, fields: Sequence[str] | None = None
) -> st.SearchStrategy[list[Asked]]:
    asked = st.builds(
        Asked,
        kind=st.sampled_from(["plain", "tied", "excluded", "one"]),
        scale=st.sampled_from([3.0, 2.0, 1.0, 0.0, 1e-3, 1e-30, 1e2, 1e4, 1e30]),
        logits_seed=st.integers(0, 2**32 - 1),
        num_tokens_known=st.just(n),
        row=rows(n, fields),
        seed=st.integers(0, 2**64 - 1),
    )
    return st.lists(asked, min_size=1, max_size=NUM_ROWS)


def assert_right(batch: Sequence[Asked], sampled: Sampled, mode: oracle.Mode) -> None:
    """Asserts that tokens and log-probabilities are the oracle's."""
    for index, asked in enumerate(batch):
        token_id = int(sampled.token_ids[index])
        assert token_id in asked.acceptable, (token_id, asked)
        if token_id == NO_TOKEN:
            continue
        low, high = oracle.bounds(asked.logits, asked.row, mode)
        logprob, rank, top_ids, top_logprobs = (part[index] for part in sampled.logprobs)
        assert low[token_id] <= logprob <= high[token_id], (token_id, logprob, asked)
        is_other = np.arange(len(low)) != token_id
        least_rank = 1 + np.sum(is_other & (low > high[token_id]))
        greatest_rank = 1 + np.sum(is_other & (high > low[token_id]))
        assert least_rank <= rank <= greatest_rank, (rank, least_rank, greatest_rank, asked)
        assert_alternatives_are_best(top_ids, top_logprobs, low, high)


def assert_alternatives_are_best(
    top_ids: np.ndarray, top_logprobs: np.ndarray, low: np.ndarray, high: np.ndarray
) -> None:
    assert len(set(top_ids.tolist())) == len(top_ids)
    assert (top_logprobs[1:] <= top_logprobs[:-1]).all()
    is_known = top_ids < len(low)
    assert np.isneginf(top_logprobs[~is_known]).all()
    ids, reported = top_ids[is_known], top_logprobs[is_known]
    assert ((low[ids] <= reported) & (reported <= high[ids])).all()
    left_out = np.setdiff1d(np.arange(len(low)), ids)
    assert (low[left_out] <= top_logprobs[-1]).all()


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_mixed_batch_is_sampled_and_reported_as_by_the_oracle(mode, data):
    batch = data.draw(batches())
    lines = data.draw(st.permutations(range(NUM_LINES)))
    sampled = run(batch, mode=mode, lines=lines)
    assert_right(batch, sampled, mode)


@pytest.mark.parametrize("field", FIELDS)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_field_alone_does_what_it_says(field, data):
    batch = data.draw(batches(fields=[field]))
    sampled = run(batch)
    assert_right(batch, sampled, "processed_logits")


@pytest.mark.parametrize("vocab_size", [2, 256, 257, 1024])
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_vocabulary_may_have_any_size(vocab_size, data):
    batch = data.draw(batches(vocab_size))
    mode = "processed_logprobs"
    sampled = run(batch, mode=mode, vocab_size=vocab_size, num_alternatives=5)
    assert_right(batch, sampled, mode)


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_answer_is_the_same_alone_in_any_row_and_with_more_padding(data):
    batch = data.draw(batches())
    lines = data.draw(st.permutations(range(NUM_LINES)))
    places = data.draw(st.permutations(range(len(batch))))
    expected = run(batch)
    moved = run([batch[place] for place in places], lines=lines)
    padded = run(batch, vocab_size=520)
    for index, asked in enumerate(batch):
        alone = run([asked], num_rows=1)
        assert_same(alone, 0, expected, index)
        assert_same(moved, places.index(index), expected, index)
        assert_same(padded, index, expected, index)


def assert_same(sampled: Sampled, index: int, expected: Sampled, expected_index: int) -> None:
    """Asserts that two rows hold the same token and report the same of it."""
    for part, expected_part in zip(
        jax.tree.leaves((sampled.token_ids, sampled.logprobs)),
        jax.tree.leaves((expected.token_ids, expected.logprobs)),
        strict=True,
    ):
        np.testing.assert_array_equal(part[index], expected_part[expected_index])


@pytest.mark.parametrize("num_devices", [2, 4])
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_answer_is_right_with_the_vocabulary_over_several_devices(num_devices, data):
    batch = data.draw(batches())
    assert_right(batch, run(batch, num_devices=num_devices), "processed_logits")


def test_nothing_is_chosen_where_every_id_is_excluded():
    everything_banned = [
        Row(prompt_token_ids=[1], allowed_token_ids=[7], bad_words=[[7]]),
        Row(prompt_token_ids=[1], allowed_token_ids=[7], bad_words=[[7]], temperature=0.0),
        Row(prompt_token_ids=[1], allowed_token_ids=[7], min_tokens=1, end_token_ids=[7]),
        Row(prompt_token_ids=[1], allowed_token_ids=[7], bad_words=[[7]], top_p=0.5, top_k=2),
    ]
    batch = [Asked("plain", 3.0, 0, NUM_TOKENS_KNOWN, row, 5) for row in everything_banned]
    batch.append(Asked("plain", 3.0, 0, NUM_TOKENS_KNOWN, Row(prompt_token_ids=[1]), 5))
    for mode in MODES:
        sampled = run(batch, mode=mode)
        assert sampled.token_ids[:4].tolist() == [NO_TOKEN] * 4
        assert_right(batch, sampled, mode)


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_state_follows_the_answer_from_step_to_step(data):
    """Counts are kept on the device, biases are rewritten when the answer makes them change."""
    n = 12  # so that bad words and repetitions come about
    batch = data.draw(batches(n))
    steps = Steps(num_rows=NUM_ROWS, num_lines=NUM_LINES, vocab_size=16)
    requests = make_requests(batch, data.draw(st.permutations(range(NUM_LINES))))
    for step in range(6):
        # Not every request has a share of every step.
        indices = data.draw(st.lists(st.sampled_from(range(len(batch))), unique=True, min_size=1))
        now = [
            batch[index]._replace(
                logits_seed=step,
                row=dataclasses.replace(
                    batch[index].row, output_token_ids=requests[index].output_token_ids
                ),
            )
            for index in indices
        ]
        sampled = run_step(steps, [requests[index] for index in indices], now)
        assert_right(now, sampled, "processed_logits")
        steps.state = steps.state._replace(counts=sampled.counts)
        for index, token_id in zip(indices, sampled.token_ids, strict=False):
            if token_id == NO_TOKEN:  # the engine ends such a request
                return
            requests[index].token_ids.append(int(token_id))


@pytest.mark.parametrize("samples", [True, False])
def test_only_ids_that_an_answer_gets_are_counted(samples):
    row = Row(prompt_token_ids=[1], output_token_ids=[2], frequency_penalty=0.5, temperature=0.0)
    plain = Row(prompt_token_ids=[1], temperature=0.0)
    batch = [Asked("plain", 3.0, 0, NUM_TOKENS_KNOWN, asked, 5) for asked in (row, plain)]
    steps = Steps(num_rows=NUM_ROWS, num_lines=NUM_LINES, vocab_size=VOCAB_SIZE)
    sampled = run_step(steps, make_requests(batch, [4, 2]), batch, samples=samples)
    expected = steps.state.counts.copy()
    expected[4, sampled.token_ids[0]] += samples  # and nothing for the row without penalties
    np.testing.assert_array_equal(sampled.counts, expected)


def test_oracle_is_seldom_in_doubt():
    """What the other tests forgive is little: most rows have one right token only."""
    numbers = []

    @settings(deadline=None, max_examples=300, derandomize=True, database=None)
    @given(batch=batches())
    def count(batch):
        numbers.extend(len(asked.acceptable) for asked in batch)

    count()
    assert np.mean(np.array(numbers) == 1) > 0.95
