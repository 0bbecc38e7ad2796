"""Policies by name: each does what its description says, and any other name is refused clearly."""

# ruff: noqa: ARG002 - what a policy is given is not for it to choose

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from dpkit.abc import LoadView, Policy
from dpkit.balancer.policies import BUILTIN, load_policy, policy_name
from dpkit.balancer.policies.kv_pressure import KvPressure
from dpkit.balancer.policies.queue_weighted import QueueWeighted
from dpkit.errors import ConfigError
from dpkit.names import PolicyName

if TYPE_CHECKING:
    from pathlib import Path

    from dpkit.messages import GenerateRequest
    from tests.balancer.conftest import MakeClient


DRAWN = [PolicyName.POWER_OF_TWO, PolicyName.RANDOM]
EVEN = [name for name in PolicyName if name not in DRAWN]


class Outer:
    """A place to nest a policy in."""

    class Last(Policy):
        """Always the last engine."""

        def pick(self, request: GenerateRequest, view: LoadView) -> int:
            return len(view.engines) - 1

    class Drawn(Last):
        """Takes a generator."""

        def __init__(self, rng: random.Random | None = None) -> None:
            self.rng = rng


class NeedsArgument(Outer.Last):
    """Cannot be made from a name."""

    def __init__(self, weight: int) -> None:
        self.weight = weight


def test_every_name_has_a_policy_that_says_its_name() -> None:
    assert set(BUILTIN) == set(PolicyName)
    assert [policy_name(load_policy(name)) for name in PolicyName] == list(PolicyName)


def test_each_load_gives_a_fresh_policy() -> None:
    assert load_policy("kv_pressure") is not load_policy("kv_pressure")


@pytest.mark.parametrize("name", EVEN)
def test_equal_idle_engines_share_a_burst(make_client: MakeClient, name: PolicyName) -> None:
    client = make_client(4, name)
    client.burst(40)
    assert list(client.view.inflight) == [10, 10, 10, 10]


@pytest.mark.parametrize("name", sorted(set(PolicyName) - {"round_robin", "random"}))
def test_policies_that_look_at_load_avoid_the_loaded_engine(
    make_client: MakeClient, name: PolicyName
) -> None:
    client = make_client(2, name, count=2)
    client.snapshot((40, 20, 0.9), (0, 1, 0.1))
    assert client.burst(8) == [1] * 8


def test_inflight_takes_the_larger_of_own_and_reported(make_client: MakeClient) -> None:
    client = make_client(3, "inflight", index=2, count=3)
    client.snapshot((2, 1, 1.0), (0, 4, 0.0), (0, 0, 0.0))
    placements = [client.place() for _ in range(3)]
    assert [placement.index for placement in placements] == [2, 2, 2]
    assert [placement.reason.score for placement in placements] == [0, 1, 2]
    # Ties go to the lowest index; neither KV nor the number of clients counts.
    assert client.burst(5) == [0, 0, 0, 0, 2]


def test_queue_weighted_looks_at_the_snapshot_alone(make_client: MakeClient) -> None:
    client = make_client(2, "queue_weighted")
    client.snapshot((1, 0, 0.0), (0, 3, 1.0))
    placement = client.place()
    assert (placement.index, placement.reason.score) == (1, 3)
    for _ in range(8):  # blind to its own requests once a snapshot comes
        client.hear_nothing_but_zeros()
        client.place()
    assert list(client.view.inflight) == [8, 1]


def test_queue_weighted_counts_its_pick_once_for_each_client(make_client: MakeClient) -> None:
    client = make_client(4, "queue_weighted", index=1, count=2)
    assert client.burst(6) == [2, 3, 0, 1, 2, 3], "no snapshot ever: round robin"
    assert list(client.view.waiting) == [2, 2, 4, 4]


