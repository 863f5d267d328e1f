"""Checks of `gpu_check` that compare answers: kernels with float64, backends with each other."""

import os
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.shapes import SHAPES, ModelShape
from scripts.gpu_bench import ALL, TINY, VARIANTS, Bench, Check, make_kernels
from scripts.gpu_report import GOALS, Row
from tests.pallas_kernels.attention_batches import Batch, make_batch, with_plan

MIXED = [(65, 65), (1, 40), (17, 300), (1, 1), (66, 130), (150, 520), (1, 777)]
DECODE = [(1, n) for n in (1, 15, 16, 17, 127, 128, 255, 256, 257, 1000, 2048)]
SPLIT = [(1, 6000), (1, 33), (3, 2500)]
SHARED = [(1, 2100), (1, 2049), (1, 2600), (1, 2064), (2, 2300), (1, 2048 + 128)]
LLAMA = SHAPES["llama-3.1-8b"].with_kv_heads(2)
FULL = SHAPES["gpt-oss-20b"].with_kv_heads(2)._replace(softcap=30.0)
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
