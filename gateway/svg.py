"""Small plots as inline SVG: grouped bars, lines, stacked areas. Pure: numbers in, markup out, all text escaped.

Colours are told apart by the common kinds of colour blindness, and every plot has a title that says what it shows.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
WIDTH, HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 44


def bars(title: str, unit: str, groups: Mapping[str, Mapping[str, float | None]]) -> str:
    """Grouped bars: {group: {series: value}}. A missing value is a gap."""
    series = list(dict.fromkeys(name for values in groups.values() for name in values))
    top = _nice(max((v for values in groups.values() for v in values.values() if v is not None), default=0.0))
    parts = [_axis(top, unit)]
    slot = _plot_width() / max(1, len(groups))
    bar = slot * 0.8 / max(1, len(series))
    for position, (group, values) in enumerate(groups.items()):
        left = _LEFT + position * slot + slot * 0.1
        for index, name in enumerate(series):
            value = values.get(name)
            if value is None:
                continue
            y = _y(value, top)
            x = left + index * bar
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar * 0.92:.1f}" height="{HEIGHT - _BOTTOM - y:.1f}" '
                f'fill="{_colour(index)}"><title>{escape(f"{group}, {name}: {value:.3g} {unit}")}</title></rect>'
                f'<text x="{x + bar * 0.46:.1f}" y="{y - 4:.1f}" class="v">{value:.3g}</text>'
            )
        parts.append(f'<text x="{left + slot * 0.4:.1f}" y="{HEIGHT - _BOTTOM + 16}" class="c">{escape(group)}</text>')
    summary = "; ".join(
        f"{group}: " + ", ".join(f"{name} {value:.3g}" for name, value in values.items() if value is not None)
        for group, values in groups.items()
    )
    return _svg(title, f"{title} ({unit}). {summary}", parts, series)


def lines(title: str, x_unit: str, y_unit: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """One line a series of (x, y) points."""
    points = [point for curve in curves.values() for point in curve]
    right = max((x for x, _ in points), default=0.0) or 1.0
    top = _nice(max((y for _, y in points), default=0.0))
    parts = [_axis(top, y_unit), _x_axis(right, x_unit)]
    for index, curve in enumerate(curves.values()):
        path = " ".join(f"{_x(x, right):.1f},{_y(y, top):.1f}" for x, y in curve)
        dash = ' stroke-dasharray="6 4"' if index % 2 else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_colour(index)}" stroke-width="2"{dash}/>')
    summary = "; ".join(f"{name}: {len(curve)} points" for name, curve in curves.items())
    return _svg(title, f"{title}: {y_unit} over {x_unit}. {summary}", parts, list(curves))


def stacked(title: str, x_unit: str, times: Sequence[float], layers: Mapping[str, Sequence[float]]) -> str:
    """Stacked shares over time, a second each: the layers' parts of the sum. Seconds without a sum stay empty."""
    right = max(times, default=0.0) + 1.0
    parts = [_axis(1.0, "share"), _x_axis(right, x_unit)]
    totals = [sum(values[i] for values in layers.values()) for i in range(len(times))]
    width = _plot_width() / right
    below = [0.0] * len(times)
    for index, values in enumerate(layers.values()):
        for i, value in enumerate(values):
            if totals[i] <= 0 or value <= 0:
                continue
            low, high = below[i], below[i] + value / totals[i]
            parts.append(
                f'<rect x="{_x(times[i], right):.1f}" y="{_y(high, 1.0):.1f}" width="{width + 0.3:.1f}" '
                f'height="{_y(low, 1.0) - _y(high, 1.0):.1f}" fill="{_colour(index)}"/>'
            )
            below[i] = high
    whole = sum(totals) or 1.0
    summary = ", ".join(f"{name} {sum(values) / whole:.0%}" for name, values in layers.items())
    return _svg(title, f"{title}. Over the whole run: {summary}", parts, list(layers))


def cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """Steps of the share of values that are at most x."""
    ordered = sorted(values)
    steps = [(value, (rank + up) / len(ordered)) for rank, value in enumerate(ordered) for up in (0, 1)]
    return [(0.0, 0.0), *steps] if steps else []


def _svg(title: str, alternative: str, parts: Sequence[str], legend: Sequence[str]) -> str:
    keys: list[str] = []
    row, x = 0, _LEFT
    places = []
    for name in legend:
        width = 26 + 7 * len(name)
        if x > _LEFT and x + width > WIDTH:
            row, x = row + 1, _LEFT
        places.append((row, x, name))
        x += width
    above = 14 * row  # further rows of the legend grow upwards
    for index, (line, x, name) in enumerate(places):
        y = 20 - above + 14 * line
        keys.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{_colour(index)}"/>')
        keys.append(f'<text x="{x + 14}" y="{y + 9}" class="k">{escape(name)}</text>')
    return (
        f'<svg viewBox="0 {-above} {WIDTH} {HEIGHT + above}" role="img" '
        f'aria-label="{escape(alternative, quote=True)}" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(alternative)}</title>"
        f'<text x="{_LEFT}" y="{13 - above}" class="t">{escape(title)}</text>{"".join(keys)}{"".join(parts)}</svg>'
    )


def _axis(top: float, unit: str) -> str:
    lines_of_grid = []
    for quarter in range(5):
        value = top * quarter / 4
        y = _y(value, top)
        lines_of_grid.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="g"/>')
        lines_of_grid.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="y">{value:.3g}</text>')
    middle = (HEIGHT - _BOTTOM + _TOP) / 2
    lines_of_grid.append(f'<text transform="translate(14 {middle:.0f}) rotate(-90)" class="c">{escape(unit)}</text>')
    return "".join(lines_of_grid)


def _x_axis(right: float, unit: str) -> str:
    step = _nice(right / 8)
    ticks = [
        f'<text x="{_x(step * i, right):.1f}" y="{HEIGHT - _BOTTOM + 16}" class="c">{step * i:.3g}</text>'
        for i in range(math.floor(right / step) + 1)
    ]
    label = f'<text x="{_LEFT + _plot_width() / 2:.0f}" y="{HEIGHT - 10}" class="c">{escape(unit)}</text>'
    return "".join(ticks) + label


def _plot_width() -> float:
    return WIDTH - _LEFT - _RIGHT


def _x(value: float, right: float) -> float:
    return _LEFT + _plot_width() * value / right


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * min(1.0, value / top)


def _nice(value: float) -> float:
    """The next of 1, 2, 4, 5, 8, 10 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * step for step in (1, 2, 4, 5, 8, 10) if power * step >= value)


def _colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]
