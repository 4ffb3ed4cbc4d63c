"""``outbox audit`` over a real pipeline: equal where nothing is wrong, and each anomaly made by hand is named."""

from __future__ import annotations

import datetime as dt
import json
import time
from typing import Any
from uuid import UUID

import psycopg
import pytest
from audit_support import EVENTS, Pipeline, an_id, pipeline
from confluent_kafka.admin import AdminClient
from rows_and_roles import put
from spans import relay
from support import order, wait_until, write
from uuid_utils.compat import uuid4, uuid7

from outbox import Event, Outbox
from outbox.inbox import Reject
from relay.audit import comparison, findings, tables
from relay.audit.topics import Topics
from relay.operations import topic_scan

__all__ = ["order", "pipeline"]

MANY = 1_200
"""Events for more than one batch of the audit's readers, and for more differences than are named."""


@pytest.fixture
def small_batches(monkeypatch) -> None:
    """The audit's readers read a thousand at once."""
    monkeypatch.setattr(tables, "_ROWS_AT_ONCE", 1_000)
    monkeypatch.setattr(topic_scan, "_AT_ONCE", 1_000)


def states(pipeline: Pipeline, event_id: str) -> list[str]:
    """Return the state of an event in each group, as `outbox trace` shows it."""
    return [group["state"] for group in json.loads(pipeline.command("trace", event_id, "--json"))["groups"]]


def test_what_is_equal_what_is_under_way_and_what_a_group_lacks_or_has_too_much(pipeline, monkeypatch):
    pipeline.add()
    pipeline.published()
    pipeline.applied(EVENTS)
    # Of a group that also takes messages without an id, the ids are compared too.
    for strategy in ("DedupByOffset", "Dedup"):
        pipeline.run(f"UPDATE consumer.groups SET strategy = '{strategy}'")
        status, found = pipeline.audit()
        assert (status, found["differences"]) == (0, []), found
        for count in ("committed", "kafka"):
            assert sum(one[count] for one in found["windows"]) == EVENTS
        assert sum(one["groups"][pipeline.group]["applied"] for one in found["windows"]) == EVENTS
    # Over all times that a command takes.
    _, found = pipeline.audit("--since", "1970-01-01", "--until", "9998-12-31T23:59:59")
    assert sum(one["kafka"] for one in found["windows"]) == EVENTS
    # What is equal is not compared one by one.
    with monkeypatch.context() as patched:
        patched.setattr(Topics, "events", None)
        assert pipeline.differences() == []
    more = pipeline.add(4)
    pipeline.published()
    status, found = pipeline.audit()
    assert (status, found["differences"]) == (0, [])
    # Those before may be of a minute that is over.
    assert found["windows"][-1]["state"] == "open"
    assert sum(one["groups"][pipeline.group]["waiting"] for one in found["windows"]) == 4
    # A group that was set forward.
    for part, end in pipeline.ends().items():
        pipeline.run(f"UPDATE consumer.offsets SET next_offset = {end} WHERE part = {part}")
    assert pipeline.differences() == sorted(("missing", one) for one in more)
    assert pipeline.differences("--partial", pipeline.group) == []
    # An id without a message.
    event_id = str(uuid7())
    pipeline.run(
        "INSERT INTO consumer.processed_messages (grp, day, message_id) "
        f"SELECT '{pipeline.group}', current_date, '{event_id}'"
    )
    assert pipeline.differences("--partial", pipeline.group) == [("unknown", event_id)]
    # It may be a neighbour's.
    for names, noted in (({}, False), ({"NAME": "a"}, True), ({"NAME": "a", "CE_SOURCE": "/outbox"}, False)):
        for name, value in names.items():
            monkeypatch.setenv(f"OUTBOX_{name}", value)
        _, found = pipeline.audit("--partial", pipeline.group)
        assert any("OUTBOX_CE_SOURCE" in note for note in found["notes"]) == noted
    # A minute that has begun is audited.
    day = "2026-11-25T"
    for until, minutes in (("10:00:00", 60), ("10:00:00.2", 61), ("10:00:59", 61)):
        status, found = pipeline.audit("--since", f"{day}09:00:30+00:00", "--until", f"{day}{until}+00:00")
        since, end = (dt.datetime.fromisoformat(found[name]) for name in ("since", "until"))
        assert (status, end - since) == (0, dt.timedelta(minutes=minutes)), until


