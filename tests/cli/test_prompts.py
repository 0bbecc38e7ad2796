"""Standard input that cannot be read is told, and nothing hangs for it."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from dpkit.cli.prompts import Prompt, read_prompts
from dpkit.errors import DpkitError

if TYPE_CHECKING:
    from pathlib import Path


async def take(prompt: Prompt) -> None:
    pytest.fail(f"there is no prompt, and this came: {prompt}")


async def test_an_input_that_is_closed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DpkitError, match="standard input is closed; give --prompt instead"):
        await read_prompts(take)


async def test_an_input_that_cannot_be_read_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)  # a directory, as by `dpkit run file < folder`
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: descriptor))
    try:
        with pytest.raises(DpkitError, match="from standard input: Is a directory"):
            await read_prompts(take)
    finally:
        os.close(descriptor)
