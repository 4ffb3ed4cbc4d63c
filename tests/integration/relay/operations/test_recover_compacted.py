"""``outbox recover`` and ``reconcile`` where compaction has deleted earlier events, beside a topic that keeps all.

Published again, an earlier event would be the last of its key, and compaction would delete the later one.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator, Mapping

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from kafka_proxy import DESCRIBE_CONFIGS, drop_request
from reconcile_support import Outbox, outbox
from recover_support import ARCHIVE, Restored, ids, new_id, restored
from support import ends, wait_until

from outbox.testing.fixtures import Topics

__all__ = ["outbox", "restored"]

COMPACT = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.0"}
ARCHIVED = ", lane, id, created_at"


@pytest.fixture
def compacted(restored) -> Restored:
    """Its first topic is compacted. ``send`` and ``put`` take the first kind."""
    restored.kinds[0] = restored.kafka.name("State")
    restored.topics[0] = restored.kafka.create_topic(f"{restored.kinds[0].lower()}-events", 1, COMPACT)
    return restored


@pytest.fixture
def quick_compaction(outbox_kafka) -> Iterator[None]:
    """The broker looks all the time for what it may compact, and not every 15 seconds."""
    admin = AdminClient({"bootstrap.servers": outbox_kafka.bootstrap_servers})
    brokers = admin.list_topics(timeout=30).brokers

    def change(value: str | None) -> None:
        kind = AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET
        for broker in brokers:
            entry = ConfigEntry("log.cleaner.backoff.ms", value, incremental_operation=kind)
            resource = ConfigResource(ConfigResource.Type.BROKER, str(broker), incremental_configs=[entry])
            admin.incremental_alter_configs([resource])[resource].result(30)

    change("100")
    yield
    change(None)


def states(restored: Restored, topic: str) -> dict[str, list[str]]:
    """Return the event ids of each key, in the topic's order."""
    found: dict[str, list[str]] = {}
    for one in restored.kafka.consume(topic):
        if (event_id := dict(one.headers() or ()).get("ce_id")) is not None:
            found.setdefault(one.key().decode(), []).append(event_id.decode())
    return found


