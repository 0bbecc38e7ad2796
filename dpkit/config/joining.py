"""Rules for groups of engines that are started elsewhere and join, over plain tables like `rules`.

A key that nothing obeys is as wrong as one that nobody knows: what such an engine does is told to
whoever starts it, and what concerns joining is of no use to other kinds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from dpkit.config.checks import EVERY_HOST, BadValue, host_and_port, quote
from dpkit.config.groups import (
    EngineGroupConfig,
    KvConfig,
    ProcessConfig,
    SchedulerConfig,
    SupervisionConfig,
    VllmConfig,
)
from dpkit.config.units import parse_duration, parse_size
from dpkit.names import EngineKind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from dpkit.config.rules import Groups, Path, Table

_OWN = "is the engine's own affair: say it to whoever starts the engine"
_NO_RESTARTS = "an engine that joins is not given up, but waited for"
_SILENCE = "an engine that joins is told by its silence: engines.vllm.dead_after"


def joining(groups: Groups, coordinator: Table) -> Iterator[tuple[Path, str]]:
    """Where and how groups that join, or their neighbours, contradict themselves."""
    for index, group in groups:
        at: Path = ("engines", index)
        kind = group.get("kind", EngineKind.LOCAL)
        if kind == EngineKind.VLLM:
            yield from _no_address(group.get("vllm", {}), at)
            yield from _not_ours(group, at)
            yield from _no_rendezvous(group, coordinator, at)
        elif kind is not None:
            for key in _given(group.get("vllm"), VllmConfig):
                message = f"engines of kind {quote(str(kind))} do not join"
                yield (*at, "vllm", key), f'{message}; leave it out, or write kind = "vllm"'
    yield from _same_address(groups)


def _no_address(table: Table | None, at: Path) -> Iterator[tuple[Path, str]]:
    if table is None:
        return
    if (address := table.get("handshake")) is None:
        if _is_left_out(table, "handshake"):
            message = 'engines of kind "vllm" join at an address of this machine; write for example'
            yield (*at, "vllm", "handshake"), f'{message} handshake = "tcp://10.0.0.1:29550"'
    elif table.get("host") is None and host_and_port(address)[0] in EVERY_HOST:
        message = f"no engine can connect to {quote(address)} as it stands"
        yield (*at, "vllm", "host"), f"{message}; say by which host they reach this machine"


def _no_rendezvous(group: Table, coordinator: Table, at: Path) -> Iterator[tuple[Path, str]]:
    """Ranks that step together meet at the first of them, which is not where dpkit is."""
    table, count = group.get("vllm"), group.get("count", 1)
    if table is None or count is None:
        return
    waves = coordinator.get("wave_coordination", False)
    if table.get("rendezvous") is not None:
        if waves is False or (waves and count == 1):
            message = "engines meet only if several step together (coordinator.wave_coordination)"
            yield (*at, "vllm", "rendezvous"), f"{message}; leave it out"
    elif waves and count > 1 and _is_left_out(table, "rendezvous"):
        message = "engines that step together (coordinator.wave_coordination) meet at the first one"
        example = 'rendezvous = "10.0.0.2:29560"'
        yield (*at, "vllm", "rendezvous"), f"{message}; write for example {example}"


def _is_left_out(table: Table, key: str) -> bool:
    """Whether a key was not written.

    A table that was made in Python has all keys; in a file, None stands for what was wrong.
    """
    return key not in table or len(table) == len(attrs.fields(VllmConfig))


def _not_ours(group: Table, at: Path) -> Iterator[tuple[Path, str]]:
    for key in _given(group, EngineGroupConfig, {"dtype", "quant", "device"}):
        yield (*at, key), f"{_OWN}; leave it out"
    for table, kind in (("scheduler", SchedulerConfig), ("kv", KvConfig)):
        for key in _given(group.get(table), kind):
            yield (*at, table, key), f"{_OWN}; leave it out"
    for key in _given(group.get("process"), ProcessConfig):
        yield (*at, "process", key), "an engine that joins is no process of ours; leave it out"
    supervision = group.get("supervision")
    for key in _given(supervision, SupervisionConfig, {"intensity"}):
        yield (*at, "supervision", key), f"{_NO_RESTARTS}; leave it out"
    for key in _given(supervision, SupervisionConfig, {"step_timeout"}):
        yield (*at, "supervision", key), f"{_SILENCE}; leave it out"


def _same_address(groups: Groups) -> Iterator[tuple[Path, str]]:
    """Two groups cannot listen at one address; a port that is picked is always another."""
    seen: dict[str, list[tuple[int, str]]] = {}
    for index, group in groups:
        address = (group.get("vllm") or {}).get("handshake")
        host, port = ("", "*") if address is None else host_and_port(address)
        if port in {"", "*"}:
            continue
        for first, other in seen.get(port, []):
            if host == other or {host, other} & EVERY_HOST:
                message = f"engines.{first} listens at port {port} already"
                yield ("engines", index, "vllm", "handshake"), f"{message}; give each its own"
                break
        seen.setdefault(port, []).append((index, host))


def _given(
    table: Table | None, kind: type[Any], only: Collection[str] | None = None
) -> Iterator[str]:
    """Keys of a table that do not stand at their defaults."""
    for attribute in attrs.fields(kind):
        if only is not None and attribute.name not in only:
            continue
        value = (table or {}).get(attribute.name)
        if value is not None and _plain(value, attribute.default) != attribute.default:
            yield attribute.name


def _plain(value: object, default: object) -> object:
    """A quantity as a number: one in a file that has errors elsewhere is still a string."""
    if not isinstance(value, str) or isinstance(default, str | None):
        return value
    try:
        return parse_duration(value) if isinstance(default, float) else parse_size(value)
    except BadValue:
        return value
