"""Late events below the low-water mark, and marks over a new source, with 200,000 events behind a blocked key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from one_lane import OneLane
from polling_support import lanes, settle, table, taken
from support import wait_until

from outbox._clients.search_path import PinnedConnection
from relay.core.lease import Lease
from relay.core.ports import Claim, Receipt, Refused
from relay.database import Connector
from relay.kafka.routing import Router
from relay.polling import low_water_mark, reader, row_marks, sweep
from relay.polling.kept_marks import KeptMarks, Server
from relay.polling.queries import Queries
from relay.polling.source import PollingSource
from relay.polling.sweep import Sweep
from relay.settle.retries import FailurePolicy, Failures

__all__ = ["lanes"]

WAITING = 200_000


@pytest.fixture(autouse=True)
def quick_marks(monkeypatch):
    """Marks rise at once, and each turn may begin a sweep."""
    monkeypatch.setattr(low_water_mark, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(low_water_mark, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "_AGAIN_SECONDS", 0.0)
    # Unless a test is about them.
    monkeypatch.setattr(row_marks, "_SECONDS", 3600.0)


class Blocked:
    """A lane whose first event is refused, with 200,000 later events of its key. Counts what turns read."""

    def __init__(self, database, lease: Lease) -> None:
        self.database = database
        self.lease = lease
        self.kept = KeptMarks()
        self.admin = database.connect(autocommit=True)
        self.admin.execute("ALTER TABLE outbox.events SET (autovacuum_enabled = off)")
        self.admin.execute("ANALYZE outbox.events")
        self.admin.execute("ALTER TABLE outbox.events ALTER COLUMN id RESTART WITH 1000")
        self.killed: list[OneLane] = []
        self.gate = threading.Event()
        self.gate.set()
        self.lane = self.new_source()
        self.write("blocked", 1)
        (first,) = self.lane.fetch(10)
        self.lane.settle(Receipt([(first, Refused("bad"))]))
        self.write("blocked", WAITING)
        self.first = first.position
        self.last = self.number("SELECT max(id) FROM outbox.events")
        while self.mark < self.last:
            assert self.lane.fetch(10) == []

    @property
    def mark(self) -> int:
        """The lane's low-water mark."""
        return self.lane.source.reader.above([self.lane.lane])[self.lane.lane]

    def new_source(self) -> OneLane:
        """A source that takes over what the one before has left."""
        connect = Connector(self.database.url, "test")
        opened = 0

        def connected() -> PinnedConnection:
            nonlocal opened
            opened += 1
            if opened > 1:
                # The sweep's.
                self.gate.wait()
            return connect()

        failures = Failures("outbox", FailurePolicy(1000, 3600.0, 3600.0), Router())
        return OneLane(PollingSource(connected, "outbox", failures, kept=self.kept), self.lease)

    def replace_source(self, lease: Lease | None = None) -> None:
        """As the loop does after a failure."""
        self.lane.source.close()
        self.lease = lease or self.lease
        self.lane = self.new_source()

    def taken_over(self) -> None:
        """As by a fresh process, after this one was killed."""
        self.admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
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


@pytest.fixture
def blocked(outbox_postgres, lanes) -> Iterator[Blocked]:
    blocked = Blocked(outbox_postgres, taken(lanes))
    yield blocked
    blocked.close()


def test_no_turn_reads_what_is_swept(blocked):
    blocked.gate.clear()
    blocked.sweep_is_due()

    def turns() -> None:
        for number in range(20):
            blocked.write(f"free-{number}", 1)
            claims = blocked.lane.fetch(10)
            assert [claim.aggregate_id for claim in claims] == [f"free-{number}"]
            settle(blocked.lane, claims)

    # Each event is read, sized and settled.
    assert blocked.rows_read(turns) < 1000
    # In the middle of what waits, by a transaction that drew its id before.
    middle = blocked.first + WAITING // 2
    blocked.make_room(middle)
    blocked.write("late", 1, first=middle)
    blocked.gate.set()
    assert [claim.aggregate_id for claim in blocked.next_batch()] == ["late"]


