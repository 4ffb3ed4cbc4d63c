"""``outbox recover``, run as a command: each difference between an outbox and its topics, and what becomes of it.

Real restores: tests/acceptance/runbooks/test_restores.py.
"""

from __future__ import annotations

import datetime as dt
import json
import signal
import time
from contextlib import closing
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from hostile_messages import TOPIC
from reconcile_support import other_program, outbox
from recover_support import ARCHIVE, ids, new_id, resent, restored
from support import IMPATIENT, ends, wait_until

from outbox.errors import OperationRefused
from relay.config import Delivery, Settings
from relay.core.marker import Marker
from relay.operations.recover import Recovery

__all__ = ["outbox", "restored"]


def test_each_table_is_compared(restored):
    lost, waiting, again, changed, later, dead, kept, missing, early = (new_id() for _ in range(9))
    for event_id in (waiting, again, changed):
        restored.put("events", event_id)
    restored.put("scheduled", later, ", not_before", ", now() + interval '1 hour'")
    restored.put("scheduled", new_id(), ", not_before", ", now() + interval '1 hour'")
    restored.letter(dead, blocks=True)
    for event_id, ago in ((kept, 3600), (missing, 0)):
        columns = ", lane, id, created_at, published_at"
        restored.put("published", event_id, columns, f", 1, 12, now(), now() - interval '{ago} seconds'")
    restored.send(early, seconds_ago=3570)
    restored.send(lost, again, later, dead, kept)
    restored.send(changed, value=b'{"n": 2}')
    # Of another outbox, and a replay.
    restored.send(new_id(), headers=[("ce_source", "/another")])
    restored.send(new_id(), headers=[("outbox-replay", "2026-01-01T00:00:00Z")])
    found = restored.recover("--dry-run", status=1)
    assert (ids(found["lost"]), ids(found["unsure"]), ids(found["missing"])) == ({lost}, set(), {missing})
    assert found["settled"] == {"1": [again]}
    assert (found["changed"], found["scheduled"], found["dead_letters"]) == ([changed], [later], [dead])
    assert restored.left() == 3
    assert restored.command("recover", "--since", restored.since).returncode == 2
    of_all_times = ("--since", "1970-01-01", "--until", "9998-12-31T23:59:59")
    whole = restored.command("recover", *of_all_times, "--dry-run", "--json", settings=ARCHIVE)
    # Within a minute of where the archive begins.
    assert early in ids(json.loads(whole.stdout)["unsure"])
    restored.recover("--reason", "restored")
    assert restored.run("SELECT event_id::text FROM outbox.events ORDER BY id") == [(waiting,), (changed,)]
    assert restored.run("SELECT count(*) FROM outbox.scheduled") == [(1,)]
    assert restored.run("SELECT count(*) FROM outbox.dead_letters") == [(0,)]
    assert restored.run("SELECT count(*) FROM outbox.failures") == [(0,)]
    assert restored.run("SELECT why FROM outbox.audit WHERE what = 'recover'") == [("restored",)]
    # What was settled is no loss the next time.
    found = restored.recover("--dry-run", status=1)
    assert (ids(found["missing"]), found["settled"], found["changed"]) == ({missing}, {}, [changed])
    assert ids(found["lost"]) == {lost}


