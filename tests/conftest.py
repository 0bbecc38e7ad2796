"""Fixtures of every test: nothing may leak, and what a test needs must be loudly missing."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


def open_fds() -> set[str]:
    """What this process holds open, by target, so that a reused number does not hide a leak."""
    fds = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            fds.add(f"{entry.name}:{os.readlink(entry)}")  # noqa: PTH115 - targets are no paths
        except OSError:
            continue  # the directory listing's own descriptor is gone by now
    return fds


def own_threads() -> set[threading.Thread]:
    """Threads but Trio's idle worker cache, which lives on for ten seconds by design."""
    return {t for t in threading.enumerate() if not t.name.startswith("Trio thread")}


def children() -> set[str]:
    """Children of this process, zombies included: a zombie still answers signal 0."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def leaks(threads: set[threading.Thread], fds: set[str], processes: set[str]) -> list[str]:
    """What is there now and was not before."""
    kept = {fd for fd in open_fds() - fds if "eventpoll" not in fd and "socket:" not in fd}
    return [
        *(f"thread {thread.name}" for thread in own_threads() - threads),
        *(f"child {pid}" for pid in children() - processes),
        *(f"descriptor {fd}" for fd in kept),
    ]


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Threads, descriptors and children are as before; blocks and counts are `check_idle`'s job."""
    before = own_threads(), open_fds(), children()
    yield
    if leaks(*before):
        gc.collect()  # only when in doubt: it costs more than most tests
    assert leaks(*before) == []
