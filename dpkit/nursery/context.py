"""`asynccontextmanager` for resources whose clean-up Ctrl-C must not tear.

A KI-protected generator is not enough: the lines of `contextlib` that enter and leave it are not
protected, and a KeyboardInterrupt there would leave the block without the generator's other half.
"""

from __future__ import annotations

import functools
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

P = ParamSpec("P")
T = TypeVar("T")


class _Protected(AbstractAsyncContextManager[T], Generic[T]):
    def __init__(self, manager: AbstractAsyncContextManager[T]) -> None:
        self._manager = manager

    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> T:
        return await self._manager.__aenter__()

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._manager.__aexit__(exc_type, exc, traceback)


def protected_context(
    function: Callable[P, AsyncIterator[T]],
) -> Callable[P, AbstractAsyncContextManager[T]]:
    """Make a context manager of an async generator, KI-protected but for its block.

    Resource handling:
        As for `contextlib.asynccontextmanager`. Trio delivers a Ctrl-C that came meanwhile at the
        next checkpoint of unprotected code.
    """
    manager = asynccontextmanager(trio.lowlevel.enable_ki_protection(function))

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
        return _Protected(manager(*args, **kwargs))

    return make
