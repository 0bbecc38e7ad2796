"""From rows to what Prometheus reads, by its own library; for a thread, as it may take long.

Which of the two text formats is the scraper's choice.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from dpkit.nursery.meter import Counted
from dpkit.observe.catalogue import ALIASES, FAMILIES, Kind
from dpkit.observe.rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from dpkit.observe.catalogue import Family
    from dpkit.observe.numbers import Numbers
    from dpkit.observe.rows import Rows


_STRIDE = 64
"""Samples between two pauses: half a millisecond."""
_PAUSE_S = 0.0005


def process_registry() -> CollectorRegistry:
    """What the library tells of the process by itself: ``process_``, ``python_``."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


def render(
    numbers: Numbers, process: CollectorRegistry, accept: str, *, legacy_aliases: bool
) -> tuple[str, bytes]:
    """The content type and the text of one scrape.

    Args:
        numbers: Of the moment.
        process: What is told beside them.
        accept: What the scraper takes.
        legacy_aliases: Whether to tell older names too.
    """
    encode, content_type = _negotiate(accept)
    families = FAMILIES if legacy_aliases else [each for each in FAMILIES if each not in ALIASES]
    return content_type, encode(_Scrape(families, rows_of(numbers), process))


def _negotiate(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """What to write, and how it is called."""
    encode, content_type = choose_encoder(accept)
    if isinstance(encode, partial):
        # Every scraper can read our names as they are. Asked for underscores in place of UTF-8,
        # the library would make some of colons too, which were always good: of its samples' names,
        # and not of their families'.
        encode = partial(encode, escaping=ALLOWUTF8)
    return encode, content_type.partition("; escaping=")[0]


class _Scrape(Collector):
    def __init__(
        self, families: tuple[Family, ...] | list[Family], rows: Rows, process: CollectorRegistry
    ) -> None:
        self._families = families
        self._rows = rows
        self._process = process

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            if rows := self._rows.get(family.alias_of or family.name):
                metric = _metric(family, rows)
                metric.samples = _Paced(metric.samples)
                yield metric
                time.sleep(_PAUSE_S)
        yield from self._process.collect()


class _Paced(list[Sample]):
    """Samples that are told at a walk: who writes them leaves the interpreter to Trio's thread.

    Without, that thread waits up to 5 ms (`sys.getswitchinterval`) each time that it comes back
    from a system call, for as long as the text is made: at 64 engines, a third of a second.
    """

    def __iter__(self) -> Iterator[Sample]:
        for number, sample in enumerate(super().__iter__()):
            if number % _STRIDE == _STRIDE - 1:
                time.sleep(_PAUSE_S)
            yield sample


def _metric(family: Family, rows: list[tuple[tuple[str, ...], float | Counted]]) -> Metric:
    metric: GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
    if family.kind is Kind.HISTOGRAM:
        metric = HistogramMetricFamily(family.name, family.text, labels=family.labels)
        for labels, value in rows:
            assert isinstance(value, Counted)  # noqa: S101 - by the catalogue
            metric.add_metric(labels, _buckets(value), value.total)
        return metric
    make = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = make(family.name, family.text, labels=family.labels)
    for labels, value in rows:
        assert not isinstance(value, Counted)  # noqa: S101 - likewise
        metric.add_metric(labels, value)
    return metric


def _buckets(counted: Counted) -> list[tuple[str, float]]:
    bounds = [*map(floatToGoString, counted.bounds), "+Inf"]
    return list(zip(bounds, accumulate(counted.counts), strict=True))
