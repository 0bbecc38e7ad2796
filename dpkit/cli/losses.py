"""What a config does when engines fail, and when it is told to stop: words for `dpkit explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.balancer.retries import LEAST, RECENT_S
from dpkit.cli.joining import on_loss as on_joined_loss
from dpkit.config.units import show_duration
from dpkit.names import EngineKind, Strategy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.config.schema import AdmissionConfig, Config, EngineGroupConfig, SupervisionConfig


def on_loss(config: Config) -> Iterator[str]:
    """Line by line: the requests, the engines of each group, the balancer, the cluster."""
    yield f"When an engine dies, only its own requests notice. {_requests(config.admission)}"
    if config.admission.retries:
        yield f"  {_budget(config.admission)}"
    for group in config.engines:
        joins = group.kind is EngineKind.VLLM
        yield f"  {group.name}: {on_joined_loss(group) if joins else _restarts(group)}"
    yield f"  {_ejection(config)}"
    least = config.cluster.min_ready
    few = "all are given up" if least == 1 else f"fewer than {least} are left that are not given up"
    yield (
        f"  When {few}, the cluster ends, cleanly: your block is cancelled, and ClusterFailed "
        "carries the first error."
    )


def at_the_end(config: Config) -> Iterator[str]:
    """Line by line: a shutdown, and the end of the caller's block."""
    cluster = config.cluster
    first = (
        f"requests are taken for another {show_duration(cluster.pre_stop)}, then no more"
        if cluster.pre_stop
        else "no more requests are taken"
    )
    yield (
        f"When it is told to stop, {first}; those in flight may finish "
        f"within {show_duration(cluster.finish_within)}, then they are ended by force."
    )
    local = any(group.kind is EngineKind.LOCAL for group in config.engines)
    yield (
        "When your block ends, requests in flight are aborted; all is gone within "
        f"{show_duration(cluster.grace)}{' and the rest of one step' * local}."
    )


def _requests(admission: AdmissionConfig) -> str:
    lost = "EngineLost, and what came of it can be read"
    if not admission.retries:
        return f"Each ends with {lost}."
    again = "once" if admission.retries == 1 else f"up to {admission.retries} times"
    if admission.resume:
        return f"Each goes on elsewhere from what it has said, {again}; then it ends with {lost}."
    return f"One that has got nothing yet is placed again, {again}; another ends with {lost}."


def _budget(admission: AdmissionConfig) -> str:
    return (
        f"When losses add up, at most {admission.retry_budget:.0%} of the requests of {RECENT_S} s "
        f"are placed again, or {LEAST}, those of the first loss aside; the rest ends with "
        "EngineLost."
    )


def _restarts(group: EngineGroupConfig) -> str:
    supervision = group.supervision
    together = supervision.strategy is not Strategy.ONE_FOR_ONE and group.count > 1
    given_up = f"{'all are' if together else 'it is'} given up"
    hung = f"A step of more than {show_duration(supervision.step_timeout)} counts as a failure"
    hung += "; the process is killed." if group.kind is EngineKind.PROCESS else "."
    if not supervision.intensity:
        return f"at the first failure of an engine {given_up}. {hung}"
    who = "all engines together" if together else "an engine that fails"
    if together and supervision.strategy is Strategy.ALL_BUT_ONE:
        who = f"all engines but those that failed in the last {show_duration(supervision.period)}"
    return (
        f"{who} start{'s' * (not together)} again after {_waits(supervision)}; after "
        f"{supervision.intensity + 1} failures within {show_duration(supervision.period)} "
        f"{given_up}. {hung}"
    )


def _waits(supervision: SupervisionConfig) -> str:
    """The first waits, as the supervisor reckons them, without their jitter."""
    waits = [
        show_duration(min(supervision.backoff_max, supervision.backoff * 2.0**restart))
        for restart in range(supervision.intensity)
    ]
    shown = ", then ".join(waits[:3])
    more = f" and so on, at most {show_duration(supervision.backoff_max)}" * (len(waits) > 3)
    return f"{shown}{more} (more or less by {supervision.jitter:.0%})"


def _ejection(config: Config) -> str:
    balancer, count = config.balancer, sum(group.count for group in config.engines)
    most = int(count * balancer.eject_max_share)
    probe = "An engine that returns gets one request; the rest follow when that has its first token"
    if not most:
        return f"{probe}."
    return (
        f"{probe}. After {balancer.eject_after} losses in a row it is left out for "
        f"{show_duration(balancer.eject_for)}, each further time for that much longer, at most "
        f"{show_duration(balancer.eject_max)}; never more than {most} of {count} at once."
    )
