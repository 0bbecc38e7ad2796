"""Every built-in part conforms, and every faulty one is told which rule it breaks."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from attrs import evolve

from dpkit.balancer.policies import BUILTIN, load_policy
from dpkit.balancer.policies.round_robin import RoundRobin
from dpkit.engine.core import EngineCore
from dpkit.engine.limits import resolve_limits
from dpkit.engine.models.cost import CostModel
from dpkit.engine.models.echo import EchoModel
from dpkit.engine.publish import PublishGate
from dpkit.link.local import LocalLink
from dpkit.messages import EngineId
from dpkit.nursery.busyloop import BusyLoop
from dpkit.nursery.inbox import Inbox
from dpkit.testing.conformance import Nonconforming, check_link, check_model, check_policy
from dpkit.testing.faults import CRASH, GARBAGE, HANG, Fault, FaultKind, FaultyModel
from dpkit.testing.links import FaultyLink, Line, LineFaults
from dpkit.testing.wrapper import ModelWrapper

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dpkit.abc import End, EngineLink, LoadView, Model, Policy
    from dpkit.messages import Batch, GenerateRequest, StepResult
    from dpkit.nursery.inbox import Deliver


@pytest.mark.parametrize("make", [EchoModel, lambda: CostModel("h100-8b")])
def test_built_in_models_conform(make: Callable[[], Model]) -> None:
    check_model(make)


class Careless(EchoModel):
    """Repeats the first token of the chunk, wherever the chunk begins."""

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        sampled = [None if row.output_index is None else row.token_ids[0] for row in batch.rows]
        return evolve(super().execute(batch, cache), sampled=sampled)


class Shared(ModelWrapper):
    """Counts the steps of all engines together, and lets that show."""

    steps = 0

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        self.steps += 1
        result = super().execute(batch, cache)
        return evolve(
            result, sampled=[each if each is None else self.steps % 256 for each in result.sampled]
        )


class Unbanned(EchoModel):
    """Ends whatever was banned."""

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        result = super().execute(batch, cache)
        ends = [bool(row.banned_token_ids) for row in batch.rows]
        sampled = [
            256 if end and token is not None else token
            for end, token in zip(ends, result.sampled, strict=True)
        ]
        return evolve(result, sampled=sampled)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: FaultyModel(EchoModel(), {3: CRASH}), "execute gives each row"),
        (lambda: FaultyModel(EchoModel(), births={0: CRASH}), "allocate makes a cache"),
        (lambda: FaultyModel(EchoModel(), always=GARBAGE), "execute gives each row"),
        (lambda: FaultyModel(EchoModel(), always=HANG), "a time that can be waited for"),
        (
            lambda: FaultyModel(CostModel("h100-8b"), always=Fault(FaultKind.SLOW, 1e6)),
            "a time that can be waited for",
        ),
        (
            lambda: FaultyModel(EchoModel(), always=Fault(FaultKind.OUT_OF_MEMORY, 16)),
            "execute gives each row",
        ),
        (Careless, "prompts cut into chunks give the same text"),
        (lambda: Shared(EchoModel()), "the text each gets alone"),
        (Unbanned, "banned tokens are not sampled"),
    ],
)
def test_faulty_models_are_told_which_rule_they_break(make: Callable[[], Model], rule: str) -> None:
    with pytest.raises(Nonconforming, match=rule):
        check_model(make)


def test_a_model_that_is_only_slow_conforms() -> None:
    check_model(lambda: FaultyModel(EchoModel(), always=Fault(FaultKind.SLOW, 10)))


@pytest.mark.parametrize("name", BUILTIN)
def test_built_in_policies_conform(name: str) -> None:
    check_policy(lambda: load_policy(name, rng=random.Random(1)))


class OutOfRange(RoundRobin):
    """Picks one too far."""

    def pick(self, request: GenerateRequest, view: LoadView) -> int:  # noqa: ARG002
        return len(view.engines)


class Raising(RoundRobin):
    """Cannot count down."""

    def on_release(self, request: GenerateRequest, index: int, view: LoadView) -> None:  # noqa: ARG002
        raise ValueError(index)


class DeafToAnswers(RoundRobin):
    """Trips over a first token."""

    def on_answered(self, request: GenerateRequest, view: LoadView) -> None:  # noqa: ARG002
        raise ValueError(request.request_id)


class DeafToEnds(RoundRobin):
    """Trips over an end."""

    def on_end(self, request: GenerateRequest, end: End, view: LoadView) -> None:  # noqa: ARG002
        raise ValueError(end)


class DeafToReports(RoundRobin):
    """Trips over a report."""

    def on_report(self, index: int, view: LoadView) -> None:
        raise ValueError(view.load(index).report)


class Sticky(RoundRobin):
    """Does not hear that engines have gone."""

    count = 0

    def pick(self, request: GenerateRequest, view: LoadView) -> int:  # noqa: ARG002
        self.count = max(self.count, len(view.engines))
        return self.count - 1


class Moody(RoundRobin):
    """Draws from a source of its own."""

    def pick(self, request: GenerateRequest, view: LoadView) -> int:  # noqa: ARG002
        return random.randrange(len(view.engines))


class Meddling(RoundRobin):
    """Writes into the view."""

    def pick(self, request: GenerateRequest, view: LoadView) -> int:  # noqa: ARG002
        view.loads[0].running += 1  # type: ignore[misc]
        return 0


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (OutOfRange, "`pick` gives the index of an engine"),
        (Raising, "`on_release` does not raise"),
        (DeafToAnswers, "`on_answered` does not raise"),
        (DeafToEnds, "`on_end` does not raise"),
        (DeafToReports, "`on_report` does not raise"),
        (Sticky, "`pick` gives the index of an engine"),
        (Moody, "picks follow from what the policy is told"),
        (Meddling, "`pick` changes nothing that others read"),
    ],
)
def test_faulty_policies_are_told_which_rule_they_break(policy: type[Policy], rule: str) -> None:
    with pytest.raises(Nonconforming, match=f"breaks the rule .*{rule}"):
        check_policy(policy)


@asynccontextmanager
async def _open_local(
    deliver: Deliver, wrap: Callable[[Callable[[Deliver], EngineLink], Deliver], EngineLink]
) -> AsyncIterator[EngineLink]:
    """A link to a busy loop that serves `echo`; `wrap` may put something in between."""
    model, engine, inbox = EchoModel(), EngineId("e0"), Inbox()
    loop = BusyLoop(
        engine=engine,
        index=0,
        model=model,
        core=EngineCore(model, limits=resolve_limits(model.spec)),
        inbox=inbox,
        publish=None,
        gate=PublishGate(1.0),
        on_lost=lambda _: None,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop.run)
        await loop.ready.wait()
        yield wrap(lambda to: LocalLink(engine, inbox, to), deliver)
        inbox.close()


async def test_the_local_link_conforms(autojump_clock: object) -> None:
    await check_link(lambda deliver: _open_local(deliver, lambda make, to: make(to)))


@pytest.mark.parametrize(
    ("there", "back", "rule"),
    [
        (LineFaults(loss=0.3), LineFaults(), "its whole output"),
        (LineFaults(), LineFaults(loss=0.3), "its whole output"),
        (LineFaults(), LineFaults(duplicate=0.3), "its whole output"),
        (LineFaults(), LineFaults(delay=0.1, reorder=True), "its whole output"),
        (LineFaults(delay=0.5, reorder=True), LineFaults(), "does not end|its whole output"),
    ],
)
async def test_bad_lines_make_a_link_that_does_not_conform(
    autojump_clock: object, there: LineFaults, back: LineFaults, rule: str
) -> None:
    lines = [Line(random.Random(1), each) for each in (there, back)]
    async with trio.open_nursery() as nursery:
        for line in lines:
            nursery.start_soon(line.run)
        with pytest.raises(Nonconforming, match=rule):
            await check_link(
                lambda deliver: _open_local(
                    deliver, lambda make, to: FaultyLink(make, to, lines[0], lines[1])
                )
            )
        nursery.cancel_scope.cancel()


async def test_a_stalled_line_makes_a_link_that_does_not_conform(autojump_clock: object) -> None:
    line = Line(random.Random(1))
    line.stall()
    with pytest.raises(Nonconforming, match="had not got it after 10 s"):
        await check_link(
            lambda deliver: _open_local(
                deliver, lambda make, to: FaultyLink(make, to, line, Line(random.Random(1)))
            )
        )


async def test_a_late_line_that_keeps_order_makes_a_link_that_conforms(
    autojump_clock: object,
) -> None:
    lines = [Line(random.Random(n), LineFaults(delay=0.2)) for n in range(2)]
    async with trio.open_nursery() as nursery:
        for line in lines:
            nursery.start_soon(line.run)
        await check_link(
            lambda deliver: _open_local(
                deliver, lambda make, to: FaultyLink(make, to, lines[0], lines[1])
            )
        )
        nursery.cancel_scope.cancel()


class OtherName:
    """Names another life than its outputs do."""

    def __init__(self, link: EngineLink) -> None:
        self.engine = EngineId("other")
        self.submit, self.abort = link.submit, link.abort


class Deaf:
    """Forgets aborts."""

    def __init__(self, link: EngineLink) -> None:
        self.engine, self.submit = link.engine, link.submit

    def abort(self, request_id: str) -> None:
        pass


@pytest.mark.parametrize(
    ("link", "rule"), [(OtherName, "the link names"), (Deaf, "its id is free|does not end")]
)
async def test_faulty_links_are_told_which_rule_they_break(
    autojump_clock: object, link: Callable[[EngineLink], EngineLink], rule: str
) -> None:
    with pytest.raises(Nonconforming, match=rule):
        await check_link(lambda deliver: _open_local(deliver, lambda make, to: link(make(to))))
