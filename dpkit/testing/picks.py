"""``python -m dpkit.testing.picks FILE``: are `kv_pressure`'s picks those that were recorded?

Replays picks, finishes and snapshots through the real ledger, dispatch and policy. Exit 0: every
pick, and the in-flight counts at the end of every case, equal the file's; 1: some do not; 2: the
file is bad.

A case is ``{"engines": N, "client_count": C, "client_index": i, "events": […], "inflight_at_end":
[…]}``. An event is ``{"pick": id, "engine": index}``, with ``"pinned": index`` if the request named
its engine; or ``{"finish": [id, …]}``; or ``{"snapshot": [[waiting, running, KV usage], …]}``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import field, frozen

from dpkit.balancer.dispatch import EarlyDispatch, Placement
from dpkit.balancer.ledger import Ledger
from dpkit.balancer.policies import load_policy
from dpkit.balancer.view import LoadView
from dpkit.messages import EngineId, GenerateRequest, Snapshot
from dpkit.names import PolicyName
from dpkit.testing.replay import Report, located, parse_loads, replay_cases, run_tool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@frozen(kw_only=True)
class Pick:
    """A request, and the index of the engine that it went to."""

    request: GenerateRequest
    index: int


@frozen(kw_only=True)
class Finish:
    """Requests that ended; ids that are not in flight mean nothing."""

    request_ids: tuple[str, ...]


@frozen(kw_only=True)
class Case:
    """One client's life, and the in-flight counts that it ended with."""

    view: LoadView
    dispatch: EarlyDispatch
    ledger: Ledger
    events: tuple[Pick | Finish | Snapshot, ...]
    inflight_at_end: list[int]
    placements: dict[str, Placement] = field(factory=dict)

    @classmethod
    def parse(cls, raw: dict[str, Any], place: str) -> Case:
        """Take one case of a file apart, and wire the real parts as a client wires them."""
        with located(place):
            engines = [EngineId(f"engine-{index}") for index in range(raw["engines"])]
            if not engines:
                raise ValueError("there is no engine to pick")
            clients = {key: raw[key] for key in ("client_index", "client_count")}
            ledger = Ledger()
            view = LoadView(engines, ledger, **clients)
            inflight_at_end, raw_events = list(raw["inflight_at_end"]), list(raw["events"])
        events = []
        for number, event in enumerate(raw_events):
            with located(f"{place}.events[{number}]"):
                events.append(parse_event(event, engines))
        return cls(
            view=view,
            dispatch=EarlyDispatch(ledger, view, load_policy(PolicyName.KV_PRESSURE)),
            ledger=ledger,
            events=tuple(events),
            inflight_at_end=inflight_at_end,
        )

    def differences(self, place: str) -> Iterator[str]:
        """Live the life, telling each pick and count that is not the file's."""
        for number, event in enumerate(self.events):
            if (wrong := self._play(event)) is not None:
                yield f"{place}.events[{number}]: {wrong}"
        if (counts := list(self.view.inflight)) != self.inflight_at_end:
            yield f"{place}: in flight at the end {counts}, the file says {self.inflight_at_end}"
        for problem in self.ledger.audit():
            yield f"{place}: the ledger contradicts itself: {problem}"

    def _play(self, event: Pick | Finish | Snapshot) -> str | None:
        if isinstance(event, Pick):
            return self._place(event)
        if isinstance(event, Snapshot):
            self.dispatch.on_snapshot(event)
            return None
        for request_id in event.request_ids:
            if (ended := self.placements.pop(request_id, None)) is not None:
                self.dispatch.release(ended)
        return None

    def _place(self, pick: Pick) -> str | None:
        placement = self.dispatch.place(pick.request)
        self.placements[pick.request.request_id] = placement
        if placement.index == pick.index:
            return None
        return (
            f"{pick.request.request_id} went to engine {placement.index}, "
            f"the file says {pick.index} ({placement.reason})"
        )


def parse_event(raw: dict[str, Any], engines: Sequence[EngineId]) -> Pick | Finish | Snapshot:
    """Take one event of a file apart."""
    match raw:
        case {"pick": str(request_id), "engine": int(index)}:
            pinned = raw.get("pinned")
            request = GenerateRequest(
                request_id=request_id,
                prompt_token_ids=(0,),
                engine=None if pinned is None else engines[pinned].name,
            )
            return Pick(request=request, index=index)
        case {"finish": list(request_ids)}:
            return Finish(request_ids=tuple(map(str, request_ids)))
        case {"snapshot": list(loads)}:
            return Snapshot(loads=parse_loads(loads))
    raise ValueError(f"no event of this kind is known: {raw!r}")


def replay(raw_cases: Sequence[Any]) -> Report:
    """Replay all cases, each with a fresh client."""
    return replay_cases(raw_cases, Case.parse, _summary)


def _summary(cases: Sequence[Case]) -> str:
    events = [event for case in cases for event in case.events]
    picks = sum(isinstance(event, Pick) for event in events)
    return f"picks: {len(cases)} cases, {len(events)} events, {picks} picks"


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def main(file: Path) -> None:
    """Replay the picks recorded in FILE through the real ledger, dispatch and policy."""
    run_tool(file, replay)


if __name__ == "__main__":
    main()
