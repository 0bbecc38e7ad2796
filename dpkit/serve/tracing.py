"""Traces: one OpenTelemetry span for each request for text, made when it has ended.

Imported only where traces are asked for; needs the extra `otel`. The names are those that vLLM
has, and OpenTelemetry's where it has none. What was asked and what was answered is not in a span,
nor what an error says.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, get_tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dpkit import __version__
from dpkit.serve.face import Ending

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from opentelemetry.trace import TracerProvider

    from dpkit.serve.front import Front, Generated

NAME = "llm_request"
_LAST_SPANS_S = 2.0
"""Seconds that spans have, at the end, to get to the collector."""
_PARENT = ("traceparent", "tracestate")


class Tracing:
    """Makes the spans: an observer of `Front.observers`.

    A request with a valid ``traceparent`` is part of that trace, and sampled if that is.

    Args:
        front: Whose requests they are.
        provider: Of OpenTelemetry; stays its owner's. None: the global one.
    """

    def __init__(self, front: Front, provider: TracerProvider | None = None) -> None:
        self._front = front
        self._tracer = get_tracer("dpkit", __version__, tracer_provider=provider)
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, generated: Generated) -> None:
        """Make the span of a request that has ended just now."""
        request = generated.request
        carrier = {name: value for name in _PARENT if (value := request.header(name)) is not None}
        # Trio's clock begins anywhere; spans are told in the world's time.
        now = time.time_ns()
        began = now - round((generated.ended_at - generated.received_at) * 1e9)
        span = self._tracer.start_span(
            NAME,
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={**_asked(generated), **_became(generated), **self._engines(generated)},
            start_time=began,
        )
        if generated.error is not None or generated.ending is not Ending.FINISHED:
            span.set_attribute("error.type", _failure(generated))
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=now)

    def _engines(self, generated: Generated) -> dict[str, Any]:
        if not generated.engines:
            return {}
        ranks = {engine.name: engine.rank for engine in self._front.cluster.engines}
        told: dict[str, Any] = {"dpkit.engines": [str(each) for each in generated.engines]}
        if (rank := ranks.get(generated.engines[0].name)) is not None:  # it may have left meanwhile
            told["dpkit.rank"] = rank
        return told


def _asked(generated: Generated) -> dict[str, Any]:
    sampling = generated.sampling
    asked = {
        "gen_ai.request.id": generated.request.id,
        "gen_ai.request.n": generated.n,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
    }
    if generated.max_tokens is not None:
        asked["gen_ai.request.max_tokens"] = generated.max_tokens
    return asked


def _became(generated: Generated) -> dict[str, Any]:
    began = generated.received_at
    became: dict[str, Any] = {
        "gen_ai.response.id": generated.id,
        "gen_ai.response.model": generated.model,
        "gen_ai.response.finish_reasons": [each or "none" for each in generated.finish_reasons],
        "gen_ai.usage.prompt_tokens": generated.prompt_tokens,
        "gen_ai.usage.completion_tokens": generated.output_tokens,
        "gen_ai.latency.e2e": generated.ended_at - began,
    }
    if generated.cached_tokens is not None:
        became["gen_ai.usage.cache_read.input_tokens"] = generated.cached_tokens
    if generated.placed_at is not None:
        became["gen_ai.latency.time_in_queue"] = generated.placed_at - began
    if generated.first_token_at is not None:
        became["gen_ai.latency.time_to_first_token"] = generated.first_token_at - began
    return became


def _failure(generated: Generated) -> str:
    if generated.error is not None:
        return type(generated.error).__name__
    return str(generated.ending or Ending.FAILED)


@asynccontextmanager
async def open_tracing(front: Front, endpoint: str) -> AsyncIterator[None]:
    """Send the spans of a front's requests to a collector, by OTLP over HTTP.

    Args:
        front: Whose requests they are.
        endpoint: URL of the collector. All else OpenTelemetry reads from the environment: headers
            (`OTEL_EXPORTER_OTLP_HEADERS`), the sampler, the name of the service.

    Resource handling:
        Spans are sent in a thread of OpenTelemetry's. Leaving the block sends the last ones, which
        takes two seconds at most.
    """
    resource = Resource.create({"service.version": __version__})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "dpkit"}))
    provider = SdkTracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracing = Tracing(front, provider)
    front.observers.append(tracing)
    try:
        yield
    finally:
        front.observers.remove(tracing)
        with trio.move_on_after(2 * _LAST_SPANS_S, shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_give_up, exporter)
                await trio.to_thread.run_sync(provider.shutdown, abandon_on_cancel=True)
                nursery.cancel_scope.cancel()


async def _give_up(exporter: OTLPSpanExporter) -> None:
    """Have a collector that is not there be tried no more: it would be for many seconds."""
    await trio.sleep(_LAST_SPANS_S)
    stop: Callable[[], object] = exporter.shutdown
    stop()
