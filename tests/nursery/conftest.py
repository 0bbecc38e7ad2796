"""Configs small enough to reason about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dpkit.config.load import parse_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.config.schema import Config


def _make_config(model: str = "echo", *overrides: str, count: int = 2) -> Config:
    """One group of engines; its tables may be named without ``engines.0``."""
    overrides = tuple(
        f"engines.0.{override}"
        if override.startswith(("kv.", "scheduler.", "supervision."))
        else override
        for override in overrides
    )
    return parse_config(f'[[engines]]\nmodel = "{model}"\ncount = {count}\n', overrides=overrides)


@pytest.fixture
def make_config() -> Callable[..., Config]:
    return _make_config
