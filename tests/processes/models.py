"""Models for engines in processes, that do as their prompts say: each child imports them anew.

What is to go wrong is the beginning of a prompt, up to a colon: ``raise:hello`` breaks at its third
token, ``RAISE:hello`` at its first. All else is echo.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dpkit.engine.models.echo import EchoModel
from dpkit.errors import OutOfMemory
from dpkit.messages import StepResult

if TYPE_CHECKING:
    from dpkit.messages import Batch

FOR_EVER_S = 1000
STEP_S = 0.005

FLAGS = "DPKIT_TEST_FLAGS"
"""Environment variable: a folder that models of all processes of a test can see."""


def first_time(what: str) -> bool:
    """Whether nobody has asked for this before, in whatever process."""
    try:
        (Path(os.environ[FLAGS]) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def is_head() -> bool:
    """Whether a cluster is opened in this process, which makes a model for its tokenizer only."""
    return "dpkit.nursery.cluster" in sys.modules


def hold_the_gil() -> None:
    """Sleep in C without letting Python's other threads run, as a busy extension may."""
    ctypes.PyDLL(None).sleep(FOR_EVER_S)


def _raise() -> None:
    raise RuntimeError("this model broke")


ORDERS = {
    "raise": _raise,
    "exit": lambda: os._exit(3),
    "segv": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "hang": lambda: time.sleep(FOR_EVER_S),
    "gil": hold_the_gil,
    "spin": lambda: [None for _ in iter(int, 1)],
}


def _obey(batch: Batch) -> None:
    for row in batch.rows:
        order, colon, _ = bytes(row.prompt_token_ids[:8]).partition(b":")
        if colon and row.output_index == (0 if order.isupper() else 2):
            ORDERS[order.decode().lower()]()


class Obedient(EchoModel):
    """Each step takes 5 ms in the engine's thread; some prompts are orders."""

    inline: ClassVar[bool] = False

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        _obey(batch)
        time.sleep(STEP_S)
        return super().execute(batch, cache)


class Inline(Obedient):
    """The same on Trio's thread of the engine's process."""

    inline: ClassVar[bool] = True


class Paced(EchoModel):
    """Each step lasts 5 ms, and nothing goes wrong."""

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        return StepResult(sampled=super().execute(batch, cache).sampled, duration_s=STEP_S)


class Ponderous(EchoModel):
    """Each step holds the GIL for most of the time that it may take in `test_stuck`."""

    inline: ClassVar[bool] = False

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        ctypes.PyDLL(None).usleep(300_000)
        return super().execute(batch, cache)


class HangsAndSays(EchoModel):
    """Never has its cache if that has seven blocks, and says so."""

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        if num_blocks == 7:
            print("allocates\nand waits", flush=True)
            time.sleep(FOR_EVER_S)
        return super().allocate(num_blocks=num_blocks, block_size=block_size)


class HangsInAllocate(EchoModel):
    """If its cache has seven blocks, and in its first life only."""

    inline: ClassVar[bool] = False

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        if num_blocks == 7 and first_time("allocate"):
            while True:
                pass
        return super().allocate(num_blocks=num_blocks, block_size=block_size)


class BreaksInAllocate(EchoModel):
    """In each life."""

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        del num_blocks, block_size
        life = next(number for number in itertools.count() if first_time(f"life {number}"))
        raise MemoryError(f"no memory, life {life}")


class Oversized(EchoModel):
    """Finds its cache too large."""

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        raise OutOfMemory(f"{num_blocks * block_size} tokens do not fit")


class DiesInAllocate(EchoModel):
    """If its cache has as many blocks as the file "victim" says."""

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        if (Path(os.environ[FLAGS]) / "victim").read_text() == str(num_blocks):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().allocate(num_blocks=num_blocks, block_size=block_size)


class DiesWhileLoading(EchoModel):
    """As by a kernel that is out of memory."""

    def __init__(self) -> None:
        if not is_head():
            os.kill(os.getpid(), signal.SIGKILL)


class BreaksWhileLoading(EchoModel):
    """Where its weights are, that is not in the process of the test."""

    def __init__(self) -> None:
        if not is_head():
            raise RuntimeError("the file is damaged")


class HangsWhileLoading(EchoModel):
    """As from a network that is gone."""

    def __init__(self) -> None:
        if not is_head():
            print("loads", flush=True)
            time.sleep(FOR_EVER_S)


class Breathless(EchoModel):
    """Computes in its engine's thread, and says so at its first step."""

    inline: ClassVar[bool] = False

    def execute(self, batch: Batch, cache: Any) -> StepResult:
        if first_time("step"):
            print("serves", flush=True)
        return super().execute(batch, cache)


class Choosy(EchoModel):
    """Is loaded once, and takes any cache but one of seven blocks."""

    def __init__(self) -> None:
        if not is_head() and not first_time("loaded"):
            raise RuntimeError("the file has been moved")

    def allocate(self, *, num_blocks: int, block_size: int) -> Any:
        if num_blocks == 7:
            raise MemoryError("seven blocks do not fit")
        return super().allocate(num_blocks=num_blocks, block_size=block_size)
