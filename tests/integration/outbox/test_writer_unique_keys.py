"""``Outbox(unique_keys=True)``: an event whose idempotency key was added before is the same event."""

from __future__ import annotations

import datetime as dt
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest
from support import wait_until
from writer_targets import each_driver, numbers, on_target, round_trips, stored, waits_for_a_lock

from outbox import Event, EventError, IdempotencyKeyReused, Outbox, Serialized
from outbox._sending import Rows, Step, run
from relay.database import Connector
from relay.tasks import idempotency_keys

outbox = Outbox(unique_keys=True)
LATER = dt.datetime(2100, 1, 1, tzinfo=dt.UTC)


def keyed(number: int, key: str | None, aggregate_id: str = "o-1", kind: str = "Order", **given) -> Event:
    return Event(kind, aggregate_id, "Placed", {"n": number}, idempotency_key=key, **given)


def known(database) -> list[str]:
    with database.connect() as connection:
        rows = connection.execute("SELECT idempotency_key FROM outbox.idempotency_keys ORDER BY added_at, 1")
        return [row[0] for row in rows]


@each_driver
@on_target
async def test_a_second_add_writes_nothing_and_returns_the_first_id(target, outbox_postgres):
    target.options = {"unique_keys": True}
    first = await target.add(keyed(1, "a"))
    assert await target.add(keyed(2, "a")) == first
    assert await target.add(keyed(2, "a", event_id=uuid.uuid4())) == first
    await target.commit()
    assert await target.add(keyed(3, "a")) == first
    # Without a key each is an event of its own; another aggregate type has keys of its own.
    others = [await target.add(keyed(4, None)), await target.add(keyed(5, "a", kind="Invoice"))]
    many = await target.add_many([keyed(6, "b"), keyed(7, None), keyed(8, "a"), keyed(9, "b"), keyed(10, "c")])
    assert (many[2], many[3]) == (first, many[0])
    await target.commit()
    assert numbers(outbox_postgres) == [1, 4, 5, 6, 7, 10]
    written = [row["event_id"] for row in stored(outbox_postgres)]
    assert written == [first, *others, many[0], many[1], many[4]]
    assert [(row["headers"] or {}).get("idempotency-key") for row in stored(outbox_postgres)] == [
        *("a", None, "a", "b", None, "c")
    ]


@each_driver
@on_target
async def test_a_key_that_another_event_has_is_refused_with_all_that_is_added_beside_it(target, outbox_postgres):
    target.options = {"unique_keys": True}
    first = await target.add(keyed(1, "a"))
    beside = [keyed(2, None), keyed(3, "new")]
    for wrong in (keyed(4, "a", "o-2"), Event("Order", "o-1", "Paid", {"n": 5}, idempotency_key="a")):
        with pytest.raises(IdempotencyKeyReused, match=f"Placed of 'o-1' \\({first}\\)") as caught:
            await target.add_many([*beside, wrong])
        assert caught.value.field == "idempotency_key"
        with pytest.raises(EventError):
            await target.add(wrong)
    # Within one call nothing is even sent.
    with pytest.raises(IdempotencyKeyReused):
        await target.add_many([keyed(6, "b"), keyed(7, "b", "o-2")])
    await target.add_many(beside)
    await target.commit()
    assert (numbers(outbox_postgres), known(outbox_postgres)) == ([1, 2, 3], ["a", "new"])


def test_without_unique_keys_a_key_prevents_nothing(outbox_postgres):
    with outbox_postgres.connect() as connection:
        ids = [Outbox().add(connection, keyed(n, "a")) for n in range(2)]
    assert len(set(ids)) == 2
    assert (numbers(outbox_postgres), known(outbox_postgres)) == ([0, 1], [])


@pytest.mark.parametrize("ends", ["commit", "rollback"])
@pytest.mark.parametrize("wrong", [False, True], ids=["same", "other"])
def test_a_second_add_waits_for_the_first_transaction(outbox_postgres, ends, wrong):
    with outbox_postgres.connect() as first, outbox_postgres.connect() as second, ThreadPoolExecutor(1) as pool:
        first_id = outbox.add(first, keyed(1, "a"))
        adding = pool.submit(outbox.add, second, keyed(2, "a", "o-2" if wrong else "o-1"))
        wait_until(lambda: waits_for_a_lock(outbox_postgres, second), 10, "the second add waits")
        getattr(first, ends)()
        if ends == "commit" and wrong:
            with pytest.raises(IdempotencyKeyReused):
                adding.result(60)
        else:
            assert (adding.result(60) == first_id) == (ends == "commit")
        second.commit()
    assert numbers(outbox_postgres) == ([1] if ends == "commit" else [2])


