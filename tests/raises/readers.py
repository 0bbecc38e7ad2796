"""The table of readers: for each text of an error, a test that fails when it is gone.

``python -m tests.raises.readers [PYTEST ARGUMENT]...`` finds readers for the texts that have none:
runs the tests, all or those named, to see who comes by a text, then tries them with it blanked.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.raises.texts import ROOT, SOURCES, texts_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TABLE = Path(__file__).with_name("readers.tsv")

TRIED = 15
"""Tests that are tried for a text, the quickest first."""


def all_texts() -> list[str]:
    """The key of every text of dpkit."""
    return [
        text.key for source in SOURCES for text in texts_of(source, ast.parse(source.read_text()))
    ]


def read_table() -> dict[str, str]:
    """Test by text."""
    return dict(line.split("\t") for line in TABLE.read_text().splitlines())


def write_table(readers: Mapping[str, str]) -> None:
    """Write it, in the order of the sources."""
    rows = (f"{text}\t{readers[text]}\n" for text in all_texts() if text in readers)
    TABLE.write_text("".join(rows))


def readers_among(candidates: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Blank each text and run its candidates until one fails."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "texts.json")
        file.write_text(json.dumps(candidates))
        # By their files: a test that is not there any more must not keep the others from running.
        files = sorted({test.partition("::")[0] for each in candidates.values() for test in each})
        _pytest({"DPKIT_TEXTS_BLANK": str(file)}, "-m", "", "--timeout=300", *files)
        found: dict[str, str] = json.loads(Path(f"{file}.read").read_text())
        return found


def candidates_of(texts: Sequence[str], arguments: Sequence[str]) -> dict[str, list[str]]:
    """Run tests, and see which of them come by these texts."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "came_by.json")
        _pytest({"DPKIT_TEXTS_RECORD": str(file)}, *arguments)
        came_by = json.loads(file.read_text())
    return {text: came_by.get(text, [])[:TRIED] for text in texts}


def _pytest(environment: Mapping[str, str], *arguments: str) -> None:
    # A test that runs often runs long, which is no reason for its stacks to be dumped.
    words = ["-q", "-p", "tests.raises.blank", "-o", "faulthandler_timeout=0", *arguments]
    command = [sys.executable, "-m", "pytest", *words]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False)


def main() -> None:
    """Bring the table up to date, and name what nobody reads."""
    table = read_table()
    if missing := [text for text in all_texts() if text not in table]:
        table |= readers_among(candidates_of(missing, sys.argv[1:]))
    write_table(table)
    for text in missing:
        print(table.get(text, "nobody reads"), text, sep="\t")


if __name__ == "__main__":
    main()