def windows(monkeypatch, at: Callable[[int], None]) -> None:
    """Call ``at`` before each window of a sweep, with its number."""
    real = Sweep._window
    count = 0

    def window(self: Sweep, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        at(count)
        return real(self, *arguments)

    monkeypatch.setattr(Sweep, "_window", window)


def test_a_lane_whose_sweep_fails_in_any_way_delays_no_other_and_is_due_a_minute_later(outbox_postgres, monkeypatch):
    swept: list[int] = []

    def window(_self: Sweep, connection: PinnedConnection, values: Any) -> tuple[int, int, list[int]]:
        swept.append(values["lane"])
        if values["lane"] == 0:
            raise RuntimeError("no error of a database")
        if values["lane"] == 1:
            connection.close()
            raise psycopg.OperationalError("the server closed the connection unexpectedly")
        return 0, 0, []

    monkeypatch.setattr(Sweep, "_window", window)
    swept_by = Sweep(Connector(outbox_postgres.url, "test"), Queries("outbox"))
    lanes = dict.fromkeys(range(3), 10)
    swept_by.due_at = dict.fromkeys(lanes, 0.0)
    for _ in range(2):
        swept_by.begin(lanes, ())
        assert swept_by._thread is not None
        swept_by._thread.join(60)
    assert swept == [0, 1, 2]


def test_a_sweep_that_finds_no_connection_is_due_a_minute_later():
    asked: list[str] = []

    def connect() -> PinnedConnection:
        asked.append("")
        raise RuntimeError("no error of a database")

    swept_by = Sweep(connect, Queries("outbox"))
    swept_by.due_at = {0: 0.0}
    for _ in range(2):
        swept_by.begin({0: 10}, ())
        assert swept_by._thread is not None
        swept_by._thread.join(60)
    assert asked == [""]


@pytest.mark.parametrize(
    ("moment", "place"),
    [(1, -100), (3, -100), (3, WAITING // 2), (20, WAITING // 2), (10, WAITING - 10), (21, WAITING - 10)],
)
def test_a_row_that_is_committed_at_any_moment_of_a_sweep_is_found(blocked, monkeypatch, moment, place):
    """And goes out before later events of its key."""
    monkeypatch.setattr(sweep, "_SWEEP_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "_WINDOW", 10_000)
    first = blocked.first + place
    if place > 0:
        blocked.make_room(first)

    def commit_late(number: int) -> None:
        if number == moment:
            blocked.write("late", 1, first=first)

    windows(monkeypatch, commit_late)
    blocked.sweep_is_due()
    claims = blocked.next_batch()
    assert [claim.position for claim in claims] == [first]
    settle(blocked.lane, claims)
    blocked.write("late", 1)
    claims = blocked.next_batch()
    assert [claim.aggregate_id for claim in claims] == ["late"]
    settle(blocked.lane, claims)
    blocked.lane.flush()
    assert blocked.number("SELECT count(*) FROM outbox.events WHERE aggregate_id = 'late'") == 0


def test_a_late_event_that_is_not_published_is_read_again_before_later_ones_of_its_key(blocked):
    blocked.make_room(blocked.first + 500)
    blocked.write("late", 1, first=blocked.first + 500)
    blocked.sweep_is_due()
    (late,) = blocked.next_batch()
    blocked.write("late", 1)
    # The turn failed: no receipt.
    assert blocked.next_batch() == [late]
    blocked.replace_source()
    claims = blocked.lane.fetch(10)
    assert claims == [late]
    settle(blocked.lane, claims)
    (later,) = blocked.next_batch()
    assert later.aggregate_id == "late"
    assert later.position > blocked.last
    settle(blocked.lane, [later])
    assert blocked.lane.fetch(10) == []
    # Nothing is left to be read by its id.
    assert blocked.lane.source.reader._lanes[blocked.lane.lane].late == ()


def test_more_late_events_than_a_sweep_names_are_all_found_in_order(blocked, monkeypatch):
    monkeypatch.setattr(sweep, "_MOST", 50)
    ids = [blocked.first + 1000 + 300 * number for number in range(500)]
    for id_ in ids:
        blocked.make_room(id_)
        blocked.write("late", 1, first=id_)
    blocked.sweep_is_due()
    seen: list[int] = []
    while len(seen) < len(ids):
        claims = blocked.next_batch()
        seen += [claim.position for claim in claims]
        settle(blocked.lane, claims)
    assert seen == ids


def test_a_key_that_is_freed_in_the_middle_of_a_sweep_goes_out_in_order(blocked, monkeypatch):
    """Windows from then on find its events free, while those of the windows before wait."""
    monkeypatch.setattr(reader, "_LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(sweep, "_WINDOW", 20_000)
    halted, go_on = threading.Event(), threading.Event()

    def halt(number: int) -> None:
        if number == 6:
            halted.set()
            go_on.wait(60)

    windows(monkeypatch, halt)
    blocked.sweep_is_due()
    assert blocked.lane.fetch(10) == []
    assert halted.wait(60)
    blocked.discard()
    go_on.set()
    wait_until(lambda: bool(blocked.lane.source.reader._sweep._found), what="the sweep's names")
    # The names are taken together with a look.
    blocked.lane.source.reader._looked_at = -7200.0
    claims = blocked.next_batch()
    assert [claim.position for claim in claims] == list(range(claims[0].position, claims[0].position + len(claims)))
    assert claims[0].position == blocked.first + 1


def test_a_new_source_reads_on_from_the_marks(blocked):
    blocked.replace_source()
    blocked.write("free", 1)
    found: list[Claim] = []
    assert blocked.rows_read(lambda: found.extend(blocked.lane.fetch(10))) < 100
    assert [claim.aggregate_id for claim in found] == ["free"]
    settle(blocked.lane, found)
    while blocked.mark < found[0].position:
        assert blocked.lane.fetch(10) == []
    for _ in range(3):
        blocked.replace_source()
        assert blocked.rows_read(lambda: blocked.lane.fetch(10)) < 100
        assert blocked.mark == found[0].position


def test_a_new_source_notices_what_was_freed_meanwhile(blocked):
    blocked.lane.source.close()
    blocked.discard()
    blocked.lane = blocked.new_source()
    assert [claim.position for claim in blocked.lane.fetch(3)] == [blocked.first + 1 + number for number in range(3)]


def test_marks_are_kept_below_events_that_may_not_be_settled(blocked):
    blocked.write("free", 3)
    claims = blocked.lane.fetch(10)
    settle(blocked.lane, claims)
    blocked.lane.source.reader._marks.keep(blocked.lane.lane, claims[-1].position)
    blocked.replace_source()
    assert blocked.lane.fetch(10) == claims


def another_server(blocked: Blocked) -> None:
    assert blocked.kept.server is not None
    blocked.kept.server = replace(blocked.kept.server, system_identifier="another")


def another_timeline(blocked: Blocked) -> None:
    assert blocked.kept.server is not None
    blocked.kept.server = replace(blocked.kept.server, timeline=blocked.kept.server.timeline - 1)


def lost_wal(blocked: Blocked) -> None:
    assert blocked.kept.server is not None
    blocked.kept.server = replace(blocked.kept.server, wal_position=1 << 60)


def topics_left_out(blocked: Blocked) -> None:
    blocked.kept.left_out = frozenset({("Order", False)})


@pytest.mark.parametrize("change", [another_server, another_timeline, lost_wal, topics_left_out])
def test_marks_are_not_kept_where_they_may_not_hold(blocked, change):
    blocked.lane.source.close()
    change(blocked)
    blocked.lane = blocked.new_source()
    assert blocked.rows_read(lambda: blocked.lane.fetch(10)) >= WAITING


def test_leaving_out_more_keeps_the_marks_and_leaving_out_less_does_not(blocked):
    more, less = frozenset({("Order", True), ("Invoice", False)}), frozenset({("Invoice", False)})
    for kinds in (less, more):
        blocked.lane.source.leave_out(kinds)
        assert blocked.rows_read(lambda: blocked.lane.fetch(10)) < 100
    blocked.lane.source.close()
    blocked.lane = blocked.new_source()
    # As the loop does: the publisher says it before anything is read.
    blocked.lane.source.leave_out(more)
    assert blocked.rows_read(lambda: blocked.lane.fetch(10)) < 100
    blocked.lane.source.leave_out(less)
    assert blocked.rows_read(lambda: blocked.lane.fetch(10)) >= WAITING


def test_marks_are_not_kept_over_another_holder(blocked, outbox_postgres):
    blocked.admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
    blocked.replace_source(taken(table(outbox_postgres, "another")))
    assert blocked.rows_read(lambda: blocked.lane.fetch(10)) >= WAITING


def test_a_server_is_the_same_later():
    server = Server("1", 1, 100)
    assert server.has_become(Server("1", 1, 100))
    assert not server.has_become(Server("1", 1, 99))
    assert not server.has_become(Server("1", 2, 200))
    assert not server.has_become(Server("2", 1, 200))


@pytest.fixture
def kept(blocked, monkeypatch) -> Blocked:
    """One whose mark is in the lane's row."""
    monkeypatch.setattr(row_marks, "_SECONDS", 0.0)
    assert blocked.lane.fetch(10) == []
    assert blocked.number("SELECT low_water_mark FROM outbox.lanes") == blocked.last
    return blocked


def test_a_fresh_process_reads_on_from_the_mark_in_the_lanes_row(kept):
    """Also while some session holds the xmin: there it could prove none of its own."""
    with kept.database.connect() as forgotten:
        forgotten.execute("SELECT pg_current_xact_id()")
        for number in range(2):
            kept.taken_over()
            kept.write(f"free-{number}", 1)
            found: list[Claim] = []
            assert kept.rows_read(lambda found=found: found.extend(kept.lane.fetch(10))) < 100
            assert [claim.aggregate_id for claim in found] == [f"free-{number}"]
            settle(kept.lane, found)
            kept.lane.flush()


def test_a_fresh_process_finds_what_was_freed_while_none_ran(kept):
    kept.discard()
    kept.taken_over()
    assert [claim.position for claim in kept.lane.fetch(3)] == [kept.first + 1 + number for number in range(3)]


def test_a_fresh_process_finds_what_was_freed_although_as_many_keys_wait(kept):
    kept.discard()
    kept.admin.execute(
        "INSERT INTO outbox.failures (lane, id, event_id, aggregate_type, aggregate_id, attempts, next_attempt_at,"
        " blocks, last_error, first_failed_at, last_failed_at)"
        " SELECT lane, id, event_id, aggregate_type, 'another', 1, 'infinity', true, 'x', now(), now()"
        " FROM outbox.events ORDER BY id DESC LIMIT 1"
    )
    kept.taken_over()
    assert [claim.position for claim in kept.lane.fetch(3)] == [kept.first + 1 + number for number in range(3)]


def test_a_new_failure_above_the_mark_leaves_it(kept):
    kept.write("bad", 1)
    (claim,) = kept.lane.fetch(10)
    kept.lane.settle(Receipt([(claim, Refused("bad"))]))
    kept.taken_over()
    assert kept.rows_read(lambda: kept.lane.fetch(10)) < 100


def test_events_that_may_not_be_settled_are_above_the_mark_in_the_row(kept):
    kept.write("free", 3)
    claims = kept.lane.fetch(10)
    settle(kept.lane, claims)
    # The read of this turn leaves them out: the mark rises over them.
    kept.lane.source.reader._marks.keep(kept.lane.lane, claims[-1].position)
    kept.lane.source.reader.look_first(kept.lane.source._in_hand())
    kept.taken_over()
    assert kept.lane.fetch(10) == claims


def test_no_mark_is_written_over_what_is_left_out_or_still_has_to_be_read(kept):
    kept.lane.source.leave_out(frozenset({("Free", False)}))
    kept.admin.execute("UPDATE outbox.lanes SET low_water_mark = NULL, mark_failures = NULL")
    kept.lane.source.reader._row_marks._written.clear()
    kept.lane.fetch(10)
    assert kept.admin.execute("SELECT low_water_mark FROM outbox.lanes").fetchone() == (None,)
    kept.lane.source.leave_out(frozenset())
    kept.lane.source.reader._marks.keep(kept.lane.lane, kept.last)
    kept.lane.source.reader._lanes[kept.lane.lane].late = (kept.first + 5,)
    kept.lane.fetch(10)
    assert kept.admin.execute("SELECT low_water_mark FROM outbox.lanes").fetchone() == (None,)


def test_a_mark_of_another_server_or_of_a_former_holder_is_not_used(kept):
    kept.taken_over()
    before = kept.killed[0].source.reader
    # It has slept, and writes what it knows.
    kept.admin.execute("UPDATE outbox.lanes SET low_water_mark = NULL, mark_failures = NULL")
    before._row_marks._written.clear()
    before.look_first({})
    assert kept.admin.execute("SELECT low_water_mark FROM outbox.lanes").fetchone() == (None,)
    before._server = replace(before._server, system_identifier="another")
    before._lanes[kept.lane.lane].lease = kept.lease
    before.look_first({})
    assert kept.number("SELECT low_water_mark FROM outbox.lanes") == kept.last
    kept.taken_over()
    assert kept.rows_read(lambda: kept.lane.fetch(10)) >= WAITING
