"""The writers: business transactions of a course, with the rows from which the checker learns what is committed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import orjson
import psycopg
from threads import Threads

from chaos.course import WRITERS, Course, Transaction, Write, transactions
from chaos.history import EventIds, Kind, digest_of, event_of
from outbox import Event, Outbox

_TABLES: Final = """
CREATE TABLE business (event bigint PRIMARY KEY, kind smallint NOT NULL, key text NOT NULL, seq int NOT NULL,
                       digest bytea NOT NULL, poisoned boolean NOT NULL);
CREATE TABLE versions (kind smallint, key text, seq int NOT NULL, PRIMARY KEY (kind, key))"""

# Locks the keys until the end of the transaction, in one order for all writers: nobody waits in a circle.
_LOCK: Final = """
INSERT INTO versions SELECT * FROM unnest(%s::smallint[], %s::text[], %s::int[])
    ON CONFLICT (kind, key) DO UPDATE SET seq = versions.seq + excluded.seq RETURNING kind, key, seq"""

_NOTE: Final = """
INSERT INTO business SELECT * FROM unnest(%s::bigint[], %s::smallint[], %s::text[], %s::int[], %s::bytea[],
                                          %s::boolean[])"""

_POOL_BYTES: Final = 1 << 22


def prepare(url: str) -> None:
    """Create the business tables."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_TABLES)


class Payloads:
    """Contents of events: random bytes from a pool of the course's seed, so that making one costs a copy."""

    def __init__(self, seed: int) -> None:
        self._pool = random.Random(f"payloads of {seed}").randbytes(_POOL_BYTES)

    def make(self, write: Write, event: int) -> tuple[bytes | dict[str, Any] | None, bytes]:
        """Return the payload and its digest. Two events of one size have different ones from 8 bytes on."""
        if write.size < 0:
            return None, digest_of(None, None)
        if write.json:
            value = {"n": event, "text": "x" * write.size}
            return value, digest_of(orjson.dumps(value), "application/json")
        begin = event * 7919 % (_POOL_BYTES - write.size)
        raw = self._pool[begin : begin + write.size]
        if write.size >= 8:
            raw = event.to_bytes(8) + raw[8:]
        return raw, digest_of(raw, "application/octet-stream")


class Pace:
    """Holds the writers back: to so many events and bytes a second, and while the outbox is full."""

    def __init__(self, events: float, size: float) -> None:
        self._events = events
        self._bytes = size
        self._lock = threading.Lock()
        self._until = time.monotonic()
        self.full = False
        """Set from outside while there is a large backlog: it must be drained in the end."""

    def wait(self, events: int, size: int, stop: threading.Event) -> None:
        """Wait until so much more may be written."""
        with self._lock:
            now = time.monotonic()
            # What was not used in a second of outage is not made up for.
            self._until = max(self._until, now - 1.0) + max(events / self._events, size / self._bytes)
            until = self._until
        while not stop.is_set() and (self.full or time.monotonic() < until):
            stop.wait(min(max(until - time.monotonic(), 0.005), 0.1))


class Workload(Threads):
    """Writers that go on until ``stop``. Where Postgres is away they try again, with the next transaction.

    ``url`` leads past the proxies: these are for the relays. ``attempted`` and the figures are final after ``stop``.
    """

    def __init__(self, course: Course, kinds: Mapping[int, Kind], ids: EventIds, url: str, pace: Pace) -> None:
        self._course = course
        self._kinds = kinds
        self._ids = ids
        self._url = url
        self._pace = pace
        self._payloads = Payloads(course.seed)
        self._outbox = Outbox()
        self.attempted = dict.fromkeys(range(WRITERS), 0)
        self.committed_bytes = [0] * WRITERS
        self.unknown = [0] * WRITERS
        self.rolled_back = [0] * WRITERS
        super().__init__({f"writer-{number}": partial(self._run, number) for number in range(WRITERS)})

    def _run(self, writer: int) -> None:
        connection: psycopg.Connection[Any] | None = None
        try:
            for transaction in transactions(self._course.seed, self._course.configuration, writer):
                size = sum(max(write.size, 0) for write in transaction.writes)
                self._pace.wait(len(transaction.writes), size, self._stop)
                if self._stop.is_set():
                    return
                connection = connection or self._connect()
                if connection is not None and not self._do(connection, writer, transaction, size):
                    connection.close()
                    connection = None
        finally:
            if connection is not None:
                connection.close()

    def _connect(self) -> psycopg.Connection[Any] | None:
        """Return a connection, None when it is time to stop."""
        while not self._stop.is_set():
            try:
                return psycopg.connect(self._url, connect_timeout=5)
            except psycopg.OperationalError:
                self._stop.wait(0.1)
        return None

    def _do(self, connection: psycopg.Connection[Any], writer: int, planned: Transaction, size: int) -> bool:
        """Carry a transaction out; return whether the connection can be used again."""
        committing = False
        try:
            connection.execute(f"SET LOCAL synchronous_commit = {'off' if planned.lossy else 'on'}")
            self._write(connection, writer, planned.writes)
            if planned.undone:
                with connection.transaction(force_rollback=True):
                    self._write(connection, writer, planned.undone)
            if planned.hold:
                self._stop.wait(planned.hold)
            if planned.rolled_back:
                connection.rollback()
                self.rolled_back[writer] += 1
                return True
            committing = True
            connection.commit()
        except (psycopg.errors.DeadlockDetected, psycopg.errors.LockNotAvailable):
            # Writers lock in one order, so these would be a mistake of ours.
            raise
        except psycopg.OperationalError as error:
            # Class 57 is the server's own end, which it may announce before it closes the connection.
            if not connection.closed and not connection.broken and not (error.sqlstate or "").startswith("57"):
                raise
            self.unknown[writer] += committing
            return False
        self.committed_bytes[writer] += size
        return True

    def _write(self, connection: psycopg.Connection[Any], writer: int, writes: Sequence[Write]) -> None:
        first = self.attempted[writer]
        self.attempted[writer] += len(writes)
        seqs = self._next_seqs(connection, writes)
        events: list[Event] = []
        rows = []
        for number, write in enumerate(writes, first):
            event = event_of(writer, number)
            payload, digest = self._payloads.make(write, event)
            kind = self._kinds[write.kind].name
            made = Event(kind, write.key, "Counted", payload, event_id=self._ids.id_of(event))
            events.append(made)
            rows.append((event, write.kind, write.key, seqs(write), digest, write.poisoned))
        self._outbox.add_many(connection, events)
        connection.execute(_NOTE, [list(column) for column in zip(*rows, strict=True)])

    def _next_seqs(self, connection: psycopg.Connection[Any], writes: Sequence[Write]) -> Callable[[Write], int]:
        """Count on the versions of the keys; return a function that gives each write the next one of its key."""
        counts: dict[tuple[int, str], int] = {}
        for write in writes:
            counts[write.kind, write.key] = counts.get((write.kind, write.key), 0) + 1
        keys = sorted(counts)
        values = [[kind for kind, _ in keys], [key for _, key in keys], [counts[each] for each in keys]]
        reached = {(kind, key): seq for kind, key, seq in connection.execute(_LOCK, values).fetchall()}
        given = {key: reached[key] - count for key, count in counts.items()}

        def next_seq(write: Write) -> int:
            given[write.kind, write.key] += 1
            return given[write.kind, write.key]

        return next_seq
