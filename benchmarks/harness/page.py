"""The report as one HTML page: tables, and plots drawn as SVG. Nothing is loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from benchmarks.harness.report import Chapter, cell, errors, repeated, shown_targets, verdict
from benchmarks.harness.results import Metric, Results

_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #1b1f24;
  background: #fff; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2.5em; }
p.about, dl { color: #57606a; }
dl { display: grid; grid-template-columns: max-content auto; gap: 0 1em; } dt, dd { margin: 0; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .7em; border-bottom: 1px solid #d8dee4; text-align: right; vertical-align: top;
  white-space: pre-line; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
table.targets td:nth-child(2), table.targets th:nth-child(2) { text-align: left; }
th { font-weight: 600; }
td.yes { color: #1a7f37; } td.no { color: #b42318; font-weight: 600; }
pre { background: #fdf0ee; padding: .7em; overflow-x: auto; font-size: 12px; }
svg { display: block; margin: 1em 0; max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; }
"""
_COLOURS: Final = ("#0b5fa5", "#1a7f8c", "#5b8c2a", "#8a6d1a", "#b3541e", "#a12c5e", "#6b45a8", "#47525d", "#2e8b57")
_QUICK: Final = "<p><strong>With --quick: small sizes, short runs. The figures mean little.</strong></p>"
_WIDTH: Final = 900
_LEFT: Final = 300
_ROW: Final = 24


def render(chapters: Sequence[Chapter], about: Mapping[str, str]) -> str:
    """Return the page."""
    described = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in about.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>The relay, measured</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>The relay, measured</h1><dl>{described}</dl>"
        '<p class="about">Medians over the rounds, in parentheses the least and greatest. All ways of a '
        "scenario run in each round, in changing order, on the same Postgres (fsync on) and the same broker. Every "
        "event is read back: a run that lost one, or has one out of order, has no figure.</p>"
        f"{_QUICK if any(chapter.scenario.quick for chapter in chapters) else ''}"
        f"{_summary(chapters)}{''.join(map(_chapter, chapters))}</body></html>\n"
    )


def _summary(chapters: Sequence[Chapter]) -> str:
    rows = [(chapter.scenario.title, target) for chapter in chapters for target in shown_targets(chapter)]
    if not rows:
        return ""
    body = "".join(
        f"<tr><td>{escape(title)}</td><td>{escape(target.what)}</td><td>{escape(target.asked)}</td><td>{escape(target.found)}</td>"
        f'<td class="{_class(target.reached)}">{verdict(target.reached)}</td></tr>'
        for title, target in rows
    )
    head = "<tr><th></th><th>target</th><th>asked</th><th>found</th><th></th></tr>"
    reached = sum(target.reached is True for _, target in rows)
    judged = sum(target.reached is not None for _, target in rows)
    table = f'<div class="wide"><table class="targets">{head}{body}</table></div>'
    return f"<h2>Targets: {reached} of {judged} reached</h2>{table}"


def _class(reached: bool | None) -> str:
    return {True: "yes", False: "no", None: "none"}[reached]


def _chapter(chapter: Chapter) -> str:
    scenario, results = chapter.scenario, chapter.results
    head = "".join(f"<th>{escape(m.name.replace('_', ' '))}\n{escape(m.unit)}</th>" for m in scenario.metrics)
    body = "".join(
        f"<tr><td>{escape(way)}</td>"
        + "".join(f"<td>{escape(cell(results, way, metric))}</td>" for metric in scenario.metrics)
        + f"<td>{repeated(results, way)}</td><td>{len(errors(results, way))}</td></tr>"
        for way in results.ways
    )
    plots = "".join(bars(results, metric) for metric in scenario.metrics if metric.plotted)
    failed = "".join(
        f"<pre>{escape(run.way)}, round {run.round}: {escape(run.error)}</pre>"
        for run in results.runs
        if run.error is not None
    )
    return (
        f'<h2>{escape(scenario.title)}</h2><p class="about">{escape(scenario.about)}</p>{plots}{_lines(results)}'
        f'<div class="wide"><table><tr><th></th>{head}<th>repeated</th><th>failed</th></tr>{body}</table></div>{failed}'
    )


