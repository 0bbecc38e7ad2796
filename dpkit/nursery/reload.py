"""A new config for a running cluster: what it would change, and the change as a whole.

New engines come up first, beside the old ones and out of sight; then everything switches in one
synchronous step; then the old engines finish what they have. If a new engine does not come up,
nothing has changed.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from attrs import asdict, define, evolve, field, frozen

from dpkit.config.load import load_config
from dpkit.config.schema import Config
from dpkit.errors import ConfigError, plural
from dpkit.names import EngineKind, Strategy
from dpkit.nursery.roster import Group, count_alive, refuse_few
from dpkit.sampling import shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from dpkit.config.schema import EngineGroupConfig
    from dpkit.nursery.build import Builder
    from dpkit.nursery.roster import Roster
    from dpkit.nursery.slot import EngineSlot

# What a running cluster cannot change: it has been made of it, or who needs it has read it.
_FIXED = (
    "cluster.name",  # in the ids of requests
    "cluster.seed",
    "cluster.grace",  # and its parts: of the services, and of `dpkit run`
    "cluster.kill_after",
    "cluster.pre_stop",
    "coordinator.wave_coordination",
    "coordinator.sync_interval",  # all ranks of a group must have the same
    "coordinator.vote_timeout",
    "coordinator.publish",
    "coordinator.kv_publish_delta",  # in the engines that stay
    "log.events",  # its writer is there, or is not
    "log.steps",  # likewise, and engines know who listens
)


def as_config(config: Config | str | Path) -> Config:
    """A loaded config as it is, a path as what its file says.

    Raises:
        ConfigError: the file says what is wrong. TypeError: it is neither.
    """
    if isinstance(config, Config):
        return config
    if not isinstance(config, str | PathLike):
        raise TypeError(
            "a config is the path of a TOML file, or what load_config and parse_config make of "
            f"one, not {shown(config)}; parse_config takes TOML as text"
        )
    return load_config(config)


@frozen(kw_only=True)
class Plan:
    """The difference that a config would make, in words, a line each; empty: none."""

    changes: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        return "\n".join(self.changes) or "no change"

    @property
    def in_a_line(self) -> str:
        """The same, for a log."""
        return "; ".join(self.changes) or "no change"


def make_plan(old: Config, new: Config) -> Plan:
    """Compare two configs.

    Raises:
        ConfigError: the new one asks for what a running cluster cannot change.
    """
    before, after = _settings(old), _settings(new)
    changed = [key for key in after if before[key] != after[key]]
    fixed = [key for key in changed if key in _FIXED]
    fixed += ["server"] if old.server != new.server else []  # it listens
    fixed = [f"{key}: cannot change while the cluster runs" for key in fixed]
    if fixed := [*fixed, *_tokenizer_changes(old, new), *_other_desks(old, new)]:
        raise ConfigError(fixed)
    lines = [f"{key}: {before[key]!r} → {after[key]!r}" for key in changed]
    return Plan(changes=(*_group_changes(old, new), *lines))


def _settings(config: Config) -> dict[str, object]:
    """Every key that may change outside ``[[engines]]``, dotted."""
    tables = asdict(config, filter=lambda a, _: a.name not in {"engines", "server"})
    return {
        f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()
    }


def _tokenizer_changes(old: Config, new: Config) -> Iterator[str]:
    """Clients have one tokenizer, of the first group's model; prompts are encoded before placing.

    Whether two models have the same one cannot be told by their names, unless both cost nothing.
    """
    before, after = old.engines[0].model, new.engines[0].model
    if before != after and not (_has_bytes(before) and _has_bytes(after)):
        yield (
            f"engines.{new.engines[0].name}.model: cannot change while the cluster runs: "
            f"prompts are encoded for {before!r}, the first group's model"
        )


def _other_desks(old: Config, new: Config) -> Iterator[str]:
    """Engines that joined cannot be replaced beside those that serve: they are the same ones."""
    before = {group.name: group for group in old.engines}
    for group in new.engines:
        former = before.get(group.name)
        if former is None and group.kind is EngineKind.VLLM and new.steps_together(group):
            yield (  # their ranks would go on from those of others
                f"engines.{group.name}: engines that join and step together begin with their "
                "cluster; start it anew"
            )
        if former is None or EngineKind.VLLM not in {former.kind, group.kind}:
            continue
        if is_other(former, group):
            alone = group.supervision.strategy is Strategy.ONE_FOR_ONE
            yield (
                f"engines.{group.name}: engines that join cannot be replaced while the cluster "
                f"runs{'; only their number can change' if alone else ''}"
            )


def _has_bytes(model: str) -> bool:
    """Whether the tokens of a model are the bytes of its text, whatever it is."""
    return model == "echo" or model.startswith("cost:")


def _group_changes(old: Config, new: Config) -> Iterator[str]:
    before = {group.name: group for group in old.engines}
    after = {group.name: group for group in new.engines}
    for name in before.keys() - after.keys():
        yield f"engines.{name}: {_some(before[name].count, 'leaves', 'leave')}"
    for name, group in after.items():
        if name not in before:
            joins = _some(group.count, f"of {group.model} joins", f"of {group.model} join")
            yield f"engines.{name}: {joins}"
        elif is_other(before[name], group):
            yield f"engines.{name}: {_some(group.count, 'is', 'are all')} replaced"
        elif before[name].count != group.count:
            yield f"engines.{name}: {before[name].count} → {plural(group.count, 'engine')}"


def _some(count: int, one: str, more: str) -> str:
    return f"1 engine {one}" if count == 1 else f"{count} engines {more}"


def is_other(old: EngineGroupConfig, new: EngineGroupConfig) -> bool:
    """Whether a group differs so that all its engines must be replaced.

    A mere difference in size is none, unless its engines restart together: under one supervisor,
    which knows those that it began with.
    """
    resized = evolve(old, count=new.count)
    return resized != new or (old != new and old.supervision.strategy is not Strategy.ONE_FOR_ONE)


@define(eq=False)
class Change:
    """The engines of a plan, between coming up and taking over."""

    groups: dict[str, Group]
    arriving: list[EngineSlot] = field(factory=list)
    leaving: list[EngineSlot] = field(factory=list)

    def commit(self, roster: Roster) -> None:
        """Switch over: synchronous, so that no request sees half of it.

        The new come before the old go, so there are engines at each moment; only of those with the
        same name must the old one go first.
        """
        roster.groups = self.groups
        leaving = {slot.name: slot for slot in self.leaving}
        for slot in self.arriving:
            if (old := leaving.get(slot.name)) is not None:
                old.retire()
            slot.admit()
        for slot in self.leaving:
            slot.retire()


async def prepare(
    roster: Roster, builder: Builder, new: Config, wait_loaded: Callable[[], Awaitable[None]]
) -> Change:
    """Bring up the engines that a new config asks for and the roster has not, held back.

    Args:
        roster: Of the running cluster; unchanged by this.
        builder: Of the new config.
        new: The new config.
        wait_loaded: Waits until the models of the new engines can be had.

    Raises:
        ModelNotFound, ModelUnsupported, LaunchFailed: a model cannot be had.
        ConfigError: too many of the engines that would stay are down.
        ScalingFailed: an engine did not come up; all new ones are gone again.
        ClusterClosed: the cluster ends.
    """
    change = Change(groups={})
    for config in new.engines:
        old = roster.groups.get(config.name)
        kept = [] if old is None or is_other(old.config, config) else old.slots[: config.count]
        made = roster.make(
            config,
            range(len(kept), config.count),
            builder=builder,
            held=True,
            beside=change.arriving,
        )
        change.arriving += made
        change.groups[config.name] = Group(config, [*kept, *made])
    staying = {slot for group in change.groups.values() for slot in group.slots}
    change.leaving = [slot for slot in roster.slots if slot not in staying]
    refuse_few(count_alive(staying), new.cluster.min_ready, "cannot apply the new config")
    await wait_loaded()
    await roster.bring_up(
        [
            (group.config, [s for s in group.slots if s in change.arriving])
            for group in change.groups.values()
        ]
    )
    return change
