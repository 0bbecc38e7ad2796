"""The engines of a cluster: who they are, how they are supervised, how they come and go.

Owns the slots, by group. A slot's supervisor is a service of its own (of a group that restarts
together, one for all its slots). Knows nothing of requests.
"""

from __future__ import annotations

import itertools
import logging
import math
from typing import TYPE_CHECKING

import trio
from attrs import define, evolve

from dpkit.errors import (
    NO_BUGS,
    ClusterClosed,
    ConfigError,
    EngineLost,
    InternalError,
    LaunchFailed,
    ScalingFailed,
    WireError,
    describe,
)
from dpkit.logs import about
from dpkit.names import EngineState, Strategy
from dpkit.nursery.build import restarts
from dpkit.nursery.standing import EngineTotals
from dpkit.nursery.supervisor import Observer, supervise

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from dpkit.config.schema import Config, EngineGroupConfig
    from dpkit.nursery.build import Builder
    from dpkit.nursery.membership import Membership
    from dpkit.nursery.services import Services
    from dpkit.nursery.slot import EngineSlot

    OnBug = Callable[[InternalError, str], None]

_log = logging.getLogger(__name__)


@define(eq=False)
class Group:
    """The engines of one ``[[engines]]`` table."""

    config: EngineGroupConfig
    slots: list[EngineSlot]


class _Team(Observer):
    """What the supervisor of some slots tells, passed on to them."""

    def __init__(
        self,
        slots: Sequence[EngineSlot],
        on_bug: OnBug,
        expect: Callable[[str], None],
        is_too_small: Callable[[], bool],
    ) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self._on_bug = on_bug
        self._expect = expect
        self._is_too_small = is_too_small
        self._told: set[str] = set()

    def failed(self, name: str, life: int, error: Exception) -> None:
        what = describe(error)
        # With its traceback once: a restart that fails likewise says nothing new. That of a process
        # that ended elsewhere leads nowhere, and what is no bug needs none.
        elsewhere = isinstance(error, EngineLost | LaunchFailed | WireError)
        is_clear = isinstance(error, NO_BUGS) and not _log.isEnabledFor(logging.DEBUG)
        exc_info = None if what in self._told or elsewhere or is_clear else error
        self._told.add(what)
        model = self.slots[name].model_class
        message = "engine %s (%s) failed in its life %d: %s"
        of = about(engine=name)
        _log.error(message, name, model, life, what, exc_info=exc_info, extra=of)
        if isinstance(error, InternalError):  # nobody's fault but ours: no new life mends that
            self._on_bug(error, f"engine {name}")

    def gave_up(self, name: str, error: Exception) -> None:
        _log.error("engine %s is given up, and down", name, extra=about(engine=name))
        self.slots[name].give_up(error)

    def is_consequence(self, name: str) -> bool:
        return self.slots[name].life.lost_with_its_group

    def goes_on(self, names: Collection[str]) -> bool:
        taking_part = [slot for name, slot in self.slots.items() if name in names]
        for slot in taking_part:
            slot.peers = taking_part
            if slot.gathering is not None:
                slot.gathering.ranks = {each.rank for each in taking_part}
            if slot.state is EngineState.DOWN:
                slot.state = EngineState.STARTING
                self._expect(slot.name)
        return not self._is_too_small()