def test_the_same_keys_in_opposite_orders_do_not_deadlock(outbox_postgres):
    keys = [f"k{n}" for n in range(100)]

    def write(order: list[str], turn: int) -> list[uuid.UUID]:
        with outbox_postgres.connect() as connection:
            return outbox.add_many(connection, [keyed(turn, f"{key} {turn}") for key in order], lock_key=turn % 2 == 0)

    for turn in range(10):
        with ThreadPoolExecutor(3) as pool:
            orders = keys, keys[::-1], keys[50:] + keys[:50]
            written = [adding.result(60) for adding in [pool.submit(write, order, turn) for order in orders]]
        assert set(written[0]) == set(written[1]) == set(written[2])
    assert len(stored(outbox_postgres)) == 10 * 100


def test_in_a_stricter_isolation_the_transaction_has_to_run_again(outbox_postgres):
    with outbox_postgres.connect() as first, outbox_postgres.connect() as second:
        second.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        second.execute("SELECT 1 FROM outbox.events")
        outbox.add(first, keyed(1, "a"))
        first.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            outbox.add(second, keyed(2, "a"))


def test_it_costs_one_round_trip_if_the_key_is_new_and_nothing_without_keys(outbox_postgres, tmp_path):
    with outbox_postgres.connect() as connection:
        connection.execute("SELECT 1")

        def trips(*events: Event) -> int:
            return round_trips(connection, tmp_path / "trace", lambda: outbox.add_many(connection, events))

        assert [trips(keyed(1, "a")), trips(keyed(2, "b"), keyed(3, None)), trips(keyed(4, "a"))] == [1, 1, 2]
        # Without the table, as for a writer without the rights: an event without a key does not need it.
        connection.execute("DROP TABLE outbox.idempotency_keys")
        assert trips(keyed(5, None)) == 1


def test_a_scheduled_events_key_is_known_at_once_and_free_when_it_is_cancelled(outbox_postgres):
    with outbox_postgres.connect() as connection:
        first = outbox.add(connection, keyed(1, "a"), not_before=LATER)
        assert outbox.add(connection, keyed(2, "a")) == first
        assert outbox.add(connection, keyed(2, "a"), not_before=LATER) == first
        assert connection.execute("SELECT count(*) FROM outbox.scheduled").fetchone() == (1,)
        assert Outbox().cancel(connection, first)
        second = outbox.add(connection, keyed(3, "a"))
        assert second != first
        # It is no longer scheduled: its key stays.
        assert not Outbox().cancel(connection, second)
        assert outbox.add(connection, keyed(4, "a")) == second
    assert numbers(outbox_postgres) == [3]


def test_a_serializer_keeps_the_key(outbox_postgres):
    unique = Outbox(unique_keys=True, serializer=lambda event: Serialized(b"x", "text/plain"))
    with outbox_postgres.connect() as connection:
        assert unique.add(connection, keyed(1, "a")) == unique.add(connection, keyed(1, "a"))
    assert [row["headers"]["idempotency-key"] for row in stored(outbox_postgres)] == ["a"]


def test_a_key_that_is_forgotten_during_the_call_is_new(outbox_postgres):
    """The first statement finds it known, and the second no longer who has it."""
    with outbox_postgres.connect() as connection, outbox_postgres.connect(autocommit=True) as other:
        first = outbox.add_many(connection, [keyed(1, "a"), keyed(2, "b")])
        connection.commit()
        send, sent = outbox._writer.sender.to(connection), []

        def forgetting(step: Step) -> Rows:
            rows = send(step)
            if not sent:
                other.execute("DELETE FROM outbox.idempotency_keys WHERE idempotency_key = 'a'")
            sent.append(step)
            return rows

        events = [keyed(3, "a"), keyed(4, "b"), keyed(5, None)]
        given = [uuid.uuid4() for _ in events]
        steps = outbox._writer.steps(events, given, {}, None, lock_key=False)
        assert run(steps, forgetting) == [given[0], first[1], given[2]]
    assert len(sent) == 3
    assert sorted(numbers(outbox_postgres)) == [1, 2, 3, 5]


def test_keys_are_forgotten_after_their_days(outbox_postgres, monkeypatch):
    monkeypatch.setattr(idempotency_keys, "_AT_ONCE", 2)
    with outbox_postgres.connect() as connection:
        outbox.add_many(connection, [keyed(n, f"k{n}", str(n)) for n in range(7)])
        aged = "UPDATE outbox.idempotency_keys SET added_at = now() - make_interval(days => %s, mins => %s) "
        connection.execute(aged + "WHERE idempotency_key < 'k5'", (30, 1))
        connection.execute(aged + "WHERE idempotency_key = 'k5'", (30, -1))
        # It waits for longer than keys are kept: added again, it would be published twice.
        outbox.add(connection, keyed(7, "waits"), not_before=LATER)
        connection.execute(aged + "WHERE idempotency_key = 'waits'", (30, 1))
    connector = Connector(outbox_postgres.url, "test")
    idempotency_keys.forget(connector, "outbox", 30)
    assert sorted(known(outbox_postgres)) == ["k5", "k6", "waits"]
    with closing(connector()) as connection, connection.transaction():
        ids = outbox.add_many(connection, [keyed(10, "k4", "4"), keyed(11, "k5", "5")])
    assert [row["event_id"] for row in stored(outbox_postgres)][5::2] == ids[::-1]
