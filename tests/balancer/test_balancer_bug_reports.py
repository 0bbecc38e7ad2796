"""Faults that users of other balancers reported, each as a small test against the real parts.

The letter is the class: A stale or missing load stats, B wrong decisions, C in-flight accounts.
"""

# ruff: noqa: N802 - tests carry the reports' names

from __future__ import annotations

import inspect
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.balancer.dispatch import EarlyDispatch
from dpkit.balancer.ledger import Charge, Ledger
from dpkit.balancer.policies import kv_pressure, load_policy
from dpkit.errors import ConfigError, RequestRejected
from dpkit.messages import EngineId, EngineStats, Snapshot
from dpkit.names import PolicyName

if TYPE_CHECKING:
    from dpkit.balancer.dispatch import Placement
    from tests.balancer.conftest import Client, MakeClient


CHANCE = {PolicyName.POWER_OF_TWO: 2, PolicyName.RANDOM: 8}
"""Requests by which an engine may be off its ten of forty where draws decide."""


def stats(index: int, waiting: int, running: int, usage: float, *, step: int = 0) -> EngineStats:
    return EngineStats(
        engine=EngineId(f"e{index}"),
        index=index,
        seq=step,
        waiting=waiting,
        running=running,
        kv_cache_usage=usage,
        step_counter=step,
    )


def assert_nothing_is_left(client: Client) -> None:
    assert set(client.view.inflight) == {0}
    assert client.ledger._charges == {}
    assert set(client.ledger._accounts) == set(client.view.engines)
    assert client.ledger.audit() == ()


def restart(client: Client, index: int) -> EngineId:
    return client.replace(index)


# A: stale, missing or mis-ordered load stats


def test_A03_an_old_snapshot_in_mid_burst_does_not_erase_own_picks(make_client: MakeClient) -> None:
    client = make_client(4)
    for number in range(100):
        if number % 5 == 0:
            client.hear_nothing_but_zeros()
        client.place()
    assert all(24 <= count <= 26 for count in client.view.inflight)


@pytest.mark.parametrize("name", list(PolicyName))
def test_A04_before_any_stats_a_burst_spreads(make_client: MakeClient, name: PolicyName) -> None:
    client = make_client(4, name)
    client.burst(40)
    assert all(abs(count - 10) <= CHANCE.get(name, 0) for count in client.view.inflight)


def test_A05_a_lockstep_snapshot_never_mixes_two_steps() -> None:
    rules = CoordinatorRules(3, now=0.0, wave_coordination=True)
    rules.publish(0.05)
    for index in range(3):
        rules.on_stats(0.06 + index / 100, stats(index, 1, 0, 0.0, step=1))
    rules.on_stats(0.09, stats(1, 2, 0, 0.0, step=2))
    loads = rules.publish(0.15).loads
    assert loads == ((1, 0, 0.0),) * 3


def test_A05_several_clients_that_burst_at_once_balance_as_one(make_client: MakeClient) -> None:
    clients = [make_client(4, index=index, count=3) for index in range(3)]
    for _ in range(20):
        for client in clients:
            client.place()
    for client in clients:
        assert list(client.view.inflight) == [5, 5, 5, 5]


def test_A07_a_burst_inside_one_interval_splits_evenly(make_client: MakeClient) -> None:
    client = make_client(3)
    client.snapshot((0, 5, 0.1), (0, 5, 0.1), (0, 5, 0.1))
    assert Counter(client.burst(60)) == {0: 20, 1: 20, 2: 20}


@pytest.mark.parametrize("name", ["power_of_two", "kv_pressure"])
def test_A08_picks_since_the_snapshot_add_to_it(make_client: MakeClient, name: str) -> None:
    client = make_client(2, name)
    client.snapshot((0, 0, 0.0), (0, 1, 0.0))
    assert Counter(client.burst(8)) == {0: 4, 1: 4}


