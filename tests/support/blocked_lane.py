"""A lane with 25,000 events behind a blocked key. Fixtures in here are for import."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from one_lane import OneLane
from polling_support import add, polling, table, taken
from support import tried, wait_until

from outbox._app import migrate as db
from outbox._clients.search_path import PinnedConnection
from outbox.testing.fixtures import Database, token
from relay.core.lease import Lease
from relay.core.ports import Claim, Receipt
from relay.database import Connector
from relay.kafka.routing import Router
from relay.polling import low_water_mark, row_marks, sweep
from relay.polling.kept_marks import KeptMarks
from relay.polling.source import PollingSource
from relay.settle.retries import Failures

WAITING = 25_000
"""Five windows of a sweep, and far more than a turn reads."""
NOT_DUE = tried(1000, 3600.0, 3600.0)
"""What fails is tried again after the test."""


def raise_marks_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(low_water_mark, "_LOOK_SECONDS", 0.0)
    patch.setattr(low_water_mark, "_SETTLE_SECONDS", 0.0)
    # Unless a test is about them.
    patch.setattr(row_marks, "_SECONDS", 3600.0)


@pytest.fixture(autouse=True)
def quick_marks(monkeypatch):
    """Marks rise at once, and each turn may begin a sweep."""
    raise_marks_at_once(monkeypatch)
    monkeypatch.setattr(sweep, "_AGAIN_SECONDS", 0.0)


class Blocked:
    """A lane whose first event is refused, with 25,000 later events of its key. Counts what turns read."""

    def __init__(self, database: Database, kept: KeptMarks) -> None:
        self.database = database
        self.lease = taken(table(database, "me"))
        self.kept = kept
        self.admin = database.connect(autocommit=True)
        self.killed: list[OneLane] = []
        self.sources = 0
        self.gate = threading.Event()
        self.gate.set()
        self.lane = self.new_source()
        self.first = self.number("SELECT min(id) FROM outbox.events")
        self.last = self.number("SELECT max(id) FROM outbox.events")
        while self.mark < self.last:
            assert self.lane.fetch(10) == []

    @property
    def mark(self) -> int:
        """The lane's low-water mark."""
        return self.lane.source.reader.marks([self.lane.lane])[self.lane.lane]

    def new_source(self) -> OneLane:
        """A source that takes over what the one before has left."""
        self.sources += 1
        connect = Connector(self.database.url, f"source {self.sources}")
        opened = 0

        def connected() -> PinnedConnection:
            nonlocal opened
            opened += 1
            if opened > 1:
                # The sweep's.
                self.gate.wait()
            return connect()

        failures = Failures("outbox", NOT_DUE, Router())
        return OneLane(PollingSource(connected, "outbox", failures, kept=self.kept), self.lease)

    def close_source(self) -> None:
        """Close it, and wait until Postgres has ended its sessions: they add what they have read to the statistics."""
        self.lane.source.close()
        sessions = f"SELECT count(*) FROM pg_stat_activity WHERE application_name = 'source {self.sources}'"
        wait_until(lambda: self.number(sessions) == 0, what="the end of the source's sessions")

    def replace_source(self, lease: Lease | None = None) -> None:
        """As the loop does after a failure."""
        self.close_source()
        self.lease = lease or self.lease
        self.lane = self.new_source()

    def taken_over(self) -> None:
        """As by a fresh process, after this one was killed."""
        self.admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
        self.lane.source.connection.execute("SELECT pg_stat_force_next_flush()")
        self.killed.append(self.lane)
        self.lease = taken(table(self.database, "another"))
        self.kept = KeptMarks()
        self.lane = self.new_source()

    def write(self, key: str, count: int, first: int | None = None) -> None:
        """Write events, at the end or from this id on, as an INSERT that drew it long ago."""
        columns = "aggregate_type, aggregate_id, event_type, payload"
        if first is None:
            self.admin.execute(
                f"INSERT INTO outbox.events ({columns}) SELECT 'Order', %s, 'T', '{{}}' FROM generate_series(1, %s)",
                (key, count),
            )
        else:
            self.admin.execute(
                f"INSERT INTO outbox.events (id, {columns}) OVERRIDING SYSTEM VALUE "
                "SELECT g, 'Order', %s, 'T', '{}' FROM generate_series(%s::bigint, %s) AS g",
                (key, first, first + count - 1),
            )

    def make_room(self, first: int) -> None:
        """Remove a waiting event, so that its id is free."""
        self.admin.execute("DELETE FROM outbox.events WHERE id = %s", (first,))

    def discard(self) -> None:
        """Discard the first event, as an operator does."""
        with self.admin.transaction():
            self.admin.execute("DELETE FROM outbox.failures")
            self.make_room(self.first)

    def number(self, query: str) -> int:
        """Return the only value of a query."""
        row = self.admin.execute(query).fetchone()
        assert row is not None
        return int(row[0])

    def sweep_is_due(self) -> None:
        """Let the next turn begin a sweep."""
        self.lane.source.reader._sweep.due_at[self.lane.lane] = 0.0

    def next_batch(self) -> list[Claim]:
        """Return the events of the next turn that has some."""
        claims: list[Claim] = []

        def found() -> bool:
            claims.extend(self.lane.fetch(100))
            return bool(claims)

        wait_until(found, what="events")
        return claims

    def rows_read(self, work: Callable[[], object]) -> int:
        """Return how many of the table's rows the source's connection and others read meanwhile."""
        query = "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_user_tables WHERE relid = 'outbox.events'::regclass"
        self.lane.source.connection.execute("SELECT pg_stat_force_next_flush()")
        self.admin.execute("SELECT pg_stat_force_next_flush()")
        before = self.number(query)
        work()
        self.lane.source.connection.execute("SELECT pg_stat_force_next_flush()")
        return self.number(query) - before

    def close(self) -> None:
        """Close the source."""
        self.gate.set()
        for lane in (*self.killed, self.lane):
            lane.close()


