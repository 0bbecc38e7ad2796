"""Traces of requests: what came when, how long its prompt was, and how long its answer.

Reads the three forms in which they are published, plain or gzipped, told apart by their first line.
Knows nothing of engines or of loads: a trace says when requests came in life, and whoever replays
it, on a virtual clock or on a server, may stretch that.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
import zlib
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from dpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

BLOCK_TOKENS = 512
"""Tokens that one block id of a trace stands for: Mooncake's choice, kept by those who followed."""

BLOCK_IDS = 2**30
"""Block ids are below this: prompts are made of them, and of tokens that are no block's."""

LONGEST = 10_000_000
"""Tokens of a prompt or an answer: longer than what any model reads, and no danger to memory."""

_GZIP = b"\x1f\x8b"

_LONGEST_FIELD = 2**24
"""Characters: block ids of the longest prompts of known traces are 10 kB."""

_QUOTED = 60
"""Characters of what is shown of a wrong value."""

_CROWDED = 0.5
"""Share of requests that share their stamp with another from which on stamps count as rounded."""


@frozen(kw_only=True)
class Ask:
    """One request of a trace."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's leading blocks of `BLOCK_TOKENS`; equal ids are equal prefixes."""


@frozen(kw_only=True)
class Trace:
    """Requests in the order in which they came."""

    name: str
    asks: tuple[Ask, ...]
    users: int | None = None
    """Closed loop: as many users, each of whom asks again when answered. None: `arrival_s` says."""
    has_rate: bool = True
    """Whether its arrivals mean anything but an order and a shape: else a load must be given."""

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.asks[-1].arrival_s - self.asks[0].arrival_s

    def clipped(self, kv_tokens: int) -> Trace:
        """Fit each request into engines that hold so many tokens.

        Prompts get at most 0.8 of that, and both together 0.95: what is left is for company.
        """
        most, both = int(0.8 * kv_tokens), int(0.95 * kv_tokens)
        asks = []
        for ask in self.asks:
            prompt = min(ask.prompt_tokens, most)
            output = min(ask.output_tokens, both - prompt)
            if (prompt, output) != (ask.prompt_tokens, ask.output_tokens):
                ask = evolve(ask, prompt_tokens=prompt, output_tokens=output)  # noqa: PLW2901
            asks.append(ask)
        return evolve(self, asks=tuple(asks))

    def scaled(self, factor: float) -> Trace:
        """Stretch all times by one factor."""
        asks = (evolve(ask, arrival_s=ask.arrival_s * factor) for ask in self.asks)
        return evolve(self, asks=tuple(asks), has_rate=True)


def read_trace(
    path: str | Path, *, rows: int | None = None, seed: int = 0, needs_times: bool = True
) -> Trace:
    """Read a trace file.

    Args:
        path: CSV with the columns `arrival_s`, `prompt_tokens`, `output_tokens` and perhaps
            `blocks`; Mooncake's JSONL; or Azure's CSV. Each may be gzipped.
        rows: How many of the first requests are used; None: all.
        seed: Spreads requests whose stamps were rounded together.
        needs_times: False: its lengths alone are wanted, and the first form may do without
            `arrival_s`, as if all came at once.

    Raises:
        ConfigError: it cannot be read, or a line is none; the message says which and why.
    """
    path = Path(path)
    lines = read_lines(path)
    read = _form_of(path, lines[0], needs_times=needs_times)
    asks = sorted(_asks(path, lines, read, rows), key=lambda ask: ask.arrival_s)
    if not asks:
        raise ConfigError([f"{path}: the trace has no requests"])
    start = asks[0].arrival_s
    asks = [evolve(ask, arrival_s=ask.arrival_s - start) for ask in asks]
    return Trace(name=path.name.partition(".")[0], asks=spread(asks, seed))


