"""The output of ``outbox consume``: a progress bar and a table for ``--once`` on a terminal, otherwise log lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


class Logger(Protocol):
    """The logger of the plain view; structlog's has this method."""

    def info(self, event: str, /, **figures: Any) -> Any:
        """Log."""
        ...


class View(Protocol):
    """Shows a run. ``report`` has the signature of the runner's callback."""

    def report(self, text: str, figures: Mapping[str, Any]) -> None:
        """Show what happened: ``planned`` at the start of ``--once``, ``round`` after each round, and others."""
        ...

    def result(self, totals: Mapping[str, Any], topics: Mapping[str, Mapping[str, int]]) -> None:
        """Show the result of the run. ``topics``: read, applied, duplicates and dead of each; may be empty."""
        ...


@contextmanager
def open_view(log: Logger, *, live: bool, console: Console | None = None) -> Iterator[View]:
    """Yield the view for a terminal, or the plain one."""
    if not live:
        yield _Plain(log)
        return
    view = _Live(console or Console())
    try:
        yield view
    finally:
        view.close()


class _Plain:
    def __init__(self, log: Logger) -> None:
        self._log = log

    def report(self, text: str, figures: Mapping[str, Any]) -> None:
        self._log.info(text, **figures)

    def result(self, totals: Mapping[str, Any], topics: Mapping[str, Mapping[str, int]]) -> None:  # noqa: ARG002
        dead = f", dead letters {totals['dead']:,}" if totals.get("dead") else ""
        typer.echo(
            f"{totals['group']}: read {totals['read']:,}, applied {totals['applied']:,}, duplicates "
            f"{totals['duplicates']:,}{dead} in {totals['seconds']:.1f} s"
        )


class _Live:
    """The bar counts offsets, like the plan, so it includes transaction markers and messages that are filtered out."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._passed = 0
        self._planned: int | None = None
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("looking for messages", total=None, figures="")
        self._bar.start()

    def report(self, text: str, figures: Mapping[str, Any]) -> None:
        if text == "planned":
            self._planned = figures["messages"]
            partitions = f"{figures['partitions']} partition{'' if figures['partitions'] == 1 else 's'}"
            self._update(description=f"applying from {partitions}", total=self._planned)
        elif text == "round":
            self._passed += figures["passed"]
            self._update(completed=self._passed, rate=figures["rows_per_second"])
        else:
            listed = "  ".join(f"{name}={value}" for name, value in figures.items())
            self._bar.console.print(Text(f"{text}  {listed}", style="dim"))

    def result(self, totals: Mapping[str, Any], topics: Mapping[str, Mapping[str, int]]) -> None:
        self._bar.update(self._task, description="done")
        self.close()
        table = Table("topic", "read", "applied", "duplicates", "dead", "rows/s", "rounds", "seconds")
        # Fold a topic's name on a narrow terminal instead of truncating it.
        table.columns[0].overflow = "fold"
        for column in table.columns[1:]:
            column.justify = "right"
        for topic, counts in topics.items():
            table.add_row(Text(topic), *(f"{counts[name]:,}" for name in _COUNTS), "", "", "")
        if topics:
            table.add_section()
        table.add_row(
            Text(totals["group"]),
            *(f"{totals[name]:,}" for name in _COUNTS),
            f"{totals['rows_per_second']:,.0f}",
            f"{totals['rounds']:,}",
            f"{totals['seconds']:.1f}",
        )
        self._console.print(table)
        if totals["dead"]:
            command = f"outbox dead-letters list --side consumer --group {totals['group']}"
            hint = f"{totals['dead']:,} became dead letters: {command}"
            self._console.print(Text(hint, style="bold red"), soft_wrap=True)

    def close(self) -> None:
        """Restore the terminal."""
        self._bar.stop()

    def _update(self, *, rate: float | None = None, **changes: Any) -> None:
        figures = f"{self._passed:,}" if self._planned is None else f"{self._passed:,} of {self._planned:,}"
        if rate:
            figures += f"  {rate:,.0f}/s"
        self._bar.update(self._task, figures=figures, refresh=True, **changes)


_COUNTS = ("read", "applied", "duplicates", "dead")


def by_topic(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return each topic's difference between two states of a group's progress, without topics that did not change."""
    gained: dict[str, dict[str, int]] = {}
    for rows, sign in ((before, -1), (after, 1)):
        for row in rows:
            if row["topic"] is None:
                continue
            counts = gained.setdefault(row["topic"], dict.fromkeys(_COUNTS, 0))
            for name in _COUNTS[1:]:
                counts[name] += sign * row[name]
                counts["read"] += sign * row[name]
    return {topic: counts for topic, counts in sorted(gained.items()) if counts["read"]}
