"""`dpkit run`: a cluster up, prompts through the balancer, answers out, the cluster down.

Signals live here and nowhere else in dpkit: the first one cancels the run, which unwinds as any
cancelled body does, and the exit code says which signal it was.
"""

from __future__ import annotations

import logging
import signal
import sys
from typing import TYPE_CHECKING

import click
import trio
from attrs import define, frozen

from dpkit.cli.answers import JsonAnswers, TextAnswers
from dpkit.cli.prompts import read_prompts
from dpkit.cli.report import Tally, print_json, print_table
from dpkit.config.load import load_config
from dpkit.errors import DpkitError
from dpkit.messages import SamplingParams
from dpkit.nursery.cluster import open_cluster
from dpkit.nursery.services import open_services

if TYPE_CHECKING:
    from dpkit.cli.answers import Answers, Turn
    from dpkit.config.schema import Config
    from dpkit.nursery.client import Client
    from dpkit.nursery.cluster import Cluster

_FAILED = 1


@frozen(kw_only=True)
class _Options:
    prompts: tuple[str, ...]  # none: they come from stdin
    chat: bool
    sampling: SamplingParams
    as_json: bool


@click.command("run")
@click.argument("file", default="dpkit.toml", type=click.Path())
@click.option("--prompt", "prompts", multiple=True, help="Answer this; may be given often.")
@click.option("--chat", is_flag=True, help="Put prompts into the model's own chat template.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default="greedy")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def command(  # noqa: PLR0917 - click passes by keyword
    file: str,
    prompts: tuple[str, ...],
    chat: bool,
    max_tokens: int,
    temperature: float,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Bring up the cluster that FILE declares (default: dpkit.toml) and answer prompts.

    All prompts are sent at once and spread over the engines. Without --prompt they are read from
    standard input, a line each, until it ends.
    """
    config = load_config(file, overrides=overrides)
    logging.basicConfig(
        level=config.log.level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    options = _Options(
        prompts=prompts,
        chat=chat,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature),
        as_json=as_json,
    )
    return trio.run(_run_until_signal, config, options)


async def _run_until_signal(config: Config, options: _Options) -> int:
    """The exit code of the run, or 128 + the number of the signal that ended it."""
    code = 0
    with (
        trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals,
        trio.CancelScope() as run,
    ):

        async def watch() -> None:
            nonlocal code
            async for signum in signals:
                code = 128 + signum
                _say("\nstopping")
                run.cancel()

        # Services rather than a nursery: what the run raises comes out bare, fit for a message.
        async with open_services(grace=0) as services:
            services.start_soon(watch, name="signal watch")
            code = await _serve(config, options)
    return code


async def _serve(config: Config, options: _Options) -> int:
    _say(f"starting {sum(g.count for g in config.engines)} engines …")
    async with open_cluster(config) as cluster:
        run = _Run(
            client=cluster.client,
            options=options,
            answers=JsonAnswers() if options.as_json else TextAnswers(),
            tally=Tally(started_at=trio.current_time(), ended_at=trio.current_time()),
        )
        await run.all_prompts()
        return _report(cluster, run)


def _report(cluster: Cluster, run: _Run) -> int:
    empty = not run.tally.overall()["requests"]
    if empty:
        click.echo("no prompts: give --prompt, or lines on standard input", err=True)
    if run.options.as_json:
        print_json(cluster.statistics(), run.tally)
    elif not empty:
        print_table(cluster.statistics(), run.tally)
    return _FAILED if run.tally.failed else 0


@define(eq=False)
class _Run:
    client: Client
    options: _Options
    answers: Answers
    tally: Tally

    async def all_prompts(self) -> None:
        """Send every prompt at once, each from a task of its own; return when all have ended.

        Raises:
            DpkitError: standard input cannot be read on; what was read before it is answered.
            OSError: nobody reads our output any more.
        """
        failure: Exception | None = None  # raised bare, outside the nursery, which would wrap it
        async with trio.open_nursery() as nursery:

            async def answer(prompt: str, turn: Turn) -> None:
                nonlocal failure
                try:
                    await self._answer(prompt, turn)
                except OSError as error:
                    failure = error
                    nursery.cancel_scope.cancel()

            def submit(prompt: str) -> None:
                nursery.start_soon(answer, prompt, self.answers.turn(prompt))

            for prompt in self.options.prompts:
                submit(prompt)
            if not self.options.prompts:
                try:
                    await read_prompts(sys.stdin.fileno(), submit)
                except DpkitError as error:
                    failure = error
        self.tally.ended_at = trio.current_time()
        if failure is not None:
            raise failure

    async def _answer(self, prompt: str, turn: Turn) -> None:
        """Stream one answer; what goes wrong with it is its own affair."""
        stream = None
        try:
            asked = [{"role": "user", "content": prompt}] if self.options.chat else prompt
            async with self.client.generate(asked, self.options.sampling) as stream:
                async for output in stream:
                    turn.text(stream, output.text)
        except DpkitError as error:
            self.tally.failed += 1
            turn.failed(stream, error)
        else:
            self.tally.completions.append(stream.completion())
            turn.finished(stream.completion())


def _say(message: str) -> None:
    """Tell a person at a terminal what takes a while; programs need not know."""
    if sys.stderr.isatty():
        click.echo(message, err=True)
