"""From the scheduler's decisions to the arrays of one step, padded to a bucket.

All arrays of a step are views into one int32 buffer, so a step costs one upload. `StepInputs` is
the same on both sides: `StepLayout.unpack` makes the views in NumPy and cuts the device's buffer.

**Buckets.** A program is named by `(T, B)`: padded tokens and padded requests. If every request
computes one token, `T = B` is taken from the decode ladder; otherwise the step is *mixed*, with
`B < T`, so the two kinds never share a name.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.request import Request, ScheduledRequest
from jpaged.runner.logits_processor import LogitsProcessor
from jpaged.runner.sampling_state import BiasLine, build_counts
from pallas_kernels.paged_attention import AttentionInputs, AttentionPlan, Kernels
from pallas_kernels.paged_attention.plan import cut_arrays, fill_plan, plan_sizes

AnyArray = Any  # NumPy on the host, traced on the device


class RowFlag:
    """Bits of `SamplingInputs.flags`."""

    COUNTS = 1  # penalties, or a processor that may look at the counts
    BIASES = 2
    LOGPROBS = 4
    ALTERNATIVES = 8
    FIRST_PROCESSOR = 16
    EDITS = COUNTS | BIASES  # what changes logits; processors set COUNTS too

    MAX_PROCESSORS = 24

    @classmethod
    def processor(cls, index: int) -> int:
        """The bit that says whether a row asks for the engine's processor of this index."""
        return cls.FIRST_PROCESSOR << index


class SamplingInputs(NamedTuple):
    """What each row asks of the sampler; padding rows are greedy.

    Attributes:
        floats: The numbers that the properties name, and the arguments of logits processors.
        ints: Likewise.
        samples: 1 where the token sampled for the row is the next one of its request.
        rows: Block-table row of each request, where its line of `SamplingState` is.
        positions: Position that the sampled token takes in its request.
    """

    floats: Float[Array, "F B"]
    ints: Int[Array, "I B"]
    samples: Int[Array, " B"]
    rows: Int[Array, " B"]
    positions: Int[Array, " B"]

    @property
    def temperature(self) -> Float[AnyArray, " B"]:
        """0 is greedy."""
        return self.floats[0]

    @property
    def top_p(self) -> Float[AnyArray, " B"]:
        """Probability mass of the candidates; 1 keeps all."""
        return self.floats[1]

    @property
    def min_p(self) -> Float[AnyArray, " B"]:
        """Least probability of a candidate, relative to the best one's."""
        return self.floats[2]

    @property
    def repetition_penalty(self) -> Float[AnyArray, " B"]:
        """1 changes nothing."""
        return self.floats[3]

    @property
    def frequency_penalty(self) -> Float[AnyArray, " B"]:
        """0 changes nothing."""
        return self.floats[4]

    @property
    def presence_penalty(self) -> Float[AnyArray, " B"]:
        """0 changes nothing."""
        return self.floats[5]

    @property
    def arguments(self) -> Float[AnyArray, "A B"]:
        """Of the engine's logits processors, one after the other."""
        return self.floats[_NUM_FLOATS:]

    @property
    def top_k(self) -> Int[AnyArray, " B"]:
        """Number of candidates; 0 keeps all."""
        return self.ints[0]

    @property
    def seed(self) -> Int[AnyArray, "2 B"]:
        """Low and high half of each request's seed."""
        return self.ints[1:3]

    @property
    def flags(self) -> Int[AnyArray, " B"]:
        """Bits of `RowFlag`."""
        return self.ints[3]

    @property
    def num_prompt_tokens(self) -> Int[AnyArray, " B"]:
        """Of each request."""
        return self.ints[4]


_NUM_FLOATS, _NUM_INTS = 6, 5


class StepInputs(NamedTuple):
    """All that one step reads besides weights and cache.

    Attributes:
        token_ids: Ids to embed; 0 for padding.
        attention: Positions, slots and block tables, by KV group; only the last two differ, and
            the work list if the windows do.
        logits_indices: Token of each row whose next token is sampled (its last); 0 for padding.
        sampling: What each row asks of the sampler.
    """

    token_ids: Int[Array, " T"]
    attention: tuple[AttentionInputs, ...]
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


