"""The page on the nursery tree shows code that runs."""

from __future__ import annotations

from tests.documented import output_of, page

PAGE = page("nursery.md")


def test_outputs_go_to_a_callable() -> None:
    assert output_of(PAGE) == "Once upon a time"


def test_the_parts_can_be_used_without_the_rest() -> None:
    assert output_of(PAGE, -1) == "pump, life 0\npump, life 1\npump, life 2\n"
