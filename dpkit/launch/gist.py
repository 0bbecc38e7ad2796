"""What the last lines of a process say, for an error of one line."""

from __future__ import annotations

import re
import sysconfig
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CRASH = "Fatal Python error: "
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line \d+ in \S+')


def gist(lines: Iterable[str]) -> str:
    """The end of what a process wrote, without the frames of its last traceback.

    Of a crash in native code, which faulthandler told, what it was and in whose call.
    """
    said = [line for line in lines if line.strip()]
    crashes = [number for number, line in enumerate(said) if line.startswith(_CRASH)]
    if crashes:
        return " / ".join((said[crashes[-1]], *_whose(said[crashes[-1] :])))
    told = [
        line for line in said if not line[0].isspace() and not line.endswith(("last):", "first):"))
    ]
    return " / ".join(told[-2:])


def _whose(lines: Sequence[str]) -> Sequence[str]:
    """The innermost frame of the thread that crashed that is not of Python's own library.

    Threads are told the newest first, and that one is called the current; the innermost frame is on
    top.
    """
    headings = [number for number, line in enumerate(lines) if line.endswith("first):")]
    begin = next((at for at in headings if lines[at].startswith("Current ")), None)
    end = next((at for at in headings if begin is not None and at > begin), None)
    thread = () if begin is None else lines[begin:end]
    frames = [match for match in map(_FRAME.fullmatch, thread) if match]
    theirs = [frame for frame in frames if not _is_pythons(frame["file"])]
    return [frame[0].strip() for frame in (theirs or frames)[:1]]


def _is_pythons(file: str) -> bool:
    return file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file
