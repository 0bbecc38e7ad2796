"""Block hashes: exact, chained, salted, the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

from dpkit.hashing import block_hash, root_hash


def test_a_hash_depends_on_tokens_parent_and_salt() -> None:
    root = root_hash("")
    first = block_hash(root, [1, 2])
    hashes = {
        root,
        root_hash("tenant"),
        first,
        block_hash(root, [2, 1]),
        block_hash(root, [1, 2, 0]),
        block_hash(first, [1, 2]),
        block_hash(root_hash("tenant"), [1, 2]),
    }
    assert len(hashes) == 7
    assert block_hash(root_hash(""), (1, 2)) == first


def test_a_hash_is_the_same_in_every_process() -> None:
    code = "from dpkit.hashing import *; print(block_hash(root_hash('s'), [7, 2**31 - 1]).hex())"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == block_hash(root_hash("s"), [7, 2**31 - 1]).hex()


def test_any_text_is_a_salt() -> None:
    assert root_hash("\ud800") != root_hash("?")
