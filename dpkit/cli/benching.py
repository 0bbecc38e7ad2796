"""A run of `dpkit bench`: finds its target, shows how far it is, prints what came of it."""

from __future__ import annotations

import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio
from attrs import field, frozen
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from dpkit.bench.html import html_report
from dpkit.bench.inprocess import ClusterTarget
from dpkit.bench.session import run_bench
from dpkit.bench.text import markdown_report, text_report
from dpkit.cli.logs import set_up
from dpkit.cli.running import starting
from dpkit.cli.stops import catch_stops
from dpkit.cli.words import say
from dpkit.config.load import load_config
from dpkit.errors import DpkitError
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.services import open_services

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dpkit.bench.load import Generator
    from dpkit.bench.plan import Load
    from dpkit.bench.report import Report
    from dpkit.bench.slo import Slo
    from dpkit.bench.target import Target

_REFRESH_S = 0.2
_FAILED = 1


@frozen(kw_only=True)
class Forms:
    """What is made of a report."""

    as_json: bool = False
    as_markdown: bool = False
    html: str | None = None
    records: str | None = None


@frozen(kw_only=True)
class Bench:
    """One run, as the command line has it."""

    load: Load
    forms: Forms
    slo: Slo | None
    prefix: int
    file: str
    overrides: tuple[str, ...]
    url: str | None
    model: str | None
    chat: bool
    api_key: str | None = field(default=None, repr=False)

    async def run(self) -> int:
        """Run it; the exit code.

        Raises:
            DpkitError: there is no target.
            OSError: a report cannot be written.
        """
        stop = trio.Event()
        with catch_stops(stop) as stops:
            report = await self._report(stop)
        if report is None:
            click.echo("stopped before anything was measured", err=True)
        else:
            self._print(report)
        if stops:
            return 128 + stops[0]
        return _FAILED if report is None or report.summary.failed else 0

    async def _report(self, stop: trio.Event) -> Report | None:
        """None: it was stopped before there was a target."""
        scope, has_target, report = trio.CancelScope(), trio.Event(), None
        # Services rather than a nursery: what the run raises is fit for a message.
        async with open_services(grace=0) as services:
            services.start_soon(_give_up, stop, scope, has_target, name="stop")
            with scope:
                async with self._target() as target:
                    has_target.set()
                    report = await run_bench(
                        target,
                        self.load,
                        slo=self.slo,
                        prefix=self.prefix,
                        stop=stop,
                        watch=show_progress if sys.stderr and sys.stderr.isatty() else None,
                    )
        return report

    @asynccontextmanager
    async def _target(self) -> AsyncIterator[Target]:
        if self.url is None:
            config = load_config(self.file, overrides=self.overrides)
            set_up(config.log.level)
            say(starting(config))
            async with open_cluster(config) as cluster:
                yield ClusterTarget(cluster, self.file, self.load)
            return
        try:
            from dpkit.bench.openai import Route, open_openai  # noqa: PLC0415 - needs httptools
        except ModuleNotFoundError as error:
            raise DpkitError(
                f"--url needs {error.name}; `pip install 'dpkit[serve]'` brings it"
            ) from error
        async with open_openai(
            self.url,
            route=Route.CHAT if self.chat else Route.COMPLETIONS,
            model=self.model,
            api_key=self.api_key,
            load=self.load,
        ) as target:
            yield target

    def _print(self, report: Report) -> None:
        forms = self.forms
        if forms.as_json:
            click.echo(json.dumps(report.to_dict()))
        else:
            show = markdown_report if forms.as_markdown else text_report
            click.echo(show(report), nl=False)
        if forms.html is not None:
            Path(forms.html).write_text(html_report(report), encoding="utf-8")
        if forms.records is not None:
            with Path(forms.records).open("w", encoding="utf-8") as file:
                file.writelines(
                    json.dumps(record.to_dict(report.origin)) + "\n" for record in report.records
                )


async def _give_up(stop: trio.Event, scope: trio.CancelScope, has_target: trio.Event) -> None:
    """A stop ends the search for a target; with one, it is the load's to end."""
    await stop.wait()
    if not has_target.is_set():
        scope.cancel()


async def show_progress(generator: Generator) -> None:
    """Draw how far a load is, on a terminal's standard error, until cancelled."""
    console = Console(stderr=True)
    load = generator.load
    total = load.requests or (len(load.trace.asks) if load.trace and load.replay else None)
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        while True:
            elapsed = trio.current_time() - generator.origin
            shares = [generator.ended / total] if total else []
            shares += [elapsed / load.ends_after] * (load.duration is not None)
            said = f"{generator.running:,} under way, {generator.ended:,} ended"
            bar.update(task, completed=min(1.0, max(shares, default=0.0)), description=said)
            bar.refresh()
            await trio.sleep(_REFRESH_S)
