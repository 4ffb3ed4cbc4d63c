"""Measure the bytes that an event costs: in Postgres' tables, in its WAL, and on Kafka.

    python benchmarks/capacity.py [--events N] [--bytes N …]

On a Postgres and a broker of its own, with the settings of a new server. Bytes do not depend on the machine's speed;
rates do: those are what ``benchmarks/relay.py`` measures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Final

# This file lies beside the packages that it imports: the folder above comes first.
sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.harness.load import Backlog, fill, wait_until_empty
from benchmarks.harness.measure import wal_position
from benchmarks.harness.publishers import publishing
from benchmarks.harness.relays import ours
from benchmarks.harness.servers import Servers, Site

_SIZE: Final = """
SELECT sum(pg_total_relation_size(c.oid))::bigint FROM pg_class AS c
 WHERE c.relkind = 'r' AND c.relnamespace = %s::regnamespace AND c.relname LIKE %s"""
_TOGETHER: Final = 100
_SECONDS: Final = 600.0

# As consumers insert them: a batch is one statement, and ids rise with the time.
_IDS: Final = """
INSERT INTO consumer.processed_messages (grp, day, message_id)
SELECT 'totals', current_date, uuidv7() FROM generate_series(1, %s)"""


class Meter:
    """The WAL of one database's server, from one reading to the next."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._last = wal_position(site)

    def per(self, count: int) -> float:
        """Return the bytes since the last reading, for each of so many."""
        last, self._last = self._last, wal_position(self._site)
        return (self._last - last) / count


def size(site: Site, schema: str, tables: str, count: int) -> float:
    """Return the bytes of tables with their indexes, for each of so many rows."""
    return int(site.value(_SIZE, schema, tables) or 0) / count


def event(servers: Servers, count: int, payload: int, together: int, archive: int) -> dict[str, float]:
    """Write events and publish them, at once and as a backlog. Returns the bytes that an event took.

    A backlog is deleted after a checkpoint, so that each page is logged whole once more: that is the most.
    """
    found: dict[str, float] = {}
    way = ours("polling", "at-least-once", relay__archive_days=archive)
    with servers.site(f"capacity-{payload}-{together}-{archive}") as site, publishing(way, servers, site) as relay:
        relay.start()
        meter = Meter(site)
        fill(site, Backlog(count, size=payload, together=together))
        wait_until_empty(site, _SECONDS)
        found["WAL, at once"] = meter.per(count)
        relay.halt()
        with site.connect() as connection:
            # As autovacuum does in time: what follows finds an empty table.
            connection.execute("VACUUM outbox.events")
        meter.per(1)
        fill(site, Backlog(count, first=count, size=payload, together=together))
        found["WAL, written"] = meter.per(count)
        found["in events"] = size(site, "outbox", "events", count)
        relay.start()
        wait_until_empty(site, _SECONDS)
        found["WAL, published"] = meter.per(count)
        found["in the archive"] = size(site, "outbox", "published_2%", 2 * count) if archive else 0.0
        logs = servers.kafka.data_dir.rglob(f"{site.topic}-*/*.log")
        found["on Kafka"] = sum(path.stat().st_size for path in logs) / (2 * count)
    return found


def ids(servers: Servers, count: int, batch: int) -> dict[str, float]:
    """Insert a consumer's ids in batches. Returns the bytes that an id took."""
    with servers.site(f"capacity-ids-{batch}") as site:
        site.outbox("db", "upgrade", "--consumer")
        site.outbox("db", "prune", "--consumer")
        meter = Meter(site)
        with site.connect() as connection:
            for start in range(0, count, batch):
                connection.execute(_IDS, (min(batch, count - start),))
        return {"WAL": meter.per(count), "stored": size(site, "consumer", "processed_messages%", count)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--bytes", type=int, nargs="*", default=[200, 740, 4000], help="sizes of a payload")
    given = parser.parse_args()
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder, Servers(Path(folder)) as servers:
        table = Table("payload", "in a commit", "archive", title="Bytes of an event", box=None)
        rows = []
        for payload in given.bytes:
            for together, archive in ((1, 0), (_TOGETHER, 0), (_TOGETHER, 1)):
                rows.append((payload, together, archive, event(servers, given.events, payload, together, archive)))
        for name in rows[0][3]:
            table.add_column(name, justify="right")
        for payload, together, archive, found in rows:
            cells = [f"{value:.0f}" if value else "-" for value in found.values()]
            table.add_row(str(payload), str(together), "yes" if archive else "no", *cells)
        console.print(table)
        for batch in (100, 5_000):
            found = ids(servers, given.events, batch)
            shown = ", ".join(f"{name} {value:.0f} bytes" for name, value in found.items())
            console.print(f"a remembered id, {batch} in a transaction: {shown}")


if __name__ == "__main__":
    main()