def test_what_an_at_most_once_group_gives_up_is_named(pipeline, small_batches):
    ids = pipeline.add(MANY)
    pipeline.published()
    first = json.loads(pipeline.record(ids[0]).value())

    def handler(_connection, message):
        if json.loads(message.value()) == first:
            raise ValueError("no such number")

    pipeline.applied(MANY, handler, delivery="at-most-once")
    status, found = pipeline.audit()
    assert status == 1
    [one] = found["differences"]
    assert (one["kind"], one["event_id"], one["group"]) == ("missing", ids[0], pipeline.group)
    record = pipeline.record(ids[0])
    place = f"partition {record.partition()} offset {record.offset()}"
    assert f"the group has given up {place} (at-most-once)" in one["text"]
    # Also if another delivery has claimed the group since.
    pipeline.run("UPDATE consumer.groups SET strategy = 'Dedup'")
    assert pipeline.differences() == [("missing", ids[0])]
    # Its id is remembered, so that a repeat does not come late.
    assert states(pipeline, ids[0]) == ["given-up"]
    assert "given up (at-most-once)" in pipeline.command("trace", ids[0])
    # Each of them for itself; those of one partition together, and every other one once more.
    pipeline.run(
        "INSERT INTO consumer.losses (grp, topic, topic_id, part, first_offset, end_offset, kind, detail) SELECT grp, "
        "topic, topic_id, part, n, CASE WHEN part = 0 AND n = 0 THEN next_offset ELSE n + 1 END, 'given-up', 'd' "
        "FROM consumer.offsets CROSS JOIN LATERAL generate_series(0, next_offset - 1, 2 - sign(part)::integer) AS n"
    )
    status, found = pipeline.audit()
    assert (status, found["differences_count"]) == (1, MANY)
    assert {(one["kind"], one["group"]) for one in found["differences"]} == {("missing", pipeline.group)}


def test_ids_without_a_time_tombstones_bytes_and_repeats_of_the_key(pipeline):
    ids = [str(uuid4()) for _ in range(5)]
    with psycopg.connect(pipeline.database.url) as connection:
        for number, (event_id, payload) in enumerate(zip(ids, (None, b"\x00\xff", {}, ["text"], [1.50]), strict=True)):
            values = {"event_id": UUID(event_id)} | ({"content_type": "text/plain"} if number == 1 else {})
            # A key that is the event's id is what the relay sends without one.
            values |= {"idempotency_key": [None, "ключ", None, event_id, event_id.upper()][number]}
            # So is a subject that is the key.
            values |= {"subject": [None, "ключ 😀", "заказ", None, "x"][number]}
            Outbox().add(
                connection, Event(pipeline.kind, "ключ 😀", "Typ é", payload, headers={"b": "", "a": "é"}, **values)
            )
    pipeline.published()
    pipeline.applied(5)
    status, found = pipeline.audit()
    assert (status, found["differences"]) == (0, []), found
    assert sum(one["groups"][pipeline.group]["applied"] for one in found["windows"]) == 5


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("DedupByKey", {"key": "idempotency-key"}), ("OffsetsOnly", {"dedup": False})],
)
def test_of_a_group_that_keeps_no_ids_of_events_only_the_positions_are_compared(pipeline, strategy, options):
    """With a key it remembers ids that are made of keys, and none of a second event of its key."""
    keys = ["request 1", "request 1", "request 2", None]
    ids = write(pipeline.database.url, [Event(pipeline.kind, "k", "Paid", {}, idempotency_key=key) for key in keys])
    pipeline.published()

    def handler(_connection: Any, message: Any) -> None:
        if ("idempotency-key", b"request 2") in message.headers():
            raise Reject("no")

    pipeline.applied(len(keys), handler, on_failure="dead-letter", **options)
    assert pipeline.rows("SELECT strategy FROM consumer.groups") == [(strategy,)]
    status, found = pipeline.audit()
    assert (status, found["differences"]) == (0, []), found
    counts = [one["groups"][pipeline.group] for one in found["windows"]]
    assert {count["applied"] for count in counts} == {None}
    assert [sum(count[name] for count in counts) for name in ("passed", "waiting")] == [len(keys), 0]
    assert "4 passed" in pipeline.command("audit")
    assert any(f"group {pipeline.group} does not keep the id of each event" in note for note in found["notes"])
    # The last is behind the dead letter of its Kafka key.
    assert [states(pipeline, str(one)) for one in ids] == [["passed"], ["passed"], ["dead"], ["dead"]]


