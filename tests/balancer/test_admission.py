"""The admission queue: who goes next, what is refused, and that nothing is ever lost."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dpkit.balancer.admission import AdmissionQueue, Entry, Ticket
from dpkit.errors import Overloaded

MOST = 12


class QueueMachine(RuleBasedStateMachine):
    """Beside a list of what waits, in the order of coming."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.queue = AdmissionQueue(MOST)
        self.now = 0.0
        self.waiting: dict[str, tuple[Ticket, bool]] = {}  # and whether it came back
        self.put_count = self.admitted = self.refused = self.withdrawn = 0

    def _entry(self, tokens: int, priority: int, tenant: str | None) -> Entry:
        self.put_count += 1
        name = f"r{self.put_count}"
        return Entry(request_id=name, tokens=tokens, priority=priority, tenant=tenant)

    @rule(
        target=tickets,
        tokens=st.integers(0, 9),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from([None, "a", "b"]),
    )
    def put(self, tokens: int, priority: int, tenant: str | None) -> Ticket | None:
        entry = self._entry(tokens, priority, tenant)
        if len(self.waiting) >= MOST:
            with pytest.raises(Overloaded) as caught:
                self.queue.put(entry, self.now)
            assert caught.value.request_id == entry.request_id
            assert 0 < caught.value.retry_after <= 60.0
            self.refused += 1
            return None
        ticket = self.queue.put(entry, self.now)
        self.waiting[entry.request_id] = (ticket, False)
        return ticket

    @rule(target=tickets, tokens=st.integers(0, 9), priority=st.integers(-1, 1))
    def put_front(self, tokens: int, priority: int) -> Ticket:
        entry = self._entry(tokens, priority, "a")
        ticket = self.queue.put_front(entry)
        self.waiting[entry.request_id] = (ticket, True)
        return ticket

    @rule(passes=st.integers(0, 3))
    def pop(self, passes: int) -> None:
        self.now += passes
        if not self.waiting:
            with pytest.raises(IndexError, match="empty queue"):
                self.queue.pop(self.now)
            return
        entry = self.queue.pop(self.now)
        self.admitted += 1
        _, came_back = self.waiting.pop(entry.request_id)
        for ticket, other_came_back in self.waiting.values():
            other = ticket.entry
            assert entry.priority <= other.priority, "nobody of a lower number waits"
            if entry.priority == other.priority:
                assert came_back >= other_came_back, "those that came back go first"
                if came_back == other_came_back and (came_back or entry.tenant == other.tenant):
                    assert int(entry.request_id[1:]) < int(other.request_id[1:]), "first come"

    @rule(ticket=consumes(tickets), twice=st.booleans())
    def withdraw(self, ticket: Ticket | None, *, twice: bool) -> None:
        if ticket is None:
            return
        waits = self.waiting.pop(ticket.entry.request_id, None) is not None
        assert self.queue.withdraw(ticket) == waits
        self.withdrawn += waits
        if twice:
            assert not self.queue.withdraw(ticket)

    @invariant()
    def nothing_is_lost(self) -> None:
        statistics = self.queue.statistics()
        assert len(self.queue) == statistics.queued == len(self.waiting)
        tokens = [ticket.entry.tokens for ticket, _ in self.waiting.values()]
        assert statistics.queued_tokens == sum(tokens)
        assert sum(statistics.queued_by_tenant.values()) == len(self.waiting)
        assert (statistics.admitted, statistics.refused) == (self.admitted, self.refused)
        assert statistics.withdrawn == self.withdrawn
        if not self.waiting:
            assert self.queue._levels == {}, "what is empty leaves nothing behind"


def test_an_empty_queue_says_that_it_is_one() -> None:
    with pytest.raises(IndexError, match="cannot take a request from an empty queue; ask its len"):
        AdmissionQueue(1).pop(0.0)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def entry(name: str, tokens: int = 1, *, tenant: str | None = None, priority: int = 0) -> Entry:
    return Entry(request_id=name, tokens=tokens, tenant=tenant, priority=priority)


def drained(queue: AdmissionQueue) -> list[str]:
    return [queue.pop(0.0).request_id for _ in range(len(queue))]


@given(
    sizes=st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=20), min_size=2, max_size=5),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None)
def test_tenants_with_something_queued_are_never_further_apart_than_one_request(
    sizes: list[list[int]], seed: int
) -> None:
    rng = random.Random(seed)
    queue = AdmissionQueue(1000)
    waiting: list[list[Ticket]] = [
        [queue.put(entry("r", tokens, tenant=f"t{number}"), 0.0) for tokens in requests]
        for number, requests in enumerate(sizes)
    ]
    spent = [0] * len(sizes)
    while True:
        popped = queue.pop(0.0)
        tenant = int(str(popped.tenant)[1:])
        assert waiting[tenant].pop(0).entry is popped
        spent[tenant] += popped.tokens
        if not waiting[tenant]:
            break
        assert max(spent) - min(spent) <= max(map(max, sizes))
        fickle = rng.choice(waiting)
        if len(fickle) > 1:
            queue.withdraw(fickle.pop(rng.randrange(len(fickle))))


