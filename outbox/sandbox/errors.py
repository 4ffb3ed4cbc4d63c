"""Errors of the servers that run on this machine. Each message says what to do about it."""

from __future__ import annotations

from pathlib import Path

from outbox.errors import OutboxError


class ServiceError(OutboxError):
    """A Postgres or Kafka server on this machine could not be started, stopped or reached."""


class StartFailed(ServiceError):
    """A server ended, or did not become ready in time. The text ends with the tail of its log.

    ``log`` is the whole file, if there is one.
    """

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message if log is None else f"{message}\n{tail(log)}")
        self.log = log


class PortTaken(StartFailed):
    """Another process listens on the server's port."""


def tail(path: Path, lines: int = 40) -> str:
    """Return the last lines of a log under a heading that names the file, or the reason why there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    last = text.splitlines()[-lines:]
    return "\n".join([f"--- the end of {path}", *last, "---"]) if last else f"(the log {path} is empty)"
