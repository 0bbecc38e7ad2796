"""The mean length of answers."""

from __future__ import annotations

import pytest

from dpkit.balancer.outputs import UNKNOWN, WEIGHT, OutputLengths


def test_nothing_is_known_before_the_first_answer() -> None:
    assert OutputLengths().mean == UNKNOWN


def test_the_first_answers_weigh_the_same() -> None:
    lengths = OutputLengths()
    for tokens in (10, 20, 60):
        lengths.add(tokens)
    assert lengths.mean == pytest.approx(30.0)
    assert lengths.count == 3


def test_after_fifty_the_newest_weighs_a_fiftieth() -> None:
    lengths = OutputLengths()
    for _ in range(60):
        lengths.add(100)
    lengths.add(600)
    assert lengths.mean == pytest.approx(100 + 500 * WEIGHT)
