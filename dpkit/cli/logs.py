"""Where log records of `dpkit run` go, and how many of them: to standard error, by `log.level`."""

from __future__ import annotations

import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up(level: str) -> None:
    """Log what dpkit says from `level` on; of other libraries, warnings. May be called again."""
    logging.basicConfig(format=_FORMAT)
    logging.getLogger("dpkit").setLevel(level.upper())
