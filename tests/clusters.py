"""What tests ask of a cluster, wherever its engines are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.config.load import parse_config

if TYPE_CHECKING:
    from dpkit.config.schema import Config
    from dpkit.nursery.cluster import Cluster
    from dpkit.nursery.events import Event, EventKind
    from dpkit.nursery.slot import EngineSlot


def make_config(*groups: str, settings: str = "") -> Config:
    """A config of these groups; all that may be random is not."""
    return parse_config("\n".join([settings, *groups]), overrides=["cluster.seed=1"])


def is_idle(cluster: Cluster) -> bool:
    """Whether every engine that serves has said that it has nothing to do, and the books agree."""
    now = cluster.statistics()
    busy = any(each.core.running or each.core.waiting for each in now.engines)
    return not (busy or cluster.audit())


def slot_of(cluster: Cluster, name: str) -> EngineSlot:
    """The place of an engine."""
    return next(slot for slot in cluster._slots if slot.name == name)


def told(cluster: Cluster, *kinds: EventKind, of: str | None = None) -> list[Event]:
    """The events of these kinds (of an engine), oldest first."""
    every = [event for event in cluster.events if event.kind in kinds]
    return [each for each in every if of is None or (each.engine and each.engine.name == of)]
