"""An error has room for one line of what a process said last: the one that tells most."""

from __future__ import annotations

import faulthandler
import sys
import tempfile

import pytest

from dpkit.launch.gist import gist

CRASH = f"""begins
Fatal Python error: Segmentation fault

Thread 0x3 (most recent call first):
  File "p.py", line 1 in newer

Current thread 0x1 (most recent call first):
  File "{tempfile.__file__}", line 1 in f
  File "m.py", line 18 in execute
  File "n.py", line 9 in run

Thread 0x2 (most recent call first):
  File "o.py", line 2 in other

Extension modules: numpy (total: 1)"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("", ""),
        ("one\ntwo\n\nthree", "two / three"),
        (
            'Traceback (most recent call last):\n  File "m.py", line 3, in f\nValueError: no\nnote',
            "ValueError: no / note",
        ),
        (
            CRASH,
            'Fatal Python error: Segmentation fault / File "m.py", line 18 in execute',
        ),
        ("Fatal Python error: Aborted", "Fatal Python error: Aborted"),
    ],
)
def test_the_gist_of_last_lines(said: str, told: str) -> None:
    assert gist(said.split("\n")) == told


def test_the_frames_are_where_this_python_writes_them() -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        lines = file.read().split("\n")
    ours = sys._getframe().f_code.co_filename
    told = gist(["Fatal Python error: Aborted", *lines])
    assert told.startswith(f'Fatal Python error: Aborted / File "{ours}", line ')
