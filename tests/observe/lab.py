"""A cluster and what its metrics say, as Prometheus would read them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from attrs import define
from prometheus_client.parser import text_string_to_metric_families

from dpkit.observe import Metrics
from tests.serve.desk import COMPLETIONS, ECHO, Desk, open_desk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from dpkit.config.schema import Config

Sample = tuple[str, frozenset[tuple[str, str]]]
"""Name and labels."""


@define(eq=False)
class Scraped:
    """One scrape."""

    text: str
    samples: Mapping[Sample, float]
    kinds: Mapping[str, str]
    """By family."""

    @classmethod
    def of(cls, text: bytes) -> Scraped:
        """Read a scrape; each series is there once."""
        samples: dict[Sample, float] = {}
        kinds: dict[str, str] = {}
        for family in text_string_to_metric_families(text.decode()):
            # The parser leaves `_total` out of the names of counters.
            kinds[family.name + "_total" * (family.type == "counter")] = family.type
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in samples
                samples[key] = sample.value
        return cls(text.decode(), samples, kinds)

    def get(self, name: str, /, **labels: str) -> float:
        """The sum of all series of a name that have these labels."""
        found = self.series(name, **labels)
        assert found, (name, labels)
        return sum(found.values())

    def series(self, name: str, /, **labels: str) -> Mapping[Sample, float]:
        """All series of a name that have these labels."""
        wanted = set(labels.items())
        return {
            key: value for key, value in self.samples.items() if key[0] == name and wanted <= key[1]
        }

    @property
    def counters(self) -> Mapping[Sample, float]:
        """What may never go down."""
        kinds = {"counter", "histogram"}
        growing = tuple(name for name, kind in self.kinds.items() if kind in kinds)
        ours = ("vllm:", "dpkit:", "http_")
        return {
            key: value
            for key, value in self.samples.items()
            if key[0].startswith(growing) and key[0].startswith(ours)
        }


def scrape(metrics: Metrics) -> Scraped:
    """Scrape in one step."""
    return Scraped.of(scrape_text(metrics))


def scrape_text(metrics: Metrics) -> bytes:
    """The text of all."""
    _, pieces = metrics._pieces("")
    return "".join(pieces).encode()


def assert_never_down(before: Scraped, now: Scraped) -> None:
    """Every counter is still there, and no less."""
    for key, value in before.counters.items():
        assert now.samples.get(key, -1) >= value, key


@asynccontextmanager
async def open_observed(
    config: Config | str = ECHO, *, clients: int = 1
) -> AsyncIterator[tuple[Desk, Metrics]]:
    """A desk whose ``/metrics`` answers."""
    metrics = Metrics()
    async with open_desk(config, clients=clients, metrics=metrics) as desk:
        metrics.watch(desk.front)
        metrics.use(desk.cluster)
        yield desk, metrics


async def busy_scrape() -> Scraped:
    """What is told when a bit of everything has happened."""
    config = f"{ECHO}[balancer]\npolicy = 'expected_ttft'\n"
    async with open_observed(config, clients=2) as (desk, _):  # so that there is an arbiter
        await desk.ask(COMPLETIONS, prompt="abcd", max_tokens=8)
        return Scraped.of((await desk.get("/metrics")).body)
