"""Small plots as inline SVG: no script, no dependency, readable when printed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_WIDTH = 640
_ROW = 22
_LEFT = 150


def bars(
    title: str, labels: Sequence[str], values: Sequence[float], limit: float, unit: str, mark: float | None = None
) -> str:
    """Horizontal bars from 0 to `limit`; `mark` draws a vertical line at that value."""
    height = _ROW * len(labels) + 34
    span = _WIDTH - _LEFT - 80
    parts = [f'<text x="0" y="14" class="t">{escape(title)}</text>']
    for n, (label, value) in enumerate(zip(labels, values, strict=True)):
        y = 24 + n * _ROW
        width = max(min(value / limit, 1.0), 0.0) * span if limit > 0 else 0.0
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 14}" text-anchor="end">{escape(label[:24])}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y + 3}" width="{span}" height="{_ROW - 8}" class="b"/>')
        parts.append(f'<rect x="{_LEFT}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 8}" class="f"/>')
        parts.append(f'<text x="{_LEFT + span + 6}" y="{y + 14}">{value:.3g} {escape(unit)}</text>')
    if mark is not None and limit > 0:
        x = _LEFT + min(mark / limit, 1.0) * span
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="22" y2="{height - 8}" class="m"/>')
    return _svg(height, parts)


def lines(title: str, points: Sequence[tuple[float, float]], x_name: str, y_name: str) -> str:
    """One curve through points, axes from zero."""
    height, left, bottom = 240, 60, 200
    x_most = max((x for x, _ in points), default=1.0) or 1.0
    y_most = max((y for _, y in points), default=1.0) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / x_most * (_WIDTH - left - 80), bottom - y / y_most * (bottom - 30)

    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(x, y) for x, y in sorted(points)))
    parts = [f'<text x="0" y="14" class="t">{escape(title)}</text>', f'<polyline points="{path}" class="c"/>']
    parts.append(f'<line x1="{left}" x2="{_WIDTH - 80}" y1="{bottom}" y2="{bottom}" class="a"/>')
    parts.append(f'<line x1="{left}" x2="{left}" y1="24" y2="{bottom}" class="a"/>')
    for x, y in points:
        px, py = at(x, y)
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" class="f"/>')
        parts.append(f'<text x="{px + 6:.1f}" y="{py - 6:.1f}">{y:.4g}</text>')
        parts.append(f'<text x="{px:.1f}" y="{bottom + 16}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{(left + _WIDTH - 80) / 2}" y="{height - 4}" text-anchor="middle">{escape(x_name)}</text>')
    parts.append(f'<text x="4" y="32">{escape(y_name)}</text>')
    return _svg(height, parts)


def timeline(title: str, rows: Sequence[Sequence[tuple[float, float]]], begin: float, end: float, unit: str) -> str:
    """Intervals of work, one row per stage."""
    height = _ROW * len(rows) + 50
    span = _WIDTH - 80 - 20
    scale = span / (end - begin) if end > begin else 0.0
    parts = [f'<text x="0" y="14" class="t">{escape(title)}</text>']
    for n, intervals in enumerate(rows):
        y = 24 + n * _ROW
        parts.append(f'<text x="74" y="{y + 14}" text-anchor="end">stage {n}</text>')
        parts.append(f'<rect x="80" y="{y + 3}" width="{span}" height="{_ROW - 8}" class="b"/>')
        for first, last in intervals:
            if last > begin and first < end:
                x = 80 + (max(first, begin) - begin) * scale
                width = max((min(last, end) - max(first, begin)) * scale, 0.5)
                parts.append(f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 8}" class="f"/>')
    parts.append(f'<text x="80" y="{height - 8}">0</text>')
    parts.append(f'<text x="{80 + span}" y="{height - 8}" text-anchor="end">{(end - begin):.4g} {escape(unit)}</text>')
    return _svg(height, parts)


def _svg(height: float, parts: list[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'