def test_copies_replays_and_the_topic_of_another_outbox_are_no_differences(pipeline):
    """The group reads that topic too; its relays have the same source, and the template allows it."""
    ids = pipeline.add()
    pipeline.published()
    pipeline.command("replay", "--all", "--yes")
    pipeline.published()
    other = pipeline.kafka.create_topic(f"{pipeline.kafka.name('cart').lower()}-events", 1)
    for _ in range(5):
        pipeline.produce(topic=other, value=b"{}", headers={"ce_id": str(uuid7()), "ce_source": "/outbox"})
    # Of an event that is on no topic.
    copy = {"ce_id": str(an_id()), "ce_source": "/outbox", "outbox-dead-letter": "too large"}
    pipeline.produce(value=b"{}", headers=copy)
    pipeline.applied(2 * len(ids) + 6, topics=[other])
    assert pipeline.differences() == []
    assert pipeline.differences("--topic", pipeline.topic) == []


def test_each_difference_between_the_archive_and_kafka_is_named(pipeline):
    """And records of others are counted."""
    ids = pipeline.add()
    with psycopg.connect(pipeline.database.url) as connection:
        subject = str(Outbox().add(connection, Event(pipeline.kind, "customer-7", "Paid", {}, subject="order-1")))
    pipeline.published()
    twice = pipeline.record(ids[20])
    pipeline.produce(value=b"x", headers={"ce_id": "no id"})
    pipeline.produce(value=b"x", headers={b"\xff".decode("latin-1"): b"\xff"})
    pipeline.produce(value=b"x", headers={"ce_id": str(uuid7()), "ce_source": "/another"})
    status, found = pipeline.audit()
    assert (status, found["differences"]) == (0, [])
    assert any("3 records not of this outbox" in note for note in found["notes"]), found["notes"]
    # The archive has lost a row; Kafka has lost an event, which the archive has.
    unarchived, lost, unwritten = ids[7], str(uuid7()), str(uuid7())
    pipeline.run(f"DELETE FROM outbox.published WHERE event_id = '{unarchived}'")
    pipeline.run(
        f"INSERT INTO outbox.published SELECT lane, id + 1000, '{lost}', aggregate_type, aggregate_id, event_type, "
        f"payload, payload_bytes, headers, created_at, published_at, NULL, NULL, NULL "
        f"FROM outbox.published WHERE event_id = '{ids[0]}'"
    )
    for event_id, change in (
        (ids[3], "payload = '{}'"),
        (ids[4], 'headers = \'{"tenant": "b"}\''),
        (subject, 'headers = \'{"ce_subject": "order-2"}\''),
        (ids[5], "partition = (partition + 1) % 3"),
        (ids[11], "event_type = 'Paid'"),
        (ids[13], "aggregate_id = 'key-of-another'"),
        # The last of its key.
        (ids[58], '"offset" = "offset" + 500'),
        # As if it was written before ids[1], which is of its key and stands before it.
        (ids[8], f"id = (SELECT id FROM outbox.published WHERE event_id = '{ids[1]}') - 1000"),
    ):
        pipeline.run(f"UPDATE outbox.published SET {change} WHERE event_id = '{event_id}'")
    place = {"key": twice.key(), "headers": twice.headers(), "partition": (twice.partition() + 1) % 3}
    pipeline.produce(value=twice.value(), **place)
    pipeline.produce(value=b"{}", key=b"key-1", headers={"ce_id": unwritten, "ce_source": "/outbox"})
    # On a topic to which another type goes.
    other = f"{pipeline.kind.lower()}-other-events"
    write(pipeline.database.url, [Event(f"{pipeline.kind}-other", "k", "Placed", {})])
    pipeline.published()
    misrouted = pipeline.record(ids[17])
    pipeline.produce(topic=other, key=misrouted.key(), value=misrouted.value(), headers=misrouted.headers())
    named = [("unknown", unarchived), ("missing", lost), ("repeated", ids[20]), ("unknown", unwritten)]
    named += [("payload", ids[3]), ("payload", ids[4]), ("payload", subject), ("partition", ids[5]), ("order", ids[1])]
    named += [("payload", ids[11]), ("payload", ids[13]), ("order", ids[58]), ("unknown", ids[17])]
    assert pipeline.differences() == sorted(named)


