"""Where log records of a command go, how many and in what form: to standard error, by `[log]`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import click

from dpkit.logs import JsonFormatter, TextFormatter, name_subject

if TYPE_CHECKING:
    from collections.abc import Callable

log_format = click.option(
    "--log-format",
    type=click.Choice(("text", "json")),
    help="Form of log records; else as the file says under [log].",
)
"""The option, for commands that log while they run."""

_FORMATTERS: dict[str, Callable[[], logging.Formatter]] = {
    "text": TextFormatter,
    "json": JsonFormatter,
}


def set_up(level: str, form: str = "text") -> None:
    """Log what dpkit says from `level` on; of other libraries, warnings. May be called again.

    Args:
        level: As `log.level`.
        form: ``text`` or ``json``, of whoever logs.
    """
    logging.getLogger("dpkit").setLevel(level.upper())
    root = logging.getLogger()
    ours = [each for each in root.handlers if name_subject in each.filters]
    if not ours and not root.handlers:  # else a program around us has set up its own
        ours = [logging.StreamHandler()]
        ours[0].addFilter(name_subject)
        root.addHandler(ours[0])
    for handler in ours:
        handler.setFormatter(_FORMATTERS[form]())