def test_turns_are_by_tokens_not_by_requests() -> None:
    queue = AdmissionQueue(100)
    for number in range(2):
        queue.put(entry(f"large{number}", 30, tenant="a"), 0.0)
    for number in range(6):
        queue.put(entry(f"small{number}", 10, tenant="b"), 0.0)
    assert drained(queue) == [
        "small0", "small1", "large0", "small2", "small3", "small4", "large1", "small5",
    ]  # fmt: skip


def test_equals_take_turns() -> None:
    queue = AdmissionQueue(100)
    for tenant in ("a", None, "b"):
        for number in range(2):
            queue.put(entry(f"{tenant}{number}", 5, tenant=tenant), 0.0)
    assert drained(queue) == ["a0", "None0", "b0", "a1", "None1", "b1"]


def test_a_tenant_that_was_away_has_saved_nothing() -> None:
    queue = AdmissionQueue(100)
    for number in range(10):
        queue.put(entry(f"a{number}", 10, tenant="a"), 0.0)
    for _ in range(5):
        queue.pop(0.0)
    for number in range(3):
        queue.put(entry(f"b{number}", 10, tenant="b"), 0.0)
    assert drained(queue)[:6] == ["a5", "b0", "a6", "b1", "a7", "b2"]


def test_a_lower_priority_number_goes_first_whatever_its_tenant_has_had() -> None:
    queue = AdmissionQueue(100)
    queue.put(entry("later", 1, priority=5), 0.0)
    for number in range(3):
        queue.put(entry(f"now{number}", 100, priority=-1, tenant="a"), 0.0)
    queue.put(entry("soon", 1), 0.0)
    assert drained(queue) == ["now0", "now1", "now2", "soon", "later"]


def test_a_retried_request_goes_first_pays_nothing_and_is_never_refused() -> None:
    queue = AdmissionQueue(2)
    queue.put(entry("a0", 10, tenant="a"), 0.0)
    queue.put(entry("b0", 10, tenant="b"), 0.0)
    for name in ("again0", "again1"):
        queue.put_front(entry(name, 1000, tenant="a"))
    queue.put_front(entry("later", priority=1))
    assert repr(queue) == "<AdmissionQueue: 5 of at most 2 waiting>"
    assert drained(queue) == ["again0", "again1", "a0", "b0", "later"]


def test_withdrawing_from_the_middle_leaves_the_others_in_order() -> None:
    queue = AdmissionQueue(100)
    tickets = [queue.put(entry(f"r{number}"), 0.0) for number in range(4)]
    assert [queue.withdraw(ticket) for ticket in (tickets[1], tickets[1])] == [True, False]
    assert queue.statistics().queued_by_tenant == {None: 3}
    assert drained(queue) == ["r0", "r2", "r3"]
    assert not queue.withdraw(tickets[2])


def full(most: int = 10) -> AdmissionQueue:
    """A queue that began at 100 s and is full."""
    queue = AdmissionQueue(most, patience=30.0)
    for number in range(most):
        queue.put(entry(f"r{number}"), 100.0)
    return queue


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    queue = full()
    for now in (100.5, 101.0, 101.5, 102.0):
        queue.pop(now)
        queue.put(entry("more"), now)
    with pytest.raises(Overloaded) as caught:
        queue.put(entry("r"), 102.0)
    assert caught.value.retry_after == pytest.approx(10 * 0.5)
    assert (caught.value.http_status, caught.value.retryable) == (429, True)
    assert str(caught.value) == (
        "request r: 10 requests wait already, and no more may (admission.max_queued); "
        "try again in 5 s, or add engines"
    )
    assert queue.statistics().refused == 1


def test_a_queue_that_does_not_move_asks_for_more_and_more_patience() -> None:
    queue = full()
    assert queue.retry_after(100.0) == 30.0, "nothing is known yet"
    queue.pop(100.5)
    waits = [queue.retry_after(now) for now in (100.5, 101.0, 102.0, 200.0)]
    assert waits == [4.5, 9.0, 18.0, 30.0]
    assert all(earlier < later for earlier, later in pairwise(waits))


def test_nobody_is_told_to_come_back_in_less_than_a_second() -> None:
    queue = full()
    queue.pop(100.0)
    assert queue.retry_after(100.0) == 1.0
    assert AdmissionQueue(0, patience=0.5).retry_after(0.0) == 0.5


def test_the_speed_of_a_quiet_time_says_nothing_of_a_queue() -> None:
    queue = full(3)
    drained(queue)
    for number in range(5):  # a request a minute, each of which goes at once
        queue.put(entry(f"q{number}"), 200.0 + 60 * number)
        queue.pop(200.0 + 60 * number)
    for number in range(3):
        queue.put(entry(f"s{number}"), 1000.0)
    queue.pop(1001.0)
    assert queue.retry_after(1001.0) == 2.0


def test_one_that_waits_is_counted_alone() -> None:
    with pytest.raises(Overloaded, match="r: 1 request waits already"):
        full(1).put(entry("r"), 100.0)


def test_no_queue_at_all_refuses_everything() -> None:
    with pytest.raises(Overloaded, match="0 requests wait already"):
        AdmissionQueue(0).put(entry("r"), 0.0)
