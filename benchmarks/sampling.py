"""What the features of sampling cost: one workload, asked for in several ways, in turn.

    python -m benchmarks.sampling --workload A.json [--repeat 3] [--only greedy all]

Every way generates as many tokens. All run on one engine, one after the other, `--repeat` times;
the result is each way's median of generated tokens per second and its ratio to greedy's.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax

from benchmarks.offline import make_engine, run

SAMPLED = {"temperature": 0.8, "seed": 1}
EDITS = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {11: 1.0, 12: -100.0},
    "min_tokens": 8,
    "bad_words": ["two tokens"],
    "bad_words_ids": [[1000], [1001, 1002]],
}
FILTERS = {"top_k": 50, "top_p": 0.9, "min_p": 0.01}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": SAMPLED,
    "filters": SAMPLED | FILTERS,
    "edits": {"temperature": 0.0} | EDITS,
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "all": SAMPLED | FILTERS | EDITS | {"logprobs": 5},
    "all and prompt_logprobs": SAMPLED | FILTERS | EDITS | {"logprobs": 5, "prompt_logprobs": 5},
}


def main() -> None:
    """Parses arguments, runs every way, prints a line of JSON, last."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--workload", type=Path, required=True, help="JSON file, see benchmarks.offline")
    add("--model", default="smollm2", help="as for jpaged.LLM")
    add("--repeat", type=int, default=3, help="runs of each way")
    add("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    args = parser.parse_args()
    args.dtype, args.block_size, args.max_num_batched_tokens = "float32", 16, None
    args.num_blocks, args.no_prefix_caching = None, False

    workload = json.loads(args.workload.read_text())
    engine = make_engine(args, workload)
    engine.warm_up(show_progress=sys.stderr.isatty())
    short = workload | {"requests": [r | {"max_tokens": 8} for r in workload["requests"][:2]]}
    for name in args.only:
        run(engine, short, WAYS[name])
    speeds: dict[str, list[float]] = {name: [] for name in args.only}
    for _ in range(args.repeat):
        for name in args.only:
            engine.reset_prefix_cache()
            report = run(engine, workload, WAYS[name])["report"]
            speeds[name].append(report["generated_tokens_per_s"])
            print(f"{name}: {speeds[name][-1]} tokens/s", file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    first = medians[args.only[0]]
    print(
        json.dumps(
            {
                "workload": workload["name"],
                "tokens_per_s": medians,
                "ratio": {name: round(speed / first, 3) for name, speed in medians.items()},
                "compilations_after_warmup": engine.compilations_after_warm_up,
                "jax": jax.__version__,
            }
        )
    )


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    main()
