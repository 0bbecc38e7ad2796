"""`dpkit run` and signals: what is finished, what is cut off, what is said, and the exit code.

Real processes: signals, terminals and exit codes are theirs.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

ECHO = '[[engines]]\nname = "echo"\ncount = 2\nmodel = "echo"\n'
SLOW = '[[engines]]\nname = "slow"\nmodel = "cost:h100-8b"\n'

MODELS = """
import sys, time
from dpkit.engine.models.echo import EchoModel
from dpkit.messages import StepResult

class Hanging(EchoModel):
    inline = False
    def execute(self, batch, cache):
        print("hangs", flush=True)
        time.sleep(1000)

class HangingTrio(Hanging):
    inline = True

class Loading(EchoModel):
    inline = False
    def __init__(self):
        super().__init__()
        print("loads", flush=True)
        time.sleep(1000)

class Paced(EchoModel):
    inline = False
    def execute(self, batch, cache):
        print("runs", file=sys.stderr, flush=True)
        time.sleep(0.02)
        return super().execute(batch, cache)
"""


def engine(model: str, *, grace: str = "10s", kill_after: str = "100ms") -> str:
    return (
        f'[cluster]\ngrace = "{grace}"\nkill_after = "{kill_after}"\n'
        f'[[engines]]\nname = "e"\nmodel = "stop_models:{model}"\n'
    )


def start(tmp_path: Path, toml: str, *args: str, **options: Any) -> subprocess.Popen[str]:
    path = tmp_path / "dpkit.toml"
    path.write_text(toml)
    (tmp_path / "stop_models.py").write_text(MODELS)
    return subprocess.Popen(
        [sys.executable, "-m", "dpkit", "run", str(path), *args],
        text=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},  # noqa: PTH109
        **{"stderr": subprocess.PIPE, **options},
    )


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Read standard output up to the end of `text`, letter by letter."""
    read = ""
    assert process.stdout is not None
    while not read.endswith(text):
        letter = process.stdout.read(1)
        assert letter, f"it ended before {text!r}: {read!r}"
        read += letter
    return read


@pytest.mark.parametrize(("signum", "code"), [(INT, 130), (TERM, 143)])
def test_the_second_signal_stops_at_once_and_marks_what_is_cut_off(tmp_path, signum, code) -> None:
    args = ("--prompt", "endless", "--max-tokens", "100000", "--prompt", "another")
    with start(tmp_path, SLOW, *args) as process:
        read_until(process, "[slow-0] endless\n")
        process.send_signal(signum)
        read_until(process, "en")
        process.send_signal(signum)
        out, err = process.communicate()
        assert process.returncode == code
        assert " [abort]\n" in out
        assert "all: 2 requests, " in out
        assert re.search(r", \d+ tokens? in whole answers", out)
        assert err == ""


