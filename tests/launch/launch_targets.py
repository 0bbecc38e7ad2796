"""What zygotes and workers of these tests run."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from dpkit.errors import ConfigError, ModelNotFound, Overloaded
from dpkit.launch.lifeline import lifeline_fd, watch_lifeline


def prepare(**args: Any) -> dict[str, Any]:
    return {"pid": os.getpid(), **args}


def count(path: str) -> dict[str, Any]:
    """Prepare, and leave a mark each time."""
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(0.1)
    return {}


def count_but_once(path: str) -> dict[str, Any]:
    """Prepare, but fail when it was done before."""
    if Path(path).exists():
        raise ModelNotFound("it is used up")
    return count(path)


def fail(kind: str) -> NoReturn:
    raise {
        "not_found": ModelNotFound("not here; try there"),
        "config": ConfigError(["first", "second"]),
        "overloaded": Overloaded("full", retry_after=1.0),
        "value": ValueError("nonsense"),
        "own": OwnError("mine"),
        "exit": SystemExit(5),
        "long": ValueError("x" * 1_000_000),
    }[kind]


class OwnError(ModelNotFound):
    """An error that the head does not know, of a kind that it does."""


def crash() -> NoReturn:
    """Die in native code."""
    print("about to crash", flush=True)
    ctypes.string_at(0)
    raise AssertionError


def die() -> NoReturn:
    print("about to die")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hang_with_child(path: str) -> NoReturn:
    """Prepare for ever, and have a child in another session."""
    subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True)
    Path(path).touch()
    time.sleep(1000)
    raise AssertionError


def forbid_forks(many: int) -> None:
    """Have the next few forks fail, as where a user may have no more processes."""
    fork = os.fork
    left = iter(range(many))

    def refuse_or_fork() -> int:
        if next(left, None) is not None:
            raise BlockingIOError(errno.EAGAIN, "there are no processes left")
        return fork()

    os.fork = refuse_or_fork


def hold_descriptors(left: int) -> Any:
    """Hold all descriptors but few."""
    limit = os.dup(2) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    held = []
    while True:
        try:
            held.append(os.dup(2))
        except OSError:
            break
    for _ in range(left):
        os.close(held.pop())
    return held


def leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def serve(state: Any, path: str | None = None) -> NoReturn:
    if path is not None:
        Path(path).touch()
    time.sleep(1000)
    raise AssertionError


def serve_with_child(_: Any, path: str) -> NoReturn:
    subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True)
    serve(None, path)


def nest(_: Any, path: str, depth: int) -> NoReturn:
    """Be the first of many generations, each in a session of its own."""
    if depth == 0:
        serve(None, path)
    if os.fork() == 0:
        os.setsid()
        nest(None, path, depth - 1)
    serve(None)


def serve_stubbornly(_: Any, path: str) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve_with_child(None, path)


def say(state: Any, *words: str, **more: str) -> None:
    for word in [*words, *more.values()]:
        print(word)


def compare(state: Any, word: str) -> None:
    print(len(word), state["word"] == word)


def say_bytes(_: Any, hexadecimal: str) -> None:
    os.write(2, bytes.fromhex(hexadecimal))


def flood(_: Any, lines: int) -> None:
    for number in range(lines):
        print("line", number, file=sys.stderr)


def report(state: Any) -> None:
    threads = len(list(Path("/proc/self/task").iterdir()))
    environment = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MINE")}
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGCHLD)]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    default = [signal.SIG_DFL, signal.SIG_DFL]
    print(f"{threads} thread, {environment}, {handlers == default}, {sorted(blocked)}")
    print(sorted(os.listdir("/proc/self/fd"), key=int)[:-1])  # noqa: PTH208 - the last is its own


def report_what_a_child_inherits(_: Any) -> None:
    program = "import os; print(len(os.listdir('/proc/self/fd')))"
    subprocess.run([sys.executable, "-c", program], close_fds=False, check=True)


def watch(_: Any, path: str) -> None:
    import trio  # noqa: PLC0415 - the others do without

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_lifeline)
            await trio.sleep(0.01)
            await trio.Path(path).touch()

    assert lifeline_fd() > 2
    trio.run(main)


def exit_with(_: Any, code: Any) -> NoReturn:
    raise SystemExit(code)
