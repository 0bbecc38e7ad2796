"""Rules between keys, as one pure function over plain tables.

Plain tables, since a file with errors has no `Config` yet and still deserves to hear of *all* that
is wrong: `dpkit.config.load` takes away what is wrong by itself and asks about the rest.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dpkit.config.checks import quote
from dpkit.config.joining import joining
from dpkit.config.lockstep import lockstep
from dpkit.config.units import parse_duration, show_duration
from dpkit.errors import ConfigError
from dpkit.names import Dtype, EngineKind, Quant, StartMethod

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Path = tuple[str | int, ...]
    Table = Mapping[str, Any]
    Groups = Sequence[tuple[int, Table]]

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dotted(path: Path) -> str:
    """``engines.0.kv``, quoted where a part is no bare key, so that it stays on one line."""
    return ".".join(str(step) if _BARE.fullmatch(str(step)) else repr(step) for step in path)


class Conflict(ConfigError):  # noqa: N818 - reads as what happened, like the others of the tree
    """Keys that are right one by one do not go together."""

    def __init__(self, found: Sequence[tuple[Path, str]]) -> None:
        super().__init__([f"{dotted(path)}: {message}" for path, message in found])


def conflicts(config: Table) -> Iterator[tuple[Path, str]]:
    """Where and how the keys of a config contradict one another.

    None stands for a value that was not given, or that was wrong: nothing follows from either.
    """
    groups = [item for item in enumerate(config.get("engines") or ()) if item[1] is not None]
    for index, group in groups:
        yield from _pool_size_twice(group.get("kv") or {}, ("engines", index, "kv"))
        yield from _too_small_a_step(group.get("scheduler") or {}, ("engines", index, "scheduler"))
        yield from _no_weights(group, ("engines", index))
        yield from _int4_in_float32(group, ("engines", index))
        yield from _not_on_a_gpu(group, ("engines", index))
        supervision = group.get("supervision") or {}
        at = ("engines", index, "supervision")
        yield from _at_most(supervision, at, ("backoff", 0.1), ("backoff_max", 10.0))
    yield from _same_name(groups)
    yield from _other_model(groups)
    yield from joining(groups, config.get("coordinator") or {})
    yield from lockstep(groups, config.get("coordinator") or {})
    cluster = config.get("cluster") or {}
    yield from _phases(cluster)
    yield from _too_few_engines(cluster, config.get("engines") or ())
    balancer = config.get("balancer") or {}
    yield from _at_most(balancer, ("balancer",), ("eject_for", 1.0), ("eject_max", 60.0))
    yield from _same_address(config.get("server") or {})


def _pool_size_twice(kv: Table, at: Path) -> Iterator[tuple[Path, str]]:
    if kv.get("num_blocks") is not None and kv.get("memory") is not None:
        message = "num_blocks already gives the size of the pool; keep one of the two"
        yield (*at, "memory"), message


def _too_small_a_step(scheduler: Table, at: Path) -> Iterator[tuple[Path, str]]:
    seqs, tokens = scheduler.get("max_num_seqs"), scheduler.get("max_num_batched_tokens")
    if seqs is not None and tokens is not None and tokens < seqs:
        message = f"must be at least max_num_seqs ({seqs}), got {tokens}"
        why = "each running request takes a token a step"
        yield (*at, "max_num_batched_tokens"), f"{message}: {why}"


def _no_weights(group: Table, at: Path) -> Iterator[tuple[Path, str]]:
    """A key that nothing obeys is as wrong as a key that nobody knows."""
    model = group.get("model")
    if model is None or has_weights(model):
        return
    for key, default in (("dtype", Dtype.AUTO), ("quant", Quant.NONE), ("device", "cpu")):
        if group.get(key) not in {None, default}:
            message = f"model {quote(model)} has no weights that dpkit loads"
            yield (*at, key), f"{message}; leave {key} out"


def _int4_in_float32(group: Table, at: Path) -> Iterator[tuple[Path, str]]:
    if group.get("quant") == Quant.INT4 and group.get("dtype") == Dtype.FLOAT32:
        message = "int4 weights are computed in bfloat16, not in float32"
        yield (*at, "dtype"), f"{message}; leave dtype out"


def _not_on_a_gpu(group: Table, at: Path) -> Iterator[tuple[Path, str]]:
    if group.get("device") in {None, "cpu"}:
        return
    if group.get("quant") == Quant.INT4:
        yield (*at, "quant"), "int4 weights are computed on a CPU only; leave quant out"
    start = (group.get("process") or {}).get("start", StartMethod.FORK)
    if group.get("kind") == EngineKind.PROCESS and start == StartMethod.FORK:
        message = "CUDA cannot be used in a fork of a process that has used it"
        yield (*at, "device"), f'{message}; write start = "spawn" in engines.process'


def _same_name(groups: Groups) -> Iterator[tuple[Path, str]]:
    seen: dict[str, int] = {}
    for index, group in groups:
        name = group.get("name", "engine")
        first = index if name is None else seen.setdefault(name, index)
        if first != index:
            message = f"{quote(name)} is the name of engines.{first} already"
            yield ("engines", index, "name"), f"{message}; give each group its own"


def _other_model(groups: Groups) -> Iterator[tuple[Path, str]]:
    """Requests go to any engine; presets may differ, for they differ in speed only."""
    named = [(index, group["model"]) for index, group in groups if group.get("model") is not None]
    for index, model in named[1:]:
        first, expected = named[0]
        if _family(model) != _family(expected):
            message = f"engines.{first} serves {quote(expected)}, this group {quote(model)}"
            yield ("engines", index, "model"), f"{message}; one cluster serves one model"


def _phases(cluster: Table) -> Iterator[tuple[Path, str]]:
    """A shutdown is one stretch of time, cut into parts."""
    grace = _seconds(cluster, "grace", 10.0)
    if grace is None:
        return
    kill_after = _seconds(cluster, "kill_after", grace / 5)
    if kill_after is not None and kill_after > grace:
        message = f"must be at most grace ({show_duration(grace)}), got {show_duration(kill_after)}"
        yield ("cluster", "kill_after"), f"{message}: it is the last part of it"
        return
    pre_stop = _seconds(cluster, "pre_stop", 0.0)
    left = grace - (grace / 5 if kill_after is None else kill_after)
    if pre_stop is not None and pre_stop > left:
        message = f"must be at most {show_duration(left)}, which is grace without kill_after"
        yield ("cluster", "pre_stop"), f"{message}; got {show_duration(pre_stop)}"


def _same_address(server: Table) -> Iterator[tuple[Path, str]]:
    """Two listeners at one address; each may pick a port of its own."""
    listen = server.get("listen", "127.0.0.1:8000")
    if listen is not None and listen == server.get("admin_listen") and not listen.endswith(":0"):
        message = f"{quote(listen)} is server.listen already"
        yield ("server", "admin_listen"), f"{message}; leave it out, or give another port"


def _too_few_engines(cluster: Table, groups: Sequence[Table | None]) -> Iterator[tuple[Path, str]]:
    counts = [None if group is None else group.get("count", 1) for group in groups]
    known = [count for count in counts if count is not None]
    min_ready = cluster.get("min_ready", 1)
    if known and known == counts and min_ready is not None and min_ready > sum(known):
        message = f"must be at most the number of engines ({sum(known)}), got {min_ready}"
        yield ("cluster", "min_ready"), message


def _at_most(
    table: Table, at: Path, small: tuple[str, float], large: tuple[str, float]
) -> Iterator[tuple[Path, str]]:
    """One duration of a table bounds another; each is given by its key and its default."""
    first, cap = _seconds(table, *small), _seconds(table, *large)
    if first is not None and cap is not None and first > cap:
        message = f"must be at most {large[0]} ({show_duration(cap)}), got {show_duration(first)}"
        yield (*at, small[0]), message


def _seconds(table: Table, key: str, default: float) -> float | None:
    """A duration; one in a file that has errors elsewhere is still a string."""
    value = table.get(key, default)
    return parse_duration(value) if isinstance(value, str) else value


def has_weights(model: str) -> bool:
    """Whether dpkit itself loads weights: neither ``echo`` nor ``cost:PRESET`` nor your class."""
    return "/" in model or not (model == "echo" or ":" in model)


def _family(model: str) -> str:
    return "cost:" if model.startswith("cost:") else model