class StepLayout(NamedTuple):
    """What the arrays of a step hold, besides what its bucket says.

    Attributes:
        max_blocks: Blocks of the longest request.
        num_arguments: Of all logits processors.
        kernels: That attend; `None`: the platform's own code.
        windows: Of each KV group; `None`: it has none.
    """

    max_blocks: int
    num_arguments: int = 0
    kernels: Kernels | None = None
    windows: tuple[int | None, ...] = (None,)

    def unpack(self, buffer: Any, bucket: Bucket) -> StepInputs:
        """Cuts a flat int32 buffer, NumPy or traced, into the inputs of a step."""
        (num_tokens, num_rows), num_groups = bucket, len(self.windows)
        cut = _Cursor(buffer)
        token_ids, positions = cut.ints(num_tokens), cut.ints(num_tokens)
        query_start_loc, seq_lens = cut.ints(num_rows + 1), cut.ints(num_rows)
        slot_mapping = cut.ints(num_groups, num_tokens)
        block_tables = cut.ints(num_groups, num_rows, self.max_blocks)
        plans = {window: self._cut_plan(cut, bucket) for window in self.plan_windows}
        return StepInputs(
            token_ids=token_ids,
            attention=tuple(
                AttentionInputs(
                    positions=positions,
                    slot_mapping=slot_mapping[group],
                    query_start_loc=query_start_loc,
                    seq_lens=seq_lens,
                    block_tables=block_tables[group],
                    plan=plans[window],
                )
                for group, window in enumerate(self.windows)
            ),
            logits_indices=cut.ints(num_rows),
            sampling=SamplingInputs(
                floats=cut.floats(_NUM_FLOATS + self.num_arguments, num_rows),
                ints=cut.ints(_NUM_INTS, num_rows),
                samples=cut.ints(num_rows),
                rows=cut.ints(num_rows),
                positions=cut.ints(num_rows),
            ),
        )

    def buffer_size(self, bucket: Bucket) -> int:
        """Length of the int32 buffer that `unpack` cuts."""
        num_groups = len(self.windows)
        per_token = 2 + num_groups
        per_row = (
            3 + num_groups * self.max_blocks + _NUM_FLOATS + self.num_arguments + _NUM_INTS + 3
        )
        size = per_token * bucket.num_tokens + bucket.num_rows * per_row + 1
        if self.kernels is not None and self.kernels.tiling is not None:
            num_ints = plan_sizes(self.kernels.tiling, **bucket._asdict()).num_ints
            size += len(self.plan_windows) * num_ints
        return size

    @property
    def plan_windows(self) -> tuple[int | None, ...]:
        """Groups of the same window share one work list: only their tables differ."""
        return tuple(dict.fromkeys(self.windows))

    def _cut_plan(self, cut: _Cursor, bucket: Bucket) -> AttentionPlan | None:
        if self.kernels is None:
            return None
        if self.kernels.tiling is None:
            return AttentionPlan(self.kernels)
        sizes = plan_sizes(self.kernels.tiling, **bucket._asdict())
        return AttentionPlan(self.kernels, cut_arrays(cut.ints(sizes.num_ints), sizes))


class StateLine(NamedTuple):
    """One line of `SamplingState` that must be written before a step.

    Attributes:
        name: The array, "counts" or "biases".
        row: The line's index.
        line: What it becomes.
    """

    name: str
    row: int
    line: np.ndarray


