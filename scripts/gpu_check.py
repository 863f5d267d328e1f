"""Checks and times the attention kernels on the GPU that is there, within a few minutes.

    python scripts/gpu_check.py --json report.json      # on one GPU, made for an H200
    python scripts/gpu_check.py --rehearse              # the same code on a CPU

One process watches, another works. The worker compiles in threads, then runs one check after the
other and tells what it finds, a line of JSON each; if a kernel kills it or never ends, the watcher
ends it, blames the check that was running and has the rest done by another worker, which compiles
one program at a time. What compilers say goes to a log, where ptxas's remarks are read in the end.

Checks run in the order of their worth, and all correctness before any timing. When the budget is
spent, those left are listed as not measured. Exit status 1 if a correctness check failed, 2 if
there is no GPU.

Times are those of several layers in one program, each of which reads other blocks, so that the
second-level cache does not answer; a layer's output is the next one's query, so that none overlap.
Some programs are queued before one wait, which hides the host, and the median of such rounds is
divided. A model's step runs its layers just so. GB/s are bytes of keys and values, each counted
once however often a kernel reads it, over that time.

Longer than other files, because it must run where nobody can mend it: one file, few imports.
"""

import argparse
import ctypes
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
for name in ("scripts", "tests"):  # folders that an installed package of that name would hide
    sys.modules.setdefault(name, types.ModuleType(name)).__path__ = [str(ROOT / name)]

# ruff: noqa: E402
from pallas_kernels.paged_attention import AttentionInputs, AttentionPlan, Kernels, paged_attention
from pallas_kernels.paged_attention.choice import Shape, make_tiling, why_no_mosaic_prefill
from pallas_kernels.paged_attention.plan import cut_arrays, fill_plan, plan_sizes
from pallas_kernels.paged_attention.shapes import SHAPES, ModelShape
from tests.pallas_kernels.attention_batches import Batch, make_batch, with_plan

SECTIONS = (
    "facts", "correctness", "engine", "graphs", "decode", "prefill", "prefix", "peer", "step",
)  # fmt: skip


class Goal(NamedTuple):
    """A number to reach.

    Attributes:
        limit: In the row's unit.
        is_least: Whether more is better.
        source: What the goal answers; G numbers are those of the kernel study's list.
    """

    limit: float
    is_least: bool
    source: str


GOALS = {
    "error": Goal(5e-3, False, "G13: relative error against float64; no token beyond 4 times that"),
    "equal": Goal(1.0, True, "G13: bitwise equal in any batch under fixed_split"),
    "agree": Goal(0.75, True, "tiny model with clear best tokens; bfloat16 may flip some"),
    "outside": Goal(0, False, "attention kernels in no CUDA graph"),
    "decode": Goal(70, True, "G1, G6: must 70, target 80, stretch 90 % of measured bandwidth"),
    "split": Goal(60, True, "G3: one row of 32k tokens; target 75 %"),
    "skewed": Goal(1.25, False, "G4: time over bytes / bandwidth"),
    "block 16": Goal(0.95, True, "G2: speed with blocks of 16 over that with blocks of 64"),
    "prefill": Goal(0.90, True, "G7: speed over that of jax's dense attention_mgpu"),
    "prefix": Goal(5.0, True, "G8: speed over that without sharing"),
    "peer": Goal(1.5, True, "G11: speed over jax's deprecated paged_attention, 1 and 16 rows"),
    "peer 64": Goal(1.2, True, "G11: the same, 64 rows"),
    "step": Goal(1.33, False, "G9: time over (weights + KV cache) / bandwidth"),
    "host": Goal(0.3, False, "G10: ms per step that the host adds"),
    "spills": Goal(0, False, "bytes that ptxas spills in a decode kernel"),
    "serialised": Goal(0, False, "remarks of ptxas: wgmma serialised, setmaxnreg ignored (C7504)"),
}


@dataclass
class Row:
    """One line of the report.

    Attributes:
        section: One of `SECTIONS`.
        what: Unique in the report.
        value: `None` if it was not measured.
        unit: Of the value.
        goal: A key of `GOALS`, or "".
        verdict: "met", "missed", "" without a goal, or why there is no value.
        note: More numbers.
        seconds: Of one operation, for ratios; 0: none.
    """

    section: str
    what: str
    value: float | None
    unit: str = ""
    goal: str = ""
    verdict: str = ""
    note: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.goal and self.value is not None:
            goal = GOALS[self.goal]
            is_met = self.value >= goal.limit if goal.is_least else self.value <= goal.limit
            self.verdict = "met" if is_met else "missed"  # NaN misses


@dataclass(frozen=True)
class Sizes:
    """How large everything is: on a GPU, or in a rehearsal.

    Attributes:
        pool: Numbers in each of four pools of blocks, 2 GiB as a layer's cache may have; in
            larger arrays Triton's kernels would count with 64 bits.
        num_layers: In a timed program.
        max_context: Tokens that tables have room for.
        rounds: Measurements, of which the median counts.
        round_s: Seconds of a round at least.
        matrix: Rows and columns of the product that is timed.
    """

    pool: int = 2**30
    num_layers: int = 8
    max_context: int = 32768
    rounds: int = 5
    round_s: float = 0.02
    matrix: int = 8192


