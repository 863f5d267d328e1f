"""Prometheus metrics: vLLM's by their names, its removed names as aliases, and jpaged's own."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)  # fmt: skip
from prometheus_client.exposition import choose_encoder

from server import messages
from server.engine_client import EngineState, Observer
from server.generation import Generation
from server.messages import GAP_BOUNDS_S, Stats

disable_created_metrics()  # a time for each series, which vLLM does not show either

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LAG_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_LAG_EVERY_S = 0.05


class Metrics(Observer):
    """Counts what happens and says it when it is asked."""

    def __init__(self, names: Sequence[str], *, max_model_len: int = 1 << 17):
        """Takes the first name of each model, in the order of the engines."""
        self.registry = CollectorRegistry()
        self.states: Sequence[EngineState] = ()
        self._num_computed, self._num_generated = [0.0] * len(names), [0.0] * len(names)
        self._histograms: dict[str, Histogram] = {}
        tokens = _one_two_five(max_model_len)

        def counter(name: str, text: str, *labels: str) -> list[Any]:
            made = Counter(
                f"vllm:{name}", text, ["model_name", "engine", *labels], registry=self.registry
            )
            own = (
                [made.labels(model, str(i)) for i, model in enumerate(names)] if not labels else ()
            )
            return list(own) or [_Labelled(made, model, i) for i, model in enumerate(names)]

        def histogram(name: str, text: str, buckets: Iterable[float]) -> list[Any]:
            made = self._histograms[name] = Histogram(
                f"vllm:{name}",
                text,
                ["model_name", "engine"],
                buckets=list(buckets),
                registry=self.registry,
            )
            return [made.labels(model, str(index)) for index, model in enumerate(names)]

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens, cached ones included.")
        self._by_source = counter(
            "prompt_tokens_by_source", "Prompt tokens by where they came from.", "source"
        )
        self._cached_tokens = counter("prompt_tokens_cached", "Prompt tokens from the cache.")
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._success = counter("request_success", "Answers that ended.", "finished_reason")
        self._rejected = counter("admission_rejections", "Requests turned away.", "reason")
        self._steps = histogram("iteration_tokens_total", "Tokens of a step.", _STEP_TOKENS)
        self._sizes = {
            "prompt": histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens),
            "output": histogram("request_generation_tokens", "Tokens of an answer.", tokens),
            "max_output": histogram(
                "request_max_num_generation_tokens", "Tokens of the longest answer.", tokens
            ),
            "max_tokens": histogram("request_params_max_tokens", "The max_tokens asked.", tokens),
            "computed": histogram(
                "request_prefill_kv_computed_tokens", "Prompt tokens computed.", tokens
            ),
            "n": histogram("request_params_n", "The n asked.", (1, 2, 5, 10, 20)),
        }
        self._first = histogram(
            "time_to_first_token_seconds", "Until the first token.", _FIRST_TOKEN_S
        )
        self._between = histogram(
            "inter_token_latency_seconds", "Between two tokens of an answer.", _TOKEN_S
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean between tokens.", _TOKEN_S
        )
        self._spans = {
            "e2e": histogram("e2e_request_latency_seconds", "Whole request.", _REQUEST_S),
            "queue": histogram("request_queue_time_seconds", "Waiting.", _REQUEST_S),
            "inference": histogram("request_inference_time_seconds", "In the batch.", _REQUEST_S),
            "prefill": histogram("request_prefill_time_seconds", "Prompt.", _REQUEST_S),
            "decode": histogram("request_decode_time_seconds", "Answer.", _REQUEST_S),
        }
        self._http = Counter(
            "http_requests",
            "Requests by what came of them.",
            ["method", "handler", "status"],
            registry=self.registry,
        )
        self._http_s = Histogram(
            "http_request_duration_seconds",
            "Time of requests, streams to their end.",
            ["method", "handler"],
            buckets=_FIRST_TOKEN_S,
            registry=self.registry,
        )
        self._lag = Histogram(
            "jpaged:event_loop_lag_seconds",
            "How late the HTTP process's event loop is.",
            buckets=_LAG_S,
            registry=self.registry,
        )
        self.registry.register(_Standing(self))

    async def watch_loop(self) -> None:
        """Looks 20 times a second how late the event loop is; runs for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._lag.observe(loop.time() - due)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The text, and its content type, in the form that is asked for."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    @property
    def between_tokens(self) -> Histogram:
        """The time between tokens, of all models."""
        return self._histograms["inter_token_latency_seconds"]

    def token_counts(self, model: int) -> tuple[float, float]:
        """Prompt tokens computed and tokens generated so far, by a model."""
        return self._num_computed[model], self._num_generated[model]

    def count_http(self, method: str, path: str, status: int, seconds: float) -> None:
        """A request has ended; status 0: its client was gone before there was one."""
        if path in ("/metrics", "/health", "/load", "/ping", "/version"):
            return
        known = method if method in ("GET", "POST", "OPTIONS", "HEAD") else "other"
        self._http.labels(known, path, f"{status // 100}xx" if status else "gone").inc()
        self._http_s.labels(known, path).observe(seconds)

    def on_update(self, model: int, stats: Stats) -> None:
        """A step was made, or something changed between steps."""
        before = self.states[model].stats if self.states else stats
        if stats.steps > before.steps:
            self._steps[model].observe(stats.step_tokens)

    def on_tokens(self, model: int, generation: Generation, tokens: messages.Tokens) -> None:
        """An answer got tokens."""
        times, request = generation.times, generation.request
        self._generated[model].inc(len(tokens.token_ids))
        self._num_generated[model] += len(tokens.token_ids)
        for seconds in times.intervals:
            self._between[model].observe(seconds)
        times.intervals.clear()
        if times.first_token and not times.is_counted:
            times.is_counted = True
            num_prompt, num_cached = request.num_prompt_tokens, request.num_cached_tokens
            self._first[model].observe(times.first_token - times.arrival)
            self._prompt_tokens[model].inc(num_prompt)
            self._cached_tokens[model].inc(num_cached)
            self._by_source[model].inc(num_cached, "local_cache_hit")
            self._by_source[model].inc(num_prompt - num_cached, "local_compute")
            self._num_computed[model] += num_prompt - num_cached

    def on_end(self, model: int, generation: Generation) -> None:
        """All answers to a prompt have ended."""
        times, request = generation.times, generation.request
        params = request.params
        lengths = [answer.request.num_output_tokens for answer in generation.group.answers]
        for answer in generation.group.answers:
            self._success[model].inc(1, answer.finish_reason or "abort")
        if not times.first_token:
            return
        sizes = self._sizes
        sizes["prompt"][model].observe(request.num_prompt_tokens)
        sizes["computed"][model].observe(request.num_prompt_tokens - request.num_cached_tokens)
        sizes["max_output"][model].observe(max(lengths))
        sizes["n"][model].observe(params.n)
        if params.max_tokens is not None:
            sizes["max_tokens"][model].observe(params.max_tokens)
        for length in lengths:
            sizes["output"][model].observe(length)
        end = max(times.last_token, times.first_token)  # of an answer of no tokens
        spans = self._spans
        spans["e2e"][model].observe(end - times.arrival)
        spans["queue"][model].observe(max(0.0, times.scheduled - times.arrival))
        spans["inference"][model].observe(end - times.scheduled)
        spans["prefill"][model].observe(times.first_token - times.scheduled)
        spans["decode"][model].observe(end - times.first_token)
        if max(lengths) > 1:
            per_token = (end - times.first_token) / (max(lengths) - 1)
            self._per_token[model].observe(per_token)

    def on_rejection(self, model: int) -> None:
        """The queue was full."""
        self._rejected[model].inc(1, "max_num_queued_reqs")


