"""The owner's side of a handshake at which engines come and go: who may join, and as which life.

Unlike `frontend`, which expects some engines once, this one stays open: a rank that is lost may say
HELLO again, and is told the addresses of its next life. Answers, and never waits; `take` is for a
pump. Knows nothing of processes; sockets are its user's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from dpkit.errors import WireError
from dpkit.wire.codec import decode_hello, encode_init, rank_identity, rank_of
from dpkit.wire.frontend import Phase
from dpkit.wire.zsocket import PeerGone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit.wire.structs import Init

_MOST_COMPLAINTS = 100
"""Different ones that are logged: strangers may go on for ever."""

_log = logging.getLogger("dpkit.wire")


class Guest:
    """One life of one rank, as far as it has come. Made by `Reception.expect`."""

    def __init__(self, reception: Reception, rank: int, init: Init, *, held: bool) -> None:
        self.rank = rank
        self.init = init
        self.phase = Phase.EXPECTED
        self.called = trio.Event()
        """It has said HELLO."""
        self.settings: str | None = None
        """What vLLM makes of all settings that ranks which step together must share: READY says."""
        self.greeted = trio.Event()
        """It has said HELLO, and was told `init`."""
        self.ready = trio.Event()
        """It has said READY."""
        self._reception = reception
        self._held = held
        self._fault: WireError | None = None
        self._failed = trio.Event()

    def __repr__(self) -> str:
        return f"<Guest rank {self.rank}: {self.phase.value}>"

    async def wait_for_fault(self) -> None:
        """Wait until it breaks the protocol, which no life survives.

        Error handling:
            WireError: it said HELLO again, READY again, or what cannot be read.
        """
        await self._failed.wait()
        assert self._fault is not None  # noqa: S101 - set before
        raise self._fault

    def answer(self) -> bool:
        """Tell one that was held `init`; False: it has left meanwhile, and must call anew."""
        self._reception.greet(self)
        if self.phase is Phase.GREETED:
            return True
        self.phase, self.called = Phase.EXPECTED, trio.Event()
        return False

    def welcome(self) -> None:
        """It serves: what it says here from now on is for its next life."""
        self.phase = Phase.WELCOME

    def leave(self) -> None:
        """This life is over. Idempotent."""
        self._reception.forget(self)

    # The other half of the reception.

    def call(self) -> None:
        """It says HELLO: again, perhaps, if it was held for longer than it would wait."""
        self.called.set()
        if self._held:
            self.phase = Phase.CALLED
        else:
            self._reception.greet(self)

    def fail(self, fault: str) -> None:
        """End this life, if it does not serve yet."""
        if self._fault is None:
            self._fault = WireError(f"engine rank {self.rank} cannot be welcomed: {fault}")
            self._failed.set()


class Reception:
    """All ranks at one handshake.

    Args:
        send: Sends by the ROUTER, whose first frame is a rank's identity.
        name: Whose engines they are, for the log.
    """

    def __init__(self, send: Callable[[list[bytes]], object], name: str) -> None:
        self._send = send
        self._name = name
        self._guests: dict[int, Guest] = {}
        self._waiting: set[int] = set()  # they said HELLO when no life of theirs was expected
        self._complaints: set[tuple[bytes, str]] = set()

    def __repr__(self) -> str:
        return f"<Reception of {self._name}: {len(self._guests)} ranks>"

    @property
    def missing(self) -> list[int]:
        """Ranks that are expected and have not said HELLO."""
        guests = sorted(self._guests.values(), key=lambda guest: guest.rank)
        return [guest.rank for guest in guests if guest.phase is Phase.EXPECTED]

    def expect(self, rank: int, init: Init, *, held: bool = False) -> Guest:
        """Have the next life of a rank told `init`: now, if it has said HELLO already.

        An engine waits for its answer for minutes: one that is restarted may well be here before
        its former life is known to be over. With `held` it waits until `Guest.answer`.
        """
        guest = self._guests[rank] = Guest(self, rank, init, held=held)
        if rank in self._waiting:
            self._waiting.discard(rank)
            guest.call()
        return guest

    def forget(self, guest: Guest) -> None:
        """Expect a life no more; see `Guest.leave`."""
        if self._guests.get(guest.rank) is guest:
            del self._guests[guest.rank]

    def look_after(self) -> None:
        """Find out whether those who were greeted are still there; for when somebody has left.

        libzmq says that a peer has gone, but not which. INIT once more harms nobody: an engine
        reads it once.
        """
        for guest in list(self._guests.values()):
            if guest.phase is Phase.GREETED:
                try:
                    self._send([rank_identity(guest.rank), encode_init(guest.init)])
                except PeerGone:
                    guest.fail("it has gone before it was ready")

    def take(self, frames: Sequence[bytes]) -> None:
        """Take one message of anybody. Whatever it says, nothing is raised, and one rank hears."""
        identity, *words = frames
        try:
            rank = rank_of(identity)
        except WireError as error:
            self._complain(identity, str(error))
            return
        if len(words) != 1:
            self._refuse(rank, f"it said {len(words)} frames at once, and each word is one")
            return
        try:
            word = decode_hello(words[0])
        except WireError as error:
            self._refuse(rank, str(error))
            return
        if word.status == "HELLO":
            self._on_hello(rank)
        else:
            self._on_ready(rank, word.parallel_config_hash or None)

    def _on_hello(self, rank: int) -> None:
        guest = self._guests.get(rank)
        if guest is not None and guest.phase in {Phase.EXPECTED, Phase.CALLED}:
            guest.call()
            return
        self._waiting.add(rank)  # the newest: a ROUTER hands a routing id over
        if guest is None:
            expected = ", ".join(map(str, sorted(self._guests))) or "none"
            self._complain(
                rank_identity(rank),
                f"rank {rank} says HELLO and is not expected now ({expected} are): it is answered "
                "if and when it is",
            )
        elif guest.phase is Phase.WELCOME:
            self._complain(
                rank_identity(rank),
                f"rank {rank} says HELLO, and serves: who is it? It is answered once that life of "
                "the rank is over",
            )
        else:
            guest.fail(f"it {guest.phase.value}, and now says HELLO: it has begun anew")

    def greet(self, guest: Guest) -> None:
        """Tell one that has said HELLO its addresses; see `Guest.answer`."""
        try:
            self._send([rank_identity(guest.rank), encode_init(guest.init)])
        except PeerGone:
            self._complain(rank_identity(guest.rank), f"rank {guest.rank} said HELLO and left")
        else:
            guest.phase = Phase.GREETED
            guest.greeted.set()

    def _on_ready(self, rank: int, settings: str | None) -> None:
        guest = self._guests.get(rank)
        if guest is not None and guest.phase is Phase.GREETED:
            guest.phase, guest.settings = Phase.READY, settings
            guest.ready.set()
        elif guest is not None and guest.phase is Phase.READY:
            self._refuse(rank, "it says READY a second time")
        else:
            self._refuse(rank, "it says READY without HELLO: who told it the addresses?")

    def _refuse(self, rank: int, fault: str) -> None:
        guest = self._guests.get(rank)
        if guest is not None and guest.phase in {Phase.GREETED, Phase.READY}:
            guest.fail(fault)
        else:  # from a former life, or a stranger
            self._complain(rank_identity(rank), f"rank {rank}: {fault}")

    def _complain(self, identity: bytes, what: str) -> None:
        """Log a fault that is nobody's life, each once."""
        if (identity, what) in self._complaints or len(self._complaints) >= _MOST_COMPLAINTS:
            _log.debug("at the handshake of %s: %s", self._name, what)
            return
        self._complaints.add((identity, what))
        _log.warning("at the handshake of %s: %s", self._name, what)