REHEARSAL = Sizes(pool=2**18, num_layers=1, max_context=1088, rounds=1, round_s=0.0, matrix=64)
NUM_POOLS = 4


class Variant(NamedTuple):
    """Kernels by the name that the report has for them."""

    backend: str
    decode_rows: int
    prefill_backend: str | None = None


VARIANTS = {
    "triton": Variant("triton", 16),
    "mosaic mma": Variant("mosaic", 16),
    "mosaic wgmma": Variant("mosaic", 64, "triton"),
}


@dataclass
class Check:
    """One thing to find out.

    Attributes:
        section: One of `SECTIONS`.
        name: Unique.
        run: Gets what `prepare` made, gives rows.
        prepare: Compiles, in a thread; checks with the same `key` share what comes of it.
        key: `None`: the name.
        worth: Those of lower number run first.
        is_fact: Runs in every worker, since others need what it finds.
    """

    section: str
    name: str
    run: Callable[[Any], list[Row]]
    prepare: Callable[[], Any] = lambda: None
    key: Any = None
    worth: int = 1
    is_fact: bool = False


# --- The worker -----------------------------------------------------------------------------------


class Bench:
    """What all checks share: the device, the pools, the ceilings."""

    def __init__(self, *, is_rehearsal: bool, folder: Path):
        """Looks at the device; allocates nothing."""
        self.sizes = REHEARSAL if is_rehearsal else Sizes()
        self.is_rehearsal = is_rehearsal
        self.folder = folder
        self.device: Any = jax.devices()[0]
        self.num_sms = 2 if is_rehearsal else self.device.core_count
        version = "9.0" if is_rehearsal else str(self.device.compute_capability)
        self.capability = (int(version.split(".")[0]), int(version.split(".")[1]))
        self.bandwidth = float("nan")  # bytes per second
        self._lock = threading.Lock()

    @functools.cached_property
    def pools(self) -> tuple[jax.Array, ...]:
        """Random numbers, to be viewed as blocks of any shape."""
        make = jax.jit(lambda key: jax.random.normal(key, (self.sizes.pool,), jnp.bfloat16))
        return tuple(make(jax.random.key(i)) for i in range(NUM_POOLS))

    def compile(self, function: Callable, *args: Any, **options: Any) -> jax.stages.Compiled:
        """Compiles for arguments that may be abstract; lowering is Python's, one at a time."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        with self._lock:
            lowered = jax.jit(function, **options).lower(*abstract)
        return lowered.compile()

    def time(self, call: Callable[[int, Any], Any], state: Any, num_operations: int) -> float:
        """Seconds of one operation; `call(i, state)` queues some of them, gives the next state."""
        state = jax.block_until_ready(call(0, state))
        state = jax.block_until_ready(call(1, state))
        started = time.perf_counter()
        state = jax.block_until_ready(call(2, state))
        num_calls = int(self.sizes.round_s / (time.perf_counter() - started)) + 1
        times = []
        for _ in range(self.sizes.rounds):
            started = time.perf_counter()
            for i in range(num_calls):
                state = call(i, state)
            jax.block_until_ready(state)
            times.append(time.perf_counter() - started)
        return statistics.median(times) / (num_calls * num_operations)

    def random(self, shape: Sequence[int], dtype: Any, seed: int = 0) -> jax.Array:
        """Normal numbers."""
        return jax.jit(lambda key: jax.random.normal(key, shape, dtype))(jax.random.key(seed))


def ints(*shape: int) -> Any:
    """Of an argument."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def numbers(shape: Sequence[int], dtype: Any = jnp.bfloat16) -> Any:
    """Of an argument."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def make_kernels(
    bench: Bench,
    variant: Variant,
    model: ModelShape,
    block_size: int,
    dtype: str = "bfloat16",
    **options: Any,
) -> Kernels:
    """As the engine would choose them, but for the variant; `options` are fields of `Tiling`."""
    shape = Shape(*model[:3], block_size, dtype)
    tiling = make_tiling(shape, num_sms=bench.num_sms, capability=bench.capability, **options)
    tiling = replace(tiling, decode_rows=variant.decode_rows)
    prefill = variant.prefill_backend
    if variant.backend == "mosaic" and why_no_mosaic_prefill(shape, bench.capability):
        prefill = "triton"
    return Kernels(variant.backend, tiling, bench.is_rehearsal, prefill)


# --- 1. Facts


def facts(bench: Bench) -> list[Row]:
    """The device, and the two ceilings that all is measured against."""
    device = bench.device
    stats = device.memory_stats() or {} if not bench.is_rehearsal else {}
    capability = str(getattr(device, "compute_capability", "none"))
    note = f"{device.device_kind}, {bench.num_sms} SMs, jax {jax.__version__}"
    rows = [
        Row("facts", "compute capability", None, verdict=capability, note=note),
        Row("facts", "memory", stats.get("bytes_limit", 0) / 2**30, "GiB"),
    ]
    pools, size = bench.pools, bench.sizes.pool * 2
    streams: dict[str, tuple[Callable[..., Any], int]] = {
        "sum": (lambda *ps: [jnp.sum(p.astype(jnp.float32)) for p in ps], size),
        "sums of rows": (
            lambda *ps: [p.reshape(-1, 4096).astype(jnp.float32).sum(axis=1) for p in ps],
            size,
        ),
        "copy, both ways": (lambda *ps: [p + p for p in ps], 2 * size),
    }
    rates = {}
    for name, (function, num_bytes) in streams.items():
        program = bench.compile(function, *pools)
        seconds = bench.time(lambda i, _, run=program: run(*pools), None, NUM_POOLS)
        rates[name] = num_bytes / seconds
        rows.append(Row("facts", name, rates[name] / 1e9, "GB/s"))
    bench.bandwidth = max(rates.values())
    rows.append(Row("facts", "bandwidth, the best of these", bench.bandwidth / 1e9, "GB/s"))
    n = bench.sizes.matrix
    a, b = bench.random((n, n), jnp.bfloat16), bench.random((n, n), jnp.bfloat16, 1)

    def multiply(a, b):
        for _ in range(4):
            a = (jnp.dot(a, b) * n**-0.5).astype(jnp.bfloat16)
        return a

    product = bench.compile(multiply, a, b)
    seconds = bench.time(lambda i, state: product(state, b), a, 4)
    rows.append(Row("facts", "bfloat16 product", 2 * n**3 / seconds / 1e12, "TFLOP/s"))
    return rows


# --- 2. Correctness

MIXED = [(65, 65), (1, 40), (17, 300), (1, 1), (66, 130), (150, 520), (1, 777)]
DECODE = [(1, n) for n in (1, 15, 16, 17, 127, 128, 255, 256, 257, 1000, 2048)]
SPLIT = [(1, 6000), (1, 33), (3, 2500)]
SHARED = [(1, 2100), (1, 2049), (1, 2600), (1, 2064), (2, 2300), (1, 2048 + 128)]
LLAMA = SHAPES["llama-3.1-8b"].with_kv_heads(2)
FULL = SHAPES["gpt-oss-20b"].with_kv_heads(2)._replace(softcap=30.0)
ALL = tuple(VARIANTS)
TRITON = ("triton",)
MMA = ("triton", "mosaic mma")  # tracing a Mosaic kernel takes seconds, one at a time


@dataclass(frozen=True)
class Case:
    """A batch with a known answer.

    Attributes:
        name: In the report.
        rows: As in `make_batch`.
        options: Likewise, and `num_tokens` if there is padding.
        variants: Which are compared.
        tiling: Fields of `Tiling`.
        log_sum_exp: Whether the logarithms of sums are asked for.
    """

    name: str
    rows: list[tuple[int, int]]
    options: dict[str, Any] = field(default_factory=dict)
    variants: tuple[str, ...] = ALL
    tiling: dict[str, Any] = field(default_factory=dict)
    log_sum_exp: bool = False


CASES = [
    Case("group 4, blocks of 16", DECODE, {"num_rows": 16, "num_tokens": 16}),
    Case("mixed, blocks of 16", MIXED, {"num_tokens": 512, "num_rows": 9}, MMA),
    Case("mixed, window, softcap, sinks", MIXED, {"shape": FULL, "num_tokens": 512}),
    Case("split rows", SPLIT, {"shape": LLAMA._replace(has_sinks=True)}),
    Case("shared prefix", SHARED, {"shared_blocks": 128}, log_sum_exp=True),
    Case("group 1, blocks of 64", MIXED, {"shape": ModelShape(2, 2, 128), "block_size": 64}, MMA),
    Case("group 3, blocks of 32", MIXED, {"shape": ModelShape(6, 2, 64), "block_size": 32}, MMA),
    Case("group 8, blocks of 128", MIXED, {"shape": ModelShape(8, 1, 128), "block_size": 128}, MMA),
    Case("group 16", MIXED, {"shape": ModelShape(16, 1, 128)}),
    Case("head_dim 256, window, softcap", [(1, 5000), *MIXED],
         {"shape": SHAPES["gemma-2-9b"].with_kv_heads(1)}, MMA),
    Case("float16, log_sum_exp", MIXED, {"dtype": "float16"}, log_sum_exp=True),
    Case("float32 (TF32)", MIXED, {"dtype": "float32"}, TRITON),
    Case("head_dim 96", MIXED, {"shape": ModelShape(2, 2, 96)}, TRITON),
    *(Case(f"cache of {name}", MIXED, {"cache_dtype": name}, TRITON)
      for name in ("int8", "float8_e4m3fn", "float8_e5m2")),
]  # fmt: skip
TINY = ModelShape(4, 1, 64)
TINY_CASES = [
    Case("decode", [(1, 40), (1, 17)], {"shape": TINY, "dtype": "float32"}, TRITON),
    Case("mosaic", [(1, 33)], {"shape": TINY}, ("mosaic mma",), {"share_prefixes": False}, True),
]


def plan(bench: Bench, case: Case, variant: str, **tiling: Any) -> Batch:
    """The case's batch, planned."""
    options: dict[str, Any] = {"shape": LLAMA, "dtype": "bfloat16"} | case.options
    shape: ModelShape = options["shape"]
    options.setdefault("num_tokens", sum(count for count, _ in case.rows))
    options.setdefault("num_rows", len(case.rows))
    longest = max(length for _, length in case.rows)
    batch = make_batch(case.rows, max_context=longest + 128, **options)
    kernels = make_kernels(
        bench,
        VARIANTS[variant],
        shape,
        options.get("block_size", 16),
        options["dtype"],
        **case.tiling | tiling,
    )
    assert kernels.tiling is not None
    fields = asdict(kernels.tiling)
    for name in ("num_kv_heads", "group", "block_size"):
        del fields[name]  # `with_plan` knows them
    batch = with_plan(batch, kernels.backend, interpret=kernels.interpret, **fields)
    planned = batch.inputs.plan
    assert planned is not None
    inputs = batch.inputs._replace(plan=replace(planned, kernels=kernels))
    return batch._replace(inputs=inputs)


