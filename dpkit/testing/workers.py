"""What `check_launcher` lets workers do. Runs in other processes, so it imports next to nothing.

The state is a list of words; whatever a worker is asked about itself it prints.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

from dpkit.errors import ModelNotFound

REFUSAL = "there is no such model; try another"
CRASH = "the workshop burnt down"


def prepare(word: str) -> list[str]:
    """Make the state."""
    return [word]


def refuse() -> NoReturn:
    """Fail as dpkit's own code does."""
    raise ModelNotFound(REFUSAL)


def crash() -> NoReturn:
    """Fail as any code may."""
    raise ValueError(CRASH)


def hang(path: str) -> NoReturn:
    """Say which process hangs, and hang, deaf to whoever asks it to stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(path, pid=os.getpid())
    _sleep()


def report(state: list[str], **args: Any) -> None:
    """Print what there is, and change the state."""
    pid = os.getpid()
    facts = {"state": state, "args": args, "group": os.getpgid(pid), "session": os.getsid(pid)}
    print(json.dumps(facts))  # noqa: T201 - a worker's output is what the suite reads
    state.append("spoilt")


def fail(_: list[str]) -> NoReturn:
    """Raise what nobody catches."""
    raise ValueError(CRASH)


def leave(_: list[str], code: int) -> NoReturn:
    """Exit with a code, and leave a child behind."""
    raise SystemExit(code)


def serve(_: list[str], path: str, *, stubborn: bool = False) -> NoReturn:
    """Start a child and an orphan, say who they are, and stay."""
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(path, pid=os.getpid(), child=_start_child(), orphan=_start_orphan())
    _sleep()


def start_and_leave(_: list[str], path: str) -> None:
    """Start a child and an orphan, say who they are, and go."""
    tell(path, child=_start_child(), orphan=_start_orphan())


def tell(path: str, **pids: int) -> None:
    """Write a file, whole as soon as it is there."""
    Path(f"{path}.part").write_text(json.dumps(pids))
    Path(f"{path}.part").rename(path)


def _start_child() -> int:
    if (pid := os.fork()) == 0:
        _sleep()
    return pid


def _start_orphan() -> int:
    """A process in a session of its own, whose parent has gone: what most clean-ups miss."""
    reader, writer = os.pipe()
    if (parent := os.fork()) == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if (pid := os.fork()) == 0:
            _sleep()
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.waitpid(parent, 0)
    os.close(writer)
    pid = int(os.read(reader, 16))
    os.close(reader)
    return pid


def _sleep() -> NoReturn:
    while True:
        time.sleep(1000)
