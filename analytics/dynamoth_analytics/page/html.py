"""The parts of a page of HTML: text, tables and charts as inline SVG, in one file without outside assets.

Every text is escaped here; callers give plain text. Names of channels are what any client chose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from dynamoth_analytics.text import figure

WIDTH, HEIGHT = 720.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 60.0, 10.0, 18.0, 26.0
"""Of a chart, and its margins, in units of its own: it is scaled to the width of the page."""

COLORS = 8

STYLE = """
:root{color-scheme:light dark;--fg:#1c2128;--bg:#fff;--dim:#59636e;--line:#d1d9e0;--box:#f6f8fa;--bad:#c0262d;
--c0:#0b6bcb;--c1:#c2410c;--c2:#15803d;--c3:#7e22ce;--c4:#a16207;--c5:#0e7490;--c6:#be185d;--c7:#525252}
@media(prefers-color-scheme:dark){:root{--fg:#e6edf3;--bg:#0d1117;--dim:#9198a1;--line:#3d444d;--box:#161b22;--bad:#ff7b72;
--c0:#58a6ff;--c1:#ff9a5c;--c2:#56d364;--c3:#d2a8ff;--c4:#e3b341;--c5:#39c5cf;--c6:#ff7eb6;--c7:#b1bac4}}
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:960px;font:16px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);
overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:0}h2{font-size:1.2rem;margin:2rem 0 .5rem;border-bottom:1px solid var(--line)}
h3{font-size:.95rem;margin:1.2rem 0 .3rem}h3+.scroll{margin-top:0}
p,li{margin:.4rem 0}.dim,figcaption{color:var(--dim);font-size:.85rem}
.summary{background:var(--box);border:1px solid var(--line);border-radius:6px;padding:8px 16px 8px 32px}
.scroll{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;min-width:100%}
th,td{padding:4px 8px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left;max-width:16rem;overflow:hidden;text-overflow:ellipsis}
th.text,td.text{text-align:left}td.text{white-space:normal;min-width:14rem}
pre{background:var(--box);border:1px solid var(--line);border-radius:6px;padding:8px;overflow-x:auto;font-size:.8rem}
figure{margin:.5rem 0}svg{width:100%;height:auto;display:block}svg text{fill:var(--dim);font-size:13px}
.row{display:flex;justify-content:space-between;gap:12px;font-size:.9rem;margin-top:6px}
.grid{stroke:var(--line)}.mark{stroke:var(--bad);stroke-dasharray:5 4}
.line{fill:none;stroke-width:2;stroke-linecap:round;stroke-linejoin:round}
.bar{fill:var(--c0)}
.key{margin-right:12px;white-space:nowrap}@media(max-width:480px){svg text{font-size:20px}}
"""


def page(title: str, subtitle: str, summary: Sequence[str], sections: Iterable[str], *, refresh_s: int = 0) -> str:
    """Return a whole page. ``sections`` are HTML; all else is text.

    Browsers load it again after ``refresh_s``; 0: they do not.
    """
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    points = "".join(f"<li>{escape(sentence)}</li>" for sentence in summary)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"{refresh}<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<h1>{escape(title)}</h1><p class="dim">{escape(subtitle)}</p>'
        f'<ul class="summary">{points}</ul>{"".join(sections)}</body></html>\n'
    )


def section(title: str, *parts: str) -> str:
    """Return a section with a heading. ``parts`` are HTML."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def paragraph(text: str) -> str:
    """Return a paragraph."""
    return f"<p>{escape(text)}</p>"


def code(text: str) -> str:
    """Return text as it stands."""
    return f"<pre>{escape(text)}</pre>"


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    empty: str,
    text_columns: Sequence[int] = (),
    title: str = "",
) -> str:
    """Return a table below its title, or the sentence ``empty`` when it has no rows.

    The cells of ``text_columns`` are sentences: several lines, aligned to the left.
    """
    head = "".join(f"<th{_kind(index, text_columns)}>{escape(heading)}</th>" for index, heading in enumerate(headings))
    body = "".join(f"<tr>{_cells(row, text_columns)}</tr>" for row in rows)
    if not body:
        return paragraph(empty)
    above = f"<h3>{escape(title)}</h3>" if title else ""
    return f'{above}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(row: Sequence[str], text_columns: Sequence[int]) -> str:
    return "".join(f"<td{_kind(index, text_columns)}>{escape(cell)}</td>" for index, cell in enumerate(row))