def test_round_robin_goes_round_whatever_the_load(make_client: MakeClient) -> None:
    client = make_client(3, "round_robin")
    client.snapshot((50, 50, 1.0), (0, 0, 0.0), (0, 0, 0.0))
    assert client.burst(7) == [0, 1, 2, 0, 1, 2, 0]
    assert list(client.view.waiting) == [50, 0, 0]


def test_round_robin_clients_begin_spread_over_the_engines(make_client: MakeClient) -> None:
    clients = [make_client(4, "round_robin", index=index, count=2) for index in range(2)]
    assert [client.burst(2) for client in clients] == [[0, 1], [2, 3]]


def test_least_tokens_weighs_the_prompt_and_half_of_max_tokens(make_client: MakeClient) -> None:
    client = make_client(3, "least_tokens")
    assert [client.place(tokens=tokens).index for tokens in (1000, 500, 300)] == [0, 1, 2]
    placement = client.place(tokens=100)  # max_tokens is 128 where nothing is said
    assert (placement.index, placement.reason.score) == (2, 300 + 64)
    assert [load.tokens for load in client.view.loads] == [1064, 564, 528]
    client.release([placement])
    assert client.place(tokens=1).index == 2


def test_least_tokens_takes_a_request_of_others_for_as_large_as_ones_own(
    make_client: MakeClient,
) -> None:
    client = make_client(2, "least_tokens", count=2)
    client.snapshot((0, 1, 0.0), (0, 0, 0.0))  # nothing of its own yet: a request is a request
    assert client.place(tokens=936).index == 1
    assert client.place(engine="e0", tokens=1).reason.score is None
    assert client.place(tokens=1).reason.score == 1000, "its own were of 1000 tokens"
    assert [(load.tokens, load.others) for load in client.view.loads] == [(65, 1), (1065, 0)]
    client.snapshot((0, 2, 0.0), (0, 2, 0.0))
    placement = client.place()
    assert (placement.index, placement.reason.score) == (0, 65 + (65 + 1065) / 3)


def test_power_of_two_compares_two_engines(make_client: MakeClient) -> None:
    policy = load_policy("power_of_two", rng=random.Random(1))
    client = make_client(4, policy, count=2)
    client.snapshot((0, 9, 0.0), (0, 8, 0.0), (0, 7, 0.0), (0, 6, 0.0))
    drawn: Counter[int] = Counter()
    for _ in range(600):
        placement = client.place()
        drawn[placement.index] += 1
        client.release([placement])
    assert drawn[0] == 0, "the fullest loses to whichever it is drawn with"
    assert drawn[1] < drawn[2] < drawn[3]
    assert make_client(1, policy).burst(3) == [0, 0, 0]


def test_power_of_two_stays_within_a_few_requests_of_even(make_client: MakeClient) -> None:
    client = make_client(16, load_policy("power_of_two", rng=random.Random(2)))
    client.burst(1600)
    assert max(client.view.inflight) <= 100 + 4


def test_random_draws_every_engine_about_as_often(make_client: MakeClient) -> None:
    client = make_client(4, load_policy("random", rng=random.Random(3)))
    client.snapshot((90, 90, 1.0), (0, 0, 0.0), (0, 0, 0.0), (0, 0, 0.0))
    assert all(900 < count < 1100 for count in Counter(client.burst(4000)).values())
    assert client.place().reason.score is None


