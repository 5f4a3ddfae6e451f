"""Line charts as SVG text: self-contained, readable in light and dark pages, no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 36, 48
COLOURS = ("#2f6fde", "#d9480f", "#2b8a3e", "#9c36b5", "#c2255c", "#0b7285", "#846202", "#495057", "#5f3dc4", "#a61e4d")


@dataclass(frozen=True)
class Series:
    """A line, or bare points; `low` and `high` give a band around it."""

    name: str
    points: Sequence[tuple[float, float]]
    is_line: bool = True
    band: Sequence[tuple[float, float]] = field(default=())  # (low, high) at each point


def chart(title: str, x_label: str, y_label: str, series: Sequence[Series], *, log_x: bool, log_y: bool) -> str:
    """One chart. Logarithmic axes drop points that are not positive."""
    x_axis = _Axis([x for each in series for x, _ in each.points], log_x, LEFT, WIDTH - RIGHT)
    values = [y for each in series for _, y in each.points] + [
        end for each in series for ends in each.band for end in ends
    ]
    y_axis = _Axis(values, log_y, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 20, title, weight="bold", size=14),
    ]
    for value in x_axis.ticks():
        x = x_axis.at(value)
        parts.append(_line(x, TOP, x, HEIGHT - BOTTOM, "#e9ecef"))
        parts.append(_text(x, HEIGHT - BOTTOM + 16, _short(value), anchor="middle"))
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "#e9ecef"))
        parts.append(_text(LEFT - 6, y + 4, _short(value), anchor="end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, anchor="middle"))
    parts.append(_text(14, (TOP + HEIGHT - BOTTOM) / 2, y_label, anchor="middle", rotate=True))
    for index, each in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        parts += _drawn(each, x_axis, y_axis, colour)
        y = TOP + 10 + 18 * index
        parts.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 8}" width="12" height="8" fill="{colour}"/>')
        parts.append(_text(WIDTH - RIGHT + 32, y, each.name))
    return "\n".join([*parts, "</svg>"])


def _drawn(series: Series, x_axis: _Axis, y_axis: _Axis, colour: str) -> list[str]:
    spots = [(x_axis.at(x), y_axis.at(y)) for x, y in series.points]
    parts = []
    if series.band:
        xs = [x for x, _ in spots]
        low = [(x, y_axis.at(ends[0])) for x, ends in zip(xs, series.band, strict=True)]
        high = [(x, y_axis.at(ends[1])) for x, ends in zip(xs, series.band, strict=True)]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in low + high[::-1])
        parts.append(f'<polygon points="{corners}" fill="{colour}" fill-opacity="0.12"/>')
    if series.is_line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for (x, y), (given_x, given_y) in zip(spots, series.points, strict=True):
        label = f"{series.name}: {_short(given_x)}, {_short(given_y)}"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{escape(label)}</title></circle>'
        )
    return parts


class _Axis:
    """From values to places on the page."""

    def __init__(self, values: Sequence[float], is_log: bool, start: float, end: float) -> None:
        usable = [value for value in values if value > 0 or not is_log] or [1.0]
        self.is_log, self.start, self.end = is_log, start, end
        if is_log:
            self.low, self.high = _scaled_down(min(usable)), _scaled_up(max(usable))
            if self.low == self.high:
                self.high = 10 * self.low
        else:
            self.low, self.high = min(0.0, *usable), max(*usable, 1e-9) * 1.05

    def at(self, value: float) -> float:
        if self.is_log:
            value = max(value, self.low)
            share = (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.is_log:
            step = _nice((self.high - self.low) / 5)
            return [step * index for index in range(ceil(self.low / step), floor(self.high / step) + 1)]
        marks = [
            mark * 10.0**power
            for power in range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            for mark in (1, 2, 5)
        ]
        inside = [mark for mark in marks if self.low <= mark * (1 + 1e-9) and mark <= self.high * (1 + 1e-9)]
        return inside if len(inside) <= 12 else [mark for mark in inside if log10(mark).is_integer()]


def _scaled_down(value: float) -> float:
    power = 10.0 ** floor(log10(value))
    return max(mark * power for mark in (1, 2, 5) if mark * power <= value * (1 + 1e-9))


def _scaled_up(value: float) -> float:
    power = 10.0 ** floor(log10(value))
    return min(mark * power for mark in (1, 2, 5, 10) if mark * power >= value * (1 - 1e-9))


def _nice(step: float) -> float:
    power = 10.0 ** floor(log10(step))
    return next(mark * power for mark in (1, 2, 5, 10) if mark * power >= step * (1 - 1e-9))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "", size: int = 0, rotate: bool = False
) -> str:
    extra = f' font-weight="{weight}"' if weight else ""
    extra += f' font-size="{size}"' if size else ""
    extra += f' transform="rotate(-90 {x:.1f} {y:.1f})"' if rotate else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#343a40"{extra}>{escape(text)}</text>'
