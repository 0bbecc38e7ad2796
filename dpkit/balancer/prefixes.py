"""Which engine has how much of a prompt cached, reckoned from what was sent where.

Knows nothing of the engines' own block tables: it follows them from outside, as they too hold what
runs and lose what was used longest ago. Being wrong costs time, never a wrong answer, so blocks
are named by Python's own hash of a tuple, five times as fast as the digests that engines compare,
and are a few engine blocks long.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpkit.messages import EngineId

    Chain = Sequence[int]

BLOCK = 128
"""Tokens of a block here. A hit is known to be as long as that less at most: some milliseconds."""


def make_chain(token_ids: Sequence[int], *, salt: str = "", block_size: int = BLOCK) -> list[int]:
    """Names of the full blocks of a prompt, each of which stands for all before it too."""
    return extend_chain([hash(salt)], token_ids, block_size=block_size)[1:]


def extend_chain(
    chain: Sequence[int], token_ids: Sequence[int], *, block_size: int = BLOCK
) -> list[int]:
    """A chain, and the names of the full blocks of the tokens that follow it."""
    names = list(chain)
    last = names[-1]
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        last = hash((last, token_ids[start : start + block_size]))
        names.append(last)
    return names


@define(eq=False)
class _Cache:
    """The blocks of one life of an engine."""

    bit: int
    holders: dict[int, int] = field(factory=dict)  # blocks that running requests hold
    idle: OrderedDict[int, None] = field(factory=OrderedDict)  # the rest, longest unused first


class PrefixIndex:
    """The blocks of all engines.

    All answers are in blocks of `BLOCK` tokens.
    """

    def __init__(self) -> None:
        self.version = 0
        """Rises whenever a hit may have become another one."""
        self._caches: dict[EngineId, _Cache] = {}
        self._where: dict[int, int] = {}  # by block: a bit for each engine that has it

    def __repr__(self) -> str:
        return f"<PrefixIndex: {len(self._where)} blocks on {len(self._caches)} engines>"

    def __len__(self) -> int:
        return len(self._where)

    def size(self, engine: EngineId) -> int:
        """How many blocks an engine has."""
        cache = self._caches.get(engine)
        return 0 if cache is None else len(cache.holders) + len(cache.idle)

    def forget(self, engine: EngineId) -> None:
        """A life is over, and its cache with it; unknown ones are ignored."""
        if (cache := self._caches.pop(engine, None)) is not None:
            for block in (*cache.holders, *cache.idle):
                self._unset(block, cache.bit)
            self.version += 1

    def hits(self, chain: Chain) -> Mapping[EngineId, int]:
        """How many leading blocks each engine has; engines that have none are absent."""
        found: dict[EngineId, int] = {}
        where, count, here = self._where, 0, -1
        for block in chain:
            left = here & where.get(block, 0)
            if left != here and count:
                self._note(found, here & ~left, count)
            here = left
            if not here:
                return found
            count += 1
        if count:
            self._note(found, here, count)
        return found

    def held(self, engine: EngineId, chain: Chain, hit: int) -> int:
        """How many of the leading `hit` blocks running requests hold there: they need no room."""
        cache = self._caches.get(engine)
        if cache is None:
            return 0
        holders = cache.holders
        for count in range(hit):
            if chain[count] not in holders:
                return count
        return hit

    def hold(self, engine: EngineId, chain: Chain) -> None:
        """A request was sent there: its blocks are, or will be, in use."""
        cache = self._caches.get(engine)
        if cache is None:
            cache = self._caches[engine] = _Cache(self._free_bit())
        holders, idle, where, bit = cache.holders, cache.idle, self._where, cache.bit
        for block in chain:
            if (count := holders.get(block)) is not None:
                holders[block] = count + 1
                continue
            holders[block] = 1
            if block in idle:
                del idle[block]
            else:
                where[block] = where.get(block, 0) | bit
        self.version += 1

    def release(self, engine: EngineId, chain: Chain, then: Chain = ()) -> None:
        """Such a request ended; `then` are the blocks of its answer, cached too from now on.

        Tails first, as engines do it: a prefix is of use without its tail, a tail is none without
        its prefix.
        """
        cache = self._caches.get(engine)
        if cache is None:
            return
        holders, idle, where, bit = cache.holders, cache.idle, self._where, cache.bit
        for block in reversed(then):
            if block not in holders:
                where[block] = where.get(block, 0) | bit
                idle[block] = None
                idle.move_to_end(block)
        for block in reversed(chain):
            if (count := holders[block]) > 1:
                holders[block] = count - 1
            else:
                del holders[block]
                idle[block] = None
        self.version += 1

    def trim(self, engine: EngineId, blocks: int) -> None:
        """There is room for so many blocks that nobody holds: those unused for longest are lost."""
        cache = self._caches.get(engine)
        if cache is None or len(cache.idle) <= blocks:
            return
        while len(cache.idle) > max(0, blocks):
            self._unset(cache.idle.popitem(last=False)[0], cache.bit)
        self.version += 1

    def _note(self, found: dict[EngineId, int], bits: int, count: int) -> None:
        for engine, cache in self._caches.items():
            if cache.bit & bits:
                found[engine] = count

    def _unset(self, block: int, bit: int) -> None:
        if left := self._where[block] & ~bit:
            self._where[block] = left
        else:
            del self._where[block]

    def _free_bit(self) -> int:
        taken = 0
        for cache in self._caches.values():
            taken |= cache.bit
        return ~taken & (taken + 1)
