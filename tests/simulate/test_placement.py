"""`benchmarks/placement.py`, which makes the figures of docs/placement.md."""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

if TYPE_CHECKING:
    from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = (Path(__file__).parents[2] / "docs" / "placement.md").read_text()
ROWS = 12
TABLES = ["no-cache", "prefix", "troubles", "stale"]


@pytest.fixture
def placement(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("placement")


@pytest.fixture
def traces(placement: ModuleType, tmp_path: Path) -> Path:
    """A folder with a few requests under the name of each trace."""
    for file in {case.file for table in placement.TABLES.values() for case in table.cases}:
        with gzip.open(tmp_path / f"{file}.csv.gz", "wt") as out:
            write = csv.writer(out).writerow
            write(["arrival_s", "prompt_tokens", "output_tokens", "blocks"])
            for n in range(ROWS):
                write([n / 10, 600 + 300 * (n % 3), 4 + n % 5, f"1 {n % 2}"])
    return tmp_path


def made(placement: ModuleType, traces: Path, table: str, *more: str) -> list[dict[str, Any]]:
    """The rows of the file once a command is done, without the time that they took."""
    out = traces / "out.jsonl"
    placement.main([str(traces), "--table", table, "--out", str(out), "--rows", str(ROWS), *more])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return [{name: row[name] for name in row if name != "cpu_s"} for row in rows]


@pytest.mark.parametrize("table", TABLES)
def test_a_table_is_run_and_printed_with_all_its_cases(
    placement: ModuleType, traces: Path, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = made(placement, traces, table, "--load", "0.9", "--jobs", "1")
    runs = [(row["case"], row["policy"]) for row in rows if "table" in row]
    cases, policies = placement.TABLES[table].cases, placement.TABLES[table].policies
    assert runs == [(case.name, policy) for case in cases for policy in policies]
    assert all(row["rps"] > 0 for row in rows if "pool" in row)
    assert all(row["ttft_p99_s"] > 0 for row in rows if "table" in row)
    assert {row["case"].partition(", ")[2] for row in rows if row.get("failed")} <= {"one dies"}
    said, _ = capsys.readouterr()
    lines = [line for line in said.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert {line.split(" | ")[0].strip("| ") for line in lines} >= {case.name for case in cases}


def test_an_interrupted_table_goes_on_where_it_stopped(placement: ModuleType, traces: Path) -> None:
    once = ["--load", "0.9", "--jobs", "1"]
    whole = made(placement, traces, "prefix", *once)
    out = traces / "out.jsonl"
    lines = out.read_text().splitlines(keepends=True)
    kept = "".join(lines[:7])
    out.write_text(kept + lines[7][:40])
    assert made(placement, traces, "prefix", *once) == whole
    assert out.read_text().startswith(kept)


def test_processes_side_by_side_find_the_same(placement: ModuleType, traces: Path) -> None:
    options = ["--load", "0.9", "--policy", "expected_ttft"]
    alone = made(placement, traces, "stale", *options, "--jobs", "1")
    (traces / "out.jsonl").unlink()
    aside = made(placement, traces, "stale", *options, "--jobs", "2")
    assert sorted(map(str, aside)) == sorted(map(str, alone))


def test_other_loads_and_clients_join_what_is_there_and_show_runs_nothing(
    placement: ModuleType, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(placement, traces, "no-cache", "--load", "0.9", "--jobs", "1")
    more = ["--load", "1.0", "--neighbours", "--case", "arxiv", "--jobs", "1"]
    rows = made(placement, traces, "no-cache", *more)
    assert len([row for row in rows if "table" in row]) == 16 + 6
    assert [row["load"] for row in rows if row.get("case") == "arxiv"] == [
        *[0.9] * 2,
        *[1.0] * 2,
        *[0.97] * 2,
        *[1.03] * 2,
    ]
    rows = made(placement, traces, "no-cache", "--load", "0.9", "--clients", "4", "--jobs", "1")
    assert len([row for row in rows if row.get("clients") == 4]) == 16
    assert len([row for row in rows if "pool" in row]) == 8
    capsys.readouterr()
    assert made(placement, traces, "no-cache", "--show") == rows
    assert re.findall(r"^Load (.*):", capsys.readouterr().out, re.MULTILINE) == ["0.9", "1"]


def rows_of(**by_policy: dict[float, float]) -> list[dict[str, Any]]:
    """Rows of one case, by policy the p99 TTFT at each load; all else is equal."""
    names = {"early": "expected_ttft@early"}
    return [
        {
            "case": "mooncake-conv",
            "policy": names.get(policy, policy),
            "load": load,
            "ttft_p99_s": p99,
            "ttft_mean_s": 1.0,
            "ttft_max_s": 9.0,
            "tpot_p99_s": 0.02,
            "throughput_rps": 5.0,
            "preemptions": 3,
        }
        for policy, runs in by_policy.items()
        for load, p99 in runs.items()
    ]


def test_without_a_cache_ours_is_compared_with_the_seed(placement: ModuleType) -> None:
    rows = rows_of(kv_pressure={0.9: 2.0}, expected_ttft={0.9: 1.5})
    text = placement.to_markdown(placement.Figures(table="no-cache", loads=[0.9], rows=rows))
    row = "| mooncake-conv | 2 → 1.5 | 0.75 | 1.00 | 9 → 9 | 1.00 | 1.00 | 3 → 3 |"
    assert row in text.splitlines()
    assert "| **geometric mean** |  | **0.75** | **1.00** |" in text


def test_with_a_cache_ours_is_compared_with_the_best_single_peer_over_three_loads(
    placement: ModuleType,
) -> None:
    rows = rows_of(
        kv_pressure={0.9: 30.0},
        dynamo_style={0.87: 1.0, 0.9: 3.0, 0.93: 5.0},  # best at one, not of them all
        llm_d_style={0.87: 2.0, 0.9: 2.0, 0.93: 2.0},
        sglang_style={0.9: 4.0},
        early={0.9: 2.5, 1.0: 0.1},
        expected_ttft={0.87: 1.5, 0.9: 1.5, 0.93: 1.5},
    )
    text = placement.to_markdown(placement.Figures(table="prefix", loads=[0.9], rows=rows))
    row = "| mooncake-conv | 30 | 3 | 2 | 4 | 2.5 | **1.5** | 0.75 | 1.00 | 1.00 | 3 |"
    assert row in text.splitlines()


def test_a_plot_is_an_svg_with_a_dot_for_each_ratio(placement: ModuleType, traces: Path) -> None:
    for table, dots in (("no-cache", 3 * 8), ("prefix", 5 * 4)):
        plot = traces / f"{table}.svg"
        made(placement, traces, table, "--load", "0.9", "--jobs", "1", "--plot", str(plot))
        paths = ET.parse(plot).iter("{http://www.w3.org/2000/svg}path")  # noqa: S314 - our own
        marks = [path.get("d", "") for path in paths if "dot" in path.get("class", "")]
        keys = 6 if table == "prefix" else 4
        assert sum(mark.count("M") for mark in marks) == dots + keys


def test_a_table_without_a_plot_says_so(
    placement: ModuleType, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        made(placement, traces, "stale", "--plot", str(traces / "stale.svg"))
    assert "--plot: stale has none; no-cache, prefix have" in capsys.readouterr().err


def test_the_page_names_every_table_trace_and_only_options_that_exist(
    placement: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        placement.parsed(["--help"])
    known = set(re.findall(r"--[a-z]+", capsys.readouterr().out))
    commands = re.findall(r"placement\.py (.*)", PAGE)
    assert set(re.findall(r"--[a-z]+", " ".join(commands))) <= known
    assert set(re.findall(r"--table ([a-z-]+)", " ".join(commands))) == set(TABLES)
    for case in (*placement.TABLES["no-cache"].cases, *placement.TABLES["prefix"].cases):
        assert f"\n| {case.name} | " in PAGE
