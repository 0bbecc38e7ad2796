"""`dpkit run`: a cluster up and served over HTTP, or prompts answered; then the cluster down.

Which of the two is decided here: a file with `[server]` serves, unless prompts are given.
"""

from __future__ import annotations

import logging
import os
import shlex
import stat
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio
from attrs import frozen

from dpkit.cli.answers import JsonAnswers, Output, TextAnswers
from dpkit.cli.logs import log_format as log_format_option
from dpkit.cli.report import Tally, json_report, table_report
from dpkit.cli.running import Options, Running, starting
from dpkit.cli.session import Session
from dpkit.cli.words import say
from dpkit.errors import ClusterNotStarted, ConfigError
from dpkit.messages import SamplingParams
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.services import open_services
from dpkit.testing.idle import check_idle

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.cli.signals import Signals
    from dpkit.config.schema import Config
    from dpkit.nursery.cluster import Cluster

_log = logging.getLogger(__name__)

_STDIN = "-"

_MOST = 1024
"""Prompts under way at once: keeps 16 engines of 64 sequences full, and their answers in memory."""


@frozen(kw_only=True)
class _Prompts:
    """What is asked of the cluster."""

    texts: tuple[str, ...]  # none: they come from stdin
    chat: bool
    sampling: SamplingParams


@click.command("run")
@click.argument("file", default="dpkit.toml", type=click.Path())
@click.option("--prompt", "prompts", multiple=True, help="Answer this; may be given often.")
@click.option("--chat", is_flag=True, help="Put prompts into the model's own chat template.")
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default="greedy")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@click.option("--audit", is_flag=True, help="At the end, check that nothing has leaked.")
@log_format_option
def command(  # noqa: PLR0917 - click passes by keyword
    file: str,
    prompts: tuple[str, ...],
    chat: bool,
    max_tokens: int,
    temperature: float,
    overrides: tuple[str, ...],
    as_json: bool,
    audit: bool,
    log_format: str | None,
) -> int:
    """Bring up the cluster that FILE declares (default: dpkit.toml) and serve it over HTTP.

    FILE says where, under [server]. Without that table, with --prompt, and with standard input
    from a file, prompts are answered instead: all are sent at once and spread over the engines.
    Those of standard input are a line each, until it ends; where FILE would serve, `--prompt -`
    asks for them.

    Ctrl-C, or SIGTERM, takes nothing new and lets answers under way finish within cluster.grace;
    again, and it stops at once; a third time, and the process is gone. SIGHUP reads FILE again and
    changes the running cluster.
    """
    options = Options(
        file=file, overrides=overrides, as_json=as_json, audit=audit, log_format=log_format
    )
    asked = _Prompts(texts=_texts(prompts), chat=chat, sampling=_sampling(max_tokens, temperature))
    config = _load(options)
    serves = config.server is not None and not prompts and not _stdin_is(stat.S_ISREG)
    if serves:
        _refuse_options_of_prompts()
    options.set_up_logs(config.log)
    if serves and _stdin_is(stat.S_ISFIFO):
        _log.warning(
            "standard input is a pipe, and not read: this file serves HTTP ([server]); give "
            "--prompt - to have its lines answered instead"
        )
    if isinstance(sys.stdout, TextIOWrapper):  # an answer may have letters that a terminal has not
        sys.stdout.reconfigure(errors="backslashreplace")
    return trio.run(_main, config, options, None if serves else asked)


def _texts(prompts: tuple[str, ...]) -> tuple[str, ...]:
    if _STDIN not in prompts:
        return prompts
    if len(prompts) > 1:
        raise click.UsageError("--prompt - is all of standard input; give no other --prompt")
    return ()


