"""Checks of `gpu_check` that take times: kernels, those of others, a whole step.

Times are those of several layers in one program, each of which reads other blocks, so that the
second-level cache does not answer; a layer's output is the next one's query, so that none overlap.
Some programs are queued before one wait, which hides the host, and the median of such rounds is
divided. A model's step runs its layers just so. GB/s are bytes of keys and values, each counted
once however often a kernel reads it, over that time.
"""

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import (
    AttentionInputs,
    Kernels,
    paged_attention,
    plan_attention,
)  # fmt: skip
from pallas_kernels.paged_attention.choice import Shape
from pallas_kernels.paged_attention.shapes import SHAPES, ModelShape
from scripts.gpu_bench import NUM_POOLS, TINY, VARIANTS, Bench, Check, ints, make_kernels, numbers
from scripts.gpu_report import Row

# --- Decode

TIMED = {
    "llama-3.1-8b": SHAPES["llama-3.1-8b"],
    "llama-2-7b": ModelShape(32, 32, 128),
    "llama-3.2-1b": SHAPES["llama-3.2-1b"],
    "gemma-2-9b": SHAPES["gemma-2-9b"]._replace(window=None, softcap=None),
}


def make_inputs(
    kernels: Kernels, counts: Sequence[int], lengths: Sequence[int], tables: np.ndarray
) -> Any:
    """Planned `AttentionInputs` in NumPy, of a bucket without padding."""
    starts = np.cumsum([0, *counts]).astype(np.int32)
    num_tokens, lens = int(starts[-1]), np.array(lengths, np.int32)
    positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(lens - starts[1:], counts)
    slots = np.zeros(num_tokens, np.int32)
    inputs = AttentionInputs._make((positions, slots, starts, lens, tables, None))
    return inputs._replace(plan=plan_attention(kernels, inputs))


