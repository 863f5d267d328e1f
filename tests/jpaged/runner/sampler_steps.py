"""The way of a real step from `sampling_oracle.Row`s to the sampler's arguments."""

from collections.abc import Sequence

import numpy as np

from jpaged.request import Request, ScheduledRequest
from jpaged.runner.sampling_state import SamplingState
from jpaged.runner.step_inputs import (
    Bucket,
    BucketTable,
    SamplingInputs,
    StepInputsBuilder,
    StepLayout,
)
from jpaged.sampling_params import SamplingParams
from tests.jpaged.runner.sampling_oracle import Row


def make_request(row: Row, *, seed: int, line: int, num_logprobs: int | None = None) -> Request:
    """What `LLM` and `Scheduler` would make of a row, in line `line` of the sampler's state."""
    return Request(
        request_id=str(line),
        prompt_token_ids=list(row.prompt_token_ids),
        token_ids=[*row.prompt_token_ids, *row.output_token_ids],
        params=SamplingParams(
            max_tokens=None,
            min_tokens=row.min_tokens,
            temperature=row.temperature,
            top_k=row.top_k,
            top_p=row.top_p,
            min_p=row.min_p,
            presence_penalty=row.presence_penalty,
            frequency_penalty=row.frequency_penalty,
            repetition_penalty=row.repetition_penalty,
            logit_bias=row.logit_bias,
            allowed_token_ids=row.allowed_token_ids,
            bad_words=[str(word) for word in row.bad_words],
            logprobs=num_logprobs,
        ),
        end_token_ids=frozenset(row.end_token_ids),
        bad_words=tuple(map(tuple, row.bad_words)),
        seed=seed,
        row=line,
    )


class Steps:
    """What a model runner does between the scheduler and `sample`.

    Lines of the state that no request asked for hold NaN or nonsense.

    Attributes:
        state: To be replaced with what a step returns.
    """

    def __init__(self, *, num_rows: int, num_lines: int, vocab_size: int):
        self.bucket = Bucket(num_rows, num_rows)
        self.layout = StepLayout(max_blocks=1)
        self.builder = StepInputsBuilder(
            layout=self.layout,
            buckets=BucketTable(
                max_num_seqs=num_lines, max_num_batched_tokens=num_lines, decode_rows=(num_rows,)
            ),
            block_size=256,
            max_num_seqs=num_lines,
            vocab_size=vocab_size,
        )
        self.state = SamplingState(
            counts=np.full((num_lines, vocab_size), 2**30 + 5, np.int32),
            biases=np.full((num_lines, vocab_size), np.nan, np.float32),
        )

    def build(self, requests: Sequence[Request], *, samples: bool = True) -> SamplingInputs:
        """The step that computes each request's last token; writes the lines that it needs."""
        scheduled = [
            ScheduledRequest(request, request.num_tokens - 1, 1, samples) for request in requests
        ]
        block_tables = np.zeros((1, len(self.state.counts), 1), np.int32)
        bucket, buffer = self.builder.build(scheduled, block_tables)
        assert bucket == self.bucket
        self.state = SamplingState(*map(np.array, self.state))
        for name, line, values in self.builder.state_lines:
            getattr(self.state, name)[line] = values
        self.builder.state_lines.clear()
        return self.layout.unpack(buffer.copy(), bucket).sampling
