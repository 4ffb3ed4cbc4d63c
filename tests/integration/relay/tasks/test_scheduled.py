"""Events that are not to be published before a time: written, cancelled, moved when they are due, and seen."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import uuid
from functools import partial
from typing import Any

import psycopg
import pytest
from plans import nodes
from polling_support import table
from psycopg.rows import dict_row
from rows_and_roles import outbox
from support import drained, look_up, numbers_by_key, order, wait_until, write
from wal_support import to_wal, wal
from writer_targets import each_driver, on_target, waits_for_a_lock

from outbox import Event, EventError, Outbox, TargetError
from outbox.consumer.ids import NO_TIME, day
from relay.database import Connector
from relay.tasks import scheduled as scheduled_module
from relay.tasks.scheduled import NextDue, ScheduledEvents

__all__ = ["order", "wal"]

HOUR = dt.timedelta(hours=1)
KEPT = "SELECT payload ->> 'n' FROM outbox.scheduled ORDER BY not_before, id"


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def later(url: str, written: list[Event], not_before: dt.datetime) -> list[uuid.UUID]:
    with psycopg.connect(url) as connection:
        return list(Outbox().add_many(connection, written, not_before=not_before))


def scheduled(url: str) -> list[str]:
    return [number for (number,) in look_up(url, KEPT)]


def events(url: str) -> list[str]:
    return [number for (number,) in look_up(url, "SELECT payload ->> 'n' FROM outbox.events ORDER BY id")]


@pytest.fixture
def mover(outbox_postgres):
    """What a relay has, and the time until the next event as the control loop finds it: something is due."""
    due = NextDue()
    # As if another look than one at all had found it.
    due.set(-1.0, 0.0)
    found = ScheduledEvents(Connector(outbox_postgres.url, "mover"), "outbox", due)
    yield found, due
    found.close()


@each_driver
@on_target
async def test_written_cancelled_and_rescheduled_in_the_targets_transaction(target, outbox_postgres):
    """A delay and another time count by the database's clock."""
    url = outbox_postgres.url
    later = [Event("Order", n, "T", {"n": n}) for n in range(3)]
    ids = await target.add_many(later, not_before=now() + HOUR)
    raw = Event("Order", 3, "T", b"\x00", {"h": "1"})
    raw_id = await target.add(raw, not_before=now())
    assert look_up(url, "SELECT count(*) FROM outbox.scheduled") == [(0,)]
    await target.commit()
    assert scheduled(url) == [None, "0", "1", "2"]
    assert await target.cancel(ids[1]) is True
    assert await target.cancel(ids[1]) is False
    assert await target.cancel(uuid.uuid4()) is False
    await target.rollback()
    assert scheduled(url) == [None, "0", "1", "2"]
    assert await target.cancel(ids[1]) is True
    await target.commit()
    assert scheduled(url) == [None, "0", "2"]
    found = "SELECT event_id, aggregate_id, event_type, payload_bytes, headers ->> 'h', scheduled_at <= now()"
    assert look_up(f"{url}", f"{found} FROM outbox.scheduled WHERE payload IS NULL") == [
        (raw_id, "3", "T", b"\x00", "1", True)
    ]
    assert events(url) == []
    due = (
        "SELECT payload ->> 'n', extract(epoch FROM not_before - scheduled_at)::float8 FROM outbox.scheduled "
        "WHERE aggregate_id = 'delayed'"
    )
    first = await target.add(Event("Order", "delayed", "T", {"n": 1}), delay=HOUR)
    delayed = [Event("Order", "delayed", "T", {"n": n}) for n in (2, 3)]
    await target.add_many(delayed, delay=dt.timedelta(days=2, microseconds=5))
    await target.commit()
    seconds = dict(look_up(url, due))
    assert seconds == {"1": pytest.approx(3_600, abs=30), "2": pytest.approx(172_800, abs=30), "3": seconds["2"]}
    assert await target.reschedule(first, delay=dt.timedelta()) is True
    await target.rollback()
    assert dict(look_up(url, due)) == seconds
    assert await target.reschedule(first, delay=10 * HOUR) is True
    assert await target.reschedule(uuid.uuid4(), delay=HOUR) is False
    await target.commit()
    assert dict(look_up(url, due))["1"] == pytest.approx(36_000, abs=60)
    day = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    assert await target.reschedule(first, not_before=day) is True
    await target.commit()
    assert look_up(url, "SELECT not_before FROM outbox.scheduled WHERE event_id = %s", first) == [(day,)]