def test_A10_only_the_engine_owns_its_counts_and_kv_usage(make_client: MakeClient) -> None:
    rules = CoordinatorRules(2, now=0.0)
    rules.on_stats(0.0, stats(0, 3, 30, 0.99))
    clients = [make_client(2, index=index, count=3) for index in range(3)]
    for client in clients:
        client.dispatch.on_snapshot(rules.publish(0.0))
        client.burst(5)
    assert rules.publish(5.0).loads == ((3, 30, 0.99), (0, 0, 0.0))
    assert all(client.view.kv_cache_usage[0] == 0.99 for client in clients)


# B: balancing decision goes wrong


@pytest.mark.parametrize("engines", [2, 5])
def test_B04_ties_after_each_snapshot_do_not_break_to_one_engine(
    make_client: MakeClient, engines: int
) -> None:
    client = make_client(engines)
    picks: Counter[int] = Counter()
    for _ in range(1000):
        client.hear_nothing_but_zeros()
        placement = client.place()
        picks[placement.index] += 1
        client.release([placement])
    assert set(picks.values()) == {1000 // engines}


def test_B05_the_default_policy_says_that_it_counts_requests(make_client: MakeClient) -> None:
    client = make_client(2)
    client.place(tokens=10_000)
    client.place(engine="e1")
    client.place(engine="e1")
    client.hear_nothing_but_zeros()
    assert client.place(tokens=100).index == 0
    assert "counts\nrequests, not tokens" in str(kv_pressure.__doc__)


def test_B05_a_policy_of_tokens_prefers_two_short_prompts_to_a_long_one(
    make_client: MakeClient,
) -> None:
    client = make_client(2, "least_tokens")
    client.place(engine="e0", tokens=10_000)
    client.place(engine="e1", tokens=1000)
    client.place(engine="e1", tokens=1000)
    client.snapshot((0, 1, 0.0), (0, 2, 0.0))
    assert client.burst(3) == [1, 1, 1]


def test_B06_a_burst_is_even_within_one_prompt_whatever_is_reported(
    make_client: MakeClient,
) -> None:
    client = make_client(4, "least_tokens")
    rng = random.Random(21699)
    prompts = [int(min(16_000, rng.lognormvariate(7, 1.5))) for _ in range(200)]
    for number, tokens in enumerate(prompts):
        if number % 7 == 3:  # of the time before the burst
            client.hear_nothing_but_zeros()
        client.place(tokens=tokens)
        held = [load.tokens for load in client.view.loads]
        assert max(held) - min(held) <= max(prompts[: number + 1]) + 64


@pytest.mark.parametrize("name", list(PolicyName))
def test_B07_every_name_in_the_config_has_a_policy_that_balances(
    make_client: MakeClient, name: PolicyName
) -> None:
    client = make_client(4, name)
    rng = random.Random(7)
    placements: list[Placement] = []
    for _ in range(400):
        placements.append(client.place())
        client.release([placements.pop(rng.randrange(len(placements)))])
        placements.append(client.place())
        client.release([placements.pop(0)])
    within = 2 * CHANCE.get(name, 0) + 1
    assert max(client.view.inflight) - min(client.view.inflight) <= within
    client.burst(40)
    assert max(client.view.inflight) - min(client.view.inflight) <= within


def test_B07_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=", ".join(PolicyName)):
        load_policy("least_loaded")


def test_B08_round_robin_goes_round_and_a_pin_is_honoured(make_client: MakeClient) -> None:
    client = make_client(3, "round_robin")
    order = []
    for number in range(9):
        pinned = client.place(engine="e1") if number % 2 else None
        assert pinned is None or str(pinned.reason).startswith("pinned: ")
        order.append(client.place().index)
    assert order == [0, 1, 2] * 3
    assert list(client.view.inflight) == [3, 3 + 4, 3]


# C: in-flight accounts drift