def test_the_records_of_others_are_counted_once(pipeline, monkeypatch):
    """Those between the events of a minute that differs are read again; those that come meanwhile count, too."""
    # In the middle of two minutes.
    ago = int(600 + time.time() % 60 - 30)
    for _ in range(2):
        ids = [pipeline.add(ago=ago - later)[0] for later in (0, 120)]
        pipeline.published()
        for partition in range(3):
            pipeline.produce(value=b"x", partition=partition)
    for one in ids:
        pipeline.run(f"UPDATE outbox.published SET payload = '{{}}' WHERE event_id = '{one}'")
    real = Topics.events

    def events(topics: Topics, *given: Any) -> Any:
        # Each minute is read twice. The last record comes when all is read.
        pipeline.produce(value=b"x")
        return real(topics, *given)

    monkeypatch.setattr(Topics, "events", events)
    monkeypatch.setattr(findings, "AT_ONCE", 1)
    _, found = pipeline.audit()
    assert [one["event_id"] for one in found["differences"]] == ids
    assert any("has 9 records not of this outbox" in note for note in found["notes"]), found["notes"]


@pytest.mark.parametrize("of_both", [True, False])
def test_the_order_of_events_whose_places_only_kafka_has(pipeline, of_both):
    """They were settled from a marker. One of a minute before is their key's, too."""
    before = pipeline.add(1, keys=1, ago=120)
    ids = pipeline.add(2, keys=1)
    pipeline.published()
    pipeline.run(
        'UPDATE outbox.published SET topic = NULL, partition = NULL, "offset" = NULL '
        f"WHERE event_id IN ('{before[0]}', '{ids[0]}', '{ids[of_both]}')"
    )
    assert pipeline.differences() == []
    pipeline.run("UPDATE outbox.published SET id = 5 - id WHERE id IN (2, 3)")
    assert pipeline.differences() == [("order", ids[0])]
    pipeline.run("UPDATE outbox.published SET id = 4 - id WHERE id IN (1, 3)")
    assert pipeline.differences() == [("order", before[0])]


