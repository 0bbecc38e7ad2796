"""Fixtures of every test: nothing may leak, and what a test needs must be loudly missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from dpkit.testing.leaks import leak_check

if TYPE_CHECKING:
    from collections.abc import Iterator

settings.register_profile("patient", deadline=None)  # a busy machine is no failure
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Threads, descriptors and children are as before; blocks and counts are `check_idle`'s job."""
    with leak_check():
        yield
