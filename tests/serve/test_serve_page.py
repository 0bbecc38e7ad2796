"""docs/serve.md: its program runs as it stands there, and it names every route and field."""

from __future__ import annotations

import re

import pytest

from dpkit.serve.front import Front
from dpkit.serve.messages import MOST_PIECES
from dpkit.serve.requests import ChatBody, CompletionBody
from dpkit.serve.routes import ADMIN, API, Router
from tests.documented import output_of, page

PAGE = page("serve.md")

LIMITS = {"n": (128, 1024), "messages": (MOST_PIECES,), "stop": (64, 1024)}

ROUTES = Router(Front(), API + ADMIN).routes


def test_its_program_runs() -> None:
    assert output_of(PAGE) == "1 ready\n"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_it_names_every_route(route) -> None:
    name = f"{route.path}NAME" if route.path.endswith("/") else route.path
    assert re.search(rf"`({route.method} )?{re.escape(name)}`", PAGE)


@pytest.mark.parametrize(
    "field", sorted({*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__})
)
def test_it_names_every_field(field: str) -> None:
    grammar = field in {"structured_outputs", "functions", "audio"} or field.startswith("guided_")
    assert grammar or f"`{field}`" in PAGE


@pytest.mark.parametrize("field", LIMITS)
def test_it_tells_every_bound_of_a_field(field: str) -> None:
    [row] = re.findall(rf"^\| `{field}`.*", PAGE, re.MULTILINE)
    assert [f"{bound:,}" in row for bound in LIMITS[field]] == [True] * len(LIMITS[field])
