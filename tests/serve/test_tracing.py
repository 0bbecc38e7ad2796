"""Each request for text is one span, part of its client's trace."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from dpkit.serve.http import serve_http
from dpkit.serve.listeners import open_listeners
from dpkit.testing.http import render
from tests.nursery.lab import settle
from tests.serve.desk import CHAT, COMPLETIONS, ECHO, SLOW, dump, open_desk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio.testing import MockClock

    from dpkit.serve.face import Request, Responder

pytest.importorskip("opentelemetry.sdk", reason="pip install 'dpkit[otel]' brings it")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="so does it this")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from dpkit.serve.tracing import Tracing, open_tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = f"{PARENT[:-1]}0"


class Traces:
    """Takes spans, at once."""

    def __init__(self) -> None:
        self.provider = TracerProvider(shutdown_on_exit=False)
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    async def take(self) -> Any:
        """The one span that there is since the last call, once all is at rest."""
        await trio.testing.wait_all_tasks_blocked()
        [span] = self._exporter.get_finished_spans()
        self._exporter.clear()
        return span

    def __len__(self) -> int:
        return len(self._exporter.get_finished_spans())


@pytest.fixture
def traces() -> Iterator[Traces]:
    made = Traces()
    yield made
    made.provider.shutdown()


async def test_a_request_is_a_span_with_the_attributes_that_vllm_has(
    traces: Traces, autojump_clock: MockClock
) -> None:
    async with open_desk(SLOW) as desk:
        desk.front.observers.append(Tracing(desk.front, traces.provider))
        body = {"prompt": "abc", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "n": 2}
        headers = {"x_request_id": "mine", "x_data_parallel_rank": "1"}
        reply = await desk.post(COMPLETIONS, body, **headers)
        assert reply.status == 200
    span = await traces.take()
    assert (span.name, span.kind, span.parent) == ("llm_request", SpanKind.SERVER, None)
    told = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in span.attributes.items()
    }
    assert told == {
        "gen_ai.request.id": "mine",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.response.id": "cmpl-mine",
        "gen_ai.response.model": "tests.serve.desk:Steady",
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.latency.time_in_queue": 0.0,
        "gen_ai.latency.time_to_first_token": 0.1,
        "gen_ai.latency.e2e": 0.4,
        "dpkit.engines": ("e-1",),
        "dpkit.rank": 1,
    }
    assert span.status.status_code is StatusCode.UNSET
    assert round((span.end_time - span.start_time) / 1e9, 6) == 0.4


async def test_a_span_is_part_of_its_clients_trace(
    traces: Traces, autojump_clock: MockClock
) -> None:
    async with open_desk(ECHO) as desk:
        desk.front.observers.append(Tracing(desk.front, traces.provider))
        chat = {"messages": [{"role": "user", "content": "hello"}]}
        await desk.post(CHAT, chat, traceparent=PARENT, tracestate="vendor=x")
        span = await traces.take()
        assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
        assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
        assert span.context.trace_state.get("vendor") == "x"
        await desk.post(CHAT, chat, traceparent="nonsense")
        assert (await traces.take()).parent is None
        await desk.post(CHAT, chat, traceparent=UNSAMPLED)
        await trio.testing.wait_all_tasks_blocked()
        assert not len(traces)


async def test_a_span_tells_that_it_failed_but_no_prompt(
    traces: Traces, autojump_clock: MockClock
) -> None:
    async with open_desk(SLOW) as desk:
        desk.front.observers.append(Tracing(desk.front, traces.provider))
        endless = {"prompt": "secret", "ignore_eos": True, "max_tokens": 999}
        await desk.post(COMPLETIONS, endless | {"timeout": 0.35})
        late = await traces.take()
        assert late.status.status_code is StatusCode.ERROR
        assert late.attributes["error.type"] == "DeadlineExceeded"
        assert "secret" not in late.to_json()
        await desk.post(COMPLETIONS, endless, x_data_parallel_rank="9")
        unplaced = await traces.take()
        assert unplaced.attributes["error.type"] == "ApiError"
        assert "dpkit.rank" not in unplaced.attributes
        assert "gen_ai.latency.time_in_queue" not in unplaced.attributes
        client = desk.client()
        client.send(render("POST", COMPLETIONS, dump(endless | {"stream": True})))
        await trio.sleep(0.35)
        client.close()
        left = await traces.take()
        assert left.attributes["error.type"] == "client_gone"
        assert left.attributes["gen_ai.usage.completion_tokens"] == 3
        await settle()


async def test_spans_reach_a_collector_before_all_ends() -> None:
    taken: list[Request] = []

    async def collect(request: Request, responder: Responder) -> None:
        await trio.lowlevel.checkpoint()
        taken.append(request)
        responder.respond(200)

    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve_http, collect, await open_listeners("127.0.0.1:0"))
        async with open_desk(ECHO) as desk:
            async with open_tracing(desk.front, f"http://{server.addresses[0]}/v1/traces"):
                await desk.post(COMPLETIONS, {"prompt": "abc"}, x_request_id="mine")
                await trio.testing.wait_all_tasks_blocked()
            assert len(desk.front.observers) == 1
        [request] = taken
        assert (request.method, request.path) == ("POST", "/v1/traces")
        assert b"cmpl-mine" in request.body
        assert b"service.name" in request.body
        nursery.cancel_scope.cancel()


async def test_a_collector_that_is_not_there_delays_the_end_by_two_seconds_at_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (listener,) = await open_listeners("127.0.0.1:0")
    url = f"http://{listener.address}"
    listener.close()
    async with open_desk(ECHO) as desk:
        with trio.fail_after(8):
            async with open_tracing(desk.front, url):
                assert (await desk.post(COMPLETIONS, {"prompt": "abc"})).status == 200
                await trio.testing.wait_all_tasks_blocked()
    assert "Connection refused" in caplog.text


def test_nothing_is_imported_where_nobody_asks() -> None:
    code = (
        "import sys, dpkit.cli.serving, dpkit.serve.service, dpkit.serve.asgi\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
