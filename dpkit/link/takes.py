"""What an engine on the wire was asked to give back, until it answers.

Sends nothing itself: `dpkit.link.zmq` does.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from dpkit.errors import WireError
from dpkit.wire.structs import UtilityCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit.messages import EngineId
    from dpkit.wire.structs import UtilityAnswer

    OnTaken = Callable[[EngineId, Sequence[str]], object]

TAKE_BACK = "dpkit_take_back"
"""The call, which a dpkit engine answers at once, in the middle of a step too."""

_FIRST = 2**32  # the id of a call; those of `progress` are below


class Given(NamedTuple):
    """An answer."""

    wire_ids: Sequence[str]
    on_taken: OnTaken


class Takes:
    """Those of one life of an engine."""

    def __init__(self, engine: EngineId) -> None:
        self._engine = engine
        self._ids = count(_FIRST)
        self._asked: dict[int, tuple[frozenset[str], OnTaken]] = {}

    def __repr__(self) -> str:
        return f"<Takes of {self._engine}: {len(self._asked)} without an answer>"

    def make(self, wire_ids: Sequence[str]) -> UtilityCall:
        """A call; once it is sent, it is to be kept in mind by `expect`."""
        return UtilityCall(
            client_index=0, call_id=next(self._ids), method=TAKE_BACK, args=(wire_ids,)
        )

    def expect(self, call: UtilityCall, on_taken: OnTaken) -> None:
        """A call has been sent; its answer is for whoever asked."""
        [wire_ids] = call.args
        self._asked[call.call_id] = frozenset(wire_ids), on_taken

    def find(self, answer: UtilityAnswer) -> Given | None:
        """What an engine has given back; None: that was not what it was asked.

        Raises:
            WireError: it gave back more than it was asked for, of which nobody would hear.
        """
        if (call := self._asked.pop(answer.call_id, None)) is None:
            return None
        asked, on_taken = call
        match answer.result:
            case [_, [*given]] if answer.failure_message is None:
                for each in given:
                    if not isinstance(each, str) or each not in asked:
                        raise WireError(
                            f"engine {self._engine} gave {each!r:.80} back, which it was not asked",
                            engine=self._engine,
                        )
                return Given(given, on_taken)
            case _:  # it is about to end, and keeps what it has until then
                return Given((), on_taken)

    def clear(self) -> None:
        """No answer is to come any more."""
        self._asked.clear()
