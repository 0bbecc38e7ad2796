"""The view: exact own counts beside a copy of the newest snapshot."""

from __future__ import annotations

import pytest

from dpkit.balancer.ledger import Ledger
from dpkit.balancer.view import LoadView
from dpkit.messages import EngineId, Snapshot

E0, E1, E2 = EngineId("e0"), EngineId("e1"), EngineId("e2")


def known(view: LoadView, index: int) -> tuple[int, int, int, float]:
    load = view.load(index)
    return load.inflight, load.waiting, load.running, load.kv_cache_usage


def loads(view: LoadView) -> list[tuple[int, int, float]]:
    return list(zip(view.waiting, view.running, view.kv_cache_usage, strict=True))


def test_an_engine_of_unknown_load_counts_as_idle_plus_own_inflight() -> None:
    ledger = Ledger()
    view = LoadView([E0, E1], ledger)
    ledger.charge("r", E1)
    assert known(view, 1) == (1, 0, 0, 0.0)
    assert list(view.inflight) == [0, 1]
    assert repr(view) == "<LoadView of client 0/1: e0 0+0w/0r, e1 1+0w/0r>"


def test_a_snapshot_replaces_bumps_and_all() -> None:
    view = LoadView([E0, E1], Ledger())
    view.bump_waiting(0, 3)
    assert list(view.waiting) == [3, 0]
    assert view.apply(Snapshot(loads=((1, 2, 0.5), (0, 4, 0.25))))
    assert loads(view) == [(1, 2, 0.5), (0, 4, 0.25)]


def test_a_bump_leaves_the_snapshot_itself_alone() -> None:
    view, other = LoadView([E0], Ledger()), LoadView([E0], Ledger())
    snapshot = Snapshot(loads=((1, 2, 0.5),))
    view.apply(snapshot)
    view.bump_waiting(0, 1)
    other.apply(snapshot)
    assert loads(other) == [(1, 2, 0.5)]


def test_a_word_about_waves_changes_no_load() -> None:
    view = LoadView([E0], Ledger())
    view.apply(Snapshot(loads=((1, 2, 0.5),)))
    assert not view.apply(Snapshot(loads=None, current_wave=3))
    assert loads(view) == [(1, 2, 0.5)]


def test_a_snapshot_of_fewer_or_more_engines_is_taken_as_far_as_it_goes() -> None:
    view = LoadView([E0, E1], Ledger())
    view.apply(Snapshot(loads=((1, 2, 0.5),) * 3))
    assert loads(view) == [(1, 2, 0.5)] * 2
    view.apply(Snapshot(loads=((3, 4, 0.5),)))
    assert loads(view) == [(3, 4, 0.5), (0, 0, 0.0)]


def test_a_new_life_starts_with_nothing_in_flight_and_its_load_unknown() -> None:
    ledger = Ledger()
    view = LoadView([E0, E1], ledger)
    view.apply(Snapshot(loads=((1, 2, 0.5), (3, 4, 0.5))))
    ledger.charge("r", E1)
    new_life = EngineId("e1", epoch=1)
    assert view.remove(E1)
    view.add(new_life, 1)
    assert list(view.engines) == [E0, new_life]
    assert view.index_of("e1") == 1
    assert known(view, 1) == (0, 0, 0, 0.0)
    assert view.load(0).waiting == 1


def test_only_engines_that_may_be_picked_are_in_the_view_in_the_order_of_their_ranks() -> None:
    view = LoadView([E0, E1, E2], Ledger())
    assert view.remove(E1)
    assert list(view.engines) == [E0, E2]
    assert [view.index_of(name) for name in ("e0", "e1", "e2")] == [0, None, 1]
    view.add(E1, 1)
    assert list(view.engines) == [E0, E1, E2]
    view.add(EngineId("e9"), 3)
    assert view.index_of("e9") == 3


def test_a_snapshot_is_read_by_rank_whoever_is_away() -> None:
    view = LoadView([E0, E1, E2], Ledger())
    view.remove(E1)
    view.apply(Snapshot(loads=((1, 1, 0.1), (2, 2, 0.2), (3, 3, 0.3))))
    assert loads(view) == [(1, 1, 0.1), (3, 3, 0.3)]


