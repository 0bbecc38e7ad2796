"""docs/models.md: its model runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dpkit.checkpoint.catalogue import FETCHABLE
from dpkit.engine.core import EngineCore
from dpkit.engine.limits import resolve_limits
from dpkit.messages import GenerateRequest

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def test_the_model_of_your_own_answers() -> None:
    [source] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    defined: dict[str, Any] = {}
    exec(source, defined)  # noqa: S102 - our own page
    model = defined["Shout"]()
    core = EngineCore(model, limits=resolve_limits(model.spec))
    prompt = tuple(model.tokenizer().encode("hush"))
    core.add(GenerateRequest(request_id="r", prompt_token_ids=prompt))
    said: list[int] = []
    while core.has_requests():
        for output in core.step():
            said += output.token_ids
    assert bytes(said[:-1]) == b"HUSH"
    assert said[-1] == 256


def test_every_model_that_can_be_fetched_is_on_the_page() -> None:
    for name, source in FETCHABLE.items():
        assert f"dpkit fetch {name}" in PAGE
        assert source.package in PAGE
        assert source.licence in PAGE
