"""Fixtures of every test: nothing may leak, and what a test needs must be loudly missing."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from dpkit.checkpoint.locate import fetched_path
from dpkit.testing.leaks import leak_check

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

settings.register_profile("patient", deadline=None)  # a busy machine is no failure
settings.load_profile("patient")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `make test &` in a script: no Ctrl-C then
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Threads, descriptors and children are as before; blocks and counts are `check_idle`'s job."""
    with leak_check():
        yield


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The fetched demo model's directory; skips loudly where it is not there."""
    path = fetched_path("smollm2-135m")
    if not path.is_dir():
        pytest.skip(f"THE DEMO MODEL IS NOT IN {path.parent}: `dpkit fetch smollm2-135m` gets it")
    return path
