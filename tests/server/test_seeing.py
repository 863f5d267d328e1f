"""Metrics as Prometheus reads them, log lines, traces."""

import asyncio
import logging
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.metrics import _one_two_five
from server.stats_log import log_stats
from server.tracing import Tracer
from tests.server.running import metric

# What dashboards of vLLM ask for, with today's and yesterday's names.
NAMES = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens generation_tokens
prompt_tokens_by_source prompt_tokens_cached request_success admission_rejections
request_prompt_tokens request_generation_tokens request_max_num_generation_tokens
request_params_max_tokens request_prefill_kv_computed_tokens iteration_tokens_total
request_params_n time_to_first_token_seconds inter_token_latency_seconds
request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
cache_config_info gpu_cache_usage_perc cpu_cache_usage_perc num_requests_swapped
time_per_output_token_seconds gpu_prefix_cache_queries gpu_prefix_cache_hits
gpu_prefix_cache_hit_rate
"""


def test_prometheus_reads_it_and_finds_vllm_s_names(fake):
    fake.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 3})
    families = {f.name: f for f in text_string_to_metric_families(fake.get("/metrics").text)}
    missing = [name for name in NAMES.split() if f"vllm:{name}" not in families]
    assert missing == []
    own = [name for name in families if name.startswith("jpaged:")]
    assert len(own) >= 10 and all(families[name].documentation for name in own)
    for name in ("vllm:num_requests_running", "vllm:generation_tokens"):
        (sample,) = families[name].samples
        assert sample.labels == {"model_name": "tiny", "engine": "0"}
    openmetrics = fake.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert openmetrics.text.endswith("# EOF\n")


def test_buckets_of_lengths_are_vllm_s():
    assert _one_two_five(100) == [1, 2, 5, 10, 20, 50, 100]


def test_the_log_line_is_vllm_s(fake, caplog):
    metrics, client = fake.server.metrics, fake.server.models.client

    async def run() -> None:
        task = asyncio.create_task(log_stats(client, metrics, 0.3))
        await asyncio.sleep(0.35)
        body = {"model": "tiny", "prompt": "some words", "max_tokens": 30}
        await asyncio.to_thread(fake.post, "/v1/completions", body)
        await asyncio.sleep(0.35)
        task.cancel()

    with caplog.at_level(logging.INFO, "server.stats"):
        asyncio.run(run())
    lines = [record.message for record in caplog.records]
    pattern = (
        r"Engine 000: Avg prompt throughput: \S+ tokens/s, Avg generation throughput: (\S+) "
        r"tokens/s, Running: \d+ reqs, Waiting: \d+ reqs, GPU KV cache usage: \S+%, "
        r"Prefix cache hit rate: \S+%"
    )
    found = [re.fullmatch(pattern, line) for line in lines]
    assert lines and all(found), lines
    # 30 tokens, in one interval or spread over several.
    assert sum(0.3 * float(match[1]) for match in found if match) == pytest.approx(30, abs=0.5)


def test_a_span_of_each_prompt_joins_the_caller_s_trace(fake):
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        tracer = Tracer(f"http://127.0.0.1:{collector.server_port}/v1/traces", ["tiny"])
        client = fake.server.models.client
        client._observers = [*client._observers, tracer]
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        body = {"model": "tiny", "prompt": "trace me", "max_tokens": 3}
        fake.post("/v1/completions", body, headers=headers)
        client._observers = client._observers[:-1]
        tracer.close()
        collector.shutdown()
        thread.join()
    data = b"".join(received)
    assert bytes.fromhex(trace) in data and b"llm_request" in data
    assert b"gen_ai.latency.time_to_first_token" in data


def test_the_event_loop_s_lag_is_a_metric(fake):
    async def run() -> None:
        task = asyncio.create_task(fake.server.metrics.watch_loop())
        await asyncio.sleep(0.2)
        task.cancel()

    asyncio.run(run())
    assert metric(fake.get("/metrics").text, "jpaged:event_loop_lag_seconds_count") >= 2
