"""The page on the nursery tree shows code that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "nursery.md"


def _run(number: int) -> str:
    """What the example of that number prints."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[number]
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stderr == ""
    return process.stdout


def test_outputs_go_to_a_callable() -> None:
    assert _run(0) == "Once upon a time"


def test_the_parts_can_be_used_without_the_rest() -> None:
    assert _run(-1) == "pump, life 0\npump, life 1\npump, life 2\n"
