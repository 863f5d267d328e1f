"""How long steps take to compile as models deepen; needs no weights.

    python -m benchmarks.compile_time                    # 16, 30 and 80 layers of SmolLM2's shape
    scripts/aot --steps --targets h200 --layers 80       # the same question for a GPU

Each program is lowered and compiled anew, alone, in a process without a persistent cache. Prints
Markdown; `--check` fails if 80 layers take more than 2.5 times the seconds of 30.
"""

import argparse
import sys
import time
from dataclasses import replace

import jax
import numpy as np
from flax import nnx

from jpaged.config import ModelConfig
from jpaged.models.transformer import Transformer
from jpaged.runner.model_runner import ModelRunner
from jpaged.runner.step_inputs import BucketTable

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)
MAX_RATIO = 2.5  # of 80 layers to 30


def time_steps(num_layers: int) -> dict[str, tuple[float, float]]:
    """Seconds of lowering and of compiling, by program."""
    config = replace(CONFIG, num_layers=num_layers)
    model = nnx.eval_shape(lambda: Transformer(config, dtype=np.dtype(np.float32)))
    runner = ModelRunner(
        model,
        config=config,
        buckets=BucketTable(max_num_seqs=16, max_num_batched_tokens=256),
        max_num_seqs=16,
        max_blocks=128,
        block_size=16,
        dtype=np.dtype(np.float32),
    )
    runner.plan_programs(num_blocks=1024)
    times: dict[str, tuple[float, float]] = {}
    buckets = {"decode": runner.buckets.decode[-1], "mixed": runner.buckets.mixed[-1]}
    for name, bucket in buckets.items():
        started = time.perf_counter()
        lowered = runner.lower(bucket)
        is_lowered = time.perf_counter()
        lowered.compile()
        times[name] = (is_lowered - started, time.perf_counter() - is_lowered)
    return times


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 30, 80])
    parser.add_argument("--check", action="store_true", help="fail if deep models take too long")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    time_steps(1)  # what a process does once
    print("| layers | program | lowering, s | compiling, s | together |")
    print("|---:|---|---:|---:|---:|")
    totals: dict[tuple[int, str], float] = {}
    for num_layers in args.layers:
        for name, (lowering, compiling) in time_steps(num_layers).items():
            totals[num_layers, name] = lowering + compiling
            row = (num_layers, name, f"{lowering:.2f}", f"{compiling:.2f}")
            print("|", " | ".join(map(str, row)), f"| {lowering + compiling:.2f} |", flush=True)
    if not args.check:
        return 0
    ratios = {name: totals[80, name] / totals[30, name] for name in ("decode", "mixed")}
    for name, ratio in ratios.items():
        print(f"{name}: 80 layers take {ratio:.2f} times the seconds of 30; at most {MAX_RATIO}")
    return int(max(ratios.values()) > MAX_RATIO)


if __name__ == "__main__":
    sys.exit(main())
