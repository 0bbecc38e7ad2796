"""What is sent and when: lengths, prompts, traces, arrivals. All of it from a seed."""

from __future__ import annotations

import itertools
import random
import re
import statistics
from typing import TYPE_CHECKING

import pytest

from dpkit.bench.arrivals import Arrivals, at_rate, from_trace
from dpkit.bench.lengths import BadLength, Fixed, LogNormal, Uniform, parse_lengths
from dpkit.bench.plan import Load, asks
from dpkit.bench.prompts import WORDS, PromptMaker
from dpkit.traces import Ask as Came
from dpkit.traces import Trace

if TYPE_CHECKING:
    from dpkit.bench.plan import Ask

IDS = tuple(range(1000, 1200))


def ids_of(ask: Ask) -> tuple[int, ...]:
    """Of a prompt of token ids."""
    assert ask.prompt.ids is not None
    return ask.prompt.ids


def trace_of(*rows: tuple[float, int, int]) -> Trace:
    """Of moments, and lengths of prompts and answers."""
    asks = (Came(arrival_s=at, prompt_tokens=p, output_tokens=o) for at, p, o in rows)
    return Trace(name="t", asks=tuple(asks))


def take(load: Load, count: int, **options):
    return list(itertools.islice(asks(load, PromptMaker(IDS, seed=load.seed, **options)), count))


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("128", Fixed(128)),
        ("uniform:64,256", Uniform(64, 256)),
        ("lognormal:128,0.5", LogNormal(128, 0.5)),
    ],
)
def test_lengths_are_read_and_shown(text: str, lengths) -> None:
    assert parse_lengths(text) == lengths
    assert str(lengths) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-1", "1.5", "x", "128,2", "inf", "nan", "99999999999", "1:2", "normal:1,2"),
        *("uniform:5", "uniform:5,4", "uniform:0,4"),
        *("lognormal:0,1", "lognormal:5,-1", "lognormal:5,11"),
    ],
)
def test_lengths_that_are_none_are_refused(text: str) -> None:
    said = f"{text!r} says no length; say a number such as 128, uniform:64,256 (both may come), or "
    with pytest.raises(BadLength, match=re.escape(said)):
        parse_lengths(text)


def test_drawn_lengths_are_what_they_are_called() -> None:
    rng = random.Random(1)
    assert {Fixed(7).draw(rng) for _ in range(9)} == {7}
    assert {Uniform(3, 5).draw(rng) for _ in range(200)} == {3, 4, 5}
    drawn = [LogNormal(100, 0.5).draw(rng) for _ in range(4000)]
    assert statistics.median(drawn) == pytest.approx(100, rel=0.05)
    assert statistics.mean(drawn) == pytest.approx(100 * 2.718281828 ** (0.5**2 / 2), rel=0.05)
    assert min(LogNormal(1, 3).draw(rng) for _ in range(100)) == 1


def test_constant_arrivals_do_not_drift() -> None:
    moments = list(itertools.islice(at_rate(3.0, Arrivals.CONSTANT, 0), 3001))
    assert moments[:3] == [0.0, pytest.approx(1 / 3), pytest.approx(2 / 3)]
    assert moments[3000] == 1000.0


def test_poisson_arrivals_have_exponential_gaps() -> None:
    moments = list(itertools.islice(at_rate(10.0, Arrivals.POISSON, 5), 20_001))
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert moments[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.05)
    assert sum(gap > 0.1 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)


def test_a_trace_begins_with_its_first_request_and_may_go_faster() -> None:
    assert list(from_trace([5.0, 6.0, 9.0], 2.0)) == [0.0, 0.5, 2.0]


def test_the_same_seed_gives_the_same_requests() -> None:
    load = Load(rate=3.0, prompt_tokens=Uniform(1, 50), output_tokens=Uniform(1, 9), seed=4)
    assert take(load, 50) == take(load, 50)


