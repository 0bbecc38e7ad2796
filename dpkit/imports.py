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

INSTALL_TORCH = (
    "`pip install -c constraints.txt 'dpkit[torch]'` brings it, with the file from dpkit's "
    "sources, which pins torch: pip alone may choose a build of several GB"
)
"""What to try where the extra `torch` is missing."""

_under_way: ContextVar[str | None] = ContextVar("dpkit module that is imported", default=None)


def import_named(module: str) -> ModuleType:
    """Import a module that a config, or an argument, names. Raises what the import raises."""
    token = _under_way.set(module)
    try:
        return importlib.import_module(module)
    finally:
        _under_way.reset(token)


class NotThere(LookupError):  # noqa: N818 - reads as what is wrong
    """A module, or what is named in it, is not there; the message says what to try."""


def find_named(module: str, path: str) -> object:
    """What a module has by a name, which may be that of a class in a class: ``Outer.Inner``.

    Raises:
        NotThere: there is no such module, or nothing of that name. Whatever else importing raises.
    """
    try:
        found: object = import_named(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # not the module itself, but one that it imports
        raise NotThere(f"{error}; is its directory on PYTHONPATH?") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            if error.name != name:
                raise  # of the module's own code
            raise NotThere(f"module {module!r} has no {path!r}{_hint(name, found)}") from error
    return found


def _hint(name: str, place: object) -> str:
    import difflib  # noqa: PLC0415 - only the mistaken pay for it

    classes = [
        each for each, value in getattr(place, "__dict__", {}).items() if isinstance(value, type)
    ]
    near = difflib.get_close_matches(name, classes, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


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
