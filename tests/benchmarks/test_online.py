"""What the tool that measures servers calls a first token, a failure, a rate."""

import asyncio
import json
import math
import sys

import pytest
from aiohttp import web

from benchmarks import online


def chunk(text: str | None = None, finish: str | None = None, usage: dict | None = None) -> bytes:
    choices = [] if usage else [{"text": text or "", "finish_reason": finish, "index": 0}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


async def answer(request: web.Request) -> web.StreamResponse:
    """Case H-20: four requests, of which one is answered."""
    kind = (await request.json())["prompt"][0]
    if kind == 3:
        return web.json_response({"error": "no"}, status=500)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(chunk(""))  # as the opening chunk of a chat, which holds a role only
    if kind == 1:
        await asyncio.sleep(0.3)
        for i in range(10):
            await response.write(chunk("three tokens" if i == 4 else "x"))
            await asyncio.sleep(0.02)
        await response.write(chunk("", "length"))
        await response.write(chunk(usage={"completion_tokens": 12, "prompt_tokens": 5}))
    if kind == 2:
        await response.write(chunk("", "length"))
    if kind == 4:
        await response.write(chunk("cut"))
        return response
    await response.write(b"data: [DONE]\n\n")
    return response


def measure(monkeypatch, kinds: list[int], *flags: str) -> dict:
    async def run() -> dict:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        monkeypatch.setattr(
            sys, "argv", ["online", "--base-url", f"http://127.0.0.1:{port}", *flags]
        )
        args = online.parse_arguments()
        bodies = [{"prompt": [kind], "max_tokens": 12} for kind in kinds]
        try:
            return await online.run(args, bodies)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_a_first_token_is_one_with_text_and_failures_count_as_such(monkeypatch, capsys):
    report = measure(monkeypatch, [1, 2, 3, 4], "--goodput", "ttft:1000")
    assert (report["completed"], report["failed"]) == (1, 3)
    assert report["total_output_tokens"] == 12 and report["total_input_tokens"] == 5
    assert 300 <= report["mean_ttft_ms"] < 1000  # and not that of the first chunk
    whole = report["mean_e2el_ms"] - report["mean_ttft_ms"]
    assert report["mean_tpot_ms"] == pytest.approx(whole / 11)
    assert report["mean_itl_ms"] == pytest.approx(whole / 9)
    assert report["request_goodput"] == report["request_throughput"] > 0
    assert sorted(error.split(":")[0] for error in report["errors"]) == [
        "no token", "status 500", "the stream has no end",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["online"])
    online.print_report(online.parse_arguments(), report)
    printed = capsys.readouterr().out
    assert "Successful requests:                     1" in printed
    assert "Mean TTFT (ms):" in printed and "P99 ITL (ms):" in printed


def test_without_an_answer_figures_are_no_numbers(monkeypatch):
    report = measure(monkeypatch, [3])
    assert report["completed"] == 0 and math.isnan(report["mean_ttft_ms"])


def test_concurrency_and_rate_are_kept(monkeypatch):
    report = measure(monkeypatch, [1] * 6, "--max-concurrency", "2")
    assert report["max_concurrent_requests"] == 2 and report["duration"] > 3 * 0.48
    report = measure(monkeypatch, [1] * 5, "--request-rate", "20", "--seed", "1")
    assert report["completed"] == 5 and report["duration"] > 0.5
