"""Votes of ranks in processes of their own, on any hosts, by gloo: an all-reduce of a few numbers.

The ranks meet at a store that the first of them keeps, compare what must be equal for all, and
connect to each other. Knows nothing of waves but the shape of a ballot. Imports torch, so it is
imported only where ranks vote. A vote waits in a thread of gloo's own: it blocks nobody here.
"""

from __future__ import annotations

import json
import socket
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch
import trio
from attrs import frozen
from torch import distributed

from dpkit.engine.waves import Ballot
from dpkit.errors import LaunchFailed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

_dist: Any = distributed  # its stubs lack half of what is used here

_SOON_S = 0.001
"""The shortest time limit that is set: at 0, some of these calls wait for ever."""

_RETRY_S = 0.02
"""From one look whether others have come to the next."""

_unfinished: list[GlooBallots] = []
"""Groups that were left in the middle of a vote. Gloo waits for the end of a vote before it lets go
of a group, from whatever thread; a process that ends need not."""


@frozen(kw_only=True)
class Meeting:
    """Where the ranks of a group meet."""

    host: str
    """Of the first rank's store: an address of its host, which all others reach."""
    port: int
    place: int
    """Of this rank among them; the first is 0."""
    ranks: tuple[int, ...]
    """How each of them is known, for messages."""
    patience: float
    """Seconds within which all must have come."""
    time_limit: float
    """Seconds that a vote may take."""
    limit_key: str
    """What to call that limit."""


class GlooBallots:
    """Votes of one rank; made by `open_gloo`."""

    def __init__(self, group: Any, store: Any, meeting: Meeting) -> None:
        self._group = group
        self._store = store  # which a group keeps alive only as long as it connects
        self._meeting = meeting
        self._options = _dist.AllreduceOptions()
        self._options.reduceOp = _dist.ReduceOp.MAX
        self._options.timeout = timedelta(seconds=meeting.time_limit)
        self._is_voting = False

    async def vote(self, ballot: Ballot) -> Ballot:
        """Put a ballot in, and wait for what comes out.

        Raises:
            TimeoutError: not all have voted within the time limit.
            ConnectionError: a rank has gone.
        """
        numbers = torch.tensor(ballot, dtype=torch.int64)
        began = monotonic()
        try:
            self._is_voting = True
            work = self._group.allreduce([numbers], self._options)
            await self._wait(work)
            work.wait()  # for what it raised
            self._is_voting = False
        except RuntimeError as error:
            self._is_voting = False
            limit = self._meeting.time_limit
            if monotonic() - began >= limit:
                raise TimeoutError(
                    f"was not taken within {limit:g} s ({self._meeting.limit_key}): another rank "
                    "hangs, or its steps take that much longer"
                ) from error
            raise ConnectionError(f"broke off: another rank has gone ({_first_line(error)})") from (
                error
            )
        return Ballot(*numbers.tolist())

    async def _wait(self, work: Any) -> None:
        """Wait until gloo's thread is done; cancelled, let it go on by itself."""
        task: trio.lowlevel.Task | None = trio.lowlevel.current_task()
        token = trio.lowlevel.current_trio_token()

        def wake() -> None:
            nonlocal task
            if task is not None:
                woken, task = task, None
                trio.lowlevel.reschedule(woken)

        def done(_: object, _keep: object = self) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(wake)

        def abort(_: object) -> trio.lowlevel.Abort:
            nonlocal task
            task = None
            return trio.lowlevel.Abort.SUCCEEDED

        work.get_future().add_done_callback(done)
        await trio.lowlevel.wait_task_rescheduled(abort)

    def close(self) -> None:
        """Leave the group; one that is left in the middle of a vote ends with the process."""
        if self._is_voting:
            _unfinished.append(self)
        else:
            self._group = self._store = None  # its threads end, its connections are closed


