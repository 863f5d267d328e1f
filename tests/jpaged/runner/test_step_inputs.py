import itertools

import jax
import numpy as np
import pytest

from jpaged.request import Request, ScheduledRequest
from jpaged.runner.sampling_state import IN_PROMPT
from jpaged.runner.step_inputs import (
    Bucket,
    BucketTable,
    RowFlag,
    StepInputsBuilder,
    StepLayout,
)
from jpaged.sampling_params import SamplingParams

BLOCK_SIZE = 4
MAX_BLOCKS = 6
LAYOUT = StepLayout(MAX_BLOCKS)
VOCAB_SIZE = 400


def table(max_num_seqs: int, max_num_batched_tokens: int, **ladders) -> BucketTable:
    return BucketTable(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **ladders
    )


LADDERS = [
    {},
    {"decode_rows": (2, 3, 8), "mixed_tokens": (5, 16, 24)},
    {"decode_rows": (100,), "mixed_tokens": (1, 2, 1000)},
    {"decode_rows": (), "mixed_tokens": ()},
]


@pytest.mark.parametrize("ladders", LADDERS)
@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 3, 5, 16, 17, 33, 64, 65, 90])
def test_every_step_within_the_limits_has_the_smallest_bucket_that_takes_it(
    max_num_batched_tokens, ladders
):
    for max_num_seqs in range(1, 17):
        buckets = table(max_num_seqs, max_num_batched_tokens, **ladders)
        of_kind = {
            is_decode: [bucket for bucket in sorted(buckets) if bucket.is_decode == is_decode]
            for is_decode in (True, False)
        }
        for num_tokens in range(1, max_num_batched_tokens + 1):
            for num_rows in range(1, min(max_num_seqs, num_tokens) + 1):
                smallest = next(
                    bucket
                    for bucket in of_kind[num_tokens == num_rows]
                    if bucket.num_tokens >= num_tokens and bucket.num_rows >= num_rows
                )
                found = buckets.find(num_tokens, num_rows)
                assert found == smallest, (max_num_seqs, num_tokens, num_rows)


@pytest.mark.parametrize("ladders", LADDERS)
@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens"), [(1, 1), (16, 1), (1, 2), (16, 16), (7, 33), (3, 3)]
)
def test_no_bucket_goes_beyond_the_limits_and_names_are_unique(
    max_num_seqs, max_num_batched_tokens, ladders
):
    buckets = table(max_num_seqs, max_num_batched_tokens, **ladders)
    names = list(buckets)
    assert len(set(names)) == len(names)
    assert names == [*sorted(buckets.decode), *sorted(buckets.mixed)]
    for bucket in names:
        assert 1 <= bucket.num_rows <= max_num_seqs
        assert bucket.num_rows <= bucket.num_tokens <= max_num_batched_tokens
    assert all(bucket.is_decode for bucket in buckets.decode)
    assert not any(bucket.is_decode for bucket in buckets.mixed)
    assert buckets.mixed_tokens == tuple(bucket.num_tokens for bucket in buckets.mixed)


def test_given_ladders_are_used():
    buckets = table(8, 40, decode_rows=(2, 5), mixed_tokens=(20,))
    assert buckets.decode == [(2, 2), (5, 5), (8, 8)]
    assert buckets.mixed_tokens == (20, 40)


