"""Plots for reports as HTML with inline SVG: numbers in, markup out, all text escaped, no script.

What is drawn lies in an SVG box that is stretched to the width there is; labels are HTML beside it, so they keep their
size on a phone. Colours are classes (`c0` … `c11`, `cx` for the others), whose values the page's style sheet has for
light and dark. Every plot is one `role="img"` with a name that says what it shows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

NUM_COLOURS = 12
_BOX = 1000  # the drawing's own units, both ways
Ticks = Sequence[tuple[float, str]]  # (0..1 along the axis, label)


def colour(index: int) -> str:
    """The class of the index-th team; those beyond the palette share one."""
    return f"c{index}" if 0 <= index < NUM_COLOURS else "cx"


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y) in 0..1 of each axis; a None y is a gap. `is_step`: y holds until the next x."""

    name: str
    colour: str
    points: Sequence[tuple[float, float | None]]
    is_step: bool = False
    is_filled: bool = False  # an area down to the axis instead of a line
    dash: str = ""  # "", dashed or dotted


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of a bar chart. Values and mark share the chart's unit; text is what stands at its end."""

    label: str
    values: Sequence[tuple[float, str]]  # (length, colour class), one after the other
    text: str
    mark: float | None = None  # a tick: what the bar is compared with
    is_bad: bool = False
    is_first: bool = False  # of a group


@dataclass(frozen=True, slots=True)
class Range:
    """Median to 95th percentile, with the maximum."""

    label: str
    p50: float
    p95: float
    most: float
    text: str
    colour: str = "soft-line"
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Legend:
    """Names beside their colours; a dash is drawn as one."""

    entries: Sequence[tuple[str, str, str]] = field(default_factory=tuple)  # name, colour class, dash

    def __str__(self) -> str:
        keys = "".join(
            f'<li><span class="key {tone} {dash}"></span>{escape(name)}</li>' for name, tone, dash in self.entries
        )
        return f'<ul class="legend">{keys}</ul>' if keys else ""


def chart(name: str, curves: Sequence[Curve], x_ticks: Ticks, y_ticks: Ticks, *, bands: Ticks = ()) -> str:
    """Curves over a grid. `bands` are (start, width as text) in 0..1 and lie behind everything."""
    shade = "".join(
        f'<rect class="band" x="{x * _BOX:.1f}" y="0" width="{float(width) * _BOX:.1f}" height="{_BOX}"/>'
        for x, width in bands
    )
    grid = "".join(f'<path class="grid" d="M0 {_y(y)}H{_BOX}"/>' for y, _ in y_ticks)
    drawn = "".join(_curve(curve) for curve in curves)
    ys = "".join(f'<span style="bottom:{100 * y:.2f}%">{escape(label)}</span>' for y, label in y_ticks)
    xs = "".join(f'<span class="{_edge(x)}" style="left:{100 * x:.2f}%">{escape(label)}</span>' for x, label in x_ticks)
    return (
        f'<div class="chart" role="img" aria-label="{escape(name, quote=True)}"><div class="ys">{ys}</div>'
        f'<svg viewBox="0 0 {_BOX} {_BOX}" preserveAspectRatio="none" aria-hidden="true">'
        f'<title>{escape(name)}</title>{shade}{grid}{drawn}</svg><div class="xs">{xs}</div></div>'
    )


def bars(name: str, rows: Sequence[Bar], top: float) -> str:
    """Horizontal bars on one scale from 0 to `top`, each with a mark where it has one."""
    scale = _BOX / top if top > 0 else 0.0
    lines = []
    for row in rows:
        left, parts = 0.0, []
        for value, tone in row.values:
            width = max(0.0, min(value * scale, _BOX - left))
            parts.append(f'<rect class="{tone} fill" x="{left:.1f}" y="2" width="{width:.1f}" height="16"/>')
            left += width
        if row.mark is not None:
            at = min(row.mark * scale, _BOX)
            parts.append(f'<path class="mark" d="M{at:.1f} 0V20"/>')
        lines.append(_row(row.label, "".join(parts), row.text, is_bad=row.is_bad, is_first=row.is_first))
    return f'<div class="bars" role="img" aria-label="{escape(name, quote=True)}">{"".join(lines)}</div>'