def _stdin_is(kind: Callable[[int], bool]) -> bool:
    """Whether standard input is of this kind; closed, it is of none.

    A file was redirected by somebody who wants it read. A pipe says nothing, for service managers
    give one: it is no reason to answer prompts, nor to refuse to serve.
    """
    try:
        return sys.stdin is not None and kind(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def _refuse_options_of_prompts() -> None:
    """An option that nothing obeys is as wrong as one that nobody knows."""
    context = click.get_current_context()
    for name in ("chat", "max_tokens", "temperature"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"--{name.replace('_', '-')} is for prompts, and this file serves HTTP ([server]); "
                "give --prompt, or leave it out"
            )


def _sampling(max_tokens: int, temperature: float) -> SamplingParams:
    try:
        return SamplingParams(max_tokens=max_tokens, temperature=temperature)
    except ValueError as error:
        name, _, problem = str(error).partition(" ")
        raise click.UsageError(f"--{name.replace('_', '-')} {problem}") from None


def _load(options: Options) -> Config:
    try:
        return options.load()
    except ConfigError:
        if " " in options.file and not Path(options.file).exists():
            raise click.UsageError(
                f"there is no file {options.file!r}; if it is a prompt, say "
                f"--prompt {shlex.quote(options.file)}"
            ) from None
        raise


async def _main(config: Config, options: Options, asked: _Prompts | None) -> int:
    from dpkit.cli.signals import Signals  # noqa: PLC0415 - Trio must run

    with Signals() as signals:
        if asked is None:
            run: Running = _serving()(config, options, signals)
        else:
            run = _Answering(config, options, signals, asked)
        await run.run()
        if options.audit and run.cluster is not None:
            check_idle(run.cluster)
        return run.exit_code


def _serving() -> type[Running]:
    """What serves; imported only where something is served.

    Raises:
        ClusterNotStarted: what it needs is not installed.
    """
    try:
        from dpkit.cli.serving import Serving  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ClusterNotStarted(
            f"[server] needs {error.name}; `pip install 'dpkit[serve]'` brings it"
        ) from error
    return Serving


class _Answering(Running):
    """Answers prompts, and ends when all are answered."""

    def __init__(self, config: Config, options: Options, signals: Signals, asked: _Prompts) -> None:
        super().__init__(config, options, signals)
        self.tally = Tally()
        self.output = Output()
        self._asked = asked

    @property
    def has_failed(self) -> bool:
        """As `Running` says."""
        return bool(self.tally.failed)

    @property
    def was_cut_short(self) -> bool:
        """As `Running` says."""
        return bool(self.tally.aborted)

    async def serve(self) -> None:
        """Bring the cluster up, answer, report, take the cluster down."""
        say(starting(self.config))
        async with open_cluster(self.config) as self.cluster:
            self.signals.serving = True
            session = self._session(self.cluster)
            async with open_services(grace=0) as services:
                services.start_soon(self._stop, self.cluster, session, name="drain")
                services.start_soon(self.reload_on_hangup, name="reload")
                if session.prompts is None and sys.stdin is not None and sys.stdin.isatty():
                    say("ready: one prompt a line, Ctrl-D ends")
                try:
                    await session.run()
                    if not self.tally.overall()["requests"] and not self.signals.stops:
                        click.echo(
                            "no prompts: give --prompt, or lines on standard input", err=True
                        )
                finally:
                    self._report(self.cluster)

    def _session(self, cluster: Cluster) -> Session:
        admission, asked = self.config.admission, self._asked
        bound = admission.max_inflight
        answers = JsonAnswers(self.output) if self.options.as_json else TextAnswers(self.output)
        return Session(
            client=cluster.client,
            prompts=asked.texts or None,
            chat=asked.chat,
            sampling=asked.sampling,
            answers=answers,
            output=self.output,
            tally=self.tally,
            # No more than the cluster has room for: it would refuse what is too much.
            most=_MOST if bound is None else max(1, min(_MOST, bound + admission.max_queued)),
        )

    async def _stop(self, cluster: Cluster, session: Session) -> None:
        """On the first stop signal: soon take nothing new, and give what is under way its time."""
        await self.signals.wait_stop(1)
        deadline = trio.current_time() + self.config.cluster.finish_within
        await trio.sleep(self.config.cluster.pre_stop)
        session.stop_taking()
        with trio.move_on_at(deadline):
            await session.wait_sent()
        await self.drain(cluster, deadline)

    def _report(self, cluster: Cluster) -> None:
        if self.options.as_json:
            self.output.write(json_report(cluster.statistics(), self.tally))
        elif self.tally.overall()["requests"]:
            self.output.write(table_report(cluster.statistics(), self.tally))
