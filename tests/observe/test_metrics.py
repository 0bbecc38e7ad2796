"""`/metrics`: every family is told, in both formats, at no cost to anybody else."""

from __future__ import annotations

import gc
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dpkit.config.load import parse_config
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.meter import Counted
from dpkit.observe import Metrics
from dpkit.observe.catalogue import ALIASES, FAMILIES, Kind, samples_of
from dpkit.observe.render import Page, negotiate
from dpkit.observe.rows import rows_of
from dpkit.serve.asgi import AsgiApp
from dpkit.serve.service import serve_http
from dpkit.testing.http import ReplyReader, render
from tests.nursery.lab import settle
from tests.observe.lab import Scraped, busy_scrape, open_observed, scrape, scrape_text
from tests.serve.desk import CHAT, COMPLETIONS, ECHO, SLOW
from tests.serve.test_asgi import Visit
from tests.serve.test_openai_sockets import connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from dpkit.config.schema import Config
    from dpkit.observe.rows import Rows
    from dpkit.testing.http import Reply

OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.1"
)


async def test_every_family_is_told_with_its_kind_and_labels() -> None:
    scraped = await busy_scrape()
    for family in FAMILIES:
        assert scraped.kinds[family.name] == family.kind, family.name
        for name in samples_of(family):
            for _, labels in scraped.series(name):
                names = {key for key, _ in labels} - {"le"}
                assert names == set(family.labels), name


async def test_nothing_else_is_told_but_of_the_process() -> None:
    scraped = await busy_scrape()
    names = {family.name for family in FAMILIES}
    others = {name for name in scraped.kinds if name not in names}
    assert {name.partition("_")[0] for name in others} == {"process", "python"}
    assert scraped.get("process_resident_memory_bytes") > 1e6


async def test_older_names_have_the_same_numbers_and_can_be_left_out() -> None:
    scraped = await busy_scrape()
    for alias in ALIASES:
        assert alias.alias_of is not None
        for name in samples_of(alias):
            now = name.replace(alias.name, alias.alias_of)
            told = {labels: value for (_, labels), value in scraped.series(now).items()}
            assert {labels: v for (_, labels), v in scraped.series(name).items()} == told
    async with open_cluster(parse_config(ECHO)) as cluster:
        kinds = scrape(Metrics(cluster, legacy_aliases=False)).kinds
    assert not {alias.name for alias in ALIASES} & set(kinds)
    assert "vllm:kv_cache_usage_perc" in kinds


async def test_it_is_told_over_a_real_socket_in_both_formats() -> None:
    config = parse_config(f"{ECHO}[server]\nlisten = '127.0.0.1:0'\n")
    async with open_cluster(config) as cluster, trio.open_nursery() as nursery:
        metrics = Metrics(cluster)
        service = await nursery.start(partial(serve_http, cluster, metrics=metrics))
        metrics.watch(service.front)

        async def ask(method: str, path: str, body: bytes = b"", accept: str = "") -> Reply:
            async with await connect(service.addresses[0]) as stream:
                headers = [(b"accept", accept.encode())] if accept else []
                await stream.send_all(render(method, path, body, headers))
                reader = ReplyReader(head_only=method == "HEAD")
                while not reader.is_complete:
                    reader.feed(await stream.receive_some())
            return reader.reply()

        await ask("POST", COMPLETIONS, b'{"prompt": "abcd", "max_tokens": 3}')
        plain = await ask("GET", "/metrics")
        assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert Scraped.of(plain.body).get("vllm:generation_tokens_total", model_name="echo") == 3
        assert (await ask("HEAD", "/metrics")).status == 200
        for accept in (OPEN_METRICS, PROMETHEUS_3):
            told = await ask("GET", "/metrics", accept=accept)
            kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
            assert told.headers["content-type"] == kind
            families = {f.name: f for f in text_string_to_metric_families(told.body.decode())}
            [tokens] = [s.value for s in families["vllm:prompt_tokens"].samples if s.value]
            assert tokens == 4
            assert {f.name.removesuffix("_total") for f in FAMILIES if f.kind is Kind.COUNTER} <= {
                *families
            }
        nursery.cancel_scope.cancel()


