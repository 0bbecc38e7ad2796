"""What waits on an engine short of memory goes to one that has room, and loses nothing by it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio
from msgspec.structs import replace

import dpkit
from dpkit.abc import HoldingPolicy
from dpkit.balancer.health import Health
from dpkit.balancer.late import LateDispatch, make_dispatch
from dpkit.balancer.ledger import Ledger
from dpkit.balancer.view import LoadView
from dpkit.config.schema import BalancerConfig
from dpkit.messages import EngineId, Room, StepReport, StepWork
from dpkit.names import Binding
from dpkit.nursery.arbitration import Arbitration
from dpkit.nursery.client import Client
from dpkit.nursery.events import EventKind, EventLog
from dpkit.nursery.flight import Limits
from dpkit.nursery.flights import Flights
from dpkit.nursery.membership import Membership
from dpkit.nursery.rescue import is_starved
from dpkit.testing.idle import check_idle
from dpkit.text.bytes import ByteTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpkit import abc
    from dpkit.balancer.dispatch import EarlyDispatch
    from dpkit.messages import Completion, GenerateRequest

# Two engines with room for 32 blocks of 16 tokens, which is short answers by all that is expected.
CONFIG = """
    [balancer]
    policy = "{policy}"
    [[engines]]
    model = "cost:h100-8b"
    count = 2
    kv.num_blocks = 32
"""
SMALLER = """
    [balancer]
    policy = "expected_ttft"
    [[engines]]
    model = "cost:h100-8b"
    kv.num_blocks = 32
    [[engines]]
    model = "cost:h100-8b"
    kv.num_blocks = {blocks}
    name = "other"
