"""Tests of the kit's tools are not the one whose failure is being replayed."""

from __future__ import annotations

import pytest

from dpkit.testing import explorer, failing, sweep


@pytest.fixture(autouse=True)
def no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in (explorer, failing, sweep):
        monkeypatch.delenv(tool.REPLAY, raising=False)
