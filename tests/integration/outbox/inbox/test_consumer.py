"""The inbox's consumer on real servers: what it applies, what stops it, and what becomes of messages that fail."""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from inbox_log import _quick, end, keys, log
from inbox_support import Log, apply
from prometheus_client import CollectorRegistry
from support import wait_until
from uuid_utils.compat import uuid7

from outbox import ConfigurationError, Event, Outbox
from outbox.consumer.groups import GroupRows
from outbox.consumer.progress import progress
from outbox.inbox import Consumer, Reject, _member

__all__ = ["_quick", "log"]


@pytest.mark.parametrize("batch", [7, 1000])
def test_each_message_is_applied_once_and_the_position_moves_with_it(log, batch):
    log.produce(keys(50))
    with log.consuming(batch=batch) as running:
        running.wait(lambda: log.count() >= 50, "the effects")
    log.check()
    log.produce(keys(30))
    with log.consuming(batch=batch) as running:
        running.wait(lambda: log.count() >= 80, "the effects")
    log.check()
    with psycopg.connect(log.database.url) as connection:
        (row,) = progress(connection, "consumer", log.group)
    assert (row["next_offset"], row["log_end"], row["applied"], row["duplicates"], row["dead"]) == (80, 80, 80, 0, 0)
    assert row["owner"].startswith("inbox ")
    [(strategy, ended)] = log.run(
        "SELECT strategy, ended_at >= taken_at FROM consumer.groups WHERE grp = %s", log.group
    )
    assert (strategy, ended) == ("Dedup", True)


def test_kafkas_tools_see_the_position_and_it_decides_nothing(log):
    log.produce(keys(20))
    with log.consuming() as running:
        running.wait(lambda: log.count() >= 20, "the effects")
    reader = KafkaConsumer({"bootstrap.servers": log.servers, "group.id": log.group})
    place = TopicPartition(log.topic, 0)
    wait_until(lambda: reader.committed([place], 30)[0].offset == 20, what="the position in Kafka")
    reader.commit(offsets=[TopicPartition(log.topic, 0, 3)], asynchronous=False)
    reader.close()
    log.produce(keys(5))
    with log.consuming() as running:
        running.wait(lambda: log.count() >= 25, "the effects")
    log.check()


def test_without_ids_only_the_positions_count(log):
    id_ = uuid7()
    log.produce(keys(30), ids=[None, *[id_] * 29])
    with log.consuming(dedup=False) as running:
        running.wait(lambda: log.count() >= 30, "the effects")
    log.check()
    assert log.run("SELECT applied, duplicates FROM consumer.offsets") == [(30, 0)]
    assert log.run("SELECT count(*) FROM consumer.processed_messages") == [(0,)]


def test_a_position_passes_transactions_markers(log):
    for _ in range(3):
        log.produce(keys(10), transactional=True)
    with log.consuming() as running:
        running.wait(lambda: log.count() >= 30, "the effects")
        running.wait(lambda: log.positions()[0] == 33, "the position behind the last marker")
    log.check()
    assert end(log) == 33


def test_events_that_a_handler_writes_are_committed_with_the_position(log):
    log.produce(keys(10))

    def handle(connection, message):
        apply(connection, message)
        Outbox().add(connection, Event("Invoice", message.key().decode(), "InvoiceSent", {"at": message.offset()}))

    with log.consuming(handle) as running:
        running.wait(lambda: log.count() >= 10, "the effects")
    events = log.run("SELECT (payload->>'at')::integer FROM outbox.events ORDER BY id")
    assert events == [(number,) for number in range(10)]


def test_where_a_new_group_begins(log):
    log.produce(keys(10))
    with log.consuming(start="latest") as running:
        running.wait(log.positions, "the claim")
        log.produce(keys(10))
        running.wait(lambda: log.count() >= 10, "the effects")
    assert log.run("SELECT min(at), max(at) FROM effects") == [(10, 19)]
    # It is new only once.
    log.produce(keys(10))
    with log.consuming(start="latest") as running:
        running.wait(lambda: log.count() >= 20, "the effects")
    assert log.run("SELECT min(at), max(at) FROM effects") == [(10, 29)]


def read_again(log: Log) -> None:
    """Move the offsets of a group back, as an operator does."""
    found = log.command("offsets", "reset", log.group, "--topic", log.topic, "--to", "earliest", "--reason", "again")
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize("delivery", ["exactly-once", "at-most-once"])
def test_an_operator_sets_the_offsets_of_a_consumer_that_runs(log, delivery):
    """It reads on from there, also if nothing new comes."""
    log.produce(keys(20))
    with log.consuming(delivery=delivery, dedup=False, kafka={"heartbeat.interval.ms": 100}) as running:
        running.wait(lambda: log.count() >= 20, "the effects")
        read_again(log)
        running.wait(lambda: log.count() >= 40, "the effects")
    assert log.run("SELECT count(*), count(DISTINCT at) FROM effects") == [(40, 20)]


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_a_partition_that_was_out_of_range_is_read_on_from_where_an_operator_says(
    outbox_postgres, outbox_kafka, monkeypatch, strategy
):
    """Retention passes the position just after it was claimed."""
    log = Log(outbox_postgres, outbox_kafka, 2)
    for partition in range(2):
        log.produce(keys(30), partition=partition)
    check, checked = _member.Member._check_positions, threading.Event()

    def pass_by(member, positions):
        check(member, positions)
        if not checked.is_set():
            checked.set()
            admin = AdminClient({"bootstrap.servers": log.servers})
            [future] = admin.delete_records([TopicPartition(log.topic, 0, 20)]).values()
            future.result(60)
            read_again(log)

    monkeypatch.setattr(_member.Member, "_check_positions", pass_by)
    kafka = {"heartbeat.interval.ms": 100, "partition.assignment.strategy": strategy}
    # Who is thought dead claims anew.
    kafka |= {"session.timeout.ms": 30_000}
    with log.consuming(dedup=False, kafka=kafka) as running:
        running.wait(lambda: log.positions() == {0: 30, 1: 30}, "the positions")
        [claims] = log.run("SELECT generation FROM consumer.groups")
        log.produce(["k"] * 5, partition=0)
        log.produce(["k"] * 5, partition=1)
        running.wait(lambda: log.positions() == {0: 35, 1: 35}, "the positions")
    assert log.run("SELECT part, min(at), count(*) FROM effects GROUP BY part ORDER BY part") == [
        (0, 20, 15),
        (1, 0, 35),
    ]
    assert log.run("SELECT generation FROM consumer.groups") == [claims]