def _kind(index: int, text_columns: Sequence[int]) -> str:
    return ' class="text"' if index in text_columns else ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a chart with one color, in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axes:
    """What a chart shows: its caption, marks and how to write values of x."""

    caption: str
    x_text: Callable[[float], str]
    #: Horizontal and vertical lines, each a value and its meaning.
    y_marks: Sequence[tuple[float, str]] = ()
    x_marks: Sequence[tuple[float, str]] = ()
    #: Points farther apart than this are not joined; 0: none are.
    joined_within: float = math.inf
    y_text: Callable[[float], str] = figure


def chart(series: Sequence[Series], axes: Axes) -> str:
    """Return points and lines as SVG."""
    points = [point for each in series for point in each.points]
    if not points:
        return paragraph("There is nothing to draw.")
    xs = [x for x, _ in points] + [x for x, _ in axes.x_marks]
    y_max = max([y for _, y in points] + [y for y, _ in axes.y_marks]) * 1.05 or 1.0
    x_min, x_max = min(xs), max(xs)
    width = x_max - x_min or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_min) / width * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - y / y_max * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(place, x_min, width, y_max, axes)]
    for number, each in enumerate(series):
        parts.append(_drawn(each, f"var(--c{number % COLORS})", place, axes.joined_within))
    for y, meaning in axes.y_marks:
        (left, across), (right, _) = place(x_min, y), place(x_min + width, y)
        parts.append(
            f'<path class="mark" d="M{left:.1f} {across:.1f}H{right:.1f}"><title>{escape(meaning)}</title></path>'
        )
    for x, meaning in axes.x_marks:
        (at, bottom), (_, top) = place(x, 0), place(x, y_max)
        parts.append(f'<path class="mark" d="M{at:.1f} {bottom:.1f}V{top:.1f}"><title>{escape(meaning)}</title></path>')
    keys = "".join(
        f'<span class="key"><span style="color:var(--c{number % COLORS})">●</span> {escape(each.name)}</span>'
        for number, each in enumerate(series)
    )
    svg = (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(axes.caption)}">{"".join(parts)}</svg>'
    )
    return f"<figure>{svg}<figcaption>{keys}{escape(axes.caption)}</figcaption></figure>"


def _grid(
    place: Callable[[float, float], tuple[float, float]], x_min: float, width: float, y_max: float, axes: Axes
) -> str:
    parts: list[str] = []
    for share in (0.0, 0.5, 1.0):
        left, across = place(x_min, y_max * share)
        label = escape(axes.y_text(y_max * share))
        parts.append(f'<path class="grid" d="M{left:.1f} {across:.1f}H{WIDTH - RIGHT:.1f}"/>')
        parts.append(f'<text x="{LEFT - 4:.0f}" y="{across + 5:.1f}" text-anchor="end">{label}</text>')
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        at, bottom = place(x_min + width * share, 0.0)
        label = escape(axes.x_text(x_min + width * share))
        parts.append(f'<text x="{at:.1f}" y="{bottom + 20:.1f}" text-anchor="{anchor}">{label}</text>')
    return "".join(parts)


def _drawn(series: Series, color: str, place: Callable[[float, float], tuple[float, float]], within: float) -> str:
    if within <= 0:
        dots = (place(x, y) for x, y in series.points)
        circles = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in dots)
        return f'<g fill="{color}" fill-opacity=".7">{circles}</g>'
    path, last = "", -math.inf
    for x, y in series.points:
        across, down = place(x, y)
        # A point without neighbours is a line of its own: round caps show it.
        path += f"{'L' if x - last <= within else 'M'}{across:.1f} {down:.1f}{'' if x - last <= within else 'h0'}"
        last = x
    return f'<path class="line" d="{path}" stroke="{color}"/>'


def bars(rows: Sequence[tuple[str, float, str]], caption: str) -> str:
    """Return horizontal bars: name, value and its text."""
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    drawn = "".join(
        f'<div class="row"><span>{escape(name)}</span><span>{escape(text)}</span></div>'
        f'<svg viewBox="0 0 100 1.5" preserveAspectRatio="none" height="8"><rect class="bar" height="1.5" '
        f'width="{max(0.5, value / most * 100):.1f}"/></svg>'
        for name, value, text in rows
    )
    return f"<figure>{drawn}<figcaption>{escape(caption)}</figcaption></figure>"
