"""``python -m dpkit.testing.coordinator FILE``: are the coordinator's messages those recorded?

Drives the real rules on a virtual clock. Exit 0: content and order of all messages equal the file's
and their times are within 1 ms of it; 1: they do not; 2: bad file.

A case is ``{"engines": N, "wave_coordination": bool, "events": […], "sent": […]}``. An event is
``[t_ms, {"engine": index, …}]`` with ``"stats": [waiting, running, kv_cache_usage, wave, step]``,
``"start_wave": wave`` or ``"wave_complete": wave``. What was sent is ``{"t_ms": t, "to": "clients",
"message": [loads or null, wave, engines_running]}`` or ``{"t_ms": t, "to": "engines",
"start_dp_wave": [wave, engine index]}``.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import frozen

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.messages import EngineId, EngineStats, Snapshot, StartWave
from dpkit.testing.replay import Report, located, parse_loads, replay_cases, run_tool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOLERANCE_MS = 1.0

SAME_MOMENT_MS = 0.001
"""An event at the moment when a snapshot is due is read first; floats blur that moment."""


@frozen(kw_only=True)
class Sent:
    """One message of the coordinator: to all clients (`Snapshot`) or to all engines."""

    t_ms: float
    message: Snapshot | StartWave

    def agrees(self, other: Sent | None) -> bool:
        """Equal content at the same time, to the tolerance."""
        return (
            other is not None
            and self.message == other.message
            and abs(self.t_ms - other.t_ms) <= TOLERANCE_MS
        )

    def __str__(self) -> str:
        return f"{self.message} at {self.t_ms:.3f} ms"


@frozen(kw_only=True)
class WaveStarted:
    """An engine began a wave."""

    wave: int
    engine_index: int


@frozen(kw_only=True)
class WaveCompleted:
    """All engines ran out of work."""

    wave: int


Event = EngineStats | WaveStarted | WaveCompleted


@frozen(kw_only=True)
class Case:
    """One run of a coordinator: what came in, what went out."""

    engine_count: int
    wave_coordination: bool
    events: tuple[tuple[float, Event], ...]
    sent: tuple[Sent, ...]

    @classmethod
    def parse(cls, raw: dict[str, Any], place: str) -> Case:
        """Take one case of a file apart."""
        with located(place):
            engine_count = int(raw["engines"])
            wave_coordination = bool(raw["wave_coordination"])
            raw_events, raw_sent = list(raw["events"]), list(raw["sent"])
        events, sent = [], []
        for number, raw_event in enumerate(raw_events):
            with located(f"{place}.events[{number}]"):
                events.append(parse_event(raw_event, seq=number))
        for number, raw_message in enumerate(raw_sent):
            with located(f"{place}.sent[{number}]"):
                sent.append(parse_sent(raw_message))
        return cls(
            engine_count=engine_count,
            wave_coordination=wave_coordination,
            events=tuple(events),
            sent=tuple(sent),
        )

    def differences(self, place: str) -> Iterator[str]:
        """Run the rules, telling each message that is not the file's."""
        # A run ends with the last message recorded: after it, the idle snapshots go on for ever.
        end_ms = max((sent.t_ms for sent in self.sent), default=0.0) + TOLERANCE_MS
        pairs = itertools.zip_longest(self.run(end_ms), self.sent)
        for number, (ours, recorded) in enumerate(pairs):
            if ours is None or not ours.agrees(recorded):
                yield (
                    f"{place}.sent[{number}]: sent {ours or 'nothing more'}, "
                    f"the file says {recorded or 'nothing more'}"
                )

    def run(self, end_ms: float) -> Iterator[Sent]:
        """Drive the rules on a virtual clock until `end_ms`."""
        rules = CoordinatorRules(
            self.engine_count, now=0.0, wave_coordination=self.wave_coordination
        )
        now_ms = 0.0
        for t_ms, event in (*self.events, (end_ms, None)):
            while (due_ms := now_ms + rules.due(now_ms / 1000) * 1000) < t_ms - SAME_MOMENT_MS:
                now_ms = due_ms
                yield Sent(t_ms=now_ms, message=rules.publish(now_ms / 1000))
            now_ms = t_ms
            for message in tell(rules, now_ms / 1000, event):
                yield Sent(t_ms=now_ms, message=message)


def tell(
    rules: CoordinatorRules, now: float, event: Event | None
) -> tuple[Snapshot | StartWave, ...]:
    """Pass an event to the rules; returns what they want sent at once."""
    match event:
        case EngineStats():
            rules.on_stats(now, event)
        case WaveStarted(wave=wave, engine_index=engine_index):
            return rules.on_start_wave(now, wave, engine_index)
        case WaveCompleted(wave=wave):
            return rules.on_wave_complete(now, wave)
    return ()


def parse_event(raw: list[Any], *, seq: int) -> tuple[float, Event]:
    """Take one event of a file apart."""
    t_ms, content = raw
    index = int(content["engine"])
    match content:
        case {"stats": [int(waiting), int(running), float(usage), int(wave), int(step)]}:
            stats = EngineStats(
                engine=EngineId(f"engine-{index}"),
                index=index,
                seq=seq,
                waiting=waiting,
                running=running,
                kv_cache_usage=usage,
                current_wave=wave,
                step_counter=step,
            )
            return float(t_ms), stats
        case {"start_wave": int(wave)}:
            return float(t_ms), WaveStarted(wave=wave, engine_index=index)
        case {"wave_complete": int(wave)}:
            return float(t_ms), WaveCompleted(wave=wave)
    raise ValueError(f"no event of this kind is known: {content!r}")


def parse_sent(raw: dict[str, Any]) -> Sent:
    """Take one recorded message apart."""
    match raw:
        case {"t_ms": t_ms, "to": "clients", "message": [loads, int(wave), bool(running)]}:
            message: Snapshot | StartWave = Snapshot(
                loads=None if loads is None else parse_loads(loads),
                current_wave=wave,
                engines_running=running,
            )
        case {"t_ms": t_ms, "to": "engines", "start_dp_wave": [int(wave), int(engine_index)]}:
            message = StartWave(wave=wave, engine_index=engine_index)
        case _:
            raise ValueError(f"no message of this kind is known: {raw!r}")
    return Sent(t_ms=float(t_ms), message=message)


def replay(raw_cases: Sequence[Any]) -> Report:
    """Replay all cases, each with fresh rules."""
    return replay_cases(raw_cases, Case.parse, _summary)


def _summary(cases: Sequence[Case]) -> str:
    events = sum(len(case.events) for case in cases)
    messages = sum(len(case.sent) for case in cases)
    return f"coordinator: {len(cases)} cases, {events} events, {messages} messages"


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def main(file: Path) -> None:
    """Drive the coordinator's rules with the events recorded in FILE and compare what they send."""
    run_tool(file, replay)


if __name__ == "__main__":
    main()
