"""Runs: the cluster of the product, whose times are those of its models' costs."""

from __future__ import annotations

import math
import signal

import pytest
from attrs import evolve

from dpkit.config.load import parse_config
from dpkit.costmodel import PRESETS
from dpkit.engine.models import load_model
from dpkit.errors import ConfigError
from dpkit.simulate.capacity import capacity_rps
from dpkit.simulate.faults import FaultPlan, parse_faults, prepared
from dpkit.simulate.measures import Objectives, percentile, prefill_alone
from dpkit.simulate.run import run
from dpkit.simulate.settings import simulated
from dpkit.simulate.study import compare, find_load, objectives_of, with_policy
from dpkit.simulate.table import to_json, to_table
from tests.simulate.lab import scenario_of, workload_of

COST = PRESETS["h100-8b"].cost


def test_a_lone_request_takes_what_its_steps_cost() -> None:
    [answer] = run(scenario_of((0.0, 1_000, 3))).answers
    alone = prefill_alone(COST, 8_192)
    decodes = [
        COST.seconds(decodes=1, prefill_tokens=0, decode_context=context, prefill_context=0)
        for context in (1_001, 1_002)
    ]
    assert answer.ttft_s == pytest.approx(alone(1_000))
    assert answer.e2e_s == pytest.approx(alone(1_000) + sum(decodes))
    assert answer.tpot_s == pytest.approx(sum(decodes) / 2)
    assert answer.tokens == 3
    assert answer.is_whole


def test_long_prompts_alone_take_several_steps() -> None:
    [answer] = run(scenario_of((0.0, 20_000, 1))).answers
    assert answer.ttft_s == pytest.approx(prefill_alone(COST, 8_192)(20_000))


def test_equal_prompts_are_computed_once_where_there_is_a_cache() -> None:
    scenario = workload_of("micro-long", rows=2)
    first = evolve(scenario.trace.asks[0], prompt_tokens=5_120, blocks=tuple(range(10)))
    second = evolve(first, arrival_s=5.0)
    config = parse_config('[[engines]]\nmodel = "cost:h100-8b"\n')
    trace = evolve(scenario.trace, asks=(first, second))
    outcome = run(evolve(scenario, config=simulated(config), trace=trace))
    assert outcome.answers[1].ttft_s < outcome.answers[0].ttft_s / 4


def test_the_same_seed_gives_the_same_bytes_whatever_the_process() -> None:
    scenario = evolve(workload_of("micro-alias", rows=8, clients=2), seed=3)
    policies = ["random", "kv_pressure"]
    here = [finding.result for finding in compare(scenario, policies, jobs=1)]
    there = [finding.result for finding in compare(scenario, policies, jobs=2)]
    assert to_json(here) == to_json(there)
    other = compare(evolve(scenario, seed=4), policies[:1], jobs=1)
    assert [finding.result for finding in other] != here[:1]


def test_a_closed_loop_has_so_many_under_way_and_no_more() -> None:
    scenario = scenario_of(*[(0.0, 100 + n, 5 + n % 7) for n in range(20)])
    outcome = run(evolve(scenario, trace=evolve(scenario.trace, users=4)))
    assert len(outcome.answers) == 20
    moments = sorted(
        [(a.arrival_s, 1) for a in outcome.answers] + [(a.last_s, -1) for a in outcome.answers]
    )
    under_way = most = 0
    for _, change in moments:
        under_way += change
        most = max(most, under_way)
    assert most == 4


def test_a_load_stretches_the_trace_to_a_share_of_what_the_pool_can_do() -> None:
    scenario = scenario_of(*[(0.1 * n, 500, 20) for n in range(60)])
    scaled, load = find_load(scenario, 0.5)
    assert load.capacity_rps == capacity_rps(scenario)
    assert load.offered_rps == pytest.approx(load.capacity_rps / 2)
    assert len(scaled.trace.asks) / scaled.trace.span_s == pytest.approx(load.offered_rps)
    assert find_load(scenario, None)[0] == scenario


def test_twice_the_engines_can_do_nearly_twice_as_much() -> None:
    asks = [(0.0, 4_000, 30)] * 120
    one = capacity_rps(scenario_of(*asks, engines=1))
    two = capacity_rps(scenario_of(*asks, engines=2))
    assert 1.8 < two / one < 2.1


def test_a_closed_loop_takes_no_load() -> None:
    with pytest.raises(ConfigError, match=r"--load 0.9: i48808 is a closed loop of 32 users, who"):
        find_load(workload_of("i48808", rows=4), 0.9)


def test_what_is_simulated_is_in_this_process_and_turns_nobody_away() -> None:
    text = '[[engines]]\nmodel = "cost:h100-8b"\nkind = "process"\n[admission]\nmax_queued = 1\n'
    config = simulated(parse_config(text), engines=3, seed=9)
    assert (config.engines[0].kind, config.engines[0].count) == ("local", 3)
    assert config.admission.max_queued > 1_000_000
    assert config.cluster.seed == 9


