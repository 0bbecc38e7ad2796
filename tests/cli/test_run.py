"""`dpkit run`: what comes out, in which order, with which exit code, whatever goes wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dpkit.cli.main import main
from dpkit.cli.running import starting
from dpkit.config.load import parse_config

if TYPE_CHECKING:
    from pathlib import Path

ECHO = '[[engines]]\nname = "echo"\ncount = 2\nmodel = "echo"\n'
SLOW = '[[engines]]\nname = "slow"\nmodel = "cost:h100-8b"\n'

CRASHING_MODEL = """
from dpkit.engine.models.echo import EchoModel

class Crashing(EchoModel):
    def execute(self, batch, cache):
        raise ZeroDivisionError("the GPU is on fire")

class Unstartable(EchoModel):
    def allocate(self, *, num_blocks, block_size):
        raise MemoryError("no room for the cache")
"""


PICKY_POLICY = """
from dpkit.abc import Policy

class Picky(Policy):
    def pick(self, request, view):
        if bytes(request.prompt_token_ids) == b"no":
            raise KeyError("not this one")
        return 0

class Forger(Policy):
    def pick(self, request, view):
        view._ledger.charge("forged", view.engines[0], 1)
        return 0
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "dpkit.toml"
    path.write_text(ECHO)
    return str(path)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Call with bytes: they are standard input, as a file."""
    opened = []

    def use(content: bytes) -> None:
        path = tmp_path / "stdin"
        path.write_bytes(content)
        opened.append(path.open())
        monkeypatch.setattr(sys, "stdin", opened[-1])

    yield use
    for file in opened:
        file.close()


def test_each_answer_comes_with_its_engine_in_the_order_of_the_prompts(config, capsys) -> None:
    assert main(["run", config, "--prompt", "the longer first", "--prompt", "short"]) == 0
    out = capsys.readouterr().out
    first, second, table = out.split("\n\n", 2)
    assert first.splitlines()[0] in {"[echo-0] the longer first", "[echo-1] the longer first"}
    assert first.splitlines()[1] == "the longer first [stop]"
    assert second.splitlines()[1] == "short [stop]"
    assert first[:8] != second[:8]
    assert table.split()[:6] == ["engine", "requests", "tokens", "peak", "KV", "preemptions"]
    assert "all: 2 requests, 23 tokens, TTFT mean" in table


def test_json_lines_come_in_order_of_completion_and_end_with_statistics(config, capsys) -> None:
    prompts = ["--prompt", "the longer first", "--prompt", "short"]
    assert main(["run", config, "--json", *prompts]) == 0
    short, longer, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert list(short) == [
        *("prompt", "text", "token_ids", "finish_reason", "engine", "ttft_s", "latency_s")
    ]
    assert [short["prompt"], longer["prompt"]] == ["short", "the longer first"]
    assert short["token_ids"] == [*b"short", 256]
    assert 0 <= short["ttft_s"] <= short["latency_s"]
    engines = last["statistics"]["engines"]
    assert [engine["engine"] for engine in engines] == ["echo-0", "echo-1"]
    assert sum(engine["output_tokens"] for engine in engines) == 23
    assert last["statistics"]["overall"]["requests"] == 2


def test_prompts_are_read_from_stdin_a_line_each(config, capsys, stdin) -> None:
    stdin(b"one\n\n  two  \nthree without an end")
    assert main(["run", config, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()[:-1]]
    assert {line["text"] for line in lines} == {"one", "two", "three without an end"}


def test_no_prompts_at_all_is_said_and_is_no_failure(config, capsys, stdin) -> None:
    stdin(b"\n\n")
    assert main(["run", config]) == 0
    captured = capsys.readouterr()
    assert captured.err == "no prompts: give --prompt, or lines on standard input\n"
    assert captured.out == ""


def test_a_line_that_is_not_utf8_is_named_and_the_others_are_answered(
    config, capsys, stdin
) -> None:
    stdin(b"good\n\xff\xfe\nfine\n")
    assert main(["run", config]) == 1
    out = capsys.readouterr().out
    assert "good [stop]" in out
    assert "error: reading prompts: line 2 of standard input is not UTF-8: invalid start" in out
    assert "fine [stop]" in out
    assert "all: 3 requests, 1 failed, " in out


def test_a_refused_prompt_fails_alone(config, capsys) -> None:
    assert main(["run", config, "--prompt", "", "--prompt", "fine"]) == 1
    out = capsys.readouterr().out
    assert "error: cannot serve request: the prompt is empty; give at least one token" in out
    assert "fine [stop]" in out
    assert "all: 2 requests, 1 failed, 5 tokens" in out


def test_a_refused_prompt_is_a_json_line_with_its_error(config, capsys) -> None:
    assert main(["run", config, "--json", "--prompt", ""]) == 1
    line, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["finish_reason"] == "error"
    assert "the prompt is empty" in line["error"]
    assert line["text"] == ""


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--temperature", "nan"], "--temperature must be a number from 0 to 100, not nan"),
        (["--temperature", "500"], "--temperature must be a number from 0 to 100, not 500.0"),
        (["--max-tokens", "99999999999"], "--max-tokens must be a whole number from 1 to 2147"),
        (["--max-tokens", "0"], "--max-tokens must be a whole number from 1 to "),
    ],
)
def test_an_option_out_of_range_is_a_usage_error(args, says, config, capsys) -> None:
    assert main(["run", config, "--prompt", "hi", *args]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {says}")
    assert out == ""


@pytest.mark.parametrize("as_json", [True, False])
def test_a_prompt_that_is_no_text_fails_alone(as_json, config, capsys) -> None:
    """What a shell passes for bytes that are not UTF-8."""
    json_too = ["--json"] * as_json
    assert main(["run", config, *json_too, "--prompt", "\udcff", "--prompt", "fine"]) == 1
    out, err = capsys.readouterr()
    assert "half of a surrogate pair at character 0" in out
    assert ('"text": "fine"' if as_json else "fine [stop]") in out
    assert err == ""


def test_whatever_a_policy_raises_fails_one_prompt(tmp_path, config, capsys, monkeypatch) -> None:
    (tmp_path / "picky_policy.py").write_text(PICKY_POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    policy = ["--set", "balancer.policy=picky_policy:Picky"]
    assert main(["run", config, *policy, "--prompt", "no", "--prompt", "fine"]) == 1
    out, err = capsys.readouterr()
    said = "policy picky_policy:Picky raised KeyError: 'not this one'; that was its pick()"
    assert f"[no engine] no\nerror: {said}" in out
    assert "fine [stop]" in out
    assert err == ""


def test_a_long_prompt_has_a_header_of_one_line(config, capsys) -> None:
    prompt = "first line\n\tand \x1b[2Jso on " * 100
    assert main(["run", config, "--prompt", prompt, "--max-tokens", "1"]) == 0
    header = capsys.readouterr().out.splitlines()[0]
    assert header.startswith("[echo-0] first line and [2Jso on first line")
    assert header.endswith("…")
    assert len(header) == len("[echo-0] ") + 80


@pytest.mark.parametrize(("prompt", "shown"), [("", "''"), (" \t" * 50, repr(" \t" * 10))])
def test_a_prompt_in_which_there_is_nothing_to_see_is_quoted(
    config, capsys, prompt: str, shown: str
) -> None:
    main(["run", config, "--prompt", prompt, "--max-tokens", "1"])
    assert capsys.readouterr().out.splitlines()[0] == f"[echo-0] {shown}"


def test_a_name_with_spaces_was_meant_as_a_prompt(config, capsys) -> None:
    assert main(["run", "What is the time?"]) == 2
    err = capsys.readouterr().err
    assert "if it is a prompt, say --prompt 'What is the time?'" in err


def test_many_engines_are_a_row_for_each_group(config, capsys) -> None:
    assert main(["run", config, "--set", "engines.0.count=40", "--prompt", "hi"]) == 0
    rows = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert rows[1].split() == ["echo-0", "…", "echo-39", "1", "3", "0.0%", "0"]
    assert len(rows) == 3


def test_a_refused_prompt_was_not_served(config, capsys) -> None:
    assert main(["run", config, "--json", "--prompt", ""]) == 1
    _, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [engine["requests"] for engine in last["statistics"]["engines"]] == [0, 0]


def test_prompts_beyond_what_is_admitted_wait_and_are_not_refused(config, capsys) -> None:
    few = ["--set", "admission.max_inflight=1", "--set", "admission.max_queued=1"]
    prompts = [word for number in range(20) for word in ("--prompt", f"p{number}")]
    assert main(["run", config, *few, *prompts]) == 0
    assert "all: 20 requests, " in capsys.readouterr().out


def test_an_audit_finds_nothing_after_a_good_run(config, capsys) -> None:
    assert main(["run", config, "--audit", "--prompt", "hi"]) == 0
    assert capsys.readouterr().err == ""


def test_an_audit_lists_what_is_left_and_fails(config, capsys, tmp_path, monkeypatch) -> None:
    """A policy that loses count of what it holds: it forges a charge."""
    (tmp_path / "picky_policy.py").write_text(PICKY_POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    policy = ["--set", "balancer.policy=picky_policy:Forger"]
    assert main(["run", config, *policy, "--audit", "--prompt", "hi"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: the cluster is not idle: ")
    assert "1 requests are in flight on echo-0" in err


def test_set_changes_a_key_for_this_run(config, capsys) -> None:
    args = ["run", config, "--set", "engines.0.name=other", "--set", "engines.0.count=1"]
    assert main([*args, "--prompt", "hi"]) == 0
    assert capsys.readouterr().out.startswith("[other-0] hi\n")


def test_max_tokens_bounds_the_answer(config, capsys) -> None:
    assert main(["run", config, "--prompt", "abcdef", "--max-tokens", "3"]) == 0
    assert "\nabc [length]\n" in capsys.readouterr().out


def test_chat_puts_the_prompt_into_the_models_template(config, capsys) -> None:
    assert main(["run", config, "--json", "--chat", "--prompt", "hi"]) == 0
    line, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["prompt"] == "hi"
    assert line["text"] == "user: hi\nassistant: "


def test_a_bad_config_starts_nothing(tmp_path, capsys) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(ECHO.replace("count", "cuont"))
    assert main(["run", str(path), "--prompt", "hi"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{path}:3:1: engines.0.cuont: " in captured.err
    assert "did you mean 'count'?" in captured.err


def test_a_model_that_is_not_there_names_the_command_that_gets_it(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("DPKIT_CACHE", str(tmp_path))
    path = tmp_path / "dpkit.toml"
    path.write_text('[[engines]]\nmodel = "smollm2-135m"\n')
    assert main(["run", str(path), "--prompt", "hi"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "dpkit fetch smollm2-135m" in captured.err


def test_a_model_that_is_not_loaded_in_time_is_no_start(tmp_path, capsys) -> None:
    path = tmp_path / "dpkit.toml"
    path.write_text(ECHO + 'kind = "process"\nprocess.start_timeout = "1ms"\n')
    assert main(["run", str(path), "--prompt", "hi"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "start_timeout" in captured.err


@pytest.mark.parametrize(
    ("model", "message", "code"),
    [
        # Twice: a request of a lost engine is placed once more.
        ("Crashing", r"engine echo-[01] was lost .*ZeroDivisionError: the GPU is on fire", 1),
        ("Unstartable", "engine echo-[01] failed: MemoryError: no room for the cache", 3),
    ],
)
def test_an_engine_that_fails_gives_a_message_and_no_traceback(
    model, message, code, tmp_path, capsys, monkeypatch
) -> None:
    (tmp_path / "crashing_model.py").write_text(CRASHING_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "dpkit.toml"
    path.write_text(ECHO.replace('model = "echo"', f'model = "crashing_model:{model}"'))
    assert main(["run", str(path), "--prompt", "hi"]) == code
    captured = capsys.readouterr()
    assert re.search(f"error: {message}", captured.out + captured.err)
    assert "Traceback" not in captured.out + captured.err


# Real processes from here on: pipes are theirs.


def start(tmp_path: Path, toml: str, *args: str, **kwargs) -> subprocess.Popen[str]:
    path = tmp_path / "dpkit.toml"
    path.write_text(toml)
    return subprocess.Popen(
        [sys.executable, "-m", "dpkit", "run", path, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def test_answers_come_while_stdin_is_still_open(tmp_path) -> None:
    with start(tmp_path, ECHO, "--json", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for prompt in ("first", "second"):
            process.stdin.write(f"{prompt}\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["text"] == prompt
        process.stdin.close()
        assert "statistics" in json.loads(process.stdout.readline())
        assert process.wait() == 0


def test_a_reader_that_leaves_ends_the_run_in_silence(tmp_path) -> None:
    with start(tmp_path, SLOW, "--prompt", "endless", "--max-tokens", "100000") as process:
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait() == 1
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (["local"], "starting 1 engine …"),
        (["process"], "starting 1 engine, a process of its own …"),
        (["process", "process"], "starting 2 engines, each a process of its own …"),
        (["process", "local", "local"], "starting 3 engines, 1 of them a process of its own …"),
    ],
)
def test_a_person_is_told_which_engines_are_processes(kinds: list[str], said: str) -> None:
    groups = [
        f'[[engines]]\nname = "e{number}"\nmodel = "echo"\nkind = "{kind}"\n'
        for number, kind in enumerate(kinds)
    ]
    assert starting(parse_config("".join(groups))) == said
