"""docs/bench.md: its program runs as it stands there, and it names every option and error."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpkit.cli.bench import command

PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()

OPTIONS = sorted(option for each in command.params for option in each.opts if option[:2] == "--")


def test_its_program_runs() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert (process.stdout, process.stderr) == ("20 160\n", "")


@pytest.mark.parametrize("option", OPTIONS)
def test_it_names_every_option(option: str) -> None:
    assert re.search(rf"`{option}[ `]", PAGE)
