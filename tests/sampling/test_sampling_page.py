"""The page on sampling lists every field with its default."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from attrs import fields

from dpkit.sampling import SamplingParams

PAGE = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()


def test_every_field_is_listed_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", PAGE, flags=re.MULTILINE)
    listed = {name: ast.literal_eval(default) for name, default in rows}
    assert listed == {attribute.name: attribute.default for attribute in fields(SamplingParams)}
