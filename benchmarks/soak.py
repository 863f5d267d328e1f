"""Treats a server badly for minutes and looks whether it minds.

    python -m benchmarks.soak --minutes 10 --png docs/soak.png

Clients stream, read slowly, go away in the middle, or send what is wrong; the KV cache is too small
for all of them, so that requests are preempted. Afterwards: no status of 500 or more, every answer
that was read to its end is the one that the library gave before, no block is in use, and the memory
of both processes is what it was after the first minute.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

WORDS = [
    "the",
    "river",
    "and",
    "a",
    "stone",
    "under",
    "old",
    "trees",
    "where",
    "small",
    "birds",
    "sing",
    "of",
    "rain",
    "at",
    "night",
]
BAD: tuple[Any, ...] = (
    b"{",
    b"[]",
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "x", "top_p": 7},
    {"prompt": [99999999]},
    {"prompt": "x" * 100_000},
    {"prompt": "x", "logit_bias": {"-3": 1}},
    {"prompt": "x", "model": "none"},
    {"prompt": "x", "n": 0},
    {"prompt": "\ud800"},
)


def make_prompts(count: int) -> list[tuple[str, int]]:
    """Texts and how many tokens to ask for; many share a beginning."""
    source = random.Random(0)
    start = " ".join(source.choices(WORDS, k=40))
    prompts = []
    for index in range(count):
        own = " ".join(source.choices(WORDS, k=source.randrange(3, 60)))
        prompts.append((f"{start} {own}" if index % 2 else own, source.randrange(1, 60)))
    return prompts


def answer_offline(model: str, prompts: list[tuple[str, int]]) -> list[str]:
    """What the library says, in a process of its own, so that its memory is not ours."""
    code = (
        "import json, sys, jpaged\n"
        "model, prompts = json.load(sys.stdin)\n"
        "llm = jpaged.LLM(model)\n"
        "params = [jpaged.SamplingParams(temperature=0.0, max_tokens=n) for _, n in prompts]\n"
        "outputs = llm.generate([text for text, _ in prompts], params)\n"
        "print(json.dumps([output.outputs[0].text for output in outputs]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([model, prompts]),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


class Soak:
    """What clients saw, and what the server's processes took."""

    def __init__(self, url: str, prompts: list[tuple[str, int]], answers: list[str]):
        """Sends nothing yet."""
        self.url, self.prompts, self.answers = url, prompts, answers
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.samples: list[dict[str, float]] = []

    async def client(self, until: float, seed: int) -> None:
        """One client after the other."""
        source = random.Random(seed)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(sock_read=120)) as session:
            while time.monotonic() < until:
                kind = source.choices(("read", "slow", "plain", "leave", "bad"), (5, 2, 3, 3, 2))[0]
                try:
                    await self._once(session, kind, source)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    self.problems.append(f"{kind}: {type(error).__name__}: {error}")
                self.counts[kind] += 1

    async def _once(self, session: aiohttp.ClientSession, kind: str, source: random.Random) -> None:
        if kind == "bad":
            body = source.choice(BAD)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            async with session.post(self.url, data=data, headers=headers) as response:
                if not 400 <= response.status < 500:
                    self.problems.append(f"bad request {body!r:.60}: status {response.status}")
            return
        index = source.randrange(len(self.prompts))
        text, max_tokens = self.prompts[index]
        body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0}
        body["stream"] = kind != "plain"
        leaves_after = source.random() * 2 if kind == "leave" else None
        async with session.post(self.url, json=body) as response:
            if response.status != 200:
                self.problems.append(f"{kind}: status {response.status}")
                return
            if kind == "plain":
                found = (await response.json())["choices"][0]["text"]
            else:
                found = ""
                started = time.monotonic()
                async for line in response.content:
                    if leaves_after is not None and time.monotonic() - started > leaves_after:
                        response.close()
                        return
                    if line.startswith(b"data: {"):
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            self.problems.append(f"{kind}: {chunk['error']}")
                            return
                        found += chunk["choices"][0]["text"]
                    if kind == "slow":
                        await asyncio.sleep(source.random() * 0.2)
        self.counts["answers read"] += 1
        if found != self.answers[index]:
            self.problems.append(f"{kind}: answer {index} is {found!r:.80}")

    async def watch(self, until: float, processes: list[int], metrics_url: str) -> None:
        """Samples memory and blocks every two seconds."""
        began = time.monotonic()
        while time.monotonic() < until:
            text = await asyncio.to_thread(fetch, metrics_url)
            sample = {
                "seconds": time.monotonic() - began,
                "http_mib": resident_mib(processes[0]),
                "engine_mib": resident_mib(processes[1]),
                "blocks": read_metric(text, "jpaged:kv_blocks_in_use"),
                "preemptions": read_metric(text, "vllm:num_preemptions_total"),
            }
            self.samples.append(sample)
            minutes = sample["seconds"] / 60
            print(
                f"\r{minutes:.1f} min, {self.counts['answers read']} answers, "
                f"{len(self.problems)} problems",
                end="",
                file=sys.stderr,
            )
            await asyncio.sleep(2)


