"""The page on balancing does not lie: its example runs, its table names what exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from dpkit.names import PolicyName

if TYPE_CHECKING:
    import pytest

    from tests.balancer.conftest import MakeClient

PAGE = (Path(__file__).parents[2] / "docs" / "balancing.md").read_text()


def test_the_example_policy_runs(
    make_client: MakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "apart.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    client = make_client(3, "apart:LongPromptsApart")
    assert [client.place(tokens=tokens).index for tokens in (5, 2000, 5, 5, 999, 1000)] == [
        0, 2, 1, 0, 1, 2,
    ]  # fmt: skip
    assert str(client.place().reason).startswith("apart:LongPromptsApart with score 2: 2 in flight")
    assert make_client(1, "apart:LongPromptsApart").place().index == 0


def test_the_table_lists_every_policy() -> None:
    assert re.findall(r"^\| `(\w+)`", PAGE, flags=re.MULTILINE) == list(PolicyName)
