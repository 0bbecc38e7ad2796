"""Calls into models that others wrote: whatever comes out is an `Exception`.

Only those may end an engine. What else Python can raise (SystemExit, a cancellation of another
library's, a group of such) would end the program, or a scope that has nothing to do with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from dpkit.errors import ModelFailed, describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpkit.abc import ModelFace

T = TypeVar("T")


def name_of(model: ModelFace, method: str) -> str:
    """``pkg.mod.Class.method()``, as messages have it."""
    return f"{type(model).__module__}.{type(model).__qualname__}.{method}()"


def call(model: ModelFace, method: str, function: Callable[[], T]) -> T:
    """Call `function`, which is `method` of `model`, and return its result.

    Raises:
        ModelFailed: it raised what is no `Exception`; that is the cause.
        Exception: what it raised, unchanged.
    """
    try:
        return function()
    except Exception:
        raise
    except BaseException as error:
        raise ModelFailed(f"{name_of(model, method)} raised {describe(error)}") from error
