"""Several clients that bind late have one queue: no two of them think that the same place is free.

And they lose nothing with it: when the arbiter is gone, each goes on by itself.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
import trio
from attrs import evolve

from dpkit.abc import Policy
from dpkit.balancer.policies.expected_ttft import ExpectedTtft
from dpkit.config.load import parse_config
from dpkit.engine.models.cost import CostModel
from dpkit.errors import ConfigError, Overloaded, PolicyFailed, RequestRejected
from dpkit.names import Binding, Cause
from dpkit.nursery.cluster import Cluster, open_cluster
from dpkit.nursery.events import EventKind
from dpkit.nursery.line import SCAN, Line
from dpkit.testing.explorer import explore
from dpkit.testing.failing import fail_sweep
from dpkit.testing.faults import CRASH, kill_coordinator
from dpkit.testing.history import History
from dpkit.testing.idle import check_idle
from dpkit.testing.sweep import REPLAY, sweep
from dpkit.testing.wrapper import named
from tests.clusters import told
from tests.nursery.lab import STEP_S, Lab, Timed, settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.abc import LoadView, Pass
    from dpkit.balancer.books import Prospect
    from dpkit.messages import EngineOutput, GenerateRequest
    from dpkit.nursery.arbiter import Arbiter
    from dpkit.nursery.submission import Submission
    from dpkit.testing.explorer import Race
    from dpkit.testing.mark import Mark
    from dpkit.testing.points import Points

SEEDS = range(int(os.environ.get("DPKIT_TEST_SEEDS", "20")))  # the first few are enough here

# Steps of 100 ms with 8 tokens each.
LATE = 'balancer = { policy = "expected_ttft" }\n'
SMALL = "max_num_batched_tokens = 8, max_num_seqs = 4"

numbers = itertools.count(1)


def lab(engines: int = 1, *, settings: str = LATE, blocks: int = 1024) -> Lab:
    models = [Timed() for _ in range(engines)]
    return Lab(models, settings=settings, scheduler=SMALL, blocks=blocks)


def ask(cluster: Cluster, client: int, tokens: int, **options: Any) -> Submission:
    """A request of so many tokens by one of the clients, none of them shared."""
    prompt = [next(numbers) % 200] * tokens
    options.setdefault("max_tokens", 8)
    return cluster.clients[client].submit(prompt, sink=_note, **options)


errors: dict[str, Exception | None] = {}
"""What requests ended with."""


def _note(output: EngineOutput) -> None:
    if output.finish_reason is not None:
        errors[output.request_id] = output.error


async def fill_up(cluster: Cluster, engines: int = 1) -> None:
    """Give every engine a step and a half of prompt: no more fits beside it."""
    for number in range(engines):
        ask(cluster, 0, 16, engine=f"e{number}-0")
    await trio.testing.wait_all_tasks_blocked()


def arbiter_of(cluster: Cluster) -> Arbiter:
    arbiter = cluster._arbitration.arbiter
    assert arbiter is not None
    return arbiter


def charged(cluster: Cluster) -> int:
    """Requests that the arbiter counts on engines."""
    ledger, _ = arbiter_of(cluster).dispatch.books
    return ledger.statistics().inflight


async def lose(cluster: Cluster) -> None:
    """Let the coordinator die, and the arbiter with it."""
    kill_coordinator(cluster)
    await trio.testing.wait_all_tasks_blocked()
    assert cluster._arbitration.arbiter is None


def queued(cluster: Cluster) -> list[int]:
    return [client.statistics().queued for client in cluster.clients]


def bindings(cluster: Cluster) -> set[Binding]:
    return {client.statistics().binding for client in cluster.clients}


# One queue.


async def test_nobody_passes_whoever_waits_at_another_client(autojump_clock: object) -> None:
    async with lab().open(clients=2) as cluster:
        await fill_up(cluster)
        first = ask(cluster, 0, 16)
        await trio.sleep(STEP_S / 2)  # longer than the first one's size makes it wait
        second = ask(cluster, 1, 1)
        assert queued(cluster) == [1, 1]
        for _ in range(20):
            if second.engine is not None:
                assert first.engine is not None
            await settle()
        assert second.engine is not None
        assert not cluster.audit()


async def test_what_one_client_has_sent_is_known_for_the_next(autojump_clock: object) -> None:
    async with lab(2).open(clients=2) as cluster:
        first, second = ask(cluster, 0, 4), ask(cluster, 1, 4)
        assert [str(first.engine), str(second.engine)] == ["e0-0", "e1-0"]
        assert charged(cluster) == 2
        assert bindings(cluster) == {Binding.LATE}


async def test_a_session_goes_to_its_prefix_though_another_client_sent_it(
    autojump_clock: object,
) -> None:
    config = parse_config(f'{LATE}[[engines]]\nmodel = "cost:h100-8b"\ncount = 3\n')
    async with open_cluster(config, clients=2) as cluster:
        prompt = list(range(2000))
        await cluster.clients[1].complete([7], max_tokens=2)
        first = await cluster.clients[1].complete(prompt, max_tokens=2, ignore_eos=True)
        ask(cluster, 1, 100, engine=first.engine.name)
        again = await cluster.clients[0].complete([*prompt, 1, 2, 3], max_tokens=2)
        assert again.engine == first.engine


async def test_a_lower_priority_number_goes_first_whoever_asks(autojump_clock: object) -> None:
    async with lab().open(clients=2) as cluster:
        await fill_up(cluster)
        late = [ask(cluster, 0, 8, priority=2), ask(cluster, 1, 8, priority=1)]
        await settle()
        assert [each.engine is None for each in late] == [True, False]


async def test_tenants_share_what_there_is_over_all_clients(autojump_clock: object) -> None:
    async with lab().open(clients=2) as cluster:
        await fill_up(cluster)
        greedy = [ask(cluster, number % 2, 8, tenant="a") for number in range(3)]
        modest = ask(cluster, 1, 8, tenant="b")
        placed: list[Submission] = []
        for _ in range(12):
            await settle()
            placed += [
                each for each in (*greedy, modest) if each.engine is not None and each not in placed
            ]
        assert placed.index(modest) == 1


async def test_requests_of_one_name_at_two_clients_are_two(autojump_clock: object) -> None:
    async with lab().open(clients=2) as cluster:
        await fill_up(cluster)
        both = [ask(cluster, number, 8, request_id="same", engine="e0-0") for number in range(2)]
        both[0].close()
        assert queued(cluster) == [0, 1]
        assert not cluster.audit()
        await trio.sleep(5)
        assert both[1].finish_reason is not None


async def test_a_client_that_is_full_lets_others_go(autojump_clock: object) -> None:
    settings = LATE + "admission.max_inflight = 1\n"
    async with lab(2, settings=settings).open(clients=2) as cluster:
        ask(cluster, 0, 4)
        behind = [ask(cluster, 0, 1) for _ in range(2 * SCAN)]
        assert all(each.engine is None for each in behind)
        assert ask(cluster, 1, 4).engine is not None
        assert not cluster.audit()
        await trio.sleep(100)
        assert all(each.finish_reason is not None for each in behind)
        check_idle(cluster)


async def test_of_a_full_client_however_many_wait_others_are_looked_at(
    autojump_clock: object,
) -> None:
    settings = LATE + "admission.max_inflight = 2\n"
    async with lab(settings=settings).open(clients=2) as cluster:
        await fill_up(cluster)
        ask(cluster, 0, 1, engine="e0-0")
        for _ in range(2 * SCAN):
            ask(cluster, 0, 1)
        last = ask(cluster, 1, 1)
        await settle()
        await settle()
        assert last.engine is not None


@pytest.mark.parametrize("clients", [1, 2])
async def test_a_client_that_may_send_more_from_now_on_does_so_at_once(
    autojump_clock: object, clients: int
) -> None:
    settings = LATE + "admission.max_inflight = 1\n"
    async with lab(2, settings=settings).open(clients=clients) as cluster:
        ask(cluster, 0, 4)
        second = ask(cluster, 0, 4)
        assert queued(cluster)[0] == 1
        wider = evolve(cluster.config.admission, max_inflight=2)
        await cluster.apply(evolve(cluster.config, admission=wider))
        assert second.engine is not None
        await trio.sleep(100)
        check_idle(cluster)


async def test_each_client_refuses_whom_it_has_no_room_for(autojump_clock: object) -> None:
    settings = LATE + "admission.max_queued = 1\n"
    async with lab(settings=settings).open(clients=2) as cluster:
        await fill_up(cluster)
        ask(cluster, 0, 8)
        with pytest.raises(Overloaded, match="no more may"):
            ask(cluster, 0, 8)
        assert ask(cluster, 1, 8).engine is None
        assert not cluster.audit()


async def test_no_queue_lets_go_what_can_go(autojump_clock: object) -> None:
    settings = LATE + "admission.max_queued = 0\n"
    async with lab(settings=settings).open(clients=2) as cluster:
        assert ask(cluster, 1, 4).engine is not None
        await trio.testing.wait_all_tasks_blocked()
        assert ask(cluster, 0, 8).engine is not None
        with pytest.raises(Overloaded, match="no more may"):
            ask(cluster, 0, 8)
        assert charged(cluster) == 2
        assert not cluster.audit()


async def test_every_pick_has_the_scores_that_the_arbiter_compared(autojump_clock: object) -> None:
    async with lab(2).open(clients=2) as cluster:
        ask(cluster, 0, 4)
        async with cluster.clients[1].generate([1] * 4, max_tokens=2) as stream:
            reason = cluster._flights[1]._flights[stream.request_id].placement.reason  # type: ignore[union-attr]
        assert reason.rule == "expected_ttft"
        assert reason.scores is not None
        assert reason.scores[0] > reason.scores[1], "the other client's request counts"
        assert cluster.clients[1].statistics().picks == {"expected_ttft": {1: 1}}


# Pins.


async def test_a_pin_waits_for_an_engine_that_is_away(autojump_clock: object) -> None:
    made = lab(2)
    async with made.open(clients=2) as cluster:
        made.faulty[0].inject(CRASH)
        ask(cluster, 0, 4, engine="e0-0")
        await trio.sleep(STEP_S)
        pinned, other = ask(cluster, 1, 4, engine="e0-0"), ask(cluster, 0, 4)
        assert pinned.engine is None
        assert str(other.engine) == "e1-0"
        await trio.sleep(2)
        assert str(pinned.engine) == "e0-0#1"
        assert not cluster.audit()


async def test_a_pin_to_nobody_is_refused(autojump_clock: object) -> None:
    async with lab().open(clients=2) as cluster:
        with pytest.raises(RequestRejected, match="which does not exist"):
            await cluster.clients[1].complete([1] * 4, engine="nobody")
        await fill_up(cluster)
        ask(cluster, 0, 8)
        with pytest.raises(RequestRejected, match="which does not exist"):
            await cluster.clients[1].complete([1] * 4, engine="nobody")
        assert not cluster.audit()


async def test_who_waits_for_an_engine_that_leaves_for_good_is_refused(
    autojump_clock: object,
) -> None:
    made = lab(2)
    with made.config() as config:
        async with open_cluster(config, clients=2) as cluster:
            await fill_up(cluster, 2)
            pinned = ask(cluster, 1, 8, engine="e1-0")
            await cluster.apply(evolve(config, engines=config.engines[:1]))
            assert isinstance(errors[pinned.request_id], RequestRejected)
            assert not cluster.audit()


# Whoever leaves.


async def test_leaving_while_waiting_costs_no_engine_anything(autojump_clock: object) -> None:
    made = lab(2)
    async with made.open(clients=2) as cluster:
        await fill_up(cluster, 2)
        waiting = [ask(cluster, number, 4) for number in range(2)]
        for each in waiting:
            each.close()
        assert queued(cluster) == [0, 0]
        assert not arbiter_of(cluster).line
        await trio.sleep(2)
        names = {each.request_id for each in waiting}
        assert not any(names & set(ids) for each in made.watched for _, ids in each.steps)
        assert not any(engine.core.requests_aborted for engine in cluster.statistics().engines)
        check_idle(cluster)


async def test_a_grant_that_crosses_a_cancel_is_given_back_at_once(autojump_clock: object) -> None:
    async with lab().open(clients=2) as cluster:
        await fill_up(cluster)
        gone, next_one = ask(cluster, 1, 8), ask(cluster, 0, 1)
        # The word of it is under way to the arbiter.
        flights = cluster._flights[1]
        Line.leave(flights.line, flights._flights[gone.request_id])
        await trio.sleep(5)
        assert gone.engine is None
        assert next_one.finish_reason is not None
        assert not arbiter_of(cluster).line
        assert charged(cluster) == 0
        gone.close()
        assert cluster.clients[1].statistics().causes == {Cause.CLIENT: 1}
        check_idle(cluster)


async def test_a_deadline_that_has_passed_gives_its_place_back(autojump_clock: object) -> None:
    async with lab().open(clients=2) as cluster:
        await fill_up(cluster)
        late = ask(cluster, 1, 8, timeout=STEP_S / 2)
        await trio.sleep(5)
        assert late.engine is None
        assert cluster.clients[1].statistics().causes == {Cause.DEADLINE: 1}
        assert charged(cluster) == 0
        check_idle(cluster)


class Moody(ExpectedTtft):
    """Fails for prompts of 13 tokens."""

    def on_charge(self, request: GenerateRequest, index: int, view: LoadView) -> None:
        if len(request.prompt_token_ids) == 13:
            raise ZeroDivisionError("thirteen")
        super().on_charge(request, index, view)


async def test_what_a_policy_raises_is_its_requests_own(autojump_clock: object) -> None:
    settings = f'balancer = {{ policy = "{__name__}:Moody" }}\n'
    async with lab(settings=settings).open(clients=2) as cluster:
        await fill_up(cluster)
        bad, good = ask(cluster, 0, 13), ask(cluster, 1, 4)
        await trio.sleep(5)
        assert isinstance(errors[bad.request_id], PolicyFailed)
        assert good.finish_reason is not None
        assert charged(cluster) == 0
        check_idle(cluster)


class Sulking(ExpectedTtft):
    """Fails at what it is told to fail at."""

    fails_at = ""

    def age(self, prospect: Prospect) -> float:
        self._fail("age")
        return super().age(prospect)

    def open_pass(self, view: LoadView) -> Pass:
        self._fail("open_pass")
        return super().open_pass(view)

    def _fail(self, what: str) -> None:
        if Sulking.fails_at == what:
            raise ZeroDivisionError(what)


@pytest.fixture
def sulking(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda what: monkeypatch.setattr(Sulking, "fails_at", what)


async def test_a_policy_that_fails_as_a_request_comes_lets_it_wait_nowhere(
    autojump_clock: object, sulking: Callable[[str], None]
) -> None:
    settings = f'balancer = {{ policy = "{__name__}:Sulking", binding = "late" }}\n'
    async with lab(settings=settings).open(clients=2) as cluster:
        await fill_up(cluster)
        sulking("age")
        with pytest.raises(PolicyFailed, match="Sulking raised ZeroDivisionError: age"):
            ask(cluster, 1, 8)
        assert queued(cluster) == [0, 0]
        assert not cluster.audit()
        sulking("")
        await trio.sleep(5)
        check_idle(cluster)


async def test_a_policy_that_fails_at_all_of_them_ends_the_arbiter_and_nothing_else(
    autojump_clock: object, sulking: Callable[[str], None]
) -> None:
    settings = f'balancer = {{ policy = "{__name__}:Sulking", binding = "late" }}\n'
    async with lab(settings=settings).open(clients=2) as cluster:
        await fill_up(cluster)
        waiting = ask(cluster, 1, 8)
        sulking("open_pass")
        await settle()
        assert bindings(cluster) == {Binding.EARLY}
        assert waiting.engine is not None
        sulking("")
        await trio.sleep(5)
        assert bindings(cluster) == {Binding.LATE}
        [lost] = told(cluster, EventKind.COORDINATOR_LOST)
        assert "ZeroDivisionError" in lost.detail
        assert waiting.finish_reason is not None
        assert all(engine.restarts == 0 for engine in cluster.statistics().engines)
        check_idle(cluster)


async def test_a_reload_to_a_policy_that_fails_is_made_and_clients_do_without(
    autojump_clock: object, sulking: Callable[[str], None]
) -> None:
    made = lab()
    with made.config() as config:
        bad = evolve(config.balancer, policy=f"{__name__}:Sulking", binding=Binding.LATE)
        async with open_cluster(config, clients=2) as cluster:
            await fill_up(cluster)
            waiting = ask(cluster, 1, 8)
            sulking("age")
            await cluster.apply(evolve(config, balancer=bad))
            await trio.testing.wait_all_tasks_blocked()
            assert bindings(cluster) == {Binding.EARLY}
            assert waiting.engine is not None
            sulking("")
            await trio.sleep(1)
            assert bindings(cluster) == {Binding.LATE}
            await trio.sleep(5)
            check_idle(cluster)


class Plain(Policy):
    """Cannot hold."""

    def pick(self, _request: GenerateRequest, _view: LoadView) -> int:
        return 0


async def test_a_policy_that_cannot_hold_is_refused_for_several_clients_too() -> None:
    settings = f'balancer = {{ policy = "{__name__}:Plain", binding = "late" }}\n'
    with lab(settings=settings).config() as config, pytest.raises(ConfigError, match="bind late"):
        async with open_cluster(config, clients=2):
            pass


# When it is gone, and when there is one again.


async def test_without_it_whoever_waits_goes_at_once(autojump_clock: object) -> None:
    async with lab().open(clients=2) as cluster:
        await fill_up(cluster)
        waiting = [ask(cluster, number, 8) for number in range(2)]
        await lose(cluster)
        assert bindings(cluster) == {Binding.EARLY}
        assert all(each.engine is not None for each in waiting)
        assert ask(cluster, 1, 8).engine is not None
        assert not cluster.audit()


async def test_with_the_next_one_clients_hold_again_and_it_knows_what_runs(
    autojump_clock: object,
) -> None:
    async with lab().open(clients=2) as cluster:
        await fill_up(cluster)
        await lose(cluster)
        early = ask(cluster, 1, 24)
        await trio.sleep(0.15)
        assert bindings(cluster) == {Binding.LATE}
        assert charged(cluster) == 2
        assert ask(cluster, 0, 8).engine is None
        [lost] = told(cluster, EventKind.COORDINATOR_LOST)
        assert lost.detail.endswith("injected: the coordinator dies")
        assert not cluster.audit()
        await trio.sleep(5)
        assert early.finish_reason is not None
        assert charged(cluster) == 0
        check_idle(cluster)


async def test_whoever_still_waits_by_then_keeps_his_place(autojump_clock: object) -> None:
    settings = LATE + "admission.max_inflight = 1\n"
    async with lab(settings=settings).open(clients=2) as cluster:
        await fill_up(cluster)
        ask(cluster, 1, 16)
        first, second = ask(cluster, 1, 8), ask(cluster, 0, 8)
        await lose(cluster)
        assert first.engine is None
        await trio.sleep(0.15)
        assert len(arbiter_of(cluster).line) == 2
        assert not cluster.audit()
        await trio.sleep(10)
        assert first.finish_reason is not None
        assert second.finish_reason is not None
        check_idle(cluster)


async def test_who_was_in_front_before_is_in_front_at_the_next_one(
    autojump_clock: object,
) -> None:
    made = lab()
    async with made.open(clients=2) as cluster:
        made.faulty[0].inject(CRASH)
        ask(cluster, 0, 16)
        ask(cluster, 1, 1)  # which may pass, by its size
        await settle()
        assert queued(cluster) == [1, 1]
        await lose(cluster)
        await trio.sleep(0.15)
        assert len(arbiter_of(cluster).line) == 2
        for _ in range(200):  # the first one to go is a probe
            if queued(cluster) != [1, 1]:
                break
            await trio.sleep(0.01)
        assert queued(cluster) == [0, 1]
        await trio.sleep(5)
        check_idle(cluster)


async def test_a_reload_changes_the_binding_of_all(autojump_clock: object) -> None:
    made = lab()
    with made.config() as late:
        early = evolve(late, balancer=evolve(late.balancer, binding=Binding.EARLY))
        full = evolve(late, admission=evolve(late.admission, max_inflight=1))
        async with open_cluster(late, clients=2) as cluster:
            await fill_up(cluster)
            waiting = [ask(cluster, number, 8) for number in range(2)]
            await cluster.apply(full)
            assert all(each.engine is None for each in waiting), "they wait at the same arbiter"
            await cluster.apply(early)
            assert waiting[1].engine is not None
            assert bindings(cluster) == {Binding.EARLY}
            await lose(cluster)
            await trio.sleep(1)
            assert bindings(cluster) == {Binding.EARLY}
            await cluster.apply(late)
            assert bindings(cluster) == {Binding.LATE}
            await cluster.drain()
            assert not cluster.audit()


async def test_a_reload_while_there_is_none_does_not_make_one(autojump_clock: object) -> None:
    made = lab()
    with made.config() as late:
        early = evolve(late, balancer=evolve(late.balancer, binding=Binding.EARLY))
        async with open_cluster(early, clients=2) as cluster:
            kill_coordinator(cluster)
            await trio.testing.wait_all_tasks_blocked()
            await cluster.apply(late)
            assert bindings(cluster) == {Binding.EARLY}
            await trio.sleep(0.15)
            assert bindings(cluster) == {Binding.LATE}


class Failing(ExpectedTtft):
    """Cannot be made while it must not be."""

    may_be_made = True

    def __init__(self) -> None:
        if not Failing.may_be_made:
            raise ZeroDivisionError("no policy")
        super().__init__()


async def test_an_arbiter_that_cannot_be_made_is_tried_again(autojump_clock: object) -> None:
    settings = f'balancer = {{ policy = "{__name__}:Failing", binding = "late" }}\n'
    async with lab(settings=settings).open(clients=2) as cluster:
        Failing.may_be_made = False
        try:
            await lose(cluster)
            await trio.sleep(1)
            assert bindings(cluster) == {Binding.EARLY}
            assert ask(cluster, 0, 4).engine is not None
        finally:
            Failing.may_be_made = True
        await trio.sleep(10)
        assert bindings(cluster) == {Binding.LATE}
        check_idle(cluster)


async def test_a_client_that_is_alone_needs_none(autojump_clock: object) -> None:
    async with lab().open() as cluster:
        assert cluster._arbitration.arbiter is None
        assert cluster.client.statistics().binding is Binding.LATE


async def test_clients_that_bind_early_need_none(autojump_clock: object) -> None:
    async with lab(settings="").open(clients=2) as cluster:
        assert cluster._arbitration.arbiter is None
        assert bindings(cluster) == {Binding.EARLY}


# The books of one against those of the other.


async def test_an_audit_finds_who_waits_at_one_of_them_only(autojump_clock: object) -> None:
    async with lab().open(clients=2) as cluster:
        await fill_up(cluster)
        waiting = ask(cluster, 1, 8)
        petition = arbiter_of(cluster).seats[1].petitions.pop(waiting.request_id)
        [problem] = cluster.audit()
        assert problem == f"['{waiting.request_id}'] wait at client 1, [] for it at the arbiter"
        arbiter_of(cluster).seats[1].petitions[waiting.request_id] = petition
        assert not cluster.audit()


async def test_an_audit_finds_who_is_elsewhere_than_was_granted(autojump_clock: object) -> None:
    async with lab().open(clients=2) as cluster:
        placed = ask(cluster, 1, 8)
        flight = cluster._flights[1]._flights[placed.request_id]
        flight.engine, engine = None, flight.engine
        assert f"{placed.request_id} was granted e0-0, and is on None" in cluster.audit()
        flight.engine = engine
        petition = arbiter_of(cluster).seats[1].petitions.pop(placed.request_id)
        [problem] = cluster.audit()
        assert problem == "the arbiter counts 1 requests on engines, and granted 0 of them"
        arbiter_of(cluster).seats[1].petitions[placed.request_id] = petition
        arbiter_of(cluster).dispatch.books[0]._accounts[engine].inflight += 1  # type: ignore[index]
        [problem] = cluster.audit()
        assert problem.startswith("the arbiter: e0-0 counts 2 requests")
        arbiter_of(cluster).dispatch.books[0]._accounts[engine].inflight -= 1  # type: ignore[index]


# Whoever is cancelled or killed, whenever.


def small(model: str, *, resume: bool = True) -> str:
    """Two engines with room for one and a half requests each; no prompt fits one step."""
    return f"""
        cluster.seed = 1
        balancer.policy = "expected_ttft"
        admission.resume = {str(resume).lower()}
        [[engines]]
        model = "{model}"
        count = 2
        kv = {{ block_size = 4, num_blocks = 6 }}
        scheduler = {{ max_num_seqs = 3, max_num_batched_tokens = 5 }}
        """


PROMPT = "abcdefghi"


async def crowd(
    history: History, cluster: Cluster, target: Callable[[], Any], *, kills: bool = True
) -> None:
    """Readers at both clients, one of which is a target; the arbiter dies among them."""

    async def read(number: int) -> None:
        await history.complete(cluster.clients[number % 2], PROMPT, max_tokens=4)

    async def kill() -> None:
        await trio.sleep(0.005)
        kill_coordinator(cluster)

    async with trio.open_nursery() as nursery:
        if kills:
            nursery.start_soon(kill)
        for number in range(5):
            nursery.start_soon(read, number)
        await target()
    await trio.sleep(1)  # it may have died twice
    assert cluster._arbitration.arbiter is not None
    await history.complete(cluster.clients[0], PROMPT, max_tokens=4)
    await trio.sleep(1)  # or now
    assert charged(cluster) == 0


def check(result: tuple[History, Cluster]) -> None:
    history, cluster = result
    history.check(cluster)


@pytest.mark.parametrize("kills", [False, True])
def test_a_reader_that_leaves_at_any_step_leaves_nothing_at_the_arbiter(*, kills: bool) -> None:
    async def scenario(mark: Mark) -> tuple[History, Cluster]:
        history = History(resumes=True)

        async def target() -> None:
            with mark.target():
                await history.complete(cluster.clients[0], PROMPT, max_tokens=4)

        with named(history.model(CostModel("h20-4b"))) as model:
            async with open_cluster(parse_config(small(model)), clients=2) as cluster:
                await crowd(history, cluster, target, kills=kills)
        return history, cluster

    done = sweep(scenario, seeds=SEEDS[:3], check=check)
    assert REPLAY in os.environ or done.runs >= 3 * 20


@pytest.mark.parametrize("resume", [False, True])
def test_an_engine_or_the_arbiter_that_dies_at_any_call_leaves_nothing(*, resume: bool) -> None:
    async def scenario(points: Points) -> tuple[History, Cluster]:
        history = History(resumes=resume)
        with named(points.model(history.model(CostModel("h20-4b")))) as model:
            config = parse_config(small(model, resume=resume))
            async with open_cluster(config, clients=2) as cluster:
                fanin = cluster._coordinator._fanin
                fanin.receive_nowait = points.wrap("receive", fanin.receive_nowait)  # type: ignore[method-assign]

                async def target() -> None:
                    with points.target():
                        await history.complete(cluster.clients[1], PROMPT, max_tokens=4)

                await crowd(history, cluster, target)
        return history, cluster

    done = fail_sweep(scenario, seeds=SEEDS[:3], check=check)
    assert set(done.calls) == {"receive", "allocate", "step"}


async def _turns(count: int) -> None:
    for _ in range(count):
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(("before", "choices"), [(2, 2), (3, None), (4, None)])
@pytest.mark.parametrize("comes", [False, True])
def test_the_arbiters_end_against_a_reader_that_leaves_or_one_that_comes(
    before: int, choices: int | None, *, comes: bool
) -> None:
    outcomes: set[str] = set()

    async def scenario(race: Race) -> tuple[History, Cluster]:
        history, scope = History(), trio.CancelScope()

        async def read(client: int) -> None:
            await history.complete(cluster.clients[client], "ab", max_tokens=2)

        async def leave() -> None:
            await _turns(1)
            scope.cancel()

        async def kill() -> None:
            await _turns(1)
            kill_coordinator(cluster)

        async def be_left() -> None:
            with scope:
                await read(0)

        with named(history.model(Timed())) as model:
            config = parse_config(
                f"""
                cluster.seed = 1
                balancer.policy = "expected_ttft"
                coordinator.publish = false
                [[engines]]
                model = "{model}"
                scheduler = {{ max_num_seqs = 1, max_num_batched_tokens = 2 }}
                """
            )
            async with open_cluster(config, clients=2) as cluster, trio.open_nursery() as nursery:
                nursery.start_soon(read, 1)
                nursery.start_soon(be_left)
                await _turns(before)
                with race.open(choices=choices):
                    async with trio.open_nursery() as racing:
                        racing.start_soon(kill)
                        racing.start_soon(*([read, 1] if comes else [leave]))
        return history, cluster

    def judge(result: tuple[History, Cluster]) -> None:
        check(result)
        outcomes.update(entry.outcomes[0] for entry in result[0].entries)

    done = explore(scenario, check=judge)
    print(f"{done.schedules} schedules, outcomes: {', '.join(sorted(outcomes))}")
    assert REPLAY in os.environ or (done.complete and done.schedules > 5)