def test_the_archive_shows_nothing_of_the_time_before_it_begins(restored):
    """Retention has deleted the days before: what was settled then is no loss."""
    settled, known, lost = (new_id() for _ in range(3))
    day = 86_400
    restored.send(settled, seconds_ago=3 * day)
    restored.send(known, lost, seconds_ago=2 * day - 600)
    restored.since = "2020-01-01"
    found = restored.recover("--dry-run", status=1)
    # An empty archive shows nothing; these are later than the point.
    assert (ids(found["lost"]), ids(found["unsure"])) == ({settled, known, lost}, set())
    columns = ", lane, id, created_at, published_at"
    restored.put("published", known, columns, ", 1, 12, now(), now() - interval '2 days'")
    found = restored.recover("--dry-run", status=1)
    assert (ids(found["lost"]), ids(found["unsure"])) == ({lost}, {settled})
    assert found["archived_from"] == restored.run("SELECT published_at FROM outbox.published")[0][0].isoformat()
    said = restored.command("recover", "--since", restored.since, "--dry-run", settings=ARCHIVE).stdout
    assert f"from before the archive begins: 1 event of 1 key\n  {restored.topics[0]}: 1\n    {settled}" in said
    # From a point since then it shows all.
    restored.since = (dt.datetime.now(dt.UTC) - dt.timedelta(seconds=2 * day - 300)).isoformat()
    assert restored.recover("--dry-run", status=1)["archived_from"] is None


def test_what_kafka_has_lost_is_put_back_before_what_waits(restored):
    waiting, missing = new_id(), new_id()
    # It was replayed before: it is in the archive twice. Identity columns begin with 1.
    for number in (-2, -1):
        restored.put("published", missing, ", lane, id, created_at", f", 1, {number}, now()")
    restored.put("events", waiting)
    restored.run("UPDATE outbox.lanes SET low_water_mark = 1000, mark_failures = 'x', streaming = true, source = 'wal'")
    assert ids(restored.recover("--resend", "--reason", "Kafka was lost")["missing"]) == {missing}
    assert restored.run("SELECT id, event_id::text FROM outbox.events ORDER BY id")[0] == (-2, missing)
    assert restored.left() == 2
    assert restored.run("SELECT id FROM outbox.published") == [(-1,)]
    # Those of all lanes: their number may have changed since.
    state = "SELECT DISTINCT low_water_mark, mark_failures, streaming, epoch FROM outbox.lanes"
    assert restored.run(state) == [(None, None, False, 2)]
    assert restored.recover("--resend", "--reason", "again")["missing"] == []
    assert restored.left() == 2


def test_a_neighbour_of_the_same_name_keeps_its_markers(restored):
    """This outbox was never published exactly-once, and the other one's database is on another server."""
    markers = {lane: Marker(5, 1, "4711", 1) for lane in range(8)}
    producer = Producer({"bootstrap.servers": restored.kafka.bootstrap_servers})
    for lane, marker in markers.items():
        producer.produce(restored.state.name, marker.encode(), b"marker", partition=lane)
    assert producer.flush(60) == 0
    again = new_id()
    restored.put("events", again)
    restored.send(again)
    refused = restored.reconcile("--apply", "--reason", "x")
    assert (refused.returncode, "Choose a new one" in refused.stderr) == (1, True), refused.stderr
    for resend, settled in (((), {"1": [again]}), (("--resend",), {})):
        assert restored.recover(*resend, "--reason", "restored")["settled"] == settled
        assert restored.state.last_markers(range(8)) == markers
    assert {restored.lane(lane)["last_batch"] for lane in range(8)} == {None}
    # Of an outbox that was, a marker of another server is its own: it was restored from a dump.
    restored.run("UPDATE outbox.lanes SET last_batch = 4 WHERE lane = 7")
    assert restored.reconcile().returncode == 1
    assert len(restored.recover("--dry-run", status=1)["lanes"]) == 8
    restored.recover("--reason", "restored")
    assert {marker.system_identifier for marker in restored.state.last_markers(range(8)).values()} == {
        restored.identity()
    }


