"""Figures of a run, by numbers worked out by hand."""

from __future__ import annotations

import random
import re
from array import array

import numpy as np
import pytest

from dpkit.bench.record import Outcome, Record
from dpkit.bench.slo import BadSlo, Slo, parse_slo
from dpkit.bench.spread import Spread, percentile, spread_of
from dpkit.bench.summary import summarise


def record(index: int, intended: float, *moments: float, ended: float, **fields) -> Record:
    """One that finished, if nothing else is said."""
    fields.setdefault("output_tokens", len(moments))
    fields.setdefault("outcome", Outcome.FINISHED)
    fields.setdefault("began", intended)
    return Record(
        index=index, intended=intended, moments=array("d", moments), ended=ended, **fields
    )


@pytest.mark.parametrize(
    ("samples", "percent", "expected"),
    [
        ([7.0], 99, 7.0),
        ([1.0, 2.0], 50, 1.5),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 90, 4.6),  # place 3.6
        ([0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0], 95, 95.0),
        ([1.0, 2.0, 3.0], 100, 3.0),
        ([1.0, 2.0, 3.0], 0, 1.0),
    ],
)
def test_percentiles_are_interpolated_between_samples(samples, percent, expected) -> None:
    assert percentile(samples, percent) == pytest.approx(expected)


def test_percentiles_are_numpys() -> None:
    rng = random.Random(1)
    for count in (1, 2, 3, 10, 99, 1000):
        samples = sorted(rng.lognormvariate(0, 1) for _ in range(count))
        for percent in (0, 1, 50, 90, 95, 99, 100):
            wanted = float(np.percentile(samples, percent))
            assert percentile(samples, percent) == pytest.approx(wanted, rel=1e-12)


def test_a_spread_is_of_all_samples_in_any_order() -> None:
    samples = [float(each) for each in range(101)]
    random.Random(2).shuffle(samples)
    assert spread_of(samples) == Spread(
        count=101, mean=50.0, p50=50.0, p90=90.0, p95=95.0, p99=99.0, max=100.0
    )


def test_of_no_samples_there_is_no_spread() -> None:
    assert spread_of([]) is None


def test_times_of_one_request() -> None:
    one = record(0, 10.0, 10.5, 10.6, 10.9, ended=11.0, began=10.1, output_tokens=5)
    assert one.late == pytest.approx(0.1)
    assert one.ttft == pytest.approx(0.5)  # from when it was to begin, not from when it did
    assert one.gaps() == pytest.approx([0.1, 0.3])
    assert one.tpot == pytest.approx(0.1)  # 0.4 s for the 4 tokens after the first
    assert one.latency == pytest.approx(1.0)


def test_an_answer_of_one_token_has_no_time_per_token_after_it() -> None:
    assert record(0, 0.0, 0.5, ended=0.6).tpot is None
    assert record(0, 0.0, ended=0.6).ttft is None


