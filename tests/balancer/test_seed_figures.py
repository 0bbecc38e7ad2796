"""Figures that `kv_pressure` must reproduce, checked by running vLLM 0.33.0's own class."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from dpkit.messages import GenerateRequest

if TYPE_CHECKING:
    from tests.balancer.conftest import Client, MakeClient

ANY = GenerateRequest(request_id="any", prompt_token_ids=(0,))


def scores(client: Client) -> list[float | None]:
    return [
        client.policy.score(ANY, index, client.view) for index in range(len(client.view.engines))
    ]


def test_1_a_burst_with_zero_snapshots_between_spreads_evenly(make_client: MakeClient) -> None:
    client = make_client(4)
    for _ in range(8):
        client.hear_nothing_but_zeros()
        client.place()
    assert list(client.view.inflight) == [2, 2, 2, 2]


@pytest.mark.parametrize("snapshots", ["one", "one before every pick"])
def test_2_a_snapshot_raises_a_score_above_the_floor(
    make_client: MakeClient, snapshots: str
) -> None:
    client = make_client(2)
    loads = ((0, 20, 0.2), (0, 0, 0.0))
    client.snapshot(*loads)
    picks = []
    for _ in range(20):
        if snapshots != "one":
            client.snapshot(*loads)
        picks.append(client.place().index)
    assert picks == [1] * 20
    assert scores(client) == [20, 20]
    assert set(client.burst(2)) == {0, 1}


@pytest.mark.parametrize(("usage", "expected", "pick"), [(1.0, [30, 20], 1), (0.2, [15, 20], 0)])
def test_3_a_full_cache_makes_a_queue_heavier(
    make_client: MakeClient, usage: float, expected: list[float], pick: int
) -> None:
    client = make_client(2, count=2)
    client.snapshot((5, 10, usage), (0, 20, 0.2))
    assert scores(client) == expected
    assert client.place().index == pick


def test_4_a_finish_releases_once_and_unknown_ids_mean_nothing(make_client: MakeClient) -> None:
    client = make_client(4)
    placements = [client.place() for _ in range(4)]
    client.release(placements[:2])
    assert client.ledger.find("never heard of") is None
    client.release(placements[:2])
    assert sum(client.view.inflight) == 2
    assert min(client.view.inflight) == 0
    assert client.ledger.statistics().inflight == 2


@pytest.mark.parametrize(("usage", "expected"), [(0.5, 10), (0.75, 16), (1.0, 22)])
def test_5_the_penalty_rises_from_half_full(
    make_client: MakeClient, usage: float, expected: float
) -> None:
    client = make_client(1)
    client.snapshot((4, 6, usage))
    assert scores(client) == [expected]


def test_6_clients_begin_spread_over_the_engines(make_client: MakeClient) -> None:
    clients = [make_client(8, index=index, count=4) for index in range(4)]
    assert [client.place().index for client in clients] == [0, 2, 4, 6]


def test_7_ties_rotate(make_client: MakeClient) -> None:
    client = make_client(2)
    picks: Counter[int] = Counter()
    for _ in range(1000):
        placement = client.place()
        picks[placement.index] += 1
        client.release([placement])
        client.hear_nothing_but_zeros()
    assert picks == {0: 500, 1: 500}


def test_8_without_a_queue_a_full_cache_costs_nothing(make_client: MakeClient) -> None:
    client = make_client(1)
    client.snapshot((0, 5, 1.0))
    assert scores(client) == [5]


def test_the_scan_start_moves_from_the_old_start_not_from_the_pick(
    make_client: MakeClient,
) -> None:
    client = make_client(3)
    client.snapshot((9, 0, 0.0), (9, 0, 0.0), (0, 0, 0.0))
    assert client.place().index == 2
    client.hear_nothing_but_zeros()
    client.snapshot((0, 0, 0.0), (0, 0, 0.0), (5, 0, 0.0))
    assert client.place().index == 1  # the pick plus one would begin at 0


def test_a_pick_counts_as_waiting_once_for_each_client(make_client: MakeClient) -> None:
    client = make_client(2, index=0, count=3)
    client.place()
    assert list(client.view.waiting) == [3, 0]


def test_own_inflight_is_scaled_by_the_number_of_clients(make_client: MakeClient) -> None:
    client = make_client(2, count=3)
    client.burst(1)
    client.hear_nothing_but_zeros()
    assert scores(client) == [3, 0]
