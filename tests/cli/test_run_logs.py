"""What `dpkit run` logs at which `log.level`; real processes, as logging is set up once in each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MODEL = """
from dpkit.engine.models.echo import EchoModel

class FailsOnce(EchoModel):
    lives = 0
    def execute(self, batch, cache):
        FailsOnce.lives += 1
        if FailsOnce.lives == 1:
            raise ZeroDivisionError("the GPU is on fire")
        return super().execute(batch, cache)
"""


def run(tmp_path: Path, level: str) -> str:
    """Standard error of a run whose first engine fails once; the prompt is answered elsewhere."""
    (tmp_path / "log_models.py").write_text(MODEL)
    (tmp_path / "dpkit.toml").write_text(
        '[[engines]]\nname = "e"\ncount = 2\nmodel = "log_models:FailsOnce"\n'
        '[engines.supervision]\nbackoff = "0s"\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "dpkit", "run", "--set", f"log.level={level}"],
        input="one\n",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=15,
    )
    assert done.returncode == 0
    assert "one [stop]" in done.stdout
    return done.stderr


@pytest.mark.parametrize("level", ["error", "warning"])
def test_an_engine_that_fails_is_an_error_with_its_traceback_and_its_class(
    tmp_path: Path, level: str
) -> None:
    err = run(tmp_path, level)
    assert "ERROR dpkit.nursery.roster: engine e-" in err
    assert "(log_models:FailsOnce) failed in its life 0: ZeroDivisionError: the GPU is on" in err
    assert 'log_models.py", line 9, in execute' in err
    assert "INFO" not in err


def test_info_tells_of_engines_that_come_and_go(tmp_path: Path) -> None:
    err = run(tmp_path, "info")
    for told in ("engine ready e-0: 4096 blocks of 16 tokens, at most 64 seq", "engine lost e-"):
        assert told in err
    assert "DEBUG" not in err


def test_debug_tells_where_requests_went_and_how_they_ended(tmp_path: Path) -> None:
    err = run(tmp_path, "debug")
    assert "request dpkit-0-1 goes to e-" in err
    assert " by kv_pressure with score 0: 0 in flight, 0 waiting, " in err
    assert "request retried dpkit-0-1" in err
    assert "request ended dpkit-0-1 e-" in err