@pytest.mark.parametrize("name", DRAWN)
def test_draws_are_repeated_from_a_seed(make_client: MakeClient, name: PolicyName) -> None:
    first, again, other = (
        make_client(8, load_policy(name, rng=random.Random(seed))).burst(50) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert make_client(8, name).burst(50), "without a generator they have one of their own"


def test_a_policy_of_ones_own_may_ask_for_a_generator() -> None:
    rng = random.Random(4)
    policy = load_policy(f"{__name__}:Outer.Drawn", rng=rng)
    assert isinstance(policy, Outer.Drawn)
    assert policy.rng is rng


@pytest.mark.parametrize("name", list(PolicyName))
def test_a_pinned_request_takes_no_turn(make_client: MakeClient, name: PolicyName) -> None:
    with_pins, without = (make_client(3, load_policy(name, rng=random.Random(5))) for _ in range(2))
    picks = []
    for _ in range(6):
        pinned = with_pins.place(engine="e2", tokens=100)
        with_pins.release([pinned])
        picks.append(with_pins.place().index)
    assert picks == without.burst(6)
    assert list(with_pins.view.waiting) == list(without.view.waiting)


def test_the_constants_can_be_set(make_client: MakeClient) -> None:
    client = make_client(2, KvPressure(kv_weight=100.0, kv_threshold=0.0))
    client.snapshot((1, 0, 0.1), (0, 9, 0.0))
    placement = client.place()
    assert (placement.index, placement.reason.score) == (1, 9)
    client = make_client(2, QueueWeighted(waiting_weight=1))
    client.snapshot((2, 0, 0.0), (0, 3, 0.0))
    assert client.place().index == 0


@pytest.mark.parametrize("name", [PolicyName.KV_PRESSURE, PolicyName.ROUND_ROBIN])
def test_the_rotation_goes_on_when_an_engine_is_replaced(
    make_client: MakeClient, name: PolicyName
) -> None:
    client = make_client(3, name)
    first = client.place()
    client.replace(0)
    assert client.burst(2) == [1, 2]
    client.release([first])
    assert client.place().index == 0


def test_a_policy_of_ones_own_is_named_by_module_and_class() -> None:
    name = f"{__name__}:Outer.Last"
    policy = load_policy(name)
    assert isinstance(policy, Outer.Last)
    assert policy_name(policy) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "kv_presure",
            (
                "there is no policy 'kv_presure': the built-in ones are kv_pressure, inflight, "
                "queue_weighted, least_tokens, power_of_two, round_robin, random, expected_ttft; "
                "one of your own is named 'pkg.mod:Class'; "
                "did you mean 'kv_pressure'?"
            ),
        ),
        (
            "zzz",
            (
                "there is no policy 'zzz': the built-in ones are kv_pressure, inflight, "
                "queue_weighted, least_tokens, power_of_two, round_robin, random, expected_ttft; "
                "one of your own is named 'pkg.mod:Class'"
            ),
        ),
        (
            "no_such_module:Class",
            (
                "policy 'no_such_module:Class': No module named 'no_such_module'; is its "
                "directory on PYTHONPATH?"
            ),
        ),
        (":Class", "policy ':Class': module '' cannot be imported: Empty module name"),
        (
            "json:Missing",
            "policy 'json:Missing': module 'json' has no 'Missing'",
        ),
        (
            f"{__name__}:NeedArgument",
            (
                f"policy '{__name__}:NeedArgument': module '{__name__}' has no 'NeedArgument'; "
                "did you mean 'NeedsArgument'?"
            ),
        ),
        (
            "json:JSONDecoder",
            (
                "policy 'json:JSONDecoder': 'JSONDecoder' in module 'json' is "
                "<class 'json.decoder.JSONDecoder'>; it must be a subclass of dpkit.abc.Policy"
            ),
        ),
        (
            f"{__name__}:NeedsArgument",
            (
                f"policy '{__name__}:NeedsArgument' cannot be made without arguments: "
                "NeedsArgument.__init__() missing 1 required positional argument: 'weight'"
            ),
        ),
    ],
)
def test_a_name_that_makes_no_policy_is_refused_with_the_way_out(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(name)
    assert caught.value.problems == (message,)


def test_an_abstract_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be made without arguments: .*abstract"):
        load_policy("dpkit.abc:Policy")


def test_a_module_that_fails_to_import_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_policy.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be imported: at import") as caught:
        load_policy("broken_policy:Class")
    assert isinstance(caught.value.__cause__, RuntimeError)
