"""Start a keeper in a fresh interpreter, from whatever thread Trio runs in.

Owns nothing: the process that is started is the tether's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dpkit.errors import LaunchFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dpkit.launch.tether import Ends, Tether

# The path first: dpkit itself may be where only the head's own sys.path finds it.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from dpkit.launch.zygote_main import main; main()"
)


def start_keeper(
    note: bytes, tether: Tether, ends: Ends, *descriptors: int, env: Mapping[str, str]
) -> None:
    """Start a keeper and tell it its job.

    Synchronous, though it takes some milliseconds: the kernel ties a child to the *thread* that
    started it (`PR_SET_PDEATHSIG`), and a worker thread's end would be taken for the head's.

    Args:
        note: its job, encoded.
        tether: told of the keeper, which is a child of this process.
        ends: the keeper's.
        descriptors: further ones to inherit.
        env: on top of this process's environment.

    Raises:
        LaunchFailed: there is no starting it.
    """
    inherited = (ends.leash.fileno(), ends.lifeline, *descriptors)
    path = [str(entry) or str(Path.cwd()) for entry in sys.path]
    arguments = [json.dumps(path), str(os.getpid()), *map(str, inherited)]
    try:
        keeper = subprocess.Popen(  # noqa: S603 - this very interpreter
            [sys.executable, "-c", _PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=ends.output,
            stderr=ends.output,
            pass_fds=inherited,
            start_new_session=True,
            env={**os.environ, **env},
        )
    except OSError as error:
        raise LaunchFailed(f"{tether.name}: starting {sys.executable} failed: {error}") from error
    tether.keeper = keeper
    tether.tell(note)
