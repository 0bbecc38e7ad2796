"""The page on the nursery tree shows code that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "nursery.md"


def test_the_parts_can_be_used_without_the_rest() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == "pump, life 0\npump, life 1\npump, life 2\n"
    assert process.stderr == ""
