"""From the scheduler's decisions to the arrays of one step, padded to a bucket.

All arrays of a step are views into one int32 buffer, so a step costs one upload. `StepInputs` is
the same on both sides: `allocate` makes the views in NumPy, `unpack` cuts the device's buffer.

**Buckets.** A program is named by `(T, B)`: padded tokens and padded requests. If every request
computes one token, `T = B` is taken from the decode ladder; otherwise the step is *mixed*, with
`B < T`, so the two kinds never share a name.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.request import Request, ScheduledRequest
from pallas_kernels.paged_attention import AttentionInputs


class SamplingInputs(NamedTuple):
    """What each row asks of the sampler; padding rows are greedy.

    Attributes:
        temperature: 0 is greedy.
        top_k: Number of candidates; 0 keeps all.
        top_p: Probability mass of the candidates; 1 keeps all.
        seed: Low and high half of each request's seed.
        positions: Position that the sampled token takes in its request.
        wants_logprobs: 1 where the chosen token's log-probability is asked for.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    seed: Int[Array, "2 B"]
    positions: Int[Array, " B"]
    wants_logprobs: Int[Array, " B"]


class StepInputs(NamedTuple):
    """All that one step reads besides weights and cache.

    Attributes:
        token_ids: Ids to embed; 0 for padding.
        attention: Positions, slots and block tables.
        logits_indices: Token of each row whose next token is sampled (its last); 0 for padding.
        sampling: What each row asks of the sampler.
    """

    token_ids: Int[Array, " T"]
    attention: AttentionInputs
    logits_indices: Int[Array, " B"]
    sampling: SamplingInputs


class Bucket(NamedTuple):
    """The padded shape that names a program."""

    num_tokens: int
    num_rows: int

    @property
    def is_decode(self) -> bool:
        """Whether every row holds one token."""
        return self.num_tokens == self.num_rows


