"""The policy on counted outcomes: what it knows of engines, and whom it sends or holds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from dpkit.balancer.backlog import BEGUN
from dpkit.balancer.dispatch import EarlyDispatch
from dpkit.balancer.late import LateDispatch, make_dispatch, usual_binding
from dpkit.balancer.ledger import Ledger
from dpkit.balancer.policies import load_policy
from dpkit.balancer.policies.expected_ttft import ExpectedTtft
from dpkit.balancer.prefixes import BLOCK
from dpkit.balancer.stepcosts import ALIKE, PRIOR, seconds
from dpkit.balancer.view import LoadView
from dpkit.errors import ConfigError
from dpkit.messages import EngineId, GenerateRequest, Room, StepReport, StepWork
from dpkit.names import HOLDING_POLICIES, Binding, PolicyName
from tests.balancer.test_stepcosts import NO_STEPS

if TYPE_CHECKING:
    from dpkit.balancer.dispatch import Placement

ROOM = Room(tokens_per_step=1000, requests=8, kv_tokens=50_000)


class Late:
    """One client's balancer, and engines that say what a test has them say."""

    def __init__(self, engines: int, *, room: Room = ROOM, clients: int = 1) -> None:
        self.ledger = Ledger()
        self.view = LoadView((), self.ledger, client_count=clients)
        self.policy = ExpectedTtft()
        self.dispatch = LateDispatch(self.ledger, self.view, self.policy)
        self.room = room
        self.sent: dict[EngineId, int] = {}
        self.steps = 0
        self._asked = 0
        for rank in range(engines):
            self.dispatch.add(EngineId(f"e{rank}"), rank, room)

    def request(
        self, tokens: int | tuple[int, ...], request_id: str = "", engine: str | None = None
    ) -> GenerateRequest:
        """One whose prompt is like no other's, unless the test brings it."""
        self._asked += 1
        prompt = (1000 + self._asked,) * tokens if isinstance(tokens, int) else tokens
        return GenerateRequest(
            request_id=request_id or f"r{self._asked}", prompt_token_ids=prompt, engine=engine
        )

    def send(self, tokens: int | tuple[int, ...], engine: str | None = None) -> Placement:
        """Bind a request early."""
        placement = self.dispatch.place(self.request(tokens, engine=engine))
        self.sent[placement.engine] = self.sent.get(placement.engine, 0) + 1
        return placement

    def decide(self, *prompts: int | tuple[int, ...]) -> list[int | None]:
        """Offer requests in one pass, and place those that it sends."""
        decisions = []
        to = self.dispatch.open_pass()
        for prompt in prompts:
            request = self.request(prompt)
            index = to.offer(self.dispatch.prepare(request))
            if index is not None:
                placement = self.dispatch.place(request, index)
                self.sent[placement.engine] = self.sent.get(placement.engine, 0) + 1
            decisions.append(index)
        return decisions

    def report(self, index: int, **told: Any) -> None:
        """Have an engine say so, and that it has read all that was sent there."""
        engine = self.view.engines[index]
        sent = self.sent.get(engine, 0)
        self.steps += 1
        defaults: dict[str, Any] = {"sent": sent, "acknowledged": sent, "steps": self.steps}
        defaults |= {"step_time_s": seconds(StepWork(decodes=1), PRIOR)}
        defaults |= {"last_step": StepWork(decodes=1), "kv_tokens": self.room.kv_tokens}
        self.dispatch.on_report(engine, StepReport(**(defaults | told)))


def test_a_burst_spreads_by_tokens_and_not_by_requests() -> None:
    client = Late(2)
    assert [client.send(tokens).index for tokens in (900, 100, 100, 100, 100)] == [0, 1, 1, 1, 1]


def test_a_session_goes_back_to_where_its_prefix_is() -> None:
    client = Late(3)
    turn = tuple(range(8 * BLOCK))
    assert client.send(1).index == 0
    first = client.send(turn)
    client.dispatch.release(first, tuple(range(9000, 9000 + BLOCK)), finished=True)
    client.send(400, engine="e2")
    client.send(400, engine="e0")
    # What it answered is cached there as well.
    longer = (*turn, *range(9000, 9000 + BLOCK), *range(300))
    sent = client.send(longer)
    assert sent.index == first.index
    assert client.policy.books._sent[sent.request.request_id].new == 300


