"""The scripts of `benchmarks/` keep up with what they measure: each still finds all it uses.

What they measure takes minutes, and has no place here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "benchmarks"

LOAD_ALL = """
import runpy, sys
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="loaded")
"""


def test_every_benchmark_finds_all_that_it_imports() -> None:
    scripts = sorted(map(str, SCRIPTS.glob("bench_*.py")))
    assert scripts
    path = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})"
    done = subprocess.run(
        [sys.executable, "-c", path + LOAD_ALL, *scripts],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_needs_measurements_that_are_not_there_is_left_out() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_life.py")], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("left out: bench_life.py")
