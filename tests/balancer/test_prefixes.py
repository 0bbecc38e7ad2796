"""The prefix index: what was sent where, beside a plain model that keeps whole prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from dpkit.balancer.prefixes import BLOCK, PrefixIndex, extend_chain, make_chain
from dpkit.messages import EngineId

if TYPE_CHECKING:
    from collections.abc import Sequence

E0, E1, E2 = (EngineId(f"e{number}") for number in range(3))


def prompt(*blocks: int, rest: int = 0) -> tuple[int, ...]:
    return tuple(token for block in blocks for token in (block,) * BLOCK) + (7,) * rest


def chain(*blocks: int) -> list[int]:
    return make_chain(prompt(*blocks))


def test_equal_prefixes_have_equal_names_up_to_where_they_part() -> None:
    one, other = chain(1, 2, 3), chain(1, 2, 4)
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert chain(2, 1)[1] != chain(1, 1)[1]  # a name stands for all before it, too


def test_only_full_blocks_have_names() -> None:
    assert len(make_chain(prompt(1, 2, rest=BLOCK - 1))) == 2
    assert make_chain(prompt(rest=BLOCK - 1)) == []


def test_salts_share_nothing() -> None:
    assert not set(make_chain(prompt(1, 2), salt="a")) & set(make_chain(prompt(1, 2), salt="b"))


def test_a_chain_goes_on_as_if_it_had_been_made_at_once() -> None:
    assert extend_chain(chain(1, 2), prompt(3, 4)) == chain(1, 2, 3, 4)


def test_each_engine_is_known_by_its_longest_prefix() -> None:
    index = PrefixIndex()
    index.hold(E0, chain(1, 2, 3))
    index.hold(E1, chain(1, 9))
    index.hold(E2, chain(8))
    assert index.hits(chain(1, 2, 3, 4)) == {E0: 3, E1: 1}
    assert index.hits(chain(5)) == {}
    assert index.hits([]) == {}


def test_what_ended_stays_findable_and_is_held_no_more() -> None:
    index = PrefixIndex()
    index.hold(E0, chain(1, 2))
    index.hold(E0, chain(1, 2, 3))
    assert index.held(E0, chain(1, 2, 3, 4), 3) == 3
    index.release(E0, chain(1, 2, 3))
    assert index.hits(chain(1, 2, 3)) == {E0: 3}
    assert index.held(E0, chain(1, 2, 3), 3) == 2
    index.release(E0, chain(1, 2))
    assert index.held(E0, chain(1, 2, 3), 3) == 0
    assert index.held(E1, chain(1), 1) == 0


def test_an_answer_is_findable_by_those_who_go_on_from_it() -> None:
    index = PrefixIndex()
    index.hold(E0, chain(1))
    index.release(E0, chain(1), then=chain(1, 5)[1:])
    assert index.hits(chain(1, 5, 6)) == {E0: 2}
    assert index.held(E0, chain(1, 5), 2) == 0


def test_what_was_unused_for_longest_is_lost_first_and_tails_before_heads() -> None:
    index = PrefixIndex()
    for blocks in ((1, 2, 3), (4, 5)):
        index.hold(E0, chain(*blocks))
        index.release(E0, chain(*blocks))
    index.hold(E0, chain(1))  # in use again, so not among those that may be lost
    index.trim(E0, 2)
    assert index.hits(chain(1, 2, 3)) == {E0: 1}
    assert index.hits(chain(4, 5)) == {E0: 2}
    index.trim(E0, 1)
    assert index.hits(chain(4, 5)) == {E0: 1}
    index.trim(E0, -5)
    assert index.hits(chain(4, 5)) == {}
    assert len(index) == 1


def test_a_life_that_is_over_takes_its_blocks_with_it_and_leaves_its_place() -> None:
    index = PrefixIndex()
    index.hold(E0, chain(1, 2))
    index.hold(E1, chain(1))
    index.forget(E0)
    assert index.hits(chain(1, 2)) == {E1: 1}
    index.release(E0, chain(1, 2))  # its requests end a little later
    index.hold(E2, chain(3))
    assert index.hits(chain(3)) == {E2: 1}
    index.forget(E0)
    assert repr(index) == "<PrefixIndex: 2 blocks on 2 engines>"


def test_hits_that_may_have_changed_have_another_version() -> None:
    index = PrefixIndex()
    versions = [index.version]
    index.hold(E0, chain(1))
    versions.append(index.version)
    index.release(E0, chain(1))
    versions.append(index.version)
    index.trim(E0, 5)  # nothing is lost
    assert index.version == versions[-1]
    index.trim(E0, 0)
    versions.append(index.version)
    assert len(set(versions)) == len(versions)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
moves = st.lists(st.tuples(st.sampled_from([E0, E1, E2]), prompts), max_size=12)


@settings(max_examples=60)
@given(sent=moves, ended=st.sets(st.integers(0, 11)), asked=prompts)
def test_it_knows_what_a_plain_list_of_all_prompts_knows(
    sent: Sequence[tuple[EngineId, tuple[int, ...]]], ended: set[int], asked: tuple[int, ...]
) -> None:
    index = PrefixIndex()
    for engine, blocks in sent:
        index.hold(engine, chain(*blocks))
    for number, (engine, blocks) in enumerate(sent):
        if number in ended:
            index.release(engine, chain(*blocks))
    expected: dict[EngineId, int] = {}
    held: dict[EngineId, int] = {}
    for number, (engine, blocks) in enumerate(sent):
        common = next(
            (n for n, (a, b) in enumerate(zip(blocks, asked, strict=False)) if a != b),
            min(len(blocks), len(asked)),
        )
        expected[engine] = max(expected.get(engine, 0), common)
        if number not in ended:
            held[engine] = max(held.get(engine, 0), common)
    wanted = chain(*asked)
    assert index.hits(wanted) == {engine: hit for engine, hit in expected.items() if hit}
    for engine, hit in expected.items():
        assert index.held(engine, wanted, hit) == held.get(engine, 0)
