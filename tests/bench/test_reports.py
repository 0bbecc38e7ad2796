"""What a report says, in each of its forms."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from dpkit.bench.html import html_report
from dpkit.bench.plots import plots
from dpkit.bench.record import Outcome
from dpkit.bench.report import Report, notes_of
from dpkit.bench.slo import Slo
from dpkit.bench.summary import summarise
from dpkit.bench.text import markdown_report, text_report
from tests.bench.test_statistics import record


def report_of(records, **fields) -> Report:
    summary = summarise(records, slo=Slo(ttft=0.5))
    settings = {"load": "open loop, 2 requests/s", "seed": "7"}
    return Report(
        **{
            "target": "http://there",
            "model": "<m> & co",
            "settings": settings,
            "notes": notes_of(summary, is_exact=True),
            "was_stopped": False,
            "origin": 100.0,
            "records": records,
            "summary": summary,
        }
        | fields
    )


RECORDS = [
    *(
        record(
            each,
            100 + each,
            100.25 + each,
            100.375 + each,
            ended=100.5 + each,
            engine=f"e-{each % 2}",
            prompt_tokens=10,
        )
        for each in range(4)
    ),
    record(
        4, 104.0, ended=104.25, outcome=Outcome.FAILED, error_kind="HTTP 429", error="a|b <full>"
    ),
]


def test_a_terminal_is_told_all_of_it() -> None:
    said = text_report(report_of(RECORDS, notes=("mind this",)))
    rows = {line.split("  ")[0]: line.split() for line in said.splitlines()}
    assert said.startswith("<m> & co at http://there\nopen loop, 2 requests/s; seed: 7\n\n")
    assert "requests           4 finished, 1 failed\n" in said
    assert "duration           4.25 s, at most 1 at once\n" in said
    assert "throughput         0.941 requests/s\n" in said
    assert "1.88 output tokens/s, 11.3 with those of prompts (8 and 40 tokens)" in said
    assert "goodput            0.941 requests/s within ttft=500ms: 4, 80.0%\n" in said
    assert rows["time to first token"][-6:] == ["250"] * 6
    assert rows["between tokens (ITL)"][-6:] == ["125"] * 6
    assert rows["per output token (TPOT)"][-6:] == ["125"] * 6
    assert rows["end to end"][-6:] == ["500"] * 6
    assert "Engines (busiest: 1.00 of the mean)\n" in said
    assert rows["e-1"] == ["e-1", "2", "4", "250", "250", "125", "125"]
    assert re.search(r"^HTTP 429 +1 +a\|b <full>$", said, re.MULTILINE)
    assert said.endswith("\nnote: mind this\n")


def test_a_page_in_markdown_has_tables_that_nothing_breaks() -> None:
    said = markdown_report(report_of(RECORDS, notes=("mind this",)))
    assert "| time to first token | 250 | 250 | 250 | 250 | 250 | 250 |\n" in said
    assert "| HTTP 429 | 1 | a\\|b <full> |\n" in said
    assert "### Engines (busiest: 1.00 of the mean)\n" in said
    assert said.endswith("> mind this\n")
    for block in re.findall(r"(?:^\|.*\n)+", said, re.MULTILINE):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(cells) == 1, block


def test_without_answers_every_form_is_still_there() -> None:
    empty = report_of([])
    for show in (text_report, markdown_report, html_report):
        assert "0 finished, 0 failed" in show(empty)
    failed = report_of(RECORDS[4:])
    for show in (text_report, markdown_report, html_report):
        assert "0 finished, 1 failed" in show(failed)
    assert json.loads(json.dumps(failed.to_dict()))["ttft"] is None


def test_json_has_every_figure() -> None:
    told = json.loads(json.dumps(report_of(RECORDS).to_dict()))
    assert told["model"] == "<m> & co"
    assert told["settings"]["seed"] == "7"
    assert told["was_stopped"] is False
    assert (told["finished"], told["failed"], told["output_tokens"]) == (4, 1, 8)
    assert told["ttft"]["p99"] == pytest.approx(0.25)
    assert told["goodput"]["share"] == 0.8
    assert told["errors"] == [{"kind": "HTTP 429", "count": 1, "example": "a|b <full>"}]
    assert [each["engine"] for each in told["engines"]] == ["e-0", "e-1"]


def test_a_record_is_told_from_the_beginning_of_the_run_on() -> None:
    told = RECORDS[1].to_dict(100.0)
    assert told["intended_s"] == 1.0
    assert told["moments_s"] == pytest.approx([1.25, 1.375])
    assert told["outcome"] == "finished"


class Page(HTMLParser):
    """Everything that a browser would fetch, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.said: list[str] = []

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.append(tag)
        self.fetched += [
            value
            for name, value in attrs
            if name in {"src", "href"} and not value.startswith("data:")
        ]

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def test_a_page_needs_nothing_else() -> None:
    text = html_report(report_of(RECORDS, notes=("mind <this>",)))
    page = Page()
    page.feed(text)
    assert page.fetched == []
    assert "script" not in page.tags
    assert "@import" not in text
    assert "url(" not in text
    assert page.tags.count("svg") == 7
    said = "".join(page.said)
    for words in ("<m> & co at http://there", "mind <this>", "a|b <full>", "80.0%", "p99 250 ms"):
        assert words in said


def test_plots_are_whole_svg_and_draw_within_themselves() -> None:
    for plot in plots(report_of(RECORDS)):
        root = ET.fromstring(plot.render())  # noqa: S314 - our own
        for rect in root.iter("rect"):
            assert -0.01 <= float(rect.attrib["x"]) <= 520
            assert 30 <= float(rect.attrib["y"]) <= 210.1
            assert float(rect.attrib["y"]) + float(rect.attrib["height"]) <= 210.1
        for line in root.iter("polyline"):
            for point in line.attrib["points"].split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= 520
                assert 0 <= y <= 250


def test_a_histogram_has_every_sample_in_one_bar() -> None:
    spread = [
        record(each, 0.0, 0.001 * 1.05**each, ended=1.0 + each, output_tokens=1)
        for each in range(150)
    ]
    for records in (spread, spread[:1], RECORDS):
        first = next(iter(plots(report_of(records))))
        counts = [int(each) for each in re.findall(r": (\d+)</title>", first.render())]
        assert sum(counts) == sum(each.ttft is not None for each in records)
