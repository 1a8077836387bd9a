"""Small drawings as SVG text: curves, intervals, coloured bars. No library, no script, no link."""

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

#: Okabe and Ito's colours first (readable with colour blindness), then darker and lighter ones.
PALETTE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#8c6d31",
    "#5254a3",
    "#b5cf6b",
    "#843c39",
    "#17a2b8",
    "#7b4173",
)
INK, MUTED, GRID, WRONG = "#222222", "#666666", "#e4e4e4", "#c62828"
FONT = "font-family:system-ui,sans-serif"

Point = tuple[float, float]


class IntervalRow(NamedTuple):
    """One line of an interval chart: a value with its interval, None where there is none."""

    label: str
    value: float
    interval: tuple[float, float] | None
    color: str = PALETTE[0]


class Span(NamedTuple):
    """A coloured piece of a bar: [start, end) in data units."""

    start: float
    end: float
    label: str
    color: str


def ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """Round numbers inside [low, high], about `count` of them.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A number as short as it can be read.

    >>> [number(v) for v in (0.8, 1234567.0, 0.00012, 12.345, 3.0)]
    ['0.8', '1.23e+06', '0.00012', '12.3', '3']
    """
    if value == 0:
        return "0"
    if 0.001 <= abs(value) < 100_000:
        text = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
        return f"{float(text):.0f}" if "e" in text else text
    return f"{value:.3g}"


