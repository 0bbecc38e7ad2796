"""`dpkit run`: a cluster up, prompts through the balancer, answers out, the cluster down.

What a signal means is decided here: the first one drains the cluster, the second cancels the run,
which unwinds as any cancelled body does; SIGHUP reads the file again.
"""

from __future__ import annotations

import logging
import shlex
import signal
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio
from attrs import define, field, frozen

from dpkit.cli.answers import JsonAnswers, Output, TextAnswers
from dpkit.cli.logs import set_up
from dpkit.cli.report import Tally, json_report, table_report
from dpkit.cli.session import Session
from dpkit.cli.words import describe, plural
from dpkit.config.load import load_config
from dpkit.errors import ConfigError
from dpkit.messages import SamplingParams
from dpkit.names import EngineKind
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.services import open_services
from dpkit.testing.idle import check_idle

if TYPE_CHECKING:
    from dpkit.cli.signals import Signals
    from dpkit.config.schema import Config
    from dpkit.nursery.cluster import Cluster

_FAILED = 1

_MOST = 1024
"""Prompts under way at once: keeps 16 engines of 64 sequences full, and their answers in memory."""

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class _Options:
    file: str
    overrides: tuple[str, ...]
    prompts: tuple[str, ...]  # none: they come from stdin
    chat: bool
    sampling: SamplingParams
    as_json: bool
    audit: bool


@click.command("run")
@click.argument("file", default="dpkit.toml", type=click.Path())
@click.option("--prompt", "prompts", multiple=True, help="Answer this; may be given often.")
@click.option("--chat", is_flag=True, help="Put prompts into the model's own chat template.")
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default="greedy")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@click.option("--audit", is_flag=True, help="At the end, check that nothing has leaked.")
def command(  # noqa: PLR0917 - click passes by keyword
    file: str,
    prompts: tuple[str, ...],
    chat: bool,
    max_tokens: int,
    temperature: float,
    overrides: tuple[str, ...],
    as_json: bool,
    audit: bool,
) -> int:
    """Bring up the cluster that FILE declares (default: dpkit.toml) and answer prompts.

    All prompts are sent at once and spread over the engines. Without --prompt they are read from
    standard input, a line each, until it ends.

    Ctrl-C, or SIGTERM, takes no more prompts and lets answers under way finish within
    cluster.grace; again, and it stops at once; a third time, and the process is gone. SIGHUP
    reads FILE again and changes the running cluster.
    """
    options = _Options(
        file=file,
        overrides=overrides,
        prompts=prompts,
        chat=chat,
        sampling=_sampling(max_tokens, temperature),
        as_json=as_json,
        audit=audit,
    )
    config = _load(options)
    set_up(config.log.level)
    if isinstance(sys.stdout, TextIOWrapper):  # an answer may have letters that a terminal has not
        sys.stdout.reconfigure(errors="backslashreplace")
    return trio.run(_main, config, options)


def _sampling(max_tokens: int, temperature: float) -> SamplingParams:
    try:
        return SamplingParams(max_tokens=max_tokens, temperature=temperature)
    except ValueError as error:
        name, _, problem = str(error).partition(" ")
        raise click.UsageError(f"--{name.replace('_', '-')} {problem}") from None


def _load(options: _Options) -> Config:
    try:
        return load_config(options.file, overrides=options.overrides)
    except ConfigError:
        if " " in options.file and not Path(options.file).exists():
            raise click.UsageError(
                f"there is no file {options.file!r}; if it is a prompt, say "
                f"--prompt {shlex.quote(options.file)}"
            ) from None
        raise


async def _main(config: Config, options: _Options) -> int:
    from dpkit.cli.signals import Signals  # noqa: PLC0415 - Trio must run

    with Signals() as signals:
        run = _Run(config=config, options=options, signals=signals)
        signals.kill_after = config.cluster.grace - config.cluster.finish_within
        with run.scope:
            # Services rather than a nursery: what the run raises comes out bare, fit for a message.
            async with open_services(grace=0) as services:
                services.start_soon(run.obey, name="signals")
                await run.serve()
        if run.scope.cancelled_caught and not signals.serving:
            models = ", ".join(dict.fromkeys(group.model for group in config.engines))
            click.echo(f"stopped while loading {models}; nothing was answered", err=True)
        if options.audit and run.cluster is not None:
            check_idle(run.cluster)
        return run.exit_code()


