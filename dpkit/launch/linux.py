"""What the kernel promises about processes that outlive one another, by its own calls.

Knows nothing of workers. Must stay cheap to import: every process of this package starts with it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | bytes) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def signal_when_parent_dies(signum: int, parent: int) -> bool:
    """Have the kernel send this process `signum` when its parent, `parent`, is gone.

    Returns:
        False: it is gone already, and no signal will come.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    return os.getppid() == parent  # whoever died before the line above was not noticed


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Set what ``ps -o comm`` and ``top`` call this process; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode(errors="replace")[:15])


def children() -> list[int]:
    """The children of this process, which has one thread: zombies and adopted ones included.

    While some of them end, the kernel may leave out others; so ask until there are none.
    """
    own = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return [int(entry.name) for entry in Path("/proc").iterdir() if _parent_of(entry) == own]


def _parent_of(entry: Path) -> int | None:
    if not entry.name.isdigit():
        return None
    try:
        stat = (entry / "stat").read_text(errors="replace")
    except OSError:  # it ended meanwhile
        return None
    return int(
        stat.rpartition(")")[2].split()[1]
    )  # a program's name may have spaces and parentheses
