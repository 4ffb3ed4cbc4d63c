"""Finds the server that runs on a data directory, by postmaster.pid, which outlives a crash and can be wrong."""

from __future__ import annotations

from pathlib import Path

import psutil

from outbox.sandbox._process import alive, psutil_process, wait_for
from outbox.sandbox.errors import StartFailed


def lines(pgdata: Path) -> list[str]:
    """Return the file's lines: line 1 is the pid, 4 the port, 8 the state. Empty if there is no file."""
    try:
        return (pgdata / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return []


def running_on(pgdata: Path) -> tuple[psutil.Process, int] | None:
    """Find the postmaster that runs on this data directory, and its port.

    Its pid file outlives a crash, so the process with that pid must also have the directory as its working directory,
    as every postmaster has.
    """
    found = lines(pgdata)
    if len(found) < 4:
        return None
    process = psutil_process(int(found[0]))
    if process is None or not _works_in(process, pgdata):
        return None
    return process, int(found[3])


def remove_stale_file(pgdata: Path, timeout: float) -> None:
    """Remove a killed postmaster's pid file where Postgres itself would keep it.

    Postgres considers the file valid while any process has that pid: an unrelated one by now, or, in a container whose
    first process does not reap, the killed one's zombie. Raises StartFailed if a process of that server is left.
    """
    found = lines(pgdata)
    if not found or not psutil.pid_exists(int(found[0])):
        return

    def all_ended() -> bool:
        return not any(_works_in(process, pgdata) for process in psutil.process_iter())

    if not wait_for(all_ended, timeout):
        raise StartFailed(f"processes of a killed Postgres still work in {pgdata}; end them first")
    (pgdata / "postmaster.pid").unlink(missing_ok=True)


def _works_in(process: psutil.Process, pgdata: Path) -> bool:
    """Return whether this is a process of the server on that data directory: all have it as working directory."""
    try:
        return alive(process) and Path(process.cwd()) == pgdata.resolve()
    except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
        return False  # gone meanwhile, or another user's
