"""Counts are published when they change, and never otherwise."""

from __future__ import annotations

from dpkit.engine.publish import PublishGate


def test_an_idle_engine_has_nothing_to_publish() -> None:
    gate = PublishGate(kv_publish_delta=0.02)
    assert not any(gate.due(0, 0, 0.0) for _ in range(3))


def test_every_change_of_counts_is_published_once() -> None:
    gate = PublishGate(kv_publish_delta=0.02)
    seen = [gate.due(*counts, 0.0) for counts in [(0, 1), (0, 1), (1, 0), (1, 0), (0, 0), (0, 0)]]
    assert seen == [True, False, True, False, True, False]


def test_kv_is_published_when_it_moved_by_delta_since_the_last_message() -> None:
    gate = PublishGate(kv_publish_delta=0.02)
    assert gate.due(1, 0, 0.50)
    assert [gate.due(1, 0, kv) for kv in (0.51, 0.515, 0.52, 0.53, 0.50)] == [
        False,
        False,
        True,
        False,
        True,
    ]


def test_rounding_hides_no_step_of_exactly_delta() -> None:
    gate = PublishGate(kv_publish_delta=0.02)
    assert all(gate.due(0, 0, blocks / 50) for blocks in range(1, 51))


def test_a_delta_of_zero_still_publishes_only_changes() -> None:
    gate = PublishGate(kv_publish_delta=0.0)
    assert [gate.due(0, 0, kv) for kv in (0.0, 1e-3, 1e-3)] == [False, True, False]
