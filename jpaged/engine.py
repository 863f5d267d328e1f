"""The engine: requests in, token ids out, one step at a time.

The only file that knows both the deciding half (`jpaged.core`) and the executing half
(`jpaged.runner`). A step is: the scheduler decides, the runner executes, the scheduler takes the
result. The engine deals in token ids only; text is the business of its callers. It starts no
thread and must be used by one thread at a time.
"""

import contextlib
import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.admission import check_ids, check_params, index_processors
from jpaged.checkpoint import Checkpoint
from jpaged.checkpoint.loader import load_model
from jpaged.config import EngineConfig, ModelConfig
from jpaged.core.kv_cache_manager import KVCacheManager, longest_request
from jpaged.core.scheduler import Scheduler
from jpaged.models.registry import find_family
from jpaged.models.transformer import Transformer
from jpaged.request import NO_LIMIT, NO_TOKEN, FinishReason, Request, SchedulerOutput, StepOutput
from jpaged.runner import kv_cache, sampling_state
from jpaged.runner.compile_plan import CompilationCounter, enable_persistent_cache
from jpaged.runner.logits_processor import LogitsProcessor
from jpaged.runner.memory_plan import plan_num_blocks
from jpaged.runner.model_runner import ModelRunner, StepResult, check_leaves, with_config
from jpaged.runner.step_inputs import Bucket, BucketTable
from jpaged.sampling_params import SamplingParams
from pallas_kernels.paged_attention.choice import Shape as AttentionShape
from pallas_kernels.paged_attention.choice import choose as choose_attention

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineStats:
    """Running totals since the engine was made.

    Attributes:
        steps: Steps executed.
        num_tokens: Tokens computed.
        last_num_tokens: Those of the last step.
        num_padded_tokens: Tokens that the buckets of those steps hold, padding included.
        step_s: Wall time of all steps.
        host_s: Part of it spent in schedule, build and update.
        allocated_slot_s: KV slots that tables held, times seconds.
        used_slot_s: Part of them that held a token, times seconds.
    """

    steps: int = 0
    num_tokens: int = 0
    last_num_tokens: int = 0
    num_padded_tokens: int = 0
    step_s: float = 0.0
    host_s: float = 0.0
    allocated_slot_s: float = 0.0
    used_slot_s: float = 0.0

    @property
    def kv_waste(self) -> float:
        """Allocated but unused KV slots over allocated ones, time-weighted."""
        return 1.0 - self.used_slot_s / self.allocated_slot_s if self.allocated_slot_s else 0.0

    @property
    def padding_share(self) -> float:
        """Padding tokens over all tokens that steps computed."""
        padded = self.num_padded_tokens
        return 1.0 - self.num_tokens / padded if padded else 0.0


