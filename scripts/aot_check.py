"""Compiles the GPU kernels for named GPUs, with no GPU, and reports what they take.

    scripts/aot                                    # makes the environment, then runs this
    scripts/aot --targets h200 --shapes llama-3.1-8b --json report.json

XLA compiles ahead of time for a GPU that is described, not present; `ptxas` tells registers and
spills of each kernel, XLA's dump its shared memory. Every target runs in a process of its own,
since a compiler that cannot take a kernel may abort. Fails if a decode kernel spills, if fewer
thread blocks fit an SM than promised, or if something does not compile.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

NUM_ROWS, MAX_CONTEXT = 64, 4096
# Tokens of each program's bucket. A decode program has the prefill kernel too, for shared prefixes.
PROGRAMS = {"decode": NUM_ROWS, "mixed": 2048}
SHAPES = ("llama-3.1-8b", "smollm2-135m", "gemma-2-9b", "gpt-oss-20b", "phi-3-mini")
MIN_DECODE_BLOCKS = 2  # thread blocks of a decode kernel per SM, at head_dim up to 128


@dataclass(frozen=True)
class Target:
    """A GPU as XLA's ahead-of-time compiler wants it described.

    Attributes:
        description: The name by which Pallas knows its compute capability.
        capability: Compute capability.
        has_arch_features: Whether code is compiled for exactly this architecture (sm_90a).
        num_sms: Streaming multiprocessors.
        smem_per_sm: Shared memory of one, in bytes.
        smem_per_block: Most that a thread block may have, in bytes.
        l2: Cache, in bytes.
        memory: In bytes.
        bandwidth: Of memory, in bytes per second.
        clock_ghz: Of the SMs.
        lanes: Float32 lanes per SM.
    """

    description: str
    capability: tuple[int, int]
    has_arch_features: bool
    num_sms: int
    smem_per_sm: int
    smem_per_block: int
    l2: int
    memory: int
    bandwidth: int
    clock_ghz: float
    lanes: int = 128

    def as_proto(self) -> str:
        """The text form of XLA's GpuTargetConfigProto."""
        features = "ACCELERATED_FEATURES" if self.has_arch_features else "NONE"
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.smem_per_sm} threads_per_core_limit: 2048
  core_count: {self.num_sms} fpus_per_core: {self.lanes}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2}
  clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory}
  shared_memory_per_block_optin: {self.smem_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.description}"
"""


KIB, GB = 1024, 10**9
TARGETS = {
    "a100": Target(
        "NVIDIA A100-SXM4-80GB", (8, 0), False, 108, 164 * KIB, 163 * KIB, 40 * KIB * KIB,
        80 * GB, 2039 * GB, 1.41, 64,
    ),
    "l40s": Target(
        "NVIDIA L40", (8, 9), False, 142, 100 * KIB, 99 * KIB, 96 * KIB * KIB,
        48 * GB, 864 * GB, 2.49,
    ),
    "h200": Target(
        "NVIDIA H200", (9, 0), True, 132, 228 * KIB, 227 * KIB, 50 * KIB * KIB,
        141 * GB, 4800 * GB, 1.98,
    ),
    "b200": Target(
        "NVIDIA B200", (10, 0), True, 148, 228 * KIB, 227 * KIB, 126 * KIB * KIB,
        180 * GB, 7672 * GB, 1.965,
    ),
}  # fmt: skip


@dataclass
class Report:
    """One compiled kernel.

    Attributes:
        target: GPU.
        shape: Model.
        block_size: Tokens per block of the cache.
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
    program: str
    kernel: str
    registers: int
    spill_bytes: int
    smem: int
    threads: int
    blocks_per_sm: int
    products: str
    compile_s: float

    def problem(self, head_dim: int) -> str | None:
        """Why this must not be; `None` if it is fine."""
        name = f"{self.kernel} for {self.shape} on {self.target}, blocks of {self.block_size}"
        if "decode" not in self.kernel:
            return None
        if self.spill_bytes:
            return f"{name} spills {self.spill_bytes} bytes"
        if head_dim <= 128 and self.blocks_per_sm < MIN_DECODE_BLOCKS:
            return f"{name}: {self.blocks_per_sm} thread blocks per SM"
        return None


