"""Compiles whole steps of an 8B model for a GPU that is not there, and reports what they do.

The program is the engine's own: `ModelRunner` plans it from an abstract module, so that no weight
is ever allocated. Fails if KV cache or token counts are not updated in place, a weight or a layer
of the cache is copied, temporary memory exceeds what activations explain, a decode kernel spills,
an attention kernel runs outside a CUDA graph, or a decode step moves too much. What Triton's
products move is not held against them, because a tile that nobody has timed may split their sums.

XLA chooses how to multiply by timing on the GPU. Without one it takes Triton with a default tile,
so both kinds of products are compiled: `triton`, and `cublaslt` as if that had won everywhere.
"""

import math
import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.config import ModelConfig, RopeConfig
from jpaged.models.transformer import Transformer
from jpaged.runner.model_runner import ModelRunner
from jpaged.runner.step_inputs import BucketTable
from pallas_kernels.paged_attention import plan
from pallas_kernels.paged_attention.choice import Shape, choose
from scripts.aot_dump import Thunk, read_kernels, read_thunks, walk
from scripts.aot_hlo import Instruction, Program
from scripts.aot_targets import TARGETS, make_mesh

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rope=RopeConfig(
        theta=500000.0,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
)
NUM_ROWS, NUM_TOKENS = 64, 2048  # requests of a step, tokens of a mixed one
MAX_MODEL_LEN = 4096
CONTEXT = 2048  # tokens of each request: the pool holds that many of all, and the L40S both
BLOCK_SIZE = 16

MAX_BYTES_RATIO = 1.05  # of what a decode step moves to what it must

# XLA's flags for the products, by the name of who makes them.
PRODUCTS = {"triton": "", "cublaslt": "--xla_gpu_enable_triton_gemm=false"}


@dataclass
class StepReport:
    """One compiled step.

    Attributes:
        target: GPU.
        program: "decode" (64 requests, one token each) or "mixed" (2,048 tokens of 64 requests).
        products: A key of `PRODUCTS`.
        backend: Of the attention.
        num_layers: Of the model.
        kernels: That run when all requests are greedy and none wants log-probabilities.
        kernels_per_layer: Part of them in one layer.
        attention_kernels: Part of them in one layer that are attention.
        graphs: CUDA graphs that run.
        attention_graphs: Those that attention kernels are in.
        attention_outside: Attention kernels in none.
        outside: What else is in none, by name and number.
        host_waits: Conditionals and loops in none: before each the host waits for the GPU.
        cache_bytes: KV cache and token counts.
        aliased_bytes: Results that take their argument's place.
        temp_bytes: Temporary memory.
        temp_limit: What that may be; see `limit_temp`.
        copies: Weights and layers of the cache that are copied, by the kernel that does it.
        spill_bytes: Of the decode kernel; -1: not known.
        ideal_bytes: Weights once and the cache of all requests once; 0 for a mixed step, whose time
            is not made of bytes.
        moved_bytes: Least that the kernels move in all, with what the plan lets attention read.
        compile_s: Seconds.
    """

    target: str
    program: str
    products: str
    backend: str
    num_layers: int
    kernels: int
    kernels_per_layer: int
    attention_kernels: int
    graphs: int
    attention_graphs: int
    attention_outside: int
    outside: dict[str, int]
    host_waits: int
    cache_bytes: int
    aliased_bytes: int
    temp_bytes: int
    temp_limit: int
    copies: list[str]
    spill_bytes: int
    ideal_bytes: int
    moved_bytes: int
    compile_s: float

    def problems(self) -> list[str]:
        """Why this must not be; empty if it is fine."""
        name = f"{self.program} step on {self.target}, products by {self.products}"
        found = [f"{name}: {copy}" for copy in self.copies]
        if self.aliased_bytes < self.cache_bytes:
            found.append(
                f"{name}: {self.aliased_bytes} of {self.cache_bytes} bytes of KV cache and token "
                "counts are updated in place"
            )
        if self.temp_bytes > self.temp_limit:
            found.append(
                f"{name}: {self.temp_bytes} bytes of temporary memory; activations explain "
                f"{self.temp_limit}"
            )
        if self.attention_outside:
            found.append(f"{name}: {self.attention_outside} attention kernels in no CUDA graph")
        if self.outside:
            found.append(f"{name}: {sum(self.outside.values())} other thunks are in no CUDA graph")
        if self.products == "cublaslt" and self.moved_bytes > MAX_BYTES_RATIO * self.ideal_bytes:
            found.append(f"{name}: moves {self.moved_bytes} bytes; {self.ideal_bytes} are needed")
        if self.spill_bytes > 0:
            found.append(f"{name}: the decode kernel spills {self.spill_bytes} bytes")
        return found


