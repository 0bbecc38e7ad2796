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
    return f"{caught.value}\n".replace(str(BAD), "{here}")  # paths of models are absolute


def test_there_are_enough_golden_files() -> None:
    assert len(NAMES) >= 40
    assert sorted(path.stem for path in BAD.glob("*.expected")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_bad_file_says_exactly_what_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD)
    expected = (BAD / f"{name}.expected").read_text()
    assert _complaint(name) == expected
    assert _complaint(name) == expected, "the same file twice, the same words"


@pytest.mark.parametrize("name", NAMES)
def test_problems_come_in_file_order(name: str) -> None:
    places: dict[str, list[tuple[int, int]]] = {}
    for line in (BAD / f"{name}.expected").read_text().splitlines():
        filename, row, column, _ = line.split(":", 3)
        places.setdefault(filename, []).append((int(row), int(column)))
    assert all(found == sorted(found) for found in places.values())
