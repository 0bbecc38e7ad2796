"""Whatever a block leaves behind is told by its name, and what was there before is not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
import trio

from dpkit.testing.leaks import Leaked, leak_check

if TYPE_CHECKING:
    from trio.testing import MockClock


def test_a_block_that_leaves_nothing_passes() -> None:
    with leak_check():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


def test_a_thread_is_told_by_its_name() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    with pytest.raises(Leaked, match="left behind: thread forgotten"), leak_check():
        thread.start()
    stop.set()
    thread.join()


async def test_a_thread_whose_waiter_left_on_the_virtual_clock_may_end(
    autojump_clock: MockClock,
) -> None:
    with leak_check():
        go_on = threading.Event()
        with trio.move_on_after(5):
            await trio.to_thread.run_sync(go_on.wait, abandon_on_cancel=True)
        threading.Timer(0.05, go_on.set).start()


def test_a_descriptor_is_told_by_what_it_is() -> None:
    with pytest.raises(Leaked, match=r"descriptor \d+:/dev/null"), leak_check():
        descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)


def test_a_child_is_told() -> None:
    with pytest.raises(Leaked, match="child "), leak_check():
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.communicate()


async def test_a_task_is_told() -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(Leaked, match="1 tasks"), leak_check():
            nursery.start_soon(trio.sleep_forever)
        nursery.cancel_scope.cancel()


def test_what_is_meant_to_stay_can_be_named() -> None:
    with leak_check(ignore=["/dev/null"]):
        descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)


def test_the_error_of_the_block_comes_first() -> None:
    descriptors = []

    def fail() -> None:
        descriptors.append(os.open(os.devnull, os.O_RDONLY))
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), leak_check():
        fail()
    os.close(descriptors.pop())
