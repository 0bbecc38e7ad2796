"""What a worker is to itself: the set-up of its process, and how its work is run.

Knows nothing of the head but that it may be gone. Must stay cheap to import: every process of this
package starts with it.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpkit.errors import DpkitError, describe
from dpkit.imports import import_named
from dpkit.launch.lifeline import hold_lifeline
from dpkit.launch.linux import set_name, signal_when_parent_dies
from dpkit.launch.notes import Failed, Ready, encode

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from dpkit.launch.notes import Job

_RATHER_THIS = 100
"""Thousandths of the memory by which a worker counts as bigger when the kernel runs out of it and
looks for a process to kill: a worker is started again, its zygote and the head hold all of them."""

_LONGEST = 10_000
"""Characters of an error's message that the head hears of."""


def become_worker(name: str, keeper: int, lifeline: int) -> None:
    """Make a forked process one of its own: session, group, signals, lifeline.

    Ctrl-C in a terminal is the head's affair; SIGTERM is this process's, and ends it until the work
    says otherwise.
    """
    os.setsid()
    faulthandler.enable()  # a crash in native code tells where
    set_name(name)
    if not signal_when_parent_dies(signal.SIGKILL, keeper):
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGTERM})
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a killed process flushes nothing
    hold_lifeline(lifeline)


def run_job(
    job: Job, state: Any, leash: socket.socket, instead: Callable[[Any], None] | None = None
) -> int:
    """Prepare, if the job says so, tell the head how it went, and work; returns the exit code.

    Args:
        job: what to do.
        state: what was prepared before, where the job prepares nothing.
        leash: to the head; closed before the work begins.
        instead: does the work, given the state, where the job names none.
    """
    work: Callable[..., object] | None = instead
    try:
        if job.prepare is not None:
            state = find(job.prepare)(**job.prepare_args)
        if job.work is None:
            _freeze()
        else:
            work = find(job.work)
    except BaseException as error:  # noqa: BLE001 - SystemExit too; the head will raise it
        if not isinstance(error, DpkitError):
            traceback.print_exc()
        _tell(leash, Failed([kind.__name__ for kind in type(error).__mro__], _words_of(error)))
        return 1
    if job.work is not None:
        _offer_to_the_oom_killer()
    _tell(leash, Ready())
    leash.close()
    return _run(lambda: work and work(state, **job.work_args))


def find(target: str) -> Callable[..., Any]:
    """Import what ``pkg.mod:name`` names."""
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(import_named(module), name)
    return found


def _freeze() -> None:
    """Keep the garbage collector away from what there is now, so that forks go on sharing it."""
    gc.collect()
    gc.freeze()
    with suppress(OSError):  # no /proc, or no descriptor for it
        threads = [entry.name for entry in Path("/proc/self/task").iterdir()]
        if len(threads) > 1:
            print(  # noqa: T201 - the head logs it
                f"preparing left {len(threads) - 1} thread(s) behind, which workers will not have: "
                "what such a thread was holding is held in them for ever; workers that prepare for "
                'themselves have them: open_spawner, or for engines process.start = "spawn"',
                file=sys.stderr,
            )


def _offer_to_the_oom_killer() -> None:
    """Have the kernel, when out of memory, take this process rather than its zygote or head."""
    path = Path("/proc/self/oom_score_adj")
    with suppress(OSError):  # no /proc, or a container that does not let us
        path.write_text(str(min(1000, int(path.read_text()) + _RATHER_THIS)))


def _words_of(error: BaseException) -> str:
    text = str(error) if isinstance(error, DpkitError) else describe(error)
    return text[:_LONGEST]


def _tell(leash: socket.socket, note: Ready | Failed) -> None:
    with suppress(OSError):  # the head is gone: so will we be
        leash.send(encode(note))


def _run(work: Callable[[], object]) -> int:
    """The exit code of a call; like the interpreter's own, said the way it says it."""
    try:
        work()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)  # noqa: T201 - as `sys.exit("why")` does
        return 1
    except BaseException:  # noqa: BLE001 - the last frame of this process
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
    return 0
