"""The ledger: charged once, released once, whatever the order of calls."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from dpkit.balancer.ledger import Account, Charge, Ledger
from dpkit.errors import RequestRejected
from dpkit.messages import EngineId

E0, E1 = EngineId("e0"), EngineId("e1")
E0_AGAIN = EngineId("e0", epoch=1)


def test_a_charge_counts_until_it_is_released() -> None:
    ledger = Ledger()
    charge = ledger.charge("r", E0)
    assert (ledger.inflight(E0), ledger.holder("r"), ledger.find("r")) == (1, E0, charge)
    assert not charge.released
    assert charge.release()
    assert (ledger.inflight(E0), ledger.holder("r"), ledger.find("r")) == (0, None, None)
    assert charge.released


def test_releasing_again_changes_nothing() -> None:
    ledger = Ledger()
    charge, _other = ledger.charge("r", E0), ledger.charge("s", E0)
    assert [charge.release() for _ in range(3)] == [True, False, False]
    assert ledger.inflight(E0) == 1


def test_an_id_in_flight_is_never_counted_twice() -> None:
    ledger = Ledger()
    ledger.charge("r", E0)
    with pytest.raises(RequestRejected, match="cannot charge request r to engine e1") as caught:
        ledger.charge("r", E1)
    assert (caught.value.engine, caught.value.request_id) == (E0, "r")
    assert (ledger.inflight(E0), ledger.inflight(E1)) == (1, 0)


def test_a_late_release_cannot_touch_a_new_request_with_the_same_id() -> None:
    ledger = Ledger()
    old = ledger.charge("r", E0)
    old.release()
    new = ledger.charge("r", E1)
    assert not old.release()
    assert (ledger.find("r"), ledger.inflight(E1)) == (new, 1)


def test_statistics_tell_totals_and_counts_by_engine() -> None:
    ledger = Ledger()
    charges = [ledger.charge(f"r{number}", engine) for number, engine in enumerate((E0, E0, E1))]
    charges[2].release()
    statistics = ledger.statistics()
    assert (statistics.charged, statistics.released, statistics.inflight) == (3, 1, 2)
    assert statistics.by_engine == {E0: 2}
    assert repr(ledger) == "<Ledger: 2 in flight on 1 engines>"


def test_tokens_count_with_their_requests() -> None:
    ledger, account = Ledger(), Account(E0)
    ledger.open(account)
    short, long = ledger.charge("r", E0, tokens=10), ledger.charge("s", E0, tokens=1000)
    assert (account.inflight, account.tokens) == (2, 1010)
    assert [long.release(), long.release(), short.release()] == [True, False, True]
    assert (account.inflight, account.tokens) == (0, 0)


def test_a_follower_hears_of_every_change_until_the_account_is_closed() -> None:
    heard: list[int] = []
    ledger = Ledger()
    account = Account(E0, follower=lambda: heard.append(account.inflight))
    ledger.open(account)
    first, second = ledger.charge("r", E0), ledger.charge("s", E0)
    first.release()
    ledger.close(account)
    second.release()
    assert heard == [1, 2, 1]


def test_a_life_that_is_over_leaves_nothing_behind() -> None:
    ledger = Ledger()
    idle, busy = Account(E0), Account(E1)
    ledger.open(idle)
    ledger.open(busy)
    charge = ledger.charge("r", E1)
    ledger.close(idle)
    ledger.close(busy)
    assert list(ledger._accounts) == [E1]
    charge.release()
    ledger.charge("s", E0_AGAIN).release()  # a life that nobody opened
    assert list(ledger._accounts) == []


def test_a_life_has_one_account() -> None:
    ledger = Ledger()
    ledger.open(Account(E0))
    with pytest.raises(ValueError, match="engine e0 has an account already"):
        ledger.open(Account(E0))


def test_the_audit_names_each_contradiction() -> None:
    ledger = Ledger()
    ledger.charge("r", E0, tokens=5)
    ledger.charge("s", E1)
    assert ledger.audit() == ()
    ledger._accounts[E0].tokens = 4
    ledger._accounts[E1].inflight = 0
    ledger._accounts[E0_AGAIN] = Account(E0_AGAIN)
    assert ledger.audit() == (
        "e0 counts 1 requests of 4 tokens, charged are 1 requests of 5 tokens",
        "e1 counts 0 requests of 0 tokens, charged are 1 requests of 0 tokens",
        "e0#1 is listed with nothing in flight",
    )
    del ledger._accounts[E1]
    assert "s is charged to e1, which has no account" in ledger.audit()


class LedgerMachine(RuleBasedStateMachine):
    """Charges and releases in any order, on several lives of few engines, with few ids."""

    charges = Bundle("charges")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.live: dict[str, Charge] = {}
        self.engines: set[EngineId] = set()
        self.charged = 0

    @rule(
        target=charges,
        request_id=st.sampled_from("abcdef"),
        engine=st.builds(EngineId, st.sampled_from(["e0", "e1"]), st.integers(0, 2)),
    )
    def charge(self, request_id: str, engine: EngineId) -> Charge:
        if request_id in self.live:
            with pytest.raises(RequestRejected):
                self.ledger.charge(request_id, engine)
            return self.live[request_id]
        self.live[request_id] = self.ledger.charge(request_id, engine)
        self.engines.add(engine)
        self.charged += 1
        return self.live[request_id]

    @rule(charge=charges)
    def release(self, charge: Charge) -> None:
        was_live = self.live.get(charge.request_id) is charge
        assert charge.release() is was_live
        if was_live:
            del self.live[charge.request_id]

    @invariant()
    def each_count_is_that_of_the_live_charges(self) -> None:
        counts = Counter(charge.engine for charge in self.live.values())
        assert {engine: self.ledger.inflight(engine) for engine in self.engines} == {
            engine: counts[engine] for engine in self.engines
        }
        for engine in self.engines:  # in the order in which they came
            mine = [charge.request_id for charge in self.live.values() if charge.engine == engine]
            assert self.ledger.requests(engine) == mine
        statistics = self.ledger.statistics()
        assert statistics.by_engine == counts
        assert statistics.charged - statistics.released == len(self.live)
        assert statistics.charged == self.charged

    @invariant()
    def the_books_agree(self) -> None:
        assert self.ledger.audit() == ()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
