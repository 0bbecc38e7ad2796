"""`dpkit explain --pick` is the dispatch's own decision, on the books of a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from trio.testing import wait_all_tasks_blocked

import dpkit
from dpkit.balancer.policies.expected_ttft import ExpectedTtft
from dpkit.cli.main import main
from dpkit.serve.status import plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., str]

CONFIG = """
    [balancer]
    policy = "{policy}"
    [[engines]]
    model = "cost:h100-8b"
    count = 3
"""
ASKED = '{"prompt_tokens": 1000, "max_tokens": 50}'


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    def run(
        state: object,
        *flags: str,
        policy: str = "expected_ttft",
        code: int = 0,
        config: str = CONFIG,
    ) -> str:
        (tmp_path / "dpkit.toml").write_text(config.format(policy=policy))
        (tmp_path / "state.json").write_text(json.dumps(state))
        where = (str(tmp_path / "dpkit.toml"), "--state", str(tmp_path / "state.json"))
        assert main(["explain", *where, *flags]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return run


def engine(number: int, inflight: int = 0, **more: Any) -> dict[str, Any]:
    core = {"running": inflight, "waiting": 0, "kv_cache_usage": 0.25}
    return {"engine": f"engine-{number}", "state": "ready", "core": core} | more


def state(*inflight: int) -> dict[str, Any]:
    """A cluster whose engines have so many requests of its one client."""
    requests = [
        {"request_id": f"{number}-{each}", "engine": f"engine-{number}", "prompt_tokens": 500}
        for number, count in enumerate(inflight)
        for each in range(count)
    ]
    return {
        "engines": [engine(number, count) for number, count in enumerate(inflight)],
        "clients": [{"requests": [*requests, {"request_id": "queued", "engine": None}]}],
    }


def test_each_candidate_has_its_score_and_the_least_is_picked(run: Run) -> None:
    picked = json.loads(run(state(4, 1, 2), "--pick", ASKED, "--json"))
    assert (picked["rule"], picked["engine"], picked["is_held"]) == (
        "expected_ttft",
        "engine-1",
        False,
    )
    scores = [each["score"] for each in picked["candidates"]]
    assert scores.index(min(scores)) == 1
    assert scores[1] < scores[2] < scores[0], "one that has more to do costs more"
    assert [each["inflight"] for each in picked["candidates"]] == [4, 1, 2]
    assert not any(each["reports"] for each in picked["candidates"])


def test_people_get_a_row_for_each_engine(run: Run) -> None:
    first, *rows = run(state(4, 1, 2), "--pick", ASKED).splitlines()
    assert first == "A prompt of 1,000 tokens goes to engine-1 at once, by expected_ttft."
    assert [row.split()[0] for row in rows] == ["engine-0", "*", "engine-2"]
    assert "4 in flight, 0 waiting, 4 running, 25% of KV in use; does not say" in rows[0]


def busy(*inflight: int) -> dict[str, Any]:
    """Engines that have more to read than a step takes."""
    told = state(*inflight)
    for each in told["engines"]:
        each["report"] = {"unprefilled_tokens": 90_000, "requests": 9, "kv_tokens": 450_000}
    return told


def test_a_request_that_no_engine_can_begin_is_held(run: Run) -> None:
    said = run(busy(9, 9, 9), "--pick", ASKED).splitlines()
    assert said[0].startswith("A prompt of 1,000 tokens is held for engine-")
    assert said[0].endswith(", until it can begin there, by expected_ttft.")
    assert "does not say" not in said[1]
    assert json.loads(run(busy(9, 9, 9), "--pick", ASKED, "--json"))["is_held"]


def test_several_clients_hold_as_one_does(run: Run) -> None:
    told = busy(9, 9)
    told["clients"].insert(0, {"requests": told["clients"][0]["requests"][:9]})
    del told["clients"][1]["requests"][:9]
    picked = json.loads(run(told, "--pick", ASKED, "--json"))
    assert picked["is_held"]
    assert [each["inflight"] for each in picked["candidates"]] == [9, 9], "of all clients"
    early = json.loads(run(told, "--pick", ASKED, "--json", "--set", "balancer.binding=early"))
    assert [each["inflight"] for each in early["candidates"]] == [9, 0], "of the first client"


class Mine(ExpectedTtft):
    """A policy of one's own that can hold requests, and so does."""