def test_a_life_that_was_away_has_what_the_newest_snapshot_says_and_a_new_one_nothing() -> None:
    view = LoadView([E0, E1], Ledger())
    view.remove(E1)
    view.apply(Snapshot(loads=((1, 1, 0.1), (2, 2, 0.2))))
    view.add(E1, 1)
    assert loads(view)[1] == (2, 2, 0.2)
    view.remove(E1)
    view.add(EngineId("e1", epoch=1), 1)
    assert loads(view)[1] == (0, 0, 0.0)


def test_a_view_of_no_engines_is_a_view() -> None:
    view = LoadView([], Ledger())
    assert repr(view) == "<LoadView of client 0/1: nobody>"
    assert view.apply(Snapshot(loads=((1, 2, 0.5),)))
    assert (list(view.engines), view.changes) == ([], set())
    view.add(E0, 0)
    assert loads(view) == [(0, 0, 0.0)], "what was said of its rank is of an earlier life"


def test_a_name_is_known_until_it_is_forgotten() -> None:
    view = LoadView([E0], Ledger())
    view.expect("e1")
    view.expect("e0")
    view.remove(E0)
    assert list(view.names) == ["e0", "e1"]
    view.forget("e0")
    view.forget("e0")
    view.add(E1, 1)
    view.forget("e1")
    assert list(view.names) == ["e1"], "what is in the view is not forgotten"


@pytest.mark.parametrize(
    ("engines", "index", "count", "message"),
    [
        ([E0], 1, 1, "client 1 of 1"),
        ([E0], -1, 1, "client -1 of 1"),
        ([E0, EngineId("e0", epoch=1)], 0, 1, "must differ: e0, e0#1"),
    ],
)
def test_a_view_of_nonsense_is_refused(
    engines: list[EngineId], index: int, count: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LoadView(engines, Ledger(), client_index=index, client_count=count)


@pytest.mark.parametrize(
    ("engine", "rank", "by"),
    [(EngineId("e1", epoch=1), 2, "e1"), (E2, 0, "e0"), (E1, 1, "e1")],
)
def test_a_name_or_rank_that_is_taken_is_refused(engine: EngineId, rank: int, by: str) -> None:
    view = LoadView([E0, E1], Ledger())
    with pytest.raises(ValueError, match=f"engine {engine} at rank {rank}: {by} is there already"):
        view.add(engine, rank)
    assert list(view.engines) == [E0, E1]


def test_who_is_alone_has_no_others_whatever_a_snapshot_says() -> None:
    view = LoadView([E0, E1], Ledger())
    view.apply(Snapshot(loads=((1, 4, 0.5), (0, 2, 0.5))))
    assert [load.others for load in view.loads] == [0, 0]
    assert view.running == [4, 2]


def test_what_the_snapshot_counts_beyond_ones_own_is_of_others() -> None:
    ledger = Ledger()
    view = LoadView([E0, E1], ledger, client_count=2)
    charges = [ledger.charge(f"r{number}", E0) for number in range(3)]
    view.apply(Snapshot(loads=((1, 4, 0.5), (0, 2, 0.5))))
    assert [load.others for load in view.loads] == [2, 2]
    charges[0].release()
    ledger.charge("r3", E1)
    assert [load.others for load in view.loads] == [2, 2], "own changes are no news of others"
    view.apply(Snapshot(loads=((0, 1, 0.5), (0, 2, 0.5))))
    assert [load.others for load in view.loads] == [0, 1], "an old snapshot counts none below zero"
    view.remove(E1)
    view.add(EngineId("e1", epoch=1), 1)
    assert view.load(1).others == 0


def test_the_view_says_which_loads_changed() -> None:
    ledger = Ledger()
    view = LoadView([E0, E1, E2], ledger)
    assert view.changes == {0, 1, 2}, "all are new"
    view.changes.clear()
    charge = ledger.charge("r", E1)
    assert view.changes == {1}
    view.bump_waiting(0, 1)
    assert view.changes == {0, 1}
    view.changes.clear()
    charge.release()
    assert view.changes == {1}
    late, moved = ledger.charge("s", E0), ledger.charge("t", E2)
    view.remove(E0)
    assert view.changes == {0, 1}, "indices have moved"
    view.changes.clear()
    late.release()
    assert view.changes == set(), "what is away is no part of the view"
    moved.release()
    assert view.changes == {1}
    view.add(EngineId("e0", epoch=1), 0)
    assert view.changes == {0, 1, 2}
    view.changes.clear()
    view.apply(Snapshot(loads=((0, 0, 0.0),)))
    assert view.changes == {0, 1, 2}
