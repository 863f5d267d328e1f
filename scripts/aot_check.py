"""Compiles GPU programs for named GPUs, with no GPU, and reports what they take.

    scripts/aot                                    # makes the environment, then runs this
    scripts/aot --targets h200 --shapes llama-3.1-8b --json report.json
    scripts/aot --steps                            # whole steps of an 8B model: see aot_step.py

XLA compiles ahead of time for a GPU that is described, not present; `ptxas` tells registers and
spills of each kernel, XLA's dump its shared memory. Every target runs in a process of its own,
since a compiler that cannot take a kernel may abort. Fails if a decode kernel spills, if fewer
thread blocks fit an SM than promised, or if something does not compile. XLA_FLAGS are kept.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.paged_attention import (
    AttentionInputs,
    AttentionPlan,
    kv_cache_layer_shape,
    paged_attention,
)
from pallas_kernels.paged_attention.choice import Shape, choose
from pallas_kernels.paged_attention.plan import cut_arrays, plan_sizes
from pallas_kernels.paged_attention.shapes import SHAPES as MODEL_SHAPES
from scripts.aot_dump import FLAGS, MOSAIC_DUMPS, read_kernels
from scripts.aot_step import CONFIG, PRODUCTS, StepReport, compile_steps, print_steps
from scripts.aot_targets import KIB, TARGETS, make_mesh
from scripts.arguments import count, output_file

NUM_ROWS, MAX_CONTEXT = 64, 8192  # more than any window of the shapes
# Tokens of each program's bucket. A decode program has the prefill kernel too, for shared prefixes.
PROGRAMS = {"decode": NUM_ROWS, "mixed": 2048}
SHAPES = ("llama-3.1-8b", "smollm2-135m", "gemma-2-9b", "gpt-oss-20b", "phi-3-mini")
BLOCK_SIZES = (16, 32, 64, 128)
MIN_DECODE_BLOCKS = 2  # thread blocks of a decode kernel per SM, at head_dim up to 128


@dataclass
class Report:
    """One compiled kernel.

    Attributes:
        target: GPU.
        shape: Model.
        block_size: Tokens per block of the cache.
        backend: Of the attention.
        program: "decode" (64 requests) or "mixed" (2,048 tokens).
        kernel: Its name.
        registers: Per thread.
        spill_bytes: Stored and loaded.
        smem: Bytes of shared memory.
        threads: Per thread block.
        blocks_per_sm: Thread blocks that fit.
        products: Tensor-core instruction and how many of it.
        compile_s: Seconds for the whole program.
    """

    target: str
    shape: str
    block_size: int
    backend: str
    program: str
    kernel: str
    registers: int
    spill_bytes: int
    smem: int
    threads: int
    blocks_per_sm: int
    products: str
    compile_s: float

    def problems(self) -> list[str]:
        """Why this must not be; empty if it is fine."""
        name = f"{self.backend} {self.kernel} for {self.shape} on {self.target}"
        name += f", blocks of {self.block_size}"
        if "decode" not in self.kernel:
            return []
        if self.spill_bytes:
            return [f"{name} spills {self.spill_bytes} bytes"]
        # Decode by wgmma, which is not the default, fills an SM with one.
        is_small = MODEL_SHAPES[self.shape].head_dim <= 128 and "wgmma" not in self.products
        if is_small and self.blocks_per_sm < MIN_DECODE_BLOCKS:
            return [f"{name}: {self.blocks_per_sm} thread blocks per SM"]
        return []


def compile_kernels(
    name: str,
    dump: Path,
    *,
    shapes: list[str],
    block_sizes: list[int],
    programs: list[str],
    backend: str,
    decode_rows: int,
) -> list[Report]:
    """Compiles attention alone for one target, in this process, whose XLA dumps into a folder.

    What the backend cannot take is left out, with a line that says why.
    """
    target = TARGETS[name]
    mesh = make_mesh(name)
    sharding = NamedSharding(mesh, PartitionSpec())

    def abstract(shape, dtype=jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    reports = []
    for shape_name in shapes:
        model = MODEL_SHAPES[shape_name]
        for block_size in block_sizes:
            for program in programs:
                num_tokens = PROGRAMS[program]
                shape = Shape(*model[:3], block_size, "bfloat16")
                try:
                    kernels, _ = choose(shape, mesh.devices.flat[0], backend=backend)
                except ValueError as error:
                    why = str(error).removesuffix("; give 'auto' for what can")
                    print(f"left out: {shape_name} on {name}: {why}", file=sys.stderr)
                    continue
                assert kernels is not None and kernels.tiling is not None
                tiling = replace(kernels.tiling, decode_rows=decode_rows)
                kernels = replace(kernels, tiling=tiling)
                sizes = plan_sizes(tiling, num_tokens=num_tokens, num_rows=NUM_ROWS)
                arrays = cut_arrays(np.zeros(sizes.num_ints, np.int32), sizes)
                num_blocks = MAX_CONTEXT // block_size
                inputs = AttentionInputs(
                    positions=abstract((num_tokens,)),
                    slot_mapping=abstract((num_tokens,)),
                    query_start_loc=abstract((NUM_ROWS + 1,)),
                    seq_lens=abstract((NUM_ROWS,)),
                    block_tables=abstract((NUM_ROWS, num_blocks)),
                    plan=AttentionPlan(
                        kernels,
                        jax.tree.map(lambda array: abstract(array.shape), arrays),
                    ),
                )
                q = abstract((num_tokens, model.num_heads, model.head_dim), jnp.bfloat16)
                cache = kv_cache_layer_shape(
                    num_blocks=1 + NUM_ROWS * num_blocks,
                    num_kv_heads=model.num_kv_heads,
                    block_size=block_size,
                    head_dim=model.head_dim,
                )
                sinks = abstract((model.num_heads,), jnp.float32) if model.has_sinks else None

                def attend(q, cache, inputs, sinks, model=model):
                    return paged_attention(
                        q,
                        cache,
                        inputs,
                        scale=model.head_dim**-0.5,
                        window=model.window,
                        softcap=model.softcap,
                        sinks=sinks,
                    )

                before = set(dump.iterdir())
                started = time.perf_counter()
                with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
                    lowered = jax.jit(attend).lower(q, abstract(cache, jnp.bfloat16), inputs, sinks)
                    lowered.compile()
                seconds = time.perf_counter() - started
                for kernel in read_kernels(set(dump.iterdir()) - before, target):
                    is_prefill = "prefill" in kernel["kernel"]
                    own = kernels.prefill_backend if is_prefill else None
                    reports.append(
                        Report(
                            target=name,
                            shape=shape_name,
                            block_size=block_size,
                            backend=own or backend,
                            program=program,
                            compile_s=round(seconds, 1),
                            **kernel,
                        )
                    )
    return reports


def print_kernels(reports: list[Report]) -> None:
    """As Markdown."""
    print(
        "| target | shape | block | backend | program | kernel | registers | spills | "
        "shared memory | blocks/SM | products | compile |\n" + "|---" * 12 + "|"
    )
    for r in reports:
        print(
            f"| {r.target} | {r.shape} | {r.block_size} | {r.backend} | {r.program} | {r.kernel} | "
            f"{r.registers} | {r.spill_bytes} B | {r.smem / KIB:.0f} KiB | {r.blocks_per_sm} | "
            f"{r.products} | {r.compile_s} s |"
        )


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="scripts/aot", description=(__doc__ or "").split("\n")[0])

    def several(group: Any, flag: str, choices: Any, metavar: str, what: str, **options: Any):
        text = f"{what}: some of {', '.join(map(str, choices))}"
        group(flag, nargs="+", choices=choices, metavar=metavar, help=text, **options)

    add = parser.add_argument
    several(add, "--targets", list(TARGETS), "GPU", "GPUs (default: all)", default=list(TARGETS))
    several(
        add, "--programs", list(PROGRAMS), "PROGRAM", "programs (default: all)",
        default=list(PROGRAMS),
    )  # fmt: skip
    add("--backend", choices=("triton", "mosaic"), default="triton", help="of the attention")
    add("--json", type=output_file, help="also write the reports here")
    kernels = parser.add_argument_group(
        "kernels alone", "3 to 20 seconds for a GPU, shape and program"
    ).add_argument
    default = ", ".join(SHAPES)
    several(kernels, "--shapes", list(MODEL_SHAPES), "SHAPE", f"models (default: {default})")
    several(kernels, "--block-sizes", BLOCK_SIZES, "N", "tokens per block (default: 16)", type=int)
    kernels(
        "--decode-rows", type=int, choices=(16, 64), default=16,
        help="of a decode item; 64: by wgmma, with --backend mosaic (default: 16)",
    )  # fmt: skip
    steps = parser.add_argument_group(
        "whole steps", "of an 8B Llama; half a minute for a GPU, program and kind of products"
    ).add_argument
    steps("--steps", action="store_true", help="compile these instead of kernels alone")
    several(
        steps, "--products", list(PRODUCTS), "KIND", "products by (default: all)",
        default=list(PRODUCTS),
    )  # fmt: skip
    steps("--layers", type=count, default=CONFIG.num_layers, help="of the model (default: 32)")
    add("--dump", type=Path, help=argparse.SUPPRESS)  # of a process that compiles
    args = parser.parse_args()
    if args.decode_rows == 64 and args.backend != "mosaic":
        parser.error("--decode-rows 64 is wgmma's, which --backend mosaic has")
    if args.steps and (args.shapes or args.block_sizes or args.decode_rows != 16):
        parser.error(
            "--shapes, --block-sizes and --decode-rows are for kernels alone; --steps compiles an "
            "8B Llama with blocks of 16"
        )
    args.shapes, args.block_sizes = args.shapes or SHAPES, args.block_sizes or [16]
    return args


def compile_here(args: argparse.Namespace) -> list[Report] | list[StepReport]:
    """Compiles for the one target and the one kind of products that are named."""
    if args.steps:
        return compile_steps(
            args.targets[0],
            args.dump,
            programs=args.programs,
            products=args.products[0],
            backend=args.backend,
            num_layers=args.layers,
        )
    return compile_kernels(
        args.targets[0],
        args.dump,
        shapes=args.shapes,
        block_sizes=args.block_sizes,
        programs=args.programs,
        backend=args.backend,
        decode_rows=args.decode_rows,
    )


def compile_apart(target: str, products: str) -> list[dict[str, Any]] | None:
    """Has a process of its own compile; `None` if it could not."""
    with tempfile.TemporaryDirectory(prefix="aot-") as folder:
        result = Path(folder) / "reports.json"
        dump = Path(folder) / "dump"
        dump.mkdir()
        flags = (os.environ.get("XLA_FLAGS", ""), PRODUCTS[products], FLAGS.format(folder=dump))
        # Of options that are given twice, the last counts.
        command = [sys.executable, "-m", "scripts.aot_check", *sys.argv[1:], "--targets", target]
        command += ["--products", products, "--json", result, "--dump", dump]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
        environment |= dict.fromkeys(MOSAIC_DUMPS, "1") | {"MOSAIC_GPU_DUMP_TO": str(dump)}
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment)
        if done.returncode != 0 or not result.exists():
            sys.stderr.write(done.stderr[-4000:])
            return None
        for line in done.stderr.splitlines():
            if line.startswith("left out: "):
                print(line, file=sys.stderr)
        return json.loads(result.read_text())


def main() -> int:
    """Compiles, prints the table, returns the exit status."""
    args = parse_arguments()
    if args.dump:
        args.json.write_text(json.dumps([asdict(report) for report in compile_here(args)]))
        return 0
    make = StepReport if args.steps else Report
    reports, problems = [], []
    for target in args.targets:
        for products in args.products if args.steps else ["triton"]:
            print(f"compiling for {target}", file=sys.stderr, flush=True)
            found = compile_apart(target, products)
            if found is None:
                problems.append(f"{target}: nothing was compiled; see above")
            reports += [make(**entry) for entry in found or ()]
    if not reports and not problems:
        problems.append("nothing was compiled, since all was left out; see above")
    (print_steps if args.steps else print_kernels)(reports)
    if args.json:
        args.json.write_text(json.dumps([asdict(report) for report in reports], indent=1))
    problems += [problem for report in reports for problem in report.problems()]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
