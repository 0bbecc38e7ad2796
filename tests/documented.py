"""Running the examples of a documentation page as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def page(name: str) -> str:
    """The text of a page, by its file's name."""
    return (DOCS / name).read_text()


def output_of(text: str, number: int = 0) -> str:
    """What an example prints, by its place among those of a page or a part of one.

    It must end well, with nothing on standard error, warnings included.
    """
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