def compile_decode(
    bench: Bench, variant: str, shape: ModelShape, num_rows: int, block_size: int, shares: bool
) -> tuple[Kernels, jax.stages.Compiled]:
    """Some layers of decoding; `program(tables, q, pools, inputs)`."""
    # Without sharing there is no prefill kernel in the program, which would have no work: its
    # launch, some microseconds, is part of the times of the whole step and of shared prefixes.
    kernels = make_kernels(bench, VARIANTS[variant], shape, block_size, share_prefixes=shares)
    tables = np.zeros((num_rows, bench.sizes.max_context // block_size), np.int32)
    inputs = make_inputs(kernels, [1] * num_rows, [1] * num_rows, tables)

    @jax.jit  # lowered once for all layers
    def attend(q, pool, inputs):
        cache = pool.reshape(-1, shape.num_kv_heads, 2, block_size, shape.head_dim)
        return paged_attention(q, cache, inputs, scale=shape.head_dim**-0.5)

    def decode(tables, q, pools, inputs):
        for i, table in enumerate(tables):
            q = attend(q, pools[i % NUM_POOLS], inputs._replace(block_tables=table))
        return q

    program = bench.compile(
        decode,
        (tables,) * bench.sizes.num_layers,
        numbers((num_rows, shape.num_heads, shape.head_dim)),
        (numbers((bench.sizes.pool,)),) * NUM_POOLS,
        inputs,
        donate_argnums=1,
    )
    return kernels, program


def place(
    bench: Bench, shape: ModelShape, lengths: Sequence[int], block_size: int, num_shared: int = 0
) -> Iterator[np.ndarray]:
    """Tables of a batch over other blocks each time, until all of a pool is used; then again."""
    random = np.random.default_rng(0)
    num_blocks = bench.sizes.pool // (shape.num_kv_heads * 2 * block_size * shape.head_dim)
    counts = [-(-n // block_size) - num_shared for n in lengths]
    needed = sum(counts) + num_shared
    assert needed <= num_blocks, f"{needed} blocks, and a pool has {num_blocks}"
    while True:
        for first in range(0, num_blocks - needed + 1, needed):
            blocks = first + random.permutation(needed).astype(np.int32)
            tables = np.zeros((len(lengths), bench.sizes.max_context // block_size), np.int32)
            tables[:, :num_shared] = blocks[:num_shared]
            start = num_shared
            for table, count in zip(tables, counts, strict=True):
                table[num_shared : num_shared + count] = blocks[start : start + count]
                start += count
            yield tables


def time_decode(
    bench: Bench,
    prepared: tuple[Kernels, jax.stages.Compiled],
    shape: ModelShape,
    lengths: Sequence[int],
    num_shared: int = 0,
) -> float:
    """Seconds of one layer."""
    kernels, program = prepared
    assert kernels.tiling is not None
    num_layers = bench.sizes.num_layers
    placed = place(bench, shape, lengths, kernels.tiling.block_size, num_shared)
    rounds = []
    for _ in range(4):
        # Layers of different pools have the same table: they are other blocks all the same.
        distinct = [next(placed) for _ in range(-(-num_layers // NUM_POOLS))]
        rounds.append(tuple(distinct[i // NUM_POOLS] for i in range(num_layers)))
    inputs = make_inputs(kernels, [1] * len(lengths), lengths, rounds[0][0])
    if num_shared and kernels.tiling.share_prefixes:
        assert inputs.plan.arrays.tile_items.any(), "the plan shares nothing"
    inputs, tables = jax.device_put((inputs, rounds))
    q = bench.random((len(lengths), shape.num_heads, shape.head_dim), jnp.bfloat16)
    call = lambda i, q: program(tables[i % len(tables)], q, bench.pools, inputs)  # noqa: E731
    return bench.time(call, q, num_layers)


def kv_bytes(shape: ModelShape, num_tokens: int) -> int:
    """Of keys and values in one layer."""
    return num_tokens * shape.num_kv_heads * 2 * shape.head_dim * 2


def decode_name(
    variant: str, lengths: Sequence[int], block_size: int, model: str = "llama-3.1-8b"
) -> str:
    """Of a row in the report."""
    what = f"{len(lengths)} x {lengths[-1]}"
    if len(set(lengths)) > 1:
        what = f"{lengths[0]} + {len(lengths) - 1} x {lengths[-1]}"
    return f"{variant}: {model}, {what} tokens, blocks of {block_size}"


def check_decode(
    bench: Bench,
    variant: str,
    lengths: Sequence[int],
    block_size: int,
    *,
    model: str = "llama-3.1-8b",
    goal: str = "",
    worth: int = 2,
) -> Check:
    """Times one batch."""
    shape = TINY if bench.is_rehearsal else TIMED[model]
    name = decode_name(variant, lengths, block_size, model)
    arguments = (variant, shape, len(lengths), block_size, False)

    def run(prepared):
        seconds = time_decode(bench, prepared, shape, lengths)
        num_bytes = kv_bytes(shape, sum(lengths))
        rate, ideal = num_bytes / seconds, num_bytes / bench.bandwidth
        value, unit = 100 * rate / bench.bandwidth, "% of bandwidth"
        if goal == "skewed":
            value, unit = seconds / ideal, "of bytes / bandwidth"
        note = f"{rate / 1e9:.0f} GB/s, {seconds * 1e6:.1f} us, {num_bytes / 1e6:.0f} MB"
        return [Row("decode", name, value, unit, goal, note=note, seconds=seconds)]

    prepare = functools.partial(compile_decode, bench, *arguments)
    return Check("decode", name, run, prepare, ("decode", *arguments), worth)


# --- Prefill

PREFILLS = {"triton": "triton", "mosaic": "mosaic mma"}  # variants with the prefill kernel of each


def prefill_name(kernel: str, num_tokens: int) -> str:
    """Of a row in the report."""
    return f"{kernel}: one prompt of {num_tokens} tokens"


def dense_name(form: tuple[int, int]) -> str:
    """Of a form of jax's kernel."""
    return f"attention_mgpu, tiles of {form[0]}"


def check_prefill(bench: Bench, backend: str, num_tokens: int) -> Check:
    """Times one causal prompt in float16, which is what the peer takes."""
    shape = TINY if bench.is_rehearsal else SHAPES["llama-3.1-8b"]
    block_size, dtype = 64, jnp.float16
    kernels = make_kernels(bench, VARIANTS[PREFILLS[backend]], shape, block_size, "float16")
    num_blocks = num_tokens // block_size
    table = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)[None]
    inputs = make_inputs(kernels, [num_tokens], [num_tokens], table)
    cache = numbers((num_blocks, shape.num_kv_heads, 2, block_size, shape.head_dim), dtype)
    q = numbers((num_tokens, shape.num_heads, shape.head_dim), dtype)

    def attend(q, cache, inputs):
        return paged_attention(q, cache, inputs, scale=shape.head_dim**-0.5)

    name = prefill_name(backend, num_tokens)

    def run(program):
        data = (bench.random(cache.shape, dtype), jax.device_put(inputs))
        state = bench.random(q.shape, dtype)
        seconds = bench.time(lambda i, state: program(state, *data), state, 1)
        return [_prefill_row(name, shape, num_tokens, seconds)]

    prepare = lambda: bench.compile(  # noqa: E731
        attend, q, cache, inputs, donate_argnums=0
    )
    return Check("prefill", name, run, prepare, worth=2)


def _prefill_row(name: str, shape: ModelShape, num_tokens: int, seconds: float) -> Row:
    rate = 2 * num_tokens**2 * shape.num_heads * shape.head_dim / seconds / 1e12
    note = f"{seconds * 1e6:.0f} us"
    return Row("prefill", name, rate, "TFLOP/s", note=note, seconds=seconds)


DENSE_FORMS = ((128, 2), (64, 4))  # tokens of a tile, tiles in shared memory


def check_dense(bench: Bench, form: tuple[int, int], num_tokens: int) -> Check:
    """Times jax's dense attention over the same prompt."""
    shape = SHAPES["llama-3.1-8b"]
    name = prefill_name(dense_name(form), num_tokens)

    def prepare():
        if bench.is_rehearsal:
            return None
        # Here, because it may fail: it is not ours.
        from jax.experimental.pallas.ops.gpu import attention_mgpu

        config = attention_mgpu.TuningConfig(
            block_q=64, block_kv=form[0], max_concurrent_steps=form[1], causal=True
        )
        q = numbers((1, num_tokens, shape.num_heads, shape.head_dim), jnp.float16)
        kv = numbers((1, num_tokens, shape.num_kv_heads, shape.head_dim), jnp.float16)

        def attend(q, k, v):
            return attention_mgpu.attention(q, k, v, config)

        return bench.compile(attend, q, kv, kv, donate_argnums=0)

    def run(program):
        if program is None:
            raise NotImplementedError("Mosaic's interpreter lacks what it uses")
        # It does not scale its logits, so the queries are.
        q = bench.random((1, num_tokens, shape.num_heads, shape.head_dim), jnp.float16) / 11.3
        k, v = (
            bench.random((1, num_tokens, shape.num_kv_heads, shape.head_dim), jnp.float16, seed)
            for seed in (1, 2)
        )
        seconds = bench.time(lambda i, q: program(q, k, v), q, 1)
        return [_prefill_row(name, shape, num_tokens, seconds)]

    return Check("prefill", name, run, prepare, worth=2)


# --- Shared prefixes


def prefix_name(variant: str, shares: bool) -> str:
    """Of a row in the report."""
    return f"{variant}: shared prefix, {'read once' if shares else 'read by every row'}"


def check_prefix(bench: Bench, variant: str, shares: bool) -> Check:
    """Times 64 rows of which 8k tokens are the same and 512 their own."""
    shape = TINY if bench.is_rehearsal else SHAPES["llama-3.1-8b"]
    num_rows, shared, own = (4, 1024, 16) if bench.is_rehearsal else (64, 8192, 512)
    name = prefix_name(variant, shares)
    arguments = (variant, shape, num_rows, 16, shares)

    def run(prepared):
        lengths = [shared + own] * num_rows
        seconds = time_decode(bench, prepared, shape, lengths, shared // 16)
        num_bytes = kv_bytes(shape, shared + num_rows * own)
        value = 100 * num_bytes / seconds / bench.bandwidth
        note = f"{seconds * 1e6:.1f} us, {num_bytes / 1e6:.0f} MB, each counted once"
        return [Row("prefix", name, value, "% of bandwidth", note=note, seconds=seconds)]

    prepare = functools.partial(compile_decode, bench, *arguments)
    return Check("prefix", name, run, prepare, ("decode", *arguments), 2)


# --- Against jax's own


def peer_name(num_rows: int, context: int, k_splits: int) -> str:
    """Of a row in the report."""
    return f"jax's paged_attention, k_splits {k_splits}: {num_rows} x {context} tokens"


def check_peer(bench: Bench, num_rows: int, context: int, k_splits: int) -> Check:
    """Times jax's deprecated kernel on blocks of 16, its other parameters as they come."""
    shape = TINY if bench.is_rehearsal else SHAPES["llama-3.1-8b"]
    name = peer_name(num_rows, context, k_splits)
    num_blocks = context // 16

    def prepare():
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is deprecated is known
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as attend

        def decode(tables, q, pools, lengths):
            for i, table in enumerate(tables):
                views = (pools[2 * (i % 2)], pools[2 * (i % 2) + 1])
                k, v = (x.reshape(shape.num_kv_heads, -1, 16, shape.head_dim) for x in views)
                q = attend(q, k, v, table, lengths, k_splits=k_splits, interpret=bench.is_rehearsal)
            return q

        return bench.compile(
            decode,
            (ints(num_rows, num_blocks),) * 4,
            numbers((num_rows, shape.num_heads, shape.head_dim)),
            (numbers((bench.sizes.pool,)),) * NUM_POOLS,
            ints(num_rows),
            donate_argnums=1,
        )

    def run(program):
        # Blocks of keys apart from those of values: twice as many in a pool as ours has.
        needed = num_rows * num_blocks
        available = bench.sizes.pool // (shape.num_kv_heads * 16 * shape.head_dim)
        random = np.random.default_rng(0)
        firsts = list(range(0, available - needed + 1, needed))
        tables, count = [], 0
        for _ in range(4):
            layers = []
            for _ in range(4):
                blocks = firsts[count // 2 % len(firsts)] + random.permutation(needed)
                layers.append(blocks.reshape(num_rows, -1).astype(np.int32))
                count += 1
            tables.append(tuple(layers))
        tables = jax.device_put(tables)
        lengths = jnp.full(num_rows, context, jnp.int32)
        q = bench.random((num_rows, shape.num_heads, shape.head_dim), jnp.bfloat16)
        q = q * jnp.bfloat16(shape.head_dim**-0.5)
        call = lambda i, q: program(tables[i % 4], q, bench.pools, lengths)  # noqa: E731
        seconds = bench.time(call, q, 4)
        rate = kv_bytes(shape, num_rows * context) / seconds
        note = f"{rate / 1e9:.0f} GB/s, {seconds * 1e6:.1f} us"
        value = 100 * rate / bench.bandwidth
        return [Row("peer", name, value, "% of bandwidth", note=note, seconds=seconds)]

    return Check("peer", name, run, prepare, worth=2)


# --- The whole step


def make_runner(bench: Bench, backend: str) -> tuple[Any, int]:
    """A `ModelRunner` of an 8B model without weights, and the tokens of each request."""
    from flax import nnx

    from jpaged.models.transformer import Transformer
    from jpaged.runner.model_runner import ModelRunner
    from jpaged.runner.step_inputs import BucketTable
    from pallas_kernels.paged_attention.choice import choose
    from scripts.aot_step import BLOCK_SIZE, CONFIG, CONTEXT, MAX_MODEL_LEN, NUM_ROWS

    config, num_rows, context, max_len = CONFIG, NUM_ROWS, CONTEXT, MAX_MODEL_LEN
    if bench.is_rehearsal:
        num_rows, context, max_len = 2, 32, 64
        config = replace(
            config, vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2,
            num_heads=4, num_kv_heads=2, head_dim=64,
        )  # fmt: skip
    shape = Shape(config.num_heads, config.num_kv_heads, config.head_dim, BLOCK_SIZE, "bfloat16")
    runner = ModelRunner(
        nnx.eval_shape(lambda: Transformer(config, dtype=jnp.bfloat16)),
        config=config,
        buckets=BucketTable(
            max_num_seqs=num_rows,
            max_num_batched_tokens=2 * num_rows,
            decode_rows=(),
            mixed_tokens=(),
        ),
        max_num_seqs=num_rows,
        max_blocks=max_len // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        dtype=jnp.bfloat16,
        max_logprobs=20,
        kernels=choose(shape, bench.device, backend=backend).kernels,
        platform="cpu" if bench.is_rehearsal else "gpu",
    )
    runner.plan_programs(num_rows * context // BLOCK_SIZE)
    return runner, context


def compile_step(bench: Bench, backend: str) -> tuple[Any, int, list[Path]]:
    """The decode step, and what XLA dumped of it; one step at a time, to know what is whose."""
    with STEP_LOCK:
        runner, context = make_runner(bench, backend)
        dump = bench.folder / "dump"
        before = set(dump.glob("*"))
        runner.compile(runner.buckets.decode)
        return runner, context, sorted(set(dump.glob("*")) - before)


STEP_LOCK = threading.Lock()


def check_graphs(bench: Bench, backend: str) -> Check:
    """Whether attention is in CUDA graphs."""

    def run(prepared):
        from scripts.aot_dump import read_thunks, walk
        from scripts.aot_hlo import Program

        runner, _, files = prepared
        if bench.is_rehearsal:
            raise NotImplementedError("a CPU has no CUDA graphs")
        program = Program(runner.program(runner.buckets.decode[0]).as_text())
        hand_written = {each.name for each in program.kernels() if program.is_hand_written(each)}
        steps = list(walk(read_thunks(files)))
        found = [graph for thunk, graph in steps if thunk.instruction in hand_written]
        graphs = {id(graph) for graph in found if graph is not None}
        num_graphs = sum(thunk.kind == "kCommandBuffer" for thunk, _ in steps)
        if len(found) != len(hand_written):
            raise RuntimeError(f"{len(hand_written)} kernels, and {len(found)} in XLA's dump")
        note = f"{len(found)} attention kernels in {len(graphs)} of {num_graphs} graphs"
        what = f"{backend}: attention kernels outside"
        return [Row("graphs", what, found.count(None), "kernels", "outside", note=note)]

    prepare = functools.partial(compile_step, bench, backend)
    return Check("graphs", f"{backend}: graphs", run, prepare, ("step", backend), 1)


def check_step(bench: Bench, backend: str) -> Check:
    """Times decode steps, queued and as the engine makes them."""
    name = f"{backend}: step of an 8B model, 64 x 2048 tokens"

    def run(prepared):
        from jpaged.request import Request, ScheduledRequest
        from jpaged.sampling_params import SamplingParams

        runner, context, _ = prepared
        num_rows, block_size = runner.max_num_seqs, runner.block_size
        num_blocks = num_rows * context // block_size
        runner.leaves = tuple(
            bench.random(leaf.shape, leaf.dtype, i) * jnp.asarray(0.02, leaf.dtype)
            for i, leaf in enumerate(runner.leaves)
        )
        runner.allocate(num_blocks)
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        token_ids = np.random.default_rng(0).integers(0, runner.config.vocab_size, context)
        scheduled = []
        for i in range(num_rows):
            request = Request(request_id=str(i), prompt_token_ids=token_ids.tolist(), params=params)
            request.row = i
            scheduled.append(ScheduledRequest(request, context - 1, 1, True))
        tables = np.zeros((1, num_rows, runner.max_blocks), np.int32)
        blocks = 1 + np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
        tables[0, :, : context // block_size] = blocks.reshape(num_rows, -1)
        bucket, buffer = runner.build(scheduled, tables)
        buffer = np.array(buffer)
        program, biases = runner.program(bucket), runner.sampling_state.biases

        def queue(i, state):
            # The same buffers come back, given away and updated in place.
            return program(runner.leaves, *state[:2], biases, buffer)[:2]

        state = (runner.kv_cache, runner.sampling_state.counts)
        seconds = bench.time(queue, state, 1)
        # The engine's way, with the host's work and one read. The state that `time` had is lost.
        runner.allocate(num_blocks)

        def step(i, _):
            runner.execute(*runner.build(scheduled, tables), scheduled)
            return None

        whole = bench.time(step, None, 1)
        runner.close()
        weights = _weight_bytes(runner.config)
        config = runner.config
        shape = ModelShape(config.num_heads, config.num_kv_heads, config.head_dim)
        cache = config.num_layers * kv_bytes(shape, num_rows * context)
        ideal = (weights + cache) / bench.bandwidth
        note = f"{seconds * 1e3:.2f} ms of {ideal * 1e3:.2f}, {num_rows / seconds:.0f} tokens/s"
        rows = [Row("step", name, seconds / ideal, "of bytes / bandwidth", "step", note=note)]
        rows.append(
            Row("step", f"{backend}: host's part", (whole - seconds) * 1e3, "ms", "host",
                note="build, upload, read of token ids; the scheduler not counted")
        )  # fmt: skip
        return rows

    prepare = functools.partial(compile_step, bench, backend)
    return Check("step", name, run, prepare, ("step", backend), 2)


def _weight_bytes(config: Any) -> int:
    """What a step reads of the weights: all matrices but the embedding, in bfloat16."""
    heads = (config.num_heads + config.num_kv_heads) * 2 * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return 2 * (config.num_layers * layer + config.hidden_size * config.vocab_size)