@pytest.mark.parametrize("state", ["retried", "dead"])
def test_what_kafka_has_lost_is_put_back_before_what_is_retried(restored, outbox_relay, state):
    """A later event of the key is due, or a dead letter that an operator retries before a relay runs."""
    lost, later, others = [new_id() for _ in range(3)], new_id(), [new_id() for _ in range(2)]
    for number, event_id in enumerate(lost):
        restored.put("published", event_id, ", lane, id, created_at", f", 1, {-9 + number}, now()")
    restored.put(
        "published", new_id(), ", lane, id, created_at, headers", ', 1, -5, now(), \'{"outbox-dead-letter": ""}\''
    )
    if state == "dead":
        restored.letter(later, blocks=True)
    else:
        restored.put("events", later)
        restored.failed("events", later, True, "-infinity")
    restored.key = restored.keys(0)[2]
    for number, event_id in enumerate(others):
        restored.put("published", event_id, ", lane, id, created_at", f", 2, {-9 + number}, now()")
    assert restored.recover("--resend", "--reason", "Kafka was lost")["resent"] == 6
    # The copy, and events of other keys, are not among them.
    assert restored.run("SELECT count(*) FROM outbox.failures") == [(4,)]
    restored.run("DELETE FROM outbox.events WHERE headers ? 'outbox-dead-letter'")
    if state == "dead":
        assert restored.command("dead-letters", "retry", later).returncode == 0
    relay = outbox_relay(name=restored.name)
    wait_until(lambda: restored.left() == 0, 60, "the events to be published")
    ends(relay)
    assert restored.run("SELECT count(*) FROM outbox.failures") == [(0,)]
    found = [dict(one.headers())["ce_id"].decode() for one in restored.kafka.consume(restored.topics)]
    assert [event_id for event_id in found if event_id not in others] == [*lost, later]


def test_an_event_is_not_its_copy_for_a_dead_letter_topic(restored):
    """The one is lost, the other on Kafka or waiting; or both are lost, and an event whose replay is there is not."""
    replayed, lost, waits, both = (new_id() for _ in range(4))
    copy = {"outbox-dead-letter": "large"}
    columns, values = ", lane, id, created_at, headers", ", 1, {}, now(), '{}'"
    for number, event_id in enumerate((replayed, lost, waits, both)):
        restored.put("published", event_id, columns, values.format(-10 + number, "{}"))
    for number, event_id in enumerate((lost, both)):
        restored.put("published", event_id, columns, values.format(-5 + number, json.dumps(copy)))
    restored.put("events", waits, ", headers, from_relay", f", '{json.dumps(copy)}', true")
    restored.send(replayed, headers=[("outbox-replay", "2026-01-01T00:00:00Z")])
    restored.send(lost, headers=list(copy.items()))
    assert resent(restored) == [(lost, {}), (waits, {}), (both, {}), (both, copy), (waits, copy)]


def test_nothing_is_put_back_beside_a_relay(restored):
    """One that holds a lane still, that starts after the comparison, or that came and went meanwhile."""
    restored.put("published", new_id(), ", lane, id, created_at", ", 1, -1, now()")
    relay: dict[str, Any] = {"archive_days": 7}
    kafka: dict[str, Any] = {"bootstrap_servers": restored.kafka.bootstrap_servers}
    settings = Settings(
        database_url=restored.url, name=restored.name, delivery=Delivery.EXACTLY_ONCE, relay=relay, kafka=kafka
    )
    since = dt.datetime.fromisoformat(restored.since + "+00:00")
    refused = {
        "UPDATE outbox.lanes SET owner = 'r', lease_until = 'infinity' WHERE lane = 2": (
            "r holds lane 2 until .*`outbox relay release 2 --reason '…'`",
            "UPDATE outbox.lanes SET owner = NULL, lease_until = '-infinity' WHERE lane = 2",
        ),
        "INSERT INTO outbox.relays (instance, version, alive_until) VALUES ('r', '1', 'infinity')": (
            "1 relay running",
            "DELETE FROM outbox.relays",
        ),
        "UPDATE outbox.lanes SET epoch = epoch + 1 WHERE lane = 2": ("relays have changed the lanes since", "SELECT 1"),
    }
    with closing(Recovery(settings)) as recovery:
        for change, (said, undone) in refused.items():
            found = recovery.compare(since, since + dt.timedelta(days=1))
            restored.run(change)
            with pytest.raises(OperationRefused, match=said):
                recovery.recover(found, "Kafka was lost", resend=True)
            restored.run(undone)
    assert restored.left() == 0
    assert restored.run("SELECT count(*) FROM outbox.published") == [(1,)]
    assert restored.run("SELECT FROM outbox.audit") == []