@pytest.mark.parametrize("name", ["psycopg Cursor", "asyncpg Connection"])
@on_target
async def test_one_that_is_due_in_weeks_has_an_id_that_consumers_do_not_forget(target, outbox_postgres):
    """They forget ids by the day in them, by default two weeks later, and then take an event for a repeat."""
    week = dt.timedelta(days=7)
    soon = [{}, {"delay": week}, {"not_before": now() + week - HOUR}, {"not_before": now() - 5 * week}]
    late = [{"delay": week + HOUR}, {"not_before": now() + week + HOUR}]
    timed, untimed = [
        [day(await target.add(Event("Order", 1, "T"), **when)) for when in whens] for whens in (soon, late)
    ]
    assert untimed == [NO_TIME] * 2
    assert {(one - now().date()).days for one in timed} <= {-1, 0}
    own = uuid.uuid4()
    assert await target.add(Event("Order", 1, "T", event_id=own), delay=2 * week) == own


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"delay": dt.timedelta(seconds=-1)}, "delay"),
        ({"delay": dt.timedelta(days=36_501)}, "delay"),
        ({"delay": 5}, "delay"),
        ({"delay": HOUR, "not_before": now()}, "delay"),
        ({"delay": HOUR, "lock_key": True}, "lock_key"),
        ({"not_before": now(), "lock_key": True}, "lock_key"),
        # Without a time zone.
        ({"not_before": dt.datetime(2030, 1, 1)}, "not_before"),
        ({"not_before": "2030-01-01T00:00:00Z"}, "not_before"),
    ],
)
def test_times_that_are_refused(outbox_postgres, options, field):
    with psycopg.connect(outbox_postgres.url) as connection:
        with pytest.raises(EventError) as caught:
            Outbox().add(connection, Event("Order", 1, "T"), **options)
        assert caught.value.field == field
        for wrong in ({}, {"delay": HOUR, "not_before": now()}):
            with pytest.raises(EventError):
                Outbox().reschedule(connection, uuid.uuid4(), **wrong)
        assert field != "not_before" or "time zone" in str(caught.value)
        assert connection.execute("SELECT count(*) FROM outbox.scheduled").fetchone() == (0,)


@pytest.mark.parametrize(
    ("change", "ends", "moved", "kept"),
    [
        ("cancel", "commit", ["0", "2"], []),
        ("cancel", "rollback", ["0", "2", "1"], []),
        ("reschedule", "commit", ["0", "2"], ["1"]),
        ("reschedule", "rollback", ["0", "2", "1"], []),
    ],
)
def test_what_is_being_cancelled_or_rescheduled_holds_up_nothing(outbox_postgres, mover, change, ends, moved, kept):
    found, due = mover
    url, options = outbox_postgres.url, {"delay": HOUR} if change == "reschedule" else {}
    ids = later(url, [Event("Order", n, "T", {"n": n}) for n in range(3)], now())
    with psycopg.connect(url) as connection:
        change_it = getattr(Outbox(), change)
        assert change_it(connection, ids[1], **options)
        found.look()
        assert events(url) == ["0", "2"]
        getattr(connection, ends)()
        # What a relay has moved is an event, and no longer scheduled.
        assert not change_it(connection, ids[0], **options)
    due.set(0.0)
    found.look()
    assert (events(url), scheduled(url)) == (moved, kept)


def test_without_a_transaction_nothing_is_scheduled_or_cancelled(outbox_postgres):
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        with pytest.raises(TargetError, match="no transaction is open"):
            Outbox().add(connection, Event("Order", 1, "T"), not_before=now())
        with pytest.raises(TargetError, match="no transaction is open"):
            Outbox().cancel(connection, uuid.uuid4())


def test_what_is_accepted_to_be_scheduled_is_accepted_as_an_event(outbox_postgres):
    """The same constraints. One row that events refuses would hold up all that are due."""
    query = """
        SELECT regexp_replace(conname, '^(events|scheduled)_', ''), pg_get_constraintdef(oid)
          FROM pg_constraint WHERE conrelid = %s::regclass AND contype = 'c'"""
    there, here = (dict(look_up(outbox_postgres.url, query, f"outbox.{table}")) for table in ("events", "scheduled"))
    own = here.pop("not_before")
    assert "extract" in own.lower()
    # A scheduled event is never the relay's own.
    own = here.pop("relay_headers").removeprefix("CHECK (").removesuffix(")")
    assert there.pop("relay_headers") == f"CHECK ((from_relay OR {own}))"
    assert here == there


