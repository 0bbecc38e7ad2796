"""docs/wire.md, the coordinator's section: its example runs, and its numbers are the code's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from dpkit.balancer.coordinator import IDLE_INTERVAL_S
from dpkit.wire.coordinator import BACKLOG

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "wire.md").read_text().partition("## The coordinator\n")[2]


def test_the_example_runs() -> None:
    [source] = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("((0, 0, 0.0), (0, 0, 0.0))\n", "")


def test_its_numbers_are_the_modules() -> None:
    assert f"at most {BACKLOG} snapshots" in SECTION
    assert f"or for {IDLE_INTERVAL_S:.0f} s" in SECTION
