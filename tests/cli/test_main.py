"""The `dpkit` command itself: lazy commands, exit codes, and how a mistake is told."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from dpkit import errors
from dpkit.cli import main as cli
from dpkit.cli.main import main
from dpkit.messages import EngineId

ROOT = Path(__file__).parents[2]
EXAMPLE, README = ROOT / "dpkit.toml", ROOT / "README.md"
COMMANDS = (
    "run, engine, coordinator, bench, check, explain, config, simulate, plan, fit, schema, fetch"
)
HEAVY = {"torch", "zmq", "trio", "numpy", "transformers", "rich"}


def _python(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *args]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.run(command, text=True, check=False, timeout=15, env=environment, **options)  # type: ignore[call-overload, no-any-return]


def _imported_by(*args: str) -> set[str]:
    code = "import sys; from dpkit.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    done = _python("-c", code, *args, stdout=subprocess.PIPE)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["--version"],
        ["check", str(EXAMPLE)],
        ["config", "show", str(EXAMPLE)],
        ["schema"],
    ],
)
def test_light_commands_import_nothing_heavy(args: list[str]) -> None:
    modules = _imported_by(*args)
    assert "dpkit.cli.main" in modules
    assert not modules & HEAVY


def test_help_imports_no_command_and_no_config_reader() -> None:
    modules = _imported_by("--help")
    assert not {name for name in modules if name.startswith("dpkit.")} - {
        "dpkit.cli",
        "dpkit.cli.main",
        "dpkit.errors",
    }
    assert not modules & {"attrs", "cattrs", "tomli", "difflib", "hashlib", "ssl"}


def test_help_lists_every_command_with_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    context = click.Context(cli.dpkit)
    for name in cli.dpkit.list_commands(context):
        command = cli.dpkit.get_command(context, name)
        assert isinstance(command, click.Command)
        assert command.name == name
        assert command.help
        assert f"\n  {name} " in out
    assert "Bring a cluster up and serve HTTP, or answer prompts.\n" in out


def test_python_dash_m_is_the_same_command() -> None:
    done = _python("-m", "dpkit", "check", str(EXAMPLE), capture_output=True)
    assert done.returncode == 0
    assert done.stdout.startswith(f"{EXAMPLE}: ok: ")


@pytest.mark.parametrize(("words", "found"), [("dpkit ch", "plain,check"), ("dpkit zz x", "")])
def test_shells_complete_commands_and_survive_unknown_ones(
    words: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_DPKIT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    done = _python("-m", "dpkit", capture_output=True)
    assert (done.stdout.strip(), done.stderr) == (found, "")


def test_no_command_shows_the_help_as_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("Usage: dpkit [OPTIONS] COMMAND")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["chek"], "No such command 'chek'. Did you mean 'check'?\nTry 'dpkit --help'."),
        (["zzz"], f"No such command 'zzz'. Commands: {COMMANDS}.\nTry 'dpkit --help'."),
        (["check", "a", "b"], "Got unexpected extra argument (b)\nTry 'dpkit check --help'."),
    ],
)
def test_usage_error_says_what_to_try(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (errors.ConfigError(["f:1:2: a: bad", "f:3:4: b: bad"]), 2, "f:1:2: a: bad\nf:3:4: b: bad"),
        (errors.ConfigError(["my f.csv:3: no number"]), 2, "my f.csv:3: no number"),
        (errors.ConfigError(["there is no policy 'x'"]), 2, "error: there is no policy 'x'"),
        (errors.ConfigError(["--set a=b:1:2: c: bad"]), 2, "error: --set a=b:1:2: c: bad"),
        (errors.ModelNotFound("no model x; try dpkit fetch x"), 3, "error: no model x; try dpkit"),
        (errors.ModelUnsupported("no rope scaling"), 3, "error: no rope scaling"),
        (errors.EngineLost("gone", engine=EngineId("a-0")), 1, "error: gone"),
        (click.ClickException("no network"), 1, "error: no network"),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
    ],
)
def test_what_went_wrong_becomes_a_message_and_a_code(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @click.command()
    def fails() -> None:
        raise error

    monkeypatch.setattr(cli, "dpkit", fails)
    assert main([]) == code
    out, err = capsys.readouterr()
    assert not out
    assert err.strip().startswith(message)
    assert "Traceback" not in err


def test_a_commands_own_exit_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "dpkit", click.Command("seven", callback=lambda: 7))
    assert main([]) == 7


BUGS = [
    ZeroDivisionError("by nothing"),
    ExceptionGroup("outer", [ExceptionGroup("inner", [ZeroDivisionError("by nothing")])]),
    BaseExceptionGroup("outer", [SystemExit(3)]),
]


@pytest.mark.parametrize("bug", BUGS, ids=repr)
@pytest.mark.parametrize("asked", ["not", "by an option", "by the environment"])
def test_a_bug_is_one_line_and_its_traceback_to_be_had(
    bug: BaseException,
    asked: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @click.command()
    @click.option("--set")
    def broken(set: object) -> None:  # noqa: A002
        raise bug

    monkeypatch.setattr(cli, "dpkit", broken)
    if asked == "by the environment":
        monkeypatch.setenv("DPKIT__LOG__LEVEL", "debug")
    assert main(["--set", "log.level=debug"] if asked == "by an option" else []) == 1
    err = capsys.readouterr().err
    if asked == "not":
        assert err.startswith("error: internal error: ")
        assert "--set log.level=debug" in err
        assert err.count("\n") == 1
    else:
        assert "Traceback" in err


@pytest.mark.parametrize("command", [["check"], ["run", "--prompt", "hi"]], ids=lambda c: c[0])
@pytest.mark.parametrize(
    ("closed", "unbuffered"),
    [(">&-", ""), (">&- 2>&-", ""), ("<&- >&-", ""), ("> /dev/full", ""), ("> /dev/full", "1")],
)
def test_an_output_that_takes_nothing_is_one_line_at_most(
    command: list[str], closed: str, unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    words = [sys.executable, "-m", "dpkit", *command, "--set", "engines.0.model=echo"]
    done = subprocess.run(
        ["/bin/sh", "-c", f"{shlex.join(words)} {closed}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=15,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == ("2>&-" not in closed)
    assert done.stderr.startswith("error: ") or not done.stderr
    if closed == "> /dev/full":
        full = "writing to standard output: No space left on device; give it somewhere to go"
        assert done.stderr == f"error: {full}\n"


@pytest.mark.parametrize(
    "code",
    [
        "sys.exit(main(['check', FILE]))",
        "sys.stdout.write('unflushed'); sys.exit(main(['check', FILE, '--set', 'x']))",
    ],
)
def test_a_reader_that_left_is_no_error_message(code: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    prelude = f"import sys; from dpkit.cli.main import main; FILE = {str(EXAMPLE)!r}; "
    try:
        done = _python("-c", prelude + code, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert done.returncode == 1
    assert "Broken" not in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_a_command_works_is_130() -> None:
    code = (
        "import os, signal, sys, click\n"
        "from dpkit.cli import main as cli\n"
        "kill = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        "cli.dpkit = click.Command('stuck', callback=kill)\n"
        "sys.exit(cli.main([]))\n"
    )
    done = _python("-c", code, capture_output=True)
    assert done.returncode == 128 + signal.SIGINT
    assert "Traceback" not in done.stderr


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    done = subprocess.run(  # itself run by make, most often, which would tell where it is
        ["/usr/bin/env", "make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    assert listed["run"] == "the main job: two engines behind OpenAI's routes, until Ctrl-C"
    assert set(listed) == set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("run", [".[torch,serve]"]),
        ("demo", [".[torch,serve]"]),
        ("test", [".[torch,serve]", ".[torch,dev]"]),
        ("check", [".[torch,serve]", ".[torch,dev]"]),
    ],
)
def test_make_installs_no_more_than_its_target_needs_and_says_that_it_takes_long(
    tmp_path: Path, target: str, extras: list[str]
) -> None:
    done = subprocess.run(
        ["/usr/bin/env", "make", "--no-print-directory", "-n", f"VENV={tmp_path}/venv", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.findall(r"-e '(.*?)'", done.stdout) == extras
    assert done.stdout.count("it takes minutes") == len(extras)
    assert done.stdout.index("it takes minutes") < done.stdout.index("-m venv")


def test_the_readme_lists_every_command_and_no_other() -> None:
    rows = re.findall(r"^\| `dpkit ([a-z]+)[^`]*` \|", README.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(cli.dpkit.list_commands(click.Context(cli.dpkit)))


def test_an_echo_answers_without_any_extra(tmp_path: Path) -> None:
    text = README.read_text()
    assert "`pip install -c constraints.txt -e .` is enough" in text
    echo = re.findall(r"```toml\n(# echo\.toml\n.*?)```", text, re.DOTALL)[0]
    (tmp_path / "echo.toml").write_text(echo)
    code = (
        "import sys\n"
        "for extra in 'torch numpy tokenizers jinja2 httptools prometheus_client'.split():\n"
        "    sys.modules[extra] = None\n"
        "from dpkit.cli.main import main\n"
        "sys.exit(main(['run', sys.argv[1], '--prompt', 'hello']))\n"
    )
    done = _python("-c", code, str(tmp_path / "echo.toml"), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "hello [stop]" in done.stdout
