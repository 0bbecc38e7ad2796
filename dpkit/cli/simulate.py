"""`dpkit simulate`: what a config and its policies would make of a trace, on a virtual clock."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from attrs import evolve

from dpkit.config.checks import BadValue, did_you_mean
from dpkit.config.load import load_layers
from dpkit.config.units import parse_duration
from dpkit.errors import ConfigError, plural
from dpkit.simulate.workloads import WORKLOADS, make_workload
from dpkit.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.progress import TaskID

    from dpkit.config.layers import Layers
    from dpkit.config.schema import Config
    from dpkit.simulate.run import Scenario
    from dpkit.simulate.study import Finding, Load
    from dpkit.traces import Trace

    Progress = Callable[[str, int, int], None]


STANDARD_OUTPUT = "-"

trace_option = click.option(
    "--trace",
    required=True,
    metavar="T",
    help=f"A trace file, or a workload: {', '.join(WORKLOADS)}.",
)

# Of commands that may write their results beside what they print. As a flag it is what it is for
# all others: one JSON object on standard output, and nothing else.
json_option = click.option(
    "--json",
    "json_to",
    is_flag=False,
    flag_value=STANDARD_OUTPUT,
    type=click.Path(),
    metavar="[OUT]",
    help="Print one JSON object; with OUT, write it there instead.",
)


@click.command("simulate")
@click.argument("file", required=False, type=click.Path())
@trace_option
@click.option("--policy", "policies", multiple=True, metavar="P", help="Repeat it to compare.")
@click.option("--load", type=click.FloatRange(0.01, 100), help="Of what the pool can do at best.")
@click.option("--rows", type=click.IntRange(1), metavar="N", help="Only the first N requests.")
@click.option("--engines", type=click.IntRange(1, 1024), help="As many of the config's one group.")
@click.option("--clients", type=click.IntRange(1, 1024), default=1, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--stats-interval", metavar="TIME", help="Of the coordinator, such as 100ms.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@click.option("--fault", "faults", multiple=True, metavar="PLAN", help="Such as kill:2@35%-65%.")
@click.option("--jobs", type=click.IntRange(1), help="Runs side by side; default: one a core.")
@json_option
@click.option("--report", type=click.Path(), metavar="OUT", help="Write a page with plots.")
def command(  # noqa: PLR0917 - click passes by keyword
    file: str | None,
    trace: str,
    policies: tuple[str, ...],
    load: float | None,
    rows: int | None,
    engines: int | None,
    clients: int,
    seed: int,
    stats_interval: str | None,
    overrides: tuple[str, ...],
    faults: tuple[str, ...],
    jobs: int | None,
    json_to: str | None,
    report: str | None,
) -> None:
    """Replay a trace through FILE's cluster on a virtual clock, under one policy or several.

    Engines are simulated by their models' measured costs (`model = "cost:PRESET"`); all else is
    what `dpkit run` runs. T is a trace file (CSV, Mooncake's JSONL, Azure's CSV; gzipped or not) or
    the name of a synthetic workload, which needs no FILE. A fault is `kill:ENGINE@FROM-TO`,
    `kill:coordinator@FROM-TO`, `slow:ENGINE,ENGINE*FACTOR@FROM-TO` or `abort:SHARE`, with moments
    as `35%` of the trace or `90s`.
    """
    from dpkit.simulate.study import compare, find_load  # noqa: PLC0415 - Trio, for --help
    from dpkit.simulate.table import to_json, to_table  # noqa: PLC0415 - likewise

    refuse_nowhere("--json", json_to)
    refuse_nowhere("--report", report)
    scenario = make_scenario(
        file,
        trace,
        rows=rows,
        seed=seed,
        engines=engines,
        clients=clients,
        stats_interval=stats_interval,
        overrides=overrides,
    )
    names = tuple(dict.fromkeys(policies)) or (scenario.config.balancer.policy,)
    with progress_bars() as on_progress:
        scenario, found = find_load(scenario, load, on_progress)
        scenario = with_faults(scenario, faults)
        began = time.perf_counter()
        findings = compare(scenario, names, jobs=jobs, on_progress=on_progress)
        wall_s = time.perf_counter() - began
    results = [finding.result for finding in findings]
    head, tail = _head(scenario, found), _tail(findings, wall_s)
    if report is not None:
        from dpkit.simulate.report import to_html  # noqa: PLC0415 - for those who ask

        write(report, to_html(findings, title=head, tail=tail))
    if json_to is not None:
        write(json_to, to_json(results))
    if json_to != STANDARD_OUTPUT:
        click.echo(f"{head}\n{to_table(results)}{tail}")


def make_scenario(
    file: str | None,
    trace: str,
    *,
    rows: int | None,
    seed: int,
    engines: int | None = None,
    clients: int = 1,
    stats_interval: str | None = None,
    overrides: Sequence[str] = (),
) -> Scenario:
    """Put a config and a trace together.

    Raises:
        ConfigError: one of them is not as it must be.
    """
    from dpkit.simulate.run import Scenario  # noqa: PLC0415 - Trio costs `--help` too much
    from dpkit.simulate.settings import simulated, smallest_kv  # noqa: PLC0415 - likewise

    given, layers = _config(file, trace, overrides)
    if stats_interval is not None:
        given = _with_interval(given, stats_interval)
    config = simulated(given, engines=engines, seed=seed, layers=layers)
    asks = _trace(trace, rows, seed).clipped(smallest_kv(config))
    return Scenario(config=config, trace=asks, clients=clients, seed=seed)


def with_faults(scenario: Scenario, texts: Sequence[str]) -> Scenario:
    """Let things go wrong, at moments of the trace as it is replayed."""
    from dpkit.simulate.faults import parse_faults  # noqa: PLC0415 - likewise

    engines = sum(group.count for group in scenario.config.engines)
    plan = parse_faults(texts, span_s=scenario.trace.span_s, engines=engines)
    dies = any(trouble.factor is None for trouble in plan.troubles)
    if dies and scenario.config.coordinator.wave_coordination:
        problem = (
            "--fault kill: engines that step together (wave_coordination) cannot be killed here"
        )
        raise ConfigError([problem])
    return evolve(scenario, faults=plan)


def _config(file: str | None, trace: str, overrides: Sequence[str]) -> tuple[Config, Layers | None]:
    from dpkit.simulate.settings import text_for  # noqa: PLC0415 - Trio costs `--help` too much

    if file is not None:
        loaded = load_layers(file, overrides=overrides)
        return loaded.config, loaded.layers
    if trace not in WORKLOADS:
        raise click.UsageError(
            f"--trace {trace}: give the FILE of the cluster that shall serve it; only workloads "
            f"bring one: {', '.join(WORKLOADS)}{did_you_mean(trace, WORKLOADS)}"
        )
    from dpkit.config.load import parse_config  # noqa: PLC0415 - for those alone

    return parse_config(text_for(trace), overrides=overrides), None


def _with_interval(config: Config, text: str) -> Config:
    try:
        coordinator = evolve(config.coordinator, interval=parse_duration(text))
    except BadValue as error:
        raise click.UsageError(f"--stats-interval {text}: {error.problem}") from error
    return evolve(config, coordinator=coordinator)


def _trace(name: str, rows: int | None, seed: int) -> Trace:
    if name in WORKLOADS:
        return make_workload(name, rows=rows, seed=seed)
    if not Path(name).exists():
        known = f"the synthetic workloads are {', '.join(WORKLOADS)}{did_you_mean(name, WORKLOADS)}"
        raise ConfigError([f"--trace {name}: no such file; {known}"])
    return read_trace(name, rows=rows, seed=seed)


def refuse_nowhere(option: str, path: str | None) -> None:
    """Tell before a simulation rather than after it that its results could not be written.

    Raises:
        click.UsageError: the directory of `path` is not there, `path` is one itself, or it is a
            config, which results would replace.
    """
    if path is None or path == STANDARD_OUTPUT:
        return
    if not Path(path).absolute().parent.is_dir():
        raise click.UsageError(f"{option} {path}: there is no such directory")
    if Path(path).is_dir():
        raise click.UsageError(f"{option} {path}: it is a directory; name a file in it")
    if path.endswith(".toml"):
        raise click.UsageError(
            f"{option} {path}: results are no config; put FILE before {option}, which takes the "
            "next word for its own"
        )


def write(path: str, text: str) -> None:
    """Write a file whole, or standard output; an `OSError` is for `dpkit.cli.main` to tell."""
    if path == STANDARD_OUTPUT:
        click.echo(text, nl=False)
    else:
        Path(path).write_text(text, encoding="utf-8")


def _head(scenario: Scenario, load: Load) -> str:
    trace, engines = scenario.trace, sum(group.count for group in scenario.config.engines)
    models = ", ".join(dict.fromkeys(group.model for group in scenario.config.engines))
    parts = [f"{trace.name}: {plural(len(trace.asks), 'request')}"]
    parts.append(f"{plural(engines, 'engine')} of {models}")
    parts.append(plural(scenario.clients, "client"))
    if trace.users is not None:
        parts.append(f"{plural(trace.users, 'user')} in a closed loop")
    elif load.capacity_rps is None:
        parts.append(f"{load.offered_rps:.3g} requests/s")
    else:
        share = load.offered_rps / load.capacity_rps
        parts.append(
            f"{load.offered_rps:.3g} requests/s, {share:.0%} of the {load.capacity_rps:.3g} that "
            "the pool finishes at best"
        )
    return ", ".join(parts)


def _tail(findings: Sequence[Finding], wall_s: float) -> str:
    requests = sum(len(finding.outcome.answers) for finding in findings)
    virtual_s = sum(finding.outcome.duration_s for finding in findings)
    return (
        f"{requests:,} requests, {virtual_s:,.0f} s of serving, simulated in {wall_s:.1f} s: "
        f"{requests / wall_s:,.0f} requests/s"
    )


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """One bar a run on standard error; nothing where that is no terminal."""
    from rich.console import Console  # noqa: PLC0415 - costs `--help` too much
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    from rich.progress import Progress as Bars  # noqa: PLC0415 - likewise

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield show