def fetch(url: str) -> str:
    """The text behind a URL."""
    with urllib.request.urlopen(url, timeout=30) as response:
        return response.read().decode()


def read_metric(text: str, name: str) -> float:
    """The value of a metric of the one model."""
    found = re.search(rf"^{re.escape(name)}\{{.*\}} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else float("nan")


def resident_mib(process: int) -> float:
    """Memory of a process."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def draw(samples: list[dict[str, float]], path: Path) -> None:
    """Memory and blocks over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    minutes = [sample["seconds"] / 60 for sample in samples]
    for key, label in (("http_mib", "HTTP process"), ("engine_mib", "engine process")):
        upper.plot(minutes, [sample[key] for sample in samples], label=label)
    upper.set_ylabel("resident MiB")
    upper.set_ylim(bottom=0)
    upper.legend()
    lower.plot(minutes, [sample["blocks"] for sample in samples], label="KV blocks in use")
    lower.plot(minutes, [sample["preemptions"] for sample in samples], label="preemptions so far")
    lower.set_xlabel("minutes")
    lower.legend()
    figure.savefig(path, dpi=110)


async def run(args: argparse.Namespace, soak: Soak, server: subprocess.Popen) -> None:
    """Lets clients loose until the time is up, then waits until all is quiet."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    processes = [server.pid, int(children[0])]
    until = time.monotonic() + args.minutes * 60
    metrics_url = f"http://127.0.0.1:{args.port}/metrics"
    watching = asyncio.create_task(soak.watch(until, processes, metrics_url))
    await asyncio.gather(*(soak.client(until, seed) for seed in range(args.clients)))
    await watching
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = await asyncio.to_thread(fetch, metrics_url)
        if read_metric(text, "jpaged:kv_blocks_in_use") == 0:
            break
        await asyncio.sleep(0.2)
    else:
        soak.problems.append("blocks are still in use a minute after the last client")
    if read_metric(text, "jpaged:compilations_after_warm_up_total"):
        soak.problems.append("programs were compiled after warm-up")


def main() -> int:
    """Soaks, prints a line of JSON; exit status 1 if there were problems."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--minutes", type=float, default=10.0)
    add("--clients", type=int, default=24)
    add("--num-blocks", type=int, default=40, help="few: requests are preempted")
    add("--port", type=int, default=8333)
    add("--png", type=Path)
    args = parser.parse_args()
    prompts = make_prompts(40)
    soak = Soak(
        f"http://127.0.0.1:{args.port}/v1/completions", prompts, answer_offline(args.model, prompts)
    )
    command = [sys.executable, "-m", "server", args.model, "--port", str(args.port)]
    command += ["--host", "127.0.0.1", "--num-gpu-blocks-override", str(args.num_blocks)]
    command += ["--log-level", "warning"]
    with subprocess.Popen(command) as server:
        try:
            for _ in range(600):
                try:
                    fetch(f"http://127.0.0.1:{args.port}/health")
                    break
                except OSError:
                    time.sleep(0.5)
            asyncio.run(run(args, soak, server))
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(60)
    if status != 0:
        soak.problems.append(f"the server's exit status was {status}")
    settled = [s for s in soak.samples if s["seconds"] >= min(60.0, args.minutes * 20)]
    report = {
        "minutes": args.minutes,
        **soak.counts,
        "preemptions": soak.samples[-1]["preemptions"],
        "http_mib": [round(settled[0]["http_mib"]), round(settled[-1]["http_mib"])],
        "engine_mib": [round(settled[0]["engine_mib"]), round(settled[-1]["engine_mib"])],
        "problems": len(soak.problems),
    }
    if args.png:
        draw(soak.samples, args.png)
    for problem in soak.problems[:20]:
        print(problem, file=sys.stderr)
    print(json.dumps(report))
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