def test_a_session_that_begins_with_a_few_words_goes_back_to_its_long_answer() -> None:
    client = Late(3)
    question, answer = tuple(range(20)), tuple(range(9000, 9000 + 4 * BLOCK))
    client.send(1)
    first = client.send(question)
    client.dispatch.release(first, answer, finished=True)
    client.send(400, engine="e0")
    sent = client.send((*question, *answer, 7))
    assert sent.index == first.index == 1
    assert client.policy.books._sent[sent.request.request_id].new == 21
    for placement in (client.send(question, engine="e0"), client.send(question, engine="e1")):
        client.dispatch.release(placement)  # without a word
    assert client.policy.books.prefixes.size(EngineId("e0")) == 400 // BLOCK


def test_a_session_leaves_its_home_when_waiting_there_costs_more_than_the_prefix() -> None:
    client = Late(2)
    turn = tuple(range(4 * BLOCK))
    home = client.send(turn)
    client.send(40_000, engine=home.engine.name)
    assert client.send((*turn, 1)).index != home.index


def test_engines_without_a_prefix_cache_are_no_home() -> None:
    client = Late(2, room=ROOM._replace(has_prefix_cache=False))
    turn = tuple(range(8 * BLOCK))
    client.send(turn)
    assert client.send((*turn, 1)).index == 1


def test_salts_keep_sessions_apart() -> None:
    client = Late(2)
    turn = tuple(range(8 * BLOCK))
    client.send(turn)
    request = GenerateRequest(request_id="s", prompt_token_ids=turn, cache_salt="other")
    assert client.dispatch.place(request).index == 1


def test_a_request_is_held_for_its_best_engine_and_others_pass_it_elsewhere() -> None:
    client = Late(2)
    turn = tuple(range(8 * BLOCK))
    home = client.send(turn)
    # Nothing fits into the next step of either, but 100 tokens into that of the other.
    client.report(home.index, requests=1, unprefilled_tokens=990, scheduled_tokens=0, steps=0)
    client.report(1 - home.index, requests=2, unprefilled_tokens=1850, scheduled_tokens=950)
    client.report(home.index, requests=2, unprefilled_tokens=1940, scheduled_tokens=950)
    assert client.decide((*turn, *range(100)), 100) == [None, 1 - home.index]


def test_nobody_passes_a_held_request_on_the_engine_that_it_is_held_for() -> None:
    client = Late(1)
    client.send(100)
    client.report(0, requests=1, unprefilled_tokens=300, scheduled_tokens=100)
    assert client.decide(900, 10, 10) == [None, None, None]
    assert client.decide(10) == [0]  # a pass of its own: nobody is held before it


def test_half_a_steps_worth_of_prompts_may_wait_on_an_engine_and_no_more() -> None:
    client = Late(1)
    assert client.decide(400) == [0]
    client.report(0, requests=1, unprefilled_tokens=400, scheduled_tokens=400)
    assert client.decide(300, 200, 1) == [0, 0, None]


@pytest.mark.parametrize(
    ("has_prefix_cache", "tokens", "index"),
    [(False, 1001, 1), (False, 1000, 0), (True, 1001, 0)],
)
def test_a_long_prompt_keeps_away_from_answers_that_have_just_begun(
    has_prefix_cache: bool, tokens: int, index: int
) -> None:
    client = Late(2, room=ROOM._replace(has_prefix_cache=has_prefix_cache))
    for engine in ("e0", "e0", "e0", "e1"):
        client.dispatch.on_answered(client.send(10, engine=engine))
    for place, (count, context) in enumerate([(3, 30), (1, 2_000)]):
        client.report(place, requests=count, context_tokens=context)
    placements = [client.send(10, engine="e0") for _ in range(3)]
    client.report(0, requests=6, context_tokens=60, steps=100)
    for placement in placements:
        client.dispatch.on_answered(placement)
    assert client.send(tokens).index == index
    client.report(0, requests=6, context_tokens=60, steps=100 + BEGUN)
    client.dispatch.release(client.send(tokens, engine="e1"))
    assert client.send(tokens).index == 0


def test_what_was_sent_counts_until_the_engine_has_read_it() -> None:
    client = Late(1)
    client.decide(10)
    client.report(0, requests=1)
    assert client.decide(1000) == [0]
    # An old report that has not read it: nothing fits beside it yet.
    client.report(0, requests=1, acknowledged=1)
    assert client.decide(10) == [None]
    client.report(0, requests=2, unprefilled_tokens=1000, scheduled_tokens=1000)
    assert client.decide(10) == [0]


def test_what_was_sent_and_has_left_before_it_was_read_counts_no_more() -> None:
    client = Late(1)
    client.report(0)
    first, second = client.send(900), client.send(100)
    assert client.decide(500) == [None]
    client.dispatch.release(first)
    client.dispatch.release(second)
    assert client.decide(500) == [0]
    client.report(0, requests=1, unprefilled_tokens=500, scheduled_tokens=500)
    assert client.decide(900) == [0]


