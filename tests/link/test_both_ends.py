"""Whatever clients ask, and whenever: in the end neither end of the wire has anything left of it.

Both ends are real; what one says reaches the other in its order, and late: so aborts cross outputs,
ends and answers, and requests are asked back that have ended or been aborted meanwhile.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import pytest
import trio
from attrs import define, field

from dpkit.link.wirelink import ZmqLink
from dpkit.link.zmq import WireConnection
from dpkit.messages import GenerateRequest, SamplingParams
from dpkit.nursery import handout
from tests.link.lab import ENGINE, RANK, Desk, open_desk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.messages import EngineId, EngineOutput

EVENTS = 600


@define(eq=False)
class Head:
    """One frontend of an engine: a connection, two clients' links, and what is under way."""

    index: int
    desk: Desk
    random: Random
    up: deque[Sequence[bytes]] = field(factory=deque)
    down: deque[list[bytes]] = field(factory=deque)
    live: dict[str, int] = field(factory=dict)
    """Requests that have not ended, and whose."""
    ended: Counter[str] = field(factory=Counter)
    """How often each was said to have ended, or was given back."""
    aborted: set[str] = field(factory=set)
    connection: WireConnection = field(init=False)
    links: list[ZmqLink] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.connection = WireConnection(
            ENGINE,
            RANK,
            self,  # type: ignore[arg-type] # sends, and that is all it is used for
            limit=10**6,
            on_stats=lambda _: None,
        )
        self.links = [ZmqLink(self.connection, self._deliver, lambda *_: None) for _ in range(2)]
        port = self.desk.frontends._ports[self.index]
        port._send = lambda frames: self.down.append(list(frames))

    def send_nowait(self, frames: Sequence[bytes]) -> None:
        self.up.append(frames[1:])

    def _deliver(self, _: EngineId, output: EngineOutput) -> None:
        request_id = output.request_id
        if output.finish_reason is not None:
            self.ended[request_id] += 1
            del self.live[request_id]
        elif self.random.random() < 0.03:  # that was enough for the client
            self.abort(request_id)

    def abort(self, request_id: str) -> None:
        self.links[self.live.pop(request_id)].abort(request_id)
        self.aborted.add(request_id)

    def _taken(self, whose: int, _: EngineId, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            assert self.live.pop(request_id) == whose
            self.ended[request_id] += 1

    def act(self, number: int) -> None:
        """Have a client do something."""
        rng, whose = self.random, self.random.randrange(2)
        what = rng.random()
        if what < 0.5:
            sampling = SamplingParams(max_tokens=rng.randint(1, 60))
            prompt, request_id = tuple(range(rng.randint(1, 40))), f"{self.index}-{number}"
            self.live[request_id] = whose
            self.links[whose].submit(
                GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)
            )
        elif what < 0.7 and self.live:
            self.abort(rng.choice(list(self.live)))
        elif what < 0.9:
            theirs = [name for name, owner in self.live.items() if owner == whose]
            self.links[whose].take_back(theirs, partial(self._taken, whose))
        else:
            self.connection.ask_progress()

    def carry(self) -> None:
        """Have a message arrive, perhaps one on each way."""
        if self.up and self.random.random() < 0.5:
            self.desk.frontends.receive(self.index, self.up.popleft())
        if self.down and self.random.random() < 0.5:
            for _ in self.connection.take(self.down.popleft()) or ():
                pass

    @property
    def is_idle(self) -> bool:
        return not (self.up or self.down or self.live) and self.connection.is_idle

    def check(self, asked: set[str]) -> None:
        """Nothing is left, and each request has had one end."""
        connection = self.connection
        assert connection.held == []
        assert connection.is_idle
        assert not connection.meter._aborted_at
        assert not connection._takes._asked
        assert not connection._unreckoned
        assert not any(link._wire_ids for link in self.links)
        assert list(connection.contradictions()) == []
        assert set(self.ended.values()) == {1}
        assert self.ended.keys() | self.aborted == asked
        assert not self.ended.keys() & self.aborted


@pytest.mark.parametrize("seed", range(20))
async def test_each_request_has_one_end_and_both_ends_forget_it(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    if seed % 2:  # others have their turn after every single output
        monkeypatch.setattr(handout, "PIECE", 1)
        monkeypatch.setattr(handout, "TURN_S", -1.0)
    rng = Random(seed)
    async with open_desk(2) as desk:
        heads = [Head(index, desk, rng) for index in range(2)]
        asked: list[set[str]] = [set(), set()]
        for number in range(EVENTS):
            head = rng.choice(heads)
            if rng.random() < 0.3:
                head.act(number)
                asked[head.index] |= head.live.keys()
            elif rng.random() < 0.05:
                await trio.sleep(rng.choice([0.0, 0.5, 1.0, 3.0]))
            else:
                head.carry()
        with trio.fail_after(10_000):
            while not all(head.is_idle for head in heads):
                for head in heads:
                    head.carry()
                await trio.sleep(0.1)
        for head in heads:
            head.check(asked[head.index])
        assert not any(desk.loop.core.get_request_counts())
        desk.loop.core.check()
        assert not desk.loop._deliver
        assert not desk.frontends._leaving
