"""Room for growth: more of it after engines have run out, less and less as answers end well."""

from __future__ import annotations

import math

import pytest

from dpkit.balancer.growth import LEAST, MEMORY, MOST, GrowthReserve


def test_as_long_as_nobody_runs_out_little_room_is_kept() -> None:
    reserve = GrowthReserve()
    for _ in range(10):
        reserve.ended()
    assert reserve.share == LEAST


def test_a_preemption_teaches_at_once_and_is_forgotten_slowly() -> None:
    reserve = GrowthReserve()
    reserve.preempted()
    assert reserve.share == MOST
    for _ in range(MEMORY):
        reserve.ended()
    assert reserve.share == pytest.approx(LEAST + (MOST - LEAST) / math.e, rel=1e-3)


def test_however_many_are_preempted_no_more_than_that_is_kept() -> None:
    reserve = GrowthReserve()
    for _ in range(10):
        reserve.preempted()
    assert reserve.share == MOST