def test_what_later_events_of_the_key_overtook_is_named_and_not_put_back(restored):
    """The later event is in the archive, not settled yet, lost by Postgres, or scheduled. Others are put back.

    nowhere   lost by Postgres, and the archive does not know the topic of the earlier ones.
    """
    names: dict[str, str] = {}
    columns, values = ", lane, id, created_at, topic", ", 1, {}, now(), {}"

    def archived(name: str, number: int) -> str:
        names[event_id := new_id()] = f"{later}: {name}"
        topic = "NULL" if later == "nowhere" else f"'{restored.topics[0]}'"
        restored.put("published", event_id, columns, values.format(number, topic))
        return event_id

    of_each = ("archived", "waits", "lost", "nowhere", "scheduled")
    for start, later in zip(range(-50, 0, 10), of_each, strict=True):
        restored.key = f"k-{later}"
        overtaken = archived("overtaken", start)
        archived("between", start + 1)
        on_kafka = archived("on Kafka", start + 2) if later == "archived" else new_id()
        if later == "archived":
            archived("last", start + 3)
            # Replays count as their events.
            restored.put("published", overtaken, columns, values.format(start + 4, f"'{restored.topics[0]}'"))
        elif later == "waits":
            restored.put("events", on_kafka)
        elif later == "scheduled":
            restored.put("scheduled", on_kafka, ", not_before", ", now()")
        restored.send(on_kafka)
        restored.key = f"k-{later}-other"
        archived("other", start + 5)
    found = restored.recover("--dry-run", status=1)
    assert {names[one] for one in ids(found["overtaken"])} == {
        f"{later}: {name}" for later in of_each for name in ("overtaken", "between")
    }
    put_back = {"archived: last", *(f"{later}: other" for later in of_each)}
    assert ids(found["overtaken"]) <= ids(found["missing"])
    assert {names[one] for one in ids(found["missing"]) - ids(found["overtaken"])} == put_back
    for settings in (ARCHIVE | {"CE_SOURCE": "/outbox"}, ARCHIVE):
        shown = restored.command("recover", "--since", restored.since, "--dry-run", settings=settings).stdout
        # What is lost may be a neighbour's.
        assert ("OUTBOX_CE_SOURCE" in shown) == (settings == ARCHIVE)
    assert "later events of their keys are on Kafka; see `outbox replay`: 10 events" in shown
    assert {names[event_id] for event_id, _ in resent(restored)} == put_back


def test_what_was_published_before_the_archive_began_overtakes_nothing(restored):
    missing = new_id()
    restored.put("published", missing, ", lane, id, created_at, topic", f", 1, -1, now(), '{restored.topics[0]}'")
    restored.send(new_id(), seconds_ago=3 * 3600)
    restored.since = (dt.datetime.fromisoformat(restored.since) - dt.timedelta(hours=4)).isoformat()
    found = restored.recover("--dry-run", status=1)
    assert (len(found["lost"]) + len(found["unsure"]), ids(found["missing"]), found["overtaken"]) == (1, {missing}, [])


