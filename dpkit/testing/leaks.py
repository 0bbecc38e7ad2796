"""Nothing may be there afterwards that was not there before: tasks, threads, descriptors, children.

For the tests of whoever embeds dpkit, as a context manager or as a fixture::

    @pytest.fixture(autouse=True)
    def nothing_leaks():
        with leak_check():
            yield

Knows nothing of clusters: blocks and counts are `check_idle`'s job. Reads ``/proc``; where there is
none, descriptors and children are not looked at.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from attrs import frozen

from dpkit.errors import DpkitError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

SHARED = ("eventpoll", "socket:")
"""Descriptors that the interpreter's own machinery may open late and keep."""

PATIENCE = 1.0
"""Seconds of the wall clock within which a thread may end that nobody waits for any more.

On a virtual clock, who waits for one with a time limit gives up as soon as nothing else happens."""


class Leaked(DpkitError):  # noqa: N818 - reads as what happened
    """Something is still there; the message lists all of it."""


@frozen(kw_only=True)
class Belongings:
    """What this process has at one moment."""

    threads: frozenset[threading.Thread]
    descriptors: frozenset[str]
    children: frozenset[str]
    tasks: int
    """Living tasks of the Trio run that asks; 0 outside of one."""

    @classmethod
    def now(cls) -> Belongings:
        """Look around."""
        in_run = trio.lowlevel.in_trio_run()
        return cls(
            threads=frozenset(_own_threads()),
            descriptors=frozenset(_descriptors()),
            children=frozenset(_children()),
            tasks=trio.lowlevel.current_statistics().tasks_living if in_run else 0,
        )

    def beyond(self, before: Belongings) -> list[str]:
        """What is there now and was not there before, in words."""
        descriptors = sorted(self.descriptors - before.descriptors)
        new_tasks = self.tasks - before.tasks
        return [
            *([f"{new_tasks} tasks"] if new_tasks > 0 else []),
            *(f"thread {thread.name}" for thread in self.threads - before.threads),
            *(f"child {pid}" for pid in sorted(self.children - before.children)),
            *(f"descriptor {each}" for each in descriptors if not _is_shared(each)),
        ]


@contextmanager
def leak_check(*, ignore: Collection[str] = ()) -> Iterator[None]:
    """Check that the block leaves nothing behind.

    Args:
        ignore: Words; a leak whose description has one of them is none.

    Error handling:
        Leaked: something is left. Not raised over an exception of the block's own.
    """
    before = Belongings.now()
    yield
    if Belongings.now().beyond(before):
        gc.collect()  # only when in doubt: it costs more than most tests
        _await_threads(before)
    left = Belongings.now().beyond(before)
    if left := [each for each in left if not any(word in each for word in ignore)]:
        raise Leaked(f"left behind: {', '.join(left)}")


def _await_threads(before: Belongings) -> None:
    """Give those that are about to end the time to: tasks and descriptors would not use it."""
    give_up = time.monotonic() + PATIENCE
    while set(_own_threads()) - before.threads and time.monotonic() < give_up:
        time.sleep(0.001)


def _own_threads() -> Iterator[threading.Thread]:
    """Threads but Trio's idle worker cache, which lives on for ten seconds by design."""
    return (each for each in threading.enumerate() if not each.name.startswith("Trio thread"))


def _descriptors() -> Iterator[str]:
    """What is held open, by target too, so that a reused number does not hide a leak."""
    directory = Path("/proc/self/fd")
    for entry in directory.iterdir() if directory.is_dir() else ():
        try:
            yield f"{entry.name}:{os.readlink(entry)}"  # noqa: PTH115 - targets are no paths
        except OSError:
            continue  # the directory listing's own descriptor is gone by now


def _is_shared(descriptor: str) -> bool:
    return any(word in descriptor for word in SHARED)


def _children() -> list[str]:
    """Children of this process, zombies included: a zombie still answers signal 0."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return path.read_text().split() if path.is_file() else []