@asynccontextmanager
async def open_gloo(meeting: Meeting, facts: Mapping[str, object]) -> AsyncGenerator[GlooBallots]:
    """Meet the other ranks, and compare what must be equal.

    Args:
        meeting: Where, with whom, and how long to wait for them.
        facts: What must be the same for all, by name: plain data.

    Resource handling:
        Leaving the block leaves the group: to the others, this rank has gone.

    Error handling:
        LaunchFailed: the first rank cannot listen there, some rank did not come in time, or the
        facts differ; the message has each rank's.
    """
    deadline = monotonic() + meeting.patience
    ballots = await trio.to_thread.run_sync(
        _meet, meeting, dict(facts), deadline, abandon_on_cancel=True
    )
    try:
        yield ballots
    finally:
        ballots.close()


def _meet(meeting: Meeting, facts: dict[str, object], deadline: float) -> GlooBallots:
    store = _open_store(meeting, deadline)
    _compare(meeting, store, facts, deadline)
    options = _dist.ProcessGroupGloo._Options()  # noqa: SLF001 - the one way to choose the interface
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=_own_address(meeting))]  # noqa: SLF001
    options._timeout = _left(deadline)  # noqa: SLF001
    try:
        group = _dist.ProcessGroupGloo(store, meeting.place, len(meeting.ranks), options)
    except RuntimeError as error:
        raise LaunchFailed(
            f"{_here(meeting)} met all others at {_where(meeting)}, and could not connect to each "
            f"of them: {_first_line(error)}"
        ) from error
    return GlooBallots(group, store, meeting)


def _open_store(meeting: Meeting, deadline: float) -> Any:
    try:
        # By itself the store would listen on every interface of the host.
        listener = _listen(meeting) if meeting.place == 0 else None
        if listener is None:
            _await_store(meeting, deadline)
        return _dist.TCPStore(
            meeting.host,
            meeting.port,
            len(meeting.ranks),
            listener is not None,
            timeout=_left(deadline),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except (OSError, RuntimeError) as error:
        raise LaunchFailed(
            f"{_here(meeting)} did not get to the store of its group at {_where(meeting)}, which "
            f"{_ranks(meeting.ranks[:1])} keeps: {_first_line(error)}"
        ) from error


def _listen(meeting: Meeting) -> int:
    family, _, _, _, address = _resolve(meeting)
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener.detach()


def _await_store(meeting: Meeting, deadline: float) -> None:
    """Wait until somebody listens there: the store's own client is loud, and may wait longer."""
    while True:
        left = deadline - monotonic()
        try:
            socket.create_connection((meeting.host, meeting.port), max(_SOON_S, left)).close()
        except OSError:
            if left < 0:
                raise TimeoutError(f"nobody is there after {meeting.patience:g} s") from None
            sleep(_RETRY_S)
        else:
            return


def _compare(meeting: Meeting, store: Any, facts: dict[str, object], deadline: float) -> None:
    """Tell the others what this rank is like, and see that they are alike."""
    names = {rank: f"facts of {rank}" for rank in meeting.ranks}
    store.set(names[meeting.ranks[meeting.place]], json.dumps(facts))
    while missing := [rank for rank, name in names.items() if not store.check([name])]:
        if monotonic() > deadline:
            raise LaunchFailed(
                f"{_here(meeting)} waited {meeting.patience:g} s at {_where(meeting)}, and "
                f"{_ranks(missing)} did not come"
            )
        sleep(_RETRY_S)
    told = {rank: json.loads(store.get(name)) for rank, name in names.items()}
    for name in facts:
        if len({json.dumps(each.get(name)) for each in told.values()}) > 1:
            values = ", ".join(f"{each.get(name)} at rank {rank}" for rank, each in told.items())
            raise LaunchFailed(f"engines that step together must be alike, and {name} is {values}")


def _own_address(meeting: Meeting) -> str:
    """The address of this host by which it reaches the first rank: others reach it there, too."""
    family, _, _, _, address = _resolve(meeting)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
    return own


def _resolve(meeting: Meeting) -> tuple[Any, ...]:
    return socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)[0]


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(_SOON_S, deadline - monotonic()))


def _here(meeting: Meeting) -> str:
    return f"rank {meeting.ranks[meeting.place]}"


def _where(meeting: Meeting) -> str:
    return f"{meeting.host}:{meeting.port}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _first_line(error: Exception) -> str:
    """What gloo says, without the file and line of its source, and without its advice."""
    text = str(error).partition("\n")[0]
    return text.rpartition("] ")[2].partition(". This is")[0][:200]
