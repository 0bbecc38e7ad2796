"""An engine's process: what its zygote prepares, and what the process then does.

The same code as `dpkit engine` runs, with a lifeline: no head, no engine. All that it needs is
imported in the zygote, once for all engines; nothing of Trio or ZeroMQ is started there, since
neither survives a fork.
"""

from __future__ import annotations

import logging
import signal
import sys
from typing import TYPE_CHECKING, Any

import trio

from dpkit.engine.limits import EngineLimits
from dpkit.engine.models import load_model
from dpkit.errors import NO_BUGS, EngineLost, describe
from dpkit.launch.lifeline import watch_lifeline
from dpkit.launch.records import RecordFormatter
from dpkit.link.engine import Loaded, Place, serve_engine
from dpkit.link.group import LOST_WITH_ITS_GROUP, LockstepPlan, import_ballots
from dpkit.messages import EngineId
from dpkit.names import Dtype, Quant

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dpkit.abc import Model

_log = logging.getLogger(__name__)


def prepare(
    model: str, dtype: str, quant: str, device: str = "cpu", lockstep: bool = False
) -> Model:
    """Load the model that the engines of this zygote share.

    Args:
        model: Its name.
        dtype: As a config has it.
        quant: Likewise.
        device: Likewise.
        lockstep: Whether the engines step together: what they vote by is imported here, once.

    Raises:
        ModelNotFound, ModelUnsupported: it cannot be had. LaunchFailed: torch is missing.
    """
    if lockstep:
        import_ballots()
    return load_model(model, dtype=Dtype(dtype), quant=Quant(quant), device=device)


def work(
    model: Model,
    *,
    handshake: str,
    rank: int,
    name: str,
    limits: Mapping[str, Any],
    threads: int,
    kv_publish_delta: float,
    max_message: int,
    log_level: int,
    count: int = 1,
    lockstep: Mapping[str, Any] | None = None,
) -> None:
    """Be one life of one engine, until SIGTERM, the end of the head, or an error, which comes out.

    The loss of its group is an exit status of its own.

    Args:
        model: From `prepare`.
        handshake: Address of the head's.
        rank: Of the engine.
        name: Of its incarnation, as `EngineId` is written.
        limits: Fields of `EngineLimits`.
        threads: That a step may use.
        kv_publish_delta: Change of KV usage that is worth a message.
        max_message: Bytes of the largest frame that is read.
        log_level: Of what dpkit says, on standard error.
        count: Engines that serve together.
        lockstep: Fields of `LockstepPlan`, for an engine that steps together with those.
    """
    _log_to_the_head(log_level)
    model.threads_per_engine = threads
    plain, _, epoch = name.partition("#")
    place = Place(
        engine=EngineId(plain, int(epoch or 0)),
        rank=rank,
        count=count,
        handshake=handshake,
        local=True,
        publish_delta=kv_publish_delta,
        max_message_bytes=max_message,
        lockstep=None if lockstep is None else LockstepPlan(**lockstep),
    )
    loaded = Loaded(model=model, limits=EngineLimits(**limits), dtype="float32")
    # Once `_serve` is over, it must be its end that the head hears of, not the head's own order.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        trio.run(_serve, place, loaded)
    except EngineLost as error:  # by no fault of its own: there is nothing to trace
        print(error, file=sys.stderr)  # noqa: T201 - its last words, which the head hears
        raise SystemExit(LOST_WITH_ITS_GROUP) from None
    except NO_BUGS as error:
        _log.debug("engine %s failed", name, exc_info=True)
        print(describe(error), file=sys.stderr)  # noqa: T201 - likewise
        raise SystemExit(1) from None
    except Exception:  # noqa: BLE001 - a model's own, whatever it is: told in one record
        _log.exception("engine %s failed", name)
        raise SystemExit(1) from None


def _log_to_the_head(level: int) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(RecordFormatter())
    logging.getLogger().addHandler(handler)
    logging.getLogger("dpkit").setLevel(level)


async def _serve(place: Place, loaded: Loaded) -> None:
    stop, failure = trio.Event(), None

    async def load() -> Loaded:
        return loaded

    async def obey() -> None:
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                stop.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_lifeline)
        nursery.start_soon(obey)
        try:
            await serve_engine(place, load, stop)
        except Exception as error:  # noqa: BLE001 - raised below: the nursery would wrap it
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
