"""No head, no work: whatever happens to the program, nothing that it started stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dpkit
from dpkit.testing.processes import descendants, is_alive

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = Path(__file__).with_name("head.py")

SIZES = {
    "importing": 2,  # the zygote and its keeper
    "preparing": 3,  # and its child
    "spawning": 3,
    "serving": 2 + 3 * 3,
    "stubborn": 2 + 3 * 3,
    "spawned": 3 * 3,
    "forked": 2 + 3 * 2 + 1,
    "watching": 2 + 3 * 2,
    "ending": 1,  # the folder's process
}
"""Phases of the program, and how many processes are below it then."""


@contextmanager
def running(phase: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], set[int]]]:
    """The program in its phase, leader of a group of its own, and all that it started."""
    workers = 1 if phase in {"importing", "preparing", "spawning", "ending"} else 3
    files = [folder / str(number) for number in range(workers)]
    command = [sys.executable, str(HEAD), phase, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(Path(dpkit.__file__).parents[1])}
    with subprocess.Popen(
        command, start_new_session=True, env=environment, stderr=subprocess.DEVNULL
    ) as process:
        try:
            wait_until(lambda: all(file.exists() for file in files))
            wait_until(lambda: len(descendants(process.pid)) == SIZES[phase])
            yield process, descendants(process.pid)
        finally:
            process.kill()


def wait_until(holds) -> None:
    """Wait; the limit is the test's own."""
    while not holds():
        time.sleep(0.005)


def none_alive(family: set[int]) -> bool:
    """Whether all are gone or zombies, by their state: a zombie still answers signal 0."""
    return not any(is_alive(pid) for pid in family)


@pytest.mark.parametrize("phase", [phase for phase in SIZES if phase != "forked"])
def test_F01_nothing_outlives_a_parent_that_is_killed(phase: str, tmp_path: Path) -> None:  # noqa: N802
    with running(phase, tmp_path) as (process, family):
        process.kill()
        process.wait()
        wait_until(lambda: none_alive(family))


def test_F01_nor_if_a_fork_of_the_parent_holds_every_lifeline(tmp_path: Path) -> None:  # noqa: N802
    with running("forked", tmp_path) as (process, family):
        held = int((tmp_path / "held").read_text())
        process.kill()
        process.wait()
        try:
            wait_until(lambda: none_alive(family - {held}))
            assert is_alive(held), "it is the program's own, and no worker"
        finally:
            os.kill(held, signal.SIGKILL)


def test_the_folder_for_sockets_goes_with_a_parent_that_is_killed_as_it_ends(
    tmp_path: Path,
) -> None:
    with running("ending", tmp_path) as (process, family):
        folder, [guard] = Path((tmp_path / "0").read_text()), family
        wait_until(lambda: Path(f"/proc/{guard}/comm").read_text() == "dpkit folder\n")
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # all of a service get one
            os.kill(guard, signum)
        assert (folder / "socket").exists()
        process.kill()
        process.wait()
        wait_until(lambda: not folder.exists())
        wait_until(lambda: none_alive(family))


@pytest.mark.parametrize("phase", ["preparing", "serving", "stubborn", "ending"])
def test_G08_ctrl_c_in_any_phase_leaves_nothing(phase: str, tmp_path: Path) -> None:  # noqa: N802
    with running(phase, tmp_path) as (process, family):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        process.wait()
        assert none_alive(family)


def test_G08_a_second_ctrl_c_breaks_no_clean_up(tmp_path: Path) -> None:  # noqa: N802
    with running("stubborn", tmp_path) as (process, family):
        for _ in range(5):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.02)
        process.wait()
        assert none_alive(family)