class _Labelled:
    """A counter of one model, whose last label is given when counting."""

    def __init__(self, counter: Counter, model: str, index: int):
        self._counter, self._labels = counter, (model, str(index))

    def inc(self, amount: float = 1, *label: str) -> None:
        self._counter.labels(*self._labels, *label).inc(amount)


_Reading = tuple[str, str, Callable[[Stats], float]]  # name, what it says, how to read it
_GAUGES: tuple[_Reading, ...] = (
    ("vllm:num_requests_running", "Requests in the batch.", lambda s: s.num_running),
    ("vllm:num_requests_waiting", "Requests that wait.", lambda s: s.num_waiting),
    ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.",
     lambda s: s.blocks_in_use / max(1, s.blocks_in_use + s.blocks_free)),
    ("vllm:gpu_cache_usage_perc", "kv_cache_usage_perc's old name.",
     lambda s: s.blocks_in_use / max(1, s.blocks_in_use + s.blocks_free)),
    ("vllm:cpu_cache_usage_perc", "Always 0: nothing is swapped.", lambda s: 0),
    ("vllm:num_requests_swapped", "Always 0: nothing is swapped.", lambda s: 0),
    ("vllm:gpu_prefix_cache_hit_rate", "Hits over queries, of all tokens.",
     lambda s: s.cache_hits / max(1, s.cache_queries)),
    ("jpaged:kv_blocks_in_use", "KV blocks that requests hold.", lambda s: s.blocks_in_use),
    ("jpaged:kv_blocks_shared", "Those that several hold.", lambda s: s.blocks_shared),
    ("jpaged:kv_blocks_saved", "Blocks more without sharing.", lambda s: s.blocks_saved),
    ("jpaged:kv_blocks_cached", "Free ones that hold a prefix.", lambda s: s.blocks_cached),
    ("jpaged:kv_blocks_free", "Free ones, cached ones included.", lambda s: s.blocks_free),
    ("jpaged:step_padding_share", "Padding among all tokens of steps.",
     lambda s: 1 - s.computed_tokens / s.padded_tokens if s.padded_tokens else 0.0),
)  # fmt: skip
_COUNTERS: tuple[_Reading, ...] = (
    ("vllm:prefix_cache_queries", "Tokens looked up.", lambda s: s.cache_queries),
    ("vllm:prefix_cache_hits", "Tokens found.", lambda s: s.cache_hits),
    ("vllm:gpu_prefix_cache_queries", "Tokens looked up.", lambda s: s.cache_queries),
    ("vllm:gpu_prefix_cache_hits", "Tokens found.", lambda s: s.cache_hits),
    ("vllm:num_preemptions", "Requests that gave up their blocks.", lambda s: s.preemptions),
    ("jpaged:blocks_copied_on_write", "Blocks copied for a fork.", lambda s: s.copies),
    ("jpaged:compilations_after_warm_up", "Should stay 0.", lambda s: s.compilations),
    ("jpaged:steps", "Steps.", lambda s: s.steps),
    ("jpaged:step_seconds", "Time of all steps.", lambda s: s.step_s),
    ("jpaged:step_host_seconds", "Part of it that the host took.", lambda s: s.host_s),
)  # fmt: skip