def test_times_that_never_come_are_refused(outbox_postgres):
    insert = (
        "INSERT INTO outbox.scheduled (aggregate_type, aggregate_id, event_type, not_before) VALUES ('O', '1', 'T', %s)"
    )
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        for time in ("infinity", "-infinity", "0044-03-15 BC", "10000-01-01"):
            with pytest.raises(psycopg.errors.CheckViolation, match="scheduled_not_before"):
                connection.execute(insert, (time,))


# Moving


def test_in_the_order_in_which_they_are_due(outbox_postgres, mover):
    """More than one statement moves; ids follow not_before, and then the order of writing."""
    found, due = mover
    url = outbox_postgres.url
    for hours, numbers in ((1, range(1200)), (2, range(1200, 1800)), (-1, range(1800, 1900))):
        later(url, [Event("Order", n % 7, "T", {"n": n}) for n in numbers], now() - hours * HOUR)
    found.look()
    wanted = [*range(1200, 1800), *range(1200)]
    assert events(url) == [str(n) for n in wanted]
    assert len(scheduled(url)) == 100
    assert due.seconds == pytest.approx(3600, abs=60)
    [(age,)] = look_up(url, "SELECT max(clock_timestamp() - created_at) FROM outbox.events")
    assert age < dt.timedelta(minutes=5)


def test_without_anything_due_there_is_no_statement_and_no_session(outbox_postgres):
    def connect() -> Any:
        raise AssertionError("nothing is due")

    due = NextDue()
    found = ScheduledEvents(connect, "outbox", due)
    found.look()
    due.set(0.5)
    found.look()
    due.set(0.0)
    with pytest.raises(AssertionError):
        found.look()


def test_one_relay_moves_at_a_time(outbox_postgres, mover):
    """Two would give the later events of a key lower ids than the earlier ones."""
    found, due = mover
    url = outbox_postgres.url
    later(url, [Event("Order", 1, "T", {"n": 1})], now())
    with psycopg.connect(url) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('outbox scheduled outbox', 0))")
        found.look()
        assert (events(url), scheduled(url)) == ([], ["1"])
        assert due.seconds is not None
        assert due.seconds < 0
    found.look()
    assert (events(url), scheduled(url)) == (["1"], [])
    assert due.seconds is None


def test_a_cancellation_waits_for_the_move_and_then_finds_nothing(outbox_postgres):
    url = outbox_postgres.url
    [event_id] = later(url, [Event("Order", 1, "T", {"n": 1})], now())

    async def scenario() -> None:
        with psycopg.connect(url) as moving, psycopg.connect(url) as connection:
            moving.execute("DELETE FROM outbox.scheduled")
            cancelling = asyncio.create_task(asyncio.to_thread(Outbox().cancel, connection, event_id))
            while not waits_for_a_lock(outbox_postgres, connection):
                await asyncio.sleep(0.01)
            moving.commit()
            assert await cancelling is False

    asyncio.run(scenario())


@pytest.mark.parametrize("analyzed", [False, True])
def test_a_move_reads_what_is_due_and_no_more(outbox_postgres, mover, monkeypatch, analyzed):
    found, _ = mover
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox.scheduled SET (autovacuum_enabled = off)")
        connection.execute(
            "INSERT INTO outbox.scheduled (aggregate_type, aggregate_id, event_type, not_before) "
            "SELECT 'Order', 'k' || g % 1000, 'T', now() + make_interval(hours => g - 50) "
            "FROM generate_series(1, 100000) AS g"
        )
        if analyzed:
            connection.execute("ANALYZE outbox.scheduled")
        plans: list[dict[str, Any]] = []
        run = ScheduledEvents._one

        def explain(self: Any, connection: Any, query: Any, **values: Any) -> Any:
            text = psycopg.sql.SQL("EXPLAIN (ANALYZE, FORMAT JSON, COSTS OFF, TIMING OFF) ") + query
            [(plan,)] = connection.execute(text, values).fetchall()
            plans.append(plan[0]["Plan"])
            return (0, None, None) if "moved" in query.as_string() else run(self, connection, query, **values)

        monkeypatch.setattr(ScheduledEvents, "_one", explain)
        found.look()
        assert connection.execute("SELECT count(*) FROM outbox.events").fetchone() == (50,)
    for plan in plans:
        scans = [
            node for node in nodes(plan) if node.get("Relation Name") == "scheduled" and "Scan" in node["Node Type"]
        ]
        assert scans
        for scan in scans:
            assert scan["Node Type"] in {"Index Scan", "Index Only Scan", "Tid Scan"}, scan
            assert scan["Actual Rows"] * scan["Actual Loops"] + scan.get("Rows Removed by Filter", 0) <= 50, scan