def test_between_two_steps_the_next_one_is_reckoned_as_begun() -> None:
    client = Late(1)
    client.send(3000)
    client.report(0, requests=1, unprefilled_tokens=1200)  # of which it is about to compute 999
    assert client.decide(299, 1) == [0, None]


def test_an_engine_that_says_nothing_is_known_by_what_was_sent_there() -> None:
    client = Late(1)
    placement = client.send(900)
    assert client.decide(200) == [None]
    client.dispatch.on_answered(placement)
    assert client.decide(200) == [0]


def test_of_an_engine_that_says_nothing_no_memory_of_ended_requests_is_kept() -> None:
    client = Late(1)
    for _ in range(50):
        client.dispatch.release(client.send(10), (1,), finished=True)
    [book] = client.policy.books
    assert not book._order
    assert not client.policy.books._sent


def test_a_full_engine_takes_no_more_though_it_has_nothing_to_prefill() -> None:
    client = Late(1, room=ROOM._replace(requests=2))
    client.send(1)
    client.send(1)
    client.report(0, requests=2)
    assert client.decide(1) == [None]


def test_who_is_long_held_for_want_of_kv_lets_those_pass_that_leave_him_room() -> None:
    client = Late(1, room=ROOM._replace(requests=64))
    client.send(30_000)
    client.report(0, requests=1, kv_tokens_used=30_000, steps=10)
    large = client.dispatch.prepare(client.request(25_000))

    def decide(*prompts: int) -> list[int | None]:
        to = client.dispatch.open_pass()
        assert to.offer(large) is None
        offered = [client.dispatch.prepare(client.request(tokens)) for tokens in prompts]
        return [to.offer(prospect) for prospect in offered]

    assert decide(900) == [None]
    client.report(0, requests=1, kv_tokens_used=30_000, steps=209)
    assert decide(900) == [None], "KV may come free within the life of an answer, 200 steps"
    client.report(0, requests=1, kv_tokens_used=30_000, steps=210)
    assert decide(400, 99, 1, 1) == [0, 0, 0, None], "and no more than half a step computes"
    for _ in range(24):
        assert client.decide(900) == [0]
        client.report(0, requests=1, kv_tokens_used=25_000, steps=210)
    # Of 49,500 he wants 25,000, and a quarter of 200 is to come to him and to who passes him.
    assert decide(2_801, 2_800) == [None, 0], "21,600 have passed him"


def test_growth_is_reserved_before_somebody_is_let_in() -> None:
    client = Late(1)
    placement, young, old = client.send(10), client.send(10), client.send(10)
    client.dispatch.release(placement, (0,) * 400, finished=True)  # so long are answers
    client.report(0, requests=2, steps=99)
    client.dispatch.on_answered(old)
    client.report(0, requests=2, steps=899)
    client.dispatch.on_answered(young)
    # Of 49,500, 49,000 are in use. The old one is longer than answers are. A quarter is kept free
    # of the 300 that the young one has to come after 100 steps, and of the 400 of the new one.
    client.report(0, requests=2, steps=1000, kv_tokens_used=49_000)
    assert client.decide(326) == [None]
    assert client.decide(325) == [0]


def test_where_engines_run_out_of_kv_twice_as_much_growth_is_reserved() -> None:
    client = Late(1)
    client.send(10)
    client.report(0, requests=1, kv_tokens_used=49_000, steps=1)
    assert client.decide(401) == [None], "a quarter of the 200 and 200 tokens of two answers"
    client.report(0, requests=1, kv_tokens_used=49_000, steps=2, preemptions=1)
    assert client.decide(301) == [None], "half of them"
    assert client.decide(300) == [0]


def test_of_those_that_ended_no_growth_is_expected() -> None:
    client = Late(1)
    placements = [client.send(10) for _ in range(3)]
    client.report(0, requests=3)
    for placement in placements:
        client.dispatch.on_answered(placement)
    client.dispatch.release(placements[1])
    client.report(0, requests=2, steps=11)
    client.policy.open_pass(client.view)
    assert client.policy._standings[0].growth == 2 * (200.0 - 9)
    for placement in placements:
        client.dispatch.release(placement)
    client.policy.open_pass(client.view)
    assert client.policy._standings[0].growth == 0.0


def test_shared_blocks_need_no_room() -> None:
    client = Late(1)
    turn = tuple(range(5 * BLOCK))
    client.send(turn)
    client.report(0, requests=1, kv_tokens_used=49_000)
    assert client.decide((*turn, 7)) == [0]
    assert client.decide(len(turn) + 1) == [None]


