"""`dpkit bench`: what it prints and writes, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from dpkit.cli.bench import command
from dpkit.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ECHO = "[[engines]]\nname = 'e'\ncount = 2\nmodel = 'echo'\n"
COST = "[[engines]]\nname = 'e'\nmodel = 'cost:h100-8b'\n"


@pytest.fixture
def file(tmp_path: Path) -> str:
    config = tmp_path / "dpkit.toml"
    config.write_text(ECHO)
    return str(config)


def bench(*args: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error of a process of its own."""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-m", "dpkit", "bench", *args],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return process.returncode, process.stdout, process.stderr


def bench_json(*args: str) -> Any:
    code, out, err = bench(*args, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@contextmanager
def serving(tmp_path: Path, toml: str = ECHO) -> Iterator[str]:
    """`dpkit run` in a process of its own; its URL."""
    config = tmp_path / "served.toml"
    config.write_text(f"{toml}[server]\nlisten = '127.0.0.1:0'\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "dpkit", "run", str(config), "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        told = json.loads(process.stdout.readline())["serving"]
        yield told["addresses"][0]
    finally:
        process.terminate()
        process.communicate(timeout=20)


def refused(*args: str) -> str:
    """What is said of a command line that is wrong."""
    result = CliRunner().invoke(command, args)
    assert result.exit_code == 2
    return result.output


def test_a_cluster_is_brought_up_for_it_and_counted_whole(file: str, tmp_path: Path) -> None:
    told = bench_json(
        file, "--requests", "40", "--warm-up", "3", "--output-tokens", "5", "--ignore-eos"
    )
    assert (told["finished"], told["failed"], told["warm_up"]) == (40, 0, 3)
    assert told["output_tokens"] == 200
    assert told["prompt_tokens"] == 40 * 128
    assert (told["model"], told["target"]) == ("echo", file)
    assert [each["engine"] for each in told["engines"]] == ["e-0", "e-1"]
    assert told["settings"]["load"] == "closed loop, 16 at once"


def test_a_server_is_asked_and_reported_in_every_form(tmp_path: Path) -> None:
    page, lines = tmp_path / "r.html", tmp_path / "r.jsonl"
    with serving(tmp_path) as url:
        asked = ["--url", url, "--requests", "20", "--seed", "5", "--prompt-tokens", "30"]
        told = bench_json(*asked, "--records", str(lines), "--html", str(page), "--slo", "e2e=1h")
        code, text, _ = bench(*asked, "--chat", "--model", "echo", "--concurrency", "2")
        _, markdown, _ = bench(*asked, "--markdown", "--rate", "500", "--arrivals", "constant")
    assert (told["finished"], told["prompt_tokens"]) == (20, 600)
    assert told["goodput"]["good"] == 20
    assert told["settings"]["seed"] == "5"
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [each["index"] for each in records] == list(range(20))
    assert {each["outcome"] for each in records} == {"finished"}
    assert page.read_text().startswith("<!doctype html>")
    assert code == 0
    assert text.startswith(f"echo at {url}\nclosed loop, 2 at once; until: 20 requests; ")
    assert "20 finished, 0 failed" in text
    assert "open loop, 500 requests/s, constant; until: 20 requests" in markdown
    assert "| requests | 20 finished, 0 failed |" in markdown


MOONCAKE = """\
{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [0]}
{"timestamp": 1000, "input_length": 6, "output_length": 3, "hash_ids": [0]}
{"timestamp": 2000, "input_length": 7, "output_length": 4, "hash_ids": [1]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,5,2
2023-11-16 18:17:04.9799600,6,3
2023-11-16 18:17:05.9799600,7,4
"""
OWN = "arrival_s,prompt_tokens,output_tokens\n0,5,2\n1,6,3\n2,7,4\n"


@pytest.mark.parametrize("text", [OWN, AZURE, MOONCAKE], ids=["own", "azure", "mooncake"])
def test_a_trace_gives_moments_and_lengths(file: str, tmp_path: Path, text: str) -> None:
    trace = tmp_path / "t"
    trace.write_text(text)
    replayed = bench_json(file, "--trace", str(trace), "--speed", "100", "--ignore-eos")
    assert (replayed["prompt_tokens"], replayed["output_tokens"]) == (18, 9)
    lengths = bench_json(file, "--lengths", str(trace), "--requests", "4", "--ignore-eos")
    assert (lengths["prompt_tokens"], lengths["output_tokens"]) == (23, 11)
    assert lengths["settings"]["prompt tokens"] == f"of {trace}"
    assert lengths["settings"]["output tokens"] == f"of {trace}"


def test_the_same_seed_asks_the_same(file: str) -> None:
    asked = (file, "--requests", "9", "--prompt-tokens", "uniform:1,90", "--seed")
    first, again, other = (bench_json(*asked, seed)["prompt_tokens"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_a_failure_shows_in_the_exit_code(file: str) -> None:
    code, out, _ = bench(file, "--requests", "2", "--output-tokens", "9999999")
    assert code == 1
    assert "0 finished, 2 failed" in out
    assert "RequestRejected" in out


class OnTerminal:
    """A run whose standard error is a terminal."""

    def __init__(self, *args: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dpkit", "bench", *args],
            stdout=subprocess.PIPE,
            stderr=slave,
            text=True,
            env=os.environ | {"TERM": "xterm"},
        )
        os.close(slave)
        self.shown = b""

    def wait_shown(self, pattern: bytes) -> None:
        """Read until the terminal shows this."""
        while not re.search(pattern, self.shown):
            self.shown += os.read(self._master, 4096)

    def end(self) -> tuple[int, str]:
        """Wait for the end; exit code and standard output."""
        with suppress(OSError):  # Linux: nobody has the other end any more
            while data := os.read(self._master, 4096):
                self.shown += data
        os.close(self._master)
        out, _ = self.process.communicate(timeout=20)
        return self.process.returncode, out


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reports_what_there_is(tmp_path: Path, signum: int, code: int) -> None:
    config = tmp_path / "dpkit.toml"
    config.write_text(COST)
    endless = ("--duration", "1h", "--concurrency", "2", "--output-tokens", "20")
    run = OnTerminal(str(config), *endless, "--ignore-eos", "--json")
    run.wait_shown(b"2 under way, ([2-9]|[0-9]{2,}) ended")
    run.process.send_signal(signum)
    ended, out = run.end()
    told = json.loads(out)
    assert ended == code
    assert told["was_stopped"] is True
    assert told["finished"] >= 2
    assert told["output_tokens"] == 20 * told["finished"]
    assert (told["failed"], told["unfinished"]) == (0, 2)


def test_ctrl_c_before_there_is_a_target_is_said_and_no_more() -> None:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "dpkit", "bench", "--url", url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = listener.accept()
        with closing(connection):
            assert connection.recv(100).startswith(b"GET /v1/models HTTP/1.1\r\n")
            process.send_signal(signal.SIGINT)
            told = process.communicate(timeout=20)
    assert told == ("", "stopped before anything was measured\n")
    assert process.returncode == 130


def test_on_a_terminal_a_bar_shows_how_far_it_is(file: str) -> None:
    run = OnTerminal(file, "--requests", "30")
    code, out = run.end()
    assert code == 0
    assert "30 finished" in out
    assert b"starting 2 engines" in run.shown
    assert b" under way, " in run.shown
    assert "\x1b" not in out


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, out, err = bench("--url", url)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {url}: GET /v1/models: connecting to {url}: ")
    assert err.count("\n") == 1


def test_a_wrong_path_and_no_such_model_are_one_line(tmp_path: Path) -> None:
    with serving(tmp_path) as url:
        for args, said in (
            (("--url", f"{url}/v1/chat/completions"), "GET /v1/models: 404: "),
            (("--url", url, "--model", "eco"), "there is no model 'eco'; there is echo"),
        ):
            code, out, err = bench(*args)
            assert (code, out) == (1, "")
            assert said in err
            assert err.startswith("error: ")
            assert err.count("\n") == 1


def test_a_config_that_is_wrong_is_told_of_as_ever(tmp_path: Path, capsys) -> None:
    config = tmp_path / "dpkit.toml"
    config.write_text("[[engines]]\nmodle = 'echo'\n")
    assert main(["bench", str(config)]) == 2
    assert "engines.0.modle: unknown key; did you mean 'model'?" in capsys.readouterr().err


def test_without_httptools_a_server_cannot_be_asked(monkeypatch, capsys) -> None:
    monkeypatch.delitem(sys.modules, "dpkit.bench.openai", raising=False)
    monkeypatch.delitem(sys.modules, "dpkit.bench.http", raising=False)
    monkeypatch.setitem(sys.modules, "httptools", None)
    assert main(["bench", "--url", "http://127.0.0.1:1"]) == 1
    said = "error: --url needs httptools; `pip install 'dpkit[serve]'` brings it\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--rate", "1", "--concurrency", "1"), "--rate and --concurrency exclude each other"),
        (("--trace", "t", "--rate", "1"), "--rate and --trace exclude each other"),
        (("--trace", "t", "--concurrency", "1"), "--concurrency and --trace exclude each other"),
        (("--trace", "t", "--lengths", "t"), "--lengths and --trace exclude each other"),
        (("--json", "--markdown"), "--json and --markdown exclude each other"),
        (("--model", "m"), "--model says nothing without --url"),
        (("--chat",), "--chat says nothing without --url"),
        (("--api-key-env", "X"), "--api-key-env says nothing without --url"),
        (("--speed", "2"), "--speed says nothing without --trace"),
        (("--arrivals", "constant"), "--arrivals says nothing without --rate"),
        (("--url", "http://a", "f.toml"), "--url is a server that is up: leave out FILE"),
        (("--url", "http://a", "--set", "a=1"), "--url is a server that is up: leave out --set"),
        (("--html", "/no/such/x.html"), "--html /no/such/x.html: there is no such directory"),
        (("--records", "/no/such/x"), "--records /no/such/x: there is no such directory"),
        (
            ("--url", "http://a", "--api-key-env", "DPKIT_NO_SUCH"),
            "--api-key-env DPKIT_NO_SUCH: there is no such variable, or no key in it",
        ),
        (("--slo", "x=1s"), "Invalid value for '--slo': 'x' is none of ttft, tpot, itl, e2e"),
        (("--slo", "ttft=500"), "Invalid value for '--slo': ttft: expected a duration"),
        (("--url", "foo"), "Invalid value for '--url': 'foo': expected http://HOST:PORT"),
        (("--duration", "5"), "expected a duration"),
        (("--warm-up", "5x"), "expected a duration"),
        (("--prompt-tokens", "many"), "'many' says no length"),
        (("--rate", "0"), "0.0 is not in the range"),
    ],
)
def test_what_contradicts_itself_is_refused(args: tuple[str, ...], said: str) -> None:
    assert said in refused(*args)


def test_a_trace_that_is_not_there_is_told_of(capsys) -> None:
    assert main(["bench", "--trace", "/no/such/trace.csv"]) == 2
    assert "error: /no/such/trace.csv: no such file\n" in capsys.readouterr().err