def test_what_is_elsewhere_on_kafka_is_not_lost(restored):
    """In the topic of a former route, under a former ce_source, or with the time of a relay whose clock was behind."""
    moved, foreign, late = (new_id() for _ in range(3))
    topic, former = restored.topics[0], restored.kafka.create_topic(restored.kafka.name("former"))
    for number, (event_id, place, headers, behind) in enumerate(
        ((moved, former, [], 0), (foreign, topic, [("ce_source", "/former")], 0), (late, topic, [], 3 * 60))
    ):
        archived = f", 1, {-9 + number}, now(), '{place}'"
        restored.put("published", event_id, ", lane, id, created_at, topic", archived)
        restored.send(event_id, topic=place, headers=headers, seconds_ago=behind)
    assert resent(restored) == []


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_what_a_relay_published_by_a_clock_hours_behind_is_settled(restored, delivery):
    """With a time that is earlier by the difference. What is printed and audited is what was settled."""
    restored.put("events", event_id := new_id())
    if delivery == "exactly-once":
        restored.run("UPDATE outbox.lanes SET last_batch = 1")
    restored.send(event_id, seconds_ago=3 * 3600)
    hours = dt.datetime.fromisoformat(restored.since) - dt.timedelta(hours=4)
    restored.since = hours.isoformat()
    assert restored.recover("--reason", "a clock")["settled"] == {"1": [event_id]}
    assert restored.left() == 0
    audited = "SELECT details -> 'event_ids_on_kafka' FROM outbox.audit WHERE what LIKE '%% settles'"
    assert restored.run(audited) == [([event_id],)]


def test_records_of_any_program_break_nothing(restored):
    """A NUL in a header, and a zone of 16 hours, which Postgres takes in none; and a time in microseconds."""
    # Of other tests on this broker, whose records have such times too.
    others = restored.recover("--dry-run")["records"]
    restored.put("events", event_id := new_id())
    topic = restored.kafka.create_topic(f"{restored.kafka.name('made-up')}-events", config=TOPIC)
    producer = Producer({"bootstrap.servers": restored.kafka.bootstrap_servers})
    for name, value in (("outbox-replay", "\0"), ("outbox-dead-letter", "a\0"), ("ce_source", "\0"), ("ce_time", "\0")):
        restored.send(event_id, headers=[(name, value)])
    restored.send(event_id, headers=[("ce_time", "2024-01-01T00:00:00+16:00")])
    restored.send(f"{event_id}\0")
    micros = int(time.time() * 1_000_000)
    producer.produce(topic, b"{}", headers=[("ce_id", new_id())], timestamp=micros)
    assert producer.flush(60) == 0
    found = restored.recover("--dry-run", status=1)
    assert (found["records"] - others, found["settled"], found["lost"]) == (7, {"1": [event_id]}, [])


def test_without_an_archive_what_was_published_about_the_point_is_unsure(restored):
    """One with a time of writing after the point is lost for sure; one long before it is not looked at."""
    unsure, sure, again = (new_id() for _ in range(3))
    restored.put("events", again)
    restored.send(unsure, again, headers=[("ce_time", "2020-01-01T00:00:00Z")])
    restored.send(sure, headers=[("ce_time", "2099-01-01T00:00:00Z")])
    found = restored.recover("--dry-run", status=1, archive=False)
    assert (ids(found["lost"]), ids(found["unsure"])) == ({sure}, {unsure})
    restored.recover("--reason", "restored", archive=False)
    found = restored.recover("--dry-run", status=1, archive=False)
    assert (ids(found["lost"]), ids(found["unsure"])) == ({sure}, {unsure})
    restored.since = "2098-01-01"
    assert restored.recover("--dry-run", archive=False)["lost"] == []


def test_a_dead_letter_that_is_a_copy_is_not_its_original(restored):
    """All have the id and the payload of an event that is on Kafka. Some copies are there too, by their own header."""
    originals = []
    for number, header in enumerate(("outbox-replay", "outbox-dead-letter")):
        original, published = new_id(), new_id()
        for row, event_id in enumerate((original, published)):
            restored.letter(event_id, 4711 + 2 * number + row, headers=f'{{"{header}": "2026-01-01T00:00:00Z"}}')
        restored.send(original, published)
        restored.send(published, headers=[(header, "2026-01-01T00:00:00Z")])
        originals.append((original,))
    restored.recover("--reason", "restored")
    assert restored.run("SELECT event_id::text FROM outbox.dead_letters ORDER BY id") == originals


