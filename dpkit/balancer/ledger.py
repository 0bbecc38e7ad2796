"""Who holds which request: charged at the pick, released once, through the object that was charged.

The only truth on a client's own in-flight requests. Knows nothing of policies, snapshots or
transport. A charge belongs to whoever placed the request, who alone must release it; it has no
expiry, and it counts for one life of an engine, never for the engine's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from dpkit.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dpkit.messages import EngineId


@frozen(eq=False)
class Charge:
    """One request counted on one life of one engine, until `release`."""

    request_id: str
    engine: EngineId
    _ledger: Ledger = field(repr=False)

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

    A count is the size of a set of request ids, so none can be negative whatever the order of
    calls; a charge is live while the ledger knows that very object, so a late release of an old
    one cannot touch a new request that reuses its id.
    """

    def __init__(self) -> None:
        self._charges: dict[str, Charge] = {}
        self._held: dict[EngineId, set[str]] = {}
        self._charged = 0

    def __repr__(self) -> str:
        return f"<Ledger: {len(self._charges)} in flight on {len(self._held)} engines>"

    def charge(self, request_id: str, engine: EngineId) -> Charge:
        """Count a request on an engine; the returned object alone can release it.

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
        charge = Charge(request_id, engine, self)
        self._held.setdefault(engine, set()).add(request_id)
        self._charges[request_id] = charge
        self._charged += 1
        return charge

    def _release(self, charge: Charge) -> bool:
        if self._charges.get(charge.request_id) is not charge:
            return False
        del self._charges[charge.request_id]
        held = self._held[charge.engine]
        held.remove(charge.request_id)
        if not held:  # a life that holds nothing leaves nothing behind
            del self._held[charge.engine]
        return True

    def find(self, request_id: str) -> Charge | None:
        """The live charge of a request; None when it is unknown or has ended."""
        return self._charges.get(request_id)

    def holder(self, request_id: str) -> EngineId | None:
        """The life of the engine that a request is charged to; aborts go there."""
        charge = self._charges.get(request_id)
        return None if charge is None else charge.engine

    def inflight(self, engine: EngineId) -> int:
        """Unfinished requests on one life of an engine."""
        held = self._held.get(engine)
        return 0 if held is None else len(held)

    def statistics(self) -> LedgerStatistics:
        """Totals since the start and counts by engine."""
        inflight = len(self._charges)
        return LedgerStatistics(
            inflight=inflight,
            by_engine={engine: len(held) for engine, held in self._held.items()},
            charged=self._charged,
            released=self._charged - inflight,
        )

    def audit(self) -> tuple[str, ...]:
        """Every contradiction between the two tables, in words; empty when the books agree."""
        charged = {(charge.engine, charge.request_id) for charge in self._charges.values()}
        counted = {(engine, request_id) for engine, ids in self._held.items() for request_id in ids}
        return (
            *(
                f"{request} is charged to {engine}, not counted"
                for engine, request in sorted(charged - counted)
            ),
            *(
                f"{request} is counted on {engine}, not charged"
                for engine, request in sorted(counted - charged)
            ),
            *(
                f"{engine} is listed with nothing in flight"
                for engine, ids in self._held.items()
                if not ids
            ),
        )
