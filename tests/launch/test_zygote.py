"""The zygote prepares once; its workers have what it prepared, and none disturbs another."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from dpkit.errors import ConfigError, DpkitError, LaunchFailed, ModelNotFound
from dpkit.launch.tether import Ends, Tether, open_tether
from dpkit.launch.zygote import Zygote, _Life, open_zygote
from dpkit.testing.processes import descendants, is_alive

HERE = "launch_targets"


async def lines_of(zygote: Zygote, work: str, args: dict[str, Any] | None = None) -> list[str]:
    async with zygote.open_worker(f"{HERE}:{work}", args, name="worker") as worker:
        assert await worker.wait() == 0, worker.last_lines
        return list(worker.last_lines)


async def test_eight_workers_share_what_was_prepared_once(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    async with open_zygote(f"{HERE}:count", {"path": str(marks)}, name="zygote") as zygote:
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(lines_of, zygote, "report")
        assert marks.read_text() == f"{zygote.pid}\n"


async def test_a_worker_has_one_thread_its_own_environment_and_signals_as_a_program_has() -> None:
    env = {"MINE": "yes"}
    async with open_zygote(f"{HERE}:prepare", name="zygote", env=env) as zygote:
        facts, descriptors = await lines_of(zygote, "report")
    assert facts == "1 thread, {'OMP_NUM_THREADS': '1', 'MINE': 'yes'}, True, []"
    assert len(eval(descriptors)) == 4, "standard ones and the lifeline"  # noqa: S307


async def test_opening_a_zygote_changes_nothing_in_the_host() -> None:
    signals = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}
    before = {each: signal.getsignal(each) for each in signals}
    threads = threading.active_count()
    children = descendants(os.getpid())
    async with (
        open_zygote(f"{HERE}:prepare", name="zygote") as zygote,
        zygote.open_worker(f"{HERE}:serve", name="worker"),
    ):
        assert threading.active_count() == threads
        assert len(descendants(os.getpid()) - children) == 4  # two, and their keepers
    assert {each: signal.getsignal(each) for each in signals} == before
    assert descendants(os.getpid()) == children


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("not_found", ModelNotFound, "^not here; try there$"),
        ("config", ConfigError, "^first\nsecond$"),
        ("overloaded", DpkitError, "^full$"),
        ("own", ModelNotFound, "^mine$"),
        ("value", LaunchFailed, "^zygote: ValueError: nonsense; it exited with status 1; .*Trace"),
        ("exit", LaunchFailed, "^zygote: SystemExit: 5; it exited"),
        ("long", LaunchFailed, "^zygote: ValueError: xxxx"),
    ],
)
async def test_errors_of_preparing_are_typed(kind: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"(?s){text}") as caught:
        async with open_zygote(f"{HERE}:fail", {"kind": kind}, name="zygote"):
            pass
    assert type(caught.value) is error
    if isinstance(caught.value, ConfigError):
        assert caught.value.problems == ("first", "second")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("die", "did not become ready; it was killed by SIGKILL; its last words:\n  about to die"),
        ("crash", r"it was killed by SIGSEGV; its last words:\n  about to crash\n  Fatal Python"),
        ("nowhere", "AttributeError: module 'launch_targets' has no attribute 'nowhere'"),
    ],
)
async def test_a_process_that_dies_in_preparing_says_how_and_its_last_words(
    target: str, text: str
) -> None:
    with pytest.raises(LaunchFailed, match=text):
        async with open_zygote(f"{HERE}:{target}", name="zygote"):
            pass


async def test_what_no_other_process_can_be_told_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="not JSON"):
        async with open_zygote(f"{HERE}:prepare", {"it": object()}, name="zygote"):
            pass
    with pytest.raises(ValueError, match="too many"):
        async with open_zygote(f"{HERE}:prepare", {"it": "x" * 200_000}, name="zygote"):
            pass
    for target in ("__main__:prepare", "prepare", "a.b:c.d", "", "a b:c"):
        with pytest.raises(ValueError, match=r'zygote: .* try "pkg.mod:function"'):
            async with open_zygote(target, name="zygote"):
                pass


async def test_large_arguments_arrive_whole() -> None:
    word = "ä\0\N{SNAKE}" * 5_000
    async with open_zygote(f"{HERE}:prepare", {"word": word}, name="zygote") as zygote:
        assert await lines_of(zygote, "compare", {"word": word}) == ["15000 True"]


async def test_opening_is_cancelled_at_once(tmp_path: Path, until: Any) -> None:
    path = tmp_path / "hangs"
    children = descendants(os.getpid())
    async with trio.open_nursery() as nursery:

        async def never() -> None:
            args = {"path": str(path)}
            async with open_zygote(f"{HERE}:hang_with_child", args, name="zygote"):
                raise AssertionError

        nursery.start_soon(never)
        await until(path.exists)
        assert len(descendants(os.getpid()) - children) == 3
        nursery.cancel_scope.cancel()
    assert descendants(os.getpid()) == children


async def test_the_next_worker_after_a_zygotes_death_has_a_new_one(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    async with open_zygote(f"{HERE}:count", {"path": str(marks)}, name="zygote") as zygote:
        first = zygote.pid
        assert first is not None
        async with zygote.open_worker(f"{HERE}:serve", name="old") as old:
            os.kill(first, signal.SIGKILL)
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(lines_of, zygote, "report")
            assert await old.wait() == -signal.SIGKILL
            assert not is_alive(old.pid)
        assert marks.read_text() == f"{first}\n{zygote.pid}\n", "one start, for all who waited"


async def test_a_zygote_that_does_not_come_back_says_why_to_all_who_wait(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    errors = []
    async with open_zygote(f"{HERE}:count_but_once", {"path": str(marks)}, name="zygote") as zygote:
        assert zygote.pid is not None
        os.kill(zygote.pid, signal.SIGKILL)

        async def ask() -> None:
            with pytest.raises(ModelNotFound, match="used up") as caught:
                await lines_of(zygote, "report")
            errors.append(caught.value)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
        assert len({id(error) for error in errors}) == 3
        marks.unlink()
        assert await lines_of(zygote, "say", {"word": "there again"}) == ["there again"]


async def test_waiting_for_a_zygote_can_be_given_up_and_the_start_goes_on(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    async with open_zygote(f"{HERE}:count", {"path": str(marks)}, name="zygote") as zygote:
        assert zygote.pid is not None
        os.kill(zygote.pid, signal.SIGKILL)
        with trio.move_on_after(0.01) as scope:
            await lines_of(zygote, "report")
        assert scope.cancelled_caught
        await lines_of(zygote, "report")
        assert len(marks.read_text().split()) == 2


async def test_a_start_of_a_worker_that_is_cancelled_leaves_nothing(until: Any) -> None:
    async with open_zygote(f"{HERE}:prepare", name="zygote") as zygote:
        children = descendants(os.getpid())
        for delay in (0, 0.001, 0.002, 0.004, 0.008):
            with trio.move_on_after(delay):
                async with zygote.open_worker(f"{HERE}:serve", name="worker"):
                    await trio.sleep(delay)
        await until(lambda: descendants(os.getpid()) == children)


async def test_threads_that_preparing_left_are_told(caplog: pytest.LogCaptureFixture) -> None:
    async with open_zygote(f"{HERE}:leave_a_thread", name="zygote") as zygote:
        await lines_of(zygote, "report")
    assert "preparing left 1 thread(s) behind" in caplog.text
    assert 'open_spawner, or for engines process.start = "spawn"' in caplog.text


async def test_when_memory_runs_out_the_kernel_takes_a_worker_first() -> None:
    def score(pid: int | None) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    async with (
        open_zygote(f"{HERE}:prepare", name="zygote") as zygote,
        zygote.open_worker(f"{HERE}:serve", name="worker") as worker,
    ):
        assert score(worker.pid) > score(zygote.pid) == score(os.getpid())


async def test_workers_end_before_a_zygote_that_is_closed_does() -> None:
    async with (
        trio.open_nursery() as nursery,
        open_zygote(f"{HERE}:prepare", name="zygote") as zygote,
    ):
        statuses = []

        async def use(task_status: trio.TaskStatus[None]) -> None:
            async with zygote.open_worker(f"{HERE}:serve", name="worker") as worker:
                task_status.started()
                statuses.append(await worker.wait())

        await nursery.start(use)
    assert statuses == [-signal.SIGKILL]


async def test_a_closed_zygote_opens_no_workers() -> None:
    async with open_zygote(f"{HERE}:prepare", name="zygote") as zygote:
        pass
    assert zygote.pid is None
    with pytest.raises(RuntimeError, match="zygote zygote is closed"):
        await lines_of(zygote, "report")


@pytest.mark.parametrize(
    ("asks", "message"),
    [(False, "^the zygote has ended$"), (True, "^the zygote has ended: .*Broken pipe$")],
    ids=["before", "at that moment"],
)
async def test_who_asks_a_zygote_that_has_ended_is_told_so(asks: bool, message: str) -> None:
    life = _Life()

    async def launch(_: Tether, ends: Ends) -> None:
        await life.fork(b"a worker, please", ends)

    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    its.close()
    with ours:
        life._requests = ours if asks else None
        with pytest.raises(LaunchFailed, match=message):
            async with open_tether("worker", launch, grace=0):
                pass


async def test_repr_tells_the_state() -> None:
    async with open_zygote(f"{HERE}:prepare", name="zy") as zygote:
        assert repr(zygote) == f"<Zygote zy pid {zygote.pid}>"
        async with zygote.open_worker(f"{HERE}:serve", name="w") as worker:
            assert repr(worker) == f"<Worker w pid {worker.pid}: alive>"
            assert worker.name == "w"
            worker.kill()
            assert str(await worker.wait()) == "was killed by SIGKILL"
    assert repr(worker) == f"<Worker w pid {worker.pid}: was killed by SIGKILL>"


@pytest.mark.parametrize("inner", ["open_zygote", "open_spawner"])
async def test_a_program_that_its_own_zygote_imports_does_not_start_processes_without_end(
    inner: str, caplog: pytest.LogCaptureFixture
) -> None:
    env = {"UNGUARDED": "1", **({"SPAWN": "1"} if inner == "open_spawner" else {})}
    with pytest.raises(
        LaunchFailed,
        match=rf"RuntimeError: {inner} was called while unguarded is being imported: .*"
        r'`trio.run\(main\)`, under `if __name__ == "__main__":`',
    ):
        async with open_zygote("unguarded:prepare", name="zygote", env=env):
            pass
    assert [record.message for record in caplog.records].count("runs") == 1