def test_of_rows_with_one_event_id_only_those_on_kafka_go(restored):
    """An event was published, and a replay of it is a dead letter; two events have an id that their writer made."""
    replayed, twice, mark = new_id(), new_id(), "2026-01-01T00:00:00Z"
    for number, headers in enumerate(("{}", f'{{"outbox-replay": "{mark}"}}')):
        restored.letter(replayed, 4711 + number, headers=headers)
    restored.put("scheduled", twice, ", not_before", ", now() + interval '1 hour'")
    restored.run(
        "INSERT INTO outbox.scheduled (event_id, aggregate_type, aggregate_id, event_type, payload, not_before) "
        "VALUES (%s, %s, 'k', 'T', '{\"n\": 2}', now() + interval '1 hour')",
        twice,
        restored.kinds[0],
    )
    restored.send(replayed, twice)
    found = restored.recover("--reason", "restored")
    assert (found["dead_letters"], found["scheduled"]) == ([replayed], [twice])
    assert restored.run("SELECT headers ->> 'outbox-replay' FROM outbox.dead_letters") == [(mark,)]
    assert restored.run("SELECT (payload ->> 'n')::integer FROM outbox.scheduled") == [(2,)]
    found = restored.recover("--dry-run")
    assert (found["dead_letters"], found["scheduled"]) == ([], [])


def test_an_open_transaction_is_named_with_the_way_out(restored):
    """What is on Kafka is not decided before it ends: nothing is compared, and nothing is changed."""
    restored.program, restored.decide_seconds = IMPATIENT, 0.2
    restored.put("scheduled", later := new_id(), ", not_before", ", now() + interval '1 hour'")
    restored.send(later)
    hidden = {"key": restored.key, "headers": [("ce_id", new_id())]}
    producer = other_program(restored.kafka, restored.topics[0], 0, **hidden)
    for arguments in (("--dry-run",), ("--reason", "restored")):
        done = restored.command("recover", "--since", restored.since, *arguments, settings=ARCHIVE)
        assert done.returncode == 1, done.stdout + done.stderr
        named = f"'{restored.topics[0]}' partition 0"
        assert f"{named} waits, at offset " in done.stderr
        assert f"abort --topic {restored.topics[0]} --partition 0 --start-offset " in done.stderr
        assert "run this again" in done.stderr
        # What is hidden may be the only copy of an event.
        assert "--partition 0 --offset" in done.stderr
    assert restored.run("SELECT count(*) FROM outbox.scheduled") == [(1,)]
    assert restored.run("SELECT FROM outbox.audit") == []
    producer.abort_transaction(30)
    restored.kafka.await_transactions(restored.topics[0])
    assert restored.recover("--reason", "restored")["scheduled"] == [later]


def test_a_dead_letter_that_is_locked_is_left_and_named(restored):
    held, free = new_id(), new_id()
    for number, event_id in enumerate((held, free)):
        restored.letter(event_id, 4711 + number)
    restored.send(held, free)
    with psycopg.connect(restored.url) as other:
        other.execute("SELECT FROM outbox.dead_letters WHERE event_id = %s FOR UPDATE", (held,))
        assert restored.recover("--reason", "first", status=1)["locked"] == [held]
    assert restored.run("SELECT event_id::text FROM outbox.dead_letters") == [(held,)]
    assert restored.recover("--reason", "second")["locked"] == []
    assert restored.run("SELECT count(*) FROM outbox.dead_letters") == [(0,)]


def test_it_is_killed_and_run_again(restored):
    """Without markers: the lanes' leases end, and nothing is published again."""
    restored.add(0, restored.key, 5)
    restored.publish(restored.rows(1))
    restored.put("scheduled", later := new_id(), ", not_before", ", now() + interval '1 hour'")
    restored.send(later)
    restored.recover("--reason", "first", status=-signal.SIGKILL, failpoints="reconcile.settling=kill@2")
    restored.recover("--reason", "second")
    assert restored.left() == 0
    assert restored.run("SELECT count(*) FROM outbox.scheduled") == [(0,)]
    assert restored.recover("--dry-run")["lost"] == []