class Roster:
    """All engines. `min_ready` is the least that a cluster can do with.

    Args:
        config: The cluster's.
        builder: Makes the slots.
        membership: Told which names there are.
        on_bug: Told when an engine ended by a bug of dpkit's, and which engine.
    """

    def __init__(
        self, config: Config, builder: Builder, membership: Membership, on_bug: OnBug
    ) -> None:
        self.groups: dict[str, Group] = {}
        self.min_ready = config.cluster.min_ready
        self.closing = False
        self.supervised: list[EngineSlot] = []
        """Those with a supervisor, oldest first: arriving and leaving ones too."""
        self.departed: dict[int, EngineTotals] = {}
        """What engines did that are gone, by rank."""
        self._builder = builder
        self._membership = membership
        self._on_bug = on_bug
        self._services: Services | None = None
        self._epochs: dict[str, int] = {}  # the first that was never given, by name
        for group in config.engines:
            self.groups[group.name] = Group(group, [])
            self.groups[group.name].slots += self.make(group, range(group.count))

    def use(self, config: Config, builder: Builder) -> None:
        """Go on with the settings of a new config; engines are changed apart from this."""
        self.min_ready = config.cluster.min_ready
        self._builder = builder

    @property
    def slots(self) -> list[EngineSlot]:
        """Every engine, group by group."""
        return [slot for group in self.groups.values() for slot in group.slots]

    @property
    def leaving(self) -> list[EngineSlot]:
        """Those that are no part of the cluster any more, or not yet, and live."""
        staying = set(self.slots)
        return [slot for slot in self.supervised if slot not in staying]

    @property
    def is_too_small(self) -> bool:
        """Whether fewer engines are left than a cluster can do with."""
        return count_alive(self.slots) < self.min_ready

    def make(
        self,
        group: EngineGroupConfig,
        numbers: Iterable[int],
        *,
        builder: Builder | None = None,
        held: bool = False,
        beside: Sequence[EngineSlot] = (),
    ) -> list[EngineSlot]:
        """Make slots of a group at free ranks; nothing lives there before `start`.

        Args:
            group: What they are like.
            numbers: Of the engines within the group.
            builder: Makes them; None: the one of the present config.
            held: Whether they wait for `admit` before serving.
            beside: Others that were made and are not in the roster yet.
        """
        used = {slot.rank for slot in (*self.slots, *self.supervised, *beside)}
        for slot in (*self.slots, *beside):
            self._keep_epoch(slot)
        free = (rank for rank in itertools.count() if rank not in used)
        return [
            (builder or self._builder).slot(
                group,
                number,
                next(free),
                first_epoch=self._epochs.get(f"{group.name}-{number}", 0),
                held=held,
            )
            for number in numbers
        ]

    def start_all(self, services: Services) -> None:
        """Start every engine under its supervisor; called once."""
        self._services = services
        for group in self.groups.values():
            self.start(group.config, group.slots)

    def start(self, group: EngineGroupConfig, slots: Sequence[EngineSlot]) -> None:
        """Start engines, each under a supervisor of its own unless they restart together."""
        assert self._services is not None, "start_all comes first"  # noqa: S101
        if not slots:
            return
        for slot in slots:
            self._membership.expect(slot.name)
        together = group.supervision.strategy is not Strategy.ONE_FOR_ONE
        for team in [slots] if together else [[slot] for slot in slots]:
            for slot in team:
                slot.peers = team
            self.supervised += team
            names = ", ".join(slot.name for slot in team)
            self._services.start_soon(self._supervise, group, team, name=f"engine {names}")

    def fail_if_absent(self) -> bool:
        """Have the cluster fail if too few engines have come; whether it does."""
        absent = [slot for slot in self.slots if slot.is_absent]
        too_few = bool(absent) and count_alive(self.slots) - len(absent) < self.min_ready
        if too_few and self._services is not None:
            error = absent[0].last_error
            assert error is not None  # noqa: S101 - what it is absent for
            self._services.fail(error, f"engine {absent[0].name}")
        return too_few

    async def wait_settled(self, slots: Iterable[EngineSlot]) -> None:
        """Wait until each engine is ready, has been given up, or was waited for long enough."""
        for slot in slots:
            await slot.settled.wait()

    async def scale(self, name: str, count: int, *, deadline: float) -> None:
        """Have `count` engines in a group; see `Cluster.scale`."""
        group = self._scalable(name)
        config = _resized(group.config, count)  # what cannot be is refused before it is begun
        self._refuse_few(name, count)
        missing = range(len(group.slots), count)
        if missing:
            slots = self.make(group.config, missing)
            await self.bring_up([(group.config, slots)])
            group.config, group.slots = config, [*group.slots, *slots]
        else:
            leaving = group.slots[count:]
            group.config, group.slots = config, group.slots[:count]
            await self.take_down(leaving, deadline)

    async def bring_up(
        self, arriving: Sequence[tuple[EngineGroupConfig, Sequence[EngineSlot]]]
    ) -> None:
        """Start new engines and wait for them; if one fails, or this is cancelled, all end.

        Raises:
            ScalingFailed: one did not come up.
            ClusterClosed: the cluster ends.
        """
        slots = [slot for _, team in arriving for slot in team]
        self.refuse_closed()
        for config, team in arriving:
            self.start(config, team)
        try:
            await self.wait_settled(slots)
            self.refuse_closed()
            _refuse_failures(slots)
        except BaseException:
            self.dismiss(slots)
            raise

    def refuse_closed(self) -> None:
        """Raise `ClusterClosed` once the cluster ends: engines can neither come nor go."""
        if self.closing:
            raise ClusterClosed("the cluster is closed: its engines cannot be changed any more")

    def dismiss(self, slots: Sequence[EngineSlot]) -> None:
        """Send engines away without waiting; what they have they finish."""
        self._retire(slots)
        self._forget_names(slots)

    async def take_down(self, slots: Sequence[EngineSlot], deadline: float) -> None:
        """Let engines finish what they have; at the deadline, what is left goes elsewhere."""
        self._retire(slots)
        try:
            for slot in reversed(slots):
                await slot.wait_retired(deadline)
        finally:
            self._forget_names(slots)

    def _retire(self, slots: Sequence[EngineSlot]) -> None:
        for slot in slots:
            slot.retire()
            self._keep_epoch(slot)

    def _forget_names(self, slots: Sequence[EngineSlot]) -> None:
        for name in {slot.name for slot in slots} - {slot.name for slot in self.slots}:
            self._membership.dismiss(name)
        for slot in slots:
            self._count(slot)

    def _count(self, slot: EngineSlot) -> None:
        """Keep what an engine did, once nobody else does."""
        if not slot.is_counted and slot not in self.slots and slot not in self.supervised:
            slot.is_counted = True
            before = self.departed.get(slot.rank, EngineTotals())
            self.departed[slot.rank] = before.plus(slot.totals())

    def _keep_epoch(self, slot: EngineSlot) -> None:
        """A name may come back, an incarnation never does."""
        self._epochs[slot.name] = max(self._epochs.get(slot.name, 0), slot.engine.epoch + 1)

    def _scalable(self, name: str) -> Group:
        group = self.groups.get(name) if isinstance(name, str) else None
        if group is None:
            raise ConfigError([f"cannot scale {name!r}: the groups are {', '.join(self.groups)}"])
        if group.config.supervision.strategy is not Strategy.ONE_FOR_ONE:
            raise ConfigError([f"cannot scale {name}: its engines depend on one another"])
        return group

    def _refuse_few(self, name: str, count: int) -> None:
        """Refuse what leaves too few engines; those that are down are none."""
        group = self.groups[name]
        others = [slot for each in self.groups.values() if each is not group for slot in each.slots]
        left = count_alive([*others, *group.slots[:count]]) + max(0, count - len(group.slots))
        refuse_few(left, self.min_ready, f"cannot scale {name} to {count}")

    async def _supervise(self, group: EngineGroupConfig, team: Sequence[EngineSlot]) -> None:
        try:
            async with trio.open_nursery() as nursery:
                if (gathering := team[0].gathering) is not None:
                    nursery.start_soon(gathering.run, name=f"gathering of {group.name}")
                await supervise(
                    {slot.name: slot.live for slot in team},
                    restarts(group),
                    rng=self._builder.rng(f"restarts of {team[0].engine}"),
                    observer=_Team(
                        team,
                        self._on_bug,
                        self._membership.expect,
                        lambda: self.is_too_small and not self.closing,
                    ),
                )
                nursery.cancel_scope.cancel()
        finally:
            for slot in team:
                slot.end()
                self.supervised.remove(slot)
                self._count(slot)
        error = next((slot.last_error for slot in team if slot.last_error is not None), None)
        if not self.closing and self.is_too_small and error is not None:
            raise error


