"""OpenTelemetry traces: a span for each prompt, in the trace of the request that brought it."""

import time

from server.engine_client import Observer
from server.generation import Generation


class Tracer(Observer):
    """Sends a span for each prompt that has ended."""

    def __init__(self, endpoint: str, names: list[str]):
        """Takes where traces go, and the first name of each model.

        Raises:
            ValueError: If the packages of the extra `otel` are missing.
        """
        # Here, because they are an extra, and take a second to import.
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import (
                TraceContextTextMapPropagator,
            )
        except ImportError as error:
            raise ValueError(
                f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'jpaged[otel]'"
            ) from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jpaged"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("jpaged")
        self._propagator = TraceContextTextMapPropagator()
        self._names = names

    def on_end(self, model: int, generation: Generation) -> None:
        """All answers to a prompt have ended; the span has begun when it came."""
        times, request = generation.times, generation.request
        offset = time.time() - time.monotonic()
        context = self._propagator.extract(dict(generation.trace_headers))

        def nanoseconds(moment: float) -> int:
            return int((moment + offset) * 1e9)

        span = self._tracer.start_span(
            "llm_request", context=context, start_time=nanoseconds(times.arrival)
        )
        answers = [answer.request for answer in generation.group.answers]
        params = request.params
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": request.request_id,
            "gen_ai.response.model": self._names[model],
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": sum(r.num_output_tokens for r in answers),
            "gen_ai.usage.cached_tokens": request.num_cached_tokens,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        end = times.last_token or time.monotonic()
        if times.first_token:
            attributes |= {
                "gen_ai.latency.time_in_queue": max(0.0, times.scheduled - times.arrival),
                "gen_ai.latency.time_to_first_token": times.first_token - times.arrival,
                "gen_ai.latency.time_in_model_prefill": times.first_token - times.scheduled,
                "gen_ai.latency.time_in_model_decode": end - times.first_token,
                "gen_ai.latency.e2e": end - times.arrival,
            }
        span.set_attributes(attributes)
        span.end(nanoseconds(end))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()