def test_a_run_by_hand() -> None:
    records = [
        record(0, 0.0, 0.1, 0.2, ended=0.2, is_warm_up=True, engine="e-1", prompt_tokens=1000),
        record(1, 1.0, 1.5, 1.6, 1.7, ended=1.7, engine="e-0", prompt_tokens=10),
        record(2, 2.0, 2.1, 2.4, ended=2.5, engine="e-1", prompt_tokens=20),
        record(3, 2.0, ended=4.0, outcome=Outcome.FAILED, error_kind="HTTP 429", error="full"),
        record(4, 2.2, 3.0, ended=6.0, outcome=Outcome.UNFINISHED, prompt_tokens=40),
        record(5, 2.3, ended=2.4, outcome=Outcome.FAILED, error_kind="HTTP 429", error="later"),
    ]
    summary = summarise(records, lags=[0.0, 0.002], slo=Slo(ttft=0.2))
    assert (summary.requests, summary.warm_up) == (5, 1)
    assert (summary.finished, summary.failed, summary.unfinished) == (2, 2, 1)
    assert summary.duration == pytest.approx(5.0)  # 1.0 to 6.0
    assert (summary.prompt_tokens, summary.output_tokens) == (30, 5)
    assert summary.requests_per_s == pytest.approx(0.4)
    assert summary.output_tokens_per_s == pytest.approx(1.0)
    assert summary.tokens_per_s == pytest.approx(7.0)
    assert summary.most_at_once == 4  # 2, 3, 4 and 5
    assert summary.ttft is not None
    assert summary.ttft.count == 2
    assert summary.ttft.mean == pytest.approx(0.3)
    assert summary.itl is not None
    assert summary.itl.count == 3
    assert summary.itl.mean == pytest.approx(0.5 / 3)
    assert summary.tpot is not None
    assert summary.tpot.mean == pytest.approx(0.2)  # 0.1 and 0.3
    assert summary.e2e is not None
    assert summary.e2e.max == pytest.approx(0.7)
    assert summary.lag is not None
    assert summary.lag.max == pytest.approx(0.002)
    [shown] = summary.errors
    assert (shown.kind, shown.count, shown.example) == ("HTTP 429", 2, "full")
    assert summary.goodput is not None
    assert (summary.goodput.good, summary.goodput.share) == (1, 0.25)  # of the four that ended
    assert summary.goodput.per_s == pytest.approx(0.2)
    first, second = summary.engines
    assert (first.engine, first.requests, first.output_tokens) == ("e-0", 1, 3)
    assert (second.engine, second.requests, second.output_tokens) == ("e-1", 1, 2)
    assert summary.imbalance == pytest.approx(1.2)  # 3 of a mean of 2.5


def test_engines_stand_in_the_order_of_their_numbers() -> None:
    records = [record(each, 0.0, 0.1, ended=0.1, engine=f"e-{each}") for each in (10, 2, 1)]
    assert [each.engine for each in summarise(records).engines] == ["e-1", "e-2", "e-10"]


def test_a_place_that_is_taken_again_at_once_is_one_request() -> None:
    records = [record(0, 0.0, ended=1.0), record(1, 1.0, ended=2.0)]
    assert summarise(records).most_at_once == 1


def test_of_nothing_there_are_no_figures() -> None:
    summary = summarise([], slo=Slo(ttft=1.0))
    assert (summary.requests, summary.duration, summary.requests_per_s) == (0, 0.0, 0.0)
    assert summary.ttft is summary.itl is summary.tpot is summary.e2e is None
    assert summary.imbalance is None
    assert summary.goodput is not None
    assert summary.goodput.share == 0.0


@pytest.mark.parametrize(
    ("late", "lag", "expected"),
    [(0.0, 0.0, False), (0.011, 0.0, True), (0.0, 0.011, True), (0.009, 0.009, False)],
)
def test_a_generator_that_was_late_is_told_of(late: float, lag: float, expected: bool) -> None:
    summary = summarise([record(0, 0.0, ended=1.0, began=late)], lags=[lag])
    assert summary.generator_was_late is expected
    assert summary.to_dict()["generator_was_late"] is expected


@pytest.mark.parametrize(
    ("slo", "is_met"),
    [
        ("ttft=500ms", True),
        ("ttft=499ms", False),
        ("tpot=200ms", True),
        ("tpot=199ms", False),
        ("itl=300ms", True),
        ("itl=299ms", False),
        ("e2e=1s", True),
        ("e2e=999ms", False),
        ("ttft=1s, tpot=1s,itl=1s,e2e=999ms", False),
    ],
)
def test_an_slo_is_met_up_to_its_bounds(slo: str, is_met: bool) -> None:
    one = record(0, 0.0, 0.5, 0.6, 0.9, ended=1.0)
    assert parse_slo(slo).is_met(one) is is_met


def test_an_answer_that_failed_meets_no_slo() -> None:
    assert not Slo(ttft=9.0).is_met(record(0, 0.0, 0.1, ended=0.2, outcome=Outcome.FAILED))


def test_an_slo_reads_as_it_was_put() -> None:
    assert str(parse_slo("e2e=2m, ttft=500ms")) == "ttft=500ms,e2e=2m"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tftt=1s", "'tftt' is none of ttft, tpot, itl, e2e"),
        ("", "'' is none of ttft, tpot, itl, e2e"),
        ("ttft=1", "ttft: expected a duration"),
    ],
)
def test_an_slo_that_is_put_wrong_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadSlo, match="^" + re.escape(said)):
        parse_slo(text)
