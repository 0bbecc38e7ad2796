"""The folder for sockets, while its program is there; what is after that: `test_head_dies`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from dpkit.errors import LaunchFailed
from dpkit.launch.folder import open_folder
from dpkit.testing.processes import descendants


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_this_users_alone_and_gone_after_the_block(parent: Path) -> None:
    with open_folder() as name:
        folder = Path(name)
        assert folder.parent == parent
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "socket").touch()
        assert len(descendants(os.getpid())) == 1
    assert not list(parent.iterdir())
    assert not descendants(os.getpid())


def test_where_paths_would_be_too_long_for_sockets_it_is_elsewhere(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parent / ("x" * 80)))
    with open_folder() as name:
        assert Path(name).parent == Path("/tmp")  # noqa: S108 - as the code has it


def test_without_a_process_to_remove_it_there_is_none(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(LaunchFailed, match="starting /nowhere/python failed"), open_folder():
        pass
    assert not list(parent.iterdir())


def test_where_none_can_be_made_no_process_stays(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parent / "none"))
    with pytest.raises(FileNotFoundError), open_folder():
        pass
    assert not descendants(os.getpid())
