"""Structured logs to stderr: readable text on a terminal, JSON elsewhere. No log entry holds a secret.

Database addresses go through outbox.urls.display_url; Kafka options are never logged, only the bootstrap servers.
"""

from __future__ import annotations

import atexit
import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog

from outbox._app.console import printable


def configure(level: str = "info", style: str = "auto", outbox: str | None = None) -> None:
    """Set up structlog for a command. style is ``auto``, ``console`` or ``json``; ``outbox`` is in every entry."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    console = style == "console" or (style == "auto" and terminal)
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=terminal) if console else structlog.processors.JSONRenderer()
    )
    atexit.register(_drop_what_is_left)

    def name_outbox(_: object, __: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
        # Not a contextvar: other threads, which log most, have a context of their own.
        return entry if outbox is None else {**entry, "outbox": outbox}

    structlog.configure(
        processors=[
            name_outbox,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *([_escaped] if console else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Lossy(sys.stderr))),
        cache_logger_on_first_use=True,
    )


class _Lossy:
    """A file whose disk may be full, or whose pipe closed: then a line is lost, and no thread ends because of it."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def write(self, text: str) -> None:
        # ValueError: the file is closed.
        with suppress(OSError, ValueError):
            if self._file is not None:
                self._file.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            if self._file is not None:
                self._file.flush()


def _drop_what_is_left() -> None:
    """Keep Python from ending with status 120 because of a line that it can't write."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except (OSError, ValueError):
        # As Python itself does where there is none.
        sys.stderr = None


def _escaped(_: object, __: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape what could affect a terminal: tracebacks quote what others wrote. JSON escapes by itself."""
    return {name: printable(value, but="\n") if isinstance(value, str) else value for name, value in entry.items()}
