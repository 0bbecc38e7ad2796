"""What every test of engines in processes needs: models that can tell where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.processes.models import FLAGS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder by which models in different processes know of each other."""
    folder = tmp_path / "flags"
    folder.mkdir()
    monkeypatch.setenv(FLAGS, str(folder))
    return folder
