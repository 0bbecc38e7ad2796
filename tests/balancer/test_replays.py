"""dpkit chooses and publishes as vLLM 0.33.0 does, event by event; and the replays can fail."""

from __future__ import annotations

import gzip
import itertools
import json
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from click.testing import CliRunner, Result

from dpkit.balancer.ledger import Account
from dpkit.messages import EngineId
from dpkit.testing import coordinator, picks
from dpkit.testing.replay import SHOWN, ReplayFileError, read_cases

if TYPE_CHECKING:
    from collections.abc import Callable

    import click

DATA = Path(__file__).parents[1] / "data"
PICKS = DATA / "seed-picks.json.gz"
COORDINATOR = DATA / "coordinator-golden.json.gz"
TOOLS = {PICKS: picks.main, COORDINATOR: coordinator.main}


def run(tool: click.Command, path: Path) -> Result:
    return CliRunner().invoke(tool, [str(path)])


class Alter(Protocol):
    """Replays a copy of a recorded file's first cases, as plain JSON, with a change."""

    def __call__(self, recorded: Path, change: Callable[[list[Any]], object]) -> Result:
        """Return how the tool of that file ended."""


@pytest.fixture
def altered(tmp_path: Path) -> Alter:
    def alter(recorded: Path, change: Callable[[list[Any]], object]) -> Result:
        cases = read_cases(recorded)[:4]
        change(cases)
        path = tmp_path / "altered.json"
        path.write_text(json.dumps({"cases": cases}))
        return run(TOOLS[recorded], path)

    return alter


def test_every_recorded_pick_is_made() -> None:
    result = run(picks.main, PICKS)
    assert result.output == "picks: 10 cases, 5300 events, 3088 picks: all equal\n"
    assert result.exit_code == 0


def test_every_recorded_message_is_sent_in_time() -> None:
    result = run(coordinator.main, COORDINATOR)
    assert result.output == "coordinator: 100 cases, 1430 events, 1180 messages: all equal\n"
    assert result.exit_code == 0


@pytest.mark.parametrize("recorded", [PICKS, COORDINATOR], ids=["picks", "coordinator"])
def test_the_tools_run_as_modules(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"dpkit.testing.{'picks' if recorded is PICKS else 'coordinator'}"
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "argv", [module, str(recorded)])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module(module, run_name="__main__")
    assert caught.value.code == 0


def test_one_altered_pick_is_found(altered: Alter) -> None:
    result = altered(PICKS, lambda cases: cases[3]["events"][0].update(engine=1))
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "picks: 4 cases, 2000 events, 1185 picks: 1 differences, the first of them:",
        (
            "  cases[3].events[0]: r1 went to engine 0, the file says 1 "
            "(kv_pressure with score 0: 0 in flight, 0 waiting, 0 running, 0% of KV in use)"
        ),
    ]


def test_one_lost_finish_is_found(altered: Alter) -> None:
    result = altered(PICKS, lambda cases: cases[0]["events"][2]["finish"].clear())
    assert result.exit_code == 1


def test_the_first_ten_differences_are_shown(altered: Alter) -> None:
    def pick_nothing(cases: list[Any]) -> None:
        for event in cases[0]["events"]:
            if "pick" in event:
                event["engine"] = 2

    result = altered(PICKS, pick_nothing)
    assert result.exit_code == 1
    assert ": 359 differences, the first of them:\n" in result.output
    assert len(result.output.splitlines()) == 1 + SHOWN


def test_one_altered_count_at_the_end_is_found(altered: Alter) -> None:
    result = altered(PICKS, lambda cases: cases[1]["inflight_at_end"].reverse())
    assert result.exit_code == 1
    assert "cases[1]: in flight at the end [2, 6], the file says [6, 2]" in result.output


def test_a_ledger_that_contradicts_itself_is_found() -> None:
    case = picks.Case.parse(read_cases(PICKS)[0], "cases[0]")
    case.ledger._accounts[EngineId("ghost")] = Account(EngineId("ghost"), inflight=1)
    assert list(case.differences("cases[0]")) == [
        (
            "cases[0]: the ledger contradicts itself: ghost counts 1 requests of 0 tokens, "
            "charged are 0 requests of 0 tokens"
        )
    ]


def test_unknown_and_repeated_finishes_change_nothing(altered: Alter) -> None:
    def repeat(cases: list[Any]) -> None:
        finishes = [event["finish"] for event in cases[0]["events"] if "finish" in event]
        for earlier, later in itertools.pairwise(finishes):
            later.extend(["never heard of", *earlier[:1]])

    assert altered(PICKS, repeat).exit_code == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: sent[1]["message"][0][0].reverse(),
        lambda sent: sent[1].update(t_ms=sent[1]["t_ms"] + 1.1),
        lambda sent: sent.insert(1, sent[1]),
        lambda sent: sent.pop(1),
        lambda sent: sent.append({**sent[-1], "t_ms": sent[-1]["t_ms"] + 50}),
        lambda sent: sent[1].update(message=[None, 0, True]),
    ],
    ids=["content", "time", "twice", "lost", "one more", "wave"],
)
def test_one_altered_message_is_found(
    altered: Alter, change: Callable[[list[dict[str, Any]]], object]
) -> None:
    result = altered(COORDINATOR, lambda cases: change(cases[0]["sent"]))
    assert result.exit_code == 1
    assert "\n  cases[0].sent[" in result.output


