"""Entry of the process that removes a folder once the head is gone.

The kernel tells, by a pidfd, so it does not matter what the head came to say or who else holds its
descriptors. Must stay cheap to import.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys

from dpkit.launch.linux import set_name


def main() -> None:
    """Wait for the end of the head, then remove the folder; arguments: process id and path."""
    head, folder = int(sys.argv[1]), sys.argv[2]
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # often sent to all processes of a service: too early
    set_name("dpkit folder")
    _wait_gone(head)
    shutil.rmtree(folder, ignore_errors=True)


def _wait_gone(head: int) -> None:
    try:
        pidfd = os.pidfd_open(head)
    except ProcessLookupError:
        return
    if os.getppid() == head:  # or else the number is another's by now
        news = select.poll()
        news.register(pidfd, select.POLLIN)
        news.poll()
