"""Requests that wait for the engine they are for: nothing of them is anywhere else meanwhile."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio
from attrs import evolve

from dpkit.balancer.health import Health
from dpkit.balancer.late import make_dispatch
from dpkit.balancer.ledger import Ledger
from dpkit.balancer.policies import load_policy
from dpkit.balancer.policies.expected_ttft import ExpectedTtft
from dpkit.balancer.policies.round_robin import RoundRobin
from dpkit.balancer.view import LoadView
from dpkit.config.load import parse_config
from dpkit.config.schema import BalancerConfig
from dpkit.errors import (
    ConfigError,
    DeadlineExceeded,
    Draining,
    EngineLost,
    Overloaded,
    RequestRejected,
)
from dpkit.messages import EngineId, EngineOutput, Room
from dpkit.names import Binding, Cause, FinishReason
from dpkit.nursery.client import Client
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.nursery.events import EventLog
from dpkit.nursery.flight import Limits
from dpkit.nursery.flights import Flights
from dpkit.nursery.line import SCAN
from dpkit.nursery.membership import Membership
from dpkit.testing.faults import CRASH
from dpkit.text.bytes import ByteTokenizer
from tests.nursery.lab import STEP_S, Lab, Timed, loop_of, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit.abc import Policy
    from dpkit.messages import GenerateRequest
    from dpkit.nursery.submission import Submission

# Steps of 100 ms with 8 tokens each.
LATE = 'balancer = { policy = "expected_ttft" }\n'
SMALL = "max_num_batched_tokens = 8, max_num_seqs = 4"


def lab(engines: int = 2, *, settings: str = LATE, blocks: int = 1024) -> Lab:
    models = [Timed() for _ in range(engines)]
    return Lab(models, settings=settings, scheduler=SMALL, blocks=blocks)


def ask(cluster: Cluster, tokens: int, **options: object) -> Submission:
    """A request of so many tokens, none of them shared."""
    ask.count += 1  # type: ignore[attr-defined]
    prompt = [ask.count % 200] * tokens  # type: ignore[attr-defined]
    return cluster.client.submit(prompt, sink=lambda _: None, max_tokens=8, **options)  # type: ignore[arg-type]


ask.count = 0  # type: ignore[attr-defined]


def known(cluster: Cluster) -> list[set[str]]:
    """Ids that each engine knows."""
    return [{*loop_of(slot).inbox.queued, *loop_of(slot)._deliver} for slot in cluster._slots]


async def fill_up(cluster: Cluster, engines: int = 2) -> list[Submission]:
    """Give every engine a step and a half of prompt: no more fits beside it."""
    long = [ask(cluster, 16, engine=f"e{number}-0") for number in range(engines)]
    await trio.testing.wait_all_tasks_blocked()
    return long


async def test_a_request_goes_at_once_while_its_engine_can_begin_it(autojump_clock: object) -> None:
    async with lab().open() as cluster:
        first, second = ask(cluster, 4), ask(cluster, 4)
        assert [str(first.engine), str(second.engine)] == ["e0-0", "e1-0"]
        assert cluster.client.statistics().binding is Binding.LATE


async def test_what_no_engine_can_begin_waits_at_the_client(autojump_clock: object) -> None:
    async with lab().open() as cluster:
        await fill_up(cluster)
        waiting = ask(cluster, 4)
        assert not any(waiting.request_id in ids for ids in known(cluster))
        statistics = cluster.client.statistics()
        assert (statistics.queued, statistics.admission.queued) == (1, 1)
        await settle()
        assert waiting.engine is not None
        assert not cluster.audit()


async def test_leaving_while_waiting_costs_no_engine_anything(autojump_clock: object) -> None:
    made = lab()
    async with made.open() as cluster:
        await fill_up(cluster)
        waiting = ask(cluster, 4)
        waiting.close()
        assert cluster.client.statistics().queued == 0
        await trio.sleep(2)
        assert all(waiting.request_id not in ids for each in made.watched for _, ids in each.steps)
        aborted = sum(engine.core.requests_aborted for engine in cluster.statistics().engines)
        assert aborted == 0
        assert not cluster.audit()


async def test_a_held_request_lets_others_pass_elsewhere(autojump_clock: object) -> None:
    async with lab().open() as cluster:
        ask(cluster, 16, engine="e0-0")
        await trio.testing.wait_all_tasks_blocked()
        pinned = ask(cluster, 4, engine="e0-0")
        other = ask(cluster, 4)
        assert pinned.engine is None
        assert str(other.engine) == "e1-0"
        assert [str(each) for each in cluster.client.statistics().unreported] == ["e1-0"]
        await settle()
        assert cluster.client.statistics().unreported == ()
        assert str(pinned.engine) == "e0-0"


async def test_however_many_are_pinned_to_a_busy_engine_others_pass_them(
    autojump_clock: object,
) -> None:
    async with lab().open() as cluster:
        ask(cluster, 16, engine="e0-0")
        await trio.testing.wait_all_tasks_blocked()
        pinned = [ask(cluster, 1, engine="e0-0") for _ in range(2 * SCAN)]
        other = ask(cluster, 4)
        assert str(other.engine) == "e1-0"
        for each in pinned[::2]:
            each.close()
        await trio.sleep(20)
        assert all(each.finish_reason is not None for each in pinned[1::2])
        assert cluster.client.statistics().queued == 0
        assert not cluster.audit()


async def test_nobody_passes_whoever_is_held_on_its_engine(autojump_clock: object) -> None:
    async with lab(1).open() as cluster:
        await fill_up(cluster, 1)
        first = ask(cluster, 16)
        await trio.sleep(STEP_S / 2)  # longer than the first one's size makes it wait
        second = ask(cluster, 1)
        assert cluster.client.statistics().queued == 2
        for _ in range(20):
            if second.engine is not None:
                assert first.engine is not None
            await settle()
        assert second.engine is not None


async def test_a_lower_priority_number_goes_first(autojump_clock: object) -> None:
    async with lab(1).open() as cluster:
        await fill_up(cluster, 1)
        late = [ask(cluster, 8, priority=2), ask(cluster, 8, priority=1)]
        await settle()
        assert [each.engine is None for each in late] == [True, False]


async def test_tenants_share_what_there_is(autojump_clock: object) -> None:
    async with lab(1).open() as cluster:
        await fill_up(cluster, 1)
        greedy = [ask(cluster, 8, tenant="a") for _ in range(3)]
        modest = ask(cluster, 8, tenant="b")
        placed: list[str] = []
        for _ in range(12):
            await settle()
            placed += [
                each.request_id
                for each in (*greedy, modest)
                if each.engine is not None and each.request_id not in placed
            ]
        assert placed.index(modest.request_id) == 1


async def test_a_deadline_ends_a_request_that_waits(autojump_clock: object) -> None:
    async with lab(1).open() as cluster:
        for _ in range(4):  # as many as the engine takes at all
            ask(cluster, 1)
        with pytest.raises(DeadlineExceeded, match="after 0 tokens"):
            await cluster.client.complete("x", timeout=0.15)
        assert cluster.client.statistics().causes[Cause.DEADLINE] == 1
        assert not cluster.audit()


async def test_so_does_the_queues_time_out(autojump_clock: object) -> None:
    settings = LATE + 'admission = { queue_timeout = "150ms" }\n'
    async with lab(1, settings=settings).open() as cluster:
        for _ in range(4):
            ask(cluster, 1)
        with pytest.raises(Overloaded, match="no engine had room"):
            await cluster.client.complete("x")


async def test_a_full_queue_refuses_and_no_queue_lets_go_what_can_go(
    autojump_clock: object,
) -> None:
    settings = LATE + "admission = { max_queued = 0 }\n"
    async with lab(1, settings=settings).open() as cluster:
        assert ask(cluster, 4).engine is not None
        await trio.testing.wait_all_tasks_blocked()
        ask(cluster, 8)
        with pytest.raises(Overloaded, match="no more may"):
            ask(cluster, 4)
        assert not cluster.audit()


async def test_max_inflight_bounds_what_is_sent_as_ever(autojump_clock: object) -> None:
    settings = LATE + "admission = { max_inflight = 1 }\n"
    async with lab(settings=settings).open() as cluster:
        first, second = ask(cluster, 1), ask(cluster, 1)
        assert second.engine is None
        first.close()
        assert second.engine is not None


async def test_whoever_waits_when_its_engine_is_lost_goes_to_another(
    autojump_clock: object,
) -> None:
    made = lab()
    async with made.open() as cluster:
        ask(cluster, 4)
        ask(cluster, 4)
        await fill_up(cluster)
        waiting = [ask(cluster, 6) for _ in range(3)]
        assert all(each.engine is None for each in waiting)
        made.faulty[0].inject(CRASH)
        await trio.sleep(20 * STEP_S)
        assert {str(each.engine) for each in waiting} == {"e1-0"}
        assert all(each.finish_reason is not None for each in waiting)
        assert not cluster.audit()


async def test_whoever_is_pinned_waits_for_its_engine_and_keeps_nobody(
    autojump_clock: object,
) -> None:
    made = lab()
    async with made.open() as cluster:
        made.faulty[0].inject(CRASH)
        with pytest.raises(EngineLost):
            await cluster.client.complete("x", engine="e0-0")
        pinned, other = ask(cluster, 1, engine="e0-0"), ask(cluster, 1)
        assert pinned.engine is None
        assert str(other.engine) == "e1-0"
        await trio.sleep(2)
        assert pinned.engine == EngineId("e0-0", 1)


async def test_a_drain_lets_those_who_wait_have_their_turn(autojump_clock: object) -> None:
    async with lab(1).open() as cluster:
        await fill_up(cluster, 1)
        waiting = ask(cluster, 4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.drain)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(Draining):
                ask(cluster, 1)
        assert waiting.finish_reason is not None
        assert cluster.client.statistics().finished == 2


async def test_several_clients_bind_late_too(autojump_clock: object) -> None:
    async with lab().open(clients=2) as cluster:
        assert {client.statistics().binding for client in cluster.clients} == {Binding.LATE}
        await fill_up(cluster)
        waiting = ask(cluster, 4)
        assert waiting.engine is None
        await settle()
        assert waiting.engine is not None


async def test_early_binding_can_be_asked_for(autojump_clock: object) -> None:
    settings = 'balancer = { policy = "expected_ttft", binding = "early" }\n'
    async with lab(settings=settings).open() as cluster:
        await fill_up(cluster)
        assert ask(cluster, 4).engine is not None
        assert cluster.client.statistics().binding is Binding.EARLY


async def test_a_reload_changes_the_binding_and_who_waits_goes(autojump_clock: object) -> None:
    made = lab(1)
    with made.config() as late:
        early = evolve(late, balancer=evolve(late.balancer, binding=Binding.EARLY))
        async with open_cluster(late) as cluster:
            await fill_up(cluster, 1)
            waiting = [ask(cluster, 8) for _ in range(2)]
            assert all(each.engine is None for each in waiting)
            await cluster.apply(early)
            assert all(each.engine is not None for each in waiting)
            assert cluster.client.statistics().binding is Binding.EARLY
            await cluster.apply(late)
            await settle()
            await fill_up(cluster, 1)
            assert ask(cluster, 8).engine is None
            await cluster.drain()
            assert not cluster.audit()


class SilentLink:
    """An engine that says nothing but tokens, and only those that a test has it say."""

    def __init__(self, engine: EngineId) -> None:
        self.engine = engine
        self.has: list[str] = []

    def submit(self, request: GenerateRequest) -> None:
        self.has.append(request.request_id)

    def abort(self, request_id: str) -> None:
        self.has.remove(request_id)

    def take_back(
        self, _request_ids: Sequence[str], on_taken: Callable[[EngineId, Sequence[str]], object]
    ) -> None:
        on_taken(self.engine, ())


class DyingLink(SilentLink):
    """An engine that turns out to be gone when it is sent a second request."""

    flights: Flights

    def submit(self, request: GenerateRequest) -> None:
        if not self.has:
            super().submit(request)
            return
        error = EngineLost("it is gone", engine=self.engine)
        while self.has:
            reason = FinishReason.ERROR
            output = EngineOutput(request_id=self.has.pop(), finish_reason=reason, error=error)
            self.flights.deliver(self.engine, output)
        raise error


def client_of(link: SilentLink) -> tuple[Client, Flights]:
    """A client of this one engine."""
    ledger = Ledger()
    view = LoadView((), ledger)
    membership = Membership(Health(BalancerConfig()))
    dispatch = make_dispatch(ledger, view, load_policy("expected_ttft"), Binding.LATE)
    flights = Flights(dispatch, limits=Limits(), membership=membership, events=EventLog())
    membership.add_client(flights)
    client = Client(
        ledger=ledger, flights=flights, tokenizer=ByteTokenizer(), rng=random.Random(1), prefix="c"
    )
    room = Room(tokens_per_step=8, requests=8, kv_tokens=10_000)

    def make_link(_: object, *, hears_all: bool = False) -> SilentLink:
        return link

    membership.join(link.engine, 0, make_link, room)
    return client, flights


async def test_a_token_is_told_once_though_its_engine_is_found_gone_upon_it(
    autojump_clock: object,
) -> None:
    link = DyingLink(EngineId("e0"))
    client, link.flights = client_of(link)
    got: list[EngineOutput] = []
    asked = [client.submit([n] * 8, sink=got.append, max_tokens=9) for n in range(2)]
    output = EngineOutput(request_id=asked[0].request_id, token_ids=(1,))
    link.flights.deliver(link.engine, output)
    assert [each.token_ids for each in got if each.request_id == asked[0].request_id] == [(1,), ()]
    assert asked[0].finish_reason is FinishReason.ERROR, "it had begun, and is not resumed"
    for each in asked:
        each.close()
    assert client.audit() == ()


async def test_of_an_engine_that_reports_nothing_the_first_token_is_the_news(
    autojump_clock,
) -> None:
    link = SilentLink(EngineId("e0"))
    client, flights = client_of(link)
    asked = [client.submit([n] * 8, sink=lambda _: None, max_tokens=9) for n in range(3)]
    first, second, third = (each.request_id for each in asked)
    assert link.has == [first]
    assert client.statistics().unreported == (link.engine,)
    flights.deliver(link.engine, EngineOutput(request_id=first, token_ids=(1,)))
    assert link.has == [first, second]
    asked[1].close()
    assert link.has == [first, third]
    asked[0].close()
    asked[2].close()
    assert client.audit() == ()


def test_policies_that_cannot_hold_are_refused_by_the_config() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config('engines = [{ model = "echo" }]\nbalancer = { binding = "late" }')
    [problem] = caught.value.problems
    assert problem.endswith(
        "balancer.binding: policy 'kv_pressure' cannot bind late, only 'expected_ttft' and your "
        "own can; leave binding out"
    )


class Mine(ExpectedTtft):
    """A policy of one's own that can hold requests."""


