"""The demo's output: a live panel on a terminal, else plain lines (on stderr: stdout is for the result)."""

from __future__ import annotations

import threading
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

from relay.cli.demo.ledger import Sight
from relay.cli.demo.trend import Trend


class Panel(Protocol):
    """Shows the demo's progress. ``say`` is called from any thread."""

    def say(self, text: str) -> None:
        """Show a line of text."""
        ...

    def hint(self, text: str) -> None:
        """Show what can be pressed, until the result is shown."""
        ...

    def update(self, sight: Sight, states: Mapping[str, object]) -> None:
        """Show new figures, and what each process does."""
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
        self._print(text)

    def hint(self, text: str) -> None:
        self._print(text)

    def update(self, sight: Sight, states: Mapping[str, object]) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 2
            self._print(
                f"committed {sight.committed:>7,}  published {sight.published:>7,}  applied {sight.applied:>7,}  "
                f"backlog {sight.backlog:>6,}  oldest {_age(sight.oldest_seconds)}"
            )

    def result(self, line: str, *, clean: bool, seconds: float) -> None:
        self._print(f"{'clean' if clean else 'NOT CLEAN'} after {seconds:.0f} s")

    def _print(self, text: str) -> None:
        self._console.print(f"[{time.monotonic() - self._started:6.1f} s] {text}", markup=False)


class _Live:
    """Figures as bars relative to the committed count, the processes, and the last lines of text."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._said: deque[str] = deque(maxlen=8)
        self._sight = Sight(0, 0, 0, 0, None, 0, 0)
        self._trend = Trend()
        self._states: Mapping[str, object] = {}
        self._hint: str | None = None
        self._result: Text | None = None
        self._lock = threading.Lock()
        self.live = Live(self._render(), refresh_per_second=8, console=Console())

    def say(self, text: str) -> None:
        with self._lock:
            self._said.append(f"{time.monotonic() - self._started:6.1f} s  {text}")
            self.live.update(self._render())

    def hint(self, text: str) -> None:
        with self._lock:
            self._hint = text
            self.live.update(self._render())

    def update(self, sight: Sight, states: Mapping[str, object]) -> None:
        with self._lock:
            self._sight, self._states = sight, states
            self._trend.add(time.monotonic(), sight)
            self.live.update(self._render())

    def result(self, line: str, *, clean: bool, seconds: float) -> None:
        with self._lock:
            self._hint = None
            self._result = Text(f"{line}   ({seconds:.0f} s)", style="bold green" if clean else "bold red")
            self.live.update(self._render())

    def _render(self) -> Box:
        sight = self._sight
        figures = Table.grid(padding=(0, 2))
        rows = (("committed", sight.committed), ("published", sight.published), ("applied", sight.applied))
        most = max(1, sight.committed)
        for name, value in rows:
            bar = ProgressBar(total=most, completed=min(value, most), width=40)
            figures.add_row(name, f"{value:,}", bar, f"{self._trend.rate(name):,.0f}/s")
        figures.add_row("not published", f"{sight.backlog:,}", f"oldest {_age(sight.oldest_seconds)}")
        unapplied = max(0, sight.committed - sight.applied)
        figures.add_row("not applied", f"{unapplied:,}", f"oldest {_age(self._trend.behind)}")
        figures.add_row("repeats dropped", f"{sight.duplicates:,}")
        wrong = f"lost {sight.lost:,} · applied twice {sight.applied_twice:,} · out of order {sight.out_of_order:,}"
        figures.add_row("so far", "", wrong)
        for name, state in self._states.items():
            figures.add_row(name, Text(str(state)), style="cyan")
        parts: list[Table | Text] = [figures, Text("\n".join(self._said), style="dim")]
        if self._result is not None:
            parts.append(self._result)
        title = "orders → Postgres → Kafka → Spark → Postgres"
        return Box(Group(*parts), title=title, subtitle=self._hint, border_style="blue")


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
