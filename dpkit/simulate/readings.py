"""Files of measurements: tables of steps, and logs of real runs; and a preset's own file.

Reads CSV, plain or gzipped, and tells the two kinds apart by their header. Knows nothing of how
constants are fitted to them.
"""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from attrs import fields

from dpkit.costmodel import StepCost
from dpkit.errors import ConfigError
from dpkit.simulate.fit import Step
from dpkit.simulate.fit_log import Served
from dpkit.traces import read_lines, read_number, read_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dpkit.simulate.fit import Fit

T = TypeVar("T")

_STEPS = "prefill_tokens,prefill_context,decode_seqs,kv_tokens,step_ms"
_RUN = "arrival_s,prompt_tokens,output_tokens,scheduled_s,first_token_s,last_token_s"


def read_measured(path: str | Path) -> list[Step] | list[Served]:
    """Read what was measured.

    Raises:
        ConfigError: it cannot be read, is of neither kind, or a line is none.
    """
    path = Path(path)
    lines = read_lines(path)
    header = set(lines[0].split(","))
    if header >= set(_STEPS.split(",")):
        return _rows(path, lines, _step)
    if header >= set(_RUN.split(",")):
        return _rows(path, lines, _served)
    problem = (
        f"{path}:1: nothing to fit here: expected a table of steps, with the columns {_STEPS}, or "
        f"the log of a run, with {_RUN}"
    )
    raise ConfigError([problem])


def _rows(path: Path, lines: list[str], read: Callable[[Mapping[str, str]], T]) -> list[T]:
    found = []
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            found.append(read(row))
        except ValueError as error:
            problem = f"{path}:{number}: this was not measured: {error}"
            raise ConfigError([problem]) from error
    if not found:
        raise ConfigError(
            [f"{path}: nothing was measured: there is a header, and no line after it"]
        )
    return found


def _step(row: Mapping[str, str]) -> Step:
    milliseconds = read_number(row, "step_ms")
    if not 0 < milliseconds < math.inf:
        raise ValueError(f"step_ms must be more than 0, not {milliseconds:g}")
    return Step(
        prefill_tokens=read_whole(row, "prefill_tokens"),
        prefill_context=read_number(row, "prefill_context"),
        decodes=read_whole(row, "decode_seqs"),
        kv_tokens=read_number(row, "kv_tokens"),
        seconds=milliseconds / 1e3,
    )


def _served(row: Mapping[str, str]) -> Served:
    return Served(
        prompt_tokens=read_whole(row, "prompt_tokens"),
        output_tokens=read_whole(row, "output_tokens"),
        scheduled_s=read_number(row, "scheduled_s"),
        first_s=read_number(row, "first_token_s"),
        last_s=read_number(row, "last_token_s"),
    )


def preset_text(fit: Fit, *, source: str, kv_tokens: int | None = None) -> str:
    """A fit as a file that ``model = "cost:FILE.toml"`` reads.

    Args:
        fit: The constants.
        source: What they were fitted to, in words.
        kv_tokens: What the card holds; None: the config must say.
    """
    error = f"{fit.mean_error:.1%} mean error, {fit.p95_error:.1%} at the 95th percentile"
    # A string of JSON is one of TOML, whatever the file is called.
    said = json.dumps(f"{source}: {fit.of}, {error}", ensure_ascii=False)
    lines = [f"measured_by = {said}"]
    if kv_tokens is not None:
        lines.append(f"kv_tokens = {kv_tokens}")
    for attribute in fields(StepCost):
        value = getattr(fit.cost, attribute.name)
        if value == attribute.default and isinstance(attribute.default, float | tuple):
            continue
        shown = list(value) if isinstance(value, tuple) else float(f"{value:.4g}")
        lines.append(f"{attribute.name} = {shown}")
    return "\n".join(lines) + "\n"
