"""Shared by the config tests: the example file with every key written out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLE = Path(__file__).parents[2] / "dpkit.toml"


@pytest.fixture(scope="session")
def full_example() -> Iterator[str]:
    """dpkit.toml with all its commented keys taken in, but for those that exclude others.

    `memory` excludes num_blocks, and engines of the example's kind do not join.
    """
    text = re.sub(r"^# (\[|[a-z_]+ = )", r"\1", EXAMPLE.read_text(), flags=re.MULTILINE)
    with pytest.MonkeyPatch.context() as patch:
        for name in re.findall(r'_key_env = "(\w+)"', text):
            patch.setenv(name, "k")
        yield re.sub(
            r"^(memory|handshake|host|rendezvous) = ", r"# \1 = ", text, flags=re.MULTILINE
        )