def test_a_new_topic_is_added_at_once(log):
    """A partition that another member claims later is no added one, which would begin at 0."""
    group = GroupRows("consumer", log.group, "one")
    starts = {(log.topic, 0): ("id", 5), (log.topic, 1): ("id", 7)}
    with log.database.connect() as connection:
        for place, begin in (((log.topic, 0), 5), ((log.topic, 1), 7)):
            with connection.transaction():
                [claimed] = group.claim(connection, [place], starts).values()
            assert claimed.next_offset == begin
        starts[log.topic, 2] = ("id", 9)
        with connection.transaction():
            [added] = group.claim(connection, [(log.topic, 2)], starts).values()
        assert added.next_offset == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"batch": 0}, "batch must be 1 or more"),
        ({"attempts": 0}, "attempts must be 1 or more"),
        ({"most_dead": 0}, "most_dead must be"),
        ({"on_failure": "skip"}, "on_failure must be"),
        ({"start": "now"}, "start must be"),
        ({"wait": (2.0, 1.0)}, "wait must be"),
        ({"idle_seconds": 0}, "idle_seconds must be"),
        ({"idle_seconds": float("inf")}, "idle_seconds must be"),
        ({"idle_seconds": float("nan")}, "idle_seconds must be"),
        ({"idle_seconds": 1e7}, "idle_seconds must be"),
        ({"group": ""}, "can't be a name"),
        ({"key": "idempotency-key", "dedup": False}, "^key: "),
        ({"delivery": "at-least-once"}, "delivery must be"),
        ({"delivery": "at-most-once", "on_failure": "dead-letter"}, "never tried again"),
        ({"topics": "orders"}, "topics: 'orders' must be a list"),
        ({"topics": []}, "must be a list of at least one"),
        ({"kafka": {"enable.auto.commit": True}}, r"enable\.auto\.commit=True: the inbox needs False"),
        ({"kafka": {"auto.offset.reset": "latest"}}, "the inbox needs error"),
        ({"kafka": {"isolation.level": "read_uncommitted"}}, "the inbox needs read_committed"),
        ({"kafka": {"group.id": "other"}}, "the inbox needs billing"),
        ({"kafka": {"enable.ssl.certificate.verification": False}}, "would turn off the verification"),
        ({"kafka": {"ssl.endpoint.identification.algorithm": "none"}}, "would turn off the verification"),
    ],
)
def test_what_is_refused(options, problem):
    given: dict[str, Any] = {"topics": ["orders"], "group": "billing", "kafka": {}, **options}
    with pytest.raises(ConfigurationError, match=problem):
        Consumer("postgresql://", given.pop("topics"), **given)


def test_the_delays_of_what_is_applied_can_be_scraped(log):
    """By the database's clock, to the commit; repeats and dead letters have no effect, and no delay."""
    [(now,)] = log.run("SELECT extract(epoch FROM clock_timestamp())::float8")
    day = 86_400.0
    first = log.produce(keys(3, 1), written_at=now - day)
    log.produce(keys(2, 1), written_at=now)
    log.produce(keys(3, 1), written_at=now - 9 * day, ids=first)
    log.produce(["bad"], written_at=now - 9 * day)
    log.produce(["good"])

    def handle(connection, message):
        if message.key() == b"bad":
            raise Reject
        apply(connection, message)

    registry, begun = CollectorRegistry(), time.monotonic()
    with log.consuming(handle, on_failure="dead-letter") as running:
        registry.register(running.consumer)
        running.wait(lambda: log.positions().get(0) == 10, "the position behind all of them")

    def value(end: str, **labels: str) -> float | None:
        labels |= {"group": log.group, "topic": log.topic}
        return registry.get_sample_value(f"outbox_consumer_apply_delay_seconds_{end}", labels)

    assert value("count") == 5
    assert value("bucket", le="3600.0") == 2
    total = value("sum")
    assert total is not None
    assert 0 < total - 3 * day < 5 * (time.monotonic() - begun + 60)


def test_events_with_one_idempotency_key_are_applied_once(log):
    log.produce(["k"] * 3, headers={"idempotency-key": "request 1"})
    log.produce(["k"], headers={"idempotency-key": "request 2"})
    log.produce(["k"])
    with log.consuming(key="idempotency-key") as running:
        running.wait(lambda: log.positions() == {0: 5}, "the position")
    assert log.applied() == {"k": [0, 3, 4]}
