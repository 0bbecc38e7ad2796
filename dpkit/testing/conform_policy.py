"""`check_policy`: what a client's dispatch relies on in a policy.

Drives the real ledger, view and dispatch through a story drawn from a seed: requests come and end,
snapshots and reports arrive, engines come and go. Knows nothing of what a good choice would be.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from dpkit.balancer.dispatch import EarlyDispatch
from dpkit.balancer.ledger import Ledger
from dpkit.balancer.view import LoadView
from dpkit.errors import NoEngineReady
from dpkit.messages import EngineId, GenerateRequest, SamplingParams, Snapshot, StepReport, StepWork
from dpkit.testing.rules import Subject
from dpkit.testing.watched import WatchedPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dpkit.abc import Policy
    from dpkit.balancer.dispatch import Placement

ENGINES = 5
EVENTS = 300

_FINISH = 0.7
"""Share of the requests that the model ends; the others are aborted or lost."""


def check_policy(make_policy: Callable[[], Policy], *, seeds: Iterable[int] = range(5)) -> None:
    """Check a policy against the contract of `dpkit.abc.Policy`.

    Args:
        make_policy: Makes a fresh one; if it draws, from a source that is the same each time.
        seeds: One story each.

    Error handling:
        Nonconforming: the first rule that is broken.
    """
    for seed in seeds:
        subject = Subject(f"policy {type(make_policy()).__qualname__}, seed {seed},")
        picks = [_Story(subject, make_policy(), seed).tell() for _ in range(2)]
        place = next((n for n, (a, b) in enumerate(zip(*picks, strict=True)) if a != b), None)
        subject.demand(
            "picks follow from what the policy is told, and from its own `rng`",
            place is None,
            f"pick {place} of the same story was different the second time",
        )


class _Story:
    """One client's balancer and what happens to it."""

    def __init__(self, subject: Subject, policy: Policy, seed: int) -> None:
        self._subject = subject
        self._rng = random.Random(seed)  # noqa: S311 - no secrets
        self._ledger = Ledger()
        clients = self._rng.randint(1, 3)
        self._view = LoadView((), self._ledger, client_index=clients - 1, client_count=clients)
        self._policy = WatchedPolicy(policy, subject)
        self._dispatch = EarlyDispatch(self._ledger, self._view, self._policy)
        self._held: list[Placement] = []
        self._answered: set[Placement] = set()
        self._away = {EngineId(f"e{rank}"): rank for rank in range(ENGINES)}
        self._there: dict[EngineId, int] = {}
        self._picks: list[EngineId] = []
        self._sent = Counter[EngineId]()
        self._count = self._steps = 0

    def tell(self) -> list[EngineId]:
        """Go through it; returns who was picked."""
        self._come()
        ask, told = self._ask, (self._hear, self._report, self._answer)
        events = (ask, ask, ask, self._end, *told, self._come, self._go)
        for _ in range(EVENTS):
            self._rng.choice(events)()
            self._policy.verify()
        while self._held:
            self._end()
        self._policy.verify()
        self._subject.demand(
            "a policy leaves the books alone", not self._ledger.audit(), str(self._ledger.audit())
        )
        return self._picks

    def _ask(self) -> None:
        self._count += 1
        pin = self._rng.choice([engine.name for engine in self._there]) if self._there else None
        request = GenerateRequest(
            request_id=f"r{self._count}",
            prompt_token_ids=(0,) * self._rng.randint(1, 50),
            sampling=SamplingParams(max_tokens=self._rng.randint(1, 50)),
            engine=pin if self._rng.random() < 0.1 else None,
        )
        if not self._there:
            self._subject.demand(
                "nobody is picked where nobody is", self._is_homeless(request), "someone was"
            )
            return
        before = self._facts()
        if request.engine is None:
            with suppress(Exception):  # `verify` tells
                self._policy.pick(request, self._view)
        rule = "`pick` changes nothing that others read"
        self._subject.demand(rule, self._facts() == before, f"{before} became {self._facts()}")
        self._policy.verify()
        with self._subject.must("`pick` gives the index of an engine"):
            placement = self._dispatch.place(request)
        self._held.append(placement)
        self._picks.append(placement.engine)
        self._sent[placement.engine] += 1

    def _is_homeless(self, request: GenerateRequest) -> bool:
        try:
            self._dispatch.place(request)
        except NoEngineReady:
            return True
        return False

    def _facts(self) -> tuple[object, ...]:
        """What is in the view but for `waiting`, which a policy may bump."""
        view = self._view
        return tuple(view.engines), view.inflight, view.running, view.kv_cache_usage

    def _end(self) -> None:
        if self._held:
            placement = self._held.pop(self._rng.randrange(len(self._held)))
            output = (0,) * self._rng.randint(0, placement.request.sampling.max_tokens)
            self._dispatch.release(placement, output, finished=self._rng.random() < _FINISH)

    def _answer(self) -> None:
        if waiting := [each for each in self._held if each not in self._answered]:
            self._answered.add(placement := self._rng.choice(waiting))
            self._dispatch.on_answered(placement)

    def _report(self) -> None:
        """An engine has done a step, and has reckoned with all that was sent there."""
        if self._there:
            engine = self._rng.choice(list(self._there))
            sent = self._sent[engine]
            self._steps += 1
            report = StepReport(
                step_time_s=0.01,
                requests=self._ledger.inflight(engine),
                steps=self._steps,
                last_step=StepWork(decodes=1),
                sent=sent,
                acknowledged=sent,
            )
            self._dispatch.on_report(engine, report)

    def _hear(self) -> None:
        draw = self._rng.randint
        loads = tuple((draw(0, 9), draw(0, 9), draw(0, 100) / 100) for _ in range(ENGINES))
        self._dispatch.on_snapshot(Snapshot(loads=loads))

    def _come(self) -> None:
        if self._away:
            engine = self._rng.choice(list(self._away))
            rank = self._there[engine] = self._away.pop(engine)
            self._dispatch.add(engine, rank)

    def _go(self) -> None:
        if self._there:
            engine = self._rng.choice(list(self._there))
            next_life = EngineId(engine.name, engine.epoch + 1)
            self._away[next_life] = self._there.pop(engine)
            self._dispatch.remove(engine)
