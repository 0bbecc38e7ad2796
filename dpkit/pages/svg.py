"""Small plots as SVG, drawn from numbers: axes with round ticks, lines, bars, points, marks.

Colours are classes (`s0`, `s1`, …), which `dpkit.pages.page` defines for light and dark. Knows
nothing of what is plotted.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WIDTH, HEIGHT = 520, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 22, 30, 40
_TICKS = 5
_NAMES = 8  # side by side
_KEY_ROW = 18

SERIES = 8
"""Colours that can be told apart; further series begin anew."""


def short(value: float) -> str:
    """A tick: 1.5k rather than 1500."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


@frozen
class Axis:
    """From one value to a higher one; what is beyond is drawn at the end."""

    label: str
    low: float
    high: float
    is_log: bool = False
    names: tuple[str, ...] = ()
    """Of the values 0, 1, …, which then are no numbers."""
    show: Callable[[float], str] = short
    """What stands at a tick that has no name."""

    def share(self, value: float) -> float:
        """Where a value is: 0 at `low`, 1 at `high`."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            return math.log(value / self.low) / (math.log(self.high / self.low) or 1.0)
        return (value - self.low) / ((self.high - self.low) or 1.0)

    def ticks(self) -> list[float]:
        """Round values within, or those that have names, if they are few."""
        if self.names:
            every = math.ceil(len(self.names) / _NAMES)
            return [float(each) for each in range(0, len(self.names), every)]
        decades = _decades(self.low, self.high) if self.is_log else []
        if len(decades) > 1:
            return decades
        step = round_step((self.high - self.low) / _TICKS or 1.0)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [each * step for each in range(first, last + 1)]

    def named(self, tick: float) -> str:
        """What stands at a tick."""
        return self.names[round(tick)] if self.names else self.show(tick)


def round_step(rough: float) -> float:
    """The next of 1, 2, 5, 10, … times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= rough * (1 - 1e-9))


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    every = (factor * 10.0**power for power in range(first, last + 1) for factor in factors)
    return [tick for tick in every if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


@define(eq=False)
class Plot:
    """One plot; add to it, then `render`."""

    title: str
    x: Axis
    y: Axis
    _marks: list[str] = field(factory=list, init=False)
    _legend: list[tuple[str, int]] = field(factory=list, init=False)

    def line(
        self,
        points: Sequence[tuple[float, float]],
        series: int,
        name: str,
        *,
        is_faint: bool = False,
    ) -> None:
        """A line through points; a faint one is the edge of another's band, and not in the key."""
        path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
        faint = " faint" if is_faint else ""
        self._marks.append(
            f'<polyline class="line{faint} {_colour(series)}" points="{path}">'
            f"<title>{escape(name)}</title></polyline>"
        )
        if not is_faint:
            self._legend.append((name, series))

    def dots(self, points: Sequence[tuple[float, float]], series: int, name: str) -> None:
        """A dot for each point."""
        dots = "".join(f"M{self._x(x):.1f} {self._y(y):.1f}h0" for x, y in points)
        self._marks.append(f'<path class="dot {_colour(series)}" d="{dots}"/>')
        if name:
            self._legend.append((name, series))

    def bars(self, bars: Sequence[tuple[float, float, float]], series: int) -> None:
        """Bars from `low` to `high` on the x axis, each with its height."""
        for low, high, height in bars:
            left, top = self._x(low), self._y(height)
            width = max(0.5, self._x(high) - left - 1)
            self._marks.append(
                f'<rect class="bar {_colour(series)}" x="{left:.1f}" y="{top:.1f}" '
                f'width="{width:.1f}" height="{max(0.0, self._y(self.y.low) - top):.1f}">'
                f"<title>{short(low)} to {short(high)}: {short(height)}</title></rect>"
            )

    def rule(self, value: float, name: str, row: int) -> None:
        """A vertical line at a value, named at the top; names in rows do not cover each other."""
        x = self._x(value)
        anchor = "end" if x > WIDTH * 0.75 else "start"
        shift = -4 if anchor == "end" else 4
        self._marks.append(
            f'<path class="rule" d="M{x:.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>'
            f'<text class="name" x="{x + shift:.1f}" y="{_TOP + 12 + 13 * row}" '
            f'text-anchor="{anchor}">{escape(name)}</text>'
        )

    def render(self) -> str:
        """As an SVG element."""
        key, rows = self._key()
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT + rows * _KEY_ROW}" role="img" '
            f'aria-label="{escape(self.title)}">'
            f'<text class="title" x="{_LEFT}" y="16">{escape(self.title)}</text>'
            f"{''.join(self._axes())}{''.join(self._marks)}{key}</svg>"
        )

    def _x(self, value: float) -> float:
        return _LEFT + self.x.share(value) * (WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - self.y.share(value) * (HEIGHT - _TOP - _BOTTOM)

    def _axes(self) -> Iterator[str]:
        for tick in self.y.ticks():
            y = self._y(tick)
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>'
            yield f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            yield f"{escape(self.y.named(tick))}</text>"
        for tick in self.x.ticks():
            x, y = self._x(tick), HEIGHT - _BOTTOM
            yield f'<path class="axis" d="M{x:.1f} {y}v4"/>'
            yield f'<text class="tick" x="{x:.1f}" y="{y + 16}" text-anchor="middle">'
            yield f"{escape(self.x.named(tick))}</text>"
        yield f'<path class="axis" d="M{_LEFT} {HEIGHT - _BOTTOM}H{WIDTH - _RIGHT}"/>'
        across, up = (_LEFT + WIDTH - _RIGHT) / 2, (_TOP + HEIGHT - _BOTTOM) / 2
        yield f'<text class="label" x="{across}" y="{HEIGHT - 6}" text-anchor="middle">'
        yield f"{escape(self.x.label)}</text>"
        yield f'<text class="label" transform="translate(13 {up}) rotate(-90)" '
        yield f'text-anchor="middle">{escape(self.y.label)}</text>'

    def _key(self) -> tuple[str, int]:
        """Names of the series, if there are several, and how many rows they take below."""
        if len(self._legend) < 2:
            return "", 0
        parts, x, row = [], _LEFT, 0
        for name, series in self._legend:
            width = 26 + 7 * len(name)
            if x > _LEFT and x + width > WIDTH:
                x, row = _LEFT, row + 1
            y = HEIGHT + row * _KEY_ROW + 6
            parts.append(
                f'<path class="dot {_colour(series)}" d="M{x + 4} {y}h0"/>'
                f'<text class="label" x="{x + 12}" y="{y + 4}">{escape(name)}</text>'
            )
            x += width
        return "".join(parts), row + 1


def _colour(series: int) -> str:
    return f"s{series % SERIES}"
