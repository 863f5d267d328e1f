"""Times loading the weights of several checkpoints in turn, from files that are in memory.

    python -m benchmarks.loading MODEL [MODEL ...] [--repeat 9] [--dtype float32] [--unchecked]

`--unchecked` loads each a second time without looking for NaN and infinity, which says what that
costs. Prints one line of JSON, last: seconds, the middle one and the quickest.
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


def load(path: str, dtype: str) -> float:
    """Seconds to open a checkpoint and until its weights are on the device."""
    started = time.perf_counter()
    with open_checkpoint(path, show_progress=False) as checkpoint:
        opened_s = time.perf_counter() - started
        config = checkpoint.model_config
        # The same for all formats, and not their time.
        model = nnx.eval_shape(lambda: Transformer(config, dtype=jnp.dtype(dtype)))
        sources = find_family(config.architecture).leaf_sources(config)
        started = time.perf_counter()
        model = loader.load_model(model, checkpoint, sources)
        jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
        return opened_s + time.perf_counter() - started


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
    seconds: dict[str, list[float]] = {}
    for repeat in range(args.repeat + 1):
        for model, is_checked in kinds:
            loader.copy_finite = check if is_checked else _copy
            found = load(model, args.dtype)
            if repeat:  # the first brings files and code into memory
                name = model if is_checked else f"{model}, unchecked"
                seconds.setdefault(name, []).append(found)
    result = {
        name: {"median_s": round(statistics.median(found), 4), "min_s": round(min(found), 4)}
        for name, found in seconds.items()
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
