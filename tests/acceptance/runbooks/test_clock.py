"""The runbook of a wrong clock: the database's, a relay's, a writer's.

Commands come out of docs/operations/runbooks.md itself; see runbooks.py. Postgres keeps time in rows: a clock that was
an hour ahead is the same as rows whose times are moved by an hour. What holds time besides, a statement that waits:
tests/integration/relay/polling/test_waiting.py.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import UUID

import psycopg
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from restored import NOW
from runbook_support import every_step_was_taken, of
from standby import ask
from support import drained, look_up, wait_until
from uuid_utils.compat import uuid7

from outbox import Event, Outbox
from relay.operations.doctor import postgres

HOUR_AHEAD = """
INSERT INTO outbox.relays (instance, version, heartbeat_at, alive_until)
VALUES ('long-gone', '1', now() + interval '1 h', now() + interval '1 h');
UPDATE outbox.lanes SET owner = 'long-gone', lease_until = now() + interval '1 h', epoch = 7 WHERE lane = 2;
INSERT INTO outbox.failures
SELECT lane, id, event_id, aggregate_type, aggregate_id, true, 1, 'refused', now(), now(), now() + interval '1 h'
  FROM outbox.events WHERE lane = 1 ORDER BY id LIMIT 1"""


@of("A clock is wrong")
def test_the_databases_clock_was_an_hour_ahead(operator, orders, address, settings):
    """What was set meanwhile waits for an hour longer: a lease of one that is gone, a retry, a scheduled event."""
    settings["relay__archive_days"] = 7
    url, point = orders.url, ask(orders.url, NOW)
    # So many that each lane has some.
    orders.add(100)
    with psycopg.connect(url) as connection:
        later = Event(orders.kind, "later", "T", {})
        scheduled = Outbox().add(connection, later, delay=timedelta(hours=1))
        connection.execute(HOUR_AHEAD.encode())
    [(blocked,)] = look_up(url, "SELECT count(*) FROM outbox.events WHERE lane = 2")
    operator.start()
    wait_until(lambda: ask(url, "SELECT count(*) FROM outbox.events") == blocked + 1, what="the other events")
    shown = operator.look("outbox status").text
    assert re.search(r"^2 +\d+ .*long-gone", shown, re.MULTILINE), shown
    assert re.search(r"^long-gone.* gone", shown, re.MULTILINE), shown
    assert str(scheduled) in operator.look("outbox scheduled list").text
    operator.own("outbox relay release", LANE=2)
    operator.act("outbox dead-letters retry --all")
    orders.published(100)
    operator.act("outbox audit --since", TIME=point)


@of("A clock is wrong")
def test_a_relays_clock_is_wrong(operator, orders, address, monkeypatch):
    """By so much that the broker takes no messages of this time."""
    behind = SimpleNamespace(time=lambda: time.time() - 3600, monotonic=time.monotonic)
    with monkeypatch.context() as patched:
        patched.setattr(postgres, "time", behind)
        assert re.search(r"clocks\s.*\s3600 s\sbehind\sthe\sdatabase's", operator.look("outbox doctor").text)
    assert "clocks" not in operator.look("outbox doctor").text
    admin = AdminClient(orders.options)

    def takes(milliseconds: str) -> None:
        entry = ConfigEntry("message.timestamp.before.max.ms", milliseconds)
        entry.incremental_operation = AlterConfigOpType.SET
        topic = ConfigResource("TOPIC", orders.topic, incremental_configs=[entry])
        admin.incremental_alter_configs([topic])[topic].result(30)

    takes("0")
    relay = operator.start()
    orders.add(5)
    relay.wait_for_log("Invalid timestamp")
    # One that reaches the broker within its millisecond is not late.
    waiting = {key for (key,) in look_up(orders.url, "SELECT aggregate_id FROM outbox.events")}
    taken = {message.key().decode() for message in orders.kafka.consume(orders.topic)}
    assert waiting
    assert waiting | taken == {f"k{number}" for number in range(1, 6)}
    assert look_up(orders.url, "SELECT FROM outbox.failures") == []
    takes(str(2**62))
    orders.published(5)


@of("A clock is wrong")
def test_a_writers_clock_is_wrong(operator, orders, address):
    """It only makes the ids. Their order, and the time of the events, are the database's."""
    point = ask(orders.url, NOW)
    ids = [UUID(int=uuid7().int + (hours * 3_600_000 << 80)) for hours in (2, -1, 24 * 30, -24 * 30)]
    with psycopg.connect(orders.url) as connection:
        for number, id_ in enumerate(ids):
            Outbox().add(connection, Event(orders.kind, "k", "T", {"n": number}, event_id=id_))
    operator.start()
    drained(orders.url)
    found = [dict(message.headers()) for message in orders.kafka.consume(orders.topic, 4)]
    assert [one["ce_id"].decode() for one in found] == [str(id_) for id_ in ids]
    for one in found:
        written = datetime.fromisoformat(one["ce_time"].decode())
        assert abs(written - datetime.now(UTC)) < timedelta(minutes=1)
    for id_ in ids:
        shown = operator.look("outbox trace EVENT_ID --since", EVENT_ID=id_, TIME=point)
        assert shown.status == 0, shown.text


def test_every_step_was_taken(request):
    """Runs last; of a section only if all of its tests were to run."""
    every_step_was_taken(request)