def test_prompts_are_taken_until_pre_stop_is_over(tmp_path) -> None:
    toml = engine("Paced").replace("[cluster]\n", '[cluster]\npre_stop = "5s"\n')
    with start(tmp_path, toml, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write("before\n")
        process.stdin.flush()
        read_until(process, "[e-0] before\nb")
        process.send_signal(TERM)
        read_until(process, "[stop]\n")
        process.stdin.write("after\n")
        process.stdin.flush()
        read_until(process, "[e-0] after\nafter [stop]\n")
        process.communicate()
        assert process.returncode == 0


@pytest.mark.parametrize(("signum", "code"), [(INT, 130), (TERM, 0)])
def test_after_the_first_signal_answers_finish_and_no_prompt_is_awaited(
    tmp_path, signum, code
) -> None:
    with start(tmp_path, engine("Paced"), stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write("to the end\n")
        process.stdin.flush()
        read_until(process, "[e-0] to the end\nt")
        process.send_signal(signum)
        assert process.stdout is not None
        out = process.stdout.read()  # while its stdin is still open
        assert process.wait() == code
        assert out.startswith("o the end [stop]\n")
        assert "all: 1 request, 11 tokens" in out


def test_what_does_not_finish_within_the_grace_is_aborted_and_told(tmp_path) -> None:
    toml = engine("Paced", grace="300ms")
    with start(tmp_path, toml, "--json", "--prompt", "x" * 100) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "runs\n"
        process.send_signal(TERM)
        assert process.stdout is not None
        record, last = map(json.loads, process.stdout.read().splitlines())
        assert process.wait() == 143
        assert record["finish_reason"] == "abort"
        assert last["statistics"]["overall"]["aborted"] == 1


@pytest.mark.parametrize("model", ["Hanging", "HangingTrio"])
@pytest.mark.parametrize("kill_after", ["100ms", "1h"])
def test_a_run_that_hangs_is_gone_when_told_again(tmp_path, model, kill_after) -> None:
    toml = engine(model, grace="1h", kill_after=kill_after)
    with start(tmp_path, toml, "--prompt", "hi") as process:
        read_until(process, "hangs\n")
        _insist(process)
        assert process.returncode == 130
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def _insist(process: subprocess.Popen[str]) -> None:
    """Send Ctrl-C again and again, as a person does: two at once may count as one."""
    while process.poll() is None:
        process.send_signal(INT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)


def test_a_hanging_step_ends_with_the_grace_after_one_signal(tmp_path) -> None:
    with start(tmp_path, engine("Hanging", grace="200ms"), "--prompt", "hi") as process:
        read_until(process, "hangs\n")
        process.send_signal(TERM)
        assert process.wait() == 143


def test_while_a_model_loads_the_second_signal_ends_the_process(tmp_path) -> None:
    with start(tmp_path, engine("Loading", kill_after="5s"), "--prompt", "hi") as process:
        read_until(process, "loads\n")
        _insist(process)
        assert process.returncode == 130
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_signal_ends_a_run_that_waits_for_stdin(tmp_path) -> None:
    with start(tmp_path, ECHO, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write("hello\n")
        process.stdin.flush()
        read_until(process, "hello [stop]\n")
        process.send_signal(INT)
        out, _ = process.communicate()
        assert process.returncode == 130
        assert "all: 1 request, 6 tokens" in out


def test_endless_input_is_answered_as_it_comes_and_ends_with_a_signal(tmp_path) -> None:
    with (
        subprocess.Popen(["/usr/bin/env", "yes", "hello"], stdout=subprocess.PIPE) as yes,
        start(tmp_path, ECHO, "--json", stdin=yes.stdout) as process,
    ):
        assert yes.stdout is not None
        assert process.stdout is not None
        yes.stdout.close()  # ours
        for _ in range(1500):  # more than are ever under way
            assert json.loads(process.stdout.readline())["text"] == "hello"
        process.send_signal(INT)
        *answers, last = map(json.loads, process.stdout)
        assert process.wait() == 130
        assert all(answer["text"] == "hello" for answer in answers)
        assert last["statistics"]["overall"]["requests"] == 1500 + len(answers)


def test_a_person_is_told_what_to_do(tmp_path) -> None:
    ours, theirs = pty.openpty()
    with start(
        tmp_path, engine("Hanging", grace="1h", kill_after="1h"), stdin=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        seen = b""
        while b"Ctrl-D ends" not in seen:
            seen += os.read(ours, 1000)
        assert b"starting 1 engine " in seen
        assert b"ready: one prompt a line, Ctrl-D ends" in seen
        os.write(ours, b"hi\n")
        read_until(process, "hangs\n")
        process.send_signal(INT)
        while b"at once" not in seen:
            seen += os.read(ours, 1000)
        assert b"stopping; again to stop at once" in seen
        _insist(process)
        assert process.returncode == 130
    os.close(ours)


def test_sighup_reads_the_file_again_and_a_wrong_one_changes_nothing(tmp_path) -> None:
    with start(tmp_path, ECHO, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        path = tmp_path / "dpkit.toml"

        def ask(prompt: str) -> str:
            assert process.stdin is not None
            process.stdin.write(f"{prompt}\n")
            process.stdin.flush()
            return read_until(process, f"\n{prompt} [stop]\n\n")

        ask("one")
        path.write_text(ECHO.replace("count", "cuont").replace("model", "modle"))
        process.send_signal(HUP)
        refused = process.stderr.readline()
        assert "SIGHUP: all stays as it was: " in refused
        assert "did you mean 'count'?; " in refused, "one line, however much is wrong"
        assert "did you mean 'model'?" in refused
        ask("two")
        path.write_text(ECHO.replace('name = "echo"', 'name = "other"'))
        process.send_signal(HUP)
        changed = process.stderr.readline()
        assert "dpkit.toml is in force: engines.echo: 2 engines leave; engines.other: " in changed
        assert changed.endswith("2 engines of echo join\n")
        assert "[other-" in ask("three")
        process.stdin.close()
        assert process.wait() == 0
