"""Paged KV blocks: who holds which, and which of the free ones still hold something useful.

Knows block numbers, reference counts and hashes; nothing of requests, tokens or tensors. A block is
either held (one reference per holder) or free, and keeps its content and its hash until it is
handed out anew: the free list *is* the prefix cache, in the order in which blocks will be lost.
Every operation costs O(1) per block it touches, and a block that was never touched costs nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import chain
from typing import TYPE_CHECKING

from dpkit.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class BlockPool:
    """All KV blocks of one engine."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs: dict[int, int] = {}  # of those held
        self._hash_of: dict[int, bytes] = {}  # of those that can be found
        self._block_of: dict[bytes, int] = {}
        # The free blocks, in the order in which they are handed out: those that hold nothing of
        # use, the last one first; those that never held anything, by number; those that can be
        # found, the oldest first.
        self._useless: list[int] = []
        self._num_touched = 0
        # Not a plain dict: that one leaves holes at its front, and finding its first key gets slow.
        self._findable: OrderedDict[int, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<BlockPool free={self.num_free}/{self.num_blocks} findable={len(self._block_of)}>"

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, findable ones included."""
        untouched = self.num_blocks - self._num_touched
        return len(self._useless) + untouched + len(self._findable)

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds, each once."""
        return len(self._refs)

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody holds, 0.0 to 1.0."""
        return 1.0 - self.num_free / self.num_blocks

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix; still to be held, by `allocate`."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate(self, count: int, *, hits: Sequence[int] = ()) -> list[int] | None:
        """Hold `hits` and `count` blocks more, and return the latter.

        Returns None, and holds nothing, when there are too few. The hits leave the free list before
        it is drawn from, so a request never loses the prefix it has just found.
        """
        idle_hits = sum(block not in self._refs for block in hits)
        if count > self.num_free - idle_hits:
            return None
        for block in hits:
            if block not in self._refs:
                del self._findable[block]
            self._refs[block] = self._refs.get(block, 0) + 1
        return [self._take_next() for _ in range(count)]

    def _take_next(self) -> int:
        if self._useless:
            block = self._useless.pop()
        elif self._num_touched < self.num_blocks:
            block = self._num_touched
            self._num_touched += 1
        else:
            block, _ = self._findable.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self._refs[block] = 1
        return block

    def seal(self, block: int, block_hash: bytes) -> None:
        """Make a full block findable. The first block with a hash stays the one that is found."""
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block of a table.

        Tails first: a prefix is of use without its tail, a tail is none without its prefix. Blocks
        that cannot be found go to the front, since nothing is lost with them.
        """
        for block in reversed(blocks):
            if self._refs[block] > 1:
                self._refs[block] -= 1
                continue
            del self._refs[block]
            if block in self._hash_of:
                self._findable[block] = None
            else:
                self._useless.append(block)

    def forget(self) -> bool:
        """Have no block be found any more; False, and nothing changes: some are held."""
        if self._refs:
            return False
        self._useless += self._findable
        self._findable.clear()
        self._block_of.clear()
        self._hash_of.clear()
        return True

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare every count with the tables that hold blocks now.

        Cheap enough for every idle moment: 2 ms for 50,000 findable blocks.

        Raises:
            InternalError: a block is leaked, freed while held, or findable by the wrong hash.
        """
        held = Counter(chain.from_iterable(tables))
        useless = set(self._useless)
        for block, holders in held.items():
            if self._refs.get(block) != holders or block in self._findable or block in useless:
                raise InternalError(
                    f"{self}: block {block} has {holders} holders and is not so kept"
                )
        if len(held) + self.num_free != self.num_blocks or len(self._refs) != len(held):
            raise InternalError(f"{self}: {len(held)} blocks have holders; the rest must be free")
        if list(map(self._hash_of.get, self._block_of.values())) != list(self._block_of):
            raise InternalError(f"{self}: a hash leads to a block that does not bear it")
        if len(self._hash_of) != len(self._block_of):
            raise InternalError(f"{self}: a block bears a hash that does not lead to it")
