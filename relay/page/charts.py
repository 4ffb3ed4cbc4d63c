"""Line charts as points of SVG, so that a browser needs no script to draw them."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from outbox._app.text import age_text
from relay.page.sampling import Sample

WIDTH: Final = 600
HEIGHT: Final = 120
MINUTES: Final = (5, 15, 60)
"""The ranges that can be picked."""
_MOST_LINES: Final = 6
_MOST_POINTS: Final = 300
_COLUMNS: Final = 60

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its name, its newest value as text, and its pieces; where values are missing the line is broken."""

    name: str
    latest: str
    pieces: Sequence[str]


@dataclass(frozen=True, slots=True)
class Column:
    """A part of the chart's width that shows its values as a text when the mouse is over it."""

    x: float
    width: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart. ``top`` is the value of its upper edge, as text; the lower edge is 0. ``times``: below it, from left."""

    title: str
    top: str
    times: Sequence[str]
    lines: Sequence[Line]
    columns: Sequence[Column]

    @property
    def summary(self) -> str:
        now = ", ".join(f"{line.name} {line.latest}" for line in self.lines)
        when = f" from {self.times[0]} to {self.times[-1]}" if self.times else ""
        return f"{self.title}{when}, up to {self.top}. Now: {now or 'nothing'}"


def charts(samples: Sequence[Sample]) -> Mapping[str, Chart]:
    times = [sample.at for sample in samples]
    events = [("events", [one.backlog for one in samples])]
    age = [("age", [one.oldest_seconds for one in samples])]
    rates = [(name, [getattr(one, name) for one in samples]) for name in ("written", "published", "applied")]
    latencies = [one.latency for one in samples]
    latency = [(name, [getattr(one, name) if one else None for one in latencies]) for name in ("median", "p95")]
    return {
        "waiting": chart("Waiting", times, events, _count),
        "age": chart("Oldest waiting event", times, age, age_text),
        "rates": chart("Events per second", times, rates, lambda value: f"{value:,.0f}/s"),
        "latency": chart("Latency, written to applied", times, latency, age_text),
        "topics": chart("Oldest waiting event by topic", times, _named([one.topics for one in samples]), age_text),
        "lag": chart("Lag by group, offsets", times, _named([one.lags for one in samples]), _count),
    }


def _named(samples: Sequence[Mapping[str, float | None]]) -> list[tuple[str, Values]]:
    """Return lines by their names, those with the largest newest values."""
    newest = samples[-1] if samples else {}
    names = {name: newest.get(name) or 0.0 for sample in samples for name in sample}
    largest = sorted(names, key=lambda name: (-names[name], name))[:_MOST_LINES]
    return [(name, [sample.get(name) for sample in samples]) for name in largest]


def chart(
    title: str, times: Sequence[float], lines: Iterable[tuple[str, Values]], form: Callable[[float], str]
) -> Chart:
    """Return a chart of lines over times in seconds. ``form`` writes a value as text."""
    # The newest is among them, however many are left out.
    step = -(-len(times) // _MOST_POINTS) or 1
    kept = range((len(times) - 1) % step, len(times), step)
    times = [times[at] for at in kept]
    lines = [(name, [values[at] for at in kept]) for name, values in lines]
    top = _round_up(max((value for _, values in lines for value in values if value is not None), default=0.0))
    first, last = (times[0], times[-1]) if times else (0.0, 0.0)
    length = max(last - first, 1.0)
    xs = [WIDTH * (at - first) / length for at in times]

    def text(value: float | None) -> str:
        return "unknown" if value is None else form(value)

    drawn = []
    for name, values in lines:
        pieces: list[list[str]] = [[]]
        for x, value in zip(xs, values, strict=True):
            if value is None:
                pieces.append([])
            else:
                pieces[-1].append(f"{x:.1f},{HEIGHT - HEIGHT * value / top:.1f}")
        drawn.append(Line(name, text(values[-1] if values else None), [" ".join(p) for p in pieces if p]))
    last_of = {min(int(x * _COLUMNS / WIDTH), _COLUMNS - 1): at for at, x in enumerate(xs)}
    columns, begin = [], 0
    for column, at in last_of.items():
        shown = [f"{name} {text(values[at])}" for name, values in lines]
        wide = WIDTH / _COLUMNS
        columns.append(Column(begin * wide, (column + 1 - begin) * wide, "\n".join([_clock(times[at]), *shown])))
        begin = column + 1
    below = [_clock(at) for at in (first, (first + last) / 2, last)] if times else []
    return Chart(title, form(top), below, drawn, columns)


def _clock(at: float) -> str:
    return f"{dt.datetime.fromtimestamp(at, dt.UTC):%H:%M:%S}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, 50 … so that the scale does not change with each reading."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= value)
