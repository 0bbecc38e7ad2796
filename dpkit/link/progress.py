"""How far an engine in another process is, learnt by question and answer.

It works, it waits, or it says nothing. Sends nothing itself: `dpkit.link.zmq` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from attrs import define, field

if TYPE_CHECKING:
    from dpkit.wire.structs import UtilityAnswer


@define
class Progress:
    """One life's.

    An engine that is busy with one step for long says since when; one that is stopped says nothing,
    not even to a question, and has been at whatever it is at since it was last heard. An engine
    that can be heard is not stopped, however long its answer is in coming: it stands in a queue
    with all else that the engine says, and whoever reads that may be late.
    """

    heard_at: float = field(factory=trio.current_time)
    _call_id: int = field(default=0, init=False)
    _is_asked: bool = field(default=False, init=False)
    _steps: int | None = field(default=None, init=False)
    _step_began: float | None = field(default=None, init=False)

    @property
    def step_started_at(self) -> float | None:
        """When what the engine is at began; None: it waits for work."""
        if self._step_began is not None:
            return self._step_began
        return self.heard_at if self._is_asked else None

    def ask(self) -> int | None:
        """The id of a new question; None: the last one has not been answered."""
        if self._is_asked:
            return None
        self._is_asked = True
        self._call_id += 1
        return self._call_id

    def heard(self) -> None:
        """The engine has said something."""
        self.heard_at = trio.current_time()

    def counted(self, steps: int) -> None:
        """The engine has said how many steps it has done: the one it was at may be over."""
        if self._steps is not None and steps > self._steps:
            self._step_began = None

    def answered(self, answer: UtilityAnswer) -> None:
        """Take in an answer; one to somebody else's question is none of ours."""
        if answer.call_id != self._call_id:
            return
        self._is_asked = False
        match answer.result:
            case [_, [int(steps), float() | int() as elapsed]]:
                if steps != self._steps or self._step_began is None:
                    # Not later than now, or nobody would look whether it takes too long; NaN is 0.
                    self._steps, self._step_began = steps, self.heard_at - max(0.0, elapsed)
            case _:  # between two steps; vLLM's engines answer there only
                self._step_began = None
