"""From rows to what Prometheus reads, by its own library; for a thread, as it may take long.

Which of the two text formats is the scraper's choice.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from dpkit.nursery.meter import Counted
from dpkit.observe.catalogue import ALIASES, FAMILIES, Kind
from dpkit.observe.rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dpkit.observe.catalogue import Family
    from dpkit.observe.numbers import Numbers
    from dpkit.observe.rows import Labelled, Rows


_STRIDE = 512
"""Samples between two pauses: some four milliseconds, after which Python lets others in anyway.
Each pause costs a scrape as much again, if the loop is busy."""
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
    def __init__(self, families: Iterable[Family], rows: Rows, process: CollectorRegistry) -> None:
        self._families = families
        self._rows = rows
        self._process = process

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            if rows := self._rows.get(family.alias_of or family.name):
                # Of counters the library adds the suffix itself.
                is_counter = family.kind is Kind.COUNTER
                name = family.name.removesuffix("_total") if is_counter else family.name
                metric = Metric(name, family.text, family.kind.value)
                metric.samples = _Samples(family, rows)
                yield metric
        yield from self._process.collect()


class _Samples(list[Sample]):
    """The samples of a family, each made when it is written, at a walk.

    Who made them all at once would have the garbage collector stop all threads to look at them. And
    without a pause, Trio's thread waits up to 5 ms (`sys.getswitchinterval`) each time that it
    comes back from a system call, for as long as the text is made: at 64 engines, a third of a
    second.
    """

    def __init__(self, family: Family, rows: Sequence[Labelled]) -> None:
        super().__init__()
        self._family = family
        self._rows = rows

    def __iter__(self) -> Iterator[Sample]:
        for number, sample in enumerate(self._made()):
            if number % _STRIDE == _STRIDE - 1:
                time.sleep(_PAUSE_S)
            yield sample

    def _made(self) -> Iterator[Sample]:
        name, names = self._family.name, self._family.labels
        for values, value in self._rows:
            labels = dict(zip(names, values, strict=True))
            if isinstance(value, Counted):
                yield from _of_histogram(name, labels, value)
            else:
                yield Sample(name, labels, value)


def _of_histogram(name: str, labels: dict[str, str], counted: Counted) -> Iterator[Sample]:
    bounds = (*map(floatToGoString, counted.bounds), "+Inf")
    count = 0
    for bound, more in zip(bounds, counted.counts, strict=True):
        count += more
        yield Sample(f"{name}_bucket", {**labels, "le": bound}, count)
    yield Sample(f"{name}_count", labels, count)
    yield Sample(f"{name}_sum", labels, counted.total)
