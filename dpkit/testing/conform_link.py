"""`check_link`: what a client relies on in a link to an engine.

The engine at the other end must serve the `echo` model, since that says what each request must get.
Uses Trio's time for its limit only: give it a virtual clock where the link needs no real one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from dpkit.errors import RequestRejected
from dpkit.messages import GenerateRequest, SamplingParams
from dpkit.names import FinishReason
from dpkit.testing.rules import Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from dpkit.abc import EngineLink
    from dpkit.messages import EngineId, EngineOutput
    from dpkit.nursery.inbox import Deliver

    OpenLink = Callable[[Deliver], AbstractAsyncContextManager[EngineLink]]

WHOLE = "a request gets its whole output, in order, once"
MANY = 20
TOKENS = 8


async def check_link(open_link: OpenLink, *, limit: float = 10.0) -> None:
    """Check a link against the contract of `dpkit.abc.EngineLink`.

    Args:
        open_link: Opens one to an engine that serves `echo`, whose outputs go to what it is given.
        limit: Seconds within which a small request must have its output.

    Error handling:
        Nonconforming: the first rule that is broken.
    """
    tasks = trio.lowlevel.current_statistics().tasks_living
    subject = Subject("link")
    received = _Received(subject, limit)
    with subject.must("a link can be opened and closed"):
        async with open_link(received.deliver) as link:
            subject.name = f"link {type(link).__qualname__}"
            await _check(subject, link, received)
    left = trio.lowlevel.current_statistics().tasks_living - tasks
    subject.demand("a closed link leaves no task", left <= 0, f"{left} tasks are left")


class _Received:
    """What came back, by request."""

    def __init__(self, subject: Subject, limit: float) -> None:
        self.engines: set[EngineId] = set()
        self._subject = subject
        self._limit = limit
        self._outputs: dict[str, list[EngineOutput]] = {}
        self._lot = trio.lowlevel.ParkingLot()

    def deliver(self, engine: EngineId, output: EngineOutput) -> None:
        self.engines.add(engine)
        self._outputs.setdefault(output.request_id, []).append(output)
        self._lot.unpark_all()

    def of(self, request_id: str) -> Sequence[EngineOutput]:
        return self._outputs.get(request_id, ())

    def forget(self, request_id: str) -> None:
        self._outputs.pop(request_id, None)

    async def wait_for(self, holds: Callable[[], bool], rule: str, who: str) -> None:
        with trio.move_on_after(self._limit):
            while not holds():
                await self._lot.park()
        self._subject.demand(rule, holds(), f"{who} had not got it after {self._limit:g} s")

    async def wait_end(self, request_id: str) -> None:
        def ended() -> bool:
            return any(output.finish_reason is not None for output in self.of(request_id))

        await self.wait_for(ended, WHOLE, request_id)

    def check_echo(self, request: GenerateRequest, rule: str = WHOLE) -> None:
        """Check that a request got its prompt back and one finish reason, last of all."""
        outputs = self.of(request.request_id)
        tokens = tuple(token for output in outputs for token in output.token_ids)
        reasons = [output.finish_reason for output in outputs]
        expected = request.prompt_token_ids[:TOKENS]
        self._subject.demand(rule, tokens == expected, f"{tokens} instead of {expected}")
        ends = [reason for reason in reasons if reason is not None]
        self._subject.demand(
            rule, ends == [FinishReason.LENGTH] == reasons[-1:], f"finish reasons {reasons}"
        )


def _ask(request_id: str, text: str, tokens: int = TOKENS) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(text.encode()),
        sampling=SamplingParams(max_tokens=tokens, ignore_eos=True),
    )


async def _check(subject: Subject, link: EngineLink, received: _Received) -> None:
    await _check_many(link, received)
    subject.demand(
        "outputs name the engine that the link names",
        received.engines == {link.engine},
        f"they name {sorted(received.engines)}, the link {link.engine}",
    )
    await _check_aborts(subject, link, received)
    await _check_take_back(subject, link, received)
    await _check_refusal(subject, link, received)


async def _check_many(link: EngineLink, received: _Received) -> None:
    requests = [_ask(f"many-{n}", f"{n:03d} is a number") for n in range(MANY)]
    for request in requests:
        link.submit(request)
    for request in requests:
        await received.wait_end(request.request_id)
    for request in requests:
        received.check_echo(request)


async def _check_aborts(subject: Subject, link: EngineLink, received: _Received) -> None:
    with subject.must("aborting an id that is unknown is ignored"):
        link.abort("nobody")
        link.abort("many-0")
    at_once = _ask("at-once", "aborted before it is seen")
    link.submit(at_once)
    link.abort(at_once.request_id)
    link.abort(at_once.request_id)
    late = _ask("late", "abcdefghijkl", tokens=10_000)
    link.submit(late)
    await received.wait_for(lambda: bool(received.of("late")), WHOLE, "late")
    link.abort("late")
    await _pass(link, received, "fence")
    received.forget("late")
    again = _ask("late", "zyxwvutsrqpo")
    link.submit(again)
    await received.wait_end("late")
    received.check_echo(again, "once an abort has passed, its id is free: nothing late comes by it")
    rule = "a request that was aborted does not end"
    ends = [output for output in received.of("at-once") if output.finish_reason is not None]
    subject.demand(rule, not ends, f"it ended by {ends}")


async def _check_take_back(subject: Subject, link: EngineLink, received: _Received) -> None:
    rule = "what is taken back does not end, and what is not gets its whole output"
    answers: list[Sequence[str]] = []
    requests = [_ask(f"back-{number}", f"to be asked for, {number}") for number in range(MANY)]
    names = [request.request_id for request in requests]
    for request in requests:
        link.submit(request)
    link.take_back([*names, "nobody"], lambda _, taken: answers.append(taken))
    await _pass(link, received, "gate")
    await received.wait_for(lambda: bool(answers), "`take_back` is answered", "back")
    [taken] = answers
    in_order = [name for name in names if name in taken]
    subject.demand(rule, list(taken) == in_order, f"{taken} were taken of {names}")
    for request in requests:
        if request.request_id not in taken:
            await received.wait_end(request.request_id)
            received.check_echo(request)
    ended = [name for name in taken for out in received.of(name) if out.finish_reason is not None]
    subject.demand(rule, not ended, f"{ended} were taken back and have ended")


async def _pass(link: EngineLink, received: _Received, request_id: str) -> None:
    """Wait until a request has been answered that was sent after all else."""
    link.submit(_ask(request_id, "are we there yet"))
    await received.wait_end(request_id)


async def _check_refusal(subject: Subject, link: EngineLink, received: _Received) -> None:
    rule = "a request that cannot be served ends by one RequestRejected"
    link.submit(_ask("empty", ""))
    await received.wait_end("empty")
    errors = [output.error for output in received.of("empty")]
    good = len(errors) == 1 and isinstance(errors[0], RequestRejected)
    subject.demand(rule, good, f"it got {errors}")