async def test_an_asgi_application_tells_it_too() -> None:
    async with open_cluster(parse_config(ECHO)) as cluster:
        metrics = Metrics(cluster, model_name="mine")
        app = AsgiApp(cluster, metrics=metrics)
        metrics.watch(app.front)
        for path, body in ((COMPLETIONS, b'{"prompt": "ab"}'), ("/nowhere", b""), (CHAT, b"no")):
            await Visit(app, path, body).run()
        visit = Visit(app, "/metrics", method="GET")
        await visit.run()
        told = Scraped.of(visit.sent[1]["body"])
        assert told.get("vllm:request_success_total", model_name="mine") == 1
        answers = "dpkit:http_answers_total"
        assert told.get(answers, handler=COMPLETIONS, code="200", ending="finished") == 1
        assert told.get(answers, handler="none", code="404") == 1
        assert told.get(answers, handler=CHAT, code="400") == 1


async def test_before_there_is_a_cluster_the_server_tells_of_itself() -> None:
    metrics = Metrics()
    told = scrape(metrics)
    assert told.get("python_info") == 1
    assert not told.series("dpkit:server_state"), "nobody serves"
    assert "cluster" not in repr(metrics).lower()
    async with open_observed() as (_, metrics):
        told = scrape(metrics)
        assert told.get("dpkit:server_state", state="ready") == 1
        assert told.get("dpkit:server_state") == 1, "it is in one state"


async def test_probes_hide_nobody(autojump_clock: Any) -> None:
    async with open_observed() as (desk, metrics):
        await desk.ask(COMPLETIONS, prompt="a")
        for path in ("/health", "/health", "/ready", "/metrics"):
            await desk.get(path)
        await desk.refused(COMPLETIONS)
        await desk.client().request("BREW", COMPLETIONS)
        told = scrape(metrics)
        assert told.get("http_requests_total") == 3
        assert told.get("http_requests_total", method="POST", status="2xx") == 1
        assert told.get("http_requests_total", status="4xx", handler=COMPLETIONS) == 1
        assert told.get("http_requests_total", method="other", handler="none") == 1
        assert told.get("http_request_duration_seconds_count", method="POST") == 2
        assert told.get("dpkit:http_answers_total", handler="/health", code="200") == 2


def many_engines() -> Config:
    """So many that a scrape takes long."""
    return parse_config(ECHO.replace("count = 2", "count = 64"))


async def test_a_scrape_that_takes_long_lets_others_have_their_turn() -> None:
    async with open_cluster(many_engines()) as cluster, trio.open_nursery() as nursery:
        metrics, rounds, scraped = Metrics(cluster), 0, trio.Event()

        async def ask() -> None:
            await metrics.scrape()
            scraped.set()

        for _ in range(2):  # the first writes everything anew, the second only the numbers
            scraped, before = trio.Event(), rounds
            nursery.start_soon(ask)
            while not scraped.is_set():
                await trio.lowlevel.checkpoint()
                rounds += 1
            assert rounds - before > 3  # of which two are those in which it begins and ends


async def test_a_scraper_that_leaves_in_between_spoils_nothing_for_the_next() -> None:
    async with open_cluster(many_engines()) as cluster:
        metrics = Metrics(cluster)
        with trio.CancelScope() as scope:
            scope.cancel()
            await metrics.scrape()
        assert scope.cancelled_caught
        assert scrape(metrics).get("dpkit:engine_info") == 64


@pytest.mark.parametrize("accept", ["", OPEN_METRICS, PROMETHEUS_3])
async def test_numbers_are_put_where_the_library_would_write_them(accept: str) -> None:
    async with open_cluster(parse_config(ECHO)) as cluster:
        encode, _ = negotiate(accept)
        nothing = CollectorRegistry()
        kept = Page(FAMILIES, nothing, encode)
        assert "".join(kept.pieces(rows_of(Metrics(cluster).numbers())))
        metrics = Metrics(cluster)
        for prompt in ("abcdefgh", "ab"):
            await cluster.client.complete(prompt, max_tokens=3)
        rows = rows_of(metrics.numbers())
        written = encode(ByTheLibrary(rows)).decode().removesuffix("# EOF\n")
        assert "".join(kept.pieces(rows)).removesuffix("# EOF\n") == written
        assert "} 8.0\n" in written, "the tokens of a prompt"


