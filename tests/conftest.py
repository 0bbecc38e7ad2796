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


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Threads, file descriptors and children are as before; blocks and counts are `idle`'s job."""
    gc.collect()
    threads, fds, processes = own_threads(), open_fds(), children()
    yield
    gc.collect()
    assert own_threads() <= threads
    assert children() <= processes
    leaked = {fd for fd in open_fds() - fds if "eventpoll" not in fd and "socket:" not in fd}
    assert not leaked
