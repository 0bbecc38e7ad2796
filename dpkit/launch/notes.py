"""What the head and the processes it starts tell each other: JSON, one note a datagram.

Never pickle: what comes from a process that went wrong is read, not run. Descriptors may come along
with a note. Must stay cheap to import: every process of this package starts with it.
"""

from __future__ import annotations

import array
import json
import re
import socket
from typing import Any, NamedTuple

LIMIT = 128 * 1024
"""Bytes of a note. The kernel's own limit is its socket buffer, 208 KiB by default."""


_TARGET = re.compile(r"(?!__main__:)[^\W\d][\w.]*:[^\W\d]\w*")


class Job(NamedTuple):
    """Head to a new process: what to do. A process without `work` forks others that have it."""

    name: str
    prepare: str | None
    prepare_args: dict[str, Any]
    work: str | None
    work_args: dict[str, Any]


class End(NamedTuple):
    """Head to keeper: end the process, and all that it started, now."""


class Born(NamedTuple):
    """Keeper to head: the process is there; comes with pidfds of it and of the keeper."""

    pid: int


class Ready(NamedTuple):
    """Process to head: what had to be prepared is prepared."""


class Failed(NamedTuple):
    """Process to head: it could not be. `kinds` are names of the error's class and its bases."""

    kinds: list[str]
    text: str


class Ended(NamedTuple):
    """Keeper to head: the process is gone, with this exit code; minus the signal, if by one."""

    code: int


Answer = Born | Ready | Failed | Ended
Note = Job | End | Answer

_ANSWERS = {kind.__name__: kind for kind in (Born, Ready, Failed, Ended)}


def encode(note: Note) -> bytes:
    """Write a note.

    Raises:
        TypeError: an argument is no JSON.
        ValueError: it is more than `LIMIT` bytes.
    """
    data = json.dumps([type(note).__name__, *note]).encode()
    if len(data) > LIMIT:
        raise ValueError(
            f"{len(data)} bytes of arguments are too many (limit {LIMIT}): pass a path instead"
        )
    return data


def encode_job(job: Job) -> bytes:
    """Write a job, once its targets look like some.

    Raises:
        TypeError: an argument is no JSON.
        ValueError: a target is not ``"pkg.mod:function"``, or it is all more than `LIMIT` bytes.
    """
    for target in (job.prepare, job.work):
        if target is not None and not _TARGET.fullmatch(target):
            raise ValueError(
                f"{job.name}: {target!r} names nothing that another process can import; "
                'try "pkg.mod:function"'
            )
    return encode(job)


def decode_job(data: bytes) -> Job:
    """Read a job that `encode` wrote."""
    _, *fields = json.loads(data)
    return Job(*fields)


def decode_answer(data: bytes) -> Answer:
    """Read what `encode` wrote in a keeper or its process."""
    kind, *fields = json.loads(data)
    answer: Answer = _ANSWERS[kind](*fields)
    return answer


def receive(source: socket.socket, descriptors: int) -> tuple[bytes, list[int]]:
    """Receive a note, still encoded, and as many descriptors at most; b"": the other end is closed.

    Not by `socket.recv_fds`, which forgets its flags (CPython 3.11), so that whatever is started
    meanwhile would inherit them.
    """
    found = array.array("i")
    space = socket.CMSG_LEN(descriptors * found.itemsize)
    data, ancillary, _, _ = source.recvmsg(LIMIT, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return data, list(found)