class Step:
    """A step under construction: requests with rows and blocks, and what is scheduled of them."""

    def __init__(self, builder: StepInputsBuilder, max_num_seqs: int = 4):
        self.builder = builder
        self.block_tables = np.zeros((1, max_num_seqs, MAX_BLOCKS), np.int32)
        self.scheduled: list[ScheduledRequest] = []
        self._new_block_ids = itertools.count(1)

    def add(self, row: int, token_ids: list[int], start: int, num_tokens: int, **params) -> Request:
        seed = params.pop("seed", 0)
        request = Request(
            request_id=f"in row {row}",
            prompt_token_ids=token_ids,
            params=SamplingParams(**params),
            seed=seed,
            row=row,
        )
        num_blocks = -(-(start + num_tokens) // BLOCK_SIZE)
        self.block_tables[0, row, :num_blocks] = [
            next(self._new_block_ids) for _ in range(num_blocks)
        ]
        samples = start + num_tokens == len(token_ids)
        self.scheduled.append(ScheduledRequest(request, start, num_tokens, samples))
        return request

    def build(self):
        bucket, buffer = self.builder.build(self.scheduled, self.block_tables)
        assert buffer.dtype == np.int32 and buffer.shape == (LAYOUT.buffer_size(bucket),)
        return bucket, buffer, LAYOUT.unpack(buffer, bucket)


@pytest.fixture
def builder() -> StepInputsBuilder:
    buckets = table(4, 16, decode_rows=(2,), mixed_tokens=(8,))
    return StepInputsBuilder(
        layout=LAYOUT, buckets=buckets, block_size=BLOCK_SIZE, max_num_seqs=4, vocab_size=VOCAB_SIZE
    )


def test_mixed_step_is_laid_out_row_by_row_and_padded(builder):
    step = Step(builder)
    step.add(2, list(range(100, 109)), 8, 1)  # its ninth token, in its third block
    step.add(0, list(range(200, 210)), 3, 5)  # a chunk over three blocks, not the last
    step.add(3, list(range(300, 304)), 0, 4)  # a whole prompt
    bucket, _, inputs = step.build()
    assert bucket == (16, 4)
    [attention], padding = inputs.attention, [0] * 6
    np.testing.assert_array_equal(
        inputs.token_ids, [108, *range(203, 208), *range(300, 304), *padding]
    )
    np.testing.assert_array_equal(attention.positions, [8, *range(3, 8), *range(4), *padding])
    # Blocks: row 2 has 1 to 3, row 0 has 4 and 5, row 3 has 6.
    np.testing.assert_array_equal(
        attention.slot_mapping, [12, 19, 20, 21, 22, 23, 24, 25, 26, 27, *padding]
    )
    np.testing.assert_array_equal(attention.query_start_loc, [0, 1, 6, 10, 10])
    np.testing.assert_array_equal(attention.seq_lens, [9, 8, 4, 0])
    np.testing.assert_array_equal(
        attention.block_tables,
        [[1, 2, 3, 0, 0, 0], [4, 5, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]],
    )
    np.testing.assert_array_equal(inputs.logits_indices, [0, 5, 9, 0])
    np.testing.assert_array_equal(inputs.sampling.positions, [9, 8, 4, 0])
    np.testing.assert_array_equal(inputs.sampling.samples, [1, 0, 1, 0])
    np.testing.assert_array_equal(inputs.sampling.rows, [2, 0, 3, 0])
    np.testing.assert_array_equal(inputs.sampling.num_prompt_tokens, [9, 10, 4, 0])


def test_decode_step_is_one_token_per_row(builder):
    step = Step(builder)
    step.add(1, list(range(100, 105)), 4, 1)
    step.add(3, [200], 0, 1)
    step.add(0, list(range(300, 304)), 3, 1)
    bucket, _, inputs = step.build()
    assert bucket == (4, 4) and bucket.is_decode
    np.testing.assert_array_equal(inputs.token_ids, [104, 200, 303, 0])
    np.testing.assert_array_equal(inputs.attention[0].positions, [4, 0, 3, 0])
    np.testing.assert_array_equal(inputs.attention[0].slot_mapping, [8, 12, 19, 0])
    np.testing.assert_array_equal(inputs.attention[0].query_start_loc, [0, 1, 2, 3, 3])
    np.testing.assert_array_equal(inputs.attention[0].seq_lens, [5, 1, 4, 0])
    np.testing.assert_array_equal(inputs.logits_indices, [0, 1, 2, 0])


def test_device_cuts_the_same_arrays_off_the_buffer_as_the_host(builder):
    step = Step(builder)
    step.add(0, [7] * 6, 2, 4, temperature=0.7, top_p=0.9, top_k=5, seed=2**63 + 5, logprobs=0)
    step.add(1, [8] * 3, 0, 3, temperature=1e-45)
    bucket, buffer, on_host = step.build()
    on_device = jax.jit(LAYOUT.unpack, static_argnums=1)(buffer, bucket)
    host_leaves, host_tree = jax.tree.flatten(on_host)
    device_leaves, device_tree = jax.tree.flatten(on_device)
    assert host_tree == device_tree
    for host, device in zip(host_leaves, device_leaves, strict=True):
        assert host.dtype == device.dtype
        np.testing.assert_array_equal(host.view(np.int32), np.asarray(device).view(np.int32))
    assert sum(leaf.size for leaf in host_leaves) == buffer.size


def test_sampling_parameters_stand_in_the_requests_row_and_padding_is_greedy(builder):
    step = Step(builder)
    seed = 0xFEDCBA9876543210
    step.add(3, [1, 2], 1, 1, temperature=0.5, top_k=7, top_p=0.25, seed=seed, logprobs=0)
    step.add(1, [1, 2], 1, 1, temperature=0.0, top_k=-1)
    step.add(0, [1, 2], 1, 1, temperature=0.9, top_k=1)  # the best of one is greedy
    _, _, inputs = step.build()
    sampling = inputs.sampling
    np.testing.assert_array_equal(sampling.temperature, np.float32([0.5, 0.0, 0.0, 0.0]))
    np.testing.assert_array_equal(sampling.top_k[:2], [7, 0])
    np.testing.assert_array_equal(sampling.top_p[:2], np.float32([0.25, 1.0]))
    np.testing.assert_array_equal(
        sampling.seed[:, 0].view(np.uint32), np.uint32([0x76543210, 0xFEDCBA98])
    )
    np.testing.assert_array_equal(sampling.flags, [RowFlag.LOGPROBS, 0, 0, 0])


def test_recycled_row_takes_the_sampling_parameters_of_its_new_owner(builder):
    first = Step(builder)
    first.add(0, [1, 2], 1, 1, temperature=0.5, top_k=7, seed=1, logprobs=0)
    first.build()
    second = Step(builder)
    second.add(0, [1, 2], 1, 1, temperature=0.8, top_p=0.5, seed=2)
    sampling = second.build()[2].sampling
    assert sampling.temperature[0] == np.float32(0.8) and sampling.top_p[0] == np.float32(0.5)
    assert sampling.top_k[0] == 0 and sampling.seed[0, 0] == 2
    assert sampling.flags[0] == 0
    # The first owner may come back to the same row after a preemption.
    sampling = builder.build(first.scheduled, first.block_tables)
    sampling = LAYOUT.unpack(sampling[1], sampling[0]).sampling
    assert sampling.temperature[0] == np.float32(0.5) and sampling.top_k[0] == 7


FLAGS = [
    ({}, 0),
    ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, 0),
    ({"repetition_penalty": 1.1}, RowFlag.COUNTS),
    ({"presence_penalty": 0.1}, RowFlag.COUNTS),
    ({"frequency_penalty": -0.1}, RowFlag.COUNTS),
    ({"logit_bias": {1: 1.0}}, RowFlag.BIASES),
    ({"allowed_token_ids": [1]}, RowFlag.BIASES),
    ({"bad_words": ["x"]}, RowFlag.BIASES),
    ({"min_tokens": 1}, RowFlag.BIASES),
    ({"logprobs": 0}, RowFlag.LOGPROBS),
    ({"logprobs": 3}, RowFlag.LOGPROBS | RowFlag.ALTERNATIVES),
    ({"logprobs": -1}, RowFlag.LOGPROBS | RowFlag.ALTERNATIVES),
    ({"n": 2, "best_of": 2}, 0),
    ({"n": 2, "best_of": 3}, RowFlag.LOGPROBS),
]


