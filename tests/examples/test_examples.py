"""Every example runs as a user would run it, and shows what it says it shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *args: str) -> str:
    """Standard output of an example; it must end well and complain of nothing."""
    process = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, *args],
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
        env=os.environ | {"PYTHONPATH": ""},
    )
    assert process.stderr == ""
    assert process.returncode == 0
    return process.stdout


def test_embedding_streams_one_answer_beside_another() -> None:
    first, ended, meanwhile = run("embed.py").splitlines()
    assert re.fullmatch(r"engine-\d: Once upon a time", first)
    assert ended == "ended by stop"
    assert re.fullmatch(r"meanwhile engine-\d answered 'A second request'", meanwhile)
    assert first[:8] not in meanwhile


def test_embedding_takes_a_config_file(tmp_path: Path) -> None:
    config = tmp_path / "dpkit.toml"
    config.write_text('[[engines]]\nname = "mine"\nmodel = "echo"\n')
    assert run("embed.py", str(config), "hello").startswith("mine-0: hello")


def test_cancelling_half_frees_the_ledger_at_once_and_the_engines_a_step_later() -> None:
    lines = run("cancel_half.py").splitlines()
    assert lines[0].endswith("in flight 8, running {'engine-0': 4, 'engine-1': 4}")
    assert "in flight 4" in lines[1]
    running = [int(count) for count in re.findall(r": (\d)[,}]", lines[2])]
    assert "in flight 4" in lines[2]
    assert sum(running) == 4
    assert lines[3].endswith("in flight 0, running {'engine-0': 0, 'engine-1': 0}")


def test_a_custom_model_is_named_in_the_config() -> None:
    assert run("custom_model.py") == "engine-0: abcdefghijklmnopqrstuvwxyz\n"


def test_a_custom_policy_keeps_each_tenant_on_one_engine() -> None:
    lines = run("custom_policy.py").splitlines()
    assert len(lines) == 3
    assert all(re.fullmatch(r"\w+ +\{'engine-\d': 10\}", line) for line in lines)


def test_statistics_can_be_watched_live() -> None:
    out = run("watch_statistics.py")
    assert re.search(r"engine-0: .* 8 running, KV \[#+ *\]", out)
    assert out.endswith("done: 40 requests\n")


def test_a_cluster_lives_beside_asyncio() -> None:
    lines = run("beside_asyncio.py").splitlines()
    assert {line.partition(": ")[2] for line in lines} == {"one", "two", "three"}
    assert {line.partition(": ")[0] for line in lines} == {"engine-0", "engine-1"}


def test_a_cluster_lives_in_a_thread_of_its_own() -> None:
    lines = run("in_a_thread.py").splitlines()
    assert [line.partition(": ")[2] for line in lines] == ["one", "two", "three"]


def test_a_server_writes_each_token_as_it_comes() -> None:
    *answers, books = run("serve_lines.py").splitlines()
    found = [re.fullmatch(r"'(\w+ fish)' came in (\d+) pieces", line) for line in answers]
    assert {each[1] for each in found if each} == {"one fish", "two fish", "red fish"}
    assert all(int(each[2]) > 2 for each in found if each)
    assert books == "3 answers, in flight 0"


def test_a_crash_is_survived_by_every_request() -> None:
    first, *engines = run("survive_a_crash.py").splitlines()
    assert first == "4 of 4 answers are whole"
    assert sorted(line.partition(": ")[2] for line in engines) == [
        "ready, 0 restarts",
        "ready, 1 restart",
    ]


def test_a_worker_that_hangs_is_killed_and_replaced() -> None:
    assert run("killable_workers.py").splitlines() == [
        "first: prime no. 10 is 31, my answer no. 1",
        "first: prime no. 10000 is 104743, my answer no. 2",
        "first: prime no. -1 is None",
        "first was killed by SIGKILL",
        "second: prime no. 10 is 31, my answer no. 1",
        "second exited with status 0",
    ]


def test_your_own_model_can_be_tested_as_ours_are() -> None:
    path = EXAMPLES / "test_your_engine.py"
    command = [sys.executable, "-m", "pytest", "-sq", "-p", "no:cacheprovider", str(path)]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=15, check=False, cwd=EXAMPLES.parent
    )
    assert process.returncode == 0, process.stdout
    assert "3 passed" in process.stdout
    assert re.search(r"cancelled in \d\d+ runs", process.stdout)
    assert re.search(r"failed in \d\d runs: \{'allocate': 2, 'step': 10\}", process.stdout)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_vllms_server_can_start_dpkits_engines_and_none_outlives_it(
    tmp_path: Path, signum: signal.Signals
) -> None:
    (tmp_path / "dpkit.toml").write_text('[[engines]]\nmodel = "echo"\ncount = 2\n')
    with zmq.Context() as context, context.socket(zmq.ROUTER) as handshake:
        port = handshake.bind_to_random_port("tcp://127.0.0.1")
        command = [
            *(sys.executable, str(EXAMPLES / "vllm_engines.py")),
            *("-m", "vllm.entrypoints.cli.main", "serve", "a-model", "--headless"),
            *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port)),
            *("--data-parallel-size", "2", "--max-num-seqs", "7"),
        ]
        config = {"DPKIT_CONFIG": str(tmp_path / "dpkit.toml")}
        with subprocess.Popen(command, env=os.environ | config) as process:
            ranks = {handshake.recv_multipart()[0] for _ in range(2)}
            assert ranks == {b"\x00\x00", b"\x01\x00"}
            assert _processes_told(f"tcp://127.0.0.1:{port}") == 2
            process.send_signal(signum)
            assert process.wait(10) == (-signum if signum == signal.SIGKILL else 0)
        deadline = time.monotonic() + 5
        while _processes_told(f"tcp://127.0.0.1:{port}"):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _processes_told(word: str) -> int:
    """How many processes have `word` on their command line."""
    commands = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            commands += word in path.read_text().split("\0")
    return commands


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_tested(path: Path) -> None:
    assert f'"{path.name}"' in Path(__file__).read_text()


def test_a_program_serves_its_cluster_over_http() -> None:
    said = run("serve_http.py")
    assert re.fullmatch(r"engine-\d says: user: Polly wants a cracker\n", said)


def test_a_handler_of_ones_own_is_served_over_http() -> None:
    assert run("http_handler.py").splitlines() == [
        "a whole answer: 3 events",
        "cancelled: client_gone",
        "cancelled: shutdown",
        "told: data: the server stops",
    ]
