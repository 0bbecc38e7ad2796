"""A bug of dpkit's in an engine is told as one, whatever Python makes of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio

from dpkit.engine.core import EngineCore
from dpkit.errors import ClusterFailed, InternalError
from tests.nursery.lab import Lab


async def _fail() -> InternalError:
    with pytest.raises(ClusterFailed) as caught:
        async with Lab().open() as cluster, cluster.client.generate("hello"):
            await trio.sleep_forever()
    assert isinstance(caught.value.__cause__, InternalError)
    return caught.value.__cause__


async def test_what_breaks_down_is_a_bug_of_ours(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def schedule(_: EngineCore) -> Any:
        raise ZeroDivisionError("by a bug")

    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(EngineCore, "schedule", schedule)
    bug = await _fail()
    assert str(bug) == f"engine {bug.engine} broke down: ZeroDivisionError: by a bug"
    assert isinstance(bug.__cause__, ZeroDivisionError)


async def test_requests_that_nobody_runs_are_a_bug_of_ours(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(EngineCore, "schedule", lambda _: None)
    bug = await _fail()
    assert str(bug) == f"engine {bug.engine} has requests it can neither run nor refuse"
