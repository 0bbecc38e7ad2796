"""What a run did, and the one checker of what no run may ever do.

P1  Every request has exactly one outcome, the same at its reader and in the cluster's event log.
P2  What was delivered is a prefix, in order, without gaps or repeats, of what one life of an engine
    produced; or of two or more, where the request was resumed, or an engine gave it back.
P3  When nothing is under way, nothing is held (`dpkit.testing.idle`); no engine works on for a
    reader that has gone, and a request is tried no more often than the config says, and once more
    for each time that an engine was asked to give it back.

Readers write into the history through `ask` or `complete`, engines through a recording model
(`model`). Knows nothing of faults or schedules: sweeps, the world and chaos runs share it.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import trio
from attrs import define, field, frozen

from dpkit.errors import DpkitError, InternalError
from dpkit.nursery.events import EventKind
from dpkit.testing.idle import check_idle
from dpkit.testing.lives import Run, explains
from dpkit.testing.recording import RecordingModel
from dpkit.testing.terminal import disagreements

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Unpack

    from dpkit.abc import Model
    from dpkit.nursery.client import Client
    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.prompts import Prompt
    from dpkit.nursery.requests import RequestOptions

LEFT = "left"
"""Outcome of a request whose reader went away."""

LATE = 1
"""Tokens that may still be made of a request that has ended: the step that was under way."""

SHOWN = 5
"""Broken promises that an error lists; one fault breaks many."""


class PromiseBroken(InternalError):  # noqa: N818 - reads as what happened
    """A history holds what may never happen; the message lists it."""


@define(eq=False)
class Entry:
    """One request as its reader saw it."""

    request_id: str
    number: int
    resumes: bool
    tokens: list[int] = field(factory=list)
    outcomes: list[str] = field(factory=list)
    wasted: int = 0
    """Tokens that an engine made when it had ended already."""
    until: float = math.inf
    """Number of the next request of the same id."""
    _history: History = field(repr=False, kw_only=True)

    def admitted(self) -> None:
        """The request is under way."""
        self._history.note("admitted", self.request_id)

    def delivered(self, token_ids: Sequence[int]) -> None:
        """Its reader got these tokens, after those before."""
        self.tokens.extend(token_ids)
        self._history.note("delivered", self.request_id, " ".join(map(str, token_ids)))

    def ended(self, outcome: str) -> None:
        """It has an outcome: a finish reason, the type of an error, or `LEFT`."""
        self.outcomes.append(outcome)
        self._history.note("ended", self.request_id, outcome)


@frozen
class Note:
    """One line of a history."""

    at: float
    what: str
    who: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.at:.6f} {self.what} {self.who} {self.detail}".rstrip()


class History:
    """One run's; may be read and checked when the run is over.

    Args:
        resumes: Whether the cluster's config has ``admission.resume``.
        retries: Its ``admission.retries``.
    """

    def __init__(self, *, resumes: bool = False, retries: int = 1) -> None:
        self.notes: list[Note] = []
        self.entries: list[Entry] = []
        self._resumes = resumes
        self._retries = retries
        self._runs: defaultdict[str, list[Run]] = defaultdict(list)
        self._newest: dict[str, Entry] = {}
        self._lives = 0

    def note(self, what: str, who: str, detail: str = "") -> None:
        """Write a line, stamped with Trio's time."""
        self.notes.append(Note(trio.current_time(), what, who, detail))

    def ask(self, request_id: str, *, resumes: bool = False) -> Entry:
        """Begin the story of one request."""
        entry = Entry(request_id, len(self.entries), resumes=resumes or self._resumes, history=self)
        if (earlier := self._newest.get(request_id)) is not None:
            earlier.until = entry.number
        self.entries.append(entry)
        self._newest[request_id] = entry
        return entry

    async def complete(
        self,
        client: Client,
        prompt: Prompt,
        *,
        pause: float = 0.0,
        **options: Unpack[RequestOptions],
    ) -> Entry:
        """Ask, read to the end, `pause` seconds between outputs, and record it all.

        Errors of dpkit are outcomes and do not come out; cancellation does, recorded as `LEFT`.
        """
        stream = client.generate(prompt, **options)
        entry = self.ask(stream.request_id, resumes=stream.request.resume)
        try:
            async with stream:
                entry.admitted()
                async for output in stream:
                    entry.delivered(output.token_ids)
                    await trio.sleep(pause)
        except DpkitError as error:
            entry.ended(type(error).__name__)
        except BaseException:
            entry.ended(LEFT)
            raise
        else:
            entry.ended(str(stream.finish_reason))
        return entry

    def model(self, model: Model) -> Model:
        """Make a model one whose tokens are recorded, by life of an engine."""
        return RecordingModel(model, self)

    def begin_life(self) -> int:
        """Number a life of an engine."""
        self._lives += 1
        return self._lives

    def produced(self, life: int, request_id: str, index: int, token_id: int) -> None:
        """A life of an engine made output token `index` of a request."""
        runs = self._runs[request_id]
        run = next((run for run in reversed(runs) if run.life == life), None)
        if run is None or run.start + len(run.tokens) != index:
            run = Run(life, index, len(self.entries))
            runs.append(run)
        run.tokens.append(token_id)
        if (entry := self._newest.get(request_id)) is not None and entry.outcomes:
            entry.wasted += 1

    def digest(self) -> str:
        """Hash of all lines: equal for equal runs, in any process."""
        text = "\n".join(map(str, self.notes))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def problems(self, cluster: Cluster | None = None) -> list[str]:
        """Every promise that was broken, in words."""
        given_back = Counter(
            event.request_id
            for event in (() if cluster is None else cluster.events)
            if event.kind is EventKind.REQUEST_TAKEN_BACK
        )
        found = [
            problem
            for entry in self.entries
            for problem in self._of_entry(entry, given_back[entry.request_id])
        ]
        if cluster is not None:
            found += disagreements(cluster, self.entries)
        return found

    def check(self, cluster: Cluster | None = None, *, bad_stats: bool = False) -> None:
        """Check P1 and P2, and with a cluster that has nothing to do, P3.

        Raises:
            PromiseBroken: they do not hold. InternalError: the cluster is not idle.
        """
        if found := self.problems(cluster):
            more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            raise PromiseBroken(f"{'; '.join(found[:SHOWN])}{more}")
        if cluster is not None:
            check_idle(cluster, bad_stats=bad_stats)

    def _of_entry(self, entry: Entry, given_back: int) -> Iterator[str]:
        if len(entry.outcomes) != 1:
            yield f"P1: {entry.request_id} has the outcomes {entry.outcomes or 'none'}"
        told = self._runs.get(entry.request_id, [])
        runs = [run for run in told if entry.number < run.begun <= entry.until]
        # What an engine gave back goes on elsewhere, whether or not it would after a loss.
        goes_on = entry.resumes or given_back > 0
        if self._runs and not explains(entry.tokens, 0, runs, resumes=goes_on):
            yield f"P2: {entry.request_id} got {entry.tokens}, produced were {runs}"
        if entry.wasted > LATE:
            yield f"P3: {entry.wasted} tokens were made of {entry.request_id} after its end"
        if len(runs) > (most := 1 + self._retries + given_back):
            yield f"P3: {entry.request_id} was tried {len(runs)} times, at most {most} were allowed"
