"""Rules for a group of engines that steps together, over plain tables like `rules`.

Its engines cannot do without one another, so they begin and end together; and since a wave goes
through all of them, a cluster has one such group and nothing beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpkit.config.checks import quote
from dpkit.names import EngineKind, Strategy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpkit.config.rules import Groups, Path, Table


def lockstep(groups: Groups, coordinator: Table) -> Iterator[tuple[Path, str]]:
    """Where and how groups that step together, or are said to, contradict themselves."""
    for index, group in groups:
        at: Path = ("engines", index, "supervision", "strategy")
        strategy = (group.get("supervision") or {}).get("strategy", Strategy.ONE_FOR_ONE)
        kind = group.get("kind", EngineKind.LOCAL)
        is_apart = kind in {EngineKind.PROCESS, EngineKind.VLLM}
        if not is_apart or not coordinator.get("wave_coordination"):
            if (
                strategy == Strategy.ALL_BUT_ONE
                and coordinator.get("wave_coordination", 0) is not None
            ):
                message = f"{quote(strategy)} is for processes that step together"
                yield at, f"{message} (coordinator.wave_coordination)"
            continue
        if len(groups) > 1:
            message = "engines of one group step together (coordinator.wave_coordination)"
            yield ("engines", index), f"{message}; have a single [[engines]] table"
        count = group.get("count", 1)
        if count is not None and count > 1 and strategy == Strategy.ONE_FOR_ONE:
            message = "engines that step together (coordinator.wave_coordination) restart together"
            yield at, f"{message}; write {quote(Strategy.ONE_FOR_ALL.value)}"
        elif kind == EngineKind.VLLM and strategy == Strategy.ALL_BUT_ONE:
            message = "engines that join were told by whoever started them how many they are"
            yield at, f"{message}; write {quote(Strategy.ONE_FOR_ALL.value)}"