def compile_steps(
    name: str, dump: Path, *, programs: list[str], products: str, backend: str, num_layers: int
) -> list[StepReport]:
    """Compiles steps for one target, in this process, whose XLA dumps into a folder."""
    config = replace(CONFIG, num_layers=num_layers)
    mesh = make_mesh(name)
    shape = Shape(config.num_heads, config.num_kv_heads, config.head_dim, BLOCK_SIZE, "bfloat16")
    kernels = choose(shape, mesh.devices.flat[0], backend=backend).kernels
    buckets = BucketTable(
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=NUM_TOKENS,
        decode_rows=(),
        mixed_tokens=(),
    )
    runner = ModelRunner(
        nnx.eval_shape(lambda: Transformer(config, dtype=jnp.bfloat16)),
        config=config,
        buckets=buckets,
        max_num_seqs=NUM_ROWS,
        max_blocks=MAX_MODEL_LEN // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        dtype=jnp.bfloat16,
        max_logprobs=20,
        kernels=kernels,
        platform="gpu",
    )
    reports = []
    for program in programs:
        (bucket,) = buckets.decode if program == "decode" else buckets.mixed
        before = set(dump.iterdir())
        started = time.perf_counter()
        with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
            runner.plan_programs(NUM_ROWS * CONTEXT // BLOCK_SIZE)
            runner.compile([bucket])
        seconds = time.perf_counter() - started
        files = set(dump.iterdir()) - before
        compiled = runner.program(bucket)
        memory = compiled.memory_analysis()
        hlo = Program(compiled.as_text())
        spills = -1
        if kernels is not None and kernels.tiling is not None:
            found = read_kernels(files, TARGETS[name])
            (spills,) = (k["spill_bytes"] for k in found if k["kernel"] == "decode")
        donated = [*hlo.parameters("kv_cache"), *hlo.parameters("counts")]
        ideal = moved = 0
        if program == "decode" and kernels is not None and kernels.tiling is not None:
            weights = sum(weight.num_bytes for weight in _matrices(hlo))
            least, planned = attention_bytes(kernels.tiling, config)
            ideal = weights + num_layers * least
            moved = hlo.bytes_moved() + num_layers * planned
        reports.append(
            StepReport(
                target=name,
                program=program,
                products=products,
                backend=backend,
                num_layers=num_layers,
                cache_bytes=sum(each.num_bytes for each in donated),
                aliased_bytes=memory.alias_size_in_bytes,
                temp_bytes=memory.temp_size_in_bytes,
                temp_limit=limit_temp(config, *bucket, products),
                copies=find_copies(hlo),
                spill_bytes=spills,
                ideal_bytes=ideal,
                moved_bytes=moved,
                compile_s=round(seconds, 1),
                **_describe_graphs(read_thunks(files), hlo, num_layers),
            )
        )
    return reports


def _describe_graphs(thunks: list[Thunk], hlo: Program, num_layers: int) -> dict[str, Any]:
    """What of a step is in CUDA graphs."""
    hand_written = {kernel.name for kernel in hlo.kernels() if hlo.is_hand_written(kernel)}
    steps = [(thunk, graph) for thunk, graph in walk(thunks) if thunk.kind != "kCommandBuffer"]
    attention = [(thunk, graph) for thunk, graph in steps if thunk.instruction in hand_written]
    if len(attention) != len(hand_written) or len(attention) % num_layers:
        raise RuntimeError(
            f"the program has {len(hand_written)} hand-written kernels in {num_layers} layers, "
            f"XLA's dump {len(attention)}"
        )
    per_layer = len(attention) // num_layers
    kernels = [thunk.instruction for thunk, _ in steps if thunk.is_kernel]
    firsts = [kernels.index(thunk.instruction) for thunk, _ in attention[::per_layer]]
    outside = Counter(
        thunk.kind if thunk.branches else re.sub(r"[.\d]+$", "", thunk.instruction)
        for thunk, graph in steps
        if graph is None and thunk.instruction not in hand_written
    )
    return {
        "kernels": len(kernels),
        "kernels_per_layer": int(np.median(np.diff(firsts))) if num_layers > 1 else 0,
        "attention_kernels": per_layer,
        "graphs": sum(thunk.kind == "kCommandBuffer" for thunk, _ in walk(thunks)),
        "attention_graphs": len({id(graph) for _, graph in attention if graph is not None}),
        "attention_outside": sum(graph is None for _, graph in attention),
        "outside": dict(outside),
        "host_waits": sum(
            graph is None and thunk.kind in ("kConditional", "kWhile") for thunk, graph in steps
        ),
    }


def _matrices(hlo: Program) -> list[Instruction]:
    """Weights that a step reads whole."""
    return [
        weight
        for weight in hlo.parameters("leaves")
        if weight.num_elements >= 2**20 and any(map(hlo.is_product, hlo.readers(weight)))
    ]


def find_copies(hlo: Program) -> list[str]:
    """Weights that anything but a product reads whole, and new arrays of the cache's size."""
    found = []
    for weight in hlo.parameters("leaves"):
        readers = hlo.readers(weight)
        for reader in readers:
            is_small = reader.num_elements < weight.num_elements or weight.num_elements < 2**20
            if not hlo.is_product(reader) and not is_small:
                found.append(f"{reader.name} copies {weight.name}")
        if len(readers) > 1:
            found.append(f"{weight.name} is read {len(readers)} times")
    layers = hlo.parameters("kv_cache")
    found += [
        f"{kernel.name} makes an array as large as a layer of the cache"
        for kernel in hlo.copies(min(layer.num_elements for layer in layers))
    ]
    return found


def limit_temp(config: ModelConfig, num_tokens: int, num_rows: int, products: str) -> int:
    """Temporary memory that a step may take.

    Either the model needs most: gate and up of all tokens, which cuBLASLt gives in float32, their
    product, and five arrays of the hidden size, since XLA puts off adding to the residual; or
    sampling does, which holds five arrays of all logits in float32. The rest, partial results of
    attention, sums of split products and gaps, is a tenth.
    """
    gate_up = 2 * config.intermediate_size * (4 if products == "cublaslt" else 2)
    model = num_tokens * (gate_up + (config.intermediate_size + 5 * config.hidden_size) * 2)
    sampling = 5 * num_rows * config.vocab_size * 4
    return int(1.1 * max(model, sampling))


def attention_bytes(tiling: plan.Tiling, config: ModelConfig) -> tuple[int, int]:
    """Bytes of one layer's attention in a full decode step: at least, and by the plan."""
    sizes = plan.plan_sizes(tiling, num_tokens=NUM_ROWS, num_rows=NUM_ROWS)
    arrays = plan.cut_arrays(np.zeros(sizes.num_ints, np.int32), sizes)
    num_blocks = CONTEXT // BLOCK_SIZE
    plan.fill_plan(
        arrays,
        tiling,
        query_start_loc=np.arange(NUM_ROWS + 1, dtype=np.int32),
        seq_lens=np.full(NUM_ROWS, CONTEXT, np.int32),
        block_tables=1 + np.arange(NUM_ROWS * num_blocks, dtype=np.int32).reshape(NUM_ROWS, -1),
    )
    items = np.concatenate([arrays.decode_items, arrays.tile_items])
    items = items[items[:, plan.NUM_TOKENS] > 0]
    ends = np.minimum(items[:, plan.KV_END], CONTEXT)
    num_read = int(np.sum(ends - items[:, plan.KV_BEGIN]))
    kv_bytes = 2 * config.num_kv_heads * config.head_dim * 2
    heads_bytes = config.num_heads * config.head_dim * 2
    q_bytes = int(np.sum(items[:, plan.NUM_TOKENS])) * heads_bytes
    partial_bytes = config.num_heads * (config.head_dim + 1) * 4
    num_partials = int(arrays.merge_starts[-1])
    planned = num_read * kv_bytes + q_bytes + NUM_ROWS * heads_bytes
    return NUM_ROWS * CONTEXT * kv_bytes, planned + 2 * num_partials * partial_bytes


def print_steps(reports: list[StepReport]) -> None:
    """As Markdown."""
    columns = (
        "target", "program", "products", "kernels", "a layer", "attention", "graphs",
        "attention in", "outside", "in place, MiB", "temporary, MiB", "bytes", "compile",
    )  # fmt: skip
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for r in reports:
        graphs = f"{r.attention_graphs} graph" + "s" * (r.attention_graphs != 1)
        if r.attention_outside:
            graphs += f", {r.attention_outside} outside"
        ratio = f"{r.moved_bytes / r.ideal_bytes:.3f}" if r.ideal_bytes else "-"
        print(
            f"| {r.target} | {r.program} | {r.products} | {r.kernels} | {r.kernels_per_layer} | "
            f"{r.attention_kernels} | {r.graphs} | {graphs} | {sum(r.outside.values())} | "
            f"{_mib(r.aliased_bytes)} of {_mib(r.cache_bytes)} | "
            f"{_mib(r.temp_bytes)} of {_mib(r.temp_limit)} | {ratio} | {r.compile_s} s |"
        )
    for outside in {str(r.outside): r.outside for r in reports}.values():
        names = ", ".join(f"{count} {name}" for name, count in outside.items())
        print(f"\nOutside of CUDA graphs: {names or 'nothing'}.")


def _mib(num_bytes: int) -> int:
    return math.ceil(num_bytes / 2**20)
