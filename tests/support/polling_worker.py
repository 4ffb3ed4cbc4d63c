"""A worker that polls, and backlogs for it: what the tests of sizes share."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from polling_support import polling
from support import tried

from outbox._app import migrate as db
from relay.core.ports import Batches, Claim, Receipt, UnsettledBatch
from relay.kafka.routing import Route, Router
from relay.lanes import LaneTable
from relay.polling import low_water_mark, sweep
from relay.polling.source import PollingSource

BATCH = 2000
ROUTES = Router({"Order": Route("orders")})
EVENT_BYTES = 900_000


class Worker:
    """An outbox of so many lanes, all held, and sources over it. Turns are turned by hand, with the loop's limits."""

    def __init__(self, database: Any, lanes: int) -> None:
        self.database = database
        self.count = lanes
        if lanes != 4:
            db.change_lanes(database.url, lanes)
        self.admin = database.connect(autocommit=True)
        self.table = LaneTable(database.connect(autocommit=True), "outbox", "me", "0", 600.0)
        self.leases = self.table.acquire(lanes)
        assert len(self.leases) == lanes
        self._sources: list[PollingSource] = []

    def source(self, router: Router = ROUTES, attempts: int = 1, **more: Any) -> PollingSource:
        url = more.pop("url", self.database.url)
        self._sources.append(polling(url, self.leases, policy=tried(attempts, 600.0, 600.0), router=router, **more))
        return self._sources[-1]

    def limits(self, batch: int = BATCH) -> dict[int, int]:
        """As loop.py has them."""
        each = max(min(batch, batch * 4 // self.count), 1)
        return {lease.lane: each for lease in self.leases}

    def insert(self, count: int, *, keys: int = 5000, kind: str = "Order", first: int = 1) -> None:
        self.admin.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT %s, 'key-' || g %% %s::int, 'T', jsonb_build_object('n', g) "
            "FROM generate_series(%s::int, %s::int) g",
            (kind, keys, first, first + count - 1),
        )

    def ids(self) -> dict[int, list[int]]:
        """All rows of the outbox, by lane in order."""
        found: dict[int, list[int]] = defaultdict(list)
        for lane, id_ in self.admin.execute("SELECT lane, id FROM outbox.events ORDER BY lane, id").fetchall():
            found[lane].append(id_)
        return dict(found)

    def close(self) -> None:
        for source in self._sources:
            source.close()


@pytest.fixture
def workers(outbox_postgres):
    made: list[Worker] = []

    def make(lanes: int = 4) -> Worker:
        made.append(Worker(outbox_postgres, lanes))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@pytest.fixture
def quick_marks(monkeypatch):
    """The waits between the steps of a low-water mark are left out, and no sweep comes in between."""
    monkeypatch.setattr(low_water_mark, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(low_water_mark, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "_SWEEP_SECONDS", 3600.0)


def published(claims: Sequence[Claim]) -> Receipt:
    return Receipt(UnsettledBatch(claims))


def settle(source: PollingSource, batches: Batches) -> None:
    assert source.settle({lane: published(claims) for lane, claims in batches.items()}) == {}


def note(seen: dict[int, list[int]], batches: Batches) -> None:
    for lane, claims in batches.items():
        assert all(claim.lane == lane for claim in claims)
        seen.setdefault(lane, []).extend(claim.position for claim in claims)


def drain(source: PollingSource, limits: Mapping[int, int], *, empty: int = 3) -> dict[int, list[int]]:
    """Turns until nothing comes any more; gives what came, by lane. What is read is checked turn by turn."""
    seen: dict[int, list[int]] = {}
    nothing = 0
    while nothing < empty:
        fetched = source.fetch(limits)
        assert fetched.failed == {}
        nothing = 0 if fetched.batches else nothing + 1
        assert all(len(batch) <= limits[lane] for lane, batch in fetched.batches.items())
        note(seen, fetched.batches)
        settle(source, fetched.batches)
    assert source.flush(list(limits)) == {}
    return seen


@contextmanager
def traced(connection: psycopg.Connection[Any]) -> Iterator[dict[str, int]]:
    """Count the messages that libpq sends."""
    counts: dict[str, int] = defaultdict(int)
    with tempfile.TemporaryFile() as file:
        connection.pgconn.trace(file.fileno())
        connection.pgconn.set_trace_flags(psycopg.pq.Trace.SUPPRESS_TIMESTAMPS)
        try:
            yield counts
        finally:
            connection.pgconn.untrace()
            file.seek(0)
            for line in file.read().decode(errors="replace").splitlines():
                if found := re.match(r"F\t\d+\t(\w+)", line):
                    counts[found[1]] += 1


def insert_huge(worker: Worker, count: int) -> None:
    """Write events that are large, and small in the table, which compresses them."""
    worker.admin.execute(
        "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload) "
        "SELECT 'Order', 'key-' || g, 'T', %s FROM generate_series(1, %s) g",
        (f'{{"x": "{"x" * EVENT_BYTES}"}}', count),
    )
