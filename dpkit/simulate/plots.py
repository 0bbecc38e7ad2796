"""Line plots as SVG, drawn here: a report must be one file that opens anywhere, for years.

Knows points, scales and colours; nothing of simulations.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Point = tuple[float, float]

# Okabe and Ito's: told apart by those who see fewer colours, too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 40


@frozen(kw_only=True)
class Line:
    """One line of a plot."""

    name: str
    points: Sequence[Point]
    colour: str
    faint: bool = False
    """The edge of a band: thinner."""


@frozen(kw_only=True)
class Axis:
    """One axis, from its least to its greatest value."""

    title: str
    least: float
    most: float
    is_log: bool = False
    show: Callable[[float], str] = "{:g}".format

    def place(self, value: float) -> float:
        """Where a value is, from 0 to 1."""
        low, high = self._scaled(self.least), self._scaled(self.most)
        return (self._scaled(min(max(value, self.least), self.most)) - low) / ((high - low) or 1.0)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self.is_log else value

    def ticks(self) -> Iterator[float]:
        """Round values, few enough to be read."""
        if self.is_log:
            first = math.ceil(math.log10(self.least) - 1e-9)
            last = math.floor(math.log10(self.most) + 1e-9)
            yield from (10.0**power for power in range(first, last + 1))
            return
        rough = (self.most - self.least) / 5 or 1.0
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
        value = math.ceil(self.least / step) * step
        while value <= self.most + step / 1e6:
            yield value
            value += step


def plot(lines: Sequence[Line], x: Axis, y: Axis) -> str:
    """Draw lines with their axes as one ``<svg>`` element."""
    upright = f'transform="translate(12 {_up(0.5)}) rotate(-90)"'
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">',
        *_grid(x, y),
        *(_path(line, x, y) for line in lines),
        f'<text x="{_across(0.5)}" y="{HEIGHT - 4}" class="title">{escape(x.title)}</text>',
        f'<text {upright} class="title">{escape(y.title)}</text>',
        "</svg>",
    ]
    return "\n".join(parts)


def _across(share: float) -> str:
    return f"{_LEFT + share * (WIDTH - _LEFT - _RIGHT):.1f}"


def _up(share: float) -> str:
    return f"{HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM):.1f}"


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    for value in x.ticks():
        at, below = _across(x.place(value)), HEIGHT - _BOTTOM + 14
        yield f'<line x1="{at}" x2="{at}" y1="{_up(0)}" y2="{_up(1)}" class="grid"/>'
        yield f'<text x="{at}" y="{below}" class="tick">{escape(x.show(value))}</text>'
    for value in y.ticks():
        at = _up(y.place(value))
        yield f'<line x1="{_across(0)}" x2="{_across(1)}" y1="{at}" y2="{at}" class="grid"/>'
        yield f'<text x="{_LEFT - 6}" y="{at}" class="tick side">{escape(y.show(value))}</text>'


def _path(line: Line, x: Axis, y: Axis) -> str:
    points = " ".join(f"{_across(x.place(a))},{_up(y.place(b))}" for a, b in line.points)
    width = 0.8 if line.faint else 2
    return (
        f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="{width}">'
        f"<title>{escape(line.name)}</title></polyline>"
    )