class Coarse(RoundRobin):
    """One that cannot."""


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize(("policy", "binding"), [(Mine, Binding.LATE), (Coarse, Binding.EARLY)])
async def test_a_policy_of_your_own_that_can_hold_does_so_unless_told(
    autojump_clock: object, policy: type[Policy], binding: Binding, clients: int
) -> None:
    name = f"{__name__}:{policy.__name__}"
    config = parse_config(f'engines = [{{ model = "echo" }}]\nbalancer = {{ policy = "{name}" }}')
    early = evolve(config, balancer=evolve(config.balancer, binding=Binding.EARLY))
    async with open_cluster(config, clients=clients) as cluster:
        assert {each.statistics().binding for each in cluster.clients} == {binding}
        await cluster.apply(early)
        assert {each.statistics().binding for each in cluster.clients} == {Binding.EARLY}
        await cluster.apply(config)
        assert {each.statistics().binding for each in cluster.clients} == {binding}


async def test_a_policy_of_your_own_that_cannot_hold_is_refused_at_the_start(
    autojump_clock,
) -> None:
    policy = "dpkit.balancer.policies.round_robin:RoundRobin"
    config = parse_config(
        f'engines = [{{ model = "echo" }}]\nbalancer = {{ policy = "{policy}", binding = "late" }}'
    )
    with pytest.raises(ConfigError, match="cannot bind late, as it is no"):
        async with open_cluster(config):
            pytest.fail("it opened")


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("policy", ["expected_ttft", "kv_pressure"])
async def test_where_engines_differ_in_size_no_request_is_refused_that_one_of_them_can_hold(
    autojump_clock: object, policy: str, clients: int
) -> None:
    group = '[[engines]]\nname = "{}"\nmodel = "echo"\nkv.num_blocks = {}\nkv.block_size = 4\n'
    text = f'balancer = {{ policy = "{policy}" }}\n' + group.format("small", 8)
    async with open_cluster(parse_config(text + group.format("large", 40)), clients=clients) as it:
        for client in it.clients:
            for number in range(3):
                answer = await client.complete([number] * 30, max_tokens=8)
                assert answer.engine.name == "large-0"
        with pytest.raises(RequestRejected, match="more than the KV cache's"):
            await it.client.complete([1] * 160, max_tokens=8)
        assert not it.audit()


async def test_after_a_reload_nobody_is_told_to_wait_longer_than_the_new_time_out(
    autojump_clock: object,
) -> None:
    async with lab(1, settings=LATE + "admission.max_queued = 1\n").open() as cluster:
        await fill_up(cluster, 1)
        ask(cluster, 8)
        shorter = evolve(cluster.config.admission, queue_timeout=7.0)
        for longest in (60.0, 7.0):
            with pytest.raises(Overloaded) as caught:
                ask(cluster, 8)
            assert caught.value.retry_after == longest
            await cluster.apply(evolve(cluster.config, admission=shorter))
