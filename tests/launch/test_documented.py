"""The page on workers shows code that runs, and says what the code says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import dpkit
from dpkit.launch.notes import LIMIT
from dpkit.launch.output import KEPT
from dpkit.launch.tether import KILL_WITHIN
from dpkit.launch.zygote import ONE_THREAD

PAGE = (Path(__file__).parents[2] / "docs" / "launch.md").read_text()

APP = """
import ctypes

def load(path):
    return path

def serve(state, port):
    print(state, port)
    ctypes.string_at(0)
"""


def test_the_first_example_runs(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "model.py").write_text(APP)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    indented = "".join(f"    {line}\n" for line in code.splitlines())
    program = f"import trio\nasync def main():\n{indented}\ntrio.run(main)\n"
    (tmp_path / "program.py").write_text(program)
    process = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(dpkit.__file__).parents[1])},
    )
    first, *lines = process.stdout.splitlines()
    assert re.fullmatch(r"server-0 \(pid \d+\) was killed by SIGSEGV", first)
    assert lines[:2] == ["weights.bin 8000", "Fatal Python error: Segmentation fault"]
    assert 'app/model.py", line 9 in serve' in process.stdout


def test_the_page_knows_the_numbers() -> None:
    assert f"{LIMIT // 1024} KiB at most" in PAGE
    assert "last fifty lines" in PAGE
    assert KEPT == 50
    assert "after\n  ten seconds" in PAGE
    assert KILL_WITHIN == 5, "twice that, as the page says"
    assert all(f"`{name}={value}`" in PAGE for name, value in ONE_THREAD.items())
