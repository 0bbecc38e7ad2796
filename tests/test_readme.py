"""README.md and the pages: every link leads somewhere, and every page can be found."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def links(page: Path) -> list[tuple[Path, str]]:
    """Files that it leads to, each with an anchor, which may be empty."""
    found = []
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if not target.startswith(("https://", "http://")):
            file, _, anchor = target.partition("#")
            found.append(((page.parent / file).resolve() if file else page.resolve(), anchor))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target.name}#{anchor}"


def test_every_page_is_found_from_the_readme() -> None:
    found = {target for target, _ in links(PAGES[0])}
    assert [page for page in DOCS if page.resolve() not in found] == []


def test_every_file_that_the_readme_names_is_there() -> None:
    named = re.findall(r"`((?:docs|examples|tests|dpkit)/[\w./-]*)`", prose(PAGES[0]))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_readme_names_every_example() -> None:
    shown = prose(PAGES[0])
    names = [path.name for path in (ROOT / "examples").iterdir() if not path.name.startswith("_")]
    assert [name for name in names if name not in shown] == []


def test_the_readme_gets_all_that_pytest_is_configured_for() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    dev = settings["project"]["optional-dependencies"]["dev"]
    needed = {each.partition(">")[0] for each in dev if each.startswith("pytest")}
    for page in (PAGES[0], ROOT / "examples" / "test_your_engine.py"):
        got = re.search(r"pip install (pytest[\w -]*)", page.read_text())
        assert got, page
        assert set(got[1].split()) == needed, page