def ranges(name: str, rows: Sequence[Range], unit: str, least: float) -> str:
    """Horizontal ranges on one logarithmic scale: a thick line from p50 to p95, a thin one to the maximum.

    What is below `least`, a power of ten, is drawn there.
    """
    values = [value for row in rows for value in (row.p50, row.p95, row.most) if value > 0]
    values = [max(value, least) for value in values]
    low = math.floor(math.log10(min(values))) if values else 0
    high = max(low + 1, math.ceil(math.log10(max(values)))) if values else 1

    def place(value: float) -> float:
        return _BOX * (max(low, math.log10(value)) - low) / (high - low) if value > 0 else 0.0

    grid = "".join(f'<path class="grid" d="M{_BOX * i / (high - low):.1f} 0V20"/>' for i in range(high - low + 1))
    lines = []
    for row in rows:
        p50, p95, most = place(row.p50), place(row.p95), place(row.most)
        drawing = (
            f'{grid}<path class="{row.colour} thin" d="M{p50:.1f} 10H{most:.1f}"/>'
            f'<path class="{row.colour} thick" d="M{p50:.1f} 10H{max(p95, p50 + 4):.1f}"/>'
            f'<path class="mark" d="M{p50:.1f} 3V17"/><path class="{row.colour} thin" d="M{most:.1f} 5V15"/>'
        )
        lines.append(_row(row.label, drawing, row.text, is_first=row.is_first))
    powers = range(low, high + 1, max(1, math.ceil((high - low) / 5)))
    ticks = "".join(
        f'<span class="{_edge((i - low) / (high - low))}" style="left:{100 * (i - low) / (high - low):.2f}%">'
        f"{escape(power_of_ten(i))}</span>"
        for i in powers
    )
    return (
        f'<div class="bars ranges" role="img" aria-label="{escape(name, quote=True)}">{"".join(lines)}'
        f'<div class="row axis"><span></span><span class="xs">{ticks}</span><span>{escape(unit)}</span></div></div>'
    )


def power_of_ten(exponent: int) -> str:
    """10^exponent as plain digits."""
    return f"{10**exponent:,}" if exponent >= 0 else f"{10.0**exponent:.{-exponent}f}"


def nice(value: float) -> float:
    """The next of 1, 2, 2.5, 3, 4, 5, 6, 8, 10 times a power of ten; 1 for what is not positive."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 2.5, 3, 4, 5, 6, 8, 10) if power * step >= value * (1 - 1e-12))


def value_ticks(top: float, count: int = 4) -> list[tuple[float, str]]:
    """Round labels from 0 to `top`, which should be `nice`."""
    step = top / count
    places = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    while places < 6 and abs(round(step, places) - step) > step * 1e-6:
        places += 1
    return [(i / count, f"{step * i:,.{places}f}") for i in range(count + 1)]


def cumulative(values: Sequence[float], right: float) -> list[tuple[float, float | None]]:
    """Steps of the share of values that are at most x, with x in parts of `right`."""
    ordered = sorted(values)
    if not ordered or right <= 0:
        return []
    steps = [(value / right, (rank + 1) / len(ordered)) for rank, value in enumerate(ordered)]
    return [(0.0, 0.0), *steps, (1.0, 1.0)]


def _row(label: str, drawing: str, text: str, *, is_bad: bool = False, is_first: bool = False) -> str:
    classes = "row" + (" bad" if is_bad else "") + (" first" if is_first else "")
    return (
        f'<div class="{classes}"><span class="name">{escape(label)}</span>'
        f'<svg viewBox="0 0 {_BOX} 20" preserveAspectRatio="none" aria-hidden="true">{drawing}</svg>'
        f'<span class="value">{escape(text)}</span></div>'
    )


def _curve(curve: Curve) -> str:
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in curve.points:
        if y is None:
            if pieces[-1]:
                # a step lasts until the point that ends it
                if curve.is_step:
                    pieces[-1].append((x, pieces[-1][-1][1]))
                pieces.append([])
        else:
            pieces[-1].append((x, y))
    paths = "".join(_path(piece, curve.is_step, curve.is_filled) for piece in pieces if piece)
    if not paths:
        return ""
    kind = "area" if curve.is_filled else f"line {curve.dash}"
    return f'<path class="{curve.colour} {kind}" d="{paths}"/>'


def _path(piece: Sequence[tuple[float, float]], is_step: bool, is_filled: bool) -> str:
    x0, y0 = piece[0]
    parts = [f"M{x0 * _BOX:.1f} {_y(y0)}"]
    for x, y in piece[1:]:
        parts.append(f"H{x * _BOX:.1f}V{_y(y)}" if is_step else f"L{x * _BOX:.1f} {_y(y)}")
    if is_filled:
        parts.append(f"V{_BOX}H{x0 * _BOX:.1f}Z")
    return "".join(parts)


def _y(value: float) -> str:
    return f"{_BOX * (1 - max(0.0, min(1.0, value))):.1f}"


def _edge(x: float) -> str:
    """Labels at the ends stay inside the picture."""
    return "start" if x < 0.04 else "end" if x > 0.96 else ""