def compile_batch(bench: Bench, batch: Batch, log_sum_exp: bool = False) -> jax.stages.Compiled:
    """The op over a batch."""

    def attend(q, cache, inputs, sinks):
        options = batch.options | ({} if sinks is None else {"sinks": sinks})
        if log_sum_exp:
            options["return_log_sum_exp"] = True
        return paged_attention(q, cache, inputs, scale=batch.q.shape[-1] ** -0.5, **options)

    return bench.compile(
        attend, batch.q, batch.kv_cache_layer, batch.inputs, batch.options.get("sinks")
    )


def run_batch(program: jax.stages.Compiled, batch: Batch) -> list[np.ndarray]:
    """Outputs in float32, and logarithms of sums if the program has them."""
    results = program(batch.q, batch.kv_cache_layer, batch.inputs, batch.options.get("sinks"))
    return [np.asarray(x.astype(jnp.float32)) for x in jax.tree.leaves(results)]


def check_case(bench: Bench, case: Case, variant: str) -> Check:
    """Compares with dense attention in float64; cache blocks that nobody may read hold NaN."""
    name = f"{variant}: {case.name}"

    def prepare():
        batch = plan(bench, case, variant)
        return batch, compile_batch(bench, batch, case.log_sum_exp)

    def run(prepared):
        batch, program = prepared
        out, *rest = run_batch(program, batch)
        expected = batch.expected
        num_tokens = len(expected)
        difference = (out[:num_tokens] - expected).reshape(num_tokens, -1)
        norms = np.linalg.norm(expected.reshape(num_tokens, -1), axis=1)
        errors = np.linalg.norm(difference, axis=1) / norms
        error = float(np.linalg.norm(difference) / np.linalg.norm(norms))
        note = f"worst token {errors.max():.1e}"
        if not errors.max() <= 4 * GOALS["error"].limit:
            error = max(error, float(errors.max())) if np.isfinite(error) else float("nan")
        if np.any(out[num_tokens:]):
            note, error = "padding is not zero", float("nan")
        if rest:
            off = float(np.abs(rest[0][:num_tokens] - batch.log_sum_exp).max())
            note += f", log_sum_exp off by {off:.1e}"
            if not off <= 0.02 or not np.all(np.isneginf(rest[0][num_tokens:])):
                error = float("nan")
        return [Row("correctness", name, error, "relative", "error", note=note)]

    return Check("correctness", name, run, prepare, worth=0)


