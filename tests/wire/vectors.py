"""The golden vectors: messages that vLLM 0.33.0 and its Rust frontend wrote, or took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attrs import frozen

_FILE = json.loads(Path(__file__).with_name("vllm-wire-vectors.json").read_text())


@frozen(kw_only=True)
class Vector:
    """One message; `decoded` is its payload in JSON form."""

    name: str
    direction: str
    frames: tuple[bytes, ...]
    decoded: Any


VECTORS = {
    vector["name"]: Vector(
        name=vector["name"],
        direction=vector["direction"],
        frames=tuple(map(bytes.fromhex, vector["frames_hex"])),
        decoded=vector["decoded"],
    )
    for vector in _FILE["vectors"]
}
VERSION = _FILE["vllm_version"]


def named(*beginnings: str) -> list[str]:
    """Names of the vectors that begin so."""
    return [name for name in VECTORS if name.startswith(beginnings)]