def bars(results: Results, metric: Metric) -> str:
    """Return a bar for each way's median, with a whisker from least to greatest and a dot for each round."""
    shown = [(way, spread) for way in results.ways if (spread := results.spread(way, metric.name)) is not None]
    if not shown:
        return ""
    top = max(spread.greatest for _, spread in shown) or 1.0
    scale = (_WIDTH - _LEFT - 110) / top
    parts = []
    for number, (way, spread) in enumerate(shown):
        middle = 30 + number * _ROW + _ROW / 2
        width = max(spread.median, 0) * scale
        colour = _colour(results, way)
        parts.append(f'<text x="{_LEFT - 8}" y="{middle + 4}" text-anchor="end">{escape(way)}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{middle - 8}" width="{width:.1f}" height="16" fill="{colour}" opacity="0.75">'
            f"<title>{escape(way)}: {metric.text(spread.median)}</title></rect>"
        )
        low, high = (_LEFT + max(value, 0) * scale for value in (spread.least, spread.greatest))
        parts.append(f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="#1b1f24"/>')
        parts += [
            f'<circle cx="{_LEFT + max(value, 0) * scale:.1f}" cy="{middle}" r="2.5" fill="#1b1f24"/>'
            for value in results.by_round(way, metric.name).values()
        ]
        parts.append(
            f'<text x="{max(high, _LEFT + width) + 8:.1f}" y="{middle + 4}">{metric.text(spread.median)}</text>'
        )
    title = f"{metric.name.replace('_', ' ')}, {metric.unit}" + (" (less is better)" if metric.less_is_better else "")
    return _svg(40 + len(shown) * _ROW, title, "".join(parts))


def _lines(results: Results) -> str:
    """Return the plots that are made of series: latencies by percentile, memory over time."""
    latency = {
        way: [(part / 2, value) for part, value in enumerate(values)]
        for way in results.ways
        for run in results.runs[::-1]
        if run.way == way and (values := run.series.get("latency"))
    }
    memory = {
        run.way: list(zip(run.series["seconds"], run.series["resident"], strict=True))
        for run in results.runs
        if "resident" in run.series
    }
    return (lines(results, latency, "latency in ms by percentile, first round", log=True) if latency else "") + (
        lines(results, memory, "MB resident over seconds") if memory else ""
    )


def lines(
    results: Results, curves: Mapping[str, Sequence[tuple[float, float]]], title: str, *, log: bool = False
) -> str:
    """Return a plot of curves; ``log``: with a logarithmic vertical axis."""
    height, left, bottom = 300, 60, 30

    def shaped(value: float) -> float:
        return math.log10(max(value, 0.1)) if log else value

    points = [point for curve in curves.values() for point in curve]
    right = max(x for x, _ in points) or 1.0
    low = min(shaped(y) for _, y in points) if log else 0.0
    high = max(shaped(y) for _, y in points)
    span = (high - low) or 1.0
    width = _WIDTH - left - 20

    def at(x: float, y: float) -> str:
        across = left + x / right * width
        return f"{across:.1f} {30 + (1 - (shaped(y) - low) / span) * (height - bottom - 30):.1f}"

    parts = []
    for value in _ticks(low, high, log=log):
        y = at(0, value).split()[1]
        parts.append(f'<path d="M{left} {y}H{_WIDTH - 20}" stroke="#d8dee4"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for step in range(5):
        x = right * step / 4
        across = at(x, 1).split()[0]
        parts.append(f'<text x="{across}" y="{height - 8}" text-anchor="middle">{x:g}</text>')
    for number, (way, curve) in enumerate(curves.items()):
        colour = _colour(results, way)
        path = "L".join(at(x, y) for x, y in curve)
        parts.append(
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8"><title>{escape(way)}</title></path>'
        )
        parts.append(f'<rect x="{left}" y="{height + 10 + number * 18}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + 18}" y="{height + 20 + number * 18}">{escape(way)}</text>')
    return _svg(height + 20 + 18 * len(curves), title, "".join(parts))


def _ticks(low: float, high: float, *, log: bool) -> list[float]:
    if log:
        return [10.0**power for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
    return [low + (high - low) * step / 4 for step in range(5)]


def _colour(results: Results, way: str) -> str:
    return _COLOURS[results.ways.index(way) % len(_COLOURS)]


def _svg(height: int, title: str, content: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">'
        f'<title>{escape(title)}</title><text x="0" y="16" font-weight="600">{escape(title)}</text>{content}</svg>'
    )