@pytest.fixture(scope="module")
def waiting(outbox_postgres_server, _outbox_template) -> Iterator[tuple[str, KeptMarks]]:
    """A database to copy, and the marks that a source leaves: to write and read so many takes longer than a test."""
    name = f"waiting_{token()}"
    with Database(outbox_postgres_server.create_database(name, template=_outbox_template), name) as database:
        db.change_lanes(database.url, 1)
        admin = database.connect(autocommit=True)
        admin.execute("ALTER TABLE outbox.events SET (autovacuum_enabled = off)")
        admin.execute("ANALYZE outbox.events")
        admin.execute("ALTER TABLE outbox.events ALTER COLUMN id RESTART WITH 1000")
        add(database, "blocked")
        lane = OneLane(polling(database.url, policy=NOT_DUE), taken(table(database, "me")))
        (first,) = lane.fetch(10)
        lane.settle(Receipt(refused=[(first, "bad")]))
        lane.close()
        insert = "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload)"
        values = "SELECT 'Order', 'blocked', 'T', '{}' FROM generate_series(1, %s)"
        admin.execute(f"{insert} {values}", (WAITING,))
        admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
        with pytest.MonkeyPatch.context() as patch:
            raise_marks_at_once(patch)
            blocked = Blocked(database, KeptMarks())
            blocked.close_source()
        # The lease of each copy has the same epoch.
        admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity', epoch = epoch - 1")
    yield name, blocked.kept
    outbox_postgres_server.drop_database(name)


@pytest.fixture
def blocked(outbox_postgres_server, waiting) -> Iterator[Blocked]:
    name = f"blocked_{token()}"
    template, kept = waiting
    own = copy.deepcopy(kept)
    own.lanes = {lane: replace(each, sweep_at=math.inf) for lane, each in own.lanes.items()}
    with Database(outbox_postgres_server.create_database(name, template=template), name) as database:
        blocked = Blocked(database, own)
        yield blocked
        blocked.close()
    outbox_postgres_server.drop_database(name)
