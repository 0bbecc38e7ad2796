"""docs/wire.md, the coordinator's section: its example runs, and its numbers are the code's."""

from __future__ import annotations

from dpkit.balancer.coordinator import IDLE_INTERVAL_S
from dpkit.wire.coordinator import BACKLOG
from tests.documented import output_of, page

SECTION = page("wire.md").partition("## The coordinator\n")[2]


def test_the_example_runs() -> None:
    assert output_of(SECTION) == "((0, 0, 0.0), (0, 0, 0.0))\n"


def test_its_numbers_are_the_modules() -> None:
    assert f"at most {BACKLOG} snapshots" in SECTION
    assert f"or for {IDLE_INTERVAL_S:.0f} s" in SECTION
