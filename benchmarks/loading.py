"""Times loading the weights of several checkpoints in turn, from files that are in memory.

    python -m benchmarks.loading MODEL [MODEL ...] [--repeat 9] [--dtype float32] [--unchecked]

`--unchecked` loads each a second time without looking for NaN and infinity, which says what that
costs. Prints one line of JSON, last: seconds and core seconds, the middle ones and the least.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.checkpoint import loader, open_checkpoint
from jpaged.models.registry import find_family
from jpaged.models.transformer import Transformer


def load(path: str, dtype: str) -> tuple[float, float]:
    """Seconds until a checkpoint is open and its weights are on the device; and of the cores."""
    started, started_cpu = time.perf_counter(), time.process_time()
    with open_checkpoint(path, show_progress=False) as checkpoint:
        opened_s, opened_cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
        config = checkpoint.model_config
        # The same for all formats, and not their time.
        model = nnx.eval_shape(lambda: Transformer(config, dtype=jnp.dtype(dtype)))
        sources = find_family(config.architecture).leaf_sources(config)
        started, started_cpu = time.perf_counter(), time.process_time()
        model = loader.load_model(model, checkpoint, sources)
        jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
        return (
            opened_s + time.perf_counter() - started,
            opened_cpu_s + time.process_time() - started_cpu,
        )


def _copy(target: np.ndarray, source: np.ndarray) -> bool:
    target[...] = source
    return True


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="as for jpaged.LLM")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--unchecked", action="store_true", help="also without looking for NaN")
    args = parser.parse_args()
    check = loader.copy_finite
    kinds = [(model, True) for model in args.models]
    kinds += [(model, False) for model in args.models if args.unchecked]
    seconds: dict[str, list[tuple[float, float]]] = {}
    for repeat in range(args.repeat + 1):
        for model, is_checked in kinds if repeat % 2 else reversed(kinds):
            loader.copy_finite = check if is_checked else _copy
            found = load(model, args.dtype)
            if repeat:  # the first brings files and code into memory
                name = model if is_checked else f"{model}, unchecked"
                seconds.setdefault(name, []).append(found)
    result = {}
    for name, found in seconds.items():
        wall, cpu = zip(*found, strict=True)
        result[name] = {
            "median_s": round(statistics.median(wall), 3),
            "min_s": round(min(wall), 3),
            "median_cpu_s": round(statistics.median(cpu), 3),
            "min_cpu_s": round(min(cpu), 3),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
