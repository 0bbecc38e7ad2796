"""Names for cached blocks: one digest stands for a block's tokens and for everything before them.

A block's hash covers its parent's hash and its own token ids, so a prompt is hashed once, block by
block, and never as a whole. The salt is in the root and so in the whole chain: requests with
different salts have no block in common.

BLAKE2b because a prefix hit must be exact: the cache compares digests, not tokens, and a collision
would show one user's context to another. With 256 bits nobody finds one, by chance or on purpose
(vLLM's first cache used Python's `hash` and got CVE-2025-25183 for it). It is also the fastest such
function in the standard library, and unlike `hash` the same in every process, which lets engines
compare caches.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_DIGEST_BYTES = 32


def root_hash(salt: str) -> bytes:
    """Parent of the first block of every prompt with this salt."""
    return hashlib.blake2b(
        salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES
    ).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of the block that holds `token_ids` after the block named `parent`.

    Token ids are packed as 32-bit little-endian numbers, the same on every machine.
    """
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.blake2b(parent + packed, digest_size=_DIGEST_BYTES).digest()
