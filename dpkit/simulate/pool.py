"""Runs side by side, each in a process of its own that ends with it.

Fresh interpreters, not forks: a run must not depend on what its parent has done before. What they
are to do and what came of it pass through their pipes, and they die with their parent. Not
`multiprocessing`, which leaves a process of its own behind to the end of the program.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dpkit.errors import DpkitError
from dpkit.launch.linux import signal_when_parent_dies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Job = tuple[Any, ...]
    Tell = Callable[[int, int], None]


def run_side_by_side(work: str, jobs: Sequence[Job], *, at_once: int, tell: Tell) -> list[Any]:
    """Have each job done by a process, and return what came of them, in their order.

    Args:
        work: ``"pkg.mod:function"``; called with a job's parts, and a callable for its progress.
        jobs: What can be pickled.
        at_once: Processes side by side.
        tell: Given the place of a job and its progress, in a thread.

    Resource handling:
        No process is left, however this ends.

    Error handling:
        DpkitError: a job failed, with its words, or its process died; the others are ended.
    """
    children: list[subprocess.Popen[bytes]] = []
    given_up = threading.Event()

    def do(place: int) -> Any:
        with _start() as child:
            children.append(child)
            if given_up.is_set():  # just before it was started
                child.kill()
            return _follow(child, (work, jobs[place]), lambda done: tell(place, done))

    with ThreadPoolExecutor(at_once, "simulation") as threads:
        try:
            futures = [threads.submit(do, place) for place in range(len(jobs))]
            return [future.result() for future in futures]
        except BaseException:
            given_up.set()
            threads.shutdown(wait=False, cancel_futures=True)
            for child in tuple(children):
                child.kill()
            raise


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - this very interpreter
        [sys.executable, "-m", "dpkit.simulate.pool", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def _follow(child: subprocess.Popen[bytes], job: object, tell: Callable[[int], None]) -> Any:
    assert child.stdin is not None and child.stdout is not None  # noqa: S101, PT018 - pipes, both
    try:
        pickle.dump(job, child.stdin)
        child.stdin.close()
        while True:
            kind, word = pickle.load(child.stdout)  # noqa: S301 - our own child's
            if kind == "done":
                return word
            if kind == "failed":
                raise DpkitError(f"a simulation failed: {word}")
            tell(word)
    except (EOFError, OSError, pickle.UnpicklingError) as error:
        child.kill()
        status = child.wait()
        raise DpkitError(
            f"the process of a simulation ended before its time, with status {status}; "
            "try fewer --jobs: it may have been short of memory"
        ) from error


def main() -> None:
    """Do one job: what `run_side_by_side` starts."""
    from dpkit.errors import describe  # noqa: PLC0415 - only the process itself needs it
    from dpkit.imports import import_named  # noqa: PLC0415 - likewise

    if not signal_when_parent_dies(signal.SIGKILL, int(sys.argv[1])):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to hear, which then ends this
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a policy prints is no word of ours

    def say(kind: str, word: object) -> None:
        pickle.dump((kind, word), out)
        out.flush()

    try:
        work, job = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own parent's
    except (EOFError, pickle.UnpicklingError):  # which was interrupted
        return
    module, _, name = work.partition(":")
    try:
        found = getattr(import_named(module), name)(*job, lambda done: say("at", done))
    except Exception as error:  # noqa: BLE001 - the parent's to tell
        say("failed", str(error) if isinstance(error, DpkitError) else describe(error))
    else:
        say("done", found)


if __name__ == "__main__":
    main()