@pytest.fixture
def moved_before(outbox_postgres):
    """100,000 events that were moved within two hours, while a session holds the xmin. Returns a connection."""
    with outbox_postgres.connect(autocommit=True) as admin, outbox_postgres.connect() as old:
        admin.execute("ALTER TABLE outbox.scheduled SET (autovacuum_enabled = off)")
        admin.execute("ANALYZE outbox.scheduled")
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT 1").fetchone()
        schedule(admin, 100_000, "now() - make_interval(secs => 7200 * (1 - g / 100001.0) + 60)")
        admin.execute("DELETE FROM outbox.scheduled")
        yield admin


def schedule(admin: Any, count: int, time: str) -> None:
    admin.execute(
        "INSERT INTO outbox.scheduled (aggregate_type, aggregate_id, event_type, payload, not_before) "
        f"SELECT 'Order', 'k', 'T', jsonb_build_object('n', g), {time} FROM generate_series(1, {count}) AS g"
    )


def blocks_read(admin: Any, connection: Any) -> int:
    """Return how many blocks of the table and of its index of times were read so far."""
    connection.execute("SELECT pg_stat_force_next_flush()")
    query = (
        "SELECT heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read FROM pg_statio_user_tables "
        "WHERE relid = 'outbox.scheduled'::regclass"
    )
    return int(admin.execute(query).fetchone()[0])


def test_the_census_does_not_visit_what_was_moved(outbox_postgres, moved_before):
    clock = [0.0]
    due = NextDue(lambda: clock[0])
    control = table(outbox_postgres, "relay")
    control.beat()
    connection: Any = control._connection

    def census() -> int:
        moved_before.execute("SELECT pg_stat_force_next_flush()")
        before = blocks_read(moved_before, connection)
        control.distribution(due)
        return blocks_read(moved_before, connection) - before

    schedule(moved_before, 1, "now() + interval '1 hour'")
    assert census() >= 1500
    assert 3590 < (due.seconds or 0) <= 3600
    assert census() <= 20
    # By a transaction that is a little late.
    schedule(moved_before, 1, "now() - interval '5 seconds'")
    assert census() <= 20
    assert -120 < (due.seconds or 0) < 0
    # Or very late: a look at all finds it, a few seconds later.
    schedule(moved_before, 1, "now() - interval '1 hour'")
    assert census() <= 20
    clock[0] += scheduled_module._ALL_SECONDS
    assert census() > 300
    assert (due.seconds or 0) < -3500


def test_what_is_moved_is_not_visited_by_the_next_statement(outbox_postgres, moved_before, mover, monkeypatch):
    found, due = mover
    schedule(moved_before, 20_000, "now()")
    # The control loop has looked at all.
    due.set(0.0)
    statements: list[dict[str, Any]] = []
    run = ScheduledEvents._one

    def record(self: Any, connection: Any, query: Any, **values: Any) -> Any:
        if query is self._move_query:
            statements.append(values)
        return run(self, connection, query, **values)

    monkeypatch.setattr(ScheduledEvents, "_one", record)
    found.look()
    assert events(outbox_postgres.url) == [str(number) for number in range(1, 20_001)]
    assert len(statements) == 41

    def blocks(values: dict[str, Any]) -> int:
        text = psycopg.sql.SQL("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ") + found._move_query
        [(plan,)] = moved_before.execute(text, values).fetchall()
        (scan,) = [node for node in nodes(plan[0]["Plan"]) if node.get("Index Name") == "scheduled_due"]
        return int(scan["Shared Hit Blocks"] + scan["Shared Read Blocks"])

    # What the first statement would read now is what the last one would have read if it began where the first did.
    assert blocks(statements[0]) > 200
    assert blocks(statements[-1]) <= 10
    assert blocks({**statements[0], "back": None}) > 1500


# With relays