def test_times_may_differ_by_a_millisecond(altered: Alter) -> None:
    def shift(cases: list[Any]) -> None:
        for sent in cases[0]["sent"]:
            sent["t_ms"] += 0.9

    assert altered(COORDINATOR, shift).exit_code == 0


def test_a_difference_says_what_was_sent_and_what_is_recorded(altered: Alter) -> None:
    result = altered(COORDINATOR, lambda cases: cases[0]["sent"].pop())
    assert result.exit_code == 0, "a run ends with the last message recorded"
    last = read_cases(COORDINATOR)[0]["sent"][-1]
    result = altered(
        COORDINATOR, lambda cases: cases[0]["sent"].append({**last, "t_ms": last["t_ms"] + 1})
    )
    assert result.exit_code == 1
    assert "sent nothing more, the file says Snapshot(" in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: [Errno 2] No such file or directory"),
        (b"{", "cannot be read: Expecting property name"),
        (b"\xff", "cannot be read: 'utf-8' codec"),
        (gzip.compress(b'{"cases": [1]}')[:-9], "cannot be read: "),
        (b"\x1f\x8bnot gzip at all", "cannot be read: "),
        (gzip.compress(b"x" * 99)[:12] + b"\xff" * 20, "cannot be read: "),
        (b"{}", "is no replay file: it has no 'cases'"),
        (b"[]", "is no replay file: it has no 'cases'"),
        (b'{"cases": []}', "is no replay file: 'cases' must be a list that is not empty"),
        (b'{"cases": {"a": 1}}', "is no replay file: 'cases' must be a list that is not empty"),
        (b'{"cases": [7]}', "cases[0] is not as the format has it: TypeError"),
        (b'{"cases": [{}]}', "cases[0] is not as the format has it: KeyError"),
    ],
)
@pytest.mark.parametrize("tool", TOOLS.values(), ids=["picks", "coordinator"])
def test_a_bad_file_is_named_with_what_is_wrong(
    tmp_path: Path, tool: click.Command, content: bytes | None, message: str
) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    result = run(tool, path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {path}: {message}")
    assert not result.stdout


@pytest.mark.parametrize(
    ("recorded", "change", "place"),
    [
        (PICKS, lambda case: case.update(client_index=9), "cases[0]"),
        (PICKS, lambda case: case.update(engines=0), "cases[0]"),
        (PICKS, lambda case: case["events"].insert(1, {"skip": 1}), "cases[0].events[1]"),
        (PICKS, lambda case: case["events"].insert(1, []), "cases[0].events[1]"),
        (PICKS, lambda case: case["events"][0].update(pinned=9), "cases[0].events[0]"),
        (PICKS, lambda case: case["events"].insert(1, {"snapshot": [[1]]}), "cases[0].events[1]"),
        (COORDINATOR, lambda case: case["events"].insert(1, [0]), "cases[0].events[1]"),
        (COORDINATOR, lambda case: case["events"][0][1].pop("stats"), "cases[0].events[0]"),
        (COORDINATOR, lambda case: case["events"][0][1].pop("engine"), "cases[0].events[0]"),
        (COORDINATOR, lambda case: case["sent"][2].update(to="nobody"), "cases[0].sent[2]"),
        (COORDINATOR, lambda case: case["sent"][2]["message"][0].append(1), "cases[0].sent[2]"),
    ],
)
def test_a_malformed_part_of_a_file_is_named(
    altered: Alter, recorded: Path, change: Callable[[dict[str, Any]], object], place: str
) -> None:
    result = altered(recorded, lambda cases: change(cases[0]))
    assert result.exit_code == 2
    assert f": {place} is not as the format has it: " in result.stderr


@pytest.mark.parametrize(
    ("recorded", "change", "said"),
    [
        (PICKS, lambda case: case.update(engines=0), "there is no engine to pick"),
        (
            PICKS,
            lambda case: case["events"].insert(1, {"skip": 1}),
            "no event of this kind is known: {'skip': 1}",
        ),
        (
            COORDINATOR,
            lambda case: case["events"][0].__setitem__(1, {"engine": 0}),
            "no event of this kind is known: {'engine': 0}",
        ),
        (
            COORDINATOR,
            lambda case: case["sent"].insert(2, {"to": "nobody"}),
            "no message of this kind is known: {'to': 'nobody'}",
        ),
    ],
)
def test_what_is_malformed_is_said(
    altered: Alter, recorded: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    result = altered(recorded, lambda cases: change(cases[0]))
    assert f"is not as the format has it: ValueError: {said}" in result.stderr


def test_a_file_that_cannot_be_replayed_raises_for_whoever_calls() -> None:
    with pytest.raises(ReplayFileError, match="is not as the format has it"):
        picks.replay([{}])
