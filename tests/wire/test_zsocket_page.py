"""docs/wire.md: its ZeroMQ example runs as it stands there, and what it says of limits is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from dpkit.wire import handshake, zsocket

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "wire.md").read_text()
SECTION = PAGE.partition("## ZeroMQ for Trio")[2]


def test_the_example_runs() -> None:
    [source, *_] = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("[b'hello', b'world']\n", "")


def test_its_numbers_are_the_modules() -> None:
    assert f"after {zsocket.BURST} messages at the latest" in SECTION
    assert f"{zsocket.MAX_MESSAGE_BYTES // 2**20} MiB for one frame" in SECTION
    assert f"{handshake.INIT_PATIENCE:.0f} s for INIT" in SECTION
    assert f"{handshake.COORDINATOR_PATIENCE:.0f} s for the coordinator" in SECTION
    assert f"READY lingers up to {handshake.HANDSHAKE_LINGER_MS // 1000} s" in SECTION
    assert f"outputs up to {handshake.OUTPUT_LINGER_MS // 1000} s" in SECTION
