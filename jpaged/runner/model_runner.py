"""Runs steps: owns the weight leaves, the KV cache and the compiled programs.

A step is one program, `step(leaves, kv_cache, counts, biases, buffer) -> (kv_cache, counts,
results, hidden)`: forward and sampling together, cache and counts donated and updated in place,
inputs in one buffer, one read back. What only some requests ask for are small programs beside it:
to write a line of the sampler's state, to copy blocks, to score prompt tokens by the hidden states
that a step returns.
Weights are passed as a flat tuple of arrays and put back into the module inside the trace:
passing the module itself costs 0.9 to 39 ms a call in Python (docs/decisions/001).
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.config import ModelConfig
from jpaged.request import ScheduledRequest, TokenLogprobs
from jpaged.runner import kv_cache as kv
from jpaged.runner import sampling_state
from jpaged.runner.compile_plan import CompilePlan, compiler_options
from jpaged.runner.huge_pages import use_huge_pages
from jpaged.runner.logits_processor import LogitsProcessor
from jpaged.runner.sampler import Logprobs, find_logprobs, hide_unknown, sample
from jpaged.runner.sampling_state import SamplingState
from jpaged.runner.step_inputs import (
    Bucket,
    BucketTable,
    StepInputsBuilder,
    StepLayout,
)
from jpaged.sampling_params import SamplingParams
from pallas_kernels.paged_attention import Kernels
from pallas_kernels.paged_attention.plan import compile_planner

logger = logging.getLogger(__name__)

_ASKED = ("max_model_len", "num_tokens_known")  # of a config, by the engine and the tokenizer
_COPY = "copy blocks"
_COPY_BATCH = 16
_SCORE_SIZES = (16, 64, 256)  # tokens of a program; on CPUs 256 cost 15 % less each than 64


class StepResult(NamedTuple):
    """What a step brought, on the host, one entry per scheduled request.

    Attributes:
        token_ids: Sampled ids; negative where there is none, as all are excluded.
        logprobs: Their log-probabilities; `None` where none are asked for.
        hidden: The model's output for every token of the step, on the device.
        bucket: The padded shape that ran.
    """

    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs | None]
    hidden: jax.Array
    bucket: Bucket


class PackedResults(NamedTuple):
    """Tokens and their log-probabilities as a program returns them.

    Attributes:
        chosen: Token ids, the bits of their log-probabilities, and their ranks.
        top_ids: As `Logprobs`.
        top_logprobs: As `Logprobs`.
    """

    chosen: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def check_leaves(model: nnx.Module) -> None:
    """Checks that a module's weights are arrays on a device.

    Raises:
        ValueError: Naming the first leaf that is abstract or in NumPy.
    """
    for path, leaf in jax.tree.leaves_with_path(nnx.state(model)):
        if not isinstance(leaf, jax.Array):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} is a {type(leaf).__name__}; put the module's "
                "weights on the device first, as jax.Array"
            )


def with_config(model: nnx.Module, config: ModelConfig) -> nnx.Module:
    """The same module, of the same arrays, with another config."""
    if getattr(model, "config", None) in (None, config):
        return model
    twin: Any = nnx.merge(*nnx.split(model))
    twin.config = config
    return twin


class ModelRunner:
    """One model on one device."""

    def __init__(
        self,
        model: nnx.Module,
        *,
        config: ModelConfig,
        buckets: BucketTable,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        dtype: jnp.dtype,
        max_logprobs: int = 0,
        logprobs_mode: str = "raw_logprobs",
        processors: Sequence[LogitsProcessor] = (),
        kernels: Kernels | None = None,
        platform: str | None = None,
    ):
        """Splits the model and plans its programs; allocates and compiles nothing.

        Args:
            model: A module whose arrays are used as they are, or an abstract one, whose leaves
                `leaves` must then be set to.
            config: The model's shape.
            buckets: The padded shapes of steps.
            max_num_seqs: Rows of the block-table array.
            max_blocks: Blocks of the longest request.
            block_size: Tokens per block.
            dtype: Of the cache.
            max_logprobs: Alternatives' log-probabilities that a request may ask for; -1: all.
            logprobs_mode: As `EngineConfig.logprobs_mode`.
            processors: Traced into every step.
            kernels: That attend; `None`: the platform's own code.
            platform: That programs are compiled for; `None`: that of the default device.
        """
        self._graphdef, state = nnx.split(model)
        leaves, self._treedef = jax.tree.flatten(state)
        self.leaves: tuple[jax.Array, ...] = tuple(leaves)
        self.config = config
        self.buckets = buckets
        self.max_blocks = max_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.kv_cache: kv.KVCache = ()
        self.max_num_seqs = max_num_seqs
        self.sampling_state: SamplingState | None = None
        self.num_tokens_known = config.num_tokens_known or config.vocab_size
        self._num_alternatives = self.num_tokens_known
        if max_logprobs >= 0:
            self._num_alternatives = min(max_logprobs, self.num_tokens_known)
        self._logprobs_mode = logprobs_mode
        self._platform = platform or jax.default_backend()
        self._processors = tuple(processors)
        num_arguments = sum(processor.num_arguments for processor in processors)
        windows = tuple(group.window for group in config.kv_groups)
        self._layout = StepLayout(max_blocks, num_arguments, kernels, windows)
        self._builder = StepInputsBuilder(
            layout=self._layout,
            buckets=buckets,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            vocab_size=config.vocab_size,
            processors=processors,
        )
        self._plan = CompilePlan({})

    def plan_programs(self, num_blocks: int) -> None:
        """Names the programs for a pool of `num_blocks` usable blocks."""
        shapes = kv.layer_shapes(self.config, num_blocks=num_blocks, block_size=self.block_size)
        cache = tuple(jax.ShapeDtypeStruct(shape, self.dtype) for shape in shapes)
        leaves = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves)
        vocab_size, width = self.config.vocab_size, self.config.hidden_size
        state = jax.eval_shape(partial(sampling_state.allocate, self.max_num_seqs, vocab_size))

        def ints(size: int):
            return jax.ShapeDtypeStruct((size,), jnp.int32)

        def lower_step(bucket: Bucket):
            size = self._layout.buffer_size(bucket)
            step = jax.jit(partial(self._step, bucket), donate_argnums=(1, 2))
            return step.lower(leaves, cache, *state, ints(size))

        def lower_copy():
            pairs = ints(_COPY_BATCH)
            return jax.jit(kv.copy_blocks, donate_argnums=0).lower(cache, pairs, pairs)

        def lower_set_line(array: jax.ShapeDtypeStruct):
            line = jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
            row = jax.ShapeDtypeStruct((), jnp.int32)
            return jax.jit(sampling_state.set_line, donate_argnums=0).lower(array, row, line)

        def lower_pick(bucket: Bucket, size: int):
            hidden = jax.ShapeDtypeStruct((bucket.num_tokens, width), self.dtype)
            return jax.jit(_pick).lower(hidden, ints(size))

        def lower_score(size: int):
            hidden = jax.ShapeDtypeStruct((size, width), self.dtype)
            count = jax.ShapeDtypeStruct((), jnp.int32)
            return jax.jit(self._score).lower(leaves, hidden, ints(size), count)

        picks = [(bucket, size) for bucket in self.buckets for size in _score_sizes(bucket)]
        self._plan = CompilePlan(
            {bucket: partial(lower_step, bucket) for bucket in self.buckets}
            | {_COPY: lower_copy}
            | {name: partial(lower_set_line, getattr(state, name)) for name in state._fields}
            | {("pick", *pick): partial(lower_pick, *pick) for pick in picks}
            | {("score", size): partial(lower_score, size) for size in {size for _, size in picks}},
            compiler_options(self._platform),
        )

    def start_compiling(self, buckets: Iterable[Bucket]) -> None:
        """Begins to compile programs, or to load them, in the background."""
        self._plan.start(buckets)

    def compile(
        self,
        buckets: Iterable[Bucket] | None = None,
        params: Iterable[SamplingParams] = (),
        *,
        show_progress: bool = False,
        report: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compiles programs, or loads them from the persistent cache.

        Args:
            buckets: Those that are needed; `None`: everything.
            params: What requests ask for that will run in these buckets.
            show_progress: Draws a progress bar.
            report: Takes how many programs are ready, of how many, each time that changes.
        """
        if self._layout.kernels is not None and self._layout.kernels.tiling is not None:
            compile_planner()
        names: list[Any] | None = None
        if buckets is not None:
            names = list(buckets)
            params = list(params)
            if any(asked.num_samples > 1 for asked in params):
                names.append(_COPY)
            if any(asked.has_penalties or asked.extra_args for asked in params):
                names.append("counts")
            if any(asked.has_biases for asked in params):
                names.append("biases")
            if any(asked.prompt_logprobs is not None for asked in params):
                names += (name for bucket in buckets for name in _score_programs(bucket))
        self._plan.compile(names, show_progress=show_progress, report=report)

    @property
    def num_programs(self) -> int:
        """Programs that `compile` compiles."""
        return len(self._plan)

    def lower(self, bucket: Bucket) -> jax.stages.Lowered:
        """The lowered step of a bucket, anew, for inspection."""
        return self._plan.lower(bucket)

    def program(self, bucket: Bucket) -> jax.stages.Compiled:
        """The compiled step of a bucket, for inspection."""
        return self._plan[bucket]

    def workspace_bytes(self) -> int:
        """Temporary memory that the largest program needs."""
        return self._plan.workspace_bytes()

    def allocate(self, num_blocks: int) -> None:
        """Allocates the KV cache for `num_blocks` usable blocks."""
        self.kv_cache = kv.allocate(
            self.config, num_blocks=num_blocks, block_size=self.block_size, dtype=self.dtype
        )
        self.sampling_state = sampling_state.allocate(self.max_num_seqs, self.config.vocab_size)
        use_huge_pages(self.kv_cache, are_written=False)
        use_huge_pages(self.leaves, are_written=True)

    def model(self) -> nnx.Module:
        """The module over the current leaves, for inspection."""
        return self._merge(self.leaves)

    def _merge(self, leaves: tuple[jax.Array, ...]) -> Any:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, leaves))

    def _step(self, bucket: Bucket, leaves, kv_cache, counts, biases, buffer):
        """The traced step; see the module's docstring."""
        model = self._merge(leaves)
        inputs = self._layout.unpack(buffer, bucket)
        positions = inputs.attention[0].positions
        hidden, kv_cache = model(inputs.token_ids, positions, kv_cache, inputs.attention)
        with jax.named_scope("logits"):
            logits = model.logits(_pick(hidden, inputs.logits_indices))
        with jax.named_scope("sample"):
            sampled = sample(
                logits,
                inputs.sampling,
                SamplingState(counts, biases),
                num_tokens_known=self.num_tokens_known,
                num_alternatives=self._num_alternatives,
                logprobs_mode=self._logprobs_mode,
                processors=self._processors,
            )
        results = _pack(sampled.token_ids, sampled.logprobs)
        return kv_cache, sampled.counts, results, hidden

    def _score(self, leaves, hidden, token_ids, count):
        """The traced score: looks up each token in the distribution that precedes it.

        Alternatives are looked up only if `count` is not 0.
        """
        with jax.named_scope("score"):
            logits = hide_unknown(self._merge(leaves).logits(hidden), self.num_tokens_known)
            logprobs = find_logprobs(
                logits,
                token_ids,
                num_alternatives=self._num_alternatives,
                normalize=True,
                wants_alternatives=count != 0,
            )
        return _pack(token_ids, logprobs)

    def build(
        self, scheduled: list[ScheduledRequest], block_tables: np.ndarray
    ) -> tuple[Bucket, np.ndarray]:
        """Packs a step's inputs; see `StepInputsBuilder.build`."""
        return self._builder.build(scheduled, block_tables)

    def execute(
        self, bucket: Bucket, buffer: np.ndarray, scheduled: Sequence[ScheduledRequest]
    ) -> StepResult:
        """Runs one step on inputs from `build` and reads what it sampled."""
        assert self.sampling_state is not None
        self._plan.compile([bucket])  # does nothing after warm-up
        self._write_state_lines()
        counts, biases = self.sampling_state
        self.kv_cache, counts, results, hidden = self._plan[bucket](
            self.leaves, self.kv_cache, counts, biases, buffer
        )
        self.sampling_state = SamplingState(counts, biases)
        chosen = np.asarray(results.chosen)  # the one blocking read
        asked = [share[0].num_logprobs for share in scheduled]
        return StepResult(
            chosen[0, : len(scheduled)].tolist(),
            _unpack_logprobs(results, asked),
            hidden,
            bucket,
        )

    def _write_state_lines(self) -> None:
        lines = self._builder.state_lines
        while lines:
            name, row, line = lines[0]
            assert self.sampling_state is not None
            self._plan.compile([name])
            array = self._plan[name](getattr(self.sampling_state, name), np.int32(row), line)
            self.sampling_state = self.sampling_state._replace(**{name: array})
            del lines[0]

    def score(
        self,
        result: StepResult,
        indices: Sequence[int],
        token_ids: Sequence[int],
        counts: Sequence[int],
    ) -> list[TokenLogprobs]:
        """Log-probabilities of tokens that follow the given ones of a step.

        Args:
            result: Of the step.
            indices: Which of the step's tokens each is to follow, counted over all requests.
            token_ids: The tokens.
            counts: How many of the most likely ones are wanted beside each; -1: all.
        """
        if not indices:
            return []
        self._plan.compile(_score_programs(result.bucket))
        sizes = _score_sizes(result.bucket)
        pieces: list[tuple[PackedResults, Sequence[int]]] = []
        start = 0
        while start < len(indices):
            size = next((size for size in sizes if start + size >= len(indices)), sizes[-1])
            batch = slice(start, start + size)
            start += size
            pairs = np.zeros((2, size), np.int32)
            num_used = len(indices[batch])
            pairs[0, :num_used], pairs[1, :num_used] = indices[batch], token_ids[batch]
            hidden = self._plan["pick", result.bucket, size](result.hidden, pairs[0])
            most = np.int32(np.abs(counts[batch]).max())
            results = self._plan["score", size](self.leaves, hidden, pairs[1], most)
            pieces.append((results, counts[batch]))
        return [
            entry
            for results, asked in pieces
            for entry in _unpack_logprobs(results, asked)
            if entry is not None
        ]

    def forget_rows(self) -> None:
        """Has the sampler's state written anew, from what requests hold when they are next built.

        For when a step may have run whose tokens nobody got.
        """
        self._builder.forget_rows()

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies blocks, (source, destination) each, before the step that writes them."""
        self._plan.compile([_COPY])
        for start in range(0, len(copies), _COPY_BATCH):
            pairs = np.zeros((2, _COPY_BATCH), np.int32)
            batch = copies[start : start + _COPY_BATCH]
            pairs[:, : len(batch)] = np.array(batch, np.int32).T
            self.kv_cache = self._plan[_COPY](self.kv_cache, *pairs)

    def update_leaves(self, model: nnx.Module) -> None:
        """Takes over another module's arrays, of the same shapes and dtypes, without a copy.

        Raises:
            ValueError: If the modules differ in structure, or a leaf in shape or dtype.
        """
        if not isinstance(model, nnx.Module):
            raise ValueError(f"update_weights: got a {type(model).__name__}; give a Flax module")
        check_leaves(model)
        theirs = getattr(model, "config", None)
        if isinstance(theirs, ModelConfig):
            # What the engine was asked for is no part of the weights.
            asked = {name: getattr(self.config, name) for name in _ASKED}
            model = with_config(model, replace(theirs, **asked))
        graphdef, state = nnx.split(model)
        if graphdef != self._graphdef:
            raise ValueError("update_weights: the module's structure differs from the engine's")
        leaves = jax.tree.leaves(state)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
        for path, old, new in zip(paths, self.leaves, leaves, strict=True):
            if old.shape != new.shape or old.dtype != new.dtype:
                raise ValueError(
                    f"update_weights: leaf {path} is {new.dtype}{list(new.shape)}; "
                    f"it must be {old.dtype}{list(old.shape)}"
                )
        self.leaves = tuple(leaves)

    def close(self) -> None:
        """Frees the cache and lets go of the weights, which their owner may still hold."""
        for array in (*self.kv_cache, *(self.sampling_state or ())):
            array.delete()
        self.kv_cache, self.leaves, self._plan = (), (), CompilePlan({})
        self.sampling_state = None

    @property
    def has_lost_state(self) -> bool:
        """Whether cache or sampler state were given to a program that did not give them back."""
        return any(array.is_deleted() for array in (*self.kv_cache, *(self.sampling_state or ())))


def _score_sizes(bucket: Bucket) -> list[int]:
    """How many of a bucket's tokens one program may score, ascending."""
    return [size for size in _SCORE_SIZES if size <= max(bucket.num_tokens, _SCORE_SIZES[0])]


