"""`dpkit engine`: one engine of a config behind vLLM's wire, for whoever owns the handshake.

Which engine it is, and what a signal means, is decided here; the rest is `dpkit.link.engine`.
"""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from typing import TYPE_CHECKING

import click
import trio
from attrs import frozen

from dpkit.cli.logs import log_format as log_format_option
from dpkit.cli.logs import set_up
from dpkit.cli.stops import catch_stops, watch_input
from dpkit.cli.words import describe
from dpkit.config.checks import BadValue
from dpkit.config.load import load_config
from dpkit.config.rules import has_weights
from dpkit.config.units import parse_duration
from dpkit.engine.models import load_model
from dpkit.errors import DpkitError, LaunchFailed
from dpkit.link.engine import Loaded, Place, serve_engine
from dpkit.link.group import LockstepPlan
from dpkit.link.redial import serve_again
from dpkit.logs import ENGINE
from dpkit.messages import EngineId
from dpkit.names import EngineKind
from dpkit.nursery.limits import limits_of
from dpkit.nursery.services import open_services
from dpkit.wire.address import AddressFailed

if TYPE_CHECKING:
    from dpkit.config.schema import Config, EngineGroupConfig

_FAILED, _NOT_STARTED = 1, 3

_log = logging.getLogger(__name__)


@click.command("engine")
@click.option("--config", "file", default="dpkit.toml", show_default=True, type=click.Path())
@click.option("--rank", type=click.IntRange(0, 65_535), required=True, help="Which engine to be.")
@click.option("--handshake", required=True, metavar="ADDR", help="Where to say HELLO.")
@click.option("--local", is_flag=True, help="Say that the handshake's owner started this engine.")
@click.option("--lifeline", is_flag=True, help="End when standard input does.")
@click.option("--redial", metavar="TIME", help="Say HELLO again when all frontends have gone.")
@click.option("--rendezvous", metavar="HOST:PORT", help="Where ranks that step together meet.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@log_format_option
def command(  # noqa: PLR0917 - click passes by keyword
    file: str,
    rank: int,
    handshake: str,
    local: bool,
    lifeline: bool,
    redial: str | None,
    rendezvous: str | None,
    overrides: tuple[str, ...],
    log_format: str | None,
) -> int:
    """Be one engine of a config, for frontends that speak vLLM's engine-core wire.

    Ranks count the engines of all groups of the config, from 0 on; of a group whose engines join,
    each says its number in that group. Whoever owns the handshake at
    ADDR (tcp://HOST:PORT or ipc://PATH) tells where the frontends are.

    On SIGTERM requests end as aborted, and the exit code is 0. A second signal ends the process at
    once. With --lifeline the end of standard input is as good as SIGTERM: give it a pipe whose
    other end you hold, and the engine does not outlive you.

    With --redial 10s, an engine whose frontends have all been gone for so long begins anew: it says
    HELLO at ADDR until somebody answers, its model still loaded. Without, it waits for them to come
    back to where they were.

    With coordinator.wave_coordination the engine steps together with all others of the config. The
    owner of the handshake tells them where to meet; if it does not, --rendezvous must: an address
    of the host of rank 0, with a port that is free there.
    """
    config = load_config(file, overrides=overrides)
    set_up(config.log.level, log_format or config.log.format)
    engine = _Engine.find(config, rank)
    ENGINE.set(engine.name)
    place = Place(
        engine=EngineId(engine.name),
        rank=engine.rank,
        count=engine.count,
        handshake=handshake,
        local=local,
        publish_delta=(config.coordinator.kv_publish_delta if config.coordinator.publish else None),
        max_message_bytes=engine.group.process.max_message,
        lockstep=_plan(config, engine.group, rendezvous),
        lease=_lease(redial),
    )
    try:
        return trio.run(_serve, place, engine, lifeline)
    except (LaunchFailed, AddressFailed) as error:
        click.echo(f"error: {error}", err=True)
        return _NOT_STARTED
    except DpkitError:
        raise
    except Exception as error:  # noqa: BLE001 - a model's own, whatever it is
        _log.exception("engine %s failed", engine.name)
        click.echo(f"error: engine {engine.name} failed: {describe(error)}", err=True)
        return _FAILED


def _lease(redial: str | None) -> float | None:
    try:
        return None if redial is None else parse_duration(redial)
    except BadValue as error:
        raise click.UsageError(f"--redial: {error.problem}") from error


def _plan(config: Config, group: EngineGroupConfig, rendezvous: str | None) -> LockstepPlan | None:
    coordinator = config.coordinator
    if not coordinator.wave_coordination:
        return None
    return LockstepPlan(
        sync_interval=coordinator.sync_interval,
        vote_timeout=coordinator.vote_timeout,
        start_timeout=group.process.start_timeout,
        rendezvous=rendezvous,
    )


@frozen(kw_only=True)
class _Engine:
    """One engine of a config."""

    group: EngineGroupConfig
    name: str
    rank: int
    """By which it is known on the wire: of a group that joins, its number in that group."""
    count: int
    """Engines of the whole config, which share the cores of this machine."""

    @classmethod
    def find(cls, config: Config, rank: int) -> _Engine:
        engines = [(group, number) for group in config.engines for number in range(group.count)]
        if rank >= len(engines):
            raise click.UsageError(
                f"there is no rank {rank}: the config has ranks 0 to {len(engines) - 1}"
            )
        group, number = engines[rank]
        return cls(
            group=group,
            name=f"{group.name}-{number}",
            rank=number if group.kind is EngineKind.VLLM else rank,
            count=len(engines),
        )

    def load(self) -> Loaded:
        """Load the model; takes as long as that takes."""
        group = self.group
        model = load_model(group.model, dtype=group.dtype, quant=group.quant, device=group.device)
        model.threads_per_engine = max(1, len(os.sched_getaffinity(0)) // self.count)
        limits = limits_of(group, model.spec)
        return Loaded(model=model, limits=limits, dtype=_dtype(group))


def _dtype(group: EngineGroupConfig) -> str:
    """What a frontend is told that the model computes in."""
    if not has_weights(group.model):
        return "float32"
    from dpkit.engine.models.torch.precision import resolve_dtype  # noqa: PLC0415 - costs numpy

    return resolve_dtype(group.dtype, group.quant, group.device).value


async def _serve(place: Place, engine: _Engine, lifeline: bool) -> int:
    stop = trio.Event()
    with catch_stops(stop) as stops:
        async with open_services(grace=0) as services:
            if lifeline:
                services.start_soon(watch_input, stop, name="lifeline")
            _log.info("engine %s says HELLO at %s, and waits", engine.name, place.handshake)
            serve = serve_engine if place.lease is None else serve_again
            await serve(place, partial(trio.to_thread.run_sync, engine.load), stop)
    return 128 + signal.SIGINT if signal.SIGINT in stops else 0
