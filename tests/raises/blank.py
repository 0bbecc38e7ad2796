"""Which test notices when the words of an error are gone: a plugin of pytest.

``-p tests.raises.blank``, with one of these in the environment:

DPKIT_TEXTS_RECORD=FILE: writes for each text, as JSON, the tests that come by it, the quickest
first.
DPKIT_TEXTS_BLANK=FILE: takes JSON like that, runs each test once for each of its texts, with that
text blanked, and writes FILE.read: of each text the first test that failed, which so reads it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.runner import runtestprotocol

from tests.raises.texts import Finder

if TYPE_CHECKING:
    from collections.abc import Iterator

BLANK = "…"

SLOW_S = 5.0
"""Tests that take longer are not worth trying."""


class _Ear:
    """Through which all texts go."""

    def __init__(self) -> None:
        self.test = ""  # that is running
        self.blanked = ""
        self.came_by: defaultdict[str, set[str]] = defaultdict(set)

    def heard(self, keys: tuple[str, ...], text: str) -> str:
        if self.test:
            for key in keys:
                self.came_by[key].add(self.test)
        return BLANK if self.blanked in keys else text


EAR = _Ear()
assert "dpkit" not in sys.modules, "too late: dpkit was imported before this plugin"
sys.meta_path.insert(0, Finder(EAR.heard))


class Recorder:
    """Notes who comes by what."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        # Hypothesis would look for the smallest example of each failure, and keep it for later.
        is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        EAR.test = "" if is_property else item.nodeid
        try:
            return (yield)
        finally:
            EAR.test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        seconds, found = self._seconds, {}
        for text, tests in sorted(EAR.came_by.items()):
            quick = [test for test in tests if seconds[test] < SLOW_S]
            found[text] = sorted(quick, key=seconds.__getitem__)
        self._file.write_text(json.dumps(found, indent=1))


class Blanker:
    """Runs a test once for each text that it may read."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._todo: defaultdict[str, list[str]] = defaultdict(list)
        for text, tests in json.loads(file.read_text()).items():
            for test in tests:
                self._todo[test].append(text)
        self._read: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._todo]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        function = vars(item).get("obj")

        def passes(blanked: str) -> bool:
            vars(item)["obj"] = function  # pytest-trio wraps it, once a run
            item._initrequest()  # type: ignore[attr-defined]
            EAR.blanked = blanked
            try:
                reports = runtestprotocol(item, log=False, nextitem=nextitem)
            finally:
                EAR.blanked = ""
            return all(report.passed for report in reports)

        texts = [text for text in self._todo[item.nodeid] if text not in self._read]
        if texts and passes(""):  # what fails as it is, or is skipped, reads nothing
            self._read |= {text: item.nodeid for text in texts if not passes(text)}
        return True

    def pytest_sessionfinish(self) -> None:
        Path(f"{self._file}.read").write_text(json.dumps(self._read))

    def pytest_unconfigure(self) -> None:
        """Tests that failed half-way may have left threads, for which Python would wait."""
        sys.stdout.flush()
        os._exit(0)


def pytest_configure(config: pytest.Config) -> None:
    for what, plugin in (("RECORD", Recorder), ("BLANK", Blanker)):
        if file := os.environ.get(f"DPKIT_TEXTS_{what}"):
            config.pluginmanager.register(plugin(Path(file)))
