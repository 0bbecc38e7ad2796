"""Who holds which request: charged at the pick, released once, through the object that was charged.

The only truth on a client's own in-flight requests. Knows nothing of policies, snapshots or
transport. A charge belongs to whoever placed the request, who alone must release it; it has no
expiry, and it counts for one life of an engine, never for the engine's name.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from dpkit.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dpkit.messages import EngineId


@define(eq=False)
class Account:
    """What one life of one engine holds; only the ledger writes here.

    Counts are kept rather than computed, since every pick asks for them.
    """

    engine: EngineId
    inflight: int = 0
    """Unfinished requests."""

    tokens: int = 0
    """Their tokens, as charged."""

    follower: Callable[[], object] | None = field(default=None, repr=False)
    """Called after every change. An account that nobody follows is dropped once it is empty."""


# Not frozen: one is made for every request, and frozen takes three times as long to make.
@define(eq=False)
class Charge:
    """One request counted on one life of one engine, until `release`."""

    request_id: str
    tokens: int
    account: Account
    _ledger: Ledger = field(repr=False)

    @property
    def engine(self) -> EngineId:
        """The life of the engine that holds the request."""
        return self.account.engine

    @property
    def released(self) -> bool:
        """Whether the request no longer counts."""
        return self._ledger.find(self.request_id) is not self

    def release(self) -> bool:
        """Stop counting the request. Idempotent: True the first time, False ever after."""
        return self._ledger._release(self)  # noqa: SLF001 - the one door to it


@frozen(kw_only=True)
class LedgerStatistics:
    """The books at one moment."""

    inflight: int
    """Requests charged and not released."""

    by_engine: Mapping[EngineId, int]
    """The same by engine; engines that hold nothing are absent."""

    charged: int
    """Charges ever made."""

    released: int
    """Charges ever released."""


class Ledger:
    """The books of one client.

    A charge is live while the ledger knows that very object under its request id. It adds itself
    to one account when it is made and takes itself off when it stops being live, so no count can
    be negative whatever the order of calls, and a late release of an old charge cannot touch a new
    request that reuses its id.
    """

    def __init__(self) -> None:
        self._charges: dict[str, Charge] = {}
        self._accounts: dict[EngineId, Account] = {}
        self._charged = 0

    def __repr__(self) -> str:
        busy = sum(1 for account in self._accounts.values() if account.inflight)
        return f"<Ledger: {len(self._charges)} in flight on {busy} engines>"

    def charge(self, request_id: str, engine: EngineId, tokens: int = 0) -> Charge:
        """Count a request and its tokens on an engine; only the returned object can release it.

        Error handling:
            RequestRejected: the id is in flight. One id is one request: it goes to the engine
            that has it (see `dispatch`), and is never counted twice.
        """
        if (held := self._charges.get(request_id)) is not None:
            raise RequestRejected(
                f"cannot charge request {request_id} to engine {engine}: it is in flight on "
                f"engine {held.engine}; wait for it to end, or choose another request id",
                engine=held.engine,
                request_id=request_id,
            )
        if (account := self._accounts.get(engine)) is None:
            account = self._accounts[engine] = Account(engine)
        charge = self._charges[request_id] = Charge(request_id, tokens, account, self)
        self._charged += 1
        account.inflight += 1
        account.tokens += tokens
        if account.follower is not None:
            account.follower()
        return charge

    def _release(self, charge: Charge) -> bool:
        if self._charges.get(charge.request_id) is not charge:
            return False
        del self._charges[charge.request_id]
        account = charge.account
        account.inflight -= 1
        account.tokens -= charge.tokens
        if account.follower is not None:
            account.follower()
        else:
            self._drop_if_empty(account)
        return True

    def account(self, engine: EngineId) -> Account | None:
        """Where a life's counts are kept; None: it holds nothing, and nobody opened one for it."""
        return self._accounts.get(engine)

    def open(self, account: Account) -> None:
        """Keep a life's counts in an account that the caller brings, perhaps with a follower.

        Resource handling:
            The caller must `close` it when the life is over. What it holds by then still counts
            until it is released.
        """
        if account.engine in self._accounts:
            raise ValueError(f"engine {account.engine} has an account already")
        self._accounts[account.engine] = account

    def close(self, account: Account) -> None:
        """End an `open`ed account: nobody follows it any more."""
        account.follower = None
        self._drop_if_empty(account)

    def _drop_if_empty(self, account: Account) -> None:
        if not account.inflight:  # a life that holds nothing leaves nothing behind
            del self._accounts[account.engine]

    def find(self, request_id: str) -> Charge | None:
        """The live charge of a request; None when it is unknown or has ended."""
        return self._charges.get(request_id)

    def holder(self, request_id: str) -> EngineId | None:
        """The life of the engine that a request is charged to; None: to none."""
        charge = self._charges.get(request_id)
        return None if charge is None else charge.engine

    def requests(self, engine: EngineId) -> list[str]:
        """Ids charged to one life of an engine, in the order in which they were charged."""
        charges = self._charges.values()
        return [charge.request_id for charge in charges if charge.account.engine == engine]

    def inflight(self, engine: EngineId) -> int:
        """Unfinished requests on one life of an engine."""
        account = self._accounts.get(engine)
        return 0 if account is None else account.inflight

    def statistics(self) -> LedgerStatistics:
        """Totals since the start and counts by engine."""
        inflight = len(self._charges)
        return LedgerStatistics(
            inflight=inflight,
            by_engine={
                account.engine: account.inflight
                for account in self._accounts.values()
                if account.inflight
            },
            charged=self._charged,
            released=self._charged - inflight,
        )

    def audit(self) -> tuple[str, ...]:
        """Every contradiction between charges and accounts, in words; empty when they agree."""
        return tuple(self._contradictions())

    def _contradictions(self) -> Iterator[str]:
        requests: Counter[EngineId] = Counter()
        tokens: Counter[EngineId] = Counter()
        for charge in self._charges.values():
            requests[charge.engine] += 1
            tokens[charge.engine] += charge.tokens
            if self._accounts.get(charge.engine) is not charge.account:
                yield f"{charge.request_id} is charged to {charge.engine}, which has no account"
        for engine, account in self._accounts.items():
            counted = f"{account.inflight} requests of {account.tokens} tokens"
            charged = f"{requests[engine]} requests of {tokens[engine]} tokens"
            if counted != charged:
                yield f"{engine} counts {counted}, charged are {charged}"
            elif not account.inflight and account.follower is None:
                yield f"{engine} is listed with nothing in flight"
