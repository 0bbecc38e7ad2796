"""A worker, whichever launcher started it: how it ends, what it says, what it is told."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from dpkit.errors import LaunchFailed, ModelNotFound
from dpkit.launch.lifeline import lifeline_fd, watch_lifeline
from dpkit.launch.linux import signal_when_parent_dies
from dpkit.launch.notes import (
    LIMIT,
    Born,
    Ended,
    Failed,
    Job,
    Ready,
    decode_answer,
    decode_job,
    encode,
    encode_job,
)
from dpkit.launch.output import KEPT, LONGEST, Output
from dpkit.launch.process import ExitStatus
from dpkit.launch.spawn import open_spawner
from dpkit.launch.zygote import open_zygote

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HERE = "launch_targets"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with status 0"),
        (1, "exited with status 1"),
        (-9, "was killed by SIGKILL"),
        (-6, "was killed by SIGABRT"),
        (-40, "was killed by signal 40"),
    ],
)
def test_a_status_says_how_a_process_ended(code: int, text: str) -> None:
    status = ExitStatus(code)
    assert str(status) == f"{status}" == text
    assert status == code == status.code
    assert repr(status) == f"ExitStatus({code})"


@pytest.mark.parametrize(
    ("code", "status", "lines"),
    [(None, 0, ()), (3, 3, ()), (300, 300 % 256, ()), ("the reason", 1, ("the reason",))],
)
async def test_leaving_by_system_exit_ends_as_it_does_in_any_program(
    code: Any, status: int, lines: tuple[str, ...]
) -> None:
    async with open_zygote(f"{HERE}:prepare", name="zygote") as zygote:
        async with zygote.open_worker(f"{HERE}:exit_with", {"code": code}, name="w") as worker:
            assert await worker.wait() == status
        assert worker.last_lines == lines


async def test_each_spawned_worker_prepares_for_itself_and_opening_prepares_nothing(
    tmp_path: Path,
) -> None:
    marks = tmp_path / "marks"
    async with open_spawner(f"{HERE}:count", {"path": str(marks)}, name="spawner") as spawner:
        assert not marks.exists()
        for _ in range(2):
            async with spawner.open_worker(f"{HERE}:report", name="worker") as worker:
                assert await worker.wait() == 0
        assert len(set(marks.read_text().split())) == 2


async def test_errors_of_preparing_come_out_where_a_spawned_worker_is_opened() -> None:
    async with open_spawner(f"{HERE}:fail", {"kind": "own"}, name="spawner") as spawner:
        with pytest.raises(ModelNotFound, match=r"^mine$"):
            async with spawner.open_worker(f"{HERE}:report", name="worker"):
                pass


@pytest.mark.parametrize("opener", [open_zygote, open_spawner])
async def test_what_a_worker_starts_inherits_nothing_of_ours(opener: Any) -> None:
    work = f"{HERE}:report_what_a_child_inherits"
    async with (
        opener(f"{HERE}:prepare", name="launcher") as launcher,
        launcher.open_worker(work, name="worker") as worker,
    ):
        assert await worker.wait() == 0
    assert worker.last_lines == ("4",), "standard ones, and the one it looks with"


async def test_the_last_words_are_there_as_soon_as_the_status_is() -> None:
    async with open_zygote(f"{HERE}:prepare", name="zygote") as zygote:
        for number in range(30):
            args = {"word": str(number)}
            async with zygote.open_worker(f"{HERE}:say", args, name="worker") as worker:
                await worker.wait()
                assert worker.last_lines == (str(number),)


async def test_what_a_worker_writes_is_logged_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async with open_zygote(f"{HERE}:prepare", name="zygote") as zygote:
        args = {"one": "first", "two": "second"}
        async with zygote.open_worker(f"{HERE}:say", args, name="engine-0") as worker:
            await worker.wait()
            assert worker.last_lines == ("first", "second")
    said = [record for record in caplog.records if record.name == "dpkit.worker.engine-0"]
    assert [record.message for record in said] == ["first", "second"]
    assert {record.levelno for record in said} == {logging.WARNING}


async def test_lines_of_a_workers_own_logging_keep_their_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "dpkit")
    args = {"a": "INFO:app:hello", "b": "ERROR app: oh", "c": "DEBUGGING", "d": "INFORMATION"}
    async with (
        open_zygote(f"{HERE}:prepare", name="zygote") as zygote,
        zygote.open_worker(f"{HERE}:say", args, name="engine-0") as worker,
    ):
        await worker.wait()
    levels = [each.levelname for each in caplog.records if each.name == "dpkit.worker.engine-0"]
    assert levels == ["INFO", "ERROR", "WARNING", "WARNING"]


async def test_a_worker_never_writes_to_the_hosts_own_output(capfd: Any) -> None:
    async with (
        open_zygote(f"{HERE}:prepare", name="zygote") as zygote,
        zygote.open_worker(f"{HERE}:say", {"it": "hello"}, name="w") as worker,
    ):
        await worker.wait()
    assert capfd.readouterr() == ("", "")


async def test_of_a_flood_the_last_lines_are_kept_and_nobody_else_waits() -> None:
    async with open_zygote(f"{HERE}:prepare", name="zygote") as zygote:
        async with zygote.open_worker(f"{HERE}:flood", {"lines": 10_000}, name="w") as worker:
            with trio.fail_after(5):
                await worker.wait()
        expected = tuple(f"line {number}" for number in range(10_000 - KEPT, 10_000))
        assert worker.last_lines == expected


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (b"whole\n", ["whole"]),
        (b"one\n\ntwo", ["one", "", "two"]),
        (
            b"caf\xc3\xa9 \xff\n",
            ["caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{REPLACEMENT CHARACTER}"],
        ),
        (b"x" * (LONGEST + 1) + b"\n", ["x" * LONGEST, "x"]),
        (b"y" * (LONGEST + 1), ["y" * LONGEST, "y"]),
        (b"", []),
    ],
)
async def test_lines_are_lines_whatever_was_written(written: bytes, lines: list[str]) -> None:
    reader, writer = os.pipe()
    output = Output(reader, "test")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(output.relay)
        for start in range(0, len(written), 1000):
            os.write(writer, written[start : start + 1000])
            await trio.lowlevel.checkpoint()
        os.close(writer)
    assert list(output.lines) == lines
    output.close()


async def test_a_process_without_a_lifeline_is_told_so() -> None:
    with pytest.raises(RuntimeError, match="no lifeline"):
        lifeline_fd()


async def test_a_watched_lifeline_disturbs_no_worker(tmp_path: Path, until: Any) -> None:
    async with open_zygote(f"{HERE}:prepare", name="zygote") as zygote:
        args = {"path": str(tmp_path / "watches")}
        async with zygote.open_worker(f"{HERE}:watch", args, name="worker") as worker:
            await until((tmp_path / "watches").exists)
            assert worker.status is None


@pytest.mark.parametrize("leads", [True, False], ids=["leads a group", "in another's group"])
async def test_without_a_head_a_worker_kills_its_own_group_and_no_other(
    monkeypatch: pytest.MonkeyPatch, *, leads: bool
) -> None:
    """Who survives that, as only a test can, learns that it is impossible."""
    killed: list[tuple[str, int, int]] = []
    own = os.getpid()
    monkeypatch.setattr(os, "getpgrp", lambda: own if leads else os.getppid())
    monkeypatch.setattr(os, "killpg", lambda group, signum: killed.append(("group", group, signum)))
    monkeypatch.setattr(os, "kill", lambda pid, signum: killed.append(("process", pid, signum)))
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(AssertionError, match=r"^SIGKILL cannot be survived$"):
        await watch_lifeline(reader)
    os.close(reader)
    assert killed == [("group", 0, signal.SIGKILL)] * leads + [("process", own, signal.SIGKILL)]


@pytest.mark.parametrize("opener", [open_zygote, open_spawner])
async def test_an_interpreter_that_is_not_there_is_a_failed_launch(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(LaunchFailed, match=r"starting /nowhere/python failed: .*No such file"):
        async with (
            opener(f"{HERE}:prepare", name="launcher") as launcher,
            launcher.open_worker(f"{HERE}:serve", name="worker"),
        ):
            pass


async def test_an_interpreter_that_ends_at_once_is_a_failed_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    text = "^launcher: did not become ready; it exited with status 1$"
    with pytest.raises(LaunchFailed, match=text):
        async with open_zygote(f"{HERE}:prepare", name="launcher"):
            pass


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Let this process open so many more, and no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = os.open("/", os.O_RDONLY)
    os.close(highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_running_out_of_descriptors_is_a_failed_launch_and_leaks_none() -> None:
    async with open_zygote(f"{HERE}:prepare", name="zygote") as zygote:
        for more in range(9):
            before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
            with few_descriptors(more), pytest.raises(LaunchFailed):
                async with (
                    open_spawner(f"{HERE}:prepare", name="spawner") as spawner,
                    spawner.open_worker(f"{HERE}:serve", name="worker"),
                ):
                    pass
            assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
        async with zygote.open_worker(f"{HERE}:report", name="worker") as worker:
            assert await worker.wait() == 0


async def test_a_worker_for_which_there_are_no_descriptors_says_so() -> None:
    message = r"^worker: there are no descriptors for it: .*Too many open files$"
    async with open_spawner(f"{HERE}:prepare", name="spawner") as spawner:
        with few_descriptors(0), pytest.raises(LaunchFailed, match=message):
            async with spawner.open_worker(f"{HERE}:serve", name="worker"):
                pass


def test_what_the_kernel_refuses_is_told_with_the_call() -> None:
    with pytest.raises(OSError, match=r"prctl\(1\): Invalid argument$"):
        signal_when_parent_dies(1000, os.getppid())


async def test_a_zygote_that_cannot_fork_says_so_and_serves_on() -> None:
    async with open_zygote(f"{HERE}:forbid_forks", {"many": 2}, name="zygote") as zygote:
        pid = zygote.pid
        for _ in range(2):
            with pytest.raises(LaunchFailed, match=r"cannot fork: .*no processes"):
                async with zygote.open_worker(f"{HERE}:serve", name="worker"):
                    pass
        async with zygote.open_worker(f"{HERE}:report", name="worker") as worker:
            assert await worker.wait() == 0
        assert zygote.pid == pid


@pytest.mark.parametrize(
    ("left", "text"), [(0, "zygote has no descriptors left"), (2, "Too many open files")]
)
async def test_a_zygote_without_descriptors_says_so_and_serves_on(
    left: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_zygote(f"{HERE}:hold_descriptors", {"left": left}, name="zygote") as zygote:
        pid = zygote.pid
        for _ in range(2):
            with pytest.raises(LaunchFailed, match=r"^worker: did not become ready($|; its last)"):
                async with zygote.open_worker(f"{HERE}:serve", name="worker"):
                    pass
        assert zygote.pid == pid
    assert text in caplog.text


def test_notes_are_read_as_they_were_written() -> None:
    job = Job("name", "a:b", {"x": [1, 2.5, None, "\ud800"]}, "c:d", {})
    assert decode_job(encode_job(job)) == job
    for answer in (Born(7), Ready(), Failed(["A", "B"], "text"), Ended(-9)):
        assert decode_answer(encode(answer)) == answer
    with pytest.raises(ValueError, match=f"limit {LIMIT}"):
        encode(Failed([], "x" * LIMIT))