def test_what_was_compacted_away_is_not_published_behind_later_events(compacted, quick_compaction, outbox_relay):
    keys = ("both", "lost", "due", "retried", "skipped", "archived")
    first, last = ({key: new_id() for key in keys} for _ in range(2))
    waiting, early, late, gone = (new_id() for _ in range(4))
    producer = Producer({"bootstrap.servers": compacted.kafka.bootstrap_servers})
    for ids_of in (first, last):
        for compacted.key in keys:
            compacted.send(ids_of[compacted.key])

    def done() -> bool:
        # A new record begins a new segment: the last one is never compacted.
        producer.produce(compacted.topics[0], b"{}", b"filler")
        assert producer.flush(60) == 0
        return states(compacted, compacted.topics[0]) == {key: [event_id] for key, event_id in last.items()}

    wait_until(done, 120, "compaction", longest=1.0)
    # What a restore puts back, from before all of it was published.
    past = "now() - interval '1 hour'"
    for compacted.key in ("both", "lost"):
        compacted.put("events", first[compacted.key], ", created_at", f", {past}")
    compacted.key = "both"
    compacted.put("events", last["both"])
    compacted.put("events", waiting)
    compacted.key = "due"
    compacted.put("scheduled", first["due"], ", not_before", f", {past}")
    for number, (key, blocks) in enumerate({"retried": True, "skipped": False}.items()):
        compacted.key = key
        compacted.letter(first[key], -20 + number, blocks=blocks, ago="1 hour")
        compacted.put("events", last[key])
    compacted.key = "archived"
    for number, event_id in enumerate((first["archived"], last["archived"])):
        compacted.put("published", event_id, ARCHIVED, f", 1, {-10 + number}, now()")
    # A state and its tombstone, which Kafka keeps for a day, and an event that nothing follows.
    compacted.key = "deleted"
    for number, (event_id, payload) in enumerate({new_id(): "'{}'", new_id(): "NULL"}.items()):
        compacted.run(
            "INSERT INTO outbox.published (event_id, aggregate_type, aggregate_id, event_type, payload, lane, id,"
            f" created_at, published_at) VALUES (%s, %s, 'deleted', 'T', {payload}, 1, {-5 + number}, {past},"
            " now() - interval '3 days')",
            *(event_id, compacted.kinds[0]),
        )
    compacted.key = "gone"
    compacted.put("published", gone, ARCHIVED, ", 1, -1, now()")
    # A neighbour that keeps all: what is not there was not published.
    compacted.kinds.reverse()
    compacted.topics.reverse()
    compacted.key = "both"
    for event_id in (early, late):
        compacted.put("events", event_id)
    compacted.send(late)
    found = compacted.recover("--dry-run", status=1)
    superseded = {first[key] for key in ("both", "lost", "due", "retried")}
    assert set(found["superseded"]) == superseded
    assert (ids(found["missing"]), found["expired"], found["overtaken"]) == ({gone}, 1, [])
    said = compacted.command("recover", "--since", compacted.since, "--dry-run", settings=ARCHIVE).stdout
    assert "4 of these are not on Kafka, and later events of their keys are" in said
    found = compacted.recover("--reason", "restored")
    assert (found["scheduled"], found["dead_letters"]) == ([first["due"]], [first["retried"]])
    assert {row[0] for row in compacted.run("SELECT event_id::text FROM outbox.events")} == {waiting, early}
    assert compacted.run("SELECT event_id::text FROM outbox.dead_letters") == [(first["skipped"],)]
    relay = outbox_relay(name=compacted.name)
    wait_until(lambda: compacted.left() == 0, 60, "the events to be published")
    ends(relay)
    expected: Mapping[str, list[str]] = {key: [event_id] for key, event_id in last.items()}
    assert states(compacted, compacted.topics[1]) == {**expected, "both": [last["both"], waiting]}
    assert states(compacted, compacted.topics[0]) == {"both": [late, early]}
    compacted.since = "2020-01-01"
    found = compacted.recover("--resend", "--reason", "again")
    assert (ids(found["missing"]), found["overtaken"], found["superseded"]) == ({gone}, [], [])
    assert compacted.run("SELECT event_id::text FROM outbox.events") == [(gone,)]


def test_a_lane_without_its_marker_settles_what_later_events_of_its_key_supersede(compacted):
    """Of the compacted topic only; of the other, nothing but what is on Kafka."""
    kept: set[str] = set()
    for kind in (0, 1):
        key = compacted.keys(kind)[1]
        compacted.add(kind, key, 3)
    rows = compacted.rows(1)
    for topic in compacted.topics:
        early, middle, late = (row for row in rows if row[2] == topic)
        compacted.publish([middle])
        kept |= {late[1]} if topic == compacted.topics[0] else {early[1], late[1]}
    compacted.run("UPDATE outbox.lanes SET last_batch = 7 WHERE lane = 1")
    state = json.loads(compacted.reconcile().stdout)["lanes"][1]
    assert (state["rows"], state["found"]) == (6, 3)
    [superseded] = state["superseded"]
    said = compacted.command("relay", "reconcile").stdout
    assert "2 of them are on Kafka already, and 1 are superseded" in said
    assert f"    {superseded}\n" in said
    done = compacted.reconcile("--apply", "--reason", "restored")
    assert done.returncode == 0, done.stderr
    assert {row[1] for row in compacted.rows(1)} == kept
    settled = {row[1] for row in rows} - kept
    assert superseded in settled
    assert json.loads(done.stdout)["repaired"][0]["superseded"] == [superseded]
    audited = "SELECT details -> 'event_ids_on_kafka', details -> 'superseded' FROM outbox.audit WHERE what LIKE"
    [(there, apart)] = compacted.run(audited + " '%% settles'")
    assert (set(there), apart) == (settled - {superseded}, [superseded])
    # Without an archive the audit alone shows that neither is lost, if a record of either id is there after all.
    compacted.send(superseded)
    found = compacted.recover("--dry-run", archive=False)
    assert (found["lost"], found["unsure"]) == ([], [])


