"""Modules of yours that are imported by name, and what they must not do meanwhile.

A program whose file is imported once more, for a class or a function in it, runs once more unless
it asks for its `__name__`; if it starts processes, each of which imports it, that has no end. Must
stay cheap to import: every process that dpkit starts begins with it.
"""

from __future__ import annotations

import importlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_under_way: ContextVar[str | None] = ContextVar("dpkit module that is imported", default=None)


def import_named(module: str) -> ModuleType:
    """Import a module that a config, or an argument, names. Raises what the import raises."""
    token = _under_way.set(module)
    try:
        return importlib.import_module(module)
    finally:
        _under_way.reset(token)


def refuse_while_importing(doing: str) -> None:
    """Be called by what no module may do while it is imported by `import_named`.

    Also where it is done in a Trio (or asyncio) program of the module's own: contexts are handed
    on.

    Raises:
        RuntimeError: one is being imported.
    """
    if (module := _under_way.get()) is not None:
        raise RuntimeError(
            f"{doing} while {module} is being imported: dpkit imports the file for what is named "
            "there, which runs the program in it once more; put what starts it, such as "
            '`trio.run(main)`, under `if __name__ == "__main__":`'
        )
