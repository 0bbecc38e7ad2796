"""Traces: every published form is read, stretched and clipped, and what is none is told."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from dpkit.errors import ConfigError
from dpkit.hashing import block_hash, root_hash
from dpkit.simulate.prompts import prompt_of
from dpkit.simulate.traces import Ask, Trace, read_trace
from dpkit.simulate.workloads import WORKLOADS, make_workload

if TYPE_CHECKING:
    from pathlib import Path

CSV = "arrival_s,prompt_tokens,output_tokens,blocks\n0.5,600,3,7 8\n1.5,100,4,\n2.5,90000,90000,\n"


def test_a_trace_begins_at_zero_and_keeps_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "some.csv.gz"
    path.write_bytes(gzip.compress(CSV.encode()))
    trace = read_trace(path)
    assert trace.name == "some"
    assert trace.asks[0] == Ask(arrival_s=0.0, prompt_tokens=600, output_tokens=3, blocks=(7, 8))
    assert trace.span_s == 2.0
    assert len(read_trace(path, rows=2).asks) == 2


def test_mooncakes_lines_are_milliseconds_and_hash_ids(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    row = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
    path.write_text("\n".join(json.dumps({**row, "timestamp": t}) for t in (27482, 30535)))
    first, second = read_trace(path).asks
    assert first == Ask(arrival_s=0.0, prompt_tokens=6955, output_tokens=52, blocks=(46, 47))
    assert second.arrival_s == pytest.approx(3.053)


def test_azures_stamps_are_read_to_the_microsecond(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,0\n"
    )
    first, second = read_trace(path).asks
    assert (first.prompt_tokens, first.output_tokens) == (374, 44)
    assert second.arrival_s == pytest.approx(4.314579)
    assert second.output_tokens == 1  # nobody answers with nothing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "hello\n",
            "some.csv:1: no trace that is known here: expected a CSV header with arrival_s",
        ),
        ("arrival_s,prompt_tokens\n", "some.csv: the trace has no requests"),
        (
            "arrival_s,prompt_tokens,output_tokens\n0,1,1\n0,many,1\n",
            "some.csv:3: this is no request: ValueError",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens\nnan,1,1\n",
            "some.csv:2: this is no request: ValueError: nobody comes at nan",
        ),
        (
            f"{CSV}9,600,3,1 {2**30}\n",
            "block ids are from 0 to 1073741823; number the blocks anew",
        ),
        ('{"timestamp": 1}\n', "some.csv:1: this is no request: KeyError: 'input_length'"),
    ],
)
def test_what_is_no_trace_is_told_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "some.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert words in str(caught.value)


def test_a_trace_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv: it cannot be read: "):
        read_trace(tmp_path / "none.csv")


def test_rounded_stamps_are_spread_in_their_order(tmp_path: Path) -> None:
    rows = "".join(f"{3 * (n // 10)},{n + 1},1\n" for n in range(40))
    path = tmp_path / "rounded.csv"
    path.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    asks = read_trace(path, seed=1).asks
    assert [ask.prompt_tokens for ask in asks] == list(range(1, 41))
    assert [ask.arrival_s for ask in asks] == sorted({ask.arrival_s for ask in asks})
    assert asks == read_trace(path, seed=1).asks
    assert asks != read_trace(path, seed=2).asks
    assert all(3 * (n // 10) <= ask.arrival_s < 3 * (n // 10) + 3 for n, ask in enumerate(asks))


def test_clipped_requests_fit_with_room_to_spare() -> None:
    ask = Ask(arrival_s=0.0, prompt_tokens=90_000, output_tokens=90_000)
    clipped = Trace(name="t", asks=(ask,)).clipped(50_000).asks[0]
    assert (clipped.prompt_tokens, clipped.output_tokens) == (40_000, 7_500)


@pytest.mark.parametrize("size", [16, 128, 512])
def test_prompts_share_blocks_exactly_as_far_as_their_ids_are_equal(size: int) -> None:
    one = Ask(arrival_s=0.0, prompt_tokens=1_500, output_tokens=1, blocks=(3, 9, 4))
    other = Ask(arrival_s=0.0, prompt_tokens=1_400, output_tokens=1, blocks=(3, 9, 5))
    alone = Ask(arrival_s=0.0, prompt_tokens=1_400, output_tokens=1)
    hashes = [_hashes(prompt_of(ask, n), size) for n, ask in enumerate([one, other, alone])]
    shared = sum(a == b for a, b in zip(hashes[0], hashes[1], strict=False))
    assert shared == 1024 // size
    assert not set(hashes[0]) & set(hashes[2])
    assert len(prompt_of(one, 0)) == 1_500


def _hashes(token_ids: tuple[int, ...], size: int) -> list[bytes]:
    hashes = [root_hash("")]
    for start in range(0, len(token_ids) - size + 1, size):
        hashes.append(block_hash(hashes[-1], token_ids[start : start + size]))
    return hashes[1:]


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_drawn_from_their_seed_alone(name: str) -> None:
    trace = make_workload(name, seed=5)
    assert trace == make_workload(name, seed=5)
    arrivals = [ask.arrival_s for ask in trace.asks]
    assert arrivals == sorted(arrivals)
    assert min(ask.prompt_tokens for ask in trace.asks) > 0
    assert make_workload(name, rows=7, seed=5).asks == trace.asks[:7]


def test_bimodal_prompts_are_long_for_one_in_twenty() -> None:
    asks = make_workload("bimodal").asks
    long = [ask for ask in asks if ask.prompt_tokens >= 60_000]
    assert 0.04 < len(long) / len(asks) < 0.06
    assert all(ask.prompt_tokens < 600 for ask in asks if ask not in long)