def test_C01_requests_that_are_dropped_anywhere_leave_no_phantom(make_client: MakeClient) -> None:
    client = make_client(4)
    rng = random.Random(1)
    placements = [client.place() for _ in range(400)]
    rng.shuffle(placements)
    client.release(placements[:200])
    restart(client, 2)
    client.release(placements)
    assert_nothing_is_left(client)
    client.hear_nothing_but_zeros()
    assert Counter(client.burst(40)) == dict.fromkeys(range(4), 10)


@pytest.mark.parametrize("report", ["C04", "C05"])
def test_C04_C05_a_late_release_goes_to_the_life_that_was_charged(
    make_client: MakeClient, report: str
) -> None:
    client = make_client(2)
    old = [client.place(engine="e1") for _ in range(5)]
    new_life = restart(client, 1)
    new = [client.place(engine="e1") for _ in range(3)]
    if report == "C05":  # back under the same name a second time
        restart(client, 1)
    client.release(old)
    assert client.ledger.inflight(new_life) == 3
    assert min(client.view.inflight) == 0
    client.release(new)
    assert_nothing_is_left(client)
    assert Counter(client.burst(10)) == {0: 5, 1: 5}, "nobody looks idler than idle"


def test_C07_concurrent_picks_see_each_other(make_client: MakeClient) -> None:
    client = make_client(4)
    assert not inspect.iscoroutinefunction(EarlyDispatch.place)
    client.burst(100)
    assert list(client.view.inflight) == [25, 25, 25, 25]


def test_C08_a_request_that_was_never_charged_is_never_released(make_client: MakeClient) -> None:
    client = make_client(2)
    for number in range(100):
        if number % 3 == 0:  # refused before it costs an engine anything
            with pytest.raises(RequestRejected):
                client.place(engine="nowhere")
        else:
            client.release([client.place()])
    assert_nothing_is_left(client)
    statistics = client.ledger.statistics()
    assert statistics.charged == statistics.released == 66


def test_C09_accounts_never_expire(make_client: MakeClient) -> None:
    client = make_client(2)
    long_ones = [client.place(engine="e0") for _ in range(3)]
    for _ in range(10_000):  # days of other requests
        client.release([client.place()])
    client.hear_nothing_but_zeros()
    assert list(client.view.inflight) == [3, 0]
    client.release(long_ones)
    assert_nothing_is_left(client)


def test_C10_release_before_charge_cannot_be_said(make_client: MakeClient) -> None:
    assert not [name for name in vars(Ledger) if "release" in name and not name.startswith("_")]
    client = make_client(1)
    placement = client.place()
    answers = [client.dispatch.release(placement) for _ in range(2)]  # the engine was very fast
    assert answers == [True, False]
    stranger = Charge("r0", 0, client.view.load(0), client.ledger)
    assert not stranger.release()
    assert_nothing_is_left(client)


def test_C11_all_tables_are_empty_after_failures_of_any_kind(make_client: MakeClient) -> None:
    client = make_client(4)
    in_prefill = [client.place() for _ in range(100)]
    client.release(in_prefill)
    in_decode = [client.place() for _ in range(100)]
    client.hear_nothing_but_zeros()
    client.release(reversed(in_decode))
    client.release(in_prefill)
    assert_nothing_is_left(client)


def test_C12_the_count_is_real_after_each_completion(make_client: MakeClient) -> None:
    client = make_client(3)
    rng = random.Random(3)
    live: list[Placement] = []
    for _ in range(2000):
        live.append(client.place())
        if rng.random() < 0.6:
            client.release([live.pop(rng.randrange(len(live)))])
        real = Counter(placement.index for placement in live)
        assert list(client.view.inflight) == [real[0], real[1], real[2]]
    assert not client.ledger.audit()
    assert isinstance(client.view.load(0).inflight, int)
    client.dispatch.on_snapshot(Snapshot(loads=None))
    client.release(live)
    assert_nothing_is_left(client)
