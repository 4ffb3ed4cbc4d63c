"""A task that reads a range itself, while records are corrupt, connections are cut and Kafka stays away."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from consumer_group import ConsumerGroup
from kafka_proxy import FETCH, KafkaProxy, corrupted, delay_response, edit_response
from range_support import MESSAGES, PART, offsets, opened_at, send, span, task_decoder

from outbox.sandbox.kafka import KafkaCluster
from outbox.testing.fixtures import Topics
from spark_jobs.task import partition as task
from spark_jobs.task import reader
from spark_jobs.task.reader import RangeReader

TOPIC = "between"
ABORTED = 20
"""Messages that were aborted: with each answer a quarter of a second late, longer than the patience."""


@pytest.fixture
def between(mortal_network) -> tuple[KafkaCluster, KafkaProxy, str]:
    """A broker behind a proxy, and a topic with 25,000 messages of 1 kB, which these tests share."""
    cluster, proxy = mortal_network
    if TOPIC not in AdminClient({"bootstrap.servers": cluster.bootstrap_servers}).list_topics(timeout=30).topics:
        Topics(cluster.bootstrap_servers).create_topic(TOPIC)
        # One event, as JSON, with a number.
        send(cluster.bootstrap_servers, TOPIC, [b'{"n":%d,"pad":"%s"}' % (n, b"x" * 1000) for n in range(MESSAGES)])
    return cluster, proxy, TOPIC


@pytest.fixture
def sink(outbox_postgres) -> ConsumerGroup:
    group = ConsumerGroup(outbox_postgres.url)
    group.begin([PART])
    group.run("CREATE TABLE seen (n int, at bigint)")
    return group


def apply(group: ConsumerGroup, made: RangeReader, topic: str) -> dict[str, Any]:
    """Let a task apply the whole topic, and return its report. The group's own name of the topic is ``t``."""
    decoder = task_decoder()
    effect = "INSERT INTO seen SELECT n, message_offset FROM batch ORDER BY message_offset"
    plan = group.plan(PART, 0, MESSAGES, decoder.columns, effect, decoder=decoder)
    parts = made.range((topic, PART), span(0, MESSAGES))
    return asdict(task.apply_range(plan, ("t", PART), parts))


def nothing_applied(group: ConsumerGroup) -> bool:
    return group.run("SELECT next_offset FROM consumer.offsets") == [(0,)] and group.run("SELECT FROM seen") == []


def all_applied(group: ConsumerGroup) -> bool:
    seen = group.run("SELECT count(*), count(DISTINCT n), count(*) FILTER (WHERE n <> at) FROM seen")
    return bool(
        seen == [(MESSAGES, MESSAGES, 0)] and group.run("SELECT next_offset FROM consumer.offsets") == [(MESSAGES,)]
    )


def test_a_corrupt_record_in_the_middle_is_not_passed_over(between, sink):
    """librdkafka says that a checksum is wrong, and reads on behind it."""
    _, proxy, topic = between
    proxy.on(FETCH, edit_response(corrupted), times=1, skip=4)
    with opened_at(proxy.address) as made:
        report = apply(sink, made, topic)
        assert report["outcome"] == "corrupt"
        assert "CRC" in report["detail"]
        proxy.clear()
        assert made.broken
    assert nothing_applied(sink)
    with opened_at(proxy.address) as made:
        assert apply(sink, made, topic)["outcome"] == "applied"
    assert all_applied(sink)


def test_a_cut_in_the_middle_costs_nothing(between, sink):
    _, proxy, topic = between
    before = proxy.seen(FETCH)
    with opened_at(proxy.address) as made:
        cuts = iter(range(3))
        real = made._consumer.consume

        class Cutting:
            def __getattr__(self, name: str) -> Any:
                return getattr(consumer, name)

            def consume(self, *arguments: Any) -> Any:
                found = real(*arguments)
                if found and next(cuts, None) is not None:
                    proxy.cut()
                return found

        consumer = made._consumer
        made._consumer = Cutting()  # type: ignore[assignment]
        assert apply(sink, made, topic)["outcome"] == "applied"
        assert next(cuts, None) is None
        assert proxy.seen(FETCH) > before + 3
    assert all_applied(sink)


def test_kafka_that_stays_away_in_the_middle(between, sink):
    _, proxy, topic = between
    proxy.on(FETCH, delay_response(None), times=100, skip=4)
    with opened_at(proxy.address, patience_seconds=2.0) as made:
        report = apply(sink, made, topic)
        assert report["outcome"] == "unavailable"
        assert re.search(r"between-0 from offset \d+ came for \d+ s", report["detail"])
        proxy.clear()
        proxy.release()
    assert nothing_applied(sink)


