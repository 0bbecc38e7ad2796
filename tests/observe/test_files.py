"""Dashboard, alerts and scaling: whatever they ask for is told, with the labels that they use."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dpkit.names import Cause, EngineState
from dpkit.observe.catalogue import FAMILIES, samples_of
from tests.documented import output_of, page
from tests.observe.lab import busy_scrape

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parents[2] / "examples" / "observability"
PAGE = page("metrics.md")

LABELS = {name: {*each.labels, "le"} for each in FAMILIES for name in samples_of(each)}
OTHERS = {
    "up": {"job"},  # Prometheus's own
    "process_resident_memory_bytes": set(),
}
ADDED = {"instance", "job"}
"""Labels that Prometheus adds."""

NAME = re.compile(r"(?<![\w:\"$])((?:vllm:|dpkit:|http_|process_)\w+|up)\b(?:\{([^}]*)\})?")


def strings(value: Any) -> Iterator[tuple[str, str]]:
    """All texts in a document, with their keys."""
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(each, str):
                yield key, each
            yield from strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)


def queries(file: str) -> list[str]:
    """What a file asks Prometheus."""
    text = (FOLDER / file).read_text()
    document = json.loads(text) if file.endswith(".json") else yaml.safe_load(text)
    told = [text for key, text in strings(document) if key in {"expr", "query"}]
    return [text for text in told if text != "prometheus"]


FILES = {"grafana.json": 49, "alerts.yaml": 15, "keda.yaml": 1}
ALL = [(file, query) for file in FILES for query in queries(file)]


@pytest.mark.parametrize(("file", "least"), FILES.items())
def test_each_file_asks_for_something(file: str, least: int) -> None:
    assert len(queries(file)) >= least


@pytest.mark.parametrize(("file", "query"), ALL, ids=lambda value: value[:60])
def test_what_is_asked_for_is_in_the_catalogue(file: str, query: str) -> None:
    asked = NAME.findall(query)
    assert asked
    known = LABELS | OTHERS
    grouped = re.findall(r"by \(([^)]*)\)", query)
    by = {label.strip() for group in grouped for label in group.split(",")}
    for name, selectors in asked:
        assert name in known, name
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selectors))
        assert used <= known[name] | ADDED, name
        assert by <= known[name] | ADDED, name
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")


async def test_what_is_asked_for_is_told() -> None:
    told = {name for name, _ in (await busy_scrape()).samples}
    asked = {name for _, query in ALL for name, _ in NAME.findall(query)}
    assert asked - {"up"} <= told
    assert len(asked) > 35


@pytest.mark.parametrize(("label", "names"), [("state", EngineState), ("cause", Cause)])
def test_values_of_labels_exist(label: str, names: Any) -> None:
    for _, query in ALL:
        for values in re.findall(rf'{label}(?:=~|!~|=)"([^"]*)"', query):
            assert set(values.split("|")) <= set(names)


def test_panels_lie_side_by_side_and_have_what_they_need() -> None:
    board = json.loads((FOLDER / "grafana.json").read_text())
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, panel["title"]
                taken.add((x, y))
    assert max(x for x, _ in taken) == 23
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    variables = {each["name"] for each in board["templating"]["list"]}
    assert variables == {"datasource", "model_name", "engine"}


BOARD = json.loads((FOLDER / "grafana.json").read_text())
SHOWN = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def test_a_dashboard_has_what_grafanas_schema_requires() -> None:
    assert {"schemaVersion", "templating", "annotations", "title", "time"} <= set(BOARD)
    assert 8 <= len(BOARD["uid"]) <= 40
    for panel in SHOWN:
        legend, tooltip = panel["options"]["legend"], panel["options"]["tooltip"]
        assert {*legend} == {"displayMode", "placement", "showLegend", "calcs"}, panel["title"]
        assert {*tooltip} == {"mode", "sort"}, panel["title"]
        assert {"id", "type", "title", "gridPos", "fieldConfig", "targets"} <= set(panel)
        if panel["type"] == "state-timeline":
            assert {"showValue", "rowHeight"} <= set(panel["options"])
    for each in BOARD["templating"]["list"]:
        assert {"text", "value"} <= set(each.get("current", {"text", "value"})), each["name"]


def test_whose_data_it_is_is_for_the_reader_to_choose() -> None:
    asking = [*SHOWN, *(v for v in BOARD["templating"]["list"] if v["type"] == "query")]
    for each in asking:
        assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert not any("datasource" in target for target in each.get("targets", ()))
    for panel in SHOWN:
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names), panel["title"]


def test_prometheus_can_read_what_it_is_asked() -> None:
    promql = pytest.importorskip("promql_parser", reason="pip install 'dpkit[dev]' brings it")
    for _, query in ALL:
        if not query.startswith("label_values("):  # which Grafana reads by itself
            promql.parse(query.replace("$__rate_interval", "1m"))


def test_each_alert_says_how_bad_it_is_and_what_it_means() -> None:
    [group] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names)
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"]["summary"]
        assert f"`{rule['alert']}`" in PAGE


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_page_has_every_family(family: Any) -> None:
    [row] = [line for line in PAGE.splitlines() if line.startswith(f"| `{family.name}` |")]
    labels = ", ".join(f"`{label}`" for label in family.labels)
    assert row == f"| `{family.name}` | {family.kind} | {labels} | {family.text} |"


def test_the_page_has_no_others() -> None:
    rows = re.findall(r"^\| `([a-z_]+:?\w*)` \| (?:gauge|counter|histogram) ", PAGE, re.MULTILINE)
    assert rows == [family.name for family in FAMILIES]


def test_the_program_on_the_page_runs() -> None:
    assert output_of(PAGE) == "4\n"