class StepInputsBuilder:
    """Fills the arrays of each step; keeps what does not change while a request holds its row.

    Attributes:
        state_lines: Lines of the sampler's state to write before the step built last; whoever
            writes one removes it.
    """

    def __init__(
        self,
        *,
        layout: StepLayout,
        buckets: BucketTable,
        block_size: int,
        max_num_seqs: int,
        vocab_size: int,
        processors: Sequence[LogitsProcessor] = (),
    ):
        """Prepares one line of sampling parameters per block-table row."""
        self.buckets = buckets
        self.block_size = block_size
        self.state_lines: list[StateLine] = []
        self._vocab_size = vocab_size
        self._layout = layout
        self._processors = tuple(processors)
        self._buffers: dict[Bucket, list[tuple[np.ndarray, StepInputs]]] = {}
        self._owners: list[Request | None] = [None] * max_num_seqs
        self._floats = np.zeros((_NUM_FLOATS + layout.num_arguments, max_num_seqs), np.float32)
        self._ints = np.zeros((_NUM_INTS, max_num_seqs), np.int32)
        # By row, the biases of its owner that may change from one token to the next.
        self._biases: dict[int, BiasLine] = {}

    def build(
        self, scheduled: list[ScheduledRequest], block_tables: np.ndarray
    ) -> tuple[Bucket, np.ndarray]:
        """Packs one step.

        Args:
            scheduled: The step's requests, in row order.
            block_tables: Block ids by KV group and `request.row`, int32 `[G, max_num_seqs, M]`.

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
        if self._biases:
            self._update_biases(requests)
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
        buffer, inputs = self._take_buffer(bucket)
        attention, sampling = inputs.attention[0], inputs.sampling  # the arrays that all share

        inputs.token_ids[:num_tokens] = token_ids
        ends = np.cumsum(counts)
        attention.query_start_loc[1 : num_rows + 1] = ends
        attention.query_start_loc[num_rows + 1 :] = num_tokens
        seq_lens = starts + counts
        attention.seq_lens[:num_rows] = seq_lens
        if num_tokens == num_rows:
            positions, token_rows = starts, rows
        else:
            # Token j of a row stands at start + j: count up overall, shift each row into place.
            positions = np.arange(num_tokens) + np.repeat(seq_lens - ends, counts)
            token_rows = np.repeat(rows, counts)
        attention.positions[:num_tokens] = positions
        blocks, offsets = np.divmod(positions, self.block_size)
        slots = block_tables[:, token_rows, blocks] * self.block_size + offsets
        for index, group in enumerate(inputs.attention):
            # "clip" keeps NumPy from buffering the result; every row is there.
            taken = np.asarray(group.block_tables)[:num_rows]
            np.take(block_tables[index], rows, axis=0, out=taken, mode="clip")
            group.slot_mapping[:num_tokens] = slots[index]
        for window in self._layout.plan_windows:
            first = inputs.attention[self._layout.windows.index(window)]
            plan = first.plan
            if plan is not None and plan.arrays is not None and plan.kernels.tiling is not None:
                fill_plan(
                    plan.arrays,
                    plan.kernels.tiling,
                    query_start_loc=np.asarray(first.query_start_loc)[: num_rows + 1],
                    seq_lens=seq_lens,
                    block_tables=np.asarray(first.block_tables)[:num_rows],
                    window=window,
                )
        inputs.logits_indices[:num_rows] = ends - 1
        sampling.floats[:, :num_rows] = self._floats[:, rows]
        sampling.ints[:, :num_rows] = self._ints[:, rows]
        sampling.samples[:num_rows] = [share[3] for share in scheduled]
        sampling.rows[:num_rows] = rows
        sampling.positions[:num_rows] = seq_lens
        return bucket, buffer

    def forget_rows(self) -> None:
        """Has every request claim its row again when it is next built."""
        self._owners = [None] * len(self._owners)

    def _take_buffer(self, bucket: Bucket) -> tuple[np.ndarray, StepInputs]:
        """A zeroed buffer of a bucket and its views.

        There are two, taken in turn: a fresh one costs more than filling it, in page faults; and
        an interrupted step may still be reading its own when the next one is built.
        """
        buffers = self._buffers.setdefault(bucket, [])
        if len(buffers) < 2:
            buffer = np.zeros(self._layout.buffer_size(bucket), np.int32)
            buffers.append((buffer, self._layout.unpack(buffer, bucket)))
        else:
            buffers.reverse()
            buffers[-1][0].fill(0)
        return buffers[-1]

    def _claim(self, row: int, request: Request) -> None:
        """Writes a request's sampling parameters to the row it was given."""
        params = request.params
        # What float32 cannot hold means the same as the nearest that it can: a tiny top_p keeps
        # the best token.
        floats = [
            0.0 if params.is_greedy else params.temperature,
            max(params.top_p, 1e-30),
            params.min_p,
            max(params.repetition_penalty, 1e-30),
            params.frequency_penalty,
            params.presence_penalty,
        ]
        flags = 0
        asked = params.extra_args or {}
        for index, processor in enumerate(self._processors):
            floats += asked.get(processor.name, (0.0,) * processor.num_arguments)
            if processor.name in asked:
                flags |= RowFlag.processor(index)
        if params.has_penalties or flags:
            flags |= RowFlag.COUNTS
            line = build_counts(request, self._vocab_size)
            self.state_lines.append(StateLine("counts", row, line))
        self._biases.pop(row, None)
        if params.has_biases:
            flags |= RowFlag.BIASES
            self._biases[row] = BiasLine(request, self._vocab_size)
        if params.num_logprobs is not None:
            flags |= RowFlag.LOGPROBS
        if params.logprobs:
            flags |= RowFlag.ALTERNATIVES
        top_k = 0 if params.top_k == -1 else min(params.top_k, 2**31 - 1)
        seed = np.array([request.seed & 0xFFFFFFFF, request.seed >> 32], np.uint32).view(np.int32)
        self._floats[:, row] = floats
        self._ints[:, row] = top_k, *seed, flags, request.num_prompt_tokens
        self._owners[row] = request  # last: an interrupt before it leaves the row unclaimed

    def _update_biases(self, requests: list[Request]) -> None:
        """Looks at the biases of the step's requests that may have changed."""
        for request in requests:
            biases = self._biases.get(request.row)
            if biases is None:
                continue
            line = biases.update()
            if line is not None:
                self.state_lines.append(StateLine("biases", request.row, line))
            if not biases.may_change:
                del self._biases[request.row]
