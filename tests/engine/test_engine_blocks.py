"""The block pool against a reference that is too simple to be wrong."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dpkit.engine.blocks import BlockPool
from dpkit.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

HASHES = st.sampled_from([bytes([n]) for n in range(6)])


class BlockPoolMachine(RuleBasedStateMachine):
    """The reference keeps who holds what, and the free blocks in the order of their reuse."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free = list(range(num_blocks))
        self.hash_of: dict[int, bytes] = {}
        self.tables: list[list[int]] = []

    def find(self, block_hash: bytes) -> list[int]:
        return [block for block, other in self.hash_of.items() if other == block_hash]

    @rule(hashes=st.lists(HASHES, max_size=4, unique=True), count=st.integers(0, 5))
    def hold_a_prefix_and_more(self, hashes: list[bytes], count: int) -> None:
        hits: list[int] = []
        for block_hash in hashes:
            if not (found := self.find(block_hash)):
                break
            hits += found
        assert self.pool.match(hashes) == hits

        left = [block for block in self.free if block not in hits]
        fresh = self.pool.allocate(count, hits=hits)
        if count > len(left):
            assert fresh is None
            return
        assert fresh == left[:count]
        self.free = left[count:]
        for block in fresh:
            self.hash_of.pop(block, None)
        self.tables.append(hits + fresh)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), block_hash=HASHES)
    def seal(self, data: st.DataObject, block_hash: bytes) -> None:
        block = data.draw(st.sampled_from(sorted({b for table in self.tables for b in table})))
        if block in self.hash_of:
            return  # a full block is full once
        self.pool.seal(block, block_hash)
        if not self.find(block_hash):
            self.hash_of[block] = block_hash

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        held = {block for other in self.tables for block in other}
        for block in reversed(table):
            if block not in held:
                self.free.insert(len(self.free) if block in self.hash_of else 0, block)

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(self.tables)
        assert self.pool.num_free == len(self.free)
        held = len(Counter(block for table in self.tables for block in table))
        assert held + len(self.free) == self.pool.num_blocks
        assert self.pool.usage == pytest.approx(held / self.pool.num_blocks)


BlockPoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestBlockPool = BlockPoolMachine.TestCase


def sealed_pool() -> BlockPool:
    """Four blocks, all free again, of which 0, 1, 2 are a chain a, b, c."""
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    for block, block_hash in enumerate([b"a", b"b", b"c"]):
        pool.seal(block, block_hash)
    pool.release([0, 1, 2])
    return pool


def test_freed_blocks_stay_findable_until_they_are_reused_tails_first() -> None:
    pool = sealed_pool()
    assert pool.match([b"a", b"b", b"c", b"d"]) == [0, 1, 2]
    assert pool.allocate(2) == [3, 2]  # the one that holds nothing, then the end of the chain
    assert pool.match([b"a", b"b", b"c"]) == [0, 1]
    assert repr(pool) == "<BlockPool free=2/4 findable=2>"


def test_a_hit_is_never_lost_to_the_growth_of_the_same_request() -> None:
    pool = sealed_pool()
    assert pool.allocate(3, hits=[0]) == [3, 2, 1]
    pool.check([[0, 3, 2, 1]])


def test_a_hit_counts_against_the_free_blocks_and_failure_holds_nothing() -> None:
    pool = sealed_pool()
    assert pool.allocate(3, hits=[0, 1]) is None
    pool.check([])
    assert pool.num_free == 4


def test_equal_blocks_computed_twice_are_found_once() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.seal(0, b"a")
    pool.seal(1, b"a")
    assert pool.match([b"a"]) == [0]
    pool.release([0, 1])
    assert pool.allocate(1) == [1]  # the copy that cannot be found goes first
    assert pool.match([b"a"]) == [0]


def test_a_pool_of_any_size_is_there_at_once_and_costs_what_is_used() -> None:
    tracemalloc.start()
    pool = BlockPool(2**31 - 1)
    table = pool.allocate(3)
    assert table == [0, 1, 2]
    pool.check([table])
    pool.release(table)
    assert pool.num_free == 2**31 - 1
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def leak(pool: BlockPool) -> None:
    pool.allocate(1)


def free_while_held(pool: BlockPool) -> None:
    pool._refs[0] = 1


def lose_a_free_block(pool: BlockPool) -> None:
    del pool._findable[2]


def forget_a_hash(pool: BlockPool) -> None:
    del pool._block_of[b"a"]


def keep_a_stale_hash(pool: BlockPool) -> None:
    pool._block_of[b"z"] = 3


@pytest.mark.parametrize(
    ("damage", "tables", "message"),
    [
        (leak, [], "free=3/4 findable=3>: 0 blocks have holders; the rest must be free"),
        (free_while_held, [[0]], "block 0 has 1 holders and is not so kept"),
        (free_while_held, [], "0 blocks have holders; the rest must be free"),
        (lose_a_free_block, [], "0 blocks have holders; the rest must be free"),
        (forget_a_hash, [], "a block bears a hash that does not lead to it"),
        (keep_a_stale_hash, [], "a hash leads to a block that does not bear it"),
    ],
)
def test_the_integrity_check_finds(
    damage: Callable[[BlockPool], None], tables: list[list[int]], message: str
) -> None:
    pool = sealed_pool()
    damage(pool)
    with pytest.raises(InternalError, match=message):
        pool.check(tables)
