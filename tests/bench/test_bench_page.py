"""docs/bench.md: its program runs as it stands there, and it names every option and error."""

from __future__ import annotations

import re

import pytest

from dpkit.cli.bench import command
from tests.documented import output_of, page

PAGE = page("bench.md")

OPTIONS = sorted(option for each in command.params for option in each.opts if option[:2] == "--")


def test_its_program_runs() -> None:
    assert output_of(PAGE) == "20 160\n"


@pytest.mark.parametrize("option", OPTIONS)
def test_it_names_every_option(option: str) -> None:
    assert re.search(rf"`{option}[ `]", PAGE)