def test_of_a_slow_engine_less_is_expected() -> None:
    client = Late(3)
    work = StepWork(decodes=4, prefill_tokens=500, decode_context=4000)
    for _ in range(100):
        for index, times in enumerate((3.0, 1.0, 1.0)):
            took = times * seconds(work, PRIOR)
            client.report(index, last_step=work, step_time_s=took)
    picks = [client.send(1000).index for _ in range(14)]
    assert picks[:2] == [1, 2]
    assert 1 <= picks.count(0) <= 3


def test_an_engine_that_talks_nonsense_of_its_steps_spoils_the_picks_of_no_other() -> None:
    client = Late(3)
    work = StepWork(decodes=4, prefill_tokens=500, decode_context=4000)
    for number in range(100):
        for index in range(3):
            client.report(index, last_step=work, step_time_s=seconds(work, PRIOR))
        nonsense, took = NO_STEPS[number % len(NO_STEPS)]
        client.report(0, last_step=replace(nonsense, prefill_tokens=1), step_time_s=took)
    assert client.policy.costs.costs == pytest.approx(PRIOR)
    client.policy.open_pass(client.view)
    assert [standing.slowness for standing in client.policy._standings] == [1.0, 1.0, 1.0]
    assert [client.send(1000).index for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_what_the_formula_misses_of_some_steps_makes_nobody_slow() -> None:
    """Of three engines two prefill and one only decodes; decodes take five times the formula's."""
    client = Late(3)
    decodes = StepWork(decodes=4, decode_context=4000)
    prefill = StepWork(decodes=4, decode_context=4000, prefill_tokens=5000)
    for number in range(400):
        for index in range(3):
            work = prefill if index < 2 and number % 4 else decodes
            took = seconds(work, PRIOR) * (5 if work is decodes else 1)
            client.report(index, last_step=work, step_time_s=took, steps=8 * client.steps)
    client.policy.open_pass(client.view)
    assert [standing.slowness for standing in client.policy._standings] == [1.0, 1.0, 1.0]


def test_engines_that_differ_by_what_the_formula_misses_count_as_equal() -> None:
    client = Late(2)
    for index, times in ((0, 1.2), (1, 1.0)):
        assert times < ALIKE
        for _ in range(200):
            work = StepWork(decodes=4, decode_context=4000, prefill_tokens=1)
            took = times * seconds(work, PRIOR)
            client.report(index, last_step=work, step_time_s=took)
    assert [client.send(200).index for _ in range(2)] == [0, 1]


def test_an_engine_that_returns_has_what_it_had_less_what_ended_meanwhile() -> None:
    client = Late(2)
    placement = client.send(600, engine="e0")
    client.send(300, engine="e0")
    engine = client.view.engines[0]
    client.dispatch.remove(engine)
    client.dispatch.release(placement)
    client.dispatch.add(engine, 0, ROOM)
    client.policy.open_pass(client.view)
    assert client.policy._standings[0].prefill == 300


def test_a_new_life_has_no_cache_and_no_work() -> None:
    client = Late(2)
    turn = tuple(range(8 * BLOCK))
    home = client.send(turn)
    client.dispatch.remove(home.engine)
    client.dispatch.release(home)
    client.dispatch.add(EngineId(home.engine.name, 1), home.index, ROOM)
    client.decide(1)
    assert set(client.policy.books._backlogs) == set(client.view.engines)
    assert not client.policy.books.prefixes.hits(client.policy.prepare(client.request(turn)).chain)


def test_of_an_engine_that_is_gone_for_good_nothing_is_kept() -> None:
    client = Late(2)
    home = client.send(tuple(range(8 * BLOCK)))
    client.decide(1)
    client.dispatch.remove(home.engine)
    client.decide(1)
    assert home.engine in client.policy.books._backlogs  # it may come back
    client.dispatch.forget(home.engine.name)
    client.decide(1)
    assert set(client.policy.books._backlogs) == set(client.view.engines)
    assert not client.policy.books.prefixes.size(home.engine)
    client.dispatch.release(home)
    assert home.request.request_id not in client.policy.books._sent


def test_larger_prompts_age_more() -> None:
    client = Late(1)
    ages = [
        client.dispatch.age(client.dispatch.prepare(client.request(size))) for size in (1, 1000)
    ]
    # beta * b * P
    assert ages == pytest.approx([5 * PRIOR.prefill, 5 * PRIOR.prefill * 1000])


def test_very_long_prompts_are_not_passed_by_one_another() -> None:
    client = Late(1)
    ages = [
        client.dispatch.age(client.dispatch.prepare(client.request(size)))
        for size in (15_999, 16_000, 40_000)
    ]
    assert ages[0] < ages[1] == ages[2] == pytest.approx(5 * PRIOR.prefill * 16_000)


def test_requests_of_other_clients_count_as_the_engine_says() -> None:
    client = Late(2, clients=2)
    client.report(0, requests=5, unprefilled_tokens=900, scheduled_tokens=0, waiting=5)
    assert client.send(100).index == 1


def test_every_pick_has_the_scores_of_all_engines() -> None:
    client = Late(3)
    client.send(500)
    request = client.request(100)
    index = client.policy.pick(request, client.view)
    scores = client.policy.scores(request, client.view)
    assert len(scores) == 3
    assert min(scores) == client.policy.score(request, index, client.view) == scores[index]
    assert scores[0] > scores[1] == scores[2]
    reason = client.dispatch.place(request).reason
    assert (reason.engines, reason.scores) == (client.view.engines, scores)
    said = ", ".join(f"e{index} {score:.3g}" for index, score in enumerate(scores))
    assert str(reason).startswith("expected_ttft with score ")
    assert str(reason).endswith(f"0 in flight, 0 waiting, 0 running, 0% of KV in use; of {said}")


def test_ties_begin_where_this_client_begins_to_look() -> None:
    ledger = Ledger()
    view = LoadView([EngineId(f"e{n}") for n in range(4)], ledger, client_index=1, client_count=2)
    dispatch = EarlyDispatch(ledger, view, ExpectedTtft())
    requests = [GenerateRequest(request_id=f"r{n}", prompt_token_ids=(n,) * 50) for n in range(4)]
    assert [dispatch.place(request).index for request in requests] == [2, 3, 0, 1]


def test_only_a_policy_that_can_hold_binds_late() -> None:
    ledger = Ledger()
    view = LoadView((), ledger)
    with pytest.raises(ConfigError) as caught:
        make_dispatch(ledger, view, load_policy("inflight"), Binding.LATE)
    problem = (
        "balancer.binding: policy 'inflight' cannot bind late, as it is no "
        "dpkit.abc.HoldingPolicy; leave binding out, or choose 'expected_ttft'"
    )
    assert caught.value.problems == (problem,)
    assert type(make_dispatch(ledger, view, load_policy("inflight"), Binding.EARLY)) is (
        EarlyDispatch
    )
    late = make_dispatch(ledger, view, load_policy("expected_ttft"), Binding.LATE)
    assert (late.binding, type(late)) == (Binding.LATE, LateDispatch)


def test_the_built_in_policies_that_can_hold_are_those_that_the_config_knows() -> None:
    late = {name for name in PolicyName if usual_binding(name) is Binding.LATE}
    assert late == HOLDING_POLICIES


def test_books_stay_right_whatever_happens() -> None:
    """Random events; at the end nothing is left, and sums were never off."""
    rng = random.Random(8)
    client = Late(3)
    placed: list[Placement] = []
    for _ in range(800):
        what = rng.random()
        if what < 0.4:
            placed.append(client.send(rng.randrange(1, 900)))
        elif what < 0.6 and placed:
            client.dispatch.release(placed.pop(rng.randrange(len(placed))), (1,) * 5, finished=True)
        elif what < 0.7 and placed:
            client.dispatch.on_answered(rng.choice(placed))
        elif what < 0.8:
            index = rng.randrange(3)
            engine = client.view.engines[index]
            sent = client.sent.get(engine, 0)
            book = client.policy.books._backlogs.get(engine)
            behind = rng.randrange(1 + (0 if book is None else min(3, len(book._order))))
            client.report(index, acknowledged=max(0, sent - behind))
        client.policy.open_pass(client.view)
        for book in client.policy.books:
            pending = [sent for sent in book._order if sent.is_pending]
            assert book._pending == len(pending)
            assert book._pending_new == sum(sent.new for sent in pending)
    for placement in placed:
        client.dispatch.release(placement)
    assert not client.policy.books._sent
    for book in client.policy.books:
        assert (book._live, book._prompts, book._pending, book._pending_room) == (0, 0, 0, 0)
        assert (book._answered, book._youngs, book._youngs_at) == (0, 0, 0)


def test_of_an_engine_whose_room_is_unknown_no_blocks_are_kept() -> None:
    ledger, policy = Ledger(), ExpectedTtft()
    dispatch = EarlyDispatch(ledger, LoadView([EngineId("e0")], ledger), policy)
    prompt = tuple(range(8 * BLOCK))
    dispatch.release(dispatch.place(GenerateRequest(request_id="r", prompt_token_ids=prompt)))
    assert not len(policy.books.prefixes)