@pytest.mark.parametrize(("params", "flags"), FLAGS)
def test_row_says_what_the_sampler_must_do_for_it(builder, params, flags):
    step = Step(builder)
    step.add(1, [1, 2], 1, 1, **params)
    assert step.build()[2].sampling.flags[0] == flags
    names = {line.name for line in builder.state_lines}
    assert names == {
        name
        for name, flag in (("counts", RowFlag.COUNTS), ("biases", RowFlag.BIASES))
        if flags & flag
    }
    assert {line.row for line in builder.state_lines} <= {1}


def test_state_of_a_row_is_written_when_it_is_claimed_and_when_its_biases_change(builder):
    step = Step(builder)
    params = {"min_tokens": 2, "presence_penalty": 1.0, "logit_bias": {9: 2.0}}
    request = step.add(2, [5, 5, 6], 2, 1, **params)
    request.end_token_ids = frozenset({7})
    step.build()
    lines = {line.name: line.line for line in builder.state_lines}
    assert len(builder.state_lines) == 2
    assert {i: c for i, c in enumerate(lines["counts"]) if c} == {5: IN_PROMPT, 6: IN_PROMPT}
    assert {i: b for i, b in enumerate(lines["biases"]) if b} == {7: -np.inf, 9: 2.0}
    builder.state_lines.clear()
    for num_tokens, expected in ((4, []), (5, [{9: 2.0}]), (6, [])):
        request.token_ids.append(8)
        assert request.num_tokens == num_tokens
        step.scheduled[0] = ScheduledRequest(request, num_tokens - 1, 1, True)
        step.block_tables[0, 2, 1] = 20
        step.build()
        assert [
            {i: b for i, b in enumerate(line.line) if b} for line in builder.state_lines
        ] == expected
        builder.state_lines.clear()


def test_step_that_no_bucket_takes_is_our_own_bug(builder):
    with pytest.raises(AssertionError, match="17 tokens of 2"):
        builder.buckets.find(17, 2)
    assert builder.buckets.find(16, 2) == Bucket(16, 4)
