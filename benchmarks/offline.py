"""Runs a workload of token ids through the engine and prints one line of JSON, last.

    python -m benchmarks.offline --workload A.json [--model smollm2] [--repeat 3]

A workload is a JSON object: "requests" (each with "prompt", a list of ids, and "max_tokens"),
"max_concurrency", and "prime": whether the other requests are sent only once the first one's
first token is out. Requests are greedy and go on after the end of sequence, so that every engine
does the same work. Times count from the moment all requests are submitted; compilation and one
short run come before and are reported apart.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from benchmarks.products import time_products
from jpaged.checkpoint import open_checkpoint
from jpaged.config import EngineConfig
from jpaged.engine import Engine, EngineStats
from jpaged.request import Request
from jpaged.runner.step_inputs import Bucket
from jpaged.sampling_params import SamplingParams


def main() -> None:
    """Parses arguments, runs the workload, prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--workload", type=Path, required=True, help="JSON file, see the module's docstring")
    add("--model", default="smollm2", help="as for jpaged.LLM")
    add("--dtype", default="float32")
    add("--block-size", type=int, default=16)
    add("--max-num-batched-tokens", type=int)
    add("--num-blocks", type=int, help="default: what the workload needs at full concurrency")
    add("--no-prefix-caching", action="store_true")
    add("--repeat", type=int, default=1, help="runs; the line of JSON is the median one")
    add("--save-tokens", type=Path, help="write the answers as JSON, by request id")
    add("--expect-tokens", type=Path, help="compare the answers with such a file")
    args = parser.parse_args()

    workload = json.loads(args.workload.read_text())
    started = time.perf_counter()
    engine = make_engine(args, workload)
    loaded = time.perf_counter()
    engine.warm_up(show_progress=sys.stderr.isatty())
    warm = time.perf_counter()
    short = [request | {"max_tokens": 4} for request in workload["requests"][:2]]
    run(engine, workload | {"requests": short})
    results = []
    for _ in range(args.repeat):
        engine.reset_prefix_cache()
        results.append(run(engine, workload))
        print(json.dumps(results[-1]["report"]), file=sys.stderr, flush=True)
    speed = [result["report"]["generated_tokens_per_s"] for result in results]
    median = results[speed.index(statistics.median_low(speed))]
    tokens = {str(request.request_id): request.output_token_ids for request in median["requests"]}
    if args.save_tokens:
        args.save_tokens.write_text(json.dumps(tokens))
    report = median["report"] | {
        "matmul_share": round(products_share(engine, median), 3),
        "load_s": round(loaded - started, 2),
        "warm_up_s": round(warm - loaded, 2),
        "jax": jax.__version__,
    }
    if args.expect_tokens:
        expected = json.loads(args.expect_tokens.read_text())
        report["tokens_equal"] = sum(
            a == b for key, want in expected.items() for a, b in zip(tokens[key], want, strict=True)
        )
        report["tokens_expected"] = sum(map(len, expected.values()))
    print(json.dumps(report))


def make_engine(args: argparse.Namespace, workload: dict[str, Any]) -> Engine:
    """The engine whose KV cache holds the workload at full concurrency."""
    requests = workload["requests"]
    longest = max(len(request["prompt"]) + request["max_tokens"] for request in requests)
    max_num_seqs = min(workload["max_concurrency"], len(requests))
    max_model_len = -(-longest // 256) * 256
    num_blocks = args.num_blocks or max_num_seqs * -(-longest // args.block_size)
    checkpoint = open_checkpoint(args.model)
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=args.block_size,
        num_blocks=max(num_blocks, -(-max_model_len // args.block_size)),
        enable_prefix_caching=not args.no_prefix_caching,
        dtype=args.dtype,
    )
    return Engine.from_checkpoint(checkpoint, config, show_progress=sys.stderr.isatty())


def run(
    engine: Engine, workload: dict[str, Any], asked: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Runs all requests to their end and sums up.

    Args:
        engine: An idle one.
        workload: As in the module's docstring.
        asked: Fields of `SamplingParams` for all requests, with `bad_words_ids`; `None`: greedy.
    """
    asked = dict(asked or {"temperature": 0.0})
    bad_words = asked.pop("bad_words_ids", ())
    engine.stats = EngineStats()
    scheduler, manager = engine.scheduler, engine.kv_cache_manager
    before = (scheduler.num_preemptions, manager.prefix_cache_queries, manager.prefix_cache_hits)
    first_times: dict[str, float] = {}
    last_times: dict[str, float] = {}
    submit_times: dict[str, float] = {}
    requests: list[Request] = []
    buckets: Counter[Bucket] = Counter()
    bucket_s: Counter[str] = Counter()

    def submit(entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            params = SamplingParams(max_tokens=entry["max_tokens"], ignore_eos=True, **asked)
            request_id = str(entry["id"])
            submit_times[request_id] = time.perf_counter()
            requests.append(
                engine.add_request(request_id, entry["prompt"], params, bad_words=bad_words)
            )

    todo = list(workload["requests"])
    started = time.perf_counter()
    head = 1 if workload["prime"] else len(todo)
    submit(todo[:head])
    todo = todo[head:]
    while engine.has_unfinished_requests:
        step_started = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        assert engine.last_bucket is not None
        buckets[engine.last_bucket] += 1
        bucket_s["{}x{}".format(*engine.last_bucket)] += now - step_started
        for request, _, _ in outputs:
            first_times.setdefault(request.request_id, now)
            last_times[request.request_id] = now
        if todo and first_times:
            submit(todo)
            todo = []
    wall_s = time.perf_counter() - started

    generated = sum(request.num_output_tokens for request in requests)
    total = generated + sum(request.num_prompt_tokens for request in requests)
    queries = manager.prefix_cache_queries - before[1]
    stats = engine.stats
    report = {
        "workload": workload["name"],
        "requests": len(requests),
        "generated_tokens": generated,
        "wall_s": round(wall_s, 3),
        "generated_tokens_per_s": round(generated / wall_s, 2),
        "total_tokens_per_s": round(total / wall_s, 2),
        "ttft_mean_s": round(
            statistics.mean(first_times[key] - submit_times[key] for key in first_times), 4
        ),
        "tpot_mean_s": round(
            statistics.mean(
                (last_times[r.request_id] - first_times[r.request_id])
                / max(r.num_output_tokens - 1, 1)
                for r in requests
            ),
            4,
        ),
        "steps": stats.steps,
        "preemptions": scheduler.num_preemptions - before[0],
        "prefix_hit_rate": round(
            (manager.prefix_cache_hits - before[2]) / queries if queries else 0.0, 4
        ),
        "kv_waste": round(stats.kv_waste, 4),
        "padding_share": round(stats.padding_share, 4),
        "host_us_per_step": round(stats.host_s / max(stats.steps, 1) * 1e6, 1),
        "compilations_after_warmup": engine.compilations_after_warm_up,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "steps_by_bucket": {"{}x{}".format(*b): count for b, count in buckets.items()},
        "seconds_by_bucket": {name: round(seconds, 2) for name, seconds in bucket_s.items()},
    }
    return {"report": report, "requests": requests, "buckets": buckets, "step_s": stats.step_s}


def products_share(engine: Engine, result: dict[str, Any]) -> float:
    """Share of the steps' time that their matrix products alone take, timed afterwards."""
    products_s = sum(
        count * time_products(engine.runner, bucket) for bucket, count in result["buckets"].items()
    )
    return products_s / result["step_s"]


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    main()
