"""ZeroMQ for Trio: one face of one socket, with nothing between Trio's loop and libzmq.

Receiving is: take messages until libzmq has none, then wait for its file descriptor. Sending never
waits. No thread, no task, no channel stands between. Knows nothing of what messages mean.

libzmq's descriptor is edge-triggered: it tells of a change once, and any call may swallow that. So
whoever would wait takes first, and whoever sends looks afterwards whether the send has swallowed
the news that a parked receiver waits for.

`open_context` owns the context, `open_zsocket` owns a socket; both belong to the process and the
thread that opened them: open them after a fork, never before.
"""

from __future__ import annotations

import errno
from contextlib import asynccontextmanager
from itertools import count
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Never

import trio
import zmq

from dpkit.errors import DpkitError
from dpkit.wire.address import attached, set_options
from dpkit.wire.monitor import PeerReader, attach_monitor

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    Context = zmq.Context[Any]

BURST = 64
"""Messages delivered between two checkpoints: enough to hide what a checkpoint costs."""
TURN_S = 0.002
"""Seconds after which others have a turn, however few messages it was."""
MAX_MESSAGE_BYTES = 64 * 2**20
"""Default size limit of one frame: a prompt of a million tokens as embeddings is not sent here."""
MAX_SOCKETS = 16_384
"""Default number of sockets of a context: those of a cluster of 2,000 engines."""
TERM_PATIENCE = 6.0
"""Seconds that closing a context may take: the longest linger of the protocol is 5 s."""

_QUICK = int(zmq.NOBLOCK)
_QUICK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_MORE = int(zmq.RCVMORE)
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)
_monitor_numbers = count()


class PeerGone(DpkitError, trio.BrokenResourceError):  # noqa: N818
    """The ROUTER knows no such peer (the world's): it has gone, or never came. Nothing was sent."""

    http_status = 503
    retryable = True


@asynccontextmanager
async def open_context(
    *, io_threads: int = 1, max_sockets: int = MAX_SOCKETS, patience: float = TERM_PATIENCE
) -> AsyncGenerator[Context]:
    """Open a ZeroMQ context: the I/O threads that all sockets of a process or a cluster share.

    Args:
        io_threads: One carries about a gigabyte a second.
        max_sockets: Open at once; a watched one counts as three.
        patience: Seconds to wait at the end until what lingering sockets hold is sent.

    Resource handling:
        Leave all its sockets first. Leaving the context waits for them in a thread, never in
        Trio's loop, shielded from cancellation, and gives up after `patience`.
    """
    context = zmq.Context(io_threads)
    context.set(zmq.MAX_SOCKETS, max_sockets)
    try:
        yield context
    finally:
        with trio.move_on_after(patience, shield=True):
            await trio.to_thread.run_sync(context.destroy, abandon_on_cancel=True)


@asynccontextmanager
async def open_zsocket(
    context: Context,
    kind: zmq.SocketType,
    *,
    bind: str | None = None,
    connect: str | None = None,
    routing_id: bytes | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_queued: int = 0,
    lossy: bool = False,
    linger_ms: int = 0,
    watch: bool = False,
) -> AsyncGenerator[ZSocket]:
    """Open one socket, bound or connected.

    Args:
        context: From `open_context`, or any that was made in this process.
        kind: ``zmq.ROUTER``, ``zmq.PULL``...
        bind: Address to listen at; ``tcp://127.0.0.1:*`` picks a port, see `ZSocket.endpoint`.
        connect: Address to connect to, now or as soon as somebody listens there.
        routing_id: What a ROUTER at the other end shall call this socket.
        max_message_bytes: A peer that sends a larger frame is disconnected.
        max_queued: Messages that may wait in each direction and for each peer; 0: any number,
            for whoever bounds memory by admission.
        lossy: An XPUB leaves out a subscriber for whom `max_queued` messages wait, and no other:
            for news that the next message makes old.
        linger_ms: How long, after closing, what was sent may still wait to leave, milliseconds.
        watch: Keep note of connections from the very first on, for `ZSocket.watch_peers`.

    Resource handling:
        Leaving the block closes the socket at once, without a checkpoint; the file of a Unix socket
        that was bound goes with it.

    Error handling:
        AddressFailed: it cannot be bound or connected to.
    """
    if (bind is None) == (connect is None):
        raise ValueError("a socket is either bound or connected: give one of the two")
    raw = context.socket(kind, socket_class=zmq.Socket)
    zsocket = ZSocket(raw, _open_monitor(context, raw) if watch else None)
    try:
        set_options(raw, max_message_bytes=max_message_bytes, max_queued=max_queued, lossy=lossy)
        raw.set(zmq.LINGER, linger_ms)
        if routing_id is not None:
            raw.set(zmq.ROUTING_ID, routing_id)
        with attached(raw, bind, connect):
            yield zsocket
    finally:
        zsocket.close()


