"""`dpkit run` is killed, or asked to end, whatever it is at: no process is left, and no socket.

Real programs: what they leave behind is looked for by a mark in their environment, so that nothing
is overlooked that was started in the meantime or has another parent by now.
"""

# ruff: noqa: N802 - the reports' numbers are capitals
from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import frozen

from dpkit.testing.processes import is_alive
from tests.processes.lab import MODELS, group
from tests.processes.models import FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MARK = "DPKIT_TEST_MARK"
GONE_WITHIN_S = 2.0
LIMIT_S = 15.0
LINGERING = str(Path(__file__).with_name("lingering.py"))

PHASES = {
    "imports": ("echo", ""),
    "loads": ("HangsWhileLoading", "loads"),
    "starts": ("HangsAndSays", "and waits"),
    "serves": ("Breathless", "serves"),
}
"""The model with which a program stays in that phase, and what is said there."""


@frozen
class Program:
    """One `dpkit run`, and what it may leave behind."""

    process: subprocess.Popen[bytes]
    mark: str
    output: Path
    folder: Path

    def family(self) -> list[int]:
        """Every living process that has come of it, but for itself."""
        return [pid for pid in _marked(self.mark) if pid != self.process.pid]

    def wait_for(self, said: str) -> None:
        """Wait until it, or a process of its, says something; for nothing, until one imports."""
        deadline = time.monotonic() + LIMIT_S
        while said not in self.output.read_text() if said else len(self.family()) < 2:
            assert time.monotonic() < deadline, f"no {said!r}: {self.output.read_text()}"
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.001)

    def check_nothing_left(self) -> None:
        """Check that all is gone in time, sockets too."""
        deadline = time.monotonic() + GONE_WITHIN_S
        while left := self.family():
            assert time.monotonic() < deadline, [_command(pid) for pid in left]
            time.sleep(0.005)
        assert not list(self.folder.rglob("*"))


def _marked(mark: str) -> Iterator[int]:
    entry = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if entry in environment.split(b"\0") and is_alive(int(folder.name)):
            yield int(folder.name)


def _command(pid: int) -> str:
    try:
        return f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}"
    except OSError:
        return f"{pid}"


@contextmanager
def running(
    tmp_path: Path,
    flags: Path,
    model: str,
    process: str,
    terminal: int = subprocess.DEVNULL,
    arguments: Sequence[str] = (),
) -> Iterator[Program]:
    """Start it, with a folder for temporary files of its own; killed at the end, come what may."""
    config, output, folder = tmp_path / "dpkit.toml", tmp_path / "output", tmp_path / "run"
    folder.mkdir()
    blocks = 7 if model == "HangsAndSays" else 10_000
    more = f"kv.num_blocks = {blocks}"
    config.write_text(group(model=model, count=3, process=process, more=more))
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TMPDIR": str(folder),
        FLAGS: str(flags),
        MARK: tmp_path.name,
    }
    endless = ["--prompt", "without end", "--max-tokens", "100000"]
    arguments = arguments or ["-m", "dpkit", "run", str(config), *endless * 6]
    with (
        output.open("wb") as sink,
        subprocess.Popen(
            [sys.executable, *arguments],
            stdin=terminal,
            stdout=sink,
            stderr=sink,
            env={**os.environ, **environment},
            start_new_session=True,  # or else it could have no terminal of its own
            preexec_fn=None if terminal < 0 else _take_terminal,  # noqa: PLW1509 - one thread here
        ) as process_,
    ):
        try:
            yield Program(process_, tmp_path.name, output, folder)
        finally:
            process_.kill()


def _take_terminal() -> None:
    """Make standard input the terminal whose Ctrl-C is for this session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize(
    "process", ["", pytest.param('start = "spawn", transport = "tcp"', marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("phase", PHASES)
def test_F01_F02_a_head_that_is_killed_leaves_no_process_and_no_socket(
    tmp_path: Path, flags: Path, phase: str, process: str
) -> None:
    model, said = PHASES[phase]
    with running(tmp_path, flags, model, process) as program:
        program.wait_for(said)
        program.process.kill()
        program.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("process", ["", 'start = "spawn", transport = "tcp"'])
@pytest.mark.parametrize("delay_ms", range(0, 1500, 60))
def test_F01_at_whatever_moment(tmp_path: Path, flags: Path, delay_ms: int, process: str) -> None:
    with running(tmp_path, flags, "Breathless", process) as program:
        time.sleep(delay_ms / 1000)
        program.process.kill()
        program.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("process", ["", 'start = "spawn"'])
@pytest.mark.parametrize("delay_ms", range(0, 120, 20))
def test_F01_at_whatever_moment_of_its_end(
    tmp_path: Path, flags: Path, delay_ms: int, process: str
) -> None:
    with running(tmp_path, flags, "Breathless", process) as program:
        program.wait_for("serves")
        program.process.send_signal(signal.SIGINT)
        program.process.send_signal(signal.SIGTERM)
        time.sleep(delay_ms / 1000)
        program.process.kill()
        program.check_nothing_left()


def test_F01_whose_processes_have_ended_and_who_is_then_killed_leaves_no_socket(
    tmp_path: Path, flags: Path
) -> None:
    with running(tmp_path, flags, "echo", "", arguments=[LINGERING]) as program:
        program.wait_for("lets go")
        deadline = time.monotonic() + LIMIT_S
        while any("keep" in _command(pid) for pid in program.family()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert list(program.folder.iterdir())
        program.process.kill()
        program.check_nothing_left()


def test_who_stops_a_start_is_told_that_nothing_was_answered(tmp_path: Path, flags: Path) -> None:
    model, said = PHASES["loads"]
    with running(tmp_path, flags, model, "") as program:
        program.wait_for(said)
        program.process.send_signal(signal.SIGINT)
        assert program.process.wait(LIMIT_S) == 128 + signal.SIGINT
        last = program.output.read_text().splitlines()[-1]
        assert last == f"stopped while loading {MODELS}:{model}; nothing was answered"
        program.check_nothing_left()


@pytest.mark.parametrize(
    "phase",
    [
        "loads",
        "serves",
        pytest.param("imports", marks=pytest.mark.slow),
        pytest.param("starts", marks=pytest.mark.slow),
    ],
)
def test_G08_ctrl_c_twice_ends_it_whatever_it_is_at(
    tmp_path: Path, flags: Path, phase: str
) -> None:
    """In a terminal, which signals all that are in its foreground: engines must not hear of it."""
    model, said = PHASES[phase]
    keyboard, terminal = os.openpty()
    try:
        with running(tmp_path, flags, model, "", terminal) as program:
            program.wait_for(said)
            os.write(keyboard, b"\x03")
            time.sleep(0.1)
            os.write(keyboard, b"\x03")
            code = program.process.wait(LIMIT_S)
            assert code in {130, -signal.SIGINT}, program.output.read_text()
            program.check_nothing_left()
            assert "Traceback" not in program.output.read_text()
    finally:
        os.close(keyboard)
        os.close(terminal)