def test_models_without_known_costs_are_refused() -> None:
    with pytest.raises(ConfigError, match="what a step of 'echo' costs is not known; simulate"):
        simulated(parse_config('[[engines]]\nmodel = "echo"\n'))


def test_a_number_of_engines_needs_one_group_to_be_theirs() -> None:
    group = '[[engines]]\nname = "{}"\nmodel = "cost:h100-8b"\n'
    with pytest.raises(ConfigError, match="--engines 3: the config has 2 groups of engines, and"):
        simulated(parse_config(group.format("a") + group.format("b")), engines=3)


def test_a_dead_engine_is_back_at_its_time_and_nothing_waits_for_it() -> None:
    scenario = scenario_of(*[(0.05 * n, 500, 10) for n in range(100)])
    plan = parse_faults(["kill:1@20%-60%"], span_s=scenario.trace.span_s, engines=2)
    scenario = evolve(scenario, faults=plan)
    outcome = run(scenario)
    assert len(outcome.answers) == 100
    lost = [answer for answer in outcome.answers if answer.failed]
    assert len(lost) < 5
    assert run(scenario).answers == outcome.answers


def test_a_dead_coordinator_takes_the_arbiter_with_it_and_costs_no_request() -> None:
    scenario = evolve(scenario_of(*[(0.05 * n, 500, 10) for n in range(100)]), clients=2)
    plan = parse_faults(["kill:coordinator@20%-60%"], span_s=scenario.trace.span_s, engines=2)
    [outage] = plan.outages
    assert (outage.start_s, outage.end_s) == pytest.approx((0.99, 2.97))
    scenario = evolve(with_policy(scenario, "expected_ttft"), faults=plan)
    outcome = run(scenario)
    assert len(outcome.answers) == 100
    assert not any(answer.failed for answer in outcome.answers)
    assert run(scenario).answers == outcome.answers
    assert run(evolve(scenario, faults=FaultPlan())).answers != outcome.answers


def test_a_slow_engine_takes_so_many_times_as_long() -> None:
    scenario = scenario_of((0.0, 1_000, 1), (5.0, 1_000, 1), engines=1)
    plan = parse_faults(["slow:0*3@0s-2s"], span_s=5.0, engines=1)
    slow, usual = run(evolve(scenario, faults=plan)).answers
    assert slow.ttft_s == pytest.approx(3 * usual.ttft_s)


def test_trouble_befalls_its_engine_alone_and_leaves_each_group_its_model() -> None:
    group = '[[engines]]\nname = "{}"\nmodel = "cost:{}"\nkv.num_blocks = {}\n'
    text = group.format("a", "h100-8b", 900) + group.format("b", "h100-8b", 901)
    config = simulated(parse_config(text + group.format("c", "h20-4b", 900)))
    plan = parse_faults(["slow:0*3"], span_s=5.0, engines=3)
    with prepared(config, plan) as (made, models):
        assert models.keys() == {0}
        sizes = [each.kv.num_blocks or 0 for each in made.engines]
        shared = load_model(made.engines[0].model)
        own = [shared.allocate(num_blocks=size, block_size=16)[0] for size in sizes]
    seqs = [each.scheduler.max_num_seqs for each in made.engines]
    assert seqs == [256, None, 128], "what is left out is the first group's"
    assert sizes == [902, 901, 903], "each group of models has sizes of its own"
    assert own[0] is models[0]
    assert [model.cost for model in own[1:]] == [COST, PRESETS["h20-4b"].cost]


