"""What goes wrong in a run: who dies for a while, engines that are slow, readers that leave.

A plan is text, so that it can be repeated. Troubles are put in through the engines' models, and the
coordinator's are deaths of its task; the cluster under test deals with them as with real ones.
"""

from __future__ import annotations

import itertools
import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio
from attrs import evolve, frozen

from dpkit.abc import Model
from dpkit.engine.models import load_model
from dpkit.errors import ConfigError
from dpkit.simulate.settings import costs_of
from dpkit.testing.faults import CRASH, Fault, FaultKind, FaultyModel, kill_coordinator
from dpkit.testing.wrapper import ModelOfEach, named

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from dpkit.config.groups import EngineGroupConfig, SupervisionConfig
    from dpkit.config.schema import Config
    from dpkit.engine.limits import EngineLimits
    from dpkit.nursery.cluster import Cluster

FORMS = (
    "kill:ENGINE@FROM-TO, kill:coordinator@FROM-TO, slow:ENGINE*FACTOR, "
    "slow:ENGINE,ENGINE*FACTOR@FROM-TO, abort:SHARE"
)
"""What a plan is made of; moments are shares of the trace ("35%") or seconds ("90s")."""

AGAIN_S = 0.1
"""How long a coordinator may live that is to be dead."""

_NUMBER = r"\d+(?:\.\d+)?"
_MOMENT = rf"{_NUMBER}(?:%|s)"
_TROUBLE = re.compile(
    rf"(?P<kind>kill|slow):(?P<engines>\d+(?:,\d+)*)(?:\*(?P<factor>{_NUMBER}))?"
    rf"(?:@(?P<start>{_MOMENT})-(?P<end>{_MOMENT}))?"
)
_OUTAGE = re.compile(rf"kill:coordinator@(?P<start>{_MOMENT})-(?P<end>{_MOMENT})")
_ABORT = re.compile(rf"abort:(?P<share>{_NUMBER})%")


@frozen(kw_only=True)
class Trouble:
    """One thing that befalls one engine, from one moment of the trace to another."""

    rank: int
    start_s: float = 0.0
    end_s: float = math.inf
    factor: float | None = None
    """How many times longer its steps take; None: it dies, and is back at the end."""


@frozen(kw_only=True)
class Outage:
    """The coordinator dies, and each life that follows before the end."""

    start_s: float
    end_s: float


@frozen(kw_only=True)
class FaultPlan:
    """All that goes wrong in a run."""

    troubles: tuple[Trouble, ...] = ()
    outages: tuple[Outage, ...] = ()
    abort_share: float = 0.0
    """Share of the requests whose readers leave in the midst of the answer."""


def parse_faults(texts: Iterable[str], *, span_s: float, engines: int) -> FaultPlan:
    """Read what ``--fault`` gives; several may be in one text, with ``;`` between.

    Args:
        texts: See `FORMS`.
        span_s: Seconds of the trace, as it is replayed.
        engines: How many there are.

    Raises:
        ConfigError: a text is no such plan, or names an engine that does not exist.
    """
    troubles: list[Trouble] = []
    outages: list[Outage] = []
    abort_share = 0.0
    for text in (part.strip() for each in texts for part in each.split(";")):
        if match := _ABORT.fullmatch(text):
            abort_share = min(1.0, float(match["share"]) / 100)
        elif match := _OUTAGE.fullmatch(text):
            start_s, end_s = _span(text, match, span_s)
            outages.append(Outage(start_s=start_s, end_s=end_s))
        elif (match := _TROUBLE.fullmatch(text)) and _is_whole(match):
            troubles += _troubles(text, match, span_s, engines)
        else:
            raise ConfigError([f"--fault {text!r}: no such fault; it may be {FORMS}"])
    _check_deaths(troubles)
    return FaultPlan(troubles=tuple(troubles), outages=tuple(outages), abort_share=abort_share)


def _check_deaths(troubles: Iterable[Trouble]) -> None:
    """An engine's wait before it is restarted is one setting: it is dead as long each time."""
    deaths: dict[int, float] = {}
    for trouble in troubles:
        if trouble.factor is None:
            lasts = trouble.end_s - trouble.start_s
            if not math.isclose(deaths.setdefault(trouble.rank, lasts), lasts):
                problem = (
                    f"--fault: engine {trouble.rank} is killed for {deaths[trouble.rank]:g} s and "
                    f"for {lasts:g} s; let it be dead as long each time"
                )
                raise ConfigError([problem])


def _is_whole(match: re.Match[str]) -> bool:
    """A death has an end and no factor, and slowness a factor."""
    if match["kind"] == "kill":
        return match["start"] is not None and match["factor"] is None
    return match["factor"] is not None and float(match["factor"]) > 0


def _troubles(text: str, match: re.Match[str], span_s: float, engines: int) -> Iterator[Trouble]:
    start_s, end_s = _span(text, match, span_s)
    for rank in map(int, match["engines"].split(",")):
        if rank >= engines:
            problem = f"--fault {text!r}: there is no engine {rank}; they are 0 to {engines - 1}"
            raise ConfigError([problem])
        factor = float(match["factor"]) if match["kind"] == "slow" else None
        yield Trouble(rank=rank, start_s=start_s, end_s=end_s, factor=factor)