class Engine:
    """Continuous batching over a paged KV cache, for one model on one device.

    Attributes:
        model_config: The model's shape.
        max_model_len: Prompt and answer of one request together, at most.
        num_blocks: KV blocks that requests share.
        scheduler: Decides each step.
        kv_cache_manager: Owns the blocks; with the scheduler, where counters for metrics are.
        runner: Executes each step.
        stats: Running totals.
        last_bucket: The padded shape of the last step.
    """

    def __init__(
        self,
        model: nnx.Module,
        config: EngineConfig | None = None,
        *,
        model_config: ModelConfig | None = None,
        load: Callable[[nnx.Module], nnx.Module] | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
    ):
        """Plans memory and programs and allocates the KV cache.

        Args:
            model: A module of `jpaged.models`; its arrays are used as they are, not copied.
            config: Limits and choices; `None`: the defaults.
            model_config: Overrides `model.config`.
            load: Fills `model`, which is then an abstract one. The programs that any prompt needs
                compile meanwhile; without it nothing is compiled yet.
            logits_processors: Functions that requests may ask for by name, traced into every step.

        Raises:
            ValueError: If the limits contradict each other or do not fit into memory.
        """
        config = config or EngineConfig()
        enable_persistent_cache()
        # Every module of `jpaged.models` has its config.
        model_config = model_config or getattr(model, "config", None)
        if not isinstance(model_config, ModelConfig):
            raise ValueError(f"model is a {type(model).__name__}; give a module of jpaged.models")
        if config.max_model_len is not None:
            # What depends on it (growing rotary embeddings, KV groups) must know it.
            model_config = replace(model_config, max_model_len=config.max_model_len)
            model = with_config(model, model_config)
        self.model_config = model_config
        if load is None:
            check_leaves(model)
        is_cpu = jax.default_backend() == "cpu"
        max_num_seqs = config.max_num_seqs or (16 if is_cpu else 256)
        max_num_batched_tokens = config.max_num_batched_tokens or (256 if is_cpu else 2048)
        leaves = jax.tree.leaves(nnx.state(model))
        self.dtype = leaves[0].dtype
        if config.dtype not in ("auto", str(self.dtype)):
            raise ValueError(
                f"EngineConfig.dtype is {config.dtype!r}; the module's arrays are {self.dtype}: "
                "give 'auto', or convert the module"
            )
        weight_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        buckets = BucketTable(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            decode_rows=config.decode_buckets,
            mixed_tokens=config.mixed_buckets,
        )
        max_model_len = config.max_model_len or self.model_config.max_position_embeddings
        if max_model_len > self.model_config.max_position_embeddings:
            raise ValueError(
                f"EngineConfig.max_model_len is {max_model_len}; the model's positions end at "
                f"{self.model_config.max_position_embeddings}"
            )
        block_size = config.block_size
        self._processors = index_processors(logits_processors, self.model_config.vocab_size)
        self._max_logprobs, self._logprobs_mode = config.max_logprobs, config.logprobs_mode
        kernels, reason = choose_attention(
            AttentionShape(
                num_heads=self.model_config.num_heads,
                num_kv_heads=self.model_config.num_kv_heads,
                head_dim=self.model_config.head_dim,
                block_size=block_size,
                dtype=str(self.dtype),
            ),
            jax.devices()[0],
            backend=config.attention_backend,
        )
        logger.info("%s", reason)
        if kernels is not None and kernels.interpret:
            logger.warning(
                "GPU kernels are interpreted on this CPU: a step may take minutes. That is for "
                "tests; attention_backend 'auto' has the CPU's own"
            )

        def make_runner(max_model_len: int) -> ModelRunner:
            return ModelRunner(
                model,
                config=self.model_config,
                buckets=buckets,
                max_num_seqs=max_num_seqs,
                max_blocks=-(-max_model_len // block_size),
                block_size=block_size,
                dtype=self.dtype,
                max_logprobs=config.max_logprobs,
                logprobs_mode=config.logprobs_mode,
                processors=logits_processors,
                kernels=kernels,
            )

        windows = tuple(group.window for group in self.model_config.kv_groups)
        self.num_blocks = plan_num_blocks(
            config,
            self.model_config,
            self.dtype,
            weight_bytes=weight_bytes,
            state_bytes=sampling_state.num_bytes(max_num_seqs, self.model_config.vocab_size),
            weights_are_loaded=load is None,
            most_blocks=max_num_seqs * len(windows) * -(-max_model_len // block_size),
            runner=make_runner(max_model_len),
        )
        capacity = longest_request(
            self.num_blocks,
            windows,
            block_size=block_size,
            max_step_tokens=max_num_batched_tokens,
            limit=max_model_len,
        )
        if capacity < 1:
            raise ValueError(
                f"the KV cache has {self.num_blocks} blocks of {block_size} tokens; one request "
                f"needs {len(windows)} at least, one for each group of layers: raise num_blocks, "
                "kv_cache_memory_bytes or memory_utilization"
            )
        if config.max_model_len is not None and config.max_model_len > capacity:
            raise ValueError(
                f"EngineConfig.max_model_len is {config.max_model_len}; the KV cache holds "
                f"{capacity} tokens of a request ({self.num_blocks} blocks of {block_size}): lower "
                "it or raise num_blocks, kv_cache_memory_bytes or memory_utilization"
            )
        self.max_model_len = capacity
        if self.max_model_len < max_model_len:
            logger.warning(
                "max_model_len is %d and not the model's %d: the KV cache holds no more. Give it "
                "more memory, or set max_model_len to say so",
                self.max_model_len,
                max_model_len,
            )
        manager = KVCacheManager(
            num_blocks=self.num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            watermark=config.watermark,
            windows=windows,
            max_step_tokens=max_num_batched_tokens,
        )
        self.scheduler = Scheduler(
            manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=self.max_model_len,
            token_buckets=buckets.mixed_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=config.scheduling_policy,
        )
        self.kv_cache_manager = manager
        self.runner = make_runner(self.max_model_len)
        self.runner.plan_programs(self.num_blocks)
        if load is not None:
            self.runner.start_compiling([*buckets.mixed[:1], buckets.decode[0]])
            self.runner.update_leaves(load(model))
        self.runner.allocate(self.num_blocks)
        self._compilations = CompilationCounter()
        self._compilations_at_warm_up = 0
        self.stats = EngineStats()
        self.last_bucket: Bucket | None = None
        self._unscored: dict[str, Request] = {}
        self._seeds = np.random.default_rng(config.seed)
        self._failure: BaseException | None = None
        self._is_closed = False
        cache_mib = (
            self.num_blocks
            * kv_cache.block_bytes(self.model_config, block_size=block_size, dtype=self.dtype)
            / 2**20
        )
        logger.info(
            "weights %.0f MiB, KV cache %.0f MiB: %d blocks of %d tokens and %d layers, "
            "max_model_len %d",
            weight_bytes / 2**20,
            cache_mib,
            self.num_blocks,
            block_size,
            self.model_config.num_cached_layers,
            self.max_model_len,
        )

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        config: EngineConfig | None = None,
        *,
        num_tokens_known: int | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        show_progress: bool = False,
    ) -> "Engine":
        """Loads a model and makes its engine.

        Args:
            checkpoint: An opened checkpoint.
            config: Limits and choices.
            num_tokens_known: Ids that the tokenizer knows; the others are never sampled.
            logits_processors: As for `Engine`.
            show_progress: Draws a progress bar while weights load.
        """
        config = config or EngineConfig()
        model_config = checkpoint.model_config
        family = find_family(model_config.architecture)
        dtype = resolve_dtype(config.dtype, model_config.dtype)
        sources = family.leaf_sources(model_config)

        def load(model: nnx.Module) -> nnx.Module:
            return load_model(model, checkpoint, sources, show_progress=show_progress)

        if num_tokens_known is not None and num_tokens_known < model_config.vocab_size:
            model_config = replace(model_config, num_tokens_known=num_tokens_known)
        if config.max_model_len is not None:
            model_config = replace(model_config, max_model_len=config.max_model_len)
        model = nnx.eval_shape(lambda: Transformer(model_config, dtype=dtype))
        return cls(
            model,
            config,
            model_config=model_config,
            load=load,
            logits_processors=logits_processors,
        )

    def warm_up(
        self,
        buckets: Sequence[Bucket] | None = None,
        params: Iterable[SamplingParams] = (),
        *,
        show_progress: bool = False,
        report: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compiles the programs (`None`: all) before they are needed.

        Afterwards steps compile nothing; `compilations_after_warm_up` proves it.

        Args:
            buckets: The padded shapes that steps will have.
            params: What requests will ask for in these.
            show_progress: Draws a progress bar.
            report: Takes how many programs are ready, of how many, each time that changes.

        Raises:
            RuntimeError: If the engine was closed or has failed.
        """
        self._check_alive()
        self.runner.compile(buckets, params, show_progress=show_progress, report=report)
        self._compilations_at_warm_up = self._compilations.count

    @property
    def compilations_after_warm_up(self) -> int:
        """XLA compilations in this process since `warm_up` returned."""
        return self._compilations.count - self._compilations_at_warm_up

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_unfinished

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        bad_words: Sequence[Sequence[int]] = (),
    ) -> Request:
        """Queues a prompt; its answers come out of the following steps.

        Args:
            request_id: Unique among unfinished requests.
            prompt_token_ids: Not empty.
            params: What is asked for; `None`: the defaults.
            priority: Lower runs first under the "priority" policy.
            cache_salt: Requests share cached blocks only if their salts are equal.
            bad_words: The ids of `params.bad_words`; see `Tokenizer.encode_bad_words`.

        Returns:
            The request of the first answer. Its `forks` are those of the others, with the ids
            `f"{request_id}/{i}"`; each is aborted or finished for itself.

        Raises:
            ValueError: If the prompt is empty, holds an id outside the vocabulary or can never
                fit, the id is in use, or the parameters do not suit the model or the engine.
        """
        self._check_alive()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is a {type(params).__name__}; give SamplingParams")
        vocab_size = self.model_config.vocab_size
        token_ids = check_ids("prompt_token_ids", prompt_token_ids)
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"prompt_token_ids of request {request_id!r} holds {token_id}; ids go from 0 "
                    f"to {vocab_size - 1}"
                )
        eos = self.model_config.eos_token_ids
        stop_token_ids = frozenset(params.stop_token_ids or ())
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ValueError(f"priority is {priority!r}; it must be a whole number")
        end_token_ids = frozenset(i for i in {*stop_token_ids, *eos} if i < vocab_size)
        words = tuple(tuple(check_ids("bad_words", word)) for word in bad_words)
        check_params(
            params,
            words,
            end_token_ids,
            num_tokens_known=self.model_config.num_tokens_known or vocab_size,
            max_logprobs=self._max_logprobs,
            logprobs_mode=self._logprobs_mode,
            processors=self._processors,
        )
        max_tokens = max(self.max_model_len - len(token_ids), 1)  # the scheduler refuses no room
        if params.max_tokens is not None:
            max_tokens = min(params.max_tokens, max_tokens)
        seed = self._seeds.integers(2**64, dtype=np.uint64) if params.seed is None else params.seed
        requests = [
            Request(
                request_id=f"{request_id}/{index}" if index else request_id,
                prompt_token_ids=token_ids,
                params=params,
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids if params.ignore_eos else stop_token_ids.union(eos),
                end_token_ids=end_token_ids,
                bad_words=words,
                seed=(int(seed) + index) % 2**64,
                priority=priority,
                cache_salt=cache_salt,
            )
            for index in range(params.num_samples)
        ]
        request = requests[0]
        request.forks = requests[1:]
        if params.skip_reading_prefix_cache:
            request.max_cached_tokens = 0
        elif params.prompt_logprobs is not None:
            request.max_cached_tokens = params.prompt_logprob_start
        for fork in request.forks:  # whichever computes the prompt scores it for all
            fork.prompt_logprobs = request.prompt_logprobs
        with self._changing_scheduler(ValueError):
            self.scheduler.add(request)
        if request.num_unscored_tokens or max_tokens == 0:
            self._unscored[request_id] = request
        return request

    def abort(self, request_id: str) -> None:
        """Ends a request that its caller no longer wants; unknown ids are ignored."""
        if self._failure is None:
            with self._changing_scheduler():
                self._bequeath_scoring(request_id)
                self.scheduler.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, stop_reason: str) -> None:
        """Ends a request at a stop string that its caller found in the text."""
        with self._changing_scheduler():
            self._bequeath_scoring(request_id)
            self.scheduler.finish(request_id, FinishReason.STOP, stop_reason)

    def _bequeath_scoring(self, request_id: str) -> None:
        """Lets the next answer to its prompt go on scoring it, if this one has not done it."""
        request = self._unscored.pop(request_id, None)
        if request is None:
            return
        heirs = [fork for fork in request.forks if not fork.is_finished]
        if heirs:
            heir, *heir_forks = heirs
            heir.forks = heir_forks
            heir.max_cached_tokens = request.params.prompt_logprob_start + len(
                request.prompt_logprobs
            )
            self._unscored[heir.request_id] = heir

    @contextlib.contextmanager
    def _changing_scheduler(self, *harmless: type[BaseException]) -> Iterator[None]:
        """Marks the engine as failed if a change of the scheduler is not carried through.

        An interrupt may come between any two statements. `harmless` errors come before a change.
        """
        try:
            yield
        except harmless:
            raise
        except BaseException as error:
            self._failure = error
            raise

    def step(self) -> list[StepOutput]:
        """Runs one step.

        Returns:
            One entry per request that got a token; empty if nothing is unfinished.

        Raises:
            RuntimeError: If the engine was closed, or failed earlier: its cache was given away or
                its scheduler interrupted in the middle of a change.
        """
        self._check_alive()
        if not self.scheduler.has_unfinished:
            return []
        started = time.perf_counter()
        output = None
        try:
            with self._changing_scheduler():
                output = self.scheduler.schedule()
            bucket, buffer = self.runner.build(output.scheduled, self.kv_cache_manager.block_tables)
            allocated = self.kv_cache_manager.num_allocated_slots
            num_groups = len(self.kv_cache_manager.windows)
            used = self.kv_cache_manager.num_used_slots + num_groups * output.num_tokens
            built = time.perf_counter()
            if output.copies:
                self.runner.copy_blocks(output.copies)
            result = self.runner.execute(bucket, buffer, output.scheduled)
            executed = time.perf_counter()
            with self._changing_scheduler():
                if self._unscored:
                    self._score_prompts(output, result)
                outputs = self.scheduler.update(output, result.token_ids, result.logprobs)
        except BaseException as error:
            # An interrupt or a deleted weight may come before the cache is given away, or before
            # the result is read; then the step has not happened, and its requests can be run or
            # aborted as before. If it has run, it has counted tokens that will come again.
            if output is not None and (output.copies or self.runner.has_lost_state):
                self._failure = error
            self.runner.forget_rows()
            raise
        ended = time.perf_counter()

        self.last_bucket = bucket
        stats = self.stats
        stats.steps += 1
        stats.num_tokens += output.num_tokens
        stats.last_num_tokens = output.num_tokens
        stats.num_padded_tokens += bucket.num_tokens
        stats.step_s += ended - started
        stats.host_s += built - started + ended - executed
        stats.allocated_slot_s += allocated * (ended - started)
        stats.used_slot_s += used * (ended - started)
        return outputs

    def _score_prompts(self, output: SchedulerOutput, result: StepResult) -> None:
        """Collects log-probabilities of the step's prompt tokens for those who want them."""
        wanted: list[tuple[Request, int]] = []  # (request, how many tokens of it)
        indices: list[int] = []
        token_ids: list[int] = []
        counts: list[int] = []
        done: list[Request] = []
        first = 0  # index among the step's tokens of the request's first one
        for row, (request, start, num_tokens, _) in enumerate(output.scheduled):
            if request.request_id in self._unscored:
                # The model's output for token p of a request predicts token p + 1.
                params = request.params
                begin = max(start, params.prompt_logprob_start + len(request.prompt_logprobs))
                end = min(start + num_tokens, request.num_prompt_tokens - 1)
                if begin < end:
                    wanted.append((request, end - begin))
                    indices += range(first + begin - start, first + end - start)
                    token_ids += request.prompt_token_ids[begin + 1 : end + 1]
                    counts += [params.prompt_logprobs or 0] * (end - begin)
                if start + num_tokens >= request.num_prompt_tokens:
                    done.append(request)
                    if request.max_tokens == 0:
                        result.token_ids[row] = NO_TOKEN
            first += num_tokens
        scored = iter(self.runner.score(result, indices, token_ids, counts))
        for request, count in wanted:
            request.prompt_logprobs += itertools.islice(scored, count)
        for request in done:
            del self._unscored[request.request_id]
            request.max_cached_tokens = NO_LIMIT

    def _check_alive(self) -> None:
        if self._is_closed:
            raise RuntimeError("the engine was closed; make a new one")
        if self._failure is not None:
            raise RuntimeError("the engine failed earlier; make a new one") from self._failure

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running requests go on."""
        self.scheduler.reset_prefix_cache()

    def update_weights(self, model: nnx.Module) -> None:
        """Swaps in another module's arrays, without a copy, and forgets all cached prefixes.

        Raises:
            ValueError: If requests are unfinished, or structure, shapes or dtypes differ.
        """
        self._check_alive()
        if self.scheduler.has_unfinished:
            raise ValueError(
                f"update_weights: {len(self.scheduler.requests)} requests are unfinished; finish "
                "or abort them first"
            )
        with self._changing_scheduler(ValueError):
            self.runner.update_leaves(model)
            self.reset_prefix_cache()

    def close(self) -> None:
        """Aborts all requests and frees the KV cache; the engine cannot be used afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        self._compilations.close()
        self.runner.close()
        for request_id in list(self.scheduler.requests):
            self.abort(request_id)
        gc.collect()  # JAX gives memory that it shares with NumPy back only then


def resolve_dtype(asked: str, stored: str) -> jnp.dtype:
    """The dtype of weights and cache, by `EngineConfig.dtype` and the checkpoint's."""
    if asked != "auto":
        return jnp.dtype(asked)
    if jax.default_backend() == "cpu":
        # One-row bfloat16 products fall to a scalar loop there; see `jpaged.layers.linear`.
        return jnp.dtype("float32")
    return jnp.dtype("float16" if stored == "float16" else "bfloat16")
