"""A report as one page that needs nothing else: no script, no font, no picture from elsewhere.

It opens anywhere, for years, light or dark as its reader has it. Knows nothing of what is told.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from dpkit.pages.svg import SERIES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dpkit.pages.svg import Plot

# The colours begin with Okabe and Ito's: told apart by those who see fewer colours, too.
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #667080; --line: #e3e6ea;
  --paper: #fff; --card: #f6f7f9; --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #c2669b;
  --c4: #b8860b; --c5: #7a4fc0; --c6: #2e9fd4; --c7: #66707e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #98a2b0; --line: #2c333c;
  --paper: #14181d; --card: #1c2229; --c0: #4ea8de; --c1: #f08c46; --c2: #3fc493; --c3: #e39ac4;
  --c4: #e6b93c; --c5: #b48cf2; --c6: #7fd0f5; --c7: #98a2b0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.soft { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .75rem;
  margin: 1.5rem 0; }
.card { background: var(--card); border-radius: 8px; padding: .75rem 1rem;
  overflow-wrap: anywhere; }
.card b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.note { border-left: 3px solid var(--c1); background: var(--card); padding: .5rem 1rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr));
  gap: 1rem; margin: 1.5rem 0; align-items: start; }
svg { width: 100%; height: auto; background: var(--card); border-radius: 8px; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg .title { font-size: 13px; font-weight: 600; fill: var(--ink); }
svg .name { fill: var(--ink); stroke: var(--card); stroke-width: 3px; paint-order: stroke; }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); }
.rule { stroke: var(--ink); stroke-dasharray: 3 3; }
.line { fill: none; stroke-width: 1.8; } .faint { stroke-width: .8; }
.dot { fill: none; stroke-width: 5; stroke-linecap: round; stroke-opacity: .65; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .75rem; text-align: right; }
th { color: var(--soft); font-weight: 500; } .best { font-weight: 700; }
th:first-child, td:first-child, .prose th, .prose td { text-align: left; }
.wide { overflow-x: auto; }
""" + "".join(
    f".line.s{each}, .dot.s{each} {{ stroke: var(--c{each}); }}\n"
    f".bar.s{each} {{ fill: var(--c{each}); }}\n"
    for each in range(SERIES)
)


def page(title: str, body: Iterable[str]) -> str:
    """The whole page.

    Args:
        title: Of its window, as text.
        body: What stands in it, as HTML.
    """
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            '<link rel="icon" href="data:,"/>',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n",
            *body,
            "</body></html>\n",
        )
    )


def plots_side_by_side(plots: Iterable[Plot]) -> str:
    """Plots, as many in a row as there is room for."""
    drawn = "\n".join(plot.render() for plot in plots)
    return f'<div class="plots">\n{drawn}\n</div>\n'