def test_readers_that_leave_free_their_engine() -> None:
    scenario = scenario_of(*[(0.0, 100, 400)] * 20)
    outcome = run(evolve(scenario, faults=FaultPlan(abort_share=1.0)))
    assert not any(answer.is_whole for answer in outcome.answers)
    assert all(0 < answer.tokens <= 400 for answer in outcome.answers)
    assert outcome.duration_s < run(scenario).duration_s


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("explode:1", "--fault 'explode:1': no such fault; it may be kill:ENGINE@FROM-TO"),
        ("kill:1", "--fault 'kill:1': no such fault"),
        ("kill:1*2@1s-2s", "no such fault"),
        ("slow:0*1.2.3", "no such fault"),
        ("slow:0*0", "no such fault"),
        ("abort:.%", "no such fault"),
        ("slow:0,2*2", "there is no engine 2; they are 0 to 1"),
        ("kill:0@60%-20%", "it ends before it begins; swap the two moments"),
    ],
)
def test_what_is_no_plan_of_faults_is_told(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults([text], span_s=10.0, engines=2)
    assert words in str(caught.value)


def test_an_engine_is_dead_as_long_each_time() -> None:
    plan = parse_faults(["kill:0@1s-2s;kill:0@4s-5s;kill:1@1s-9s"], span_s=10.0, engines=2)
    assert len(plan.troubles) == 3
    with pytest.raises(ConfigError) as caught:
        parse_faults(["kill:0@1s-2s", "kill:0@4s-6s"], span_s=10.0, engines=2)
    problem = "--fault: engine 0 is killed for 1 s and for 2 s; let it be dead as long each time"
    assert caught.value.problems == (problem,)


def test_a_share_of_a_trace_without_length_is_none() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults(["kill:0@35%-65%"], span_s=0.0, engines=1)
    problem = "--fault 'kill:0@35%-65%': this trace has no length to take a share of; say seconds"
    assert caught.value.problems == (problem,)


def test_plans_of_faults_are_put_together() -> None:
    plan = parse_faults(["slow:0,1*2; abort:30%", "kill:2@1s-50%"], span_s=10.0, engines=3)
    assert plan.abort_share == 0.3
    slow, other, dead = plan.troubles
    assert (slow.rank, other.rank, dead.rank) == (0, 1, 2)
    assert (slow.factor, slow.end_s) == (2.0, math.inf)
    assert (dead.start_s, dead.end_s, dead.factor) == (1.0, 5.0, None)


def test_percentiles_are_values_that_were_there() -> None:
    ordered = [float(n) for n in range(1, 101)]
    assert percentile(ordered, 0.99) == 99.0
    assert percentile(ordered, 0.5) == 50.0
    assert percentile([], 0.5) == 0.0


def test_large_models_may_take_twice_as_long_a_token() -> None:
    assert Objectives.usual(PRESETS["h100-32b"].cost).tpot_s == 0.2
    assert Objectives.usual(PRESETS["h200-30b-a3b"].cost).tpot_s == 0.1
    objectives, alone = objectives_of(scenario_of((0.0, 1, 1)).config)
    assert objectives.tpot_s == 0.1
    assert alone(8_192) < alone(8_193)


def test_the_table_has_a_column_for_each_policy() -> None:
    findings = compare(scenario_of((0.0, 100, 3)), ["inflight", "round_robin"], jobs=1)
    table = to_table([finding.result for finding in findings], width=80)
    assert table.splitlines()[0].split() == ["inflight", "round_robin"]
    assert "TTFT p99" in table


def test_engines_that_step_together_wait_for_the_slowest() -> None:
    asks = [(0.0, 8_000, 1), (0.0, 100, 11)]
    alone = run(scenario_of(*asks)).answers
    text = "[coordinator]\nwave_coordination = true\n"
    outcome = run(scenario_of(*asks, text=text))
    together = outcome.answers
    assert together[0].ttft_s == pytest.approx(alone[0].ttft_s)
    assert alone[1].e2e_s < alone[0].ttft_s / 2
    assert together[1].e2e_s > together[0].ttft_s  # from its second token on
    assert all(answer.is_whole for answer in together)
    assert outcome.duration_s < 1.0


def test_lockstep_runs_repeat_and_end() -> None:
    text = "[coordinator]\nwave_coordination = true\n"
    asks = [(0.3 * n, 400 + 900 * (n % 3), 5 + n % 9) for n in range(30)]
    scenario = scenario_of(*asks, engines=3, text=text)
    assert run(scenario).answers == run(scenario).answers


def test_peers_and_bindings_are_named_with_the_policy() -> None:
    scenario = scenario_of(*[(0.01 * n, 300, 4) for n in range(12)])
    names = ["dynamo_style", "llm_d_style", "sglang_style", "expected_ttft@early", "expected_ttft"]
    findings = compare(scenario, names, jobs=1)
    assert [finding.result.policy for finding in findings] == names
    assert all(answer.is_whole for finding in findings for answer in finding.outcome.answers)
    bindings = [with_policy(scenario, name).config.balancer.binding for name in names[3:]]
    assert bindings == ["early", None]


def test_a_binding_that_does_not_exist_is_told() -> None:
    with pytest.raises(ConfigError, match="--policy inflight@soon: bind it inflight@early or infl"):
        with_policy(scenario_of((0.0, 9, 1)), "inflight@soon")


def interrupt(ended: int) -> None:
    if ended == 5:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_ends_a_run_bare(caplog: pytest.LogCaptureFixture) -> None:
    scenario = scenario_of(*[(0.02 * n, 400, 5) for n in range(40)])
    with pytest.raises(KeyboardInterrupt):
        run(scenario, on_progress=interrupt)
    assert not caplog.records


def test_ctrl_c_while_the_capacity_is_worked_out_hands_out_nothing_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scenario = scenario_of(*[(0.02 * n, 400, 5) for n in range(600)], engines=1)
    with pytest.raises(KeyboardInterrupt):
        capacity_rps(scenario, on_progress=interrupt)
    assert not caplog.records  # of a sink that asked a closed cluster for more
