"""What all checks of `gpu_check` share: device, sizes, data, a clock; and its first, of facts."""

import functools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import Kernels
from pallas_kernels.paged_attention.choice import Shape, make_tiling, why_no_mosaic_prefill
from pallas_kernels.paged_attention.shapes import ModelShape
from scripts.gpu_report import Row


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


ALL = tuple(VARIANTS)
TINY = ModelShape(4, 1, 64)


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
