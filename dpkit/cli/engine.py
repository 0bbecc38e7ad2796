"""`dpkit engine`: one engine of a config behind vLLM's wire, for whoever owns the handshake.

Which engine it is, and what a signal means, is decided here; the rest is `dpkit.link.engine`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import click
import trio
from attrs import frozen

from dpkit.cli.logs import set_up
from dpkit.cli.words import describe
from dpkit.config.load import load_config
from dpkit.config.rules import has_weights
from dpkit.engine.models import load_model
from dpkit.errors import DpkitError, LaunchFailed
from dpkit.link.engine import Loaded, Place, serve_engine
from dpkit.messages import EngineId
from dpkit.nursery.limits import limits_of
from dpkit.nursery.services import open_services
from dpkit.wire.address import AddressFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from dpkit.config.schema import Config, EngineGroupConfig

_FAILED, _NOT_STARTED = 1, 3

_log = logging.getLogger(__name__)


@click.command("engine")
@click.option("--config", "file", default="dpkit.toml", show_default=True, type=click.Path())
@click.option("--rank", type=click.IntRange(0, 65_535), required=True, help="Which engine to be.")
@click.option("--handshake", required=True, metavar="ADDR", help="Where to say HELLO.")
@click.option("--local", is_flag=True, help="Say that the handshake's owner started this engine.")
@click.option("--lifeline", is_flag=True, help="End when standard input does.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
def command(  # noqa: PLR0917 - click passes by keyword
    file: str, rank: int, handshake: str, local: bool, lifeline: bool, overrides: tuple[str, ...]
) -> int:
    """Be one engine of a config, for frontends that speak vLLM's engine-core wire.

    Ranks count the engines of all groups of the config, from 0 on. Whoever owns the handshake at
    ADDR (tcp://HOST:PORT or ipc://PATH) tells where the frontends are.

    On SIGTERM requests end as aborted, and the exit code is 0. A second signal ends the process at
    once. With --lifeline the end of standard input is as good as SIGTERM: give it a pipe whose
    other end you hold, and the engine does not outlive you.
    """
    config = load_config(file, overrides=overrides)
    set_up(config.log.level)
    engine = _Engine.find(config, rank)
    place = Place(
        engine=EngineId(engine.name),
        rank=rank,
        count=engine.count,
        handshake=handshake,
        local=local,
        publish_delta=(config.coordinator.kv_publish_delta if config.coordinator.publish else None),
        max_message_bytes=engine.group.process.max_message,
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


@frozen(kw_only=True)
class _Engine:
    """One engine of a config."""

    group: EngineGroupConfig
    name: str
    count: int
    """Engines of the whole config, which share the cores of this machine."""

    @classmethod
    def find(cls, config: Config, rank: int) -> _Engine:
        names = [
            (group, f"{group.name}-{i}") for group in config.engines for i in range(group.count)
        ]
        if rank >= len(names):
            raise click.UsageError(
                f"there is no rank {rank}: the config has ranks 0 to {len(names) - 1}"
            )
        group, name = names[rank]
        return cls(group=group, name=name, count=len(names))

    def load(self) -> Loaded:
        """Load the model; takes as long as that takes."""
        group = self.group
        model = load_model(group.model, dtype=group.dtype, quant=group.quant)
        model.threads_per_engine = max(1, len(os.sched_getaffinity(0)) // self.count)
        limits = limits_of(group, model.spec)
        return Loaded(model=model, limits=limits, dtype=_dtype(group))


def _dtype(group: EngineGroupConfig) -> str:
    """What a frontend is told that the model computes in."""
    if not has_weights(group.model):
        return "float32"
    from dpkit.engine.models.torch.precision import resolve_dtype  # noqa: PLC0415 - costs numpy

    return resolve_dtype(group.dtype, group.quant).value


async def _serve(place: Place, engine: _Engine, lifeline: bool) -> int:
    stop = trio.Event()
    with _signals(stop) as stops:
        async with open_services(grace=0) as services:
            if lifeline:
                services.start_soon(_watch_input, stop, name="lifeline")
            _log.info("engine %s says HELLO at %s, and waits", engine.name, place.handshake)
            await serve_engine(place, partial(trio.to_thread.run_sync, engine.load), stop)
    return 128 + signal.SIGINT if signal.SIGINT in stops else 0


async def _watch_input(stop: trio.Event) -> None:
    """Set `stop` at the end of standard input; what is written there is not read for anything."""
    descriptor, read = sys.stdin.fileno(), True
    while read:
        await trio.lowlevel.wait_readable(descriptor)
        read = bool(os.read(descriptor, 4096))
    stop.set()


@contextmanager
def _signals(stop: trio.Event) -> Iterator[list[int]]:
    """Have the first SIGTERM or Ctrl-C set `stop`, and the second end the process.

    Plain handlers, not Trio's: they work also while a step hangs on Trio's thread.
    """
    token, stops = trio.lowlevel.current_trio_token(), list[int]()

    def handle(signum: int, _frame: FrameType | None) -> None:
        stops.append(signum)
        if len(stops) > 1:
            os._exit(128 + signum)
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(stop.set)

    handlers = {signum: signal.signal(signum, handle) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stops
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
