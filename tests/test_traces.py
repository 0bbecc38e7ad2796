"""Traces: every published form is read, stretched and clipped, and what is none is told."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from dpkit.errors import ConfigError
from dpkit.traces import Ask, Trace, read_trace

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
        ("\n", "some.csv:1: no trace that is known here: expected"),
        (
            "prompt_tokens,output_tokens\n",
            "some.csv:1: no trace that is known here: expected a CSV header with arrival_s",
        ),
        ("arrival_s,prompt_tokens,output_tokens\n", "some.csv: the trace has no requests"),
        (
            "arrival_s,prompt_tokens,output_tokens\n0,1,1\n0,many,1\n",
            "some.csv:3: this is no request: prompt_tokens must be a whole number, not 'many'",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens\n0,1\n",
            "some.csv:2: this is no request: it has no output_tokens",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens\n0,-1,1\n",
            "this is no request: prompt_tokens: lengths are from 0 to 10,000,000 tokens, not -1",
        ),
        (
            f"arrival_s,prompt_tokens,output_tokens,blocks\n0,1,1,{'1 ' * 2**23}1\n",
            "some.csv:2: this is no request: field larger than field limit",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens\nnan,1,1\n",
            "some.csv:2: this is no request: arrival_s: nobody comes at nan",
        ),
        (
            f"{CSV}9,600,3,1 {2**30}\n",
            "block ids are from 0 to 1073741823; number the blocks anew",
        ),
        ('{"timestamp": 1}\n', "some.csv:1: this is no request: it has no input_length"),
        ('{"timestamp": 1\n', "request: it is no JSON: Expecting ',' delimiter at character 16"),
        ('{"timestamp": [1]}\n', "this is no request: timestamp must be a number, not [1]"),
        (
            '{"timestamp": 1, "input_length": Infinity}\n',
            "this is no request: input_length must be a whole number, not inf",
        ),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 7}\n',
            "this is no request: block ids must be a list, not 7",
        ),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1}\n[1]\n',
            "some.csv:2: this is no request: it is no JSON object, but [1]",
        ),
        (f"{CSV}9,600,3,1 x\n", "this is no request: a block id must be a whole number, not 'x'"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n",
            "TIMESTAMP must be such as 2023-11-16 18:15:46.6805900, not 'noon'",
        ),
        (
            f"arrival_s,prompt_tokens,output_tokens\n0,{'x' * 99},1\n",
            f"prompt_tokens must be a whole number, not '{'x' * 58}…",
        ),
    ],
)
def test_what_is_no_trace_is_told_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "some.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [gzip.compress(CSV.encode() * 99)[:40], b"\x1f\x8b no gzip, either"],
    ids=["cut", "no gzip"],
)
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "some.csv"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"some\.csv: it cannot be read: "):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("some.csv", f"{CSV}9,600,3,é\n".encode("latin-1"), "some.csv:5: not UTF-8: byte 0xe9; "),
        ("some.csv.gz", gzip.compress(b"\xff\xfe"), "some.csv.gz:1: not UTF-8: byte 0xff; save "),
        ("some.csv.gz", b"\xff\xfe\x00", "some.csv.gz: it is not gzip, though its name ends so"),
        ("some.csv", b"", "some.csv: the file is empty"),
        ("some.csv.gz", gzip.compress(b""), "some.csv.gz: the file is empty"),
    ],
    ids=["latin-1", "gzipped", "random", "empty", "empty when unpacked"],
)
def test_a_file_that_is_no_text_is_told(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{tmp_path}/{said}")


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv: no such file$"):
        read_trace(tmp_path / "none.csv")


def test_columns_come_in_any_order_and_requests_too(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text("output_tokens,prompt_tokens,arrival_s\n2,20,5\n1,10,4\n")
    assert read_trace(path).asks == (
        Ask(arrival_s=0.0, prompt_tokens=10, output_tokens=1),
        Ask(arrival_s=1.0, prompt_tokens=20, output_tokens=2),
    )


def test_lengths_alone_need_no_times(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n5,7\n3,2\n")
    asks = read_trace(path, needs_times=False).asks
    assert [(ask.prompt_tokens, ask.output_tokens) for ask in asks] == [(5, 7), (3, 2)]


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
