"""The report: tables on the terminal, and everything as JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.harness.results import Results, Target
from benchmarks.harness.scenarios import Scenario, Sizes
from benchmarks.harness.servers import ROOT, Servers

_LIBRARIES: Final = ("confluent-kafka", "psycopg")
_VERDICTS: Final = {True: "reached", False: "NOT reached", None: "–"}


@dataclass
class Chapter:
    """A scenario with its runs."""

    scenario: Scenario
    results: Results


def facts(servers: Servers, sizes: Sizes, rounds: int, settings: dict[str, str]) -> dict[str, str]:
    """Return what the figures depend on."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or "unknown",
        "cores": str(os.cpu_count()),
        "processor": _processor(),
        "python": platform.python_version(),
        "postgres": _postgres(servers),
        "sizes": ", ".join(f"{name} {value}" for name, value in asdict(sizes).items()),
        "rounds": str(rounds),
    }
    if servers.arguments:
        found["relay run"] = " ".join(servers.arguments)
    found |= {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return found | {f"OUTBOX_{name.upper()}": value for name, value in settings.items()}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _postgres(servers: Servers) -> str:
    import psycopg

    with psycopg.connect(servers.postgres.url()) as connection:
        row = connection.execute("SHOW server_version").fetchone()
    assert row is not None
    return str(row[0])


def show(console: Console, chapter: Chapter) -> None:
    """Print a scenario: its figures, its errors, its targets."""
    scenario, results = chapter.scenario, chapter.results
    if scenario.quick:
        console.print("With --quick: small sizes, short runs. It shows that it works; the figures mean little.")
    table = Table(title=scenario.title, title_justify="left", caption=scenario.about, caption_justify="left")
    table.add_column("")
    for metric in scenario.metrics:
        table.add_column(f"{metric.name.replace('_', ' ')}\n{metric.unit}", justify="right")
    table.add_column("repeated", justify="right")
    table.add_column("failed", justify="right")
    for way in results.ways:
        runs = [run for run in results.runs if run.way == way]
        spreads = [(metric, results.spread(way, metric.name)) for metric in scenario.metrics]
        cells = ["–" if spread is None else spread.text(metric).replace(" ", "\n") for metric, spread in spreads]
        failed = sum(run.error is not None for run in runs)
        table.add_row(way, *cells, str(sum(run.repeated for run in runs)), str(failed))
    console.print(table)
    for run in results.runs:
        if run.error is not None:
            console.print(f"FAILED: {run.way}, round {run.round}: {run.error}", style="red", markup=False)
    show_targets(console, shown_targets(chapter))
    console.print()


def show_targets(console: Console, targets: Sequence[Target]) -> None:
    """Print targets as a table, if there are any."""
    if targets:
        asked = Table("target", "asked", "found", "", title_justify="left")
        for target in targets:
            asked.add_row(target.what, target.asked, target.found, _VERDICTS[target.reached])
        console.print(asked)


def shown_targets(chapter: Chapter) -> list[Target]:
    """Return the targets; those without a figure only where a run failed, and not where it was never to run."""
    targets = chapter.scenario.targets(chapter.results)
    failed = any(run.error is not None for run in chapter.results.runs)
    return [target for target in targets if failed or target.spread is not None]


def as_json(chapters: Sequence[Chapter], about: dict[str, str]) -> str:
    """Return everything: every run, medians and spreads, targets."""
    found = [
        {
            "name": chapter.scenario.name,
            "title": chapter.scenario.title,
            "about": chapter.scenario.about,
            "metrics": [asdict(metric) for metric in chapter.scenario.metrics],
            "runs": [asdict(run) for run in chapter.results.runs],
            "summary": {
                way: {
                    metric.name: asdict(spread)
                    for metric in chapter.scenario.metrics
                    if (spread := chapter.results.spread(way, metric.name)) is not None
                }
                for way in chapter.results.ways
            },
            "targets": [
                {**asdict(target), "found": target.found} for target in chapter.scenario.targets(chapter.results)
            ],
        }
        for chapter in chapters
    ]
    return json.dumps({"about": about, "scenarios": found}, indent=1, ensure_ascii=False)
