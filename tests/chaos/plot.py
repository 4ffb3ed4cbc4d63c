"""The plot of a soak: a picture of small multiples, one for each figure, as SVG that is written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from statistics import median
from typing import Final

from chaos.samples import FIGURES, KEPT, SIZE, Lives, Series

_COLUMNS: Final = 2
_WIDTH, _HEIGHT = 470, 190
"""Of a figure, with its head and the room around it."""
_LEFT, _TOP, _RIGHT, _BOTTOM = 46, 44, 14, 24
_COLORS: Final = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df")
"""Of those of a figure that have most, one each; others are not shown."""
_STEP: Final = 2.0
"""Pixels of one point: the median of its time."""


def plot(series: Series, faults: Sequence[float], seconds: float) -> str:
    """Return the picture. ``faults``: when something was struck; ``seconds``: how long all went on."""
    shown = [figure for figure in FIGURES if any(figure == each for each, _ in series)]
    height = _HEIGHT * math.ceil(len(shown) / _COLUMNS)
    box, font = f'viewBox="0 0 {_COLUMNS * _WIDTH} {height}"', 'font-family="sans-serif" font-size="11" fill="#1f2328"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {box} {font}>', '<rect width="100%" height="100%" fill="#fff"/>']
    for number, figure in enumerate(shown):
        row, column = divmod(number, _COLUMNS)
        lines.append(f'<g transform="translate({column * _WIDTH} {row * _HEIGHT})">')
        lines += _panel(figure, series, faults, seconds)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(figure: str, series: Series, faults: Sequence[float], seconds: float) -> Iterator[str]:
    named = {name: lives for (of, name), lives in sorted(series.items()) if of == figure}
    if figure == SIZE:
        named = {name: lives for name, lives in named.items() if name not in KEPT}
    names = sorted(named, key=lambda name: -_most(named[name]))[: len(_COLORS)]
    top = _round_up(max((_most(named[name]) for name in names), default=0.0))
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    unit = FIGURES[figure].unit
    yield f'<text x="{_LEFT}" y="16" font-weight="bold">{escape(figure)}{f", {unit}" if unit else ""}</text>'
    legend = "".join(
        f'<tspan fill="{color}">{escape(name)}  </tspan>' for name, color in zip(names, _COLORS, strict=False)
    )
    yield f'<text x="{_LEFT}" y="32" font-size="8.5" xml:space="preserve">{legend}</text>'
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#8c959f"/>'
    for value, y in ((top, _TOP + 4), (0.0, bottom)):
        yield f'<text x="{_LEFT - 5}" y="{y}" text-anchor="end">{value:g}</text>'
    yield f'<text x="{_LEFT}" y="{bottom + 15}">0</text>'
    yield f'<text x="{right}" y="{bottom + 15}" text-anchor="end">{seconds / 60:g} minutes</text>'
    width = right - _LEFT
    ticks = "".join(f"M{_LEFT + width * at / seconds:.1f} {bottom}v5" for at in faults)
    yield f'<path class="faults" d="{ticks}" stroke="#d1242f"/>'
    for name, color in zip(names, _COLORS, strict=False):
        for points in _points(named[name], width / seconds):
            drawn = " ".join(f"{_LEFT + x:.0f},{bottom - (bottom - _TOP) * value / top:.1f}" for x, value in points)
            yield f'<polyline points="{drawn}" fill="none" stroke="{color}"/>'


def _points(lives: Lives, pixels: float) -> Iterator[list[tuple[float, float]]]:
    """Return the points of each life, ``pixels`` a second."""
    for life in lives.values():
        steps: dict[int, list[float]] = {}
        for at, value in life:
            steps.setdefault(int(at * pixels / _STEP), []).append(value)
        yield [(step * _STEP, median(values)) for step, values in steps.items()]


def _most(lives: Lives) -> float:
    return max(value for life in lives.values() for _, value in life)


def _round_up(value: float) -> float:
    """Return the next number of 1, 2 or 5 and zeros; 1 at least."""
    power = 10 ** math.floor(math.log10(max(value, 1.0)))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= value))