def test_a_policy_of_your_own_is_loaded_to_see_whether_it_holds(run: Run) -> None:
    asked = json.loads(run(busy(9, 9), "--pick", ASKED, "--json", policy=f"{__name__}:Mine"))
    assert asked["is_held"]


@pytest.mark.parametrize("policy", ["kv_pressure", "round_robin", "random"])
def test_any_policy_is_asked(run: Run, policy: str) -> None:
    picked = json.loads(run(state(1, 1), "--pick", ASKED, "--json", policy=policy))
    assert picked["rule"] == policy
    assert (picked["candidates"][0]["score"] is None) == (policy in {"round_robin", "random"})
    if policy == "round_robin":
        assert "no score" in run(state(1, 1), "--pick", ASKED, policy=policy)


def test_a_pin_is_followed_and_one_token_is_one(run: Run) -> None:
    said = run(state(9, 0), "--pick", '{"prompt_tokens": [7], "engine": "engine-0"}')
    assert said.startswith("A prompt of 1 token goes to engine-0 at once, by pinned.")


def test_engines_that_are_not_ready_are_no_candidates(run: Run) -> None:
    told = {"engines": [engine(0, state="down"), engine(1) | {"engine": "engine-1#3"}]}
    picked = json.loads(run({"statistics": told}, "--pick", ASKED, "--json"))
    assert [each["engine"] for each in picked["candidates"]] == ["engine-1#3"] == [picked["engine"]]


async def test_the_statistics_of_a_cluster_are_such_a_state(
    run: Run, autojump_clock: object
) -> None:
    config = dpkit.parse_config(CONFIG.format(policy="expected_ttft"))
    async with (
        dpkit.open_cluster(config) as cluster,
        cluster.client.generate([1] * 9000, max_tokens=9),
    ):
        await wait_all_tasks_blocked()
        told = plain(cluster.statistics())
    picked = json.loads(run(told, "--pick", ASKED, "--json"))
    assert [each["inflight"] for each in picked["candidates"]] == [1, 0, 0]
    assert picked["engine"] != "engine-0"
    assert all(each["reports"] for each in picked["candidates"])


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("{", "Input data was truncated"),
        ('{"prompt_tokens": "many"}', "Expected `int | array`, got `str`"),
        ('{"prompt_tokens": 0}', "the prompt has no token"),
        ('{"prompt_tokens": 100000000}', "no prompt has 100,000,000 tokens, 10,000,000 at most"),
        ('{"prompt_tokens": 5, "max_tokens": -1}', "max_tokens"),
        ('{"prompt_tokens": 5, "color": 1}', "Object contains unknown field `color`"),
    ],
)
def test_what_is_no_request_is_refused(run: Run, asked: str, problem: str) -> None:
    said = run(state(0), "--pick", asked, code=2)
    assert "--pick: " in said
    assert problem in said
    assert """write for example '{"prompt_tokens": 1000}'""" in said


@pytest.mark.parametrize("told", [[], {}, {"engines": 3}, {"engines": [{"engine": "a"}]}])
def test_what_is_no_state_is_refused(run: Run, told: object) -> None:
    said = " ".join(run(told, "--pick", ASKED, code=2).split())
    assert "state.json: " in said
    assert "it must be what a server's /statistics page says" in said


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (state(0, 0, 0), None),
        (state(0, 0), "without engine-2"),
        (state(*[0] * 7), "with engine-3, engine-4, engine-5 and 1 more"),
        (
            {"engines": [engine(0, engine=f"other-{n}#2") for n in (0, 1)]},
            "without engine-0, engine-1, engine-2, with other-0, other-1",
        ),
    ],
)
def test_a_state_of_other_engines_than_the_files_is_told(
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    told: object,
    said: str | None,
) -> None:
    file, books = str(tmp_path / "dpkit.toml"), str(tmp_path / "state.json")
    assert json.loads(run(told, "--pick", ASKED, "--json")), "it is picked all the same"
    assert main(["explain", file, "--state", books, "--pick", ASKED]) == 0
    warning = (
        f"warning: --state {books}: its engines, which the pick is among, are not those of {file}"
    )
    assert capsys.readouterr().err == (f"{warning}: {said}\n" if said else "")


