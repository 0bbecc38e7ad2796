"""Ctrl-C at a line of one's choice."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

from attrs import define

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import FrameType


@define
class Interrupter:
    """A trace function that sends SIGINT at line event number `at` of some files."""

    files: Collection[str | None]
    at: int
    seen: int = 0

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> Interrupter | None:
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self
