"""Who goes next when not all can go: priorities, fair shares of tokens, first come first served.

Sans-IO: calls that need it say what time it is, in seconds. Knows nothing of engines or room for
requests: whoever has room asks for the next one.

Lower priorities go first, whatever waits behind them. Within a priority, tenants take turns by
deficit round robin: each turn adds to what a tenant may spend, a request goes when its tokens can
be paid, and a tenant with nothing queued saves nothing. The turns are as small as can be, one
token, so that tenants who came together and always have something queued are never further apart
than the largest request; all turns in which nobody can pay are taken at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from dpkit.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

RECENT = 64
"""Requests by which the speed of the queue is judged."""

LEAST_RETRY_S = 1.0
"""Less is no use to anybody: HTTP says it in whole seconds."""


@frozen(kw_only=True)
class Entry:
    """A request as the queue sees it."""

    request_id: str
    tokens: int
    """What it is expected to cost: prompt and output."""
    priority: int = 0
    tenant: str | None = None
    """Whose it is; requests that do not say so are together one tenant's."""
    age: float = 0.0
    """Seconds by which others of its tenant may come later and yet go before it."""


@define(eq=False)
class Ticket:
    """A place in the queue."""

    entry: Entry
    rank: tuple[float, int]  # among those of its tenant: when it came and how it is aged, and which


_rank = attrgetter("rank")


@frozen(kw_only=True)
class AdmissionStatistics:
    """The queue now, and what it did since it was made."""

    queued: int
    queued_tokens: int
    queued_by_tenant: Mapping[str | None, int]
    admitted: int
    """Requests that went, retries among them."""
    refused: int
    withdrawn: int


@define(eq=False)
class _Tenant:
    """What one tenant has queued at one priority; never empty between calls."""

    spent: int  # the turn up to which it has spent what it was given
    queue: list[Ticket] = field(factory=list)  # by rank
    pays_at: int = 0  # the turn in which it can pay for its first request

    def look(self) -> None:
        """Its first request may be another one now."""
        self.pays_at = self.spent + self.queue[0].entry.tokens


@define(eq=False)
class _Level:
    """All that is queued at one priority; never empty between calls."""

    turn: int = 0
    returned: OrderedDict[Ticket, None] = field(factory=OrderedDict)
    tenants: OrderedDict[str | None, _Tenant] = field(factory=OrderedDict)

    def put(self, ticket: Ticket) -> None:
        tenant = self.tenants.setdefault(ticket.entry.tenant, _Tenant(self.turn))
        insort(tenant.queue, ticket, key=_rank)
        tenant.look()

    def in_turn(self) -> Iterator[Ticket]:
        """All, in the order in which they would go if each went when its turn came."""
        yield from self.returned
        if len(self.tenants) == 1:
            [tenant] = self.tenants.values()
            yield from tenant.queue
            return
        # What each has left, and when it can pay for the next. Of equals the first in line.
        lines = [(each.pays_at, each.queue, 0) for each in self.tenants.values()]
        while lines:
            first = min(range(len(lines)), key=lambda line: lines[line][0])
            pays_at, queue, place = lines.pop(first)
            yield queue[place]
            if (place := place + 1) < len(queue):
                lines.append((pays_at + queue[place].entry.tokens, queue, place))

    def take(self, ticket: Ticket) -> None:
        """Let one go, first or not: its tenant pays for it."""
        if ticket not in self.returned:
            name = ticket.entry.tenant
            tenant = self.tenants[name]
            tenant.spent += ticket.entry.tokens
            self.turn = max(self.turn, tenant.spent)
            self.tenants.move_to_end(name)  # of equals the first: they take turns
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        if ticket in self.returned:
            del self.returned[ticket]
            return
        tenant = self.tenants[ticket.entry.tenant]
        del tenant.queue[bisect_left(tenant.queue, ticket.rank, key=_rank)]
        if tenant.queue:
            tenant.look()
        else:
            del self.tenants[ticket.entry.tenant]


