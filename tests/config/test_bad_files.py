"""Golden files: what each wrong file says, letter by letter, and that it says it every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpkit.config.load import load_config
from dpkit.errors import ConfigError

BAD = Path(__file__).parent / "bad"
NAMES = sorted(path.stem for path in BAD.glob("*.toml"))


def _complaint(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(f"{name}.toml")
    return f"{caught.value}\n"


def test_there_are_enough_golden_files() -> None:
    assert len(NAMES) >= 20
    assert sorted(path.stem for path in BAD.glob("*.expected")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_bad_file_says_exactly_what_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD)
    expected = (BAD / f"{name}.expected").read_text()
    assert _complaint(name) == expected
    assert _complaint(name) == expected, "the same file twice, the same words"


@pytest.mark.parametrize("name", NAMES)
def test_problems_come_in_file_order(name: str) -> None:
    expected = (BAD / f"{name}.expected").read_text().splitlines()
    places = [tuple(map(int, line.split(":")[1:3])) for line in expected]
    assert places == sorted(places)
