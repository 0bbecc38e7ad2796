"""`dpkit simulate`, `plan` and `fit`: what they print and write, and their exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from dpkit.cli.main import main
from dpkit.errors import ConfigError, DpkitError
from dpkit.simulate.plan import Promise, least_engines
from dpkit.simulate.pool import run_side_by_side
from dpkit.simulate.workloads import WORKLOADS
from tests.simulate.lab import scenario_of

ROOT = Path(__file__).parents[2]

KEYS = [
    "policy",
    "ttft_p50_s",
    "ttft_p99_s",
    "ttft_mean_s",
    "itl_p99_s",
    "tpot_p99_s",
    "e2e_p99_s",
    "throughput_rps",
    "goodput",
    "preemptions",
    "kv_cv",
    "queue_while_room",
]

TRACE = "arrival_s,prompt_tokens,output_tokens,blocks\n" + "".join(
    f"{0.02 * n:.2f},{400 + 37 * (n % 9)},{5 + n % 4},\n" for n in range(40)
)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    config, trace = tmp_path / "pool.toml", tmp_path / "some.csv"
    config.write_text('[[engines]]\nmodel = "cost:h100-8b"\ncount = 2\n')
    trace.write_text(TRACE)
    return str(config), str(trace)


def test_results_are_written_for_each_policy_with_these_keys(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, trace = files
    out = tmp_path / "out.json"
    policies = ["--policy", "kv_pressure", "--policy", "least_tokens", "--jobs", "1"]
    assert main(["simulate", config, "--trace", trace, *policies, "--json", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert [list(result) for result in results] == [KEYS, KEYS]
    assert [result["policy"] for result in results] == ["kv_pressure", "least_tokens"]
    assert all(0 < result["ttft_p50_s"] <= result["ttft_p99_s"] for result in results)
    said, err = capsys.readouterr()
    assert said.startswith("some: 40 requests, 2 engines of cost:h100-8b, 1 client, ")
    assert "80 requests, " in said
    assert not err


@pytest.mark.parametrize("more", [["--json"], ["--json", "-"], ["--json", "--seed", "1"]])
def test_json_alone_is_all_that_is_printed(
    files: tuple[str, str], more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config, trace = files
    assert main(["simulate", config, "--trace", trace, "--rows", "5", *more]) == 0
    assert [list(each) for each in json.loads(capsys.readouterr().out)["results"]] == [KEYS]
    options = ["--ttft", "9s", "--rate", "9", "--rows", "5", *more]
    assert main(["plan", config, "--trace", trace, *options]) == 0
    [need] = json.loads(capsys.readouterr().out)["needs"]
    assert need["engines"] == 1


@pytest.mark.parametrize("command", [["simulate"], ["plan", "--ttft", "1s", "--rate", "9"]])
def test_a_config_is_not_taken_for_a_place_for_results(
    command: list[str], files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = Path(files[0])
    text = config.read_text()
    assert main([*command, "--trace", "micro-long", "--json", str(config)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --json {config}: results are no config; put FILE before --json")
    assert config.read_text() == text


def test_a_report_is_one_page_that_fetches_nothing(files: tuple[str, str], tmp_path: Path) -> None:
    config, trace = files
    page = tmp_path / "report.html"
    policies = ["--policy", "inflight", "--policy", "random", "--jobs", "1"]
    assert main(["simulate", config, "--trace", trace, *policies, "--report", str(page)]) == 0
    text = page.read_text()
    tree = ET.fromstring(text.partition("\n")[2])  # noqa: S314 - our own
    assert len(list(tree.iter("polyline"))) == 2 + 2 + 2 + 4
    assert {cell.text for cell in tree.iter("th")} >= {"inflight", "random"}
    linked = [each.get("src") or each.get("href") for each in tree.iter()]
    assert {each for each in linked if each} == {"data:,"}
    assert "<script" not in text


def test_a_load_rows_and_engines_are_as_asked(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    config, trace = files
    options = ["--load", "0.5", "--rows", "20", "--engines", "3", "--stats-interval", "50ms"]
    assert main(["simulate", config, "--trace", trace, *options]) == 0
    said = capsys.readouterr().out
    assert said.startswith("some: 20 requests, 3 engines of cost:h100-8b, ")
    assert ", 50% of the " in said


def test_a_workload_brings_its_own_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", "micro-long", "--rows", "5"]) == 0
    assert "micro-long: 5 requests, 2 engines of cost:h200-30b-a3b" in capsys.readouterr().out
    assert main(["simulate", "--trace", "i48808", "--rows", "5"]) == 0
    assert "1 client, 32 users in a closed loop" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["--trace", "nowhere.csv"],
            "--trace nowhere.csv: give the FILE of the cluster that",
        ),
        (["--trace", "micro-long", "--policy", "best"], "there is no policy 'best'"),
        (["--trace", "micro-long", "--fault", "x"], "--fault 'x': no such fault"),
        (
            [
                *["--trace", "micro-long", "--set", "coordinator.wave_coordination=true"],
                *["--fault", "kill:0@1s-2s"],
            ],
            "--fault kill: engines that step together (wave_coordination) cannot be killed here",
        ),
        (
            ["--trace", "micro-long", "--policy", "best:Of"],
            "policy 'best:Of': No module named 'best'; is",
        ),
        (["--trace", "micro-long", "--policy", "random@x"], "--policy random@x: bind it random@e"),
        (["--trace", "micro-long", "--set", "x=1"], "--set x=1: x: unknown key"),
        (
            ["--trace", "micro-long", "--stats-interval", "100"],
            "--stats-interval 100: expected a duration",
        ),
        (
            ["--trace", "micro-long", "--stats-interval", "99h"],
            "--stats-interval 99h: must be between ",
        ),
        (["--trace", "i48808", "--load", "1"], "--load 1: i48808 is a closed loop of 32 users"),
    ],
)
def test_what_cannot_be_simulated_is_told(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *args]) == 2
    assert capsys.readouterr().err.startswith(f"error: {words}")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_policy_that_raises_is_named(
    tmp_path: Path,
    jobs: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "raising.py").write_text(
        "from dpkit.abc import Policy\n"
        "class Raises(Policy):\n"
        "    def pick(self, request, view):\n"
        "        raise ValueError('no idea')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    asked = ["--trace", "micro-long", "--rows", "5", "--jobs", str(jobs)]
    policies = ["--policy", "raising:Raises", "--policy", "inflight"][: 2 * jobs]
    assert main(["simulate", *asked, *policies]) == 1
    said = capsys.readouterr().err
    assert "error: " in said
    assert "policy raising:Raises raised ValueError: no idea; that was its pick()" in said
    assert "internal error" not in said


def test_a_model_without_costs_is_told_where_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "echo.toml"
    file.write_text('[[engines]]\nmodel = "echo"\n')
    assert main(["simulate", str(file), "--trace", "micro-long"]) == 2
    said = "engines.0.model: what a step of 'echo' costs is not known; simulate with"
    assert capsys.readouterr().err.startswith(f"{file}:2:1: {said}")
    assert main(["plan", str(file), "--trace", "micro-long", "--ttft", "1s"]) == 2
    assert capsys.readouterr().err.startswith(f"{file}:2:1: {said}")


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_the_help_names_the_workloads(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    said = "".join(capsys.readouterr().out.split())  # which is broken into lines
    assert f"workload:{','.join(WORKLOADS)}." in said


@pytest.mark.parametrize("file", [True, False])
def test_a_workload_that_is_mistyped_is_told_with_the_nearest(
    files: tuple[str, str], file: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *files[:1] * file, "--trace", "micro-lnog"]) == 2
    assert "; did you mean 'micro-long'?\n" in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_told_with_what_there_is(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", files[0], "--trace", "nowhere.csv"]) == 2
    err = capsys.readouterr().err
    assert "--trace nowhere.csv: no such file; the synthetic workloads are i48808, " in err


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "--json"],
        ["simulate", "--report"],
        ["plan", "--ttft", "1s", "--rate", "9", "--json"],
    ],
)
def test_a_place_for_results_that_is_not_there_is_told_before_anything_runs(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *others, option = command
    for path, words in [
        (tmp_path / "none" / "x", "there is no such directory"),
        (tmp_path, "it is a directory; name a file in it"),
    ]:
        # A trace of which nothing was read: it would be the next to be told.
        assert main([*others, "--trace", "nowhere.csv", option, str(path)]) == 2
        assert f"error: {option} {path}: {words}\n" in capsys.readouterr().err


def test_a_plan_is_the_least_that_keeps_the_promise(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, trace = files
    out = tmp_path / "plan.json"
    options = ["--ttft", "60ms", "--rate", "150", "--json", str(out)]
    assert main(["plan", config, "--trace", trace, *options]) == 0
    [need] = json.loads(out.read_text())["needs"]
    assert need["ttft_p99_s"] <= 0.06
    assert need["engines"] > 1
    assert need["engines"] - 1 in need["tried"]
    assert capsys.readouterr().out.startswith(f"kv_pressure: {need['engines']} engines\n")


def test_a_plan_that_cannot_be_kept_says_what_is_broken(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, trace = files
    out = tmp_path / "plan.json"
    options = ["--tpot", "1ms", "--most", "2", "--json", str(out)]
    assert main(["plan", config, "--trace", trace, *options]) == 1
    words = "kv_pressure: 2 engines are not enough, for tpot_p99_s; allow more with --most"
    assert words in capsys.readouterr().out
    [need] = json.loads(out.read_text())["needs"]
    assert need["engines"] is None
    assert need["tried"] == [1, 2]


def test_a_plan_is_good_if_one_of_its_policies_keeps_the_promise(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    config, trace = files
    options = ["--most", "2", "--policy", "random", "--policy", "least_tokens"]  # 10 ms and 8 ms
    assert main(["plan", config, "--trace", trace, "--tpot", "9ms", *options]) == 0
    said = capsys.readouterr().out
    assert "random: 2 engines are not enough" in said
    assert "least_tokens: 2 engines\n" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "say what must be kept: --ttft, --tpot, --e2e or --goodput"),
        (["--ttft", "soon"], "--ttft: expected a duration"),
    ],
)
def test_a_plan_needs_a_promise(
    files: tuple[str, str],
    options: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", files[0], "--trace", files[1], *options]) == 2
    assert words in capsys.readouterr().err


def test_a_plan_of_arrivals_without_a_pace_needs_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--trace", "bimodal", "--rows", "9", "--ttft", "1s"]) == 2
    assert "bimodal has no pace of its own: give a --rate" in capsys.readouterr().err


def test_a_plan_needs_one_group() -> None:
    text = '[[engines]]\nname = "b"\nmodel = "cost:h100-8b"\n'
    with pytest.raises(ConfigError, match="the config has 2 groups of engines; leave one of them"):
        least_engines(scenario_of((0.0, 9, 1), text=text), "inflight", Promise(), most=2)


def test_a_fit_is_printed_as_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = tmp_path / "steps.csv"
    rows = [f"{n},0,0,0,{3 + n * 0.02}" for n in (256, 512, 1024, 2048)]
    rows += [f"0,0,{n},{n * 100},{8 + n * 0.01}" for n in (1, 8, 64, 128)]
    header = "prefill_tokens,prefill_context,decode_seqs,kv_tokens,step_ms"
    steps.write_text("\n".join([header, *rows]))
    assert main(["fit", str(steps), "--kv-tokens", "1000", "--host-ms", "1"]) == 0
    said = capsys.readouterr().out
    assert 'measured_by = "steps.csv: 8 points, ' in said
    assert "\nb_us = 20.0\n" in said
    assert "\nkv_tokens = 1000\n" in said
    assert main(["fit", str(steps), "--experts", "many"]) == 2
    assert "--experts many: expected K/E, such as 8/128" in capsys.readouterr().err
    steps.write_text(f"{header}\n")
    assert main(["fit", str(steps)]) == 2
    assert "steps.csv: nothing was measured" in capsys.readouterr().err


def test_a_fit_warns_of_constants_that_its_table_cannot_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = tmp_path / "steps.csv"
    rows = [f"{n},{context},0,0,{3 + n * 0.02}" for n in (64, 512, 2048) for context in (0, 9000)]
    header = "prefill_tokens,prefill_context,decode_seqs,kv_tokens,step_ms"
    steps.write_text("\n".join([header, *rows]))
    assert main(["fit", str(steps)]) == 0
    out, err = capsys.readouterr()
    assert "\nc_us = 0.0\n" in out
    assert err.startswith(f"warning: {steps}: nothing in it tells a_ms, c_us, d_ns, so what is ")


def test_a_fit_of_a_log_tells_what_it_is_of_and_what_would_tell_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.csv"
    header = "arrival_s,prompt_tokens,output_tokens,scheduled_s,first_token_s,last_token_s"
    log.write_text(f"{header}\n0,10,3,0,1,2\n")
    assert main(["fit", str(log)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith('measured_by = "run.csv: 1 decoding times, 0.0% mean error, ')
    assert err.startswith(f"warning: {log}: nothing in it tells a_ms, b_us, c_us, d_ns, q_ns, so ")
    assert "only the times from first token to last are fitted, and those from schedule to" in err
    rows = [f"{n},{n}00,3,{n},{n + 0.005 + n * 0.002},{n + 0.5}" for n in range(1, 6)]
    log.write_text("\n".join([header, *rows]))
    assert main(["fit", str(log)]) == 0
    said = capsys.readouterr().out
    assert 'measured_by = "run.csv: 5 decoding times and 4 lone prefills, ' in said
    assert main(["fit", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Of a run's log, two things are fitted, and the error is of these: " in said


def test_the_log_of_a_run_is_fitted_without_what_is_said_of_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.csv"
    header = "arrival_s,prompt_tokens,output_tokens,scheduled_s,first_token_s,last_token_s"
    log.write_text(f"{header}\n0,10,1,0,1,1\n")
    assert main(["fit", str(log)]) == 2
    assert "no request has the two tokens" in capsys.readouterr().err
    assert main(["fit", str(log), "--host-ms", "1"]) == 2
    assert "leave out --experts and --host-ms, which are for tables" in capsys.readouterr().err


def test_a_simulation_that_fails_aside_is_told_and_leaves_no_process() -> None:
    jobs: list[tuple[object, ...]] = [("1",)]
    with pytest.raises(DpkitError, match="a simulation failed: TypeError: "):
        run_side_by_side("dpkit.simulate.study:find_aside", jobs, at_once=1, tell=lambda *_: None)


def test_a_process_that_dies_is_told_with_its_status() -> None:
    with pytest.raises(DpkitError, match="ended before its time, with status 3; try fewer --jobs"):
        run_side_by_side(f"{__name__}:die", [(3,)], at_once=1, tell=lambda *_: None)


def die(status: int, _: object) -> None:
    os._exit(status)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_comparison_leaves_no_process(signum: int) -> None:
    options = ["--policy", "random", "--policy", "inflight", "--jobs", "2"]
    command = [sys.executable, "-m", "dpkit", "simulate", "--trace", "p41626", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as running:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        while len(found := [int(pid) for pid in _spawned(children)]) < 2:
            time.sleep(0.05)
        running.send_signal(signum)
        assert running.stderr is not None
        said = running.stderr.read()  # to its end: nobody has it open any more
    assert running.returncode in {130, -signal.SIGKILL}
    assert not said.strip()
    while any(map(_runs, found)):  # they have let go of stderr, and are about to be gone
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a process is there, and not only its entry, which nobody has asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, ProcessLookupError):
        return False


def _spawned(children: Path) -> list[str]:
    """Children of all threads of a process."""
    return [
        pid for each in children.parents[1].glob("*/children") for pid in each.read_text().split()
    ]
