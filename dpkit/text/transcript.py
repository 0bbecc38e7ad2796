"""A request's tokens become its text: the prompt in front if wanted, and no stop string.

Puts decoder and stop scanner together. Sans-IO, one for each request; knows nothing of engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.text.stop import StopScanner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.abc import TextDecoder


class Transcript:
    """The text of one request, as far as it is certain.

    Args:
        decoder: A fresh one.
        stop: Strings before which the text ends.
        min_tokens: So many tokens come before a stop string may end.
        prefix: What comes in front; it is not searched.
    """

    __slots__ = ("_blind_tokens", "_decoder", "_prefix", "_scanner")

    def __init__(
        self,
        decoder: TextDecoder,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        prefix: str = "",
    ) -> None:
        self._decoder = decoder
        self._scanner = StopScanner(stop) if stop else None
        self._blind_tokens = min_tokens if stop else 0
        self._prefix = prefix

    @property
    def stopped(self) -> bool:
        """A stop string was found; the text is complete."""
        return self._scanner is not None and self._scanner.stopped

    def feed(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """Return the text that these tokens make certain; with `last`, all that is left."""
        if self._scanner is None:
            text = self._decoder.feed(token_ids)
            if last:
                text += self._decoder.finish()
        else:
            text = self._scan(self._scanner, token_ids, last=last)
        if self._prefix:
            text, self._prefix = self._prefix + text, ""
        return text

    def _scan(self, scanner: StopScanner, token_ids: Sequence[int], *, last: bool) -> str:
        text = ""
        if self._blind_tokens:
            blind, token_ids = token_ids[: self._blind_tokens], token_ids[self._blind_tokens :]
            self._blind_tokens -= len(blind)
            text += scanner.feed(self._decoder.feed(blind), may_stop=False)
        text += scanner.feed(self._decoder.feed(token_ids))
        if last:
            # Half a character that never became one is text, too late to be part of a stop string.
            text += scanner.feed(self._decoder.finish(), may_stop=False)
            text += scanner.finish()
        return text