def check_fixed_split(bench: Bench, variant: str) -> Check:
    """A row's bits are the same alone and in a crowd."""
    name = f"{variant}: fixed_split, alone and in a crowd"
    length = 40 if bench.is_rehearsal else 3000
    shape = TINY if bench.is_rehearsal else LLAMA

    def prepare():
        options: dict[str, Any] = {"shape": shape, "num_tokens": 4, "num_rows": 4}
        others = [(1, length), (1, 17), (1, length // 2), (1, 1)]
        batches = [
            plan(bench, Case("", rows, options), variant, fixed_split=256, share_prefixes=False)
            for rows in ([others[0]], others)
        ]
        # Of equal sizes, so that the first row gets the same numbers and blocks in both.
        return batches, compile_batch(bench, batches[1])

    def run(prepared):
        (alone, crowd), program = prepared
        (one,), (many,) = run_batch(program, alone), run_batch(program, crowd)
        return [Row("correctness", name, float(np.array_equal(one[0], many[0])), "", "equal")]

    return Check("correctness", name, run, prepare, worth=0)


# --- 3. Engine


def check_engine(bench: Bench) -> Check:
    """The same greedy tokens from every backend."""
    backends = ("xla", "triton") if bench.is_rehearsal else ("xla", "triton", "mosaic")
    dtype = "float32" if bench.is_rehearsal else "bfloat16"

    def generate(backend: str) -> list[list[int]]:
        from jpaged.sampling_params import SamplingParams
        from tests import tiny_models
        from tests.invariance.engines import Job, answer, open_engine

        folder = bench.folder / f"model-{backend}"
        tiny_models.write_tiny_model(folder, "heads-of-64")
        num_tokens = 2 if bench.is_rehearsal else 24
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        random = np.random.default_rng(0)
        lengths = (5, 9) if bench.is_rehearsal else (5, 33, 64, 100, 7, 150, 16, 48)
        jobs = [Job(random.integers(0, 256, n).tolist(), params) for n in lengths]
        engine = open_engine(folder, attention_backend=backend, dtype=dtype)
        try:
            return [list(request.output_token_ids) for request in answer(engine, jobs)]
        finally:
            engine.close()

    def run(answers):
        rows = []
        for backend in backends[1:]:
            pairs = list(zip(answers["xla"], answers[backend], strict=True))
            # What follows a flipped token is another text.
            same = sum(len(os.path.commonprefix([a, b])) for a, b in pairs)
            share = same / sum(len(a) for a, _ in pairs)
            note = f"{sum(a == b for a, b in pairs)} of {len(pairs)} answers are equal, {dtype}"
            rows.append(
                Row("engine", f"{backend}: tokens as xla's", share, "share", "agree", note=note)
            )
        return rows

    prepare = lambda: {backend: generate(backend) for backend in backends}  # noqa: E731
    return Check("engine", "greedy tokens", run, prepare, worth=1)


# --- 5. Decode

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
    tiling = kernels.tiling
    assert tiling is not None
    starts = np.cumsum([0, *counts]).astype(np.int32)
    num_tokens, lens = int(starts[-1]), np.array(lengths, np.int32)
    sizes = plan_sizes(tiling, num_tokens=num_tokens, num_rows=len(lens))
    arrays = cut_arrays(np.zeros(sizes.num_ints, np.int32), sizes)
    fill_plan(arrays, tiling, query_start_loc=starts, seq_lens=lens, block_tables=tables)
    positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(lens - starts[1:], counts)
    slots, plan = np.zeros(num_tokens, np.int32), AttentionPlan(kernels, arrays)
    fields: tuple[Any, ...] = (positions, slots, starts, lens, tables, plan)
    return AttentionInputs._make(fields)


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


# --- 6. Prefill

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


# --- 7. Shared prefixes


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


# --- 8. Against jax's own


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


# --- 4 and 9. The whole step


def make_runner(bench: Bench, backend: str) -> tuple[Any, int]:
    """A `ModelRunner` of an 8B model without weights, and the tokens of each request."""
    from flax import nnx

    from jpaged.models.registry import find_family
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
    family = find_family(config.architecture)
    runner = ModelRunner(
        nnx.eval_shape(lambda: family.module(config, dtype=jnp.bfloat16)),
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
        tables = np.zeros((num_rows, runner.max_blocks), np.int32)
        blocks = 1 + np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
        tables[:, : context // block_size] = blocks.reshape(num_rows, -1)
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


# --- All checks, and the ratios between them


SKEWED = (32768, *[512] * 63)
PEER_SPLITS = (16, 4)  # the first is its default


def list_checks(bench: Bench) -> list[Check]:
    """In the order of the report; `worth` says in which they run."""
    checks = [Check("facts", "facts", lambda _: facts(bench), worth=-1, is_fact=True)]
    if bench.is_rehearsal:
        checks += [check_case(bench, case, name) for case in TINY_CASES for name in case.variants]
        checks += [check_fixed_split(bench, "triton"), check_engine(bench)]
        checks += [check_graphs(bench, "triton")]
        checks += [
            check_decode(bench, "triton", (64, 64), size, goal="decode") for size in (16, 64)
        ]
        checks += [check_decode(bench, "triton", (160, 32), 16, goal="skewed")]
        checks += [check_prefill(bench, "triton", 64), check_dense(bench, (128, 2), 64)]
        checks += [check_prefix(bench, "triton", shares) for shares in (True, False)]
        return [*checks, check_peer(bench, 2, 256, 2), check_step(bench, "triton")]
    checks += [check_case(bench, case, name) for case in CASES for name in case.variants]
    checks += [check_fixed_split(bench, variant) for variant in VARIANTS]
    checks += [check_engine(bench)]
    checks += [check_graphs(bench, backend) for backend in ("triton", "mosaic")]
    for variant in VARIANTS:
        time_it = functools.partial(check_decode, bench, variant)
        for block_size in (16, 64):
            checks += [
                time_it([8192] * 64, block_size, goal="decode"),
                time_it([32768] * 16, block_size, goal="decode"),
                time_it([32768], block_size, goal="split"),
                time_it([8192] * 16, block_size, worth=3),
                time_it([8192], block_size, worth=3),
                time_it([2048] * 64, block_size, worth=4),
                time_it([2048] * 16, block_size, worth=5),
                time_it([2048], block_size, worth=5),
            ]
        checks += [
            time_it(SKEWED, 16, goal="skewed"),
            time_it([4096] * 16, 16, model="llama-2-7b", goal="decode", worth=4),
            time_it([8192] * 64, 16, model="llama-3.2-1b", goal="decode", worth=4),
        ]
        if variant != "mosaic wgmma":  # which spills with heads of 256
            checks += [time_it([2048] * 64, 16, model="gemma-2-9b", goal="decode", worth=4)]
    checks += [check_prefill(bench, backend, 8192) for backend in ("triton", "mosaic")]
    checks += [check_dense(bench, form, 8192) for form in DENSE_FORMS]
    checks += [
        check_prefix(bench, variant, shares)
        for variant in ("triton", "mosaic mma")
        for shares in (True, False)
    ]
    checks += [
        check_peer(bench, num_rows, 8192, k_splits)
        for num_rows in (1, 16, 64)
        for k_splits in PEER_SPLITS
    ]
    checks += [check_step(bench, backend) for backend in ("triton", "mosaic")]
    return checks


class Ratio(NamedTuple):
    """How much quicker one row of the report is than the best of others.

    Attributes:
        section: One of `SECTIONS`.
        what: In the report.
        ours: A row.
        theirs: Rows.
        goal: A key of `GOALS`.
    """

    section: str
    what: str
    ours: str
    theirs: tuple[str, ...]
    goal: str


def list_ratios(is_rehearsal: bool) -> list[Ratio]:
    """Goals that two measurements make."""
    variants = ("triton",) if is_rehearsal else ALL
    batches = ([64, 64],) if is_rehearsal else ([8192] * 64, [32768] * 16, [32768])
    ratios = [
        Ratio(
            "decode",
            f"{variant}: {len(batch)} x {batch[0]} tokens, blocks of 16 as 64",
            decode_name(variant, batch, 16),
            (decode_name(variant, batch, 64),),
            "block 16",
        )
        for variant in variants
        for batch in batches
    ]
    if is_rehearsal:
        return ratios
    dense = tuple(prefill_name(dense_name(form), 8192) for form in DENSE_FORMS)
    for backend in ("triton", "mosaic"):
        ours = prefill_name(backend, 8192)
        ratios.append(Ratio("prefill", f"{backend}: as attention_mgpu", ours, dense, "prefill"))
    for variant in ("triton", "mosaic mma"):
        whole = (prefix_name(variant, False),)
        ours = prefix_name(variant, True)
        ratios.append(Ratio("prefix", f"{variant}: gain of sharing", ours, whole, "prefix"))
    for num_rows in (1, 16, 64):
        peers = tuple(peer_name(num_rows, 8192, k_splits) for k_splits in PEER_SPLITS)
        goal = "peer 64" if num_rows == 64 else "peer"
        for variant in ALL:
            ours = decode_name(variant, [8192] * num_rows, 16)
            what = f"{variant}: {num_rows} x 8192 tokens over jax's paged_attention"
            ratios.append(Ratio("peer", what, ours, peers, goal))
    return ratios


def run_ratios(ratios: Sequence[Ratio], rows: Sequence[Row]) -> list[Row]:
    """What the measured rows say of each."""
    seconds = {row.what: row.seconds for row in rows if row.seconds}
    results = []
    for ratio in ratios:
        theirs = [seconds[name] for name in ratio.theirs if name in seconds]
        value, verdict = None, ""
        if ratio.ours in seconds and theirs:
            value = min(theirs) / seconds[ratio.ours]
        else:
            missing = ratio.theirs[0] if ratio.ours in seconds else ratio.ours
            verdict = f"not measured: no time of {missing!r}"
        row = Row(ratio.section, ratio.what, value, "times the speed", ratio.goal, verdict)
        results.append(row)
    return results


class Events:
    """Tells the watcher, a line of JSON each."""

    def __init__(self, path: Path):
        """Appends to the file of an earlier worker."""
        self._path = path

    def tell(self, **event: Any) -> None:
        """Writes at once; threads never call it."""
        with self._path.open("a") as file:
            file.write(json.dumps(event) + "\n")


def failure(check: Check, reason: str) -> Row:
    """The row of a check that gave none."""
    verdict = "failed" if check.section == "correctness" else "not measured"
    return Row(check.section, check.name, None, verdict=f"{verdict}: {reason}")


class Compiler:
    """Runs what prepares checks: beside each other in threads, or each when it is asked for."""

    def __init__(self, checks: Sequence[Check], num_threads: int):
        """Starts, unless there are no threads."""
        self.futures: dict[Any, Future] = {}
        self._pool = ThreadPoolExecutor(num_threads) if num_threads else None
        if self._pool is not None:
            for check in checks:
                key = check.key or check.name
                if key not in self.futures:
                    self.futures[key] = self._pool.submit(check.prepare)

    def result(self, check: Check, tell: Callable[..., None]) -> Any:
        """What `prepare` made, or raises what it raised; a sign of life for what compiles."""
        key = check.key or check.name
        if key not in self.futures:
            future = self.futures[key] = Future()
            try:
                future.set_result(check.prepare())
            except Exception as error:
                future.set_exception(error)
        count = -1
        while not self.futures[key].done():
            now = sum(future.done() for future in self.futures.values())
            if now != count:
                tell(alive=f"{now} of {len(self.futures)} programs compiled")
            count = now
            wait([self.futures[key]], timeout=5)
        return self.futures[key].result()

    def close(self) -> None:
        """Drops what has not begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def work(args: argparse.Namespace) -> int:
    """The worker."""
    events = Events(args.worker / "events")
    # Only GGUF files need it, and none is read here; GPU images may lack it.
    try:
        import gguf  # noqa: F401
    except ImportError:
        sys.modules["gguf"] = unittest.mock.MagicMock()
    # What comes out of a cache is not compiled: no dump, no remarks.
    jax.config.update("jax_enable_compilation_cache", False)
    devices = jax.devices()
    if devices[0].platform != "gpu" and not args.rehearse:
        events.tell(fatal=f"no GPU: JAX sees {devices}; --rehearse runs tiny sizes on a CPU")
        return 2
    bench = Bench(is_rehearsal=args.rehearse, folder=args.worker)
    checks = list_checks(bench)
    events.tell(checks=[[check.section, check.name, check.worth] for check in checks])
    done = set(args.skip)
    checks = sorted((c for c in checks if c.is_fact or c.name not in done), key=lambda c: c.worth)
    compiler = None
    for check in checks:
        if compiler is None and not check.is_fact:  # ceilings are measured on a quiet machine
            others = [c for c in checks if not c.is_fact]
            compiler = Compiler(others, 0 if args.serial else os.cpu_count() or 1)
        if check.worth >= 2 and compiler is not None:
            _await(compiler, events, args)
        if time.time() > args.until and not check.is_fact:
            break  # the watcher knows what is left
        events.tell(begin=check.name)
        try:
            rows = check.run(compiler.result(check, events.tell) if compiler else check.prepare())
        except Exception as error:
            traceback.print_exc()
            lines = f"{type(error).__name__}: {error}".strip().splitlines()
            rows = [failure(check, lines[0][:300])]
        events.tell(end=check.name, rows=[asdict(row) for row in rows])
        try:
            jax.block_until_ready(jnp.arange(8) + 1)
        except Exception:  # after an illegal access nothing runs in this process any more
            traceback.print_exc()
            _leave(3)
    if compiler is not None:
        compiler.close()
    _leave(0)
    return 0


def _leave(status: int) -> None:
    """Ends the process without waiting for what still compiles."""
    ctypes.CDLL(None).fflush(None)  # what compilers wrote to C's stdout
    os._exit(status)


def _await(compiler: Compiler, events: Events, args: argparse.Namespace) -> None:
    """Waits until nothing compiles, which would disturb timings, or half the time is gone."""
    pending = [future for future in compiler.futures.values() if not future.done()]
    if not pending:
        return
    limit = args.until - args.budget_s * 0.4
    try:
        for count, _ in enumerate(as_completed(pending, max(0.0, limit - time.time())), 1):
            events.tell(alive=f"compiled {count} of {len(pending)} programs that were left")
    except TimeoutError:
        events.tell(alive="times are taken beside compilation, which may slow the host")


# --- The watcher ----------------------------------------------------------------------------------

MAX_WORKERS = 6
PATIENCE_S = 120  # of silence; the slowest compilation takes half a minute


class Watcher:
    """Starts workers and gathers what they find."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        """Starts none yet."""
        self.args, self.folder = args, folder
        self.log = folder / "log"
        self.rows: dict[str, list[Row]] = {}  # by check
        self.checks: list[tuple[str, str, int]] = []
        self.running = ""
        self.fatal = ""
        self.until = time.time() + args.budget_s
        self._offset = 0

    def run(self) -> None:
        """Has all checks done, by as many workers as it takes."""
        for number in range(MAX_WORKERS):
            reason = self._run_worker(is_first=number == 0)
            self._read()
            if not reason or self.fatal:
                return
            self._say(f"worker: {reason}; see {self.log}")
            if not self.running:
                return  # nobody to blame
            self._blame(reason)
            if time.time() > self.until:
                return

    def _blame(self, reason: str) -> None:
        for section, name, _ in self.checks:
            if name == self.running:
                check = Check(section, name, lambda _: [])
                self.rows.setdefault(name, [failure(check, reason)])
        self.running = ""

    def _run_worker(self, *, is_first: bool) -> str:
        """Why the worker did not end well; empty if it did."""
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(self.folder)]
        command += ["--until", str(self.until), "--budget-s", str(self.args.budget_s)]
        command += ["--rehearse"] * self.args.rehearse + ["--serial"] * (not is_first)
        command += ["--skip", *self.rows]
        flags = f"--xla_dump_to={self.folder / 'dump'} --xla_dump_hlo_module_re=jit__step"
        extra = {"MOSAIC_GPU_DUMP_PTXAS": "1", "PYTHONUNBUFFERED": "1"}
        if self.args.rehearse:
            flags = "--xla_backend_optimization_level=0"
            # Mosaic's interpreter needs so many threads.
            extra |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
        extra["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
        with self.log.open("a") as log:
            worker = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | extra)
        try:
            heard = time.time()
            while worker.poll() is None:
                time.sleep(0.1)
                if self._read():
                    heard = time.time()
                patience = PATIENCE_S * (4 if self.args.rehearse else 1)
                if time.time() - heard > patience:
                    return f"nothing heard for {patience} s, ended"
                if time.time() > self.until + 60:
                    return "still running a minute after the budget was spent, ended"
        finally:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
        return f"exit status {worker.returncode}" if worker.returncode else ""

    def _read(self) -> bool:
        """Takes in new events; whether there were any."""
        path = self.folder / "events"
        if not path.exists():
            return False
        with path.open() as file:
            file.seek(self._offset)
            lines = file.read()
        lines = lines[: lines.rfind("\n") + 1]
        self._offset += len(lines)  # ASCII
        for line in lines.splitlines():
            self._take(json.loads(line))
        return bool(lines)

    def _take(self, event: dict[str, Any]) -> None:
        self.fatal = event.get("fatal", self.fatal)
        self.checks = [tuple(check) for check in event.get("checks", self.checks)]
        if "alive" in event:
            self._say(event["alive"])
        self.running = event.get("begin", self.running)
        if "end" in event:
            self.running = ""
            rows = [Row(**row) for row in event["rows"]]
            self.rows[event["end"]] = rows
            for row in rows:
                self._say(format_row(row))

    def _say(self, line: str) -> None:
        left = self.until - time.time()
        print(f"[{len(self.rows)}/{len(self.checks)}, {left:.0f} s left] {line}", file=sys.stderr)

    def report(self) -> list[Row]:
        """All rows, in the order of the sections; what is missing says so."""
        rows = []
        for section, name, _ in self.checks:
            missing = Row(section, name, None, verdict="not measured: no time left")
            rows += self.rows.get(name, [missing])
        rows += run_ratios(list_ratios(self.args.rehearse), rows)
        if not self.args.rehearse and self.log.exists():
            rows += read_ptxas(self.log.read_text(errors="replace"))
        return sorted(rows, key=lambda row: SECTIONS.index(row.section))


def read_ptxas(text: str) -> list[Row]:
    """What ptxas said of Mosaic's kernels; Triton's are compiled out of sight."""
    spills: dict[str, int] = {}
    name = ""
    for line in text.splitlines():
        if found := re.search(r"(?:entry function|properties for) '?(\w+)", line):
            name = found.group(1)
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills[name] = max(spills.get(name, 0), sum(map(int, found.groups())))
    remarks = sorted(set(re.findall(r".*(?:serialized|C7504).*", text)))
    note = "; ".join(f"{name}: {count}" for name, count in spills.items() if count)
    decode = [count for name, count in spills.items() if "decode" in name]
    what = "mosaic: bytes spilled by decode kernels"
    if not decode:
        return [Row("graphs", what, None, verdict="not measured: ptxas said nothing")]
    return [
        Row("graphs", what, max(decode), "bytes", "spills", note=f"others: {note or 'none'}"),
        Row(
            "graphs",
            "mosaic: products serialised",
            sum("paged_attention" in remark for remark in remarks),
            "remarks",
            "serialised",
            note=" / ".join(remark.strip()[:160] for remark in remarks[:4]),
        ),
    ]


def format_row(row: Row) -> str:
    """For the terminal."""
    value = "-" if row.value is None else f"{row.value:.4g} {row.unit}".strip()
    limit = ""
    if row.goal:
        goal = GOALS[row.goal]
        limit = f" ({'at least' if goal.is_least else 'at most'} {goal.limit:g})"
    return f"{row.section}: {row.what} | {value}{limit} | {row.verdict} | {row.note}".rstrip(" |")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--json", type=Path, help="also write the report here")
    add("--log", type=Path, help="also write here what compilers and failing checks said")
    add("--budget-s", type=float, default=420.0, help="begin no check after so many seconds")
    add("--rehearse", action="store_true", help="tiny sizes, kernels interpreted, on a CPU")
    for name in ("--worker", "--until", "--skip", "--serial"):  # of a worker
        kind: dict[str, Any] = {
            "--worker": {"type": Path}, "--until": {"type": float},
            "--skip": {"nargs": "*", "default": []}, "--serial": {"action": "store_true"},
        }[name]  # fmt: skip
        add(name, help=argparse.SUPPRESS, **kind)
    return parser.parse_args()


def main() -> int:
    """Watches, prints the table, returns the exit status."""
    args = parse_arguments()
    if args.worker:
        return work(args)
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        watcher = Watcher(args, Path(folder))
        try:
            watcher.run()
        finally:  # whatever happens, what was found is not lost
            rows = watcher.report()
            log = watcher.log.read_text(errors="replace") if watcher.log.exists() else ""
            if args.log:
                args.log.write_text(log)
            if args.json:
                goals = {name: goal._asdict() for name, goal in GOALS.items()}
                report = {
                    "seconds": round(time.time() - started, 1),
                    "error": watcher.fatal,
                    "goals": goals,
                    "rows": [asdict(row) for row in rows],
                }
                args.json.write_text(json.dumps(report, indent=1))
    print("\n".join(map(format_row, rows)))
    wrong = [r for r in rows if r.section == "correctness" and r.verdict != "met"]
    late = [r for r in wrong if r.verdict == "not measured: no time left"]
    if watcher.fatal or not rows:
        print(f"error: {watcher.fatal or log[-2000:]}", file=sys.stderr)
        return 2
    if any(r.verdict.startswith("not measured") or r.verdict.startswith("failed") for r in rows):
        print(f"\nThe log's end:\n{log[-1500:]}", file=sys.stderr)
    print(
        f"{sum(r.verdict == 'met' for r in rows)} goals met, "
        f"{sum(r.verdict == 'missed' for r in rows)} missed, "
        f"{sum(r.verdict.startswith('not measured') for r in rows)} not measured, "
        f"{len(wrong) - len(late)} correctness checks failed, in {time.time() - started:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