def _span(text: str, match: re.Match[str], span_s: float) -> tuple[float, float]:
    """From when to when."""
    start_s = _moment(match["start"], span_s) if match["start"] else 0.0
    end_s = _moment(match["end"], span_s) if match["end"] else math.inf
    if not span_s and "%" in text:
        problem = f"--fault {text!r}: this trace has no length to take a share of; say seconds"
        raise ConfigError([problem])
    if end_s <= start_s:
        raise ConfigError([f"--fault {text!r}: it ends before it begins; swap the two moments"])
    return start_s, end_s


def _moment(text: str, span_s: float) -> float:
    number = float(text[:-1])
    return span_s * number / 100 if text.endswith("%") else number


@contextmanager
def prepared(config: Config, plan: FaultPlan) -> Iterator[tuple[Config, dict[int, FaultyModel]]]:
    """Give each engine that trouble is in store for a model of its own, while the block lasts.

    Returns the config with those engines in groups of their own, and their models by rank. A model
    is told of its engine nothing but the size of its cache, so theirs are a few blocks larger.
    """
    troubled = {trouble.rank for trouble in plan.troubles}
    if not troubled:
        yield config, {}
        return
    first = config.engines[0].model
    alike = [group for group in config.engines if group.model == first]
    by_size = _BySize(load_model(first), {costs_of(group)[1].num_blocks for group in alike})
    models: dict[int, FaultyModel] = {}
    groups: list[EngineGroupConfig] = []
    rank = 0
    with named(ModelOfEach(by_size)) as name:
        for group in config.engines:
            limits, plain = costs_of(group)[1], load_model(group.model)
            for start, end in _pieces(rank, rank + group.count, troubled):
                piece = evolve(group, name=f"{group.name}-{start}", count=end - start, model=name)
                blocks = limits.num_blocks
                if start in troubled:
                    models[start] = FaultyModel(plain)
                    piece = evolve(piece, supervision=_supervision(group, start, plan))
                    blocks += 1 + start
                if start in troubled or group.model != first:
                    blocks = by_size.add(models.get(start, plain), blocks)
                    piece = _within(piece, evolve(limits, num_blocks=blocks))
                groups.append(piece)
            rank += group.count
        yield evolve(config, engines=tuple(groups)), models


class _BySize(dict[int, Model]):
    """Models by the size of the cache; of all other sizes one and the same.

    Args:
        rest: That one.
        sizes: Of caches that it has.
    """

    def __init__(self, rest: Model, sizes: Collection[int]) -> None:
        super().__init__({0: rest})
        self._sizes = sizes

    def __missing__(self, size: int) -> Model:
        return self[0]

    def add(self, model: Model, least: int) -> int:
        """Give a model a size that no other has, and return it."""
        for size in itertools.count(least):
            if size not in self._sizes and self.setdefault(size, model) is model:
                break
        return size


def _within(group: EngineGroupConfig, limits: EngineLimits) -> EngineGroupConfig:
    """With limits that are no model's, since all models go by the name of the first one's."""
    tokens = limits.max_num_batched_tokens
    return evolve(
        group,
        kv=evolve(group.kv, num_blocks=limits.num_blocks, memory=None),
        scheduler=evolve(
            group.scheduler, max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=tokens
        ),
    )


def _pieces(start: int, end: int, troubled: Collection[int]) -> Iterator[tuple[int, int]]:
    """Ranks of a group, the troubled ones each alone."""
    first = start
    for rank in range(start, end):
        if rank in troubled:
            if first < rank:
                yield first, rank
            yield rank, rank + 1
            first = rank + 1
    if first < end:
        yield first, end


def _supervision(group: EngineGroupConfig, rank: int, plan: FaultPlan) -> SupervisionConfig:
    """Let the wait before the restart be the time for which an engine is dead."""
    outages = [
        trouble.end_s - trouble.start_s
        for trouble in plan.troubles
        if trouble.rank == rank and trouble.factor is None
    ]
    if not outages:
        return group.supervision
    wait = outages[0]
    return evolve(group.supervision, intensity=1000, backoff=wait, backoff_max=wait, jitter=0.0)


def strike(trouble: Trouble, model: FaultyModel) -> None:
    """Let one thing go wrong with the engine that has this model, from its next step on."""
    if trouble.factor is None:
        model.inject(CRASH)
    else:
        model.always = Fault(FaultKind.SLOW, trouble.factor)


async def befall(trouble: Trouble, model: FaultyModel, began: float) -> None:
    """Strike at the moment, and mend what was slowed at the other.

    Args:
        trouble: Which.
        model: Of the engine that it befalls.
        began: When the run began, on Trio's clock.
    """
    await trio.sleep_until(began + trouble.start_s)
    strike(trouble, model)
    if trouble.factor is not None and trouble.end_s < math.inf:
        await trio.sleep_until(began + trouble.end_s)
        model.always = None


async def keep_dead(cluster: Cluster, outage: Outage, began: float) -> None:
    """Kill the coordinator again and again, for as long as it is to be away; `began` as above."""
    await trio.sleep_until(began + outage.start_s)
    while trio.current_time() < began + outage.end_s:
        kill_coordinator(cluster)
        await trio.sleep(AGAIN_S)
