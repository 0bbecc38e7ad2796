"""What a frontend may ask of an engine beside requests: the utility calls of vLLM's wire.

Knows methods, arguments and answers; who asked, and how an answer travels, is `frontends`' affair.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

import trio

from dpkit.errors import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit.nursery.busyloop import BusyLoop

_log = logging.getLogger(__name__)

PROGRESS = "dpkit_progress"
"""dpkit's own method: ``[steps done, seconds that the step under way has taken, or nil]``.

Answered at once, in the middle of a step too: what the head of a process asks to learn whether its
engine hangs.
"""

TAKE_BACK = "dpkit_take_back"
"""dpkit's own method: of the ids in a list, those of requests that the engine has given up for it.

It does so with those that it does not run, and says nothing of them any more.
"""


class Answer(Protocol):
    """Takes the answer to one call."""

    def __call__(self, value: Any = None, *, failure: str | None = None) -> None:
        """Send it on; with `failure`, in words, there is no value."""


class Control:
    """The methods of one engine, and whether it is paused.

    Args:
        loop: The engine's.
        end_all: Ends every request that is here, as aborted.
        is_idle: Says whether nothing is here, nor in the engine, and its group has agreed.
    """

    def __init__(
        self, loop: BusyLoop, *, end_all: Callable[[], None], is_idle: Callable[[], bool]
    ) -> None:
        self.paused = False
        """Whether new requests are refused until `resume_scheduler`."""
        self._loop = loop
        self._end_all = end_all
        self._is_idle = is_idle
        self._waiting: list[tuple[bool, Answer]] = []  # pauses: whether to clear the cache; whom
        self._methods: dict[str, Callable[..., Any]] = {
            "get_supported_tasks": lambda: ["generate"],
            "is_sleeping": lambda: False,
            "is_scheduler_paused": lambda: self.paused,
            "resume_scheduler": self._resume,
            "reset_prefix_cache": self._reset_prefix_cache,
            PROGRESS: self._progress,
        }

    def call(self, method: str, args: Sequence[Any], answer: Answer) -> None:
        """Do what is asked; `answer` is called once, now or when it is done.

        Never raises for a call that cannot be served: that is a failure, in words.
        """
        try:
            if method == "pause_generation":
                self._pause(answer, *args)
            elif method not in self._methods:
                raise LookupError("a dpkit engine has no such method")  # noqa: TRY301
            else:
                answer(self._methods[method](*args))
        except (LookupError, TypeError, ValueError) as error:
            reason = str(error.args[0]) if type(error) is LookupError else describe(error)
            _log.warning("a frontend's call of %.200s failed: %s", method, reason)
            answer(failure=f"Call to {method} method failed: {reason}")

    def go_on(self) -> None:
        """Answer the pauses that were waited for, if the engine holds nothing more."""
        if self._waiting and self._is_idle():
            if any(clear for clear, _ in self._waiting):
                self._loop.core.reset_prefix_cache()
            self._answer_pauses()

    def _pause(self, answer: Answer, mode: str = "abort", clear_cache: bool = True) -> None:
        """Take no more requests; answered when those that are here have ended.

        In a group that steps together: when all its ranks have been asked, and none has any left.

        vLLM's third mode, "keep", would freeze them where they are: a scheduler of dpkit's cannot.
        """
        if mode not in {"abort", "wait"}:
            raise ValueError(f"mode must be 'abort' or 'wait', not {mode!r:.40}")
        self.paused = True
        self._waiting.append((bool(clear_cache), answer))
        if self._loop.lockstep is not None:
            self._loop.lockstep.note_pause()
        if mode == "abort":
            self._end_all()
        self.go_on()

    def _resume(self) -> None:
        self.paused = False
        if self._loop.lockstep is not None:
            self._loop.lockstep.note_resume()
        self._answer_pauses()  # nothing is waited for any more

    def _answer_pauses(self) -> None:
        waiting, self._waiting = self._waiting, []
        for _, answer in waiting:
            answer()

    def _reset_prefix_cache(self, *_: bool) -> bool:
        """Forget what is cached. False: it is in use. vLLM's flags ask for what dpkit lacks."""
        return self._loop.core.reset_prefix_cache()

    def _progress(self) -> list[float | None]:
        began = self._loop.step_started_at
        elapsed = None if began is None else trio.current_time() - began
        return [self._loop.core.statistics().steps, elapsed]
