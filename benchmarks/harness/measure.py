"""What processes cost: CPU, memory, threads; what Postgres is asked; percentiles."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.harness.servers import Servers, Site

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_STATEMENT: Final = re.compile(rb" db=(\S+) LOG:  (?:statement|execute [^:]*|fastpath function call): *(\w*)")
_CONTROL: Final = {b"BEGIN", b"COMMIT", b"ROLLBACK", b"SET", b"SAVEPOINT", b"RELEASE", b"START"}


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value that ``part`` of the sorted values do not exceed."""
    return values[min(int(len(values) * part), len(values) - 1)]


def children(pid: int) -> list[int]:
    """Return a process's children. Straight from /proc: this runs while a relay is measured."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, listed.read_text().split())
    return found


def _family(pids: Iterable[int]) -> list[int]:
    """Return the processes and their descendants."""
    found = list(pids)
    for pid in found:
        found += children(pid)
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of processes, their children, and those of their children that have ended."""
    ticks = 0
    for pid in _family(pids):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # After the name in parentheses: fields 14 to 17 are utime, stime, cutime, cstime.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(value) for value in fields[11:15])
    return ticks / _TICKS


@dataclass(frozen=True)
class Cpu:
    """CPU seconds so far: of who publishes (the relay, Connect or a bare loop), of Postgres and of the broker."""

    publisher: float
    postgres: float
    broker: float
    at: float

    @classmethod
    def now(cls, servers: Servers, publisher: Sequence[int]) -> Cpu:
        postgres = servers.postgres.pid
        assert postgres is not None
        return cls(cpu_seconds(publisher), cpu_seconds([postgres]), cpu_seconds(servers.kafka.pids), time.monotonic())

    @property
    def total(self) -> float:
        return self.publisher + self.postgres + self.broker

    def percent_since(self, before: Cpu) -> dict[str, float]:
        """Return the share of one core since ``before``, in percent, by name."""
        seconds = (self.at - before.at) / 100
        return {
            "publisher_cpu": (self.publisher - before.publisher) / seconds,
            "postgres_cpu": (self.postgres - before.postgres) / seconds,
            "broker_cpu": (self.broker - before.broker) / seconds,
        }


def status_of(path: str, name: str) -> int:
    """Return a number of a process's or thread's status below /proc; 0 once it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lines = Path("/proc", path, "status").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
    return 0


def _status(pid: int, name: str) -> int:
    """Return a number of the status, summed over the process and its children."""
    return sum(status_of(str(member), name) for member in _family([pid]))


def resident_mb(pid: int) -> float:
    return _status(pid, "VmRSS:") / 1024


def threads(pid: int) -> int:
    return _status(pid, "Threads:")


def connections(site: Site) -> int:
    """Return the number of sessions on the site's database, walsenders included and this one not."""
    found = site.value(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()", site.database
    )
    return int(found)


def wal_position(site: Site) -> int:
    """Return how many bytes of WAL the server has written."""
    return int(site.value("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint"))


@dataclass
class Statements:
    """What a site's database was asked while it was watched. ``control`` are BEGIN, COMMIT, SET and their like."""

    seconds: float = 0.0
    all: int = 0
    control: int = 0


def log_statements(site: Site) -> None:
    """Make Postgres log every statement of sessions that begin from now on."""
    with site.connect() as connection:
        connection.execute(f"ALTER DATABASE {site.database} SET log_statement = 'all'".encode())


@contextmanager
def count_statements(servers: Servers, site: Site) -> Iterator[Statements]:
    """Count the statements of the site's database within the block, from the server's log."""
    counted = Statements()
    begin, started = servers.postgres.log.stat().st_size, time.monotonic()
    yield counted
    counted.seconds = time.monotonic() - started
    with servers.postgres.log.open("rb") as log:
        log.seek(begin)
        for line in log:
            match = _STATEMENT.search(line)
            if match is not None and match[1].decode() == site.database:
                counted.all += 1
                counted.control += match[2].upper() in _CONTROL