async def _in_turns(rest: GeneratorType[object, None, object], since: float) -> float:
    """Go through the parts of a message; when others had their last turn."""
    for _ in rest:
        if trio.current_time() - since > TURN_S:
            await trio.lowlevel.checkpoint()
            since = trio.current_time()
    return since


def _open_monitor(context: Context, raw: zmq.Socket[bytes]) -> ZSocket:
    address = f"inproc://dpkit-monitor-{next(_monitor_numbers)}"
    return ZSocket(attach_monitor(context, raw, address))


class ZSocket:
    """One ZeroMQ socket in a Trio task's hands.

    One task at a time receives; any task sends. All from the thread that runs Trio.
    """

    def __init__(self, raw: zmq.Socket[bytes], monitor: ZSocket | None = None) -> None:
        self._raw = raw
        # What pyzmq's own methods wrap, which cost several times as much.
        self._send = super(zmq.Socket, raw).send
        self._monitor = monitor
        self._peers = PeerReader()
        self._fd = int(raw.get(zmq.FD))
        self._kind = zmq.SocketType(int(raw.get(zmq.TYPE))).name
        self._receiving = self._parked = self._closed = False

    def __repr__(self) -> str:
        if self._closed:
            return f"<ZSocket {self._kind}, closed>"
        state = "receiving" if self._receiving else "idle"
        return f"<ZSocket {self._kind} {self.endpoint}, {state}>"

    @property
    def endpoint(self) -> str:
        """The address that it is bound or connected to, with the port that was picked."""
        self._check_open()
        return self._raw.get_string(zmq.LAST_ENDPOINT)

    @trio.lowlevel.enable_ki_protection
    async def receive(self) -> list[bytes]:
        """Wait for one message and return its frames. For many messages, `pump` costs far less.

        Error handling:
            A cancellation loses no message. trio.ClosedResourceError: the socket is closed, now or
            before. trio.BusyResourceError: another task is receiving.
        """
        self._begin()
        try:
            if self._is_readable():
                await trio.lowlevel.checkpoint_if_cancelled()
                frames = self._take()
                # A message in hand: what follows may let others run, but must not be cancelled.
                await trio.lowlevel.cancel_shielded_checkpoint()
            else:
                frames = None
            while frames is None:
                await self._wait()
                frames = self._take()
            return frames
        finally:
            self._receiving = False

    @trio.lowlevel.enable_ki_protection
    async def pump(self, deliver: Callable[[list[bytes]], object]) -> Never:
        """Call `deliver` with the frames of each message, until cancelled or closed.

        Args:
            deliver: Synchronous and quick, as all other tasks wait meanwhile. Others get a turn
                after `BURST` messages or `TURN_S` seconds. Of a message with much in it, it may
                return a generator, which does a part at each step: others get turns between these.
                Ctrl-C does not tear it.

        Error handling:
            What `deliver` raises comes out; its message is gone, those after it are not. Else as
            in `receive`.
        """
        self._begin()
        try:
            await trio.lowlevel.checkpoint()
            while True:
                taken, since = 0, trio.current_time()
                while (frames := self._take()) is not None:
                    rest = deliver(frames)
                    taken += 1
                    if isinstance(rest, GeneratorType):
                        since = await _in_turns(rest, since)
                    if taken == 1 and not self._is_readable():
                        break
                    if taken == BURST or trio.current_time() - since > TURN_S:
                        await trio.lowlevel.checkpoint()
                        taken, since = 0, trio.current_time()
                await self._wait()
        finally:
            self._receiving = False

    @trio.lowlevel.enable_ki_protection
    def drain_nowait(self, deliver: Callable[[list[bytes]], object], *, most: int = BURST) -> int:
        """Call `deliver` with the frames of each message that is there, and return how many were.

        For whoever need not know of a message when it comes. Works beside a task that is parked in
        `receive` or `pump`, which then gets those that come later.

        Args:
            deliver: As of `pump`.
            most: Messages to leave it at: whoever calls is to let others have a turn.

        Error handling:
            What `deliver` raises comes out; its message is gone, those after it are not.
            trio.ClosedResourceError: the socket is closed.
        """
        self._check_open()
        taken = 0
        try:
            while taken < most and self._is_readable() and (frames := self._take()) is not None:
                taken += 1
                deliver(frames)
        finally:
            if self._parked:  # what it waits to be told of may have been swallowed here
                self._wake_if_readable()
        return taken

    @trio.lowlevel.enable_ki_protection
    def send_nowait(self, frames: Sequence[bytes]) -> None:
        """Hand a message to libzmq, whole or not at all; nothing is ever dropped silently.

        A ROUTER's first frame is the peer's routing id.

        Raises:
            trio.WouldBlock: `max_queued` messages wait already, or nobody is there to send to.
            PeerGone: the ROUTER has no such peer.
            trio.ClosedResourceError: the socket is closed.
        """
        *others, last = frames
        for frame in frames:
            if not isinstance(frame, bytes):
                raise TypeError(f"a frame must be bytes, not {frame!r:.100}")
        try:
            for frame in others:
                self._send(frame, _QUICK_MORE)
            self._send(last, _QUICK)
        except zmq.Again:
            raise trio.WouldBlock from None
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                raise PeerGone(
                    f"{self!r} has no peer {frames[0]!r}: it has gone, or has not come yet"
                ) from None
            raise self._translate(error) from error
        finally:
            # A send reads libzmq's command queue, and with it news of messages that have come.
            if self._parked:
                self._wake_if_readable()

    async def watch_peers(
        self,
        *,
        on_connect: Callable[[str], object] = lambda _: None,
        on_drop: Callable[[str], object] = lambda _: None,
    ) -> Never:
        """Call back, synchronously, for each peer that comes and each that goes.

        Told in order, from the opening of the socket on: nothing is missed before this is called.
        A drop is told for whatever reason: the peer's process ended, it sent too large a frame, the
        network failed. Who connects and does not speak ZeroMQ is no peer, and what goes over
        ``inproc://`` is no connection: neither is told.

        Args:
            on_connect: A peer has connected, or has let us connect; it gets the endpoint. Who it
                is, only messages say.
            on_drop: A peer is gone; it gets the endpoint. A connecting socket tries again by
                itself.

        Error handling:
            What a callback raises comes out. Else as in `pump`.
        """
        if self._monitor is None:
            raise ValueError(f"{self!r} was not opened with watch=True")
        read = self._peers.read
        await self._monitor.pump(lambda frames: read(frames, on_connect, on_drop))

    def close(self, *, linger_ms: int | None = None) -> None:
        """Close at once. A task that is receiving gets trio.ClosedResourceError. Idempotent.

        Args:
            linger_ms: As of `open_zsocket`; None: what was said there.
        """
        if self._closed:
            return
        self._closed = True
        trio.lowlevel.notify_closing(self._fd)  # before: a closed number may be another's at once
        if self._monitor is not None:
            self._raw.disable_monitor()
            self._monitor.close()
        self._raw.close(linger_ms)

    def _begin(self) -> None:
        self._check_open()
        if self._receiving:
            raise trio.BusyResourceError(f"another task is already receiving from {self!r}")
        self._receiving = True

    def _is_readable(self) -> bool:
        """Ask, where most often there is nothing: an exception costs thrice as much."""
        try:
            return bool(int(self._raw.get(_EVENTS)) & _READABLE)
        except zmq.ZMQError as error:
            raise self._translate(error) from error

    def _take(self) -> list[bytes] | None:
        """One message, if there is one. libzmq hands over whole messages only."""
        raw = self._raw
        try:
            frames = [raw.recv(_QUICK)]
            while raw.get(_MORE):
                frames.append(raw.recv(_QUICK))
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            raise self._translate(error) from error
        return frames

    async def _wait(self) -> None:
        """Wait until there may be a message. To be called when there was none: see the top."""
        self._parked = True
        try:
            await trio.lowlevel.wait_readable(self._fd)
        except trio.ClosedResourceError:
            self._check_open()  # still open: a send woke us
        finally:
            self._parked = False

    def _wake_if_readable(self) -> None:
        if not self._closed and self._is_readable():
            self._parked = False
            # Trio's only way to wake who waits for a descriptor. It closes nothing.
            trio.lowlevel.notify_closing(self._fd)

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError(f"this {self._kind} socket is closed")

    def _translate(self, error: zmq.ZMQError) -> Exception:
        if self._closed or error.errno in {zmq.ENOTSOCK, zmq.ETERM}:
            return trio.ClosedResourceError(f"this {self._kind} socket is closed")
        return trio.BrokenResourceError(f"{self!r} failed: {error}")