def test_several_minutes_are_compared_as_many_at_once_as_may_be(pipeline, monkeypatch, tmp_path):
    """And those that were not compared are no success."""
    ids = [one for ago in (600, 480) for one in pipeline.add(ago=ago)]
    pipeline.published()
    # Fewer rows at once than a minute has; both minutes at once.
    monkeypatch.setattr(tables, "_ROWS_AT_ONCE", EVENTS - 5)
    faults = [ids[at] for at in (EVENTS // 2, EVENTS - 2, EVENTS * 3 // 2)]
    for one in faults:
        pipeline.run(f"UPDATE outbox.published SET payload = '{{}}' WHERE event_id = '{one}'")
    assert pipeline.differences() == sorted(("payload", one) for one in faults)
    monkeypatch.setattr(findings, "AT_ONCE", EVENTS)
    assert pipeline.differences() == sorted(("payload", one) for one in faults)
    pipeline.run("UPDATE outbox.published SET payload = '{}'")
    monkeypatch.setattr(comparison, "_MOST_COMPARED", 1)
    file = tmp_path / "certificate"
    status, found = pipeline.audit("--certificate", str(file))
    assert (status, file.exists()) == (1, False)
    assert [one["state"] for one in found["windows"]] == ["different", "different"]
    assert found["differences_count"] == EVENTS
    (limit,) = (note for note in found["notes"] if "were not compared one by one" in note)
    # Of them, as many as there are differ.
    assert limit.startswith("the minutes that differ have more than 1 events: those from ")


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_topic_that_was_deleted(pipeline, made_anew):
    """Made anew, it ends before the offsets that were acknowledged, as does a log that an unclean election cuts."""
    ids = pipeline.sent()
    client = AdminClient({"bootstrap.servers": pipeline.kafka.bootstrap_servers})
    client.delete_topics([pipeline.topic])[pipeline.topic].result(30)
    wait_until(lambda: pipeline.topic not in client.list_topics(timeout=30).topics, what="the topic to go")
    if made_anew:
        pipeline.kafka.create_topic(pipeline.topic, 3)
        # Of another program.
        pipeline.produce(value=b"x", partition=1)
        # Later ones of the same keys, at lower offsets than those that are gone: these stand before nothing.
        pipeline.add(7, ago=480)
        pipeline.published()
    assert pipeline.differences() == sorted(("missing", one) for one in ids)


def test_dead_letters_are_expected_not_to_be_applied(pipeline):
    pipeline.add()
    pipeline.published()

    def failing(_: Any, message: Any) -> None:
        if json.loads(message.value())["n"] in {5, 6}:
            raise ValueError("no")

    pipeline.applied(EVENTS, failing, attempts=1, on_failure="dead-letter")
    # Those two, and what is behind them of their keys.
    assert pipeline.rows("SELECT count(*) > 2 FROM consumer.dead_letters") == [(True,)]
    assert pipeline.differences() == []
    letter = pipeline.rows("SELECT id FROM consumer.dead_letters ORDER BY id LIMIT 1")[0][0]
    pipeline.command("dead-letters", "discard", "--side", "consumer", str(letter), "--reason", "known")
    assert pipeline.differences() == []


def test_a_dead_letter_of_a_former_topic_of_that_name_excuses_nothing(pipeline):
    """Nor is what was given up of it missing: at the same offsets the topic has other messages now."""
    ids = pipeline.add()
    pipeline.published()
    pipeline.applied(EVENTS)
    lost, other = (pipeline.record(ids[at]) for at in (9, 10))
    pipeline.run(f"DELETE FROM consumer.processed_messages WHERE message_id = '{ids[9]}'")
    pipeline.run(
        "INSERT INTO consumer.losses (grp, topic, topic_id, part, first_offset, end_offset, kind, detail) "
        f"SELECT grp, topic, 'former', part, {other.offset()}, {other.offset() + 1}, 'given-up', 'd' "
        f"FROM consumer.offsets WHERE part = {other.partition()}"
    )
    pipeline.run(
        "INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_headers, message_time, "
        f"reason, error) SELECT grp, topic, topic_id, part, {lost.offset()}, '[]', now(), 'failed', 'why' "
        f"FROM consumer.offsets WHERE part = {lost.partition()}"
    )
    assert pipeline.differences() == []
    ((letter, topic_id),) = pipeline.rows("SELECT id, topic_id FROM consumer.dead_letters")
    pipeline.run("UPDATE consumer.dead_letters SET topic_id = 'former'")
    assert pipeline.differences() == [("missing", ids[9])]
    pipeline.command("dead-letters", "discard", "--side", "consumer", str(letter), "--reason", "known")
    assert pipeline.differences() == [("missing", ids[9])]
    pipeline.run(f'UPDATE consumer.audit SET details = details || \'{{"topic_id": "{topic_id}"}}\'')
    assert pipeline.differences() == []


def test_what_a_group_gave_up_between_the_events_of_two_forgotten_minutes_is_one_difference(pipeline):
    # The second one stands between the two others of its key, which are of another minute.
    for ago in (600, 480, 600):
        pipeline.add(1, ago=ago)
        pipeline.published()
    pipeline.applied(3, delivery="at-most-once")
    pipeline.run(
        "INSERT INTO consumer.losses (grp, topic, topic_id, part, first_offset, end_offset, kind, detail) "
        "SELECT grp, topic, topic_id, part, 1, 2, 'given-up', 'd' FROM consumer.offsets WHERE next_offset = 3; "
        "UPDATE consumer.groups SET forgotten_before = current_date + 2"
    )
    assert pipeline.differences() == [("missing", None)]


def test_a_group_whose_topics_no_route_leads_to(pipeline):
    pipeline.sent(1)
    for table in ("consumer.groups", "consumer.offsets"):
        put(pipeline.database.url, table)
    said = pipeline.command("audit", "--group", "g", status=2)
    assert "--group g: no route leads to what it reads; give --topic" in said
    status, found = pipeline.audit()
    assert (status, found["differences"]) == (0, [])
    assert any(note.startswith("groups read t, to which no route leads: not compared") for note in found["notes"])


def test_without_an_archive_kafka_is_compared_with_the_groups(outbox_postgres, outbox_kafka, order):
    kind, topic = order
    with relay(outbox_postgres, outbox_kafka):
        pipeline = Pipeline(outbox_postgres, outbox_kafka, kind, topic)
        ids = pipeline.add()
        pipeline.published()
    pipeline.applied(EVENTS)
    status, found = pipeline.audit("--topic", topic)
    assert (status, found["differences"]) == (0, [])
    assert all(one["committed"] is None for one in found["windows"])
    assert any("the archive may lack events" in note for note in found["notes"])
    pipeline.run(f"DELETE FROM consumer.processed_messages WHERE message_id = '{ids[9]}'")
    assert pipeline.differences("--topic", topic) == [("missing", ids[9])]


def test_what_relays_publish_when_they_keep_no_archive_any_more_is_not_unknown(
    outbox_postgres, outbox_kafka, order, monkeypatch
):
    """Also if it is of the last minute that they kept."""
    pipeline = Pipeline(outbox_postgres, outbox_kafka, *order)
    pipeline.kept_before()
    with relay(outbox_postgres, outbox_kafka, relay__archive_days=1):
        ids = pipeline.sent(5)
    with relay(outbox_postgres, outbox_kafka, delivery="at-most-once"):
        pipeline.sent(5)
    monkeypatch.setattr(Pipeline, "environment", pipeline.environment | {"OUTBOX_RELAY__ARCHIVE_DAYS": "0"})
    status, found = pipeline.audit()
    assert (status, found["differences"]) == (0, []), found
    assert any("the archive may lack events" in note for note in found["notes"])
    # What was sent before the last event of the archive would be in it, as far as clocks agree.
    _, sent = pipeline.record(ids[0]).timestamp()
    unknown = str(an_id())
    pipeline.produce(value=b"{}", headers={"ce_id": unknown, "ce_source": "/outbox"}, timestamp=sent - 61_000)
    assert pipeline.differences() == [("unknown", unknown)]


def test_what_can_not_be_asked_for(outbox_postgres, outbox_kafka):
    pipeline = Pipeline(outbox_postgres, outbox_kafka, "Order", "order-events")
    for words, said in (
        (["--since", "2026-11-25T10:00", "--until", "2026-11-25T10:00"], "is not before --until"),
        (["--since", "2026-11-25T10:01", "--until", "2026-11-25T10:00"], "is not before --until"),
        (["--group", "nobody"], "--group nobody: there "),
        (["--group", "unknown", "--topic", "order-events"], "there is no such group with positions in order-events"),
        (["--follow", "--json"], "--follow goes with --since and --partial only"),
        (["--follow", "--group", "nobody"], "--follow goes with --since and --partial only"),
    ):
        shown = pipeline.command("audit", *words, status=2)
        assert (shown.count("\n"), said in shown) == (1, True), shown
