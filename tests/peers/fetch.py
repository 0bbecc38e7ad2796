"""Fetch the real frontend that tests/peers talk to: one program out of vLLM's wheel.

It goes into the cache; of the wheel, which is large, nothing else is kept.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dpkit.checkpoint.locate import cache_folder
from dpkit.wire.structs import VLLM_VERSION

MEMBER = "vllm/vllm-rs"


def cached_path() -> Path:
    """Where the program is once it is fetched."""
    return cache_folder() / "peers" / f"vllm-{VLLM_VERSION}" / "vllm-rs"


def fetch() -> Path:
    """Download the wheel, unpack the program, keep nothing else."""
    path = cached_path()
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place: a rename is atomic within one file system only.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--disable-pip-version-check", "--no-cache-dir", "--only-binary=:all:"),
                *("--dest", folder, f"vllm=={VLLM_VERSION}"),
            ],
            check=True,
        )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(MEMBER, folder))
        unpacked.chmod(0o755)
        unpacked.rename(path)
    return path


if __name__ == "__main__":
    print(fetch())
