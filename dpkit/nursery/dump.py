"""All that a cluster knows of itself, as text: for the log, when an invariant turns out broken.

Only reads, and survives whatever is broken: a part that cannot be shown says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from dpkit.errors import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dpkit.nursery.cluster import Cluster

EVENTS = 20
"""The last ones are shown."""


def dump(cluster: Cluster) -> str:
    """Contradictions, clients, engines, recent events and the tree of tasks, a line each."""
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "contradictions": lambda: iter(cluster.audit()),
        "clients": lambda: (f"{each!r} {each.statistics()}" for each in cluster.clients),
        "engines": lambda: (f"{each}" for each in cluster.statistics().engines),
        "coordinator": lambda: iter([f"{cluster.statistics().coordinator}"]),
        "events": lambda: (f"{each}" for each in list(cluster.events)[-EVENTS:]),
        "tasks": _tasks,
    }
    lines = [f"state of {cluster.config.cluster.name}:"]
    for title, show in parts.items():
        lines.append(f"  {title}:")
        lines += [f"    {line}" for line in _shown(show)] or ["    none"]
    return "\n".join(lines)


def _shown(show: Callable[[], Iterator[str]]) -> list[str]:
    try:
        return list(show())
    except Exception as error:  # noqa: BLE001 - something is broken, or there would be no dump
        return [f"cannot be shown: {describe(error)}"]


def _tasks() -> Iterator[str]:
    root = trio.lowlevel.current_root_task()
    if root is not None:
        yield from _tree(root, "")


def _tree(task: trio.lowlevel.Task, indent: str) -> Iterator[str]:
    yield f"{indent}{task.name}"
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda child: child.name):
            yield from _tree(child, f"{indent}  ")
