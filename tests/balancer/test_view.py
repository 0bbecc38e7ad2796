"""The view: exact own counts beside a copy of the newest snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dpkit.balancer.ledger import Ledger
from dpkit.balancer.view import LoadView
from dpkit.messages import EngineId, Snapshot

if TYPE_CHECKING:
    from tests.balancer.conftest import MakeClient

E0, E1 = EngineId("e0"), EngineId("e1")


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
    view.replace(1, new_life)
    assert list(view.engines) == [E0, new_life]
    assert view.index_of("e1") == 1
    assert known(view, 1) == (0, 0, 0, 0.0)
    assert view.load(0).waiting == 1


def test_a_replaced_name_is_forgotten() -> None:
    view = LoadView([E0, E1], Ledger())
    view.replace(1, EngineId("e2"))
    assert [view.index_of(name) for name in ("e0", "e1", "e2")] == [0, None, 1]


@pytest.mark.parametrize(
    ("engines", "index", "count", "message"),
    [
        ([], 0, 1, "no engines"),
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


def test_replacing_by_a_name_in_use_is_refused(make_client: MakeClient) -> None:
    client = make_client(2)
    with pytest.raises(ValueError, match="e1 is engine 1 already"):
        client.view.replace(0, EngineId("e1", epoch=1))
    assert client.view.index_of("e0") == 0


def test_what_the_snapshot_counts_beyond_ones_own_is_of_others() -> None:
    ledger = Ledger()
    view = LoadView([E0, E1], ledger)
    charges = [ledger.charge(f"r{number}", E0) for number in range(3)]
    view.apply(Snapshot(loads=((1, 4, 0.5), (0, 2, 0.5))))
    assert [load.others for load in view.loads] == [2, 2]
    charges[0].release()
    ledger.charge("r3", E1)
    assert [load.others for load in view.loads] == [2, 2], "own changes are no news of others"
    view.apply(Snapshot(loads=((0, 1, 0.5), (0, 2, 0.5))))
    assert [load.others for load in view.loads] == [0, 1], "an old snapshot counts none below zero"
    view.replace(1, EngineId("e1", epoch=1))
    assert view.load(1).others == 0


def test_the_view_says_which_loads_changed() -> None:
    ledger = Ledger()
    view = LoadView([E0, E1, EngineId("e2")], ledger)
    assert view.changes == {0, 1, 2}, "all are new"
    view.changes.clear()
    charge = ledger.charge("r", E1)
    assert view.changes == {1}
    view.bump_waiting(0, 1)
    assert view.changes == {0, 1}
    view.changes.clear()
    charge.release()
    assert view.changes == {1}
    view.replace(2, EngineId("e2", epoch=1))
    assert view.changes == {1, 2}
    view.changes.clear()
    late = ledger.charge("s", E0)
    view.replace(0, EngineId("e0", epoch=1))
    view.changes.clear()
    late.release()
    assert view.changes == set(), "an earlier life is no part of the view"
    view.apply(Snapshot(loads=((0, 0, 0.0),)))
    assert view.changes == {0, 1, 2}
