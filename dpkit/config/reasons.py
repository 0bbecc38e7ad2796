"""The reason for a key's default: kept with the key, told by docs/config.md and the JSON Schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def why(reason: str) -> Mapping[str, str]:
    """Metadata of a key that holds its reason."""
    return {"why": reason}
