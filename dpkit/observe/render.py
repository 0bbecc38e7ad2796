"""From rows to what Prometheus reads, by its own library, which writes the same names each time.

A line differs from that of the scrape before it in its number alone. So the library writes a series
when it is new, and from then on a number is put behind what it wrote: a seventh of the time, so
short that no thread is needed, which would wait for the interpreter's lock for longer than it runs.
Which of the text formats is the scraper's choice. Waits for nothing.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import define, field
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    exposition,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from dpkit.nursery.meter import Counted
from dpkit.observe.catalogue import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dpkit.observe.catalogue import Family
    from dpkit.observe.rows import Rows, Value

Encode: TypeAlias = "Callable[[Collector], bytes]"
Series: TypeAlias = "tuple[str, tuple[str, ...]]"
"""Family and labels."""

_END = "# EOF\n"
"""Of a text in OpenMetrics."""
_FORMATS: dict[Any, tuple[Encode, str]] = {
    None: (generate_latest, exposition.CONTENT_TYPE_PLAIN_0_0_4),
    **{
        write: (partial(write, escaping=openmetrics.ALLOWUTF8), name)
        for write, name in (
            (generate_latest, exposition.CONTENT_TYPE_LATEST),
            (openmetrics.generate_latest, openmetrics.CONTENT_TYPE_LATEST),
        )
    },
}
"""By what the library would write with, where it is told how to escape names. Every scraper can
read ours. Asked for underscores in place of UTF-8, it would make some of colons too, which were
always good: of its samples' names, and not of their families'."""


def process_registry() -> CollectorRegistry:
    """What the library tells of the process by itself: ``process_``, ``python_``."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


def negotiate(accept: str) -> tuple[Encode, str]:
    """What writes a text that the scraper takes, one of three, and how that is called."""
    try:
        encode, _ = choose_encoder(accept)
    except (TypeError, ValueError):  # it asks for a version that is none
        encode = generate_latest
    return _FORMATS[getattr(encode, "func", None)]


@define(eq=False)
class Page:
    """The text of one format, kept from scrape to scrape but for its numbers.

    Args:
        families: To be told, in this order.
        process: What is told beside them.
        encode: The library's, for the format.
    """

    _families: Iterable[Family]
    _process: CollectorRegistry
    _encode: Encode
    _heads: dict[str, str] = field(factory=dict, init=False)
    _series: dict[Series, Sequence[str]] = field(factory=dict, init=False)
    """Of each series, its lines without their numbers. Those that are told no more are dropped."""

    def pieces(self, rows: Rows) -> Iterator[str]:
        """The text of one scrape, a short piece at a time, each in some microseconds.

        Args:
            rows: The numbers of the moment; may not change meanwhile.
        """
        told: dict[Series, Sequence[str]] = {}
        for family in self._families:
            found = rows.get(family.alias_of or family.name)
            if not found:
                continue
            yield self._head(family)
            for labels, value in found:
                series = family.name, labels
                lines = self._series.get(series) or self._lines(family, labels, value)
                told[series] = lines
                yield _filled(lines, value)
        self._series = told
        yield self._encode(self._process).decode()

    def _head(self, family: Family) -> str:
        if family.name not in self._heads:
            self._heads[family.name] = self._written(_metric(family, ()))
        return self._heads[family.name]

    def _lines(self, family: Family, labels: Sequence[str], value: Value) -> Sequence[str]:
        """All but the numbers, which stand at the end of each line."""
        text = self._written(_metric(family, _samples(family, labels, value)))
        lines = text.removeprefix(self._head(family)).removesuffix("\n").split("\n")
        return [line[: line.rindex(" ") + 1] for line in lines]

    def _written(self, metric: Metric) -> str:
        return self._encode(_Only(metric)).decode().removesuffix(_END)


def _said(value: float) -> str:
    return floatToGoString(value)  # type: ignore[no-any-return, no-untyped-call]


def _filled(lines: Sequence[str], value: Value) -> str:
    """Lines with their numbers, which stand in the order of `_samples`."""
    if not isinstance(value, Counted):
        return f"{lines[0]}{_said(value)}\n"
    counts = list(accumulate(value.counts))
    numbers = (*counts, counts[-1], value.total)
    filled = [f"{line}{_said(n)}\n" for line, n in zip(lines, numbers, strict=True)]
    return "".join(filled)


def _samples(family: Family, labels: Sequence[str], value: Value) -> Iterator[Sample]:
    named = dict(zip(family.labels, labels, strict=True))
    if not isinstance(value, Counted):
        yield Sample(family.name, named, value)
        return
    for bound in (*map(floatToGoString, value.bounds), "+Inf"):
        yield Sample(f"{family.name}_bucket", {**named, "le": bound}, 0)
    for what in ("count", "sum"):
        yield Sample(f"{family.name}_{what}", named, 0)


def _metric(family: Family, samples: Iterable[Sample]) -> Metric:
    # Of counters the library adds the suffix itself.
    is_counter = family.kind is Kind.COUNTER
    name = family.name.removesuffix("_total") if is_counter else family.name
    metric = Metric(name, family.text, family.kind.value)
    metric.samples = list(samples)
    return metric


@define(eq=False)
class _Only(Collector):
    """Collects one metric."""

    metric: Metric

    def collect(self) -> Iterator[Metric]:
        yield self.metric
