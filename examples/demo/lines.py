"""The demo's output on stderr: what happens, and the figures. stdout has only the result."""

from __future__ import annotations

import time
from typing import Final, Self

from rich.console import Console

from examples.demo.ledger import Figures

_EVERY_SECONDS: Final = 2.0


class Lines:
    """A line for each event, and the figures: below the lines on a terminal, else every two seconds if they change."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status = self._console.status("")
        self._started = time.monotonic()
        self._next = 0.0
        self._figures: Figures | None = None

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Show a line of text."""
        self._console.print(f"[{self.seconds:6.1f} s] {text}", markup=False)

    def update(self, figures: Figures) -> None:
        """Show new figures."""
        oldest = "-" if figures.oldest_seconds is None else f"{figures.oldest_seconds:.1f} s"
        text = (
            f"committed {figures.committed:>7,}  published {figures.published:>7,}  applied {figures.applied:>7,}  "
            f"unpublished {figures.backlog:>6,}, oldest {oldest}"
        )
        if self._console.is_terminal:
            self._status.update(text)
        elif self.seconds >= self._next and figures != self._figures:
            self._next, self._figures = self.seconds + _EVERY_SECONDS, figures
            self.say(text)
