"""What an engine has said while nobody had time to listen, taken in together.

A client that is late would be later yet if it told every reader of every token. So the tokens that
several messages bring to a request are told at once: one piece of text, one write into a socket.
Nobody who is in time waits for anything. Owns nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from dpkit.link.zmq import PIECE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpkit.link.held import Held
    from dpkit.link.zmq import WireConnection
    from dpkit.wire.zsocket import ZSocket

TOGETHER = 16
"""Messages at most: that saves nearly all there is to be saved, and keeps no token for long."""


@frozen
class CatchUp:
    """Takes what a socket brings to a connection; for `ZSocket.pump` of that socket."""

    socket: ZSocket
    connection: WireConnection

    def take(self, frames: list[bytes]) -> Iterator[None] | None:
        """Take in a message, and those that wait behind it; in parts if there is much in them.

        Raises:
            As `WireConnection.take`; messages behind the one to blame are gone too.
        """
        messages = [frames]
        self.socket.drain_nowait(messages.append, most=TOGETHER - 1)
        if len(messages) == 1:
            return self.connection.take(frames)
        return self._take_all(messages)

    def _take_all(self, messages: Sequence[list[bytes]]) -> Iterator[None]:
        *others, last = messages
        kept: list[Held] = []
        for frames in others:
            yield from self.connection.take(frames, kept) or ()
            yield
            if self.connection.is_lost:  # meanwhile, and all have been told
                return
        yield from self.connection.take(last) or ()
        if self.connection.has_untold:  # the last message told nothing of it
            self.connection.tell_work(is_newest=True)
        for number, held in enumerate(kept, start=1):
            if held.kept:  # else the last message had more, or nobody wants them any more
                held.tell()
            if not number % PIECE:
                yield
