"""Sends requests to a server of OpenAI's API and measures what its clients see.

    python -m benchmarks.online --base-url http://127.0.0.1:8000 --workload A.json
    python -m benchmarks.online --num-prompts 256 --max-concurrency 256 --input-len 64

Words and JSON keys are those of `vllm bench serve`. TTFT: until the first chunk with a token; ITL:
between two chunks; TPOT: (whole time - TTFT) / (tokens - 1), tokens by the server's own count. A
request has failed if it has an error, no token, or no finish reason; figures are of the others.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

try:
    import aiohttp
except ImportError:
    sys.exit("benchmarks.online needs aiohttp: pip install '.[bench]'")


@dataclass
class Result:
    """What one request's client saw; seconds.

    Attributes:
        start: When it was sent, since the beginning.
        latency: Until its end.
        ttft: Until its first token.
        itls: Between chunks with tokens.
        num_prompt: Prompt tokens.
        num_output: Answer tokens.
        text: The answer.
        error: Why it failed; empty: it did not.
    """

    start: float
    latency: float = 0.0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    text: str = ""
    error: str = ""


async def ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], result: Result
) -> None:
    """Sends one request and reads its stream to the end."""
    started = last = time.perf_counter()
    usage: dict[str, Any] | None = None
    is_finished = is_done = False
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                result.error = f"status {response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    is_done = True
                    break
                chunk = json.loads(data)
                if "error" in chunk:
                    result.error = str(chunk["error"])
                    return
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                    is_finished |= choice.get("finish_reason") is not None
                    if not text:
                        continue
                    now = time.perf_counter()
                    if result.ttft:
                        result.itls.append(now - last)
                    else:
                        result.ttft = now - started
                    last = now
                    result.text += text
        result.latency = last - started
        result.num_output = usage["completion_tokens"] if usage else 1 + len(result.itls)
        result.num_prompt = usage["prompt_tokens"] if usage else 0
        if not result.ttft:
            result.error = "no token"
        elif not (is_finished and is_done):
            result.error = "the stream has no end"
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
        result.error = f"{type(error).__name__}: {error}"


def make_requests(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Bodies of the requests, from a workload of token ids or at random."""
    if args.workload:
        entries = json.loads(args.workload.read_text())["requests"]
        pairs = [(entry["prompt"], entry["max_tokens"]) for entry in entries]
    else:
        source = random.Random(args.seed)
        low, high = args.vocab_range
        pairs = [
            ([source.randrange(low, high) for _ in range(args.input_len)], args.output_len)
            for _ in range(args.num_prompts)
        ]
    common = {
        "model": args.model, "temperature": args.temperature, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    return [
        common | {"prompt": token_ids, "max_tokens": max_tokens} for token_ids, max_tokens in pairs
    ]


async def run(args: argparse.Namespace, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sends all requests at their times and sums up."""
    url = args.base_url.rstrip("/") + args.endpoint
    results: list[Result] = []
    gate = asyncio.Semaphore(args.max_concurrency or len(bodies))
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=args.timeout)
    num_open = max_open = 0
    source = random.Random(args.seed)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers
    ) as session:
        if args.num_warmups:
            spare = [Result(0.0) for _ in range(args.num_warmups)]
            short = [bodies[0] | {"max_tokens": 4}] * args.num_warmups
            await asyncio.gather(
                *(ask(session, url, b, r) for b, r in zip(short, spare, strict=True))
            )
        bar = tqdm(total=len(bodies), disable=not sys.stderr.isatty())
        began = time.perf_counter()

        async def one(body: dict[str, Any]) -> None:
            nonlocal num_open, max_open
            async with gate:
                num_open += 1
                max_open = max(max_open, num_open)
                result = Result(time.perf_counter() - began)
                results.append(result)
                await ask(session, url, body, result)
                num_open -= 1
                bar.update()

        tasks = []
        for body in bodies:
            tasks.append(asyncio.create_task(one(body)))
            if args.request_rate != math.inf:
                # Burstiness 1: a Poisson process.
                shape = args.burstiness
                pause = source.gammavariate(shape, 1 / (args.request_rate * shape))
                await asyncio.sleep(pause)
        await asyncio.gather(*tasks)
        duration = time.perf_counter() - began
        bar.close()
    return summarize(args, results, duration, max_open)


def summarize(
    args: argparse.Namespace, results: Sequence[Result], duration: float, max_open: int
) -> dict[str, Any]:
    """The figures, by vLLM's keys."""
    good = [result for result in results if not result.error]
    tpots = [(r.latency - r.ttft) / (r.num_output - 1) for r in good if r.num_output > 1]
    series = {
        "ttft": [r.ttft for r in good],
        "tpot": tpots,
        "itl": [itl for r in good for itl in r.itls],
        "e2el": [r.latency for r in good],
    }
    total_in, total_out = sum(r.num_prompt for r in good), sum(r.num_output for r in good)
    report: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / duration,
        "output_throughput": total_out / duration,
        "total_token_throughput": (total_in + total_out) / duration,
        "max_concurrent_requests": max_open,
    }
    if args.goodput:
        report["request_goodput"] = sum(_is_good(r, args.goodput) for r in good) / duration
    for name, values in series.items():
        values = sorted(value * 1e3 for value in values)
        if not values:
            keys = ("mean", "median", "std", *(f"p{s:g}" for s in args.metric_percentiles))
            report |= {f"{key}_{name}_ms": math.nan for key in keys}
            continue
        report |= {
            f"mean_{name}_ms": statistics.fmean(values),
            f"median_{name}_ms": statistics.median(values),
            f"std_{name}_ms": statistics.pstdev(values),
        }
        for share in args.metric_percentiles:
            rank = min(len(values) - 1, math.ceil(share / 100 * len(values)) - 1)
            report[f"p{share:g}_{name}_ms"] = values[max(0, rank)]
    report["errors"] = [r.error for r in results if r.error]
    if args.save_detailed:
        report |= {
            "input_lens": [r.num_prompt for r in results],
            "output_lens": [r.num_output for r in results],
            "ttfts": [r.ttft for r in results],
            "itls": [r.itls for r in results],
            "start_times": [r.start for r in results],
            "generated_texts": [r.text for r in results],
        }
    return report


def _is_good(result: Result, goals: dict[str, float]) -> bool:
    tpot = (result.latency - result.ttft) / max(1, result.num_output - 1)
    found = {"ttft": result.ttft, "tpot": tpot, "e2el": result.latency}
    return all(found[name] * 1e3 <= limit for name, limit in goals.items())


_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def print_report(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """As `vllm bench serve` prints it."""

    def line(label: str, value: Any) -> None:
        text = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
        print(f"{label:<40} {text}")

    for error in sorted(set(report["errors"]))[:5]:
        print(f"failed: {error}", file=sys.stderr)
    if not report["completed"]:
        return
    print(f"{' Serving Benchmark Result ':=^50}")
    line("Successful requests:", report["completed"])
    line("Failed requests:", report["failed"])
    if args.max_concurrency:
        line("Maximum request concurrency:", args.max_concurrency)
    if args.request_rate != math.inf:
        line("Request rate configured (RPS):", args.request_rate)
    line("Benchmark duration (s):", report["duration"])
    line("Total input tokens:", report["total_input_tokens"])
    line("Total generated tokens:", report["total_output_tokens"])
    line("Request throughput (req/s):", report["request_throughput"])
    if args.goodput:
        line("Request goodput (req/s):", report["request_goodput"])
    line("Output token throughput (tok/s):", report["output_throughput"])
    line("Peak concurrent requests:", report["max_concurrent_requests"])
    line("Total token throughput (tok/s):", report["total_token_throughput"])
    for name in args.percentile_metrics:
        print(f"{_TITLES[name]:-^50}")
        short = name.upper()
        for statistic in ("mean", "median"):
            line(f"{statistic.capitalize()} {short} (ms):", report[f"{statistic}_{name}_ms"])
        for share in args.metric_percentiles:
            line(f"P{share:g} {short} (ms):", report[f"p{share:g}_{name}_ms"])
    print("=" * 50)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000")
    add("--endpoint", default="/v1/completions", help="of completions; prompts are token ids")
    add("--model", help="default: the server's first")
    add("--api-key")
    add("--workload", type=Path, help="token ids, as for benchmarks.offline")
    add("--num-prompts", type=int, default=1000)
    add("--input-len", type=int, default=1024)
    add("--output-len", type=int, default=128)
    add("--vocab-range", type=int, nargs=2, default=(10, 250), metavar=("LOW", "HIGH"))
    add("--request-rate", type=float, default=math.inf, help="requests per second (default: all)")
    add("--burstiness", type=float, default=1.0)
    add("--max-concurrency", type=int)
    add("--num-warmups", type=int, default=0)
    add("--temperature", type=float, default=0.0)
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="ttft, tpot, e2el")
    add("--percentile-metrics", default="ttft,tpot,itl")
    add("--metric-percentiles", default="99")
    add("--timeout", type=float, default=600.0, help="seconds without a byte")
    add("--seed", type=int, default=0)
    add("--save-result", type=Path, metavar="FILE")
    add("--save-detailed", action="store_true")
    args = parser.parse_args()
    args.metric_percentiles = [float(text) for text in args.metric_percentiles.split(",")]
    args.percentile_metrics = args.percentile_metrics.split(",")
    args.goodput = {
        name: float(limit) for name, _, limit in (text.partition(":") for text in args.goodput)
    }
    if "chat" in args.endpoint:
        parser.error(f"--endpoint is {args.endpoint!r}; token ids go to one of completions")
    for name in [*args.percentile_metrics, *args.goodput]:
        if name not in _TITLES:
            parser.error(f"there is no metric {name!r}; there are {', '.join(_TITLES)}")
    return args


def main() -> int:
    """Measures, prints, saves; exit status 1 if requests failed."""
    args = parse_arguments()
    report = asyncio.run(run(args, make_requests(args)))
    print_report(args, report)
    if args.save_result:
        args.save_result.write_text(json.dumps(report, indent=1))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
