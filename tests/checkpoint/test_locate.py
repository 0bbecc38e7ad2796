"""From a config's `model` to files, or to the command that gets them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpkit.checkpoint.locate import cache_folder, fetched_path, locate
from dpkit.errors import ModelNotFound


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory and an empty cache."""
    monkeypatch.setenv("DPKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_directory_is_found_by_its_path(here: Path) -> None:
    (here / "models" / "mine").mkdir(parents=True)
    assert locate("models/mine") == Path("models/mine")
    assert locate(str(here / "models" / "mine")) == here / "models" / "mine"


def test_a_gguf_file_is_found_by_its_path(here: Path) -> None:
    (here / "mine.gguf").touch()
    assert locate("mine.gguf") == Path("mine.gguf")


def test_a_fetched_model_is_found_by_its_name() -> None:
    fetched_path("smollm2-135m").mkdir(parents=True)
    assert locate("smollm2-135m") == fetched_path("smollm2-135m")


def test_a_folder_in_the_way_does_not_change_what_a_fetched_name_runs(here: Path) -> None:
    fetched_path("smollm2-135m").mkdir(parents=True)
    (here / "smollm2-135m").mkdir()
    assert locate("smollm2-135m") == fetched_path("smollm2-135m")
    assert locate("./smollm2-135m") == Path("smollm2-135m")


def test_a_bare_name_may_be_a_directory_here(here: Path) -> None:
    (here / "mine").mkdir()
    assert locate("mine") == Path("mine")
    assert locate(".") == Path()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135m", r"not in .*cache; `dpkit fetch smollm2-135m` gets it"),
        ("smollm-135", r"did you mean 'smollm2-135m'\? `dpkit fetch smollm2-135m` gets it"),
        ("llama9", r"nor a name that can be fetched \(smollm2-135m\); `dpkit fetch smollm2-135m`"),
        ("ecko", r"no model 'ecko': neither .*; did you mean 'echo'\?$"),
        ("models/smollm2-135m.gguf", r"no model at models/smollm2-135m.gguf; `dpkit fetch smollm2"),
    ],
)
def test_a_missing_model_names_the_command_that_gets_it(name: str, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        locate(name)


def test_the_cache_follows_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == Path.cwd() / "cache"
    monkeypatch.delenv("DPKIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/dpkit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/dpkit")
