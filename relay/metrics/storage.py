"""What the tables of an outbox and its consumers take: sizes, dead rows, partitions that should be gone, the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from outbox.consumer.statements import TABLES as CONSUMER
from outbox.errors import SchemaError
from relay.core.ports import Unavailable
from relay.metrics import gauge, gauges
from relay.settle.statements import TABLES as OUTBOX
from relay.sizes import Disk, disk, table_sizes

_READ_SECONDS: Final = 60.0
_STALE_SECONDS: Final = 240.0
# Ids without a time have the day 1970-01-01, whose partition is kept for good.
_YEARS_SECONDS: Final = 20 * 365 * 86_400.0
_DAY_SECONDS: Final = 86_400.0
IDS: Final = "processed_messages"
# No table of a user's own becomes a label.
_OWN: Final = frozenset({*OUTBOX, *CONSUMER, "published_default", "alembic_version"})


@dataclass(slots=True)
class Table:
    """A table with its partitions, except for the default one, which is a table of its own here.

    over_seconds  how long the time of its first partition is over; 0 without partitions.
    idle_seconds  how long that of the last one with rows is over; None without rows.
    """

    bytes: int = 0
    rows: int = 0
    dead_rows: int = 0
    over_seconds: float = 0.0
    idle_seconds: float | None = None

    def overdue_seconds(self, name: str, days: int) -> float:
        """Return for how long a partition should be gone of which so many days are kept.

        Of ids they count back from the newest; see consumer/retention.py.
        """
        idle = self.idle_seconds if name == IDS else None
        since_newest = idle + _DAY_SECONDS if idle else 0.0
        return max(self.over_seconds - since_newest - days * _DAY_SECONDS, 0.0)


@dataclass(frozen=True, slots=True)
class Storage:
    """One reading. ``tables`` by schema and name; ``overdue``: seconds since an expired partition should be gone.

    ``disk`` is None when the outbox's database did not answer.
    """

    disk: Disk | None
    tables: Mapping[tuple[str, str], Table]
    overdue: Mapping[tuple[str, str], float] = field(default_factory=dict)


def summed(rows: Iterable[Mapping[str, Any]]) -> dict[str, Table]:
    """Return the tables of the outbox or of the consumers by name, from the rows of table_sizes."""
    found: dict[str, Table] = {}
    for row in rows:
        name = row["name"] if row["stray"] else row["parent"] or row["name"]
        if name not in _OWN:
            continue
        table = found.setdefault(name, Table())
        table.bytes += row["bytes"]
        table.rows += row["live_rows"]
        table.dead_rows += row["dead_rows"]
        over = row["over_seconds"] or 0.0
        if over < _YEARS_SECONDS:
            table.over_seconds = max(table.over_seconds, over)
            if row["filled"] and row["over_seconds"] is not None:
                known = table.idle_seconds
                table.idle_seconds = max(over if known is None else min(known, over), 0.0)
    return found


def storage_metrics(found: Storage) -> Iterator[GaugeMetricFamily]:
    labels = ["schema", "table"]
    tables = sorted(found.tables.items())
    for name, text in (
        ("bytes", "Size of a table with its indexes and partitions; the default partition is a table of its own."),
        ("rows", "Rows, by the server's statistics."),
        ("dead_rows", "Dead rows, by the server's statistics."),
    ):
        yield gauges(f"table_{name}", text, labels, [(place, getattr(table, name)) for place, table in tables])
    yield gauges(
        "table_prune_overdue_seconds",
        "How long ago a day's partition should have been dropped: of published (relay.archive_days), and of "
        "processed_messages (consumer.keep_days); 0 if none should.",
        labels,
        sorted(found.overdue.items()),
    )
    if found.disk is None:
        return
    yield gauge("database_bytes", "Size of the outbox's database, all schemas.", found.disk.database_bytes)
    yield gauge(
        "wal_kept_bytes",
        "WAL that the server keeps for the slot furthest behind, of any application; 0 without slots.",
        found.disk.kept_bytes,
    )
    if found.disk.wal_bytes is not None:
        yield gauge(
            "wal_directory_bytes",
            "Size of the WAL directory, if the relay's role has pg_monitor.",
            found.disk.wal_bytes,
        )


@dataclass(frozen=True, slots=True)
class Place:
    """A schema to look at. ``keep_days``: of a partitioned table, how many days of it are kept besides today."""

    connect: Callable[[], psycopg.Connection[Any]]
    schema: str
    keep_days: Mapping[str, int]


class StorageWatch:
    """Reads sizes from time to time, and exposes them while ``shows`` says so: one relay of an outbox does.

    The first of the ``places`` is the outbox, whose database's size is shown.
    """

    def __init__(self, places: Sequence[Place], shows: Callable[[], bool], registry: CollectorRegistry) -> None:
        self._places = places
        self._shows = shows
        self._found: Storage | None = None
        self._looked = 0.0
        self._whole = True
        registry.register(self)

    def look(self) -> None:
        """Read the sizes once a minute, if they are ours to show. Raises Unavailable, after those that can be read."""
        if not self._shows():
            self._found = None
            return
        if self._found is not None and self._whole and time.monotonic() - self._looked < _READ_SECONDS:
            return
        tables: dict[tuple[str, str], Table] = {}
        overdue: dict[tuple[str, str], float] = {}
        taken: Disk | None = None
        failed: Unavailable | SchemaError | None = None
        for number, place in enumerate(self._places):
            try:
                with place.connect() as connection:
                    if number == 0:
                        taken = disk(connection)
                    found = summed(table_sizes(connection, place.schema))
            except (Unavailable, SchemaError) as error:
                failed = failed or error
                continue
            tables |= {(place.schema, name): table for name, table in found.items()}
            overdue |= {
                (place.schema, name): found[name].overdue_seconds(name, days)
                for name, days in place.keep_days.items()
                if name in found
            }
        self._whole = failed is None
        if taken is not None or tables:
            self._found, self._looked = Storage(taken, tables, overdue), time.monotonic()
        if failed is not None:
            raise failed

    def collect(self) -> Iterator[GaugeMetricFamily]:
        found = self._found
        if found is not None and self._shows() and time.monotonic() - self._looked <= _STALE_SECONDS:
            yield from storage_metrics(found)
