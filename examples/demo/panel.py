"""The demo's output: a live panel on a terminal, otherwise lines on stderr; stdout has only the result."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel as Box
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.demo.ledger import Figures


class Panel(Protocol):
    """Shows the demo's progress."""

    def say(self, text: str) -> None:
        """Show a line of text."""
        ...

    def update(self, figures: Figures, states: Mapping[str, str]) -> None:
        """Show new figures, and the state of each process."""
        ...

    def result(self, line: str, *, clean: bool, seconds: float) -> None:
        """Show the reconciliation."""
        ...


@contextmanager
def open_panel(*, live: bool) -> Iterator[Panel]:
    """Open the panel for a terminal, or the plain one."""
    if not live:
        yield _Plain()
        return
    panel = _Live()
    with panel.live:
        yield panel


class _Plain:
    """A line for each event, and one with figures at most every two seconds."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        self._next = 0.0

    def say(self, text: str) -> None:
        self._console.print(f"[{time.monotonic() - self._started:6.1f} s] {text}", markup=False)

    def update(self, figures: Figures, states: Mapping[str, str]) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 2
            self.say(
                f"committed {figures.committed:>7,}  published {figures.published:>7,}  applied {figures.applied:>7,}  "
                f"backlog {figures.backlog:>6,}  oldest {_age(figures.oldest_seconds)}"
            )

    def result(self, line: str, *, clean: bool, seconds: float) -> None:
        self.say(f"{'clean' if clean else 'NOT CLEAN'} after {seconds:.0f} s")


class _Live:
    """Figures as bars relative to the committed count, the processes, and the last lines of text."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._lines: deque[str] = deque(maxlen=8)
        self._figures = Figures(0, 0, 0, 0, None, 0, 0)
        self._states: Mapping[str, str] = {}
        self._result: Text | None = None
        self.live = Live(self._render(), refresh_per_second=8, console=Console())

    def say(self, text: str) -> None:
        self._lines.append(f"{time.monotonic() - self._started:6.1f} s  {text}")
        self.live.update(self._render())

    def update(self, figures: Figures, states: Mapping[str, str]) -> None:
        self._figures, self._states = figures, states
        self.live.update(self._render())

    def result(self, line: str, *, clean: bool, seconds: float) -> None:
        self._result = Text(f"{line}   ({seconds:.0f} s)", style="bold green" if clean else "bold red")
        self.live.update(self._render())

    def _render(self) -> Box:
        figures = self._figures
        table = Table.grid(padding=(0, 2))
        rows = (("committed", figures.committed), ("published", figures.published), ("applied", figures.applied))
        most = max(1, figures.committed)
        for name, value in rows:
            table.add_row(name, f"{value:,}", ProgressBar(total=most, completed=min(value, most), width=40))
        table.add_row("not published", f"{figures.backlog:,}", f"oldest {_age(figures.oldest_seconds)}")
        table.add_row("not applied", f"{max(0, figures.committed - figures.applied):,}")
        table.add_row("repeats dropped", f"{figures.duplicates:,}")
        table.add_row("lost", f"{figures.lost:,}")
        table.add_row("applied twice", f"{figures.applied_twice:,}")
        table.add_row("out of order", f"{figures.out_of_order:,}")
        for name, state in self._states.items():
            table.add_row(name, Text(state), style="cyan")
        parts: list[Table | Text] = [table, Text("\n".join(self._lines), style="dim")]
        if self._result is not None:
            parts.append(self._result)
        return Box(Group(*parts), title="orders → Postgres → Kafka → Spark → Postgres", border_style="blue")


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