@pytest.mark.parametrize("told", [b"# dpkit\n", b"\xff\xfe"])
def test_a_state_that_is_no_json_is_told_what_it_must_be(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], told: bytes
) -> None:
    run(state(0), "--pick", ASKED)
    (tmp_path / "README.md").write_bytes(told)
    where = [str(tmp_path / "dpkit.toml"), "--state", str(tmp_path / "README.md")]
    assert main(["explain", *where, "--pick", ASKED]) == 2
    said = "README.md: it is no JSON; it must be what a server's /statistics page says, or"
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_state_without_a_ready_engine_is_refused(run: Run) -> None:
    said = run({"engines": [engine(0, state="down")]}, "--pick", ASKED, code=2)
    assert "no engine is ready, so none may be picked" in said


def test_a_question_needs_both(run: Run) -> None:
    assert "--pick and --state go together" in run(state(0), code=2)


def test_an_engine_that_does_not_exist_is_told(run: Run) -> None:
    asked = '{"prompt_tokens": 5, "engine": "engine-7"}'
    assert "does not exist; the engines are engine-0" in run(state(0), "--pick", asked, code=1)


@pytest.mark.parametrize("pin", ["", ', "engine": "engine-0"'])
@pytest.mark.parametrize("policy", ["expected_ttft", "round_robin"])
def test_a_request_that_is_too_long_is_refused_as_its_engine_would(
    run: Run, policy: str, pin: str
) -> None:
    asked = f'{{"prompt_tokens": 9000000, "max_tokens": 20{pin}}}'
    said = " ".join(run(state(0, 0), "--pick", asked, policy=policy, code=1).split())
    assert said.startswith(
        "error: --pick: engine-0 would refuse the request: 9000000 prompt tokens and max_tokens ="
    )
    assert " more than the " in said


UNEQUAL = """
    [[engines]]
    name = "small"
    model = "cost:h100-8b"
    kv.num_blocks = 100
    [[engines]]
    name = "large"
    model = "cost:h100-8b"
    kv.num_blocks = 1000
"""


def test_a_request_that_fits_one_engine_goes_there_and_a_pin_to_another_is_refused(
    run: Run,
) -> None:
    told = {"engines": [engine(0, engine="small-0"), engine(0, engine="large-0")]}
    asked = '{"prompt_tokens": 2000, "max_tokens": 1'
    said = run(told, "--pick", asked + "}", config=UNEQUAL)
    assert said.startswith("A prompt of 2,000 tokens goes to large-0")
    said = run(told, "--pick", asked + ', "engine": "small-0"}', config=UNEQUAL, code=1)
    assert "small-0 would refuse the request: 2000 prompt" in said
    assert "400 more than the KV cache's 1600 (100 blocks)" in said
    said = run(told, "--pick", asked.replace("2", "20") + "}", config=UNEQUAL, code=1)
    assert "large-0 would refuse the request: 20000 prompt" in said


def test_neither_trio_nor_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "dpkit.toml").write_text(CONFIG.format(policy="expected_ttft"))
    (tmp_path / "state.json").write_text(json.dumps(state(0)))
    script = f"""
import sys
from dpkit.cli.main import main
assert main(["explain", "dpkit.toml", "--state", "state.json", "--pick", {ASKED!r}]) == 0
assert not {{"trio", "torch", "zmq"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)
