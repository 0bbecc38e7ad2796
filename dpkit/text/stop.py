"""Stop strings: the text ends before the first of them, however it is cut into pieces.

Sans-IO: text in, text out. What may turn out to begin a stop string is held back until it is known.
Knows nothing of tokens or requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopScanner:
    """Lets text through up to the first stop string.

    The first is the one whose last character comes first, as if the text came letter by letter: so
    no way of cutting it changes the result. Of several that end together, the longest counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._most_held = max(map(len, stops), default=1) - 1
        self._held = ""
        self._blind = 0  # so many characters of `_held` may be the beginning of a stop, not its end
        self.stopped = False

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Return the text that is certain now: nothing any more after a stop string.

        Args:
            text: What comes next.
            may_stop: False: a stop string that ends inside `text` does not count.
        """
        if self.stopped:
            return ""
        text = self._held + text
        blind = self._blind if may_stop else len(text)
        end = self._find(text, blind)
        self.stopped = end is not None
        if end is None:
            end = len(text) - self._count_held(text)
        self._held = "" if self.stopped else text[end:]
        self._blind = max(0, blind - end)
        return text[:end]

    def finish(self) -> str:
        """Return what was held back: no stop string has come of it."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, blind: int) -> int | None:
        """Where the first stop string begins that ends after the first `blind` characters."""
        found = [
            (begin + len(stop), begin)
            for stop in self._stops
            if (begin := text.find(stop, max(0, blind - len(stop) + 1))) >= 0
        ]
        return min(found)[1] if found else None

    def _count_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._most_held, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