class AdmissionQueue:
    """The requests of one client that wait for room.

    `put`, `put_front`, `take` and `withdraw` cost nearly the same however many wait; `pop` looks at
    each tenant of one priority.

    Args:
        max_queued: As many may wait; more are refused. Whoever was in front before is not counted.
        patience: The longest that anybody is told to wait before trying again, in seconds.
    """

    def __init__(self, max_queued: int, *, patience: float = 60.0) -> None:
        self.max_queued = max_queued
        self.patience = patience
        self._levels: dict[int, _Level] = {}
        self._tickets: set[Ticket] = set()
        self._came = 0
        self._moments: deque[float] = deque(
            maxlen=RECENT
        )  # a queue began, and each that went since
        self._tokens = self._admitted = self._refused = self._withdrawn = 0

    def __repr__(self) -> str:
        return f"<AdmissionQueue: {len(self)} of at most {self.max_queued} waiting>"

    def __len__(self) -> int:
        return len(self._tickets)

    def put(self, entry: Entry, now: float, *, beside: int = 0) -> Ticket:
        """Queue a request behind those of its tenant and priority.

        Args:
            entry: The request.
            now: The time.
            beside: Requests that wait as well, but not in here; they count.

        Raises:
            Overloaded: the queue is full; `retry_after` says when there may be room.
        """
        waiting = len(self) + beside
        if waiting >= self.max_queued:
            self._refused += 1
            retry_after = self.retry_after(now)
            wait = "1 request waits" if waiting == 1 else f"{waiting} requests wait"
            raise Overloaded(
                f"request {entry.request_id}: {wait} already, and no more may "
                f"(admission.max_queued); try again in {retry_after:.0f} s, or add engines",
                retry_after=retry_after,
                request_id=entry.request_id,
            )
        if not self._moments:
            self._moments.append(now)
        ticket = self._admit(entry, now)
        self._level(entry).put(ticket)
        return ticket

    def put_front(self, entry: Entry) -> Ticket:
        """Queue a request that was in front before and lost its place by no fault of its own.

        It goes before all others of its priority, and has paid already. Those that come back go in
        the order in which they come back.
        """
        ticket = self._admit(entry, 0.0)
        self._level(entry).returned[ticket] = None
        return ticket

    def is_back(self, ticket: Ticket) -> bool:
        """Whether one that waits was in front before; see `put_front`."""
        return ticket in self._levels[ticket.entry.priority].returned

    def in_turn(self, most: int) -> list[Ticket]:
        """Those that go next, in their order, as long as each goes when it is its turn."""
        levels = (self._levels[priority].in_turn() for priority in sorted(self._levels))
        return list(islice(chain.from_iterable(levels), most))

    def pop(self, now: float) -> Entry:
        """Take out the request that goes next.

        Raises:
            IndexError: none is waiting.
        """
        if not self._tickets:
            raise IndexError("cannot take a request from an empty queue; ask its len() before")
        ticket = next(self._levels[min(self._levels)].in_turn())
        self.take(ticket, now)
        return ticket.entry

    def take(self, ticket: Ticket, now: float) -> None:
        """Take out a request that goes now, though others may go before it by right."""
        self._levels[ticket.entry.priority].take(ticket)
        self._forget(ticket)
        self._admitted += 1
        if self._tickets:
            self._moments.append(now)

    def withdraw(self, ticket: Ticket) -> bool:
        """Take a request out of turn: its client left. Idempotent: True the first time only."""
        if ticket not in self._tickets:
            return False
        self._levels[ticket.entry.priority].remove(ticket)
        self._forget(ticket)
        self._withdrawn += 1
        return True

    def retry_after(self, now: float) -> float:
        """Seconds in which all that wait now are gone, at the speed of the last few that went."""
        went = len(self._moments) - 1
        if went < 1:
            return self.patience
        seconds_each = (now - self._moments[0]) / went
        return min(self.patience, max(LEAST_RETRY_S, len(self) * seconds_each))

    def statistics(self) -> AdmissionStatistics:
        """The queue now, and counts since it was made."""
        by_tenant: dict[str | None, int] = {}
        for ticket in self._tickets:
            tenant = ticket.entry.tenant
            by_tenant[tenant] = by_tenant.get(tenant, 0) + 1
        return AdmissionStatistics(
            queued=len(self),
            queued_tokens=self._tokens,
            queued_by_tenant=by_tenant,
            admitted=self._admitted,
            refused=self._refused,
            withdrawn=self._withdrawn,
        )

    def _level(self, entry: Entry) -> _Level:
        return self._levels.setdefault(entry.priority, _Level())

    def _admit(self, entry: Entry, now: float) -> Ticket:
        self._came += 1
        ticket = Ticket(entry, (now + entry.age, self._came))
        self._tickets.add(ticket)
        self._tokens += entry.tokens
        return ticket

    def _forget(self, ticket: Ticket) -> None:
        """After it left its level: keep what is empty out of sight."""
        self._tickets.remove(ticket)
        self._tokens -= ticket.entry.tokens
        level = self._levels[ticket.entry.priority]
        if not (level.returned or level.tenants):
            del self._levels[ticket.entry.priority]
        if not self._tickets:  # the speed of a queue is that of its going, not of its coming
            self._moments.clear()
