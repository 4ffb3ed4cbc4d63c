"""What writers do: a backlog, and a steady load from a process of its own.

Every event's payload is {"n": number, "pad": text}: the number says on Kafka which events are missing, repeated or out
of order. Half of a small payload repeats itself, so that compression finds about what it finds in real JSON; big ones
do not compress.
"""

from __future__ import annotations

import base64
import multiprocessing
import os
import time
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import psycopg

from benchmarks.harness.servers import BenchError, Site, wait_until

KEYS: Final = 5_000
SMALL: Final = 740
_FRAME: Final = len('{"n": 123456, "pad": ""}')
_COMPRESSIBLE_UP_TO: Final = 10_000
SPAWN: Final = multiprocessing.get_context("spawn")


def pad(size: int) -> str:
    """Return text that makes a payload of ``size`` bytes."""
    length = max(size - _FRAME, 1)
    if size <= _COMPRESSIBLE_UP_TO:
        return (base64.b64encode(os.urandom(length // 2)).decode()[: length // 2 + 1] * 2)[:length]
    return base64.b64encode(os.urandom(length)).decode()[:length]


@dataclass(frozen=True)
class Backlog:
    """Events that are written before they are published.

    first, count   their numbers.
    size           of each payload in bytes.
    together       how many are committed at a time.
    """

    count: int
    first: int = 0
    size: int = SMALL
    together: int = 100
    keys: tuple[str, ...] = tuple(f"order-{number}" for number in range(KEYS))


_INSERT: Final = """
INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload)
SELECT %s, k.name, 'OrderPlaced', jsonb_build_object('n', g.n, 'pad', p.pad)
  FROM generate_series(%s::int, %s::int) AS g (n)
  JOIN keys AS k ON k.i = g.n %% %s
  JOIN pads AS p ON p.i = g.n %% %s
 ORDER BY g.n"""


def fill(site: Site, backlog: Backlog) -> None:
    """Commit the events, and have Postgres write its buffers, so that this does not fall into the measurement."""
    pads = [pad(backlog.size) for _ in range(1000 if backlog.size <= _COMPRESSIBLE_UP_TO else 20)]
    with site.connect() as connection:
        # The backlog is on disk when this returns: a CHECKPOINT follows. Until then commits need not wait.
        connection.execute("SET synchronous_commit = off")
        for table, values in (
            ("pads (i int PRIMARY KEY, pad text)", pads),
            ("keys (i int PRIMARY KEY, name text)", backlog.keys),
        ):
            connection.execute(f"CREATE TEMPORARY TABLE {table}".encode())
            with connection.cursor().copy(f"COPY {table.split()[0]} FROM STDIN".encode()) as copy:
                for row in enumerate(values):
                    copy.write_row(row)
        connection.execute("ANALYZE pads, keys")
        for at in range(backlog.first, backlog.first + backlog.count, backlog.together):
            last = min(at + backlog.together, backlog.first + backlog.count) - 1
            connection.execute(_INSERT, (site.kind, at, last, len(backlog.keys), len(pads)))
        connection.execute("CHECKPOINT")


def keys_of_lane(site: Site, lane: int, count: int) -> tuple[str, ...]:
    """Return keys whose events the database puts into one lane."""
    expression = site.value(
        "SELECT pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef AS d JOIN pg_attribute AS a"
        " ON (a.attrelid, a.attnum) = (d.adrelid, d.adnum)"
        " WHERE d.adrelid = 'outbox.events'::regclass AND a.attname = 'lane'"
    )
    query = (
        f"SELECT aggregate_id FROM (SELECT %s AS aggregate_type, 'order-' || g AS aggregate_id"
        f" FROM generate_series(1, 1000000) AS g) AS e WHERE ({expression.replace('%', '%%')}) = %s LIMIT %s"
    )
    with site.connect() as connection:
        found = tuple(name for (name,) in connection.execute(query.encode(), (site.kind, lane, count)).fetchall())
    if len(found) != count:
        raise BenchError(f"{len(found)} keys of lane {lane} were found, {count} are needed")
    return found


# -- a steady load


@dataclass(frozen=True)
class Steady:
    """A load over time: ``rate`` events a second, ``together`` of them in each transaction, ``count`` in all."""

    rate: float
    count: int
    first: int = 0
    together: int = 1


def writer(site: Site, steady: Steady) -> AbstractContextManager[Connection]:
    """Start a process that commits a steady load once it gets a message.

    At the end it sends the time of each COMMIT, in ns of the monotonic clock, by the events' order.
    """
    return child(_write, site.url, site.kind, steady)


@contextmanager
def child(target: Any, *arguments: Any) -> Iterator[Connection]:
    """Start a process that sends b"ready", and yield the connection to it; end it at the end."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if received(ours, f"the process of {target.__name__}", 60) != b"ready":
            raise BenchError(f"the process of {target.__name__} is not ready")
        yield ours
    finally:
        process.terminate()
        process.join(10)
        ours.close()


def received(connection: Connection, who: str, seconds: float) -> Any:
    """Return the next message of a process. Raises BenchError if none arrives within ``seconds``."""
    if not connection.poll(seconds):
        raise BenchError(f"{who}: no answer within {seconds:g} s")
    try:
        return connection.recv()
    except EOFError:
        raise BenchError(f"{who} ended; its error is on standard error") from None


def _pace(steady: Steady) -> Iterator[int]:
    """Yield each event's number when it is due; a writer that is late goes on at once."""
    started = time.monotonic()
    for number in range(steady.count):
        delay = started + number / steady.rate - time.monotonic()
        if delay > 0:
            time.sleep(delay)
        yield number


def _write(url: str, kind: str, steady: Steady, parent: Connection) -> None:
    from outbox import Event, Outbox

    outbox, text = Outbox(), pad(SMALL)
    times = array("q")
    with psycopg.connect(url) as connection:
        parent.send(b"ready")
        parent.recv()
        open_since = 0
        for number in _pace(steady):
            payload = {"n": steady.first + number, "pad": text}
            outbox.add(connection, Event(kind, f"order-{number % KEYS}", "OrderPlaced", payload))
            if (number + 1) % steady.together == 0 or number + 1 == steady.count:
                connection.commit()
                times.extend([time.monotonic_ns()] * (number + 1 - open_since))
                open_since = number + 1
    parent.send(times)


def wait_until_empty(site: Site, seconds: float) -> None:
    """Return when the relay has settled every event."""
    with site.connect() as connection:
        query = "SELECT NOT EXISTS (SELECT 1 FROM outbox.events)"
        wait_until(lambda: connection.execute(query).fetchone() == (True,), "an empty outbox", seconds, every=0.05)