class ByTheLibrary(Collector):
    """All families, with its own means."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def collect(self) -> Iterator[Metric]:
        kinds = {
            Kind.GAUGE: GaugeMetricFamily,
            Kind.COUNTER: CounterMetricFamily,
            Kind.HISTOGRAM: HistogramMetricFamily,
        }
        for family in FAMILIES:
            if not (rows := self._rows.get(family.alias_of or family.name)):
                continue
            metric: Any = kinds[family.kind](family.name, family.text, labels=family.labels)
            for labels, value in rows:
                if isinstance(value, Counted):
                    counts = map(float, accumulate(value.counts))
                    bounds = (*map(floatToGoString, value.bounds), "+Inf")
                    buckets = list(zip(bounds, counts, strict=True))
                    metric.add_metric(labels, buckets, sum_value=value.total)
                else:
                    metric.add_metric(labels, value)
            yield metric


async def test_formats_that_scrapers_think_up_are_not_kept() -> None:
    async with open_cluster(parse_config(ECHO)) as cluster:
        metrics = Metrics(cluster)
        for number in range(1, 20):
            for kind in ("application/openmetrics-text", "text/plain", "text/html"):
                await metrics.scrape(f"{kind};version={number}.0.0;escaping=values")
        assert len(metrics._pages) == 3


@pytest.mark.parametrize("version", ["abc", "19.0.0"])
async def test_a_version_that_nobody_has_is_not_told(version: str) -> None:
    async with open_cluster(parse_config(ECHO)) as cluster:
        metrics = Metrics(cluster)
        for kind in ("application/openmetrics-text", "text/plain"):
            content_type, text = await metrics.scrape(f"{kind};version={version}")
            assert version not in content_type
            assert b"vllm:num_requests_running" in text


async def test_a_models_name_may_have_whatever_breaks_lines_elsewhere() -> None:
    async with open_cluster(parse_config(ECHO)) as cluster:
        metrics = Metrics(cluster, model_name="a\u2028b\x85c")
        for _ in range(2):
            _, text = await metrics.scrape()
            assert 'model_name="a\u2028b\x85c"} 0.0\n'.encode() in text


async def test_series_that_are_told_no_more_are_forgotten() -> None:
    async with open_cluster(parse_config(ECHO)) as cluster:
        metrics = Metrics(cluster)
        encode, _ = negotiate("")
        page = Page(FAMILIES, CollectorRegistry(), encode)
        rows = rows_of(metrics.numbers())
        assert "dpkit:engine_info" in "".join(page.pieces(rows))
        less = {name: found for name, found in rows.items() if name != "dpkit:engine_info"}
        assert "dpkit:engine_info" not in "".join(page.pieces(less))
        assert not [series for series in page._series if series[0] == "dpkit:engine_info"]


async def test_two_scrapes_of_one_moment_are_two(autojump_clock: Any) -> None:
    async with open_cluster(parse_config(ECHO)) as cluster:
        metrics = Metrics(cluster)
        for expected in range(3):
            assert scrape(metrics).get("dpkit:requests_admitted_total") == expected
            await cluster.client.complete("a")


async def test_who_raises_among_the_listeners_harms_nobody(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    async with open_cluster(parse_config(ECHO)) as cluster:
        cluster.events.observers.append(fail)
        metrics = Metrics(cluster)
        await cluster.client.complete("a")
        assert scrape(metrics).get("vllm:request_success_total") == 1
    assert "an observer of events failed" in caplog.text


async def test_a_client_that_leaves_is_counted(autojump_clock: Any) -> None:
    async with open_observed(SLOW) as (desk, metrics):
        client = desk.client()
        client.send(render("POST", COMPLETIONS, b'{"prompt": "abcdefgh"}'))
        await trio.sleep(0.25)
        client.close()
        await trio.sleep(1)
        await settle()
        told = scrape(metrics)
        assert told.get("dpkit:client_disconnects_total") == 1
        assert told.get("dpkit:http_answers_total", code="499", ending="client_gone") == 1
        assert told.get("vllm:request_success_total", finished_reason="abort") == 1
        assert told.get("dpkit:requests_ended_total", cause="client") == 1
        assert told.get("dpkit:cancel_to_freed_seconds_count") == 1


async def test_a_scrape_gives_the_garbage_collector_little_to_do() -> None:
    """Samples of a whole page, made all at once, set off hundreds of collections."""
    async with open_cluster(many_engines()) as cluster:
        metrics = Metrics(cluster)
        generations: list[int] = []

        def note(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                generations.append(info["generation"])

        gc.collect()
        gc.callbacks.append(note)
        try:
            text = scrape_text(metrics)
        finally:
            gc.callbacks.remove(note)
        assert len(text.splitlines()) > 15_000
        assert len(generations) < 20, generations
        assert 2 not in generations