def thin(points: Sequence[Point], *, limit: int = 400) -> list[Point]:
    """At most `limit` points: means over equal runs of neighbours; non-finite values are left out."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(finite) <= limit:
        return finite
    edges = [k * len(finite) // limit for k in range(limit + 1)]
    runs = [finite[a:b] for a, b in itertools.pairwise(edges)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x_label: str = "step",
    width: int = 345,
    height: int = 220,
) -> str:
    """Curves over one axis; a series of one point is drawn as a dot. Empty without any finite point.

    Values that are all positive and span more than a factor of 50 get a logarithmic axis, and the title says
    so.
    """
    curves = {name: thin(points) for name, points in series.items()}
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return ""
    xs = [x for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points]
    log = min(ys) > 0 and max(ys) / min(ys) > 50
    left, right, top, bottom = 56, 12, 30, 34 + 16 * len(curves)
    x0, x1 = min(xs), max(xs)
    y0, y1 = (math.log10(min(ys)), math.log10(max(ys))) if log else (min(ys), max(ys))
    if y1 - y0 < 1e-12:
        y0, y1 = y0 - 0.5 * (abs(y0) or 1), y1 + 0.5 * (abs(y1) or 1)
    margin = 0.05 * (y1 - y0)
    y0, y1 = y0 - margin, y1 + margin

    def px(x: float) -> float:
        return left + (width - left - right) * ((x - x0) / (x1 - x0) if x1 > x0 else 0.5)

    def py(y: float) -> float:
        value = math.log10(y) if log else y
        return top + (height - top - bottom) * (1 - (value - y0) / (y1 - y0))

    parts = [draw_text(left, 16, title + (" (log scale)" if log else ""), size=13, weight=600)]
    marks = (
        [10.0**p for p in ticks(y0, y1, count=4) if not log or p == int(p)] if log else ticks(y0, y1, count=4)
    )
    if log and len(marks) < 2:
        marks = [10.0**p for p in ticks(y0, y1, count=3)]
    for y in marks:
        parts.append(draw_line(left, py(y), width - right, py(y), GRID))
        parts.append(draw_text(left - 6, py(y) + 4, number(y), anchor="end", color=MUTED))
    axis = height - bottom
    parts.append(draw_line(left, axis, width - right, axis, MUTED))
    for x in ticks(x0, x1, count=5):
        parts.append(draw_text(px(x), axis + 14, number(x), anchor="middle", color=MUTED))
    parts.append(draw_text(width - right, axis + 28, x_label, anchor="end", color=MUTED))
    for k, (name, points) in enumerate(curves.items()):
        color = PALETTE[k % len(PALETTE)]
        if len(points) == 1:
            parts.append(
                f'<circle cx="{px(points[0][0]):.1f}" cy="{py(points[0][1]):.1f}" r="3" fill="{color}"/>'
            )
        else:
            path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        y = axis + 30 + 16 * k
        parts.append(f'<rect x="{left}" y="{y - 8}" width="14" height="4" fill="{color}"/>')
        parts.append(draw_text(left + 20, y - 1, f"{name}  (last {number(points[-1][1])})", color=INK))
    return svg(parts, width=width, height=height, label=title)


def interval_chart(rows: Sequence[IntervalRow], *, title: str, width: int = 640) -> str:
    """Values with their intervals, one line each, on one scale. Empty without rows."""
    if not rows:
        return ""
    bounds = [b for row in rows for b in (row.value, *(row.interval or ()))]
    low: float = min(bounds)
    high: float = max(bounds)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif high - low < 1e-12:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    left = min(260, 20 + 7 * max(len(row.label) for row in rows))
    right, top, step = 120, 34, 24
    height = top + step * len(rows) + 26

    def px(value: float) -> float:
        return left + (width - left - right) * (value - low) / (high - low)

    parts = [draw_text(8, 16, title, size=13, weight=600)]
    for value in ticks(low, high, count=5):
        parts.append(draw_line(px(value), top - 8, px(value), height - 20, GRID))
        parts.append(draw_text(px(value), height - 6, number(value), anchor="middle", color=MUTED))
    for k, row in enumerate(rows):
        y = top + step * k + 8
        parts.append(draw_text(left - 10, y + 4, shorten(row.label, 34), anchor="end"))
        text = number(row.value)
        if row.interval is not None:
            parts.append(draw_line(px(row.interval[0]), y, px(row.interval[1]), y, row.color, width=2.5))
            for end in row.interval:
                parts.append(draw_line(px(end), y - 4, px(end), y + 4, row.color, width=1.5))
            text += f" [{number(row.interval[0])}, {number(row.interval[1])}]"
        parts.append(f'<circle cx="{px(row.value):.1f}" cy="{y}" r="4.5" fill="{row.color}"/>')
        parts.append(draw_text(width - right + 10, y + 4, text, color=MUTED))
    return svg(parts, width=width, height=height, label=title)


def span_bar(spans: Sequence[Span], *, scale: "Scale", y: float, height: float) -> list[str]:
    """Coloured pieces side by side; a label is written into a piece that is wide enough."""
    parts = []
    for span in spans:
        x, w = scale(span.start), max(0.5, scale(span.end) - scale(span.start))
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{height:.1f}" fill="{span.color}">'
            f"<title>{escape(span.label)}: {number(span.start)} to {number(span.end)}</title></rect>"
        )
        room = int(w / 6.2)
        if room >= 6:
            text = shorten(span.label, room)
            parts.append(draw_text(x + 4, y + height / 2 + 4, text, color=_ink_on(span.color), size=11))
    return parts


def _ink_on(color: str) -> str:
    """Black or white, whichever can be read on `#rrggbb`."""
    red, green, blue = (int(color[k : k + 2], 16) for k in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


class Scale(NamedTuple):
    """Data units to pixels on one axis."""

    low: float
    high: float
    left: float
    right: float

    def __call__(self, value: float) -> float:
        """Pixel of a value."""
        return self.left + (self.right - self.left) * (value - self.low) / max(1e-9, self.high - self.low)


def svg(parts: Sequence[str], *, width: float, height: float, label: str) -> str:
    """A whole drawing around its parts."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="{FONT};max-width:100%">' + "".join(parts) + "</svg>"
    )


def shorten(text: str, length: int) -> str:
    """At most `length` characters.

    >>> shorten("pick up the duster", 10)
    'pick up..'
    """
    return text if len(text) <= length else text[: max(1, length - 2)].rstrip() + ".."


def draw_text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    color: str = INK,
    size: int = 11,
    weight: int = 400,
) -> str:
    """A piece of text at its base line, px."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def draw_line(x1: float, y1: float, x2: float, y2: float, color: str, *, width: float = 1.0) -> str:
    """A straight line, px."""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
        f'stroke-width="{width}"/>'
    )