class _Standing:
    """What is read off the engines' last stats when somebody asks."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        states = self._metrics.states
        labels = ["model_name", "engine"]
        named = [((s.spec.name, str(i)), s) for i, s in enumerate(states)]
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for label, state in named:
                gauge.add_metric(label, value(state.stats))
            yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=labels)
            for label, state in named:
                counter.add_metric(label, value(state.stats))
            yield counter
        gaps = HistogramMetricFamily(
            "jpaged:step_gap_seconds", "Between steps while there is work.", labels=labels
        )
        for label, state in named:
            total = 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip((*GAP_BOUNDS_S, "+Inf"), state.stats.gap_counts, strict=True):
                total += count
                buckets.append((str(bound), total))
            gaps.add_metric(label, buckets, state.stats.gap_s)
        yield gaps
        # What was renamed goes by its old name too, counted once.
        old = "vllm:time_per_output_token_seconds"
        for metric in self._metrics.between_tokens.collect():
            alias = Metric(old, "inter_token_latency_seconds' old name.", "histogram")
            for sample in metric.samples:
                suffix = sample.name.removeprefix(metric.name)
                alias.samples.append(sample._replace(name=old + suffix))
            yield alias
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests that wait.", labels=[*labels, "reason"]
        )
        for label, state in named:
            waiting.add_metric((*label, "capacity"), state.stats.num_waiting)
            waiting.add_metric((*label, "deferred"), 0)
        yield waiting
        settings = [(label, dict(s.limits.cache_config)) for label, s in named if s.limits]
        if settings:
            names = list(settings[0][1])
            info = GaugeMetricFamily(
                "vllm:cache_config_info", "Settings.", labels=[*labels, *names]
            )
            for label, values in settings:
                info.add_metric((*label, *(values[name] for name in names)), 1)
            yield info


def _one_two_five(maximum: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to the maximum."""
    values: list[int] = []
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > maximum:
                return values or [1]
            values.append(digit * scale)
        scale *= 10
