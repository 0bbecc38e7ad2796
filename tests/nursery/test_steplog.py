"""The step log says what the engines did, in the form in which step tables are published."""

from __future__ import annotations

import csv
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

import dpkit
from dpkit.costmodel import PRESETS
from dpkit.messages import EngineId, StepReport, StepWork
from dpkit.nursery import steplog
from dpkit.nursery.steplog import StepLog

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

CONFIG = """
    log.steps = "{path}"
    [[engines]]
    model = "{model}"
    count = {count}
    process.start = "fork"
    kind = "{kind}"
"""


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def config(path: Path, *, model: str = "cost:h100-8b", kind: str = "local", count: int = 1) -> Any:
    text = CONFIG.format(path=path, model=model, kind=kind, count=count)
    if kind == "local":
        text = text.replace('    process.start = "fork"\n', "")
    return dpkit.parse_config(text)


async def test_every_step_is_a_row_that_says_what_it_cost(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    async with dpkit.open_cluster(config(path)) as cluster, trio.open_nursery() as nursery:
        client = cluster.client
        for number in range(3):
            nursery.start_soon(partial(client.complete, [number] * (100 + number), max_tokens=5))
    table = rows(path)
    assert [row["kind"] for row in table] == ["prefill"] + ["decode"] * 4
    assert {row["engine"] for row in table} == {"engine-0"}
    cost = PRESETS["h100-8b"].cost
    for row in table:
        tokens = int(row["prefill_tokens"])
        seconds = cost.seconds(
            decodes=int(row["decode_seqs"]),
            prefill_tokens=tokens,
            decode_context=int(row["kv_tokens"]),
            prefill_context=tokens * (float(row["prefill_context"]) + tokens / 2),
        )
        assert float(row["step_ms"]) >= seconds * 1e3 - 1e-3, "it slept for as long, at least"


async def test_a_file_that_is_there_grows_and_has_one_header(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    for expected in (2, 4):
        async with dpkit.open_cluster(config(path)) as cluster:
            await cluster.client.complete("abc", max_tokens=2)
        assert len(rows(path)) == expected
    assert path.read_text().count("step_ms") == 1


async def test_engines_in_processes_are_told_of_too(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    with trio.fail_after(30):
        async with dpkit.open_cluster(config(path, model="echo", kind="process")) as cluster:
            await cluster.client.complete("abc", max_tokens=4)
    assert [int(row["prefill_tokens"]) for row in rows(path)] == [3, 0, 0, 0]
    assert [int(row["decode_seqs"]) for row in rows(path)] == [0, 1, 1, 1]
    assert all(float(row["step_ms"]) > 0 for row in rows(path))


async def test_steps_that_no_file_takes_are_in_the_statistics(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    async with dpkit.open_cluster(config(folder / "steps.csv")) as cluster:
        folder.rmdir()
        assert cluster.statistics().steps_lost == 0
        await cluster.client.complete("abc", max_tokens=1)
        with trio.fail_after(20):
            while not cluster.statistics().steps_lost:  # noqa: ASYNC110 - a disk tells nobody
                await trio.sleep(0.01)
        assert cluster.statistics().steps_lost == 1
        assert cluster.statistics().events_lost == 0


async def test_a_step_is_noted_once_and_those_of_a_new_life_again(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.csv")
    for epoch, steps in ((0, 0), (0, 1), (0, 1), (0, 2), (1, 0), (1, 1), (0, 3)):
        report = StepReport(
            steps=steps,
            step_time_s=0.5,
            last_step=StepWork(prefill_tokens=4, prefill_context=4 * 12, decodes=1),
        )
        log.on_report(EngineId("e", epoch), report)
    await log.flush()
    table = rows(tmp_path / "steps.csv")
    assert [row["engine"] for row in table] == ["e", "e", "e#1"]
    assert {(row["prefill_context"], row["kind"], row["step_ms"]) for row in table} == {
        ("10", "mixed", "500.0000")
    }


async def test_what_cannot_be_written_is_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steplog, "CAPACITY", 2)
    log = StepLog(tmp_path / "away" / "steps.csv")
    for steps in range(1, 4):
        log.on_report(EngineId("e"), StepReport(steps=steps))
    assert log.lost == 1, "the writer was too slow"
    await log.flush()
    log.on_report(EngineId("e"), StepReport(steps=9))
    await log.flush()
    assert log.lost == 4
    [record] = caplog.records
    assert record.getMessage().startswith(f"step log {tmp_path}/away/steps.csv: ")
    assert record.getMessage().endswith(
        f"No such file or directory: '{tmp_path}/away/steps.csv'; trying again every minute"
    )
