"""A plain line chart as a panel: few lines, few points, the same marks as any other figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from PIL import Image

from veca.viz.colour import RGB
from veca.viz.figure import Dot, Line, Mark, Panel, Text

# Okabe and Ito's colours, told apart with any kind of colour vision.
_COLOURS: tuple[RGB, ...] = (
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
    (213, 94, 0),
)
_GREY, _DARK = (222, 222, 222), (90, 90, 90)


def chart(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str = "",
    x_label: str = "",
    zero: bool = False,
    size: tuple[int, int] = (340, 230),
) -> Panel:
    """Lines through points (x, y), by name; `zero` makes the axis begin at zero.

    Points that are NaN are left out. `size` is (width, height) in pixels.
    """
    known = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        for name, points in lines.items()
    }
    xs = sorted({x for points in known.values() for x, _ in points}) or [0.0]
    ys = [y for points in known.values() for _, y in points] or [0.0]
    ticks = _ticks(min([0.0, *ys]) if zero else min(ys), max(ys))
    low, high = ticks[0], ticks[-1]
    left, right, top, bottom = 46 / size[0], 1 - 78 / size[0], 8 / size[1], 1 - 34 / size[1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - xs[0]) / (xs[-1] - xs[0]) if xs[-1] > xs[0] else 0.5
        up = (y - low) / (high - low)
        return left + across * (right - left), bottom - up * (bottom - top)

    marks: list[Mark] = []
    digits = _digits(ticks[1] - ticks[0])
    for tick in ticks:
        y = place(xs[0], tick)[1]
        marks.append(Line([(left, y), (right, y)], _GREY, 1))
        marks.append(Text(left - 6 / size[0], y, f"{tick:.{digits}f}", "rm", _DARK, 11))
    every = max(1, math.ceil(len(xs) / 6))
    for x in xs[::every]:
        marks.append(Text(place(x, low)[0], bottom + 5 / size[1], f"{x:g}", "mt", _DARK, 11))
    marks.append(Text((left + right) / 2, 1 - 2 / size[1], x_label, "mb", _DARK, 11))
    for number, (name, points) in enumerate(known.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        if len(points) > 1:
            marks.append(Line([place(*point) for point in points], colour, 2))
        marks += [Dot(*place(*point), colour, 2.5, None) for point in points]
        y = top + (number + 0.5) * 16 / size[1]
        marks.append(Dot(right + 12 / size[0], y, colour, 4, None))
        marks.append(Text(right + 20 / size[0], y, name, "lm", _DARK, 11))
    return Panel(Image.new("RGB", size, "white"), title, marks)


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `count` steps."""
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):
        high = low + max(abs(low), 1e-3)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def _digits(step: float) -> int:
    """Decimals that tell ticks apart."""
    for digits in range(9):
        if abs(round(step, digits) - step) < 1e-6 * step:
            return digits
    return 9
