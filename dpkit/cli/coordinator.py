"""`dpkit coordinator`: the coordinator alone, for engines and frontends that speak vLLM's wire.

What a signal means is decided here; the rest is `dpkit.link.coordinator`.
"""

from __future__ import annotations

import json
import signal
from functools import partial
from typing import TYPE_CHECKING

import attrs
import click
import trio

from dpkit.balancer.coordinator import CoordinatorRules
from dpkit.cli.logs import log_format as log_format_option
from dpkit.cli.logs import set_up
from dpkit.cli.stops import catch_stops, watch_input
from dpkit.config.checks import BadValue
from dpkit.config.units import parse_duration
from dpkit.link.coordinator import open_coordinator
from dpkit.nursery.services import open_services
from dpkit.wire.address import AddressFailed
from dpkit.wire.codec import MAX_ENGINES
from dpkit.wire.coordinator import LOOPBACK
from dpkit.wire.zsocket import open_context

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeRules = Callable[..., CoordinatorRules]

_NOT_STARTED = 3
_SHORTEST_S, _LONGEST_S = 0.001, 60.0  # as of `coordinator.interval`


def _interval(_: click.Context, __: click.Parameter, value: str) -> float:
    try:
        seconds = parse_duration(value)
    except BadValue as error:
        raise click.BadParameter(error.problem) from None
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise click.BadParameter(f"{value} is not between 1ms and 60s")
    return seconds


@click.command("coordinator")
@click.option("--engines", type=click.IntRange(1, MAX_ENGINES), required=True, help="How many.")
@click.option(
    "--bind", default=LOOPBACK, show_default=True, metavar="ADDR", help="Where to listen."
)
@click.option(
    "--interval", default="100ms", show_default=True, callback=_interval, help="Between news."
)
@click.option("--waves", is_flag=True, help="The engines step together.")
@click.option("--lifeline", is_flag=True, help="End when standard input does.")
@click.option("--log-level", default="warning", type=click.Choice(("debug", "info", "warning")))
@log_format_option
def command(  # noqa: PLR0917 - click passes by keyword
    engines: int,
    bind: str,
    interval: float,
    waves: bool,
    lifeline: bool,
    log_level: str,
    log_format: str | None,
) -> int:
    """Gather what engines say of their load, and publish it to frontends.

    Its three addresses are one line of JSON on standard output, as soon as it listens:
    back_publish and back_output are for engines (coordinator_input and coordinator_output of an
    INIT), front is for frontends. ADDR is tcp://HOST:* for three ports that are free,
    tcp://HOST:PORT for that port and the next two, or ipc://DIRECTORY.

    SIGTERM ends it, with exit code 0.
    """
    set_up(log_level, log_format or "text")
    rules = partial(CoordinatorRules, engines, interval=interval, wave_coordination=waves)
    try:
        return trio.run(_serve, rules, bind, lifeline)
    except AddressFailed as error:
        click.echo(f"error: {error}", err=True)
        return _NOT_STARTED


async def _serve(rules: MakeRules, bind: str, lifeline: bool) -> int:
    stop = trio.Event()
    with catch_stops(stop) as stops:
        async with (
            open_context() as context,
            open_coordinator(context, rules(now=trio.current_time()), bind=bind) as coordinator,
            open_services(grace=0) as services,
        ):
            if lifeline:
                services.start_soon(watch_input, stop, name="lifeline")
            services.start_soon(coordinator.run, name="coordinator")
            click.echo(json.dumps(attrs.asdict(coordinator.addresses)))
            await stop.wait()
    return 128 + signal.SIGINT if signal.SIGINT in stops else 0
