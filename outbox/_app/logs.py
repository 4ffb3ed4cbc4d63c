"""Structured logs to stderr: readable text on a terminal, JSON elsewhere. No log entry holds a secret.

Database addresses go through outbox.urls.display_url; Kafka options are never logged, only the bootstrap servers.
"""

from __future__ import annotations

import logging
import sys

import structlog

from outbox._app.console import printable


def configure(level: str = "info", style: str = "auto", outbox: str | None = None) -> None:
    """Set up structlog for a command. style is ``auto``, ``console`` or ``json``; ``outbox`` is in every entry."""
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()) if console else structlog.processors.JSONRenderer()
    )

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
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def _escaped(_: object, __: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape what could affect a terminal: tracebacks quote what others wrote. JSON escapes by itself."""
    return {name: printable(value, but="\n") if isinstance(value, str) else value for name, value in entry.items()}