def _form_of(path: Path, first: str, *, needs_times: bool) -> Callable[[Any], Ask]:
    """Who reads its records, by the first line."""
    columns = {name.strip() for name in first.split(",")}
    if first.startswith("{"):
        return _mooncake
    if columns >= {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}:
        return _azure
    needed = {"arrival_s"} if needs_times else set()
    if columns >= needed | {"prompt_tokens", "output_tokens"}:
        return _own
    problem = (
        f"{path}:1: no trace that is known here: expected a CSV header with "
        f"{'arrival_s,' if needs_times else ''}prompt_tokens,output_tokens (or Azure's "
        f"TIMESTAMP,ContextTokens,GeneratedTokens), or Mooncake's JSON lines, not {first[:60]!r}"
    )
    raise ConfigError([problem])


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, which may be gzipped.

    Raises:
        ConfigError: it cannot be read, or has none.
    """
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if raw.startswith(_GZIP) else raw
    except FileNotFoundError as error:
        raise ConfigError([f"{path}: no such file"]) from error
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ConfigError([f"{path}: it cannot be read: {error}"]) from error
    if not data:
        raise ConfigError([f"{path}: the file is empty"])
    try:
        return data.decode().splitlines()
    except UnicodeDecodeError as error:
        if path.suffix == ".gz" and data is raw:
            raise ConfigError([f"{path}: it is not gzip, though its name ends so"]) from None
        number = 1 + data.count(b"\n", 0, error.start)
        problem = f"not UTF-8: byte 0x{data[error.start]:02x}; save the file as UTF-8"
        raise ConfigError([f"{path}:{number}: {problem}"]) from None


def _asks(
    path: Path, lines: Sequence[str], read: Callable[[Any], Ask], rows: int | None
) -> Iterator[Ask]:
    is_json = lines[0].startswith("{")
    csv.field_size_limit(_LONGEST_FIELD)
    records: Any = map(_object, lines) if is_json else csv.DictReader(lines)
    number = first = 1 if is_json else 2
    while rows is None or number < first + rows:
        try:
            ask = read(next(records))
        except StopIteration:
            return
        except (csv.Error, ValueError) as error:
            problem = f"{path}:{number}: this is no request: {error}"
            raise ConfigError([problem]) from error
        number += 1
        yield ask


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg} at character {error.colno}") from error
    if not isinstance(value, dict):
        raise ValueError(f"it is no JSON object, but {_quoted(value)}")  # noqa: TRY004 - as all others
    return value


def read_number(row: Mapping[str, Any], name: str) -> float:
    """A number of a row.

    Raises:
        ValueError: there is none; the message says which, in words.
    """
    value = _value(row, name)
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{name} must be a number, not {_quoted(value)}") from None


def read_whole(row: Mapping[str, Any], name: str) -> int:
    """A whole number of a row.

    Raises:
        ValueError: as of `read_number`.
    """
    return _whole(name, _value(row, name))


def _value(row: Mapping[str, Any], name: str) -> Any:
    if (value := row.get(name)) is None:
        raise ValueError(f"it has no {name}")
    return value


def _whole(name: str, value: Any) -> int:
    try:
        return int(value)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{name} must be a whole number, not {_quoted(value)}") from None


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED - 1]}…"


def _seconds(row: Mapping[str, Any], name: str, unit_s: float = 1.0) -> float:
    value = read_number(row, name)
    if not math.isfinite(value):
        raise ValueError(f"{name}: nobody comes at {value}")
    return value * unit_s


def _tokens(row: Mapping[str, Any], name: str) -> int:
    """Nobody asks nothing, or answers with nothing: 0, which some traces have, counts as 1."""
    tokens = read_whole(row, name)
    if not 0 <= tokens <= LONGEST:
        raise ValueError(f"{name}: lengths are from 0 to {LONGEST:,} tokens, not {tokens}")
    return max(1, tokens)


def _blocks(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list):
        raise ValueError(f"block ids must be a list, not {_quoted(ids)}")  # noqa: TRY004 - likewise
    blocks = tuple(_whole("a block id", each) for each in ids)
    if blocks and not 0 <= min(blocks) <= max(blocks) < BLOCK_IDS:
        raise ValueError(f"block ids are from 0 to {BLOCK_IDS - 1}; number the blocks anew")
    return blocks


def _own(row: dict[str, str]) -> Ask:
    return Ask(
        arrival_s=_seconds(row, "arrival_s") if "arrival_s" in row else 0.0,
        prompt_tokens=_tokens(row, "prompt_tokens"),
        output_tokens=_tokens(row, "output_tokens"),
        blocks=_blocks((row.get("blocks") or "").split()),
    )


def _mooncake(row: dict[str, Any]) -> Ask:
    return Ask(
        arrival_s=_seconds(row, "timestamp", 1e-3),
        prompt_tokens=_tokens(row, "input_length"),
        output_tokens=_tokens(row, "output_length"),
        blocks=_blocks(row.get("hash_ids", [])),
    )


def _azure(row: dict[str, str]) -> Ask:
    said = _value(row, "TIMESTAMP")
    try:  # seven digits of a second, of which Python reads six
        stamp = datetime.fromisoformat(said[:26])
    except ValueError:
        raise ValueError(
            f"TIMESTAMP must be such as 2023-11-16 18:15:46.6805900, not {_quoted(said)}"
        ) from None
    return Ask(
        arrival_s=(stamp - datetime(2000, 1, 1, tzinfo=stamp.tzinfo)).total_seconds(),
        prompt_tokens=_tokens(row, "ContextTokens"),
        output_tokens=_tokens(row, "GeneratedTokens"),
    )


def spread(asks: Sequence[Ask], seed: int) -> tuple[Ask, ...]:
    """Undo the rounding of stamps, if most requests share theirs: evenly, over one such step.

    Mooncake's stamps are multiples of three seconds; replayed as they are, they would be bursts
    that nobody sent. The order is kept, for it carries the sessions.
    """
    groups: dict[float, list[Ask]] = {}
    for ask in asks:
        groups.setdefault(ask.arrival_s, []).append(ask)
    crowded = sum(len(group) for group in groups.values() if len(group) > 1)
    if len(groups) < 2 or crowded < _CROWDED * len(asks):
        return tuple(asks)
    stamps = list(groups)
    step = min(after - before for before, after in pairwise(stamps))
    rng = random.Random(f"{seed}/spread")  # noqa: S311 - no secrets
    return tuple(
        evolve(ask, arrival_s=stamp + step * (place + rng.random()) / len(group))
        for stamp, group in groups.items()
        for place, ask in enumerate(group)
    )
