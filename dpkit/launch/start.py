"""Start a program of ours in a fresh interpreter, from whatever thread Trio runs in.

Owns nothing: the process that is started is the caller's, or the tether's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpkit.errors import LaunchFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dpkit.launch.tether import Ends, Tether

# The path first: dpkit itself may be where only the head's own sys.path finds it.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from {module} import main; main()"
)


def start_program(
    name: str, module: str, *arguments: str, **options: Any
) -> subprocess.Popen[bytes]:
    """Start an interpreter that runs `main` of a module, in a session of its own.

    Args:
        name: who it is, in errors.
        module: of dpkit.
        arguments: on top of this process's id, which is the first.
        options: on top of these, as `subprocess.Popen` has them.

    Raises:
        LaunchFailed: there is no starting it.
    """
    path = [str(entry) or str(Path.cwd()) for entry in sys.path]
    program = _PROGRAM.format(module=module)
    try:
        return subprocess.Popen(  # noqa: S603 - this very interpreter
            [sys.executable, "-c", program, json.dumps(path), str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )
    except OSError as error:
        raise LaunchFailed(f"{name}: starting {sys.executable} failed: {error}") from error


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
    tether.keeper = start_program(
        tether.name,
        "dpkit.launch.zygote_main",
        *map(str, inherited),
        stdout=ends.output,
        stderr=ends.output,
        pass_fds=inherited,
        env={**os.environ, **env},
    )
    tether.tell(note)
