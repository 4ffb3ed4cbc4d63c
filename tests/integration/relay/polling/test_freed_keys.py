"""A key that waited behind a refused event is freed while new events of it arrive: they must not overtake the waiting.

The waiting rows are below the low-water mark by then, the new ones above it. See reader.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from pgbouncer import PgBouncer
from polling_worker import Worker, quick_marks, workers
from stream_bench import outboxed
from support import backlog, wait_until

from relay.core.marker import Marker
from relay.core.ports import Claim, Receipt, Refusal, UnsettledBatch
from relay.operations.dead_letters import DeadLetters, Selection
from relay.polling import row_marks
from relay.polling.kept_marks import KeptMarks
from relay.polling.source import PollingSource

__all__ = ["outboxed", "quick_marks", "workers"]

WAITING = 2_500
KEYS = 3

pytestmark = pytest.mark.usefixtures("quick_marks")


class Relay:
    """A polling source whose turns a test makes. Records the numbers that are published of each key."""

    def __init__(self, worker: Worker, make: Callable[[], PollingSource], *, once: bool) -> None:
        self.worker = worker
        self._make = make
        self._once = once
        self._batches: dict[int, int | None] = dict.fromkeys(lease.lane for lease in worker.leases)
        self.bad: set[str] = set()
        self.sent: dict[str, list[int]] = {}
        self.start()

    def start(self) -> None:
        self.source = self._make()
        if self._once:
            here, _ = self.source.store.identity(self.worker.leases)
            assert here is not None
            for lease in self.worker.leases:
                batch = self._batches[lease.lane]
                marker = None if batch is None else Marker(batch, lease.epoch, here.system_identifier, here.timeline)
                self.source.store.adopt(lease, marker, "me-0")

    def turn(self) -> int:
        """Publish a batch. Returns how many rows were published."""
        fetched = self.source.fetch(self.worker.limits())
        assert fetched.failed == {}
        if fetched.unconfirmed:
            assert self.source.confirm(time.monotonic() + 60) == {}
        receipts = {}
        count = 0
        for lane, batch in fetched.batches.items():
            stopped: set[str] = set()
            published: list[Claim] = []
            refused: list[Refusal] = []
            for claim in batch:
                key = claim.aggregate_id
                if key in stopped:
                    continue
                number = int(claim.event_type)
                if f"{key}/{number}" in self.bad:
                    stopped.add(key)
                    refused.append((claim, "bad"))
                else:
                    published.append(claim)
                    self.sent.setdefault(key, []).append(number)
                    count += 1
            number_of_batch = None
            if self._once and published:
                number_of_batch = self._batches[lane] = (self._batches[lane] or 0) + 1
            receipts[lane] = Receipt(UnsettledBatch(published, number=number_of_batch), refused)
        assert self.source.settle(receipts) == {}
        return count

    def write(self, first: int, last: int) -> None:
        """Commit an event of each key for each of these numbers."""
        self.worker.admin.execute(
            "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT 'Order', 'key-' || k, number::text AS kind, '{}' "
            "FROM generate_series(%s::int, %s) AS number, generate_series(1, %s) AS k ORDER BY number, k",
            (first, last, KEYS),
        )

    def rows_read(self) -> int:
        self.source.connection.execute("SELECT pg_stat_force_next_flush()")
        query = "SELECT idx_tup_fetch FROM pg_stat_user_tables WHERE relid = 'outbox.events'::regclass"
        (read,) = self.worker.admin.execute(query).fetchone()
        return int(read)

    def block(self) -> None:
        """Refuse the first event of key-1, write many behind it, and turn until the mark has risen above these."""
        self.write(1, 1)
        self.bad = {"key-1/1"}
        self.turn()
        self.write(2, WAITING)

        def above() -> bool:
            before = self.rows_read()
            self.turn()
            return self.rows_read() - before < 1000

        wait_until(above, 60, "the mark to rise above what waits")
        self.bad = set()
        assert "key-1" not in self.sent


@pytest.fixture
def relay(request, workers, outbox_postgres, monkeypatch) -> Iterator[Relay]:
    """Each way in which a turn reads: see source.py. ``commit`` is exactly-once. Each source is a fresh process's, and
    leaves its marks in the lanes' rows.
    """
    monkeypatch.setattr(row_marks, "_SECONDS", 0.0)
    worker = workers()
    if request.param != "pooled":
        overlap = request.param != "settle"
        once = request.param == "commit"
        yield Relay(worker, lambda: worker.source(attempts=2, overlap=overlap, kept=KeptMarks()), once=once)
        return
    with PgBouncer(outbox_postgres.url, size=4) as pooler:

        def make() -> PollingSource:
            return worker.source(attempts=2, url=pooler.url, kept=KeptMarks())

        yield Relay(worker, make, once=False)


def discarded(relay: Relay) -> None:
    assert DeadLetters(relay.worker.admin, "outbox").discard(Selection(), "test")


def retried(relay: Relay) -> None:
    """The relay publishes it with its next turns, and its settlement frees the key."""
    assert DeadLetters(relay.worker.admin, "outbox").retry(Selection())


def settled_by_its_marker(relay: Relay) -> None:
    """What taking a lane over does, in one transaction, with the rows that the marker names."""
    relay.worker.admin.execute(
        "WITH free AS (DELETE FROM outbox.failures RETURNING lane, id) "
        "DELETE FROM outbox.events AS e USING free WHERE e.lane = free.lane AND e.id = free.id"
    )


def until_all_are_published(relay: Relay, *, without: int) -> int:
    """Turn, and write an event of each key before each of many turns. Returns the last number that was written."""
    last = WAITING
    while len(relay.sent.get("key-1", ())) < last - without:
        if last < WAITING + 50:
            last += 1
            relay.write(last, last)
        relay.turn()
    relay.source.flush(list(relay.worker.limits()))
    wait_until(lambda: not relay.turn(), what="nothing to be left")
    return last


@pytest.mark.parametrize(
    ("relay", "free"),
    [
        ("settle", discarded),
        ("check", retried),
        ("commit", settled_by_its_marker),
        ("pooled", retried),
    ],
    indirect=["relay"],
)
def test_new_events_of_a_freed_key_do_not_overtake_those_that_waited(relay, free):
    relay.block()
    if free is discarded:
        # A dead letter; otherwise it is still to be tried.
        relay.bad = {"key-1/1"}
        relay.worker.admin.execute("UPDATE outbox.failures SET next_attempt_at = clock_timestamp()")
        dead = "TABLE outbox.dead_letters"
        wait_until(lambda: not relay.turn() and relay.worker.admin.execute(dead).fetchall(), what="the dead letter")
        relay.bad = set()
    free(relay)
    last = until_all_are_published(relay, without=free is not retried)
    everything = list(range(1, last + 1))
    assert relay.sent["key-1"] == (everything if free is retried else everything[1:])
    assert all(relay.sent[f"key-{k}"] == everything for k in range(2, KEYS + 1))
    assert backlog(relay.worker.database.url) == 0


@pytest.mark.parametrize("relay", ["check"], indirect=True)
def test_a_key_that_is_freed_while_its_lane_is_taken_over_keeps_its_order(relay):
    """The next holder knows the failure from its first look; its reads begin at the lowest id."""
    relay.block()
    relay.source.flush(list(relay.worker.limits()))
    relay.source.close()
    relay.start()
    relay.turn()
    retried(relay)
    for n in range(1, 50):
        relay.write(WAITING + n, WAITING + n)
        relay.turn()
    wait_until(lambda: not relay.turn() and not relay.turn(), what="nothing to be left")
    everything = list(range(1, WAITING + 50))
    assert relay.sent == {f"key-{n}": everything for n in range(1, KEYS + 1)}


@pytest.mark.parametrize("relay", ["settle", "commit"], indirect=True)
def test_a_look_that_comes_with_the_settling_of_a_failure_needs_no_second_one(relay):
    relay.write(1, 1)
    relay.bad = {"key-1/1"}
    relay.turn()
    relay.bad = set()
    retried(relay)
    wait_until(lambda: relay.turn() and "key-1" in relay.sent, what="the retry")
    relay.source.reader._looked_at = -3600.0
    relay.turn()
    assert all(lane.failures_loaded for lane in relay.source.reader._lanes.values())


def test_a_lane_that_reads_its_table_beside_the_wal_keeps_the_order_of_a_freed_key(outboxed):
    box = outboxed()
    box.relay(once=True, attempts=1)
    box.streams()
    box.kafka.bad = {"a1"}
    box.add("a1", "b1")
    box.until(lambda: box.dead == ["a1"], "the dead letter")
    box.add(*[f"a{n}" for n in range(2, 2502)])
    ((last,),) = box.rows("SELECT max(id) FROM outbox.events")
    box.until(lambda: box.source._table.reader.marks([0])[0] >= last, "the mark to rise above what waits")
    assert DeadLetters(box.admin, "outbox").discard(Selection(), "test")
    for n in range(2502, 2520):
        box.add(f"a{n}", f"b{n}")
        box.turn()
    box.until(lambda: len(box.kafka.names("a")) >= 2518, "the key's events")
    assert box.kafka.names("a") == [f"a{n}" for n in range(2, 2520)]
    assert box.kafka.names("b") == ["b1", *[f"b{n}" for n in range(2502, 2520)]]
    box.streams()


def test_a_neighbour_of_the_same_id_and_another_type_is_not_held_up(workers):
    """A digest stands for the aggregate's id alone. The lane's rows are not taken back for ever."""
    worker = workers(1)
    source = worker.source()
    insert = "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES (%s, 'x', 'T')"
    worker.admin.execute(insert, ("Order",))
    ((_, (claim,)),) = source.fetch(worker.limits()).batches.items()
    source.settle({0: Receipt(refused=[(claim, "bad")])})
    for _ in range(3):
        worker.admin.execute(insert, ("Order",))
        worker.admin.execute(insert, ("Cart",))
        ((lane, batch),) = source.fetch(worker.limits()).batches.items()
        assert [claim.aggregate_type for claim in batch] == ["Cart"]
        source.settle({lane: Receipt(UnsettledBatch(batch))})