"""


def config(policy: str = "expected_ttft", *overrides: str) -> dpkit.Config:
    return dpkit.parse_config(CONFIG.format(policy=policy), overrides=overrides)


async def crowd(
    cluster: dpkit.Cluster,
    *,
    first: tuple[int, int] = (470, 30),
    on_end: Callable[[int], object] = lambda _: None,
    client: int = 0,
) -> list[Completion]:
    """Long answers meet on engine-0, which nobody could foresee; then engine-1 stands idle.

    Its `first` one is a prompt and an answer. `on_end` is told of each that is done.

    All but the last are pinned, and the first client's. That one, of the `client`, finds engine-1
    full, and is preempted when that is not.
    """
    done: dict[int, Completion] = {}
    crowded, idle = (slot.name for slot in cluster._slots)

    async def ask(number: int, engine: str | None, prompt: int, tokens: int) -> None:
        asks = cluster.clients[0 if engine else client]
        done[number] = await asks.complete(
            prompt_of(number, prompt), max_tokens=tokens, ignore_eos=True, engine=engine
        )
        on_end(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, 0, idle, *first)
        for number in (1, 2):
            nursery.start_soon(ask, number, crowded, 100, 150)
        await trio.sleep(0.1)
        nursery.start_soon(ask, 3, None, 100, 150)
    return [done[number] for number in range(4)]


def prompt_of(number: int, count: int) -> list[int]:
    return [number * 1000 + place for place in range(count)]


async def test_what_was_preempted_goes_on_where_there_is_room(autojump_clock: object) -> None:
    async with dpkit.open_cluster(config()) as cluster:
        *_, moved = await crowd(cluster)
        assert moved.engine.name == "engine-1"
        assert moved.token_ids == tuple((prompt_of(3, 100) * 2)[:150]), "all of it, once"
        statistics = cluster.statistics()
        assert statistics.clients[0].taken_back == 1
        assert statistics.clients[0].retried == statistics.clients[0].resumed == 0
        assert [engine.core.preemptions for engine in statistics.engines] == [1, 0]
        assert [engine.core.requests_taken_back for engine in statistics.engines] == [1, 0]
        assert [engine.core.requests_aborted for engine in statistics.engines] == [0, 0]
        told = [each for each in cluster.events if each.kind is EventKind.REQUEST_TAKEN_BACK]
        assert len(told) == 1
        assert cluster.audit() == ()
        check_idle(cluster)


async def test_what_waits_for_memory_waits_at_the_client_though_nobody_has_room(
    autojump_clock: object,
) -> None:
    taken: dict[int, int] = {}
    # It has begun, and on its engine it would have waited for as long as it takes.
    async with dpkit.open_cluster(
        config("expected_ttft", "admission.queue_timeout=0.1s")
    ) as cluster:

        def on_end(number: int) -> None:
            taken[number] = cluster.statistics().clients[0].taken_back

        # Answers are short, by all that was seen.
        await cluster.client.complete(prompt_of(9, 9), max_tokens=30, ignore_eos=True)
        *_, moved = await crowd(cluster, first=(400, 112), on_end=on_end)
        assert taken[0] == 1, "had back before engine-1 had room"
        assert moved.engine.name == "engine-1"
        assert moved.token_ids == tuple((prompt_of(3, 100) * 2)[:150])
        assert cluster.audit() == ()
        check_idle(cluster)


async def test_where_engines_compute_otherwise_what_has_begun_stays(
    autojump_clock: object,
) -> None:
    async with dpkit.open_cluster(config()) as cluster:
        [flights] = cluster._flights
        flights.use(Limits(moves=False), None)
        *_, stayed = await crowd(cluster)
        assert stayed.engine.name == "engine-0"
        assert cluster.statistics().clients[0].taken_back == 0


@pytest.mark.parametrize(("blocks", "moves"), [(16, True), (15, False)])
async def test_nothing_moves_that_some_engine_is_too_small_for(
    autojump_clock: object, blocks: int, moves: bool
) -> None:
    async with dpkit.open_cluster(dpkit.parse_config(SMALLER.format(blocks=blocks))) as cluster:
        await cluster.client.complete(prompt_of(9, 9), max_tokens=30, ignore_eos=True)
        *_, last = await crowd(cluster, first=(200, 30))
        assert last.engine.name == ("other-0" if moves else "engine-0")
        assert last.token_ids == tuple((prompt_of(3, 100) * 2)[:150])
        assert cluster.statistics().clients[0].taken_back == moves


async def test_bound_early_nothing_is_had_back(autojump_clock: object) -> None:
    async with dpkit.open_cluster(config("kv_pressure")) as cluster:
        await crowd(cluster)
        assert cluster.statistics().clients[0].taken_back == 0


@pytest.mark.parametrize("client", [0, 1])
async def test_of_several_clients_each_has_back_what_is_its_own(
    autojump_clock: object, client: int
) -> None:
    async with dpkit.open_cluster(config(), clients=2) as cluster:
        *_, moved = await crowd(cluster, client=client)
        assert moved.engine.name == "engine-1"
        assert moved.token_ids == tuple((prompt_of(3, 100) * 2)[:150]), "all of it, once"
        assert [each.taken_back for each in cluster.statistics().clients] == [1 - client, client]
        assert cluster.audit() == ()
        check_idle(cluster)


ROOM = Room(tokens_per_step=100, requests=8, kv_tokens=1000, has_prefix_cache=True)


class Eager(HoldingPolicy):
    """Sends the first two at once, and another one when an engine has told that one waits."""

    def prepare(self, request: GenerateRequest) -> GenerateRequest:
        return request

    def age(self, prospect: object) -> float:  # noqa: ARG002
        return 0.0

    def pick(self, request: GenerateRequest, view: abc.LoadView) -> int:  # noqa: ARG002
        return 0

    def open_pass(self, view: abc.LoadView) -> EagerPass:
        return EagerPass(view)


class EagerPass:
    """One look of it."""

    is_over = False

    def __init__(self, view: abc.LoadView) -> None:
        [self.load] = view.loads

    def offer(self, prospect: object, index: int | None = None) -> int | None:  # noqa: ARG002
        told = self.load.report
        waits = told is not None and told.waiting > 0
        return 0 if self.load.inflight < 2 + waits else None


class GivingLink:
    """An engine that gives up at once whatever it is asked for."""

    def __init__(self) -> None:
        self.engine = EngineId("e0")
        self.asked: list[str] = []

    def submit(self, request: GenerateRequest) -> None:
        """Do nothing: it never says anything of it."""

    def abort(self, request_id: str) -> None:
        """Likewise."""

    def take_back(
        self, request_ids: Sequence[str], on_taken: Callable[[EngineId, Sequence[str]], object]
    ) -> None:
        self.asked += request_ids
        on_taken(self.engine, request_ids)


def dispatch_of(binding: Binding) -> EarlyDispatch:
    ledger = Ledger()
    return make_dispatch(ledger, LoadView((), ledger), Eager(), binding)


@pytest.mark.parametrize(("clients", "whose"), [(1, 0), (2, 0), (2, 1)])
async def test_what_was_just_sent_is_not_had_back_for_what_waits(
    autojump_clock: object, clients: int, whose: int
) -> None:
    link, membership = GivingLink(), Membership(Health(BalancerConfig()))
    own = Binding.LATE if clients == 1 else Binding.EARLY

    def everybody() -> LateDispatch | None:
        made = dispatch_of(Binding.LATE) if clients > 1 else None
        assert made is None or isinstance(made, LateDispatch)
        return made

    def make_link(_: object, *, hears_all: bool = False) -> GivingLink:
        return link

    all_flights = [
        Flights(dispatch_of(own), limits=Limits(), membership=membership, events=EventLog())
        for _ in range(clients)
    ]
    arbitration = Arbitration(everybody)
    for flights in all_flights:
        membership.add_client(flights)
    membership.add_client(arbitration)
    arbitration.serve(all_flights)
    membership.join(link.engine, 0, make_link, ROOM)
    made = []
    for name, by in (("runs", 0), ("waits", 0), ("is sent last", whose)):
        flights = all_flights[by]
        client = Client(
            ledger=flights.books[0],
            flights=flights,
            tokenizer=ByteTokenizer(),
            rng=random.Random(1),
            prefix="c",
        )
        made.append(client.submit("ab", sink=lambda _: None, request_id=name))
    assert [each.engine is None for each in made] == [False, False, True]
    work = StepReport(waiting=1, requests=2, last_step=StepWork(decodes=1))
    for flights, sent in zip(all_flights, (2, 0), strict=False):  # each hears of its own
        flights.on_report(link.engine, replace(work, sent=sent, acknowledged=sent))
    arbitration.on_report(link.engine, work)
    assert link.asked == ["waits"]
    assert made[-1].engine is not None
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("report", "starved"),
    [
        (StepReport(waiting=1, last_step=StepWork(decodes=3, prefill_tokens=96)), True),
        (StepReport(waiting=1, last_step=StepWork(decodes=3, prefill_tokens=97)), False),
        (StepReport(waiting=0, last_step=StepWork(decodes=3)), False),
        (StepReport(waiting=1, scheduled_tokens=5, last_step=StepWork(decodes=3)), False),
    ],
)
def test_starved_is_who_leaves_somebody_out_of_a_step_that_had_room(
    report: StepReport, starved: bool
) -> None:
    assert is_starved(report, ROOM) is starved