def test_the_brokers_end_in_the_middle(between):
    """Killed and started again while a range of 25,000 is read: each message still comes once."""
    cluster, _, topic = between
    with opened_at(cluster.bootstrap_servers) as made:
        found: list[int] = []
        killed = False
        for part in (parts := made.range((topic, PART), span(0, MESSAGES))):
            found += part.offsets
            if not killed:
                cluster.kill()
                cluster.start()
                killed = True
        parts.require_whole()
        assert found == list(range(MESSAGES))


def test_a_task_moves_the_group_behind_what_was_aborted(between, sink, aborted):
    """In front of a long stretch without messages: the next range begins behind it. Another try finds it applied."""
    with opened_at(between[0].bootstrap_servers) as made:
        decoder = task_decoder()
        plan = sink.plan(
            PART, 0, 5, decoder.columns, "INSERT INTO seen SELECT n, message_offset FROM batch", decoder=decoder
        )
        outcomes = [
            task.apply_range(plan, ("t", PART), made.range((aborted, PART), span(0, 5))).outcome for _ in range(2)
        ]
    assert outcomes == ["applied", "already"]
    ((offset, log_end),) = sink.run("SELECT next_offset, log_end FROM consumer.offsets")
    # The marker may be written behind the message: the coordinator answers before.
    assert offset == log_end
    assert offset in {ABORTED, ABORTED + 1}
    assert sink.run("SELECT FROM seen") == []


@pytest.fixture
def aborted(between) -> Iterator[str]:
    """A topic with large messages that were aborted, the marker of that, and one message."""
    cluster, _, _ = between
    with Topics(cluster.bootstrap_servers) as topics:
        topic = topics.create_topic(topics.name("aborted"))
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "transactional.id": topic})
        producer.init_transactions(30)
        producer.begin_transaction()
        for _ in range(ABORTED):
            producer.produce(topic, os.urandom(900_000), partition=PART)
            assert producer.flush(60) == 0
        producer.abort_transaction(30)
        send(cluster.bootstrap_servers, topic, [b"1"])
        yield topic


def test_a_long_stretch_that_was_aborted_is_waited_for(between, aborted, monkeypatch):
    """The client hands nothing on for longer than anybody waits; that it gets on is seen by its statistics."""
    _, proxy, _ = between
    # A record with each answer, and each answer late.
    settings_ = {"fetch.max.bytes": 1_000_000, "message.max.bytes": 1_000_000, "statistics.interval.ms": 50}
    monkeypatch.setattr(reader, "_SETTINGS", {**reader._SETTINGS, **settings_})
    proxy.on(FETCH, delay_response(0.25), times=10_000)
    try:
        with opened_at(proxy.address, patience_seconds=3.0) as made:
            began = time.monotonic()
            # The marker may be written behind the message: the coordinator answers before.
            (offset,) = offsets(made.range((aborted, PART), span(0, ABORTED + 2)))
            assert offset in {ABORTED, ABORTED + 1}
            assert time.monotonic() - began > 3.0
    finally:
        proxy.clear()


def test_a_reader_that_ends_early_commits_nothing(between, sink, monkeypatch):
    """The loop is wrong, and the proof is asked for all the same."""
    _, proxy, topic = between
    real = RangeReader._read

    def early(self: RangeReader, spans: Any) -> Iterator[Any]:
        for number, part in enumerate(real(self, spans)):
            yield part
            if number == 3:
                return

    monkeypatch.setattr(RangeReader, "_read", early)
    with opened_at(proxy.address) as made:
        report = apply(sink, made, topic)
        assert report["outcome"] == "cut"
        assert f"the range ends at {MESSAGES}; nothing was committed" in report["detail"]
    assert nothing_applied(sink)


def test_messages_that_come_twice_are_not_applied_twice(between, sink, monkeypatch):
    _, proxy, topic = between
    take = reader._RangeProgress.take
    monkeypatch.setattr(reader._RangeProgress, "take", lambda self, messages: take(self, [*messages, *messages[-1:]]))
    with opened_at(proxy.address) as made:
        report = apply(sink, made, topic)
        assert report["outcome"] == "cut"
        assert "or a later one was to come" in report["detail"]
    assert nothing_applied(sink)
