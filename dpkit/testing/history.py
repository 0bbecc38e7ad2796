"""What a run did, and the one checker of what no run may ever do.

P1  Every request has exactly one outcome, the same at its reader and in the cluster's event log.
P2  What was delivered is a prefix, in order, without gaps or repeats, of what one life of an engine
    produced; or of two or more, where the request was resumed.
P3  When nothing is under way, nothing is held: `dpkit.testing.idle`.

Readers write into the history through `ask` or `complete`, engines through a recording model
(`model`). Knows nothing of faults or schedules: sweeps, the world and chaos runs share it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import trio
from attrs import define, field, frozen

from dpkit.errors import DpkitError, InternalError
from dpkit.testing.idle import check_idle
from dpkit.testing.terminal import disagreements
from dpkit.testing.wrapper import ModelWrapper

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Unpack

    from dpkit.abc import Model
    from dpkit.messages import Batch, StepResult
    from dpkit.nursery.client import Client
    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.prompts import Prompt
    from dpkit.nursery.requests import RequestOptions

LEFT = "left"
"""Outcome of a request whose reader went away."""

SHOWN = 5
"""Broken promises that an error lists; one fault breaks many."""


class PromiseBroken(InternalError):  # noqa: N818 - reads as what happened
    """A history holds what may never happen; the message lists it."""


@define(eq=False)
class Run:
    """What one life of an engine produced for one request, from output token `start` on."""

    life: int
    start: int
    begun: int  # number of requests asked by then: tells apart those that share an id
    tokens: list[int] = field(factory=list)


@define(eq=False)
class Entry:
    """One request as its reader saw it."""

    request_id: str
    number: int
    resumes: bool
    tokens: list[int] = field(factory=list)
    outcomes: list[str] = field(factory=list)
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
    """

    def __init__(self, *, resumes: bool = False) -> None:
        self.notes: list[Note] = []
        self.entries: list[Entry] = []
        self._resumes = resumes
        self._runs: defaultdict[str, list[Run]] = defaultdict(list)
        self._lives = 0

    def note(self, what: str, who: str, detail: str = "") -> None:
        """Write a line, stamped with Trio's time."""
        self.notes.append(Note(trio.current_time(), what, who, detail))

    def ask(self, request_id: str, *, resumes: bool = False) -> Entry:
        """Begin the story of one request."""
        entry = Entry(request_id, len(self.entries), resumes=resumes or self._resumes, history=self)
        self.entries.append(entry)
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
        return _RecordingModel(model, self)

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

    def digest(self) -> str:
        """Hash of all lines: equal for equal runs, in any process."""
        text = "\n".join(map(str, self.notes))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def problems(self, cluster: Cluster | None = None) -> list[str]:
        """Every promise that was broken, in words."""
        found = [problem for entry in self.entries for problem in self._of_entry(entry)]
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

    def _of_entry(self, entry: Entry) -> Iterator[str]:
        if len(entry.outcomes) != 1:
            yield f"P1: {entry.request_id} has the outcomes {entry.outcomes or 'none'}"
        runs = [run for run in self._runs[entry.request_id] if run.begun > entry.number]
        if self._runs and not _explained(entry.tokens, 0, runs, resumes=entry.resumes):
            yield f"P2: {entry.request_id} got {entry.tokens}, produced were {runs}"


def _explained(tokens: list[int], place: int, runs: list[Run], *, resumes: bool) -> bool:
    """Whether one run produced these tokens from `place` on, or several that follow each other."""
    if place == len(tokens):
        return True
    for index, run in enumerate(runs):
        if run.start != place:
            continue
        common = _common(tokens[place:], run.tokens)
        if place + common == len(tokens):
            return True
        ends = range(place + common, place, -1) if resumes else ()
        if any(_explained(tokens, end, runs[index + 1 :], resumes=True) for end in ends):
            return True
    return False


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of what both begin with."""
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


class _RecordingModel(ModelWrapper):
    """Its cache is the wrapped model's, with the number of the life that uses it."""

    def __init__(self, model: Model, history: History) -> None:
        super().__init__(model)
        self._history = history

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        cache = super().allocate(num_blocks=num_blocks, block_size=block_size)
        return self._history.begin_life(), cache

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        life, inner = cache
        result = super().execute(batch, inner)
        for row, token_id in zip(batch.rows, result.sampled, strict=False):
            if row.output_index is not None and token_id is not None:
                self._history.produced(life, row.request_id, row.output_index, token_id)
        return result