def _score_programs(bucket: Bucket) -> list[tuple[Any, ...]]:
    """Names of the programs that score tokens of a bucket."""
    sizes = _score_sizes(bucket)
    return [*(("pick", bucket, size) for size in sizes), *(("score", size) for size in sizes)]


def _pick(hidden, indices):
    """Rows of a step's hidden states."""
    return hidden.at[indices].get(mode="promise_in_bounds")


def _pack(token_ids, logprobs: Logprobs) -> PackedResults:
    bits = jax.lax.bitcast_convert_type(logprobs.logprobs, jnp.int32)
    chosen = jnp.stack([token_ids, bits, logprobs.ranks])
    return PackedResults(chosen, logprobs.top_ids, logprobs.top_logprobs)


def _unpack_logprobs(
    results: PackedResults, asked: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """Reads the log-probabilities of the first rows; entry i of `asked` is their number in row i.

    `None` asks for nothing, 0 for the token's own, -1 for all.
    """
    if asked.count(None) == len(asked):
        return [None] * len(asked)
    chosen = np.asarray(results.chosen)[:, : len(asked)]
    logprobs, ranks = chosen[1].view(np.float32).tolist(), chosen[2].tolist()
    top_ids, top_logprobs = None, None
    unpacked: list[TokenLogprobs | None] = []
    for row, (count, logprob, rank) in enumerate(zip(asked, logprobs, ranks, strict=True)):
        if count is None:
            unpacked.append(None)
        elif count == 0:
            unpacked.append(TokenLogprobs(logprob, rank))
        else:
            if top_ids is None or top_logprobs is None:
                top_ids, top_logprobs = map(np.asarray, (results.top_ids, results.top_logprobs))
            end = count if count > 0 else top_ids.shape[1]
            unpacked.append(
                TokenLogprobs(
                    logprob, rank, top_ids[row, :end].tolist(), top_logprobs[row, :end].tolist()
                )
            )
    return unpacked
