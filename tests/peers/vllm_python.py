"""Make an environment of vLLM's own Python files: engines and clients for tests to talk to.

It goes into the cache, apart from dpkit's: 2 GB, of which nothing is compiled for a GPU. As a
program it makes the environment, which takes minutes.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.peers.fetch import cached_path, open_wheel

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

SOURCES = cached_path().parent / "python"
"""Where vLLM's files are."""
INTERPRETER = cached_path().parent / "venv" / "bin" / "python"
"""What has all that they need."""

_MADE = SOURCES / ".made"


def is_made() -> bool:
    """Whether it is there, whole."""
    return _MADE.exists()


NEEDED = pytest.mark.skipif(
    not is_made(),
    reason=f"VLLM'S PYTHON IS NOT IN {SOURCES}: `python -m tests.peers.vllm_python` gets it",
)
"""Mark of a test that needs it: it is skipped, loudly, where it is not."""


def command(script: str, *args: str) -> list[str]:
    """Run one of the scripts here in it."""
    return [str(INTERPRETER), str(HERE / script), *args]


def environment() -> dict[str, str]:
    """What the processes in it are told."""
    return {
        "PYTHONPATH": f"{SOURCES}:{HERE}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # else each engine imports all that anew
        "OMP_NUM_THREADS": "1",
    }


def make() -> None:
    """Unpack the files, and install what they need."""
    if is_made():
        return
    with open_wheel() as wheel, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith((".py", ".json")) or ".dist-info/" in name:
                archive.extract(name, SOURCES)
    venv = INTERPRETER.parents[1]
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    subprocess.run(
        [
            *(str(INTERPRETER), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("-c", str(ROOT / "constraints.txt"), "-r", str(HERE / "vllm_requirements.txt")),
        ],
        check=True,
    )
    _MADE.touch()


if __name__ == "__main__":
    make()
    print(SOURCES)
