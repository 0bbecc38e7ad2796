"""A worker's lifeline: no head, no work.

The reading end of a pipe whose writing end only the head has. End of file is the kernel's word that
the head is gone, even where nothing of it was left to say so. Must stay cheap to import.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

_descriptor: int | None = None


def lifeline_fd() -> int:
    """The descriptor that becomes readable, at end of file, when the head is gone.

    Raises:
        RuntimeError: this process is no launcher's worker.
    """
    if _descriptor is None:
        raise RuntimeError("this process has no lifeline: a launcher's workers have one")
    return _descriptor


def hold_lifeline(descriptor: int) -> None:
    """Make `descriptor` what `lifeline_fd` says; a worker's set-up does."""
    global _descriptor  # noqa: PLW0603 - a process has one
    _descriptor = descriptor


async def watch_lifeline(descriptor: int | None = None) -> NoReturn:
    """Wait until the head is gone, then kill this process, and its group if it leads one.

    A worker's keeper does so too, from outside, and also when no task of the worker gets a turn.

    Args:
        descriptor: the lifeline; None: `lifeline_fd()`.
    """
    import trio  # noqa: PLC0415 - a worker that is no Trio program does without

    descriptor = lifeline_fd() if descriptor is None else descriptor
    await trio.lowlevel.wait_readable(descriptor)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be survived")
