"""One run from beginning to end: load on a target, and a report of it. Stops when it is told to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from dpkit.bench.load import Generator
from dpkit.bench.report import Report, notes_of, settings_of
from dpkit.bench.summary import summarise

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dpkit.bench.plan import Load
    from dpkit.bench.slo import Slo
    from dpkit.bench.target import Target


async def run_bench(
    target: Target,
    load: Load,
    *,
    slo: Slo | None = None,
    prefix: int = 0,
    stop: trio.Event | None = None,
    watch: Callable[[Generator], Awaitable[None]] | None = None,
) -> Report:
    """Put a load on a target and report.

    Args:
        target: Answers.
        load: What is sent.
        slo: For the goodput.
        prefix: Tokens with which all prompts begin.
        stop: When it is set, what is under way is given up, and the report is of what there is.
        watch: Runs beside the load, to show how far it is; cancelled at its end.
    """
    generator = Generator(target, load, target.prompts(seed=load.seed, prefix=prefix))
    async with trio.open_nursery() as nursery:
        if stop is not None:
            nursery.start_soon(_cancel_at, stop, nursery.cancel_scope)
        if watch is not None:
            nursery.start_soon(watch, generator)
        await generator.run()
        nursery.cancel_scope.cancel()
    summary = summarise(generator.records, lags=generator.lags, slo=slo)
    return Report(
        target=target.name,
        model=target.model,
        settings=settings_of(load),
        notes=notes_of(summary, is_exact=target.is_exact),
        was_stopped=stop is not None and stop.is_set(),
        origin=generator.origin,
        records=generator.records,
        summary=summary,
    )


async def _cancel_at(stop: trio.Event, scope: trio.CancelScope) -> None:
    await stop.wait()
    scope.cancel()