def compile_target(
    name: str, shapes: list[str], block_sizes: list[int], programs: list[str]
) -> list[Report]:
    """Compiles all programs for one target, in this process."""
    folder = tempfile.TemporaryDirectory(prefix="aot-")  # until this process ends
    dump = Path(folder.name)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_emitter_re=ptx"
    # The flags above are read when JAX is imported.
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    from pallas_kernels.paged_attention import (
        AttentionInputs,
        AttentionPlan,
        Kernels,
        kv_cache_layer_shape,
        paged_attention,
    )
    from pallas_kernels.paged_attention.choice import Shape, make_tiling
    from pallas_kernels.paged_attention.plan import cut_arrays, plan_sizes
    from pallas_kernels.paged_attention.shapes import SHAPES as MODEL_SHAPES

    target = TARGETS[name]
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target.as_proto(), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def abstract(shape, dtype=jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    reports = []
    for shape_name in shapes:
        model = MODEL_SHAPES[shape_name]
        for block_size in block_sizes:
            for program in programs:
                num_tokens = PROGRAMS[program]
                tiling = make_tiling(
                    Shape(*model[:3], block_size, "bfloat16"),
                    num_sms=target.num_sms,
                    capability=target.capability,
                )
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
                        Kernels("triton", tiling),
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
                files = set(dump.iterdir()) - before
                for kernel in read_kernels(files, target):
                    reports.append(
                        Report(
                            target=name,
                            shape=shape_name,
                            block_size=block_size,
                            program=program,
                            compile_s=round(seconds, 1),
                            **kernel,
                        )
                    )
    return reports


def read_kernels(files: set[Path], target: Target) -> list[dict[str, Any]]:
    """What each hand-written kernel of one compiled program takes."""
    launches: dict[str, tuple[int, int]] = {}  # name: (threads, shared memory)
    for file in files:
        if file.name.endswith("thunk_sequence.txt"):
            for line in file.read_text().splitlines():
                found = re.search(
                    r"(paged_attention_\w+) .*threads: \[(\d+), (\d+), (\d+)\].*"
                    r"shared_memory: (\d+)",
                    line,
                )
                if found:
                    name, x, y, z, smem = found.groups()
                    launches[name] = (int(x) * int(y) * int(z), int(smem))
    kernels = []
    for file in sorted(files):
        if file.suffix != ".ptx":
            continue
        ptx = file.read_text()
        entry = re.search(r"\.entry (paged_attention_\w+)", ptx)
        if entry is None:
            continue
        name = entry.group(1)
        registers, spills = assemble(file, ptx)
        threads, smem = launches[name]
        fits = [
            65536 // (-(-registers // 8) * 8 * threads),
            target.smem_per_sm // (smem + KIB),  # the system takes a kibibyte of each
            2048 // threads,
            32,
        ]
        counts = {
            word: len(re.findall(rf"^\s*(?:@\S+ )?{re.escape(word)}", ptx, re.M))
            for word in ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
        }
        products = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        kernels.append(
            {
                "kernel": name.removeprefix("paged_attention_"),
                "registers": registers,
                "spill_bytes": spills,
                "smem": smem,
                "threads": threads,
                "blocks_per_sm": min(fits),
                "products": products or "none",
            }
        )
    names = {kernel["kernel"] for kernel in kernels}
    if (
        names != {name.removeprefix("paged_attention_") for name in launches}
        or "decode" not in names
    ):
        raise RuntimeError(f"XLA's dump has PTX of {sorted(names)}, launches of {sorted(launches)}")
    return kernels


def assemble(file: Path, ptx: str) -> tuple[int, int]:
    """Registers per thread and spilled bytes, by ptxas."""
    import nvidia  # a namespace of wheels

    found = [p for folder in nvidia.__path__ for p in Path(folder).glob("cuda_nvcc/bin/ptxas")]
    arch = re.search(r"^\.target (sm_\w+)", ptx, re.M)
    assert arch is not None
    done = subprocess.run(
        [found[0], "-v", "--gpu-name", arch.group(1), file, "-o", os.devnull],
        capture_output=True,
        text=True,
        check=True,
    )
    registers = re.findall(r"Used (\d+) registers", done.stderr)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    return max(map(int, registers)), sum(int(a) + int(b) for a, b in spills)


def print_table(reports: list[Report]) -> None:
    """As Markdown."""
    print(
        "| target | shape | block | program | kernel | registers | spills | shared memory | "
        "blocks/SM | products | compile |\n" + "|---" * 11 + "|"
    )
    for r in reports:
        print(
            f"| {r.target} | {r.shape} | {r.block_size} | {r.program} | {r.kernel} | "
            f"{r.registers} | {r.spill_bytes} B | {r.smem / KIB:.0f} KiB | {r.blocks_per_sm} | "
            f"{r.products} | {r.compile_s} s |"
        )


def main() -> int:
    """Compiles, prints the table, returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="GPU")
    add("--shapes", nargs="+", default=list(SHAPES), help="of pallas_kernels' shapes.py")
    add("--block-sizes", nargs="+", type=int, default=[16])
    add("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="PROGRAM")
    add("--json", type=Path, help="also write the reports here")
    add("--child", choices=TARGETS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        reports = compile_target(args.child, args.shapes, args.block_sizes, args.programs)
        args.json.write_text(json.dumps([asdict(report) for report in reports]))
        return 0

    from pallas_kernels.paged_attention.shapes import SHAPES as MODEL_SHAPES

    unknown = sorted(set(args.shapes) - set(MODEL_SHAPES))
    if unknown:
        parser.error(f"--shapes {unknown[0]}: must be of {', '.join(MODEL_SHAPES)}")
    reports, problems = [], []
    for target in args.targets:
        print(f"compiling for {target}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "reports.json"
            command = [sys.executable, __file__, "--child", target, "--json", result]
            command += ["--shapes", *args.shapes, "--block-sizes", *map(str, args.block_sizes)]
            command += ["--programs", *args.programs]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            if done.returncode != 0 or not result.exists():
                sys.stderr.write(done.stderr[-4000:])
                problems.append(f"{target}: compiling ended with status {done.returncode}")
                continue
            reports += [Report(**entry) for entry in json.loads(result.read_text())]
    print_table(reports)
    for report in reports:
        problem = report.problem(MODEL_SHAPES[report.shape].head_dim)
        if problem:
            problems.append(problem)
    if args.json:
        args.json.write_text(json.dumps([asdict(report) for report in reports], indent=1))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