class BucketTable:
    """The ladder of padded shapes, smallest first.

    Attributes:
        decode: Buckets of steps in which every request computes one token.
        mixed: Buckets of all other steps.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_rows: tuple[int, ...] | None = None,
        mixed_tokens: tuple[int, ...] | None = None,
    ):
        """Makes the default ladders, or takes the given ones, cut to the two limits."""
        max_rows = min(max_num_seqs, max_num_batched_tokens)
        if decode_rows is None:
            decode_rows = (1, *(2**i for i in range(2, max_rows.bit_length())))
        self.decode = [Bucket(n, n) for n in _ladder(decode_rows, max_rows)]
        if mixed_tokens is None:
            mixed_tokens = tuple(4**i for i in range(3, 16))
        self.mixed = [
            Bucket(n, min(max_num_seqs, max(n // 4, 1)))
            for n in _ladder(mixed_tokens, max_num_batched_tokens)
            if n > 1
        ]
        if self.mixed:
            # A mixed step of n tokens has at most n - 1 rows, so the last bucket takes any.
            rows = min(max_num_seqs, max_num_batched_tokens - 1)
            self.mixed[-1] = Bucket(max_num_batched_tokens, rows)

    def __iter__(self):
        """Yields every bucket."""
        return iter([*self.decode, *self.mixed])

    @property
    def mixed_tokens(self) -> tuple[int, ...]:
        """Padded token counts of mixed steps, which the scheduler cuts chunks to."""
        return tuple(bucket.num_tokens for bucket in self.mixed)

    def find(self, num_tokens: int, num_rows: int) -> Bucket:
        """The smallest bucket that takes a step of that many tokens and rows."""
        for bucket in self.decode if num_tokens == num_rows else self.mixed:
            if bucket.num_tokens >= num_tokens and bucket.num_rows >= num_rows:
                return bucket
        raise AssertionError(f"no bucket takes {num_tokens} tokens of {num_rows} requests")


def _ladder(steps: tuple[int, ...], limit: int) -> list[int]:
    return [*sorted({n for n in steps if n < limit}), limit]


class _Cursor:
    """Cuts consecutive pieces off a flat buffer."""

    def __init__(self, buffer: Any):
        self.buffer = buffer
        self.start = 0

    def ints(self, *shape: int) -> Any:
        size = math.prod(shape)
        piece = self.buffer[self.start : self.start + size]
        self.start += size
        return piece.reshape(shape)

    def floats(self, *shape: int) -> Any:
        ints = self.ints(*shape)
        if isinstance(ints, np.ndarray):
            return ints.view(np.float32)
        return jax.lax.bitcast_convert_type(ints, jnp.float32)


def unpack(buffer: Any, bucket: Bucket, max_blocks: int) -> StepInputs:
    """Cuts a flat int32 buffer, NumPy or traced, into the inputs of a step."""
    num_tokens, num_rows = bucket
    cut = _Cursor(buffer)
    return StepInputs(
        token_ids=cut.ints(num_tokens),
        attention=AttentionInputs(
            positions=cut.ints(num_tokens),
            slot_mapping=cut.ints(num_tokens),
            query_start_loc=cut.ints(num_rows + 1),
            seq_lens=cut.ints(num_rows),
            block_tables=cut.ints(num_rows, max_blocks),
        ),
        logits_indices=cut.ints(num_rows),
        sampling=SamplingInputs(
            temperature=cut.floats(num_rows),
            top_k=cut.ints(num_rows),
            top_p=cut.floats(num_rows),
            seed=cut.ints(2, num_rows),
            positions=cut.ints(num_rows),
            wants_logprobs=cut.ints(num_rows),
        ),
    )


def buffer_size(bucket: Bucket, max_blocks: int) -> int:
    """Length of the int32 buffer that `unpack` cuts."""
    return 3 * bucket.num_tokens + bucket.num_rows * (10 + max_blocks) + 1


class StepInputsBuilder:
    """Fills the arrays of each step; keeps what does not change while a request holds its row."""

    def __init__(self, *, buckets: BucketTable, block_size: int, max_num_seqs: int):
        """Prepares one line of sampling parameters per block-table row."""
        self.buckets = buckets
        self.block_size = block_size
        self._buffers: dict[Bucket, list[tuple[np.ndarray, StepInputs]]] = {}
        self._owners: list[Request | None] = [None] * max_num_seqs
        self._floats = np.zeros((2, max_num_seqs), np.float32)  # temperature, top_p
        self._ints = np.zeros((4, max_num_seqs), np.int32)  # top_k, seed low and high, logprobs

    def build(
        self, scheduled: list[ScheduledRequest], block_tables: np.ndarray
    ) -> tuple[Bucket, np.ndarray]:
        """Packs one step.

        Args:
            scheduled: The step's requests, in row order.
            block_tables: Block ids by `request.row`, int32 `[max_num_seqs, M]`.

        Returns:
            The bucket and its filled buffer, which belongs to the step until the step after the
            next one is built.
        """
        num_rows = len(scheduled)
        requests = [share[0] for share in scheduled]
        start_list = [share[1] for share in scheduled]
        row_list = [request.row for request in requests]
        if list(map(self._owners.__getitem__, row_list)) != requests:
            for row, request in zip(row_list, requests, strict=True):
                if self._owners[row] is not request:
                    self._claim(row, request)
        rows, starts = np.array([row_list, start_list], np.int32)
        num_tokens = sum([share[2] for share in scheduled])
        if num_tokens == num_rows:
            counts = np.ones(num_rows, np.int32)
            token_ids = [
                request.token_ids[start]
                for request, start in zip(requests, start_list, strict=True)
            ]
        else:
            counts = np.array([share[2] for share in scheduled], np.int32)
            token_ids = [
                token_id
                for request, start, count, _ in scheduled
                for token_id in request.token_ids[start : start + count]
            ]
        bucket = self.buckets.find(num_tokens, num_rows)
        buffer, inputs = self._take_buffer(bucket, block_tables.shape[1])
        attention, sampling = inputs.attention, inputs.sampling

        inputs.token_ids[:num_tokens] = token_ids
        ends = np.cumsum(counts)
        attention.query_start_loc[1 : num_rows + 1] = ends
        attention.query_start_loc[num_rows + 1 :] = num_tokens
        seq_lens = starts + counts
        attention.seq_lens[:num_rows] = seq_lens
        attention.block_tables[:num_rows] = block_tables[rows]
        if num_tokens == num_rows:
            positions, token_rows = starts, rows
        else:
            # Token j of a row stands at start + j: count up overall, shift each row into place.
            positions = np.arange(num_tokens) + np.repeat(seq_lens - ends, counts)
            token_rows = np.repeat(rows, counts)
        attention.positions[:num_tokens] = positions
        blocks, offsets = np.divmod(positions, self.block_size)
        slots = block_tables[token_rows, blocks] * self.block_size + offsets
        attention.slot_mapping[:num_tokens] = slots
        inputs.logits_indices[:num_rows] = ends - 1
        sampling.temperature[:num_rows], sampling.top_p[:num_rows] = self._floats[:, rows]
        ints = self._ints[:, rows]
        sampling.top_k[:num_rows], sampling.wants_logprobs[:num_rows] = ints[0], ints[3]
        sampling.seed[:, :num_rows] = ints[1:3]
        sampling.positions[:num_rows] = seq_lens
        return bucket, buffer

    def _take_buffer(self, bucket: Bucket, max_blocks: int) -> tuple[np.ndarray, StepInputs]:
        """A zeroed buffer of a bucket and its views.

        There are two, taken in turn: a fresh one costs more than filling it, in page faults; and
        an interrupted step may still be reading its own when the next one is built.
        """
        buffers = self._buffers.setdefault(bucket, [])
        if len(buffers) < 2:
            buffer = np.zeros(buffer_size(bucket, max_blocks), np.int32)
            buffers.append((buffer, unpack(buffer, bucket, max_blocks)))
        else:
            buffers.reverse()
            buffers[-1][0].fill(0)
        return buffers[-1]

    def _claim(self, row: int, request: Request) -> None:
        """Writes a request's sampling parameters to the row it was given."""
        params = request.params
        top_k = 0 if params.top_k == -1 else min(params.top_k, 2**31 - 1)
        seed = np.array([request.seed & 0xFFFFFFFF, request.seed >> 32], np.uint32).view(np.int32)
        # What float32 cannot hold means the same as the nearest that it can: a huge temperature
        # makes all tokens alike, a tiny top_p keeps the best one.
        temperature = 0.0 if params.is_greedy else min(params.temperature, 1e30)
        self._floats[:, row] = temperature, max(params.top_p, 1e-30)
        self._ints[:, row] = top_k, *seed, params.logprobs is not None
        self._owners[row] = request  # last: an interrupt before it leaves the row unclaimed