def test_nothing_is_settled_as_superseded_while_kafka_does_not_say_what_it_compacts(outbox_postgres, mortal_network):
    """Of a topic that keeps all, and of one that does not exist."""
    outbox = Outbox(outbox_postgres, Topics(f"127.0.0.1:{mortal_network[1].port}"), 2)
    outbox.add(0, outbox.keys(0)[1], 2)
    first, last = outbox.rows(1)
    outbox.publish([last])
    outbox.kinds.append(outbox.kafka.name("Nowhere"))
    outbox.add(2, outbox.keys(2)[1], 1)
    rows = outbox.rows(1)
    outbox.run("UPDATE outbox.lanes SET last_batch = 7 WHERE lane = 1")
    # The first request is about the state topic.
    mortal_network[1].on(DESCRIBE_CONFIGS, drop_request, times=100, skip=1)
    done = outbox.reconcile("--apply", "--reason", "restored")
    assert done.returncode == 1, done.stdout
    assert "reading cleanup.policy" in done.stderr
    assert outbox.rows(1) == rows
    mortal_network[1].clear()
    done = outbox.reconcile("--apply", "--reason", "restored")
    assert done.returncode == 0, done.stderr
    assert outbox.rows(1) == [first, rows[2]]


def test_nothing_counts_as_lost_while_kafka_does_not_say_what_it_compacts(outbox_postgres, mortal_network):
    network, proxy = Topics(f"127.0.0.1:{mortal_network[1].port}"), mortal_network[1]
    restored = Restored(Outbox(outbox_postgres, network, 2))
    gone = new_id()
    restored.put("published", gone, ARCHIVED, ", 1, -1, now()")
    before = proxy.seen(DESCRIBE_CONFIGS)
    assert ids(restored.recover("--dry-run", status=1)["missing"]) == {gone}
    # The last of these requests is about the topic of what is not there.
    proxy.on(DESCRIBE_CONFIGS, drop_request, times=100, skip=proxy.seen(DESCRIBE_CONFIGS) - before - 1)
    done = restored.command("recover", "--since", restored.since, "--dry-run", settings=ARCHIVE)
    assert (done.returncode, "reading cleanup.policy" in done.stderr) == (1, True), done.stdout + done.stderr


@pytest.mark.parametrize("archived", [False, True], ids=["empty", "begun since"])
def test_what_was_settled_before_the_archive_began_supersedes_nothing(compacted, archived):
    """It was published and settled just before the point, and a later event of its key waited at the point."""
    point = dt.datetime.fromisoformat(compacted.since) - dt.timedelta(hours=1)
    compacted.since = point.isoformat()
    compacted.put("events", waiting := new_id(), ", created_at", ", now() - interval '3610 seconds'")
    compacted.send(settled := new_id(), seconds_ago=3640)
    if archived:
        compacted.key = "another"
        compacted.put("published", known := new_id(), ARCHIVED, ", 1, -1, now()")
        compacted.send(known)
    found = compacted.recover("--reason", "restored")
    assert (ids(found["lost"]), ids(found["unsure"]), found["superseded"]) == (set(), {settled}, [])
    assert compacted.run("SELECT event_id::text FROM outbox.events") == [(waiting,)]


def test_a_record_of_another_outbox_supersedes_nothing(compacted):
    past = "now() - interval '1 hour'"
    compacted.put("scheduled", planned := new_id(), ", not_before", f", {past}")
    compacted.letter(blocking := new_id(), -20, blocks=True, ago="1 hour")
    compacted.send(new_id(), headers=[("ce_source", "another")])
    found = compacted.recover("--reason", "restored")
    assert (found["scheduled"], found["dead_letters"], found["superseded"]) == ([], [], [])
    assert compacted.run("SELECT event_id::text FROM outbox.scheduled") == [(planned,)]
    assert compacted.run("SELECT event_id::text FROM outbox.dead_letters") == [(blocking,)]
    compacted.send(new_id())
    assert set(compacted.recover("--dry-run", status=1)["superseded"]) == {planned, blocking}