@define(eq=False, kw_only=True)
class _Run:
    config: Config
    options: _Options
    signals: Signals
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    tally: Tally = field(factory=Tally)
    output: Output = field(factory=Output)
    cluster: Cluster | None = None

    def exit_code(self) -> int:
        """0: all is answered, a drain after SIGTERM included."""
        stops = self.signals.stops
        unfinished = self.tally.aborted or self.scope.cancelled_caught
        if signal.SIGINT in stops or (stops and unfinished):
            return self.signals.code
        return _FAILED if self.tally.failed else 0

    async def obey(self) -> None:
        """Cancel all on the second stop signal; on the first, if nothing is served yet."""
        await self.signals.wait_stop(1)
        if self.signals.serving:
            await self.signals.wait_stop(2)
        self.scope.cancel()

    async def serve(self) -> None:
        """Bring the cluster up, answer, report, take the cluster down."""
        _say(starting(self.config))
        async with open_cluster(self.config) as self.cluster:
            self.signals.serving = True
            session = self._session(self.cluster)
            async with open_services(grace=0) as services:
                services.start_soon(self._drain, self.cluster, session, name="drain")
                services.start_soon(self._reload, self.cluster, name="reload")
                if session.prompts is None and sys.stdin is not None and sys.stdin.isatty():
                    _say("ready: one prompt a line, Ctrl-D ends")
                try:
                    await session.run()
                    if not self.tally.overall()["requests"] and not self.signals.stops:
                        click.echo(
                            "no prompts: give --prompt, or lines on standard input", err=True
                        )
                finally:
                    self._report(self.cluster)

    def _session(self, cluster: Cluster) -> Session:
        admission, options = self.config.admission, self.options
        bound = admission.max_inflight
        return Session(
            client=cluster.client,
            prompts=options.prompts or None,
            chat=options.chat,
            sampling=options.sampling,
            answers=JsonAnswers(self.output) if options.as_json else TextAnswers(self.output),
            output=self.output,
            tally=self.tally,
            # No more than the cluster has room for: it would refuse what is too much.
            most=_MOST if bound is None else max(1, min(_MOST, bound + admission.max_queued)),
        )

    async def _drain(self, cluster: Cluster, session: Session) -> None:
        """On the first stop signal: soon take nothing new, and give what is under way its time."""
        await self.signals.wait_stop(1)
        deadline = trio.current_time() + self.config.cluster.finish_within
        await trio.sleep(self.config.cluster.pre_stop)
        session.stop_taking()
        with trio.move_on_at(deadline):
            await session.wait_sent()
        await cluster.drain(deadline)
        if trio.current_time() >= deadline:
            self.signals.end_within(self.signals.kill_after)

    async def _reload(self, cluster: Cluster) -> None:
        """On each SIGHUP: change the cluster to what the file says now, or to nothing new."""
        seen, file = 0, self.options.file
        while True:
            seen = await self.signals.wait_hangup(seen)
            try:
                config = load_config(file, overrides=self.options.overrides)
                plan = await cluster.apply(config)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the run goes on
                said = "; ".join(describe(error).splitlines())  # a log's record is one line
                _log.error("SIGHUP: all stays as it was: %s", said)
            else:
                set_up(config.log.level)
                _log.warning("SIGHUP: %s is in force: %s", file, plan.in_a_line)

    def _report(self, cluster: Cluster) -> None:
        if self.options.as_json:
            self.output.write(json_report(cluster.statistics(), self.tally))
        elif self.tally.overall()["requests"]:
            self.output.write(table_report(cluster.statistics(), self.tally))


def starting(config: Config) -> str:
    """What is about to be started, and where it will be found."""
    count = sum(group.count for group in config.engines)
    processes = sum(group.count for group in config.engines if group.kind is EngineKind.PROCESS)
    if not processes:
        where = ""
    elif processes < count:
        where = f", {processes} of them a process of its own"
    else:
        where = f", {'each ' * (count > 1)}a process of its own"
    return f"starting {plural(count, 'engine')}{where} …"


def _say(message: str) -> None:
    """Tell a person at a terminal what takes a while; programs need not know."""
    if sys.stderr is not None and sys.stderr.isatty():
        click.echo(message, err=True)
