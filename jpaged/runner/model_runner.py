"""Runs steps: owns the weight leaves, the KV cache and the compiled programs.

A step is one program, `step(leaves, kv_cache, buffer) -> (kv_cache, sampled)`: forward and
sampling together, the cache donated and updated in place, inputs in one buffer, one read back.
Weights are passed as a flat tuple of arrays and put back into the module inside the trace:
passing the module itself costs 0.9 to 39 ms a call in Python (docs/decisions/001).
"""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.config import ModelConfig
from jpaged.request import ScheduledRequest
from jpaged.runner import kv_cache as kv
from jpaged.runner.compile_plan import CompilePlan
from jpaged.runner.huge_pages import use_huge_pages
from jpaged.runner.sampler import sample
from jpaged.runner.step_inputs import (
    Bucket,
    BucketTable,
    StepInputsBuilder,
    buffer_size,
    unpack,
)

logger = logging.getLogger(__name__)

_COPY = "copy blocks"
_COPY_BATCH = 16


class StepResult(NamedTuple):
    """What a step brought, on the host, one entry per scheduled request.

    Attributes:
        token_ids: Sampled ids.
        logprobs: Their log-probabilities; 0 where the step was not asked for any.
        bucket: The padded shape that ran.
    """

    token_ids: list[int]
    logprobs: list[float]
    bucket: Bucket


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
        self._builder = StepInputsBuilder(
            buckets=buckets, block_size=block_size, max_num_seqs=max_num_seqs
        )
        self._plan = CompilePlan({})

    def plan_programs(self, num_blocks: int) -> None:
        """Names the programs for a pool of `num_blocks` usable blocks."""
        shapes = kv.layer_shapes(self.config, num_blocks=num_blocks, block_size=self.block_size)
        cache = tuple(jax.ShapeDtypeStruct(shape, self.dtype) for shape in shapes)
        leaves = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves)
        pairs = jax.ShapeDtypeStruct((_COPY_BATCH,), jnp.int32)

        def lower(bucket: Bucket):
            size = buffer_size(bucket, self.max_blocks)
            step = jax.jit(partial(self._step, bucket), donate_argnums=1)
            return step.lower(leaves, cache, jax.ShapeDtypeStruct((size,), jnp.int32))

        def lower_copy():
            return jax.jit(kv.copy_blocks, donate_argnums=0).lower(cache, pairs, pairs)

        self._plan = CompilePlan(
            {bucket: partial(lower, bucket) for bucket in self.buckets} | {_COPY: lower_copy}
        )

    def start_compiling(self, buckets: Iterable[Bucket]) -> None:
        """Begins to compile programs, or to load them, in the background."""
        self._plan.start(buckets)

    def compile(
        self, buckets: Iterable[Bucket] | None = None, *, show_progress: bool = False
    ) -> None:
        """Compiles programs, or loads them from the persistent cache.

        Args:
            buckets: Those that are needed; `None`: everything.
            show_progress: Draws a progress bar.
        """
        self._plan.compile(buckets, show_progress=show_progress)

    @property
    def num_programs(self) -> int:
        """Programs that `compile` compiles."""
        return len(self._plan)

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
        use_huge_pages(self.kv_cache, are_written=False)
        use_huge_pages(self.leaves, are_written=True)

    def model(self) -> nnx.Module:
        """The module over the current leaves, for inspection."""
        return self._merge(self.leaves)

    def _merge(self, leaves: tuple[jax.Array, ...]) -> Any:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, leaves))

    def _step(self, bucket: Bucket, leaves, kv_cache, buffer):
        """The traced step; see the module's docstring."""
        model = self._merge(leaves)
        inputs = unpack(buffer, bucket, self.max_blocks)
        hidden, kv_cache = model(
            inputs.token_ids, inputs.attention.positions, kv_cache, inputs.attention
        )
        with jax.named_scope("logits"):
            last = hidden.at[inputs.logits_indices].get(mode="promise_in_bounds")
            logits = model.logits(last)
        with jax.named_scope("sample"):
            num_tokens_known = self.config.num_tokens_known or self.config.vocab_size
            sampled = sample(logits, inputs.sampling, num_tokens_known=num_tokens_known)
        logprob_bits = jax.lax.bitcast_convert_type(sampled.logprobs, jnp.int32)
        return kv_cache, jnp.stack([sampled.token_ids, logprob_bits])

    def build(
        self, scheduled: list[ScheduledRequest], block_tables: np.ndarray
    ) -> tuple[Bucket, np.ndarray]:
        """Packs a step's inputs; see `StepInputsBuilder.build`."""
        return self._builder.build(scheduled, block_tables)

    def execute(self, bucket: Bucket, buffer: np.ndarray, num_rows: int) -> StepResult:
        """Runs one step on inputs from `build` and reads what it sampled."""
        self._plan.compile([bucket])  # does nothing after warm-up
        self.kv_cache, sampled = self._plan[bucket](self.leaves, self.kv_cache, buffer)
        token_ids, logprob_bits = np.asarray(sampled)[:, :num_rows]  # the one blocking read
        logprobs = logprob_bits.view(np.float32)
        return StepResult(token_ids.tolist(), logprobs.tolist(), bucket)

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
        for layer in self.kv_cache:
            layer.delete()
        self.kv_cache, self.leaves, self._plan = (), (), CompilePlan({})
