"""Plots: round ticks, nothing outside, a key that has room, colours that come again."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from dpkit.pages.page import page, plots_side_by_side
from dpkit.pages.svg import SERIES, WIDTH, Axis, Plot, round_step, short


@pytest.mark.parametrize(
    ("rough", "step"), [(0.7, 1.0), (1.0, 1.0), (1.1, 2.0), (3.0, 5.0), (6.0, 10.0), (130.0, 200.0)]
)
def test_ticks_are_round(rough: float, step: float) -> None:
    assert round_step(rough) == pytest.approx(step)


def test_axes_name_what_is_there() -> None:
    assert Axis("s", 0, 10).ticks() == pytest.approx([0, 2, 4, 6, 8, 10])
    assert Axis("ms", 1, 1000, is_log=True).ticks() == pytest.approx(
        [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    )
    assert Axis("ms", 1, 1e6, is_log=True).ticks() == pytest.approx([10.0**e for e in range(7)])
    names = tuple(f"e-{each}" for each in range(20))
    axis = Axis("", -0.5, 19.5, names=names)
    assert [axis.named(tick) for tick in axis.ticks()] == list(names[::3])
    assert [short(value) for value in (0.5, 999, 1000, 12_500, 3e6)] == [
        *("0.5", "999", "1k", "12.5k", "3M")
    ]


def test_several_series_have_a_key_and_one_has_none() -> None:
    plot = Plot("t", Axis("x", 0, 1), Axis("y", 0, 1))
    plot.dots([(0, 0)], 0, "one<")
    assert "one" not in plot.render()
    plot.dots([(1, 1)], 1, "two")
    assert "one&lt;" in plot.render()


def test_what_is_beyond_an_axis_is_drawn_at_its_end() -> None:
    for axis in (Axis("s", 1, 10), Axis("s", 1, 10, is_log=True)):
        assert [axis.share(value) for value in (0, 1, 10, 99)] == [0, 0, 1, 1]
    for axis in (Axis("s", 3, 3), Axis("s", 3, 3, is_log=True)):
        assert axis.share(3) == 0
        assert axis.ticks() == [3]


def test_a_logarithmic_axis_within_one_decade_has_ticks_too() -> None:
    assert Axis("s", 0.12, 0.18, is_log=True).ticks() == pytest.approx([0.12, 0.14, 0.16, 0.18])


def test_a_line_tells_its_name_and_a_faint_one_is_not_in_the_key() -> None:
    plot = Plot("t", Axis("x", 0, 1), Axis("share", 0, 1, show=lambda v: f"{100 * v:g} %"))
    plot.line([(0, 0), (1, 1)], 0, "one")
    plot.line([(0, 0), (1, 0)], 0, "one, low", is_faint=True)
    plot.line([(0, 1), (1, 1)], SERIES + 1, "two")
    root = ET.fromstring(plot.render())  # noqa: S314 - our own
    assert [each.text for each in root.iter("title")] == ["one", "one, low", "two"]
    assert [each.attrib["class"] for each in root.iter("polyline")] == [
        *("line s0", "line faint s0", "line s1")
    ]
    labels = [each.text for each in root.iter("text") if each.attrib["class"] == "label"]
    assert labels == ["x", "share", "one", "two"]
    assert "100 %" in [each.text for each in root.iter("text")]


def test_a_key_goes_on_below_rather_than_out_of_the_picture() -> None:
    plot = Plot("t", Axis("x", 0, 1), Axis("y", 0, 1))
    names = [f"quite-a-long-name-{each}" for each in range(9)]
    for series, name in enumerate(names):
        plot.line([(0, 0), (1, 1)], series, name)
    root = ET.fromstring(plot.render())  # noqa: S314 - our own
    _, _, _, height = map(float, root.attrib["viewBox"].split())
    places = [
        (float(each.attrib["x"]), float(each.attrib["y"]))
        for each in root.iter("text")
        if each.text in names
    ]
    assert len(set(places)) == len(names)
    assert max(x for x, _ in places) + 7 * len(names[0]) < WIDTH
    assert max(y for _, y in places) < height


def test_every_colour_is_there_for_light_and_for_dark() -> None:
    text = page("a < b", [plots_side_by_side([Plot("t", Axis("x", 0, 1), Axis("y", 0, 1))])])
    ET.fromstring(text.partition("\n")[2])  # noqa: S314 - our own
    assert "<title>a &lt; b</title>" in text
    for each in range(SERIES):
        assert len(re.findall(rf"--c{each}: #", text)) == 2
        assert f".line.s{each}" in text
        assert f".bar.s{each}" in text
