"""A folder for sockets that goes with this process, at whatever moment and however it ends.

Only somebody who outlives the process can see to that: a process of the folder's own, which is
there before the folder is and until it is gone. Knows nothing of what lies in it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dpkit.launch.start import start_program

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST = 80
"""Of the 107 bytes that the path of a Unix socket may have; the rest is for folder and name."""


@contextmanager
def open_folder() -> Iterator[str]:
    """Make a folder of this user alone, under `TMPDIR` unless that is too long; gives its path.

    Resource handling:
        Leaving the block removes the folder with all that is in it; so does the end of this
        process. Entering and leaving take some milliseconds, in which nothing else runs.

    Error handling:
        LaunchFailed: the process that is to remove it cannot be started. OSError: there is no
        making it.
    """
    folder = Path(_parent(), f"dpkit-{secrets.token_urlsafe(6)}")
    guard = start_program(
        str(folder),
        "dpkit.launch.folder_main",
        str(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        folder.mkdir(mode=0o700)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        guard.kill()
        guard.wait()


def _parent() -> str:
    usual = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(usual)) > _LONGEST else usual  # noqa: S108 - as said