def count_alive(slots: Collection[EngineSlot]) -> int:
    """How many engines serve, or will again."""
    return sum(slot.state is not EngineState.DOWN for slot in slots)


def refuse_few(left: int, min_ready: int, doing: str) -> None:
    """Refuse a change that leaves fewer engines than a cluster can do with."""
    if left < min_ready:
        few = f"{left} engines that are not down would be left"
        raise ConfigError([f"{doing}: {few}, and cluster.min_ready is {min_ready}"])


def refuse_no_time(deadline: object) -> None:
    """Refuse a deadline that is none, before engines leave by it."""
    if not isinstance(deadline, float | int) or math.isnan(deadline):
        raise ConfigError([f"deadline must be a time on Trio's clock, not {deadline!r}"])


def _resized(config: EngineGroupConfig, count: int) -> EngineGroupConfig:
    doing = f"cannot scale {config.name} to {count!r}"
    if type(count) is not int:  # True would be 1
        raise ConfigError([f"{doing}: it must be a whole number"])
    try:
        return evolve(config, count=count)
    except ConfigError as error:
        raise ConfigError([f"{doing}: {error}"]) from error


def _refuse_failures(slots: Sequence[EngineSlot]) -> None:
    for slot in slots:
        if slot.state is EngineState.DOWN or slot.is_absent:
            raise ScalingFailed(
                f"engine {slot.name} did not come up: {slot.statistics().last_error}; "
                "the new engines are gone again, the others serve on"
            ) from slot.last_error
