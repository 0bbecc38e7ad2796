"""Dispatch: pick and charge in one step, pins, ids that are in flight, and what policies hear."""

# ruff: noqa: ARG002 - what a policy is given is not for it to choose

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from dpkit.abc import HoldingPolicy, LoadView, Policy
from dpkit.balancer.dispatch import HELD, PINNED, expected_tokens
from dpkit.balancer.late import LateDispatch
from dpkit.balancer.policies import load_policy
from dpkit.errors import NoEngineReady, PolicyFailed, RequestRejected
from dpkit.messages import EngineId, GenerateRequest, Room, SamplingParams, Snapshot, StepReport
from dpkit.names import PolicyName

if TYPE_CHECKING:
    from tests.balancer.conftest import MakeClient


class Scripted(Policy):
    """Returns what the test says, and writes down what it hears."""

    def __init__(self, *picks: int, fail: BaseException | None = None) -> None:
        self.picks = list(picks)
        self.fail = fail
        self.heard: list[tuple[str, str, int]] = []

    def pick(self, request: GenerateRequest, view: LoadView) -> int:
        return self.picks.pop(0)

    def on_charge(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        self.heard.append(("charge", request.request_id, index))
        if self.fail is not None:
            raise self.fail

    def on_release(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        self.heard.append(("release", request.request_id, index))

    def on_snapshot(self, view: LoadView) -> None:
        self.heard.append(("snapshot", "", view.waiting[0]))

    def on_engines(self, view: LoadView) -> None:
        self.heard.append(("engines", "", len(view.engines)))


def test_a_placed_request_is_charged_to_the_engine_it_got(make_client: MakeClient) -> None:
    client = make_client(2)
    placement = client.place("r")
    assert (placement.index, placement.engine) == (0, EngineId("e0"))
    assert client.ledger.find("r") is placement.charge
    assert repr(client.dispatch) == (
        "<EarlyDispatch by kv_pressure: <Ledger: 1 in flight on 1 engines>>"
    )


def test_the_reason_tells_what_was_known_before_the_pick(make_client: MakeClient) -> None:
    client = make_client(2)
    client.snapshot((4, 6, 0.75), (9, 9, 0.75))
    placement = client.place()
    assert placement.reason[:6] == ("kv_pressure", 16.0, 0, 4, 6, 0.75)
    client.place()
    assert str(placement.reason) == (
        "kv_pressure with score 16: 0 in flight, 4 waiting, 6 running, 75% of KV in use, "
        "as told 0 s ago"
    )


def test_the_reason_tells_how_old_is_what_was_known(make_client: MakeClient) -> None:
    client = make_client(2, Scripted(0, 1, 0))
    first, second = client.view.engines

    def age(name: str, now: float) -> float | None:
        request = GenerateRequest(request_id=name, prompt_token_ids=(1,))
        return client.dispatch.place(request, now=now).reason.age_s

    client.dispatch.on_snapshot(Snapshot(loads=((0, 0, 0.0),)), now=2.0)
    assert age("a", 2.5) == 0.5
    assert age("b", 2.5) is None, "the snapshot does not speak of the second one"
    client.dispatch.on_report(first, StepReport(), now=4.0)
    assert age("c", 4.25) == 0.25
    held = client.dispatch.place(GenerateRequest(request_id="c", prompt_token_ids=(1,)), now=5.0)
    assert (held.reason.rule, held.reason.age_s) == (HELD, 1.0)
    assert str(held.reason).endswith("of KV in use, as told 1 s ago")
    assert client.view.loads[1].engine == second


def test_a_policy_without_scores_gives_a_reason_without_one(make_client: MakeClient) -> None:
    placement = make_client(1, Scripted(0)).place()
    assert placement.reason.score is None
    assert str(placement.reason).startswith(f"{Scripted.__module__}:Scripted: 0 in flight")


def test_releasing_a_placement_is_idempotent(make_client: MakeClient) -> None:
    client = make_client(1)
    placement = client.place()
    assert [client.dispatch.release(placement) for _ in range(3)] == [True, False, False]
    assert list(client.view.inflight) == [0]


def test_a_policy_hears_of_each_charge_release_and_snapshot_once(make_client: MakeClient) -> None:
    policy = Scripted(1)
    client = make_client(2, policy)
    placement = client.place("r")
    client.snapshot((5, 0, 0.0), (0, 0, 0.0))
    client.dispatch.on_snapshot(Snapshot(loads=None, current_wave=1))
    client.dispatch.release(placement)
    client.dispatch.release(placement)
    assert policy.heard == [("charge", "r", 1), ("snapshot", "", 5), ("release", "r", 1)]


def test_a_pin_is_honoured_charged_and_reported(make_client: MakeClient) -> None:
    client = make_client(4)
    client.snapshot((0, 0, 0.0), (0, 0, 0.0), (0, 0, 0.0), (9, 9, 1.0))
    placement = client.place(engine="e3")
    assert (placement.index, placement.reason.rule, placement.reason.score) == (3, PINNED, None)
    assert list(client.view.inflight) == [0, 0, 0, 1]


def test_a_pin_neither_bumps_the_queue_nor_rotates_the_scan(make_client: MakeClient) -> None:
    client = make_client(4)
    client.place(engine="e3")
    assert list(client.view.waiting) == [0, 0, 0, 0]
    assert client.place().index == 0


@pytest.mark.parametrize("name", ["e4", "", "E0"])
def test_a_pin_to_no_engine_is_refused_with_the_list(make_client: MakeClient, name: str) -> None:
    client = make_client(3)
    with pytest.raises(RequestRejected, match=r"the engines are e0, e1, e2$") as caught:
        client.place("r", engine=name)
    assert caught.value.request_id == "r"
    assert client.ledger.statistics().charged == 0


def test_an_id_in_flight_goes_to_the_engine_that_has_it(make_client: MakeClient) -> None:
    policy = Scripted(1, 0)
    client = make_client(2, policy)
    first = client.place("r")
    again = client.place("r", engine="e0")  # more input of the same request: the pin is too late
    assert (again.index, again.engine, again.reason.rule) == (1, first.engine, HELD)
    assert again.charge is first.charge
    assert list(client.view.inflight) == [0, 1]
    assert policy.heard == [("charge", "r", 1)]
    assert [client.dispatch.release(placement) for placement in (again, first)] == [True, False]


def test_an_id_in_flight_on_a_dead_life_is_refused(make_client: MakeClient) -> None:
    client = make_client(2)
    client.place("r", engine="e1")
    client.replace(1)
    with pytest.raises(RequestRejected, match="in flight on engine e1, which takes no more"):
        client.place("r")
    client.replace(1, EngineId("e9"))
    with pytest.raises(RequestRejected, match="in flight on engine e1, which takes no more"):
        client.place("r")


@pytest.mark.parametrize("index", [-1, 2, None, 1.0, True])
def test_a_policy_that_picks_no_engine_is_told_so(make_client: MakeClient, index: Any) -> None:
    client = make_client(2, Scripted(index))
    with pytest.raises(PolicyFailed) as caught:
        client.place("r")
    assert str(caught.value) == (
        f"cannot place request r: policy {__name__}:Scripted picked engine {index} of 2; `pick` "
        "must return an index into `view.engines`"
    )
    assert caught.value.request_id == "r"
    assert client.ledger.statistics().charged == 0


class Patient(Scripted):
    """Takes its time."""

    async def pick(  # type: ignore[override]
        self, request: GenerateRequest, view: LoadView
    ) -> int:
        return 0


def test_a_policy_whose_pick_is_async_is_told_so(make_client: MakeClient) -> None:
    client = make_client(2, Patient())
    with pytest.raises(PolicyFailed) as caught:  # and no warning of a coroutine not awaited
        client.place("r")
    assert str(caught.value) == (
        f"cannot place request r: policy {__name__}:Patient picked a coroutine; `pick` must not be "
        "async: it must return an index into `view.engines`"
    )
    assert client.ledger.statistics().charged == 0


@pytest.mark.parametrize("error", [NoEngineReady("not now"), KeyboardInterrupt()])
def test_a_policy_that_fails_leaves_no_charge(
    make_client: MakeClient, error: BaseException
) -> None:
    client = make_client(1, Scripted(0, fail=error))
    with pytest.raises(type(error)) as caught:
        client.place("r")
    assert caught.value is error
    assert client.ledger.statistics().inflight == 0


class Raises(HoldingPolicy):
    """Raises where the test says."""

    def __init__(self, at: str) -> None:
        self.at = at

    def pick(self, request: GenerateRequest, view: LoadView) -> int:
        self._pass("pick")
        return 0

    def score(self, request: GenerateRequest, index: int, view: LoadView) -> float | None:
        self._pass("score")
        return None

    def on_charge(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        self._pass("on_charge")

    def prepare(self, request: GenerateRequest) -> None:
        self._pass("prepare")

    def age(self, prospect: None) -> float:
        self._pass("age")
        return 0.0

    def open_pass(self, view: LoadView) -> Any:
        self._pass("open_pass")

    def _pass(self, at: str) -> None:
        if at == self.at:
            raise ValueError("no idea")


@pytest.mark.parametrize("at", ["pick", "score", "on_charge", "prepare", "age", "open_pass"])
def test_a_policy_that_raises_is_named_with_the_method(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    books = make_client(1)
    late = LateDispatch(books.ledger, books.view, Raises(at))
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,))
    does = {
        "prepare": lambda: late.prepare(request),
        "age": lambda: late.age(None),
        "open_pass": late.open_pass,
    }
    caplog.set_level("DEBUG")
    with pytest.raises(PolicyFailed) as caught:
        does.get(at, lambda: late.place(request))()
    assert str(caught.value) == (
        f"policy {__name__}:Raises raised ValueError: no idea; that was its {at}(), and "
        "log.level=debug logs its traceback"
    )
    assert isinstance(caught.value.__cause__, ValueError)
    assert books.ledger.statistics().inflight == 0
    [record] = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is caught.value.__cause__


def test_a_late_release_of_an_earlier_life_is_not_told_to_the_policy(
    make_client: MakeClient,
) -> None:
    policy = Scripted(0)
    client = make_client(1, policy)
    placement = client.place("r")
    client.replace(0)
    assert client.dispatch.release(placement)
    assert policy.heard == [("charge", "r", 0), ("engines", "", 0), ("engines", "", 1)]
    assert client.ledger.audit() == ()


def test_a_release_is_told_at_the_index_where_its_engine_is_now(make_client: MakeClient) -> None:
    policy = Scripted(2)
    client = make_client(3, policy)
    placement = client.place("r")
    client.dispatch.remove(EngineId("e0"))
    client.dispatch.release(placement)
    assert policy.heard[-1] == ("release", "r", 1)


def test_a_release_after_its_engine_left_touches_only_the_account(make_client: MakeClient) -> None:
    policy = Scripted(0, 0)
    client = make_client(2, policy)
    first, second = client.place("r"), client.place("s")
    client.dispatch.remove(EngineId("e0"))
    assert client.ledger.inflight(EngineId("e0")) == 2
    assert client.dispatch.release(first)
    assert client.ledger.inflight(EngineId("e0")) == 1
    assert list(client.view.inflight) == [0]
    assert [kind for kind, _, _ in policy.heard] == ["charge", "charge", "engines"]
    client.dispatch.add(EngineId("e0"), 0)
    assert list(client.view.inflight) == [1, 0], "the same life has what it had"
    client.dispatch.release(second)
    assert policy.heard[-1] == ("release", "s", 0)
    assert client.ledger.audit() == ()


def test_with_no_engine_there_is_no_room(make_client: MakeClient) -> None:
    client = make_client(2)
    assert client.dispatch.has_room()
    for name in ("e0", "e1"):
        assert client.dispatch.remove(EngineId(name))
    assert not client.dispatch.has_room()
    with pytest.raises(NoEngineReady, match=r"request r now: no engine is ready") as caught:
        client.place("r")
    assert caught.value.request_id == "r"
    assert client.ledger.statistics().charged == 0
    client.dispatch.add(EngineId("e1", epoch=1), 1)
    assert client.place("r").engine == EngineId("e1", epoch=1)


def test_a_pin_to_an_engine_that_is_away_is_no_mistake(make_client: MakeClient) -> None:
    client = make_client(2)
    client.dispatch.remove(EngineId("e1"))
    assert [client.dispatch.has_room(name) for name in ("e0", "e1", "e2")] == [True, False, True]
    with pytest.raises(NoEngineReady, match="no life of engine e1 is ready"):
        client.place("r", engine="e1")
    client.view.expect("e2")
    with pytest.raises(NoEngineReady, match="no life of engine e2 is ready"):
        client.place("r", engine="e2")
    client.view.forget("e1")
    with pytest.raises(RequestRejected, match=r"the engines are e0, e2$"):
        client.place("r", engine="e1")


def test_a_pin_before_there_is_any_engine_is_refused(make_client: MakeClient) -> None:
    client = make_client(0)
    assert client.dispatch.has_room("e0")
    with pytest.raises(RequestRejected, match=r"the engines are none yet$"):
        client.place("r", engine="e0")


def test_removing_what_is_not_there_says_so_and_tells_nobody(make_client: MakeClient) -> None:
    policy = Scripted()
    client = make_client(1, policy)
    assert not client.dispatch.remove(EngineId("e0", epoch=1))
    assert not client.dispatch.remove(EngineId("e9"))
    assert policy.heard == []


def test_the_output_of_an_earlier_life_weighs_as_much_as_a_prompt() -> None:
    request = GenerateRequest(
        request_id="r",
        prompt_token_ids=(1,) * 10,
        sampling=SamplingParams(max_tokens=8),
        output_token_ids=(2,) * 6,
    )
    assert expected_tokens(request) == 10 + 6 + 1


@pytest.mark.parametrize("name", list(PolicyName))
def test_another_policy_takes_over_with_all_that_is_known(
    make_client: MakeClient, name: PolicyName
) -> None:
    client = make_client(3)
    placements = [client.place(engine="e0"), client.place(), client.place()]
    assert client.view.changes
    client.policy.score(placements[0].request, 0, client.view)
    assert not client.view.changes, "the old policy has taken all news"
    client.use(load_policy(name, rng=random.Random(1)))
    placement = client.place()
    assert placement.reason.rule == name
    client.release([*placements, placement])
    assert list(client.view.inflight) == [0, 0, 0]


class Broken(Scripted):
    """Fails whenever it is told something."""

    def on_release(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        raise ZeroDivisionError("bookkeeping")

    def on_engines(self, view: LoadView) -> None:
        raise ZeroDivisionError("boards")

    def on_snapshot(self, view: LoadView) -> None:
        raise ZeroDivisionError("news")

    def on_report(self, index: int, view: LoadView) -> None:
        raise ZeroDivisionError("words")


def test_a_policy_that_fails_when_told_something_keeps_no_books_open(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(2, Broken(0))
    placement = client.place()
    assert client.dispatch.release(placement)
    assert not client.dispatch.release(placement)
    client.snapshot((0, 1, 0.0), (0, 0, 0.0))
    assert client.dispatch.remove(EngineId("e1"))
    assert client.ledger.audit() == ()
    assert list(client.view.running) == [1]
    client.dispatch.on_report(EngineId("e0"), StepReport())
    for hook in ("on_release", "on_snapshot", "on_engines", "on_report"):
        assert f"failed in {hook}(); its picks may be off" in caplog.text


class Hearing(Scripted):
    """Notes of which engines it hears."""

    def __init__(self, *picks: int) -> None:
        super().__init__(*picks)
        self.words: list[tuple[int, StepReport | None]] = []

    def on_report(self, index: int, view: LoadView) -> None:
        self.words.append((index, view.load(index).report))


def test_an_engines_own_word_reaches_the_policy_that_wants_it(make_client: MakeClient) -> None:
    policy = Hearing(0)
    client = make_client(2, policy)
    client.view.changes.clear()
    report = StepReport(unprefilled_tokens=7)
    client.dispatch.on_report(EngineId("e1"), report)
    assert policy.words == [(1, report)]
    assert client.view.changes == {1}
    client.dispatch.on_report(EngineId("e1", epoch=1), report)
    client.dispatch.on_report(EngineId("stranger"), report)
    assert len(policy.words) == 1, "only lives in the view count"
    client.replace(1)
    assert client.view.load(1).report is None


def test_who_makes_nothing_of_reports_has_nothing_to_renew(make_client: MakeClient) -> None:
    client = make_client(2, "kv_pressure")
    client.view.changes.clear()
    report = StepReport(unprefilled_tokens=7)
    client.dispatch.on_report(EngineId("e1"), report)
    assert client.view.load(1).report is report
    assert not client.view.changes
    policy = Hearing(0)
    client.use(policy)
    client.dispatch.on_report(EngineId("e0"), report)
    assert policy.words == [(0, report)]


@pytest.mark.parametrize("name", list(PolicyName))
def test_no_engine_is_taken_that_could_never_hold_the_request(
    make_client: MakeClient, name: PolicyName
) -> None:
    client = make_client(0, load_policy(name, rng=random.Random(0)))
    rooms = [None, *(Room(8192, 256, size, has_prefix_cache=False) for size in (64, 640, 64))]
    for rank, room in enumerate(rooms):
        client.dispatch.add(EngineId(f"e{rank}"), rank, room)

    def places(prompt: int, tokens: int = 5) -> set[int]:
        sampling = SamplingParams(max_tokens=tokens)
        found = set()
        for number in range(40):
            asked = GenerateRequest(
                request_id=f"{prompt}-{number}", prompt_token_ids=(7,) * prompt, sampling=sampling
            )
            placed = client.dispatch.place(asked)
            found.add(placed.index)
            client.release([placed])
        return found

    assert places(61) <= {0, 2}
    assert places(636) <= {0, 2}
    assert places(637) == {0}, "of which it is not known that it could not"
    client.dispatch.remove(EngineId("e0"))
    assert places(61) == {1}
    assert places(700) <= {0, 1, 2}, "whose engine says what is wrong with it"
    if name in {PolicyName.ROUND_ROBIN, PolicyName.RANDOM}:
        assert places(60) == {0, 1, 2}
