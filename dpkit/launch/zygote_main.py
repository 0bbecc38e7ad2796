"""Entry of every process that a launcher starts afresh: a keeper and, below it, zygote or worker.

The zygote prepares once, then forks a worker whenever the head asks, which has the prepared state
at once and shares its memory until somebody writes to it. A plain blocking program with one thread:
it runs nothing of Trio or ZeroMQ, which do not survive a fork.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from dpkit.launch.inside import become_worker, run_job
from dpkit.launch.keeper import keep
from dpkit.launch.linux import signal_when_parent_dies
from dpkit.launch.notes import LIMIT, Failed, decode_job, encode, receive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.launch.notes import Job

HANDED_OVER = 3
"""Descriptors that come with a request for a worker: leash, lifeline, output."""


def main() -> NoReturn:
    """Be the keeper of what the head asks for; arguments: its process id, and our descriptors."""
    head, *descriptors = map(int, sys.argv[1:])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # the worker's own children have no use for them
    leash = socket.socket(fileno=descriptors[0])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until the keeper listens to it
    signal_when_parent_dies(signal.SIGTERM, head)  # of one that is dead already, the leash tells
    if not (data := leash.recv(LIMIT)):
        os._exit(1)
    job = decode_job(data)

    def live(keeper: int) -> int:
        return _live(keeper, job, leash, *descriptors[1:])

    keep(live, leash, name=job.name)


def _live(
    keeper: int, job: Job, leash: socket.socket, lifeline: int, requests: int | None = None
) -> int:
    """What the keeper forks: a zygote if there is where to ask for workers, or else a worker."""
    become_worker(job.name, keeper, lifeline)
    if requests is None:
        return run_job(job, None, leash)
    asked = socket.socket(fileno=requests)
    return run_job(job, None, leash, partial(_fork_workers, lifeline, asked))


def _fork_workers(lifeline: int, requests: socket.socket, state: Any) -> None:
    """Fork one worker after the other, until the head is gone."""
    os.close(lifeline)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for our children's exit codes
    while True:
        data, descriptors = receive(requests, HANDED_OVER)
        if not data:
            return
        if len(descriptors) == HANDED_OVER:
            _fork(data, descriptors, state, requests)
            continue
        print("the zygote has no descriptors left for a worker", file=sys.stderr)  # noqa: T201
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(data: bytes, descriptors: Sequence[int], state: Any, requests: socket.socket) -> None:
    leash = socket.socket(fileno=descriptors[0])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the worker would say it once more
    zygote = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        leash.send(encode(Failed(["LaunchFailed"], f"the zygote cannot fork: {error}")))
        pid = -1
    if pid == 0:
        try:
            requests.close()
            _be_keeper(data, leash, *descriptors[1:], state=state, zygote=zygote)
        finally:
            os._exit(1)  # by an error in there, before it was a keeper: be no second zygote
    leash.close()
    for descriptor in descriptors[1:]:
        os.close(descriptor)


def _be_keeper(
    data: bytes, leash: socket.socket, lifeline: int, output: int, *, state: Any, zygote: int
) -> NoReturn:
    job = decode_job(data)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    if not signal_when_parent_dies(signal.SIGTERM, zygote):
        os._exit(1)

    def live(keeper: int) -> int:
        become_worker(job.name, keeper, lifeline)
        return run_job(job, state, leash)

    keep(live, leash, name=job.name)