def test_another_rate_changes_no_request() -> None:
    def seen(**fields) -> list[object]:
        load = Load(prompt_tokens=Uniform(1, 50), output_tokens=Uniform(1, 9), seed=4, **fields)
        return [(each.prompt, each.max_tokens) for each in take(load, 50)]

    assert seen(rate=1.0) == seen(rate=7.0, arrivals=Arrivals.CONSTANT) == seen(concurrency=3)


def test_another_seed_gives_other_prompts() -> None:
    loads = [Load(concurrency=1, prompt_tokens=Fixed(20), seed=seed) for seed in (1, 2)]
    first, second = ([each.prompt.ids for each in take(load, 20)] for load in loads)
    assert not set(first) & set(second)


def test_prompts_have_their_length_and_share_no_beginning() -> None:
    load = Load(concurrency=1, prompt_tokens=Fixed(40), output_tokens=Fixed(5))
    every = take(load, 200)
    assert {len(ids_of(each)) for each in every} == {40}
    assert {each.max_tokens for each in every} == {5}
    assert len({ids_of(each)[:16] for each in every}) == 200
    assert {token for each in every for token in ids_of(each)} <= set(IDS)


def test_a_prefix_is_shared_by_all_and_is_part_of_the_length() -> None:
    maker = PromptMaker(IDS, prefix=30)
    prompts = [maker.make(40).ids or () for _ in range(50)]
    assert len({ids[:30] for ids in prompts}) == 1
    assert len({ids[30:] for ids in prompts}) == 50
    assert {len(ids) for ids in prompts} == {40}


def test_a_prefix_leaves_a_token_of_its_own_to_each_prompt() -> None:
    assert len(PromptMaker(IDS, prefix=30).make(10).ids or ()) == 10


def test_prompts_longer_than_all_there_is_go_round() -> None:
    assert len(PromptMaker(IDS).make(600_000).ids or ()) == 600_000


def test_words_make_texts_of_so_many_tokens() -> None:
    text = PromptMaker(WORDS, pieces_per_token=0.5).make(100).text
    assert text is not None
    assert len(text.split()) == 50
    assert set(text.split()) <= set(WORDS)


def test_equal_blocks_of_a_trace_are_equal_prefixes() -> None:
    maker = PromptMaker(IDS)
    one, two, three = (
        maker.make(1300, blocks).ids or () for blocks in ((1, 2, 3), (1, 2, 4), (5, 2, 3))
    )
    assert one[:1024] == two[:1024]
    assert one[1024:] != two[1024:]
    assert one[:512] != three[:512]
    assert one[512:1024] == three[512:1024]
    assert len(one) == len(two) == 1300


def test_blocks_that_do_not_fill_a_prompt_are_followed_by_its_own_tokens() -> None:
    maker = PromptMaker(IDS)
    one, two = (maker.make(600, (1,)).ids or () for _ in range(2))
    assert one[:512] == two[:512]
    assert one[512:] != two[512:]


def test_a_trace_is_replayed_once_and_in_order() -> None:
    trace = trace_of((4.0, 1, 2), (5.0, 2, 4), (6.0, 3, 6))
    every = take(Load(trace=trace, replay=True, speed=2.0), 99)
    assert [each.start for each in every] == [0.0, 0.5, 1.0]
    assert [len(ids_of(each)) for each in every] == [1, 2, 3]
    assert [each.max_tokens for each in every] == [2, 4, 6]


def test_lengths_of_a_file_come_again_from_the_first() -> None:
    load = Load(concurrency=1, trace=trace_of((0, 1, 1), (0, 2, 2)))
    assert [each.max_tokens for each in take(load, 5)] == [1, 2, 1, 2, 1]


def test_a_length_that_is_given_wins_over_that_of_a_file() -> None:
    load = Load(concurrency=1, trace=trace_of((0, 600, 8)), output_tokens=Fixed(3))
    assert [(len(ids_of(each)), each.max_tokens) for each in take(load, 2)] == [(600, 3)] * 2
