"""`dpkit plan`: how many engines a trace needs, under each policy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
from attrs import evolve

from dpkit.cli.simulate import (
    STANDARD_OUTPUT,
    json_option,
    make_scenario,
    progress_bars,
    refuse_nowhere,
    trace_option,
    write,
)
from dpkit.config.checks import BadValue
from dpkit.config.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpkit.simulate.plan import Need, Promise

_FAILED = 1


@click.command("plan")
@click.argument("file", required=False, type=click.Path())
@trace_option
@click.option("--policy", "policies", multiple=True, metavar="P", help="Repeat it to compare.")
@click.option("--ttft", metavar="TIME", help="Of 99 % of the requests, such as 500ms.")
@click.option("--tpot", metavar="TIME", help="Likewise, of each token after the first.")
@click.option("--e2e", metavar="TIME", help="Likewise, of the whole answer.")
@click.option("--goodput", type=click.FloatRange(0, 1), help="Share of good requests.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Requests a second.")
@click.option("--rows", type=click.IntRange(1), metavar="N", help="Only the first N requests.")
@click.option("--most", type=click.IntRange(1, 1024), default=64, show_default=True)
@click.option("--clients", type=click.IntRange(1, 1024), default=1, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@json_option
def command(  # noqa: PLR0917 - click passes by keyword
    file: str | None,
    trace: str,
    policies: tuple[str, ...],
    ttft: str | None,
    tpot: str | None,
    e2e: str | None,
    goodput: float | None,
    rate: float | None,
    rows: int | None,
    most: int,
    clients: int,
    seed: int,
    overrides: tuple[str, ...],
    json_to: str | None,
) -> int:
    """Find the least number of engines with which FILE's cluster keeps a promise on a trace.

    What is promised is one or more of --ttft, --tpot, --e2e (of 99 % of the requests) and
    --goodput. The trace comes at its own pace, or at --rate. FILE and T are as for `dpkit
    simulate`; its one group of engines is made larger until it suffices, up to --most. Exits with
    1 if it suffices under none of the policies.
    """
    from dpkit.simulate.plan import Promise, least_engines  # noqa: PLC0415 - Trio, for --help

    refuse_nowhere("--json", json_to)
    promise = Promise(
        ttft_p99_s=_time("--ttft", ttft),
        tpot_p99_s=_time("--tpot", tpot),
        e2e_p99_s=_time("--e2e", e2e),
        goodput=goodput,
    )
    if promise == Promise():
        raise click.UsageError("say what must be kept: --ttft, --tpot, --e2e or --goodput")
    scenario = make_scenario(
        file, trace, rows=rows, seed=seed, clients=clients, overrides=overrides
    )
    if rate is not None and scenario.trace.span_s:
        own = len(scenario.trace.asks) / scenario.trace.span_s
        scenario = evolve(scenario, trace=scenario.trace.scaled(own / rate))
    elif not scenario.trace.has_rate:
        raise click.UsageError(f"{scenario.trace.name} has no pace of its own: give a --rate")
    names = tuple(dict.fromkeys(policies)) or (scenario.config.balancer.policy,)
    total, needs = len(scenario.trace.asks), []
    with progress_bars() as on_progress:
        for policy in names:
            need = least_engines(
                scenario,
                policy,
                promise,
                most=most,
                on_progress=lambda n, ended, p=policy: on_progress(f"{p}, {n}", ended, total),  # type: ignore[misc]
            )
            needs.append(need)
    if json_to is not None:
        write(json_to, _json(needs))
    if json_to != STANDARD_OUTPUT:
        click.echo(_text(needs, promise), nl=False)
    return _FAILED if all(need.engines is None for need in needs) else 0


def _time(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_duration(text)
    except BadValue as error:
        raise click.UsageError(f"{option}: {error.problem}") from error


def _json(needs: Sequence[Need]) -> str:
    rows = [
        {"engines": need.engines, "tried": list(need.tried), **need.result.as_json()}
        for need in needs
    ]
    return json.dumps({"needs": rows}, indent=1) + "\n"


def _text(needs: Sequence[Need], promise: Promise) -> str:
    from dpkit.simulate.table import to_table  # noqa: PLC0415 - rich costs a JSON run for nothing

    lines = []
    for need in needs:
        if need.engines is None:
            broken = ", ".join(promise.broken(need.result))
            lines.append(
                f"{need.policy}: {max(need.tried)} engines are not enough, for {broken}; allow "
                "more with --most, or promise less"
            )
        else:
            noun = "engine" if need.engines == 1 else "engines"
            lines.append(f"{need.policy}: {need.engines} {noun}")
    return "\n".join(lines) + "\n" + to_table([need.result for need in needs])
