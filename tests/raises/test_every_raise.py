"""Each error has a test that reads its words: one that fails when they are blanked.

Which one, says `readers.tsv`. That the table is whole is checked at once; that each test does read
its text, in the slow tier, with each text blanked in turn.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.raises.readers import all_texts, read_table, readers_among
from tests.raises.texts import ROOT, texts_of

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = "python -m tests.raises.readers"


def test_each_text_of_an_error_has_a_reader() -> None:
    missing = [text for text in all_texts() if text not in read_table()]
    how = f"write a test that reads it, which `{COMMAND}` then finds"
    assert not missing, f"{how}:\n" + "\n".join(missing)


def test_no_text_of_the_table_is_gone() -> None:
    gone = read_table().keys() - set(all_texts())
    assert not gone, f"these texts are not there any more; `{COMMAND}` takes them out: {gone}"


@cache
def functions_of(file: Path) -> frozenset[str]:
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    )


def test_each_reader_is_there() -> None:
    for text, test in read_table().items():
        file, *names = test.partition("[")[0].split("::")
        assert functions_of(ROOT / file).issuperset(names), f"{test} is to read {text}"


@pytest.mark.slow
def test_each_reader_notices_when_its_text_is_gone() -> None:
    table = read_table()
    read = readers_among({text: [test] for text, test in table.items()})
    assert read == table


def test_all_kinds_of_texts_are_seen() -> None:
    source = """
def f(name):
    one, other = f"no {name}", "what {}"
    if name:
        raise KeyError("a plain text" if name else f"{name} of another")
    error = ValueError([f"within {name:.2f} a list", other], name="word")
    raise helper(one)

class OwnError(Exception):
    def __init__(self):
        super().__init__("said by the class")
"""
    tree = ast.parse(source.replace("OwnError", "DpkitError"))
    words = [text.key.partition(": ")[2] for text in texts_of(ROOT / "m.py", tree)]
    assert words == [
        "a plain text",
        "{} of another",
        "within {} a list",
        "what {}",
        "no {}",
        "said by the class",
    ]
