"""Structured logs to stderr: readable text on a terminal, JSON elsewhere. No log entry holds a secret.

Database addresses go through outbox.urls.display_url; Kafka options are never logged, only the bootstrap servers.
"""

from __future__ import annotations

import logging
import sys

import structlog

from outbox._app.console import printable


def configure(level: str = "info", style: str = "auto") -> None:
    """Set up structlog for a command. style is ``auto``, ``console`` or ``json``."""
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()) if console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
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
    return {
        name: "\n".join(map(printable, value.split("\n"))) if isinstance(value, str) else value
        for name, value in entry.items()
    }