def test_relays_publish_what_is_due_once_and_in_order_though_one_is_killed(
    outbox_postgres, outbox_kafka, outbox_relay, order, wal
):
    """25,000 events of 500 keys become due while two relays publish others; the one that began is killed."""
    kind, topic = order
    url = outbox_postgres.url
    settings = wal | {"delivery": "exactly-once", "relay__lease_seconds": 1.0}
    to_wal(url, wal)
    writer = Outbox()
    with psycopg.connect(url) as connection:
        due = now() + dt.timedelta(seconds=1)
        for first in range(0, 25_000, 5_000):
            some = [Event(kind, n % 500, "T", {"n": n}) for n in range(first, first + 5_000)]
            writer.add_many(connection, some, not_before=due + dt.timedelta(milliseconds=first // 50))
        writer.add(connection, Event(kind, "never", "T", {"n": -1}), not_before=now() + HOUR)
    relays = [outbox_relay(**settings) for _ in range(2)]
    write(url, [Event(kind, f"now-{n}", "T", {"n": 0}) for n in range(100)])
    wait_until(
        lambda: look_up(url, "SELECT count(*) < 20000 FROM outbox.scheduled") == [(True,)], 60, "a part is moved"
    )
    relays[0].kill()
    wait_until(lambda: look_up(url, "SELECT count(*) FROM outbox.scheduled") == [(1,)], 120, "all is moved")
    drained(url, 120)
    found, repeated = numbers_by_key(outbox_kafka.consume(topic, 25_100), "n")
    assert repeated == 0
    assert {key: numbers for key, numbers in found.items() if not key.startswith("now-")} == {
        str(key): list(range(key, 25_000, 500)) for key in range(500)
    }
    assert len(found) == 600
    assert scheduled(url) == ["-1"]


def test_what_operators_see_and_do(outbox_postgres, outbox_kafka, outbox_relay, order):
    kind, topic = order
    url = outbox_postgres.url
    run = partial(outbox, url, kafka__bootstrap_servers=outbox_kafka.bootstrap_servers)
    assert "nothing is scheduled" in run("scheduled", "list")
    [wrong] = later(url, [Event(kind, "k", "T", {"n": 1})], now() + 2 * HOUR)
    [soon] = later(url, [Event(kind, "k", "T", {"n": 2})], now() - 1 * HOUR)
    later(url, [Event("Other", "k", "T")], now() + HOUR)
    rows = json.loads(run("scheduled", "list", "--json"))["scheduled"]
    assert [row["aggregate_type"] for row in rows] == [kind, "Other", kind]
    assert run("scheduled", "list", "--type", "Other").count("Other/k") == 1
    found = json.loads(run("status", "--json", status=1))
    assert (found["outbox"]["scheduled"], round(found["outbox"]["next_due_seconds"] / 60)) == (3, -60)
    assert any("overdue by 36" in problem for problem in found["problems"])
    assert "scheduled 3, the next in" in run("status", status=1)
    shown = run("trace", str(wrong), status=0)
    assert "scheduled" in shown
    assert "is not published before" in shown
    assert run("trace", "--aggregate", f"{kind}/k").count("scheduled") == 2
    # The limit of a list is said if it has cut it.
    for listed, count in ((["trace", "--aggregate", f"{kind}/k"], 2), (["scheduled", "list"], 3)):
        assert [run(*listed, "--limit", str(n)).count("there are more") for n in (1, count - 1, count)] == [1, 1, 0]
    assert "reason" in run("scheduled", "cancel", str(wrong), status=2)
    run("scheduled", "cancel", str(wrong), "--reason", "a mistake")
    assert "Nothing was changed" in run("scheduled", "cancel", str(wrong), "--reason", "again", status=1)
    with psycopg.connect(url, row_factory=dict_row) as connection:
        [line] = connection.execute("SELECT what, why, details FROM outbox.audit").fetchall()
    assert (line["what"], line["why"]) == ("cancel scheduled event", "a mistake")
    assert (line["details"]["event_id"], line["details"]["payload"]) == (str(wrong), {"n": 1})

    outbox_relay()
    [message] = outbox_kafka.consume(topic, 1)
    assert dict(message.headers())["ce_id"].decode() == str(soon)
    drained(url)
    found = json.loads(run("status", "--json"))
    assert found["outbox"]["scheduled"] == 1
    assert 0 < found["outbox"]["next_due_seconds"] < 3600
