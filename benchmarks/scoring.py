"""Scores completions after one context, with and without reading the context from the cache.

    python -m benchmarks.scoring [--model smollm2] [--repeat 3]

`LLM.score` wants the completions' log-probabilities only, so that all but the first read the
context from the cache; asking for those of the whole prompt computes it every time. In turn, in
one process.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams


def main() -> None:
    """Parses arguments, runs both ways, prints a line of JSON, last."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", default="smollm2", help="as for jpaged.LLM")
    add("--context", type=int, default=512, help="tokens of the context")
    add("--completion", type=int, default=32, help="tokens of a completion")
    add("--completions", type=int, default=8, help="completions")
    add("--repeat", type=int, default=3, help="runs of each way")
    args = parser.parse_args()
    random = np.random.default_rng(0)
    with LLM(args.model) as llm:
        model_config = llm.engine.model_config
        vocab_size = model_config.num_tokens_known or model_config.vocab_size
        context = random.integers(0, vocab_size, args.context).tolist()
        shape = args.completions, args.completion
        completions = random.integers(0, vocab_size, shape).tolist()
        whole = [context + completion for completion in completions]
        every = SamplingParams(max_tokens=0, prompt_logprobs=0)
        ways: dict[str, Callable[[], object]] = {
            "score": partial(llm.score, [context], completions),
            "all_prompt_logprobs": partial(llm.generate, whole, every),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            way()
        for _ in range(args.repeat):
            for name, way in ways.items():
                llm.engine.reset_prefix_cache()
                started = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - started)
    medians = {name: round(statistics.median(values), 2) for name, values in seconds.items()}
    print(json.dumps({"seconds": medians, "jax": jax.__version__}))


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    main()
