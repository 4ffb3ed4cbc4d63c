"""Line charts as points of SVG, so that a browser needs no script to draw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 600
HEIGHT: Final = 120


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its name, its newest value as text, and its pieces; where values are missing the line is broken."""

    name: str
    latest: str
    pieces: Sequence[str]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart. ``top`` is the value of its upper edge, as text; the lower edge is 0. ``minutes``: how far back."""

    title: str
    top: str
    minutes: float
    lines: Sequence[Line]

    @property
    def summary(self) -> str:
        """Return what the chart shows, in words."""
        now = ", ".join(f"{line.name} {line.latest}" for line in self.lines)
        return f"{self.title}, the last {self.minutes:.0f} minutes, up to {self.top}. Now: {now}"


def chart(
    title: str,
    times: Sequence[float],
    lines: Sequence[tuple[str, Sequence[float | None]]],
    form: Callable[[float], str],
) -> Chart:
    """Return a chart of lines over times in seconds. ``form`` writes a value as text."""
    most = max((value for _, values in lines for value in values if value is not None), default=0.0)
    top = _round_up(most)
    first, last = (times[0], times[-1]) if times else (0.0, 0.0)
    length = max(last - first, 1.0)
    drawn = []
    for name, values in lines:
        pieces: list[list[str]] = [[]]
        for at, value in zip(times, values, strict=True):
            if value is None:
                pieces.append([])
                continue
            x, y = WIDTH * (at - first) / length, HEIGHT - HEIGHT * value / top
            pieces[-1].append(f"{x:.1f},{y:.1f}")
        newest = values[-1] if values else None
        drawn.append(Line(name, "unknown" if newest is None else form(newest), [" ".join(p) for p in pieces if p]))
    return Chart(title, form(top), (last - first) / 60, drawn)


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, 50 … so that the scale does not change with each reading."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power > value:
        power /= 10
    while power * 10 <= value:
        power *= 10
    return next(power * step for step in (1, 2, 5, 10) if power * step >= value)
