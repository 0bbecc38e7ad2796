"""Rules between keys, as one pure function over plain tables.

Plain tables, since a file with errors has no `Config` yet and still deserves to hear of *all* that
is wrong: `dpkit.config.load` takes away what is wrong by itself and asks about the rest.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dpkit.config.checks import quote
from dpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Path = tuple[str | int, ...]
    Table = Mapping[str, Any]

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dotted(path: Path) -> str:
    """``engines.0.kv``, quoted where a part is no bare key, so that it stays on one line."""
    return ".".join(str(step) if _BARE.fullmatch(str(step)) else repr(step) for step in path)


class Conflict(ConfigError):  # noqa: N818 - reads as what happened, like the others of the tree
    """Keys that are right one by one do not go together."""

    def __init__(self, found: Sequence[tuple[Path, str]]) -> None:
        super().__init__([f"{dotted(path)}: {message}" for path, message in found])


def conflicts(config: Table) -> Iterator[tuple[Path, str]]:
    """Where and how the keys of a config contradict one another; an absent key is None."""
    groups: Sequence[Table] = config.get("engines", ())
    for index, group in enumerate(groups):
        yield from _of_group(group, ("engines", index))
    yield from _same_name(groups)
    yield from _other_model(groups)


def _of_group(group: Table, at: Path) -> Iterator[tuple[Path, str]]:
    kv, scheduler = group.get("kv", {}), group.get("scheduler", {})
    if kv.get("num_blocks") is not None and kv.get("memory") is not None:
        message = "num_blocks already gives the size of the pool; keep one of the two"
        yield (*at, "kv", "memory"), message
    seqs, tokens = scheduler.get("max_num_seqs"), scheduler.get("max_num_batched_tokens")
    if seqs is not None and tokens is not None and tokens < seqs:
        message = f"must be at least max_num_seqs ({seqs}), got {tokens}"
        yield (
            (*at, "scheduler", "max_num_batched_tokens"),
            f"{message}: each running request takes a token a step",
        )


def _same_name(groups: Sequence[Table]) -> Iterator[tuple[Path, str]]:
    seen: dict[str, int] = {}
    for index, group in enumerate(groups):
        name = group.get("name", "engine")
        first = seen.setdefault(name, index)
        if first != index:
            message = f"{quote(name)} is the name of engines.{first} already"
            yield ("engines", index, "name"), f"{message}; give each group its own"


def _other_model(groups: Sequence[Table]) -> Iterator[tuple[Path, str]]:
    """Requests go to any engine; presets may differ, for they differ in speed only."""
    named = [(index, group["model"]) for index, group in enumerate(groups) if "model" in group]
    for index, model in named[1:]:
        first, expected = named[0]
        if _family(model) != _family(expected):
            message = f"engines.{first} serves {quote(expected)}, this group {quote(model)}"
            yield ("engines", index, "model"), f"{message}; one cluster serves one model"


def _family(model: str) -> str:
    return "cost:" if model.startswith("cost:") else model
