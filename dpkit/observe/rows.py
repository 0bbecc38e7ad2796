"""From numbers to rows: for each family, values by its labels. Knows no text format."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeAlias

from dpkit.names import EngineState, FinishReason
from dpkit.nursery.meter import FIRST_TOKEN_S, Counted, Histogram
from dpkit.nursery.standing import EngineTotals
from dpkit.serve.front import State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dpkit.nursery.standing import EngineStatistics
    from dpkit.observe.numbers import ClusterNumbers, Numbers
    from dpkit.observe.tallies import HttpCounts, RequestCounts

Value: TypeAlias = "float | Counted"
Row: TypeAlias = tuple[str, tuple[str, ...], Value]
"""Family, labels, value."""
Labelled: TypeAlias = "tuple[tuple[str, ...], Value]"
"""Labels, value."""
Rows: TypeAlias = "Mapping[str, list[Labelled]]"
"""By family."""


def rows_of(numbers: Numbers) -> Rows:
    """All rows there are, by family."""
    rows: defaultdict[str, list[Labelled]] = defaultdict(list)
    for name, labels, value in _all(numbers):
        rows[name].append((labels, value))
    return rows


def _all(numbers: Numbers) -> Iterator[Row]:
    yield "dpkit:loop_lag_seconds", (), numbers.loop_lag_s
    if numbers.server is not None:
        for state in State:
            yield "dpkit:server_state", (state.value,), float(numbers.server is state)
    if numbers.http is not None:
        yield from _http(numbers.http)
    if (cluster := numbers.cluster) is None:
        return
    model = (cluster.model_name,)
    yield from _cluster(cluster, model)
    for engine in cluster.engines:
        yield from _engine(engine, cluster.now, (*model, str(engine.rank)))
    for rank, totals in _totals(cluster).items():
        yield from _work(totals, (*model, rank))
    for rank, counts in cluster.requests.items():
        yield from _requests(counts, (*model, rank))
    yield from _placements(cluster, model)


def _engine(engine: EngineStatistics, now: float, of: tuple[str, ...]) -> Iterator[Row]:
    core = engine.core
    yield "vllm:num_requests_running", of, core.running
    yield "vllm:num_requests_waiting", of, core.waiting
    yield "vllm:num_requests_waiting_by_reason", (*of, "capacity"), core.waiting
    yield "vllm:num_requests_waiting_by_reason", (*of, "deferred"), 0
    yield "vllm:kv_cache_usage_perc", of, core.kv_cache_usage
    size = (str(engine.block_size), str(core.num_blocks))
    yield "vllm:cache_config_info", (*of, *size), 1
    yield "dpkit:engine_info", (*of, engine.engine.name), 1
    yield "dpkit:engine_state_seconds", of, now - engine.since
    for state in EngineState:
        yield "dpkit:engine_state", (*of, state.value), float(engine.state is state)


def _totals(cluster: ClusterNumbers) -> Mapping[str, EngineTotals]:
    """What the engines of each rank have done, one after the other."""
    totals = {str(rank): each for rank, each in cluster.statistics.departed.items()}
    for engine in cluster.engines:
        before = totals.get(str(engine.rank), EngineTotals())
        totals[str(engine.rank)] = before.plus(engine.totals)
    return totals


def _work(totals: EngineTotals, of: tuple[str, ...]) -> Iterator[Row]:
    yield "vllm:prefix_cache_queries_total", of, totals.prefix_query_tokens
    yield "vllm:prefix_cache_hits_total", of, totals.prefix_hit_tokens
    yield "vllm:prompt_tokens_total", of, totals.prompt_tokens
    yield "vllm:prompt_tokens_cached_total", of, totals.prefix_hit_tokens
    yield "vllm:generation_tokens_total", of, totals.output_tokens
    yield "vllm:num_preemptions_total", of, totals.preemptions
    yield "vllm:inter_token_latency_seconds", of, totals.measured.inter_token_s
    yield "vllm:iteration_tokens_total", of, totals.measured.step_tokens
    yield "dpkit:cancel_to_freed_seconds", of, totals.measured.abort_to_free_s
    yield "dpkit:engine_restarts_total", of, totals.restarts


def _requests(counts: RequestCounts, of: tuple[str, ...]) -> Iterator[Row]:
    for reason in FinishReason:
        yield "vllm:request_success_total", (*of, reason.value), counts.reasons.get(reason, 0)
    for cause, count in counts.causes.items():
        yield "dpkit:requests_ended_total", (*of, cause.value), count
    if of[-1]:  # what never had an engine was never measured
        for name, measured in counts.measured.items():
            yield name, of, measured


def _placements(cluster: ClusterNumbers, model: tuple[str, ...]) -> Iterator[Row]:
    clients = cluster.statistics.clients
    nothing = Histogram(FIRST_TOKEN_S).now()
    waits = {rank: nothing for rank in cluster.requests if rank}
    picks: defaultdict[tuple[str, str], int] = defaultdict(int)
    for client in clients:
        for rule, ranks in client.picks.items():
            for rank, count in ranks.items():
                picks[str(rank), rule] += count
        for rank, counted in client.first_token_s.items():
            waits[str(rank)] = waits.get(str(rank), nothing).plus(counted)
    for labels, count in picks.items():
        yield "dpkit:picks_total", (*model, *labels), count
    for label, counted in waits.items():
        yield "vllm:time_to_first_token_seconds", (*model, label), counted
    for label, count in cluster.inflight.items():
        yield "dpkit:requests_inflight", (*model, label), count


def _cluster(cluster: ClusterNumbers, of: tuple[str, ...]) -> Iterator[Row]:
    now, clients = cluster.statistics, cluster.statistics.clients
    published_at = now.coordinator.published_at
    if published_at is not None:
        yield "dpkit:snapshot_age_seconds", of, cluster.now - published_at
    yield "dpkit:scheduler_imbalance", of, cluster.imbalance
    yield "dpkit:engines_without_load", of, cluster.silent
    yield "dpkit:engines_unreported", of, cluster.unreported
    yield "dpkit:engines_ejected", of, now.health.ejected
    yield "dpkit:ejections_total", of, now.health.ejections
    yield "dpkit:engines_on_probation", of, now.health.on_probation
    yield "dpkit:coordinator_restarts_total", of, now.coordinator_restarts
    if now.arbiter_up is not None:
        yield "dpkit:arbiter_up", of, float(now.arbiter_up)
    yield "dpkit:wave", of, now.coordinator.current_wave
    yield "dpkit:events_lost_total", of, now.events_lost
    yield "dpkit:steps_lost_total", of, now.steps_lost
    yield "dpkit:requests_queued", of, sum(each.queued for each in clients)
    yield "dpkit:requests_admitted_total", of, sum(each.started for each in clients)
    yield "dpkit:requests_refused_total", of, sum(each.admission.refused for each in clients)
    yield "dpkit:requests_retried_total", of, sum(each.retried for each in clients)
    yield "dpkit:requests_resumed_total", of, sum(each.resumed for each in clients)
    yield "dpkit:requests_taken_back_total", of, sum(each.taken_back for each in clients)
    yield "dpkit:retries_refused_total", of, sum(each.retries_refused for each in clients)
    yield "dpkit:late_outputs_total", of, sum(each.late_outputs for each in clients)


def _http(http: HttpCounts) -> Iterator[Row]:
    yield "dpkit:client_disconnects_total", (), http.disconnects
    for answer, count in http.answers.items():
        yield "dpkit:http_answers_total", answer, count
    for request, count in http.requests.items():
        yield "http_requests_total", request, count
    for which, seconds in http.seconds.items():
        yield "http_request_duration_seconds", which, seconds
