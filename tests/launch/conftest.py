"""What workers do in these tests lies beside them, where the head's sys.path finds it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@pytest.fixture(autouse=True)
def targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


async def _until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110 - other processes know no events
        await trio.sleep(0.005)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Wait for what another process does; the limit is the test's own."""
    return _until
