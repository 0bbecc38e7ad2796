"""Which processes there are, by their state: a zombie answers signal 0 and yet is dead.

Reads ``/proc``, so Linux only. Knows nothing of launchers.
"""

from __future__ import annotations

from pathlib import Path

_DEAD = "ZX"


def is_alive(pid: int) -> bool:
    """Whether there is such a process and it is no zombie."""
    facts = _facts(pid)
    return facts is not None and facts[0] not in _DEAD


def descendants(pid: int) -> set[int]:
    """Every living process below `pid`, which need not be alive itself."""
    parents = {int(entry.name): _facts(entry.name) for entry in _PROC.iterdir() if _is_pid(entry)}
    found: set[int] = set()
    fresh = {pid}
    while fresh:
        fresh = {
            child
            for child, facts in parents.items()
            if facts is not None and facts[1] in fresh and facts[0] not in _DEAD
        } - found
        found |= fresh
    return found


_PROC = Path("/proc")


def _is_pid(entry: Path) -> bool:
    return entry.name.isdigit()


def _facts(pid: int | str) -> tuple[str, int] | None:
    """State and parent of a process; None: there is none."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent = stat.rpartition(")")[2].split()[:2]  # the name before may hold anything
    return state, int(parent)
