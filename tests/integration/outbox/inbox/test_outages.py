"""The inbox's consumer while servers fail, and where Kafka no longer has a stored position."""

from __future__ import annotations

import itertools
import re
import threading
from typing import Any

import psycopg
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from inbox_log import _quick, accept, keys, log, losing, recreate, short_pauses
from inbox_support import Log, apply
from kafka_proxy import FETCH, corrupted, edit_response
from proxy import TcpProxy
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from support import wait_until

from outbox import SchemaError
from outbox.consumer import topic_ids
from outbox.inbox import KafkaFailed, PositionLost, Reject, TopicReplaced, _member
from outbox.testing.fixtures import Topics

__all__ = ["_quick", "log", "short_pauses"]


def test_postgres_away_is_waited_for(log):
    """In the middle of a backlog, and of a handler: no attempt is counted, and nothing is lost or repeated."""
    given = conninfo_to_dict(log.database.url)
    log.produce(keys(300))
    with TcpProxy("127.0.0.1", int(given["port"])) as proxy:
        address = make_conninfo(log.database.url, host="127.0.0.1", port=proxy.port)
        away, refused = threading.Event(), threading.Event()

        def connect():
            try:
                return psycopg.connect(address, autocommit=True)
            except psycopg.OperationalError:
                refused.set()
                raise

        def handle(connection, message):
            apply(connection, message)
            if message.offset() == 155 and not away.is_set():
                away.set()
                proxy.stop()

        with log.consuming(handle, database=connect, attempts=1, batch=50, dedup=False) as running:
            running.wait(refused.is_set, "a refused connection")
            assert log.count() == 150
            proxy.start()
            running.wait(lambda: log.count() >= 300, "the effects")
    log.check()


def test_a_corrupt_batch_is_neither_skipped_nor_handed_out(outbox_postgres, mortal_network):
    """librdkafka compares no checksums by default, and with them it reads on behind a wrong one."""
    cluster, proxy = mortal_network
    with Topics(cluster.bootstrap_servers) as topics:
        log = Log(outbox_postgres, topics)
        log.produce(keys(3000))
        proxy.on(FETCH, edit_response(corrupted), times=1_000_000)
        with log.consuming(kafka={"bootstrap.servers": proxy.address}) as running:
            error = running.error()
        assert isinstance(error, KafkaFailed)
        assert re.search(rf"{log.topic}-0: .*CRC.*Nothing was skipped", str(error))
        proxy.clear()
        with log.consuming() as running:
            running.wait(lambda: log.count() >= 3000, "the effects")
        log.check()


@pytest.mark.usefixtures("short_pauses")
def test_lost_answers_to_commit(log):
    """Each third answer is lost, whatever was committed: the row shows what was applied. A claim commits twice."""
    commits = itertools.count()
    log.produce(keys(500))
    with log.consuming(database=losing(log, lambda: next(commits) % 3 == 2), batch=20, dedup=False) as running:
        running.wait(lambda: log.count() >= 500, "the effects")
        running.wait(lambda: log.positions()[0] == 500, "the position")
    assert next(commits) > 20
    log.check()


def test_a_dead_letter_whose_commit_has_lost_its_answer_holds_back_its_key(log, monkeypatch):
    """At once, and not only when the upkeep has found it."""
    monkeypatch.setattr(_member, "_UPKEEP_SECONDS", 600.0)
    lost = threading.Event()

    def lose() -> bool:
        found = not lost.is_set() and bool(log.letters())
        if found:
            lost.set()
        return found

    def handle(connection, message):
        apply(connection, message)
        if (message.key(), message.value()) == (b"k1", b'{"n": 2}'):
            raise Reject("no such order")

    log.produce(keys(60))
    with log.consuming(handle, database=losing(log, lose), on_failure="dead-letter", batch=20) as running:
        running.wait(lambda: log.positions().get(0) == 60, "the position")
    assert lost.is_set()
    assert [letter["message_offset"] for letter in log.letters()] == [21, 31, 41, 51]
    assert log.applied() == log.written | {"k1": [0, 1]}


def test_a_handler_that_waits_too_long_loses_its_transaction(log):
    log.produce(keys(3))
    released = threading.Event()

    def handle(connection, message):
        apply(connection, message)
        if not released.is_set():
            pid = connection.info.backend_pid
            gone = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
            wait_until(lambda: log.run(gone, pid) == [(0,)], what="Postgres to end the session")
            released.set()

    with log.consuming(handle, idle_seconds=0.2) as running:
        running.wait(lambda: log.count() >= 3, "the effects")
    log.check()


def test_missing_tables_are_said_at_once(outbox_postgres, outbox_kafka):
    log = Log(outbox_postgres, outbox_kafka)
    log.produce(keys(1))
    with log.consuming(schema="nowhere") as running:
        error = running.error()
    assert isinstance(error, SchemaError)
    assert "outbox db upgrade --consumer" in str(error)


def delete_before(log: Log, offset: int) -> None:
    admin = AdminClient({"bootstrap.servers": log.servers})
    [future] = admin.delete_records([TopicPartition(log.topic, 0, offset)]).values()
    future.result(30)


def losses(log: Log) -> list[Any]:
    query = "SELECT kind, first_offset, end_offset FROM consumer.losses WHERE grp = %s AND accepted_at IS NULL"
    return log.run(query, log.group)


def test_messages_that_retention_has_removed_are_an_error_and_no_jump(log):
    log.produce(keys(20))
    with log.consuming() as running:
        running.wait(lambda: log.count() >= 20, "the effects")
    log.produce(keys(20))
    delete_before(log, 30)
    # However often it is started.
    for _ in range(2):
        with log.consuming() as running:
            error = running.error()
        assert isinstance(error, PositionLost)
        assert (error.topic, error.partition, error.position) == (log.topic, 0, 20)
        assert "retention removed messages 20 to 29" in str(error)
        assert losses(log) == [("retention", 20, 30)]
    assert log.count() == 20
    accept(log)
    with log.consuming() as running:
        running.wait(lambda: log.count() >= 30, "the rest")
    assert losses(log) == []


def test_messages_that_go_while_it_reads(log):
    """The consumer is held up by a message, and has fetched only the first of those that come and go meanwhile."""
    log.produce(keys(10))
    held, go_on = threading.Event(), threading.Event()

    def handle(connection, message):
        apply(connection, message)
        if message.offset() == 5:
            held.set()
            assert go_on.wait(60)

    with log.consuming(handle, kafka={"queued.min.messages": 1, "fetch.message.max.bytes": 1000}) as running:
        running.wait(held.is_set, "the message")
        for _ in range(10):
            log.produce(keys(50))
        delete_before(log, 505)
        go_on.set()
        error = running.error()
    assert isinstance(error, PositionLost)
    [(kind, first, after)] = losses(log)
    assert (kind, after) == ("retention", 505)
    # What it had fetched is applied, and the loss begins behind it.
    assert log.run("SELECT count(*), max(at) + 1 FROM effects") == [(first, first)] == [(error.position,) * 2]
    assert first < 500


def test_a_topic_that_was_created_again(log):
    log.produce(keys(20))
    with log.consuming() as running:
        running.wait(lambda: log.count() >= 20, "the effects")
    recreate(log)
    log.produce(keys(40))
    with log.consuming() as running:
        error = running.error()
    assert isinstance(error, TopicReplaced)
    assert losses(log) == [("recreated", 20, None)]
    assert log.count() == 20
    accept(log)
    with log.consuming() as running:
        running.wait(lambda: log.count() >= 60, "the new topic")


def test_a_topic_that_is_created_again_while_it_runs(log, monkeypatch):
    monkeypatch.setattr(topic_ids, "_SECONDS", 0.1)
    log.produce(keys(20))
    with log.consuming(kafka={"topic.metadata.refresh.interval.ms": 200}) as running:
        running.wait(lambda: log.count() >= 20, "the effects")
        recreate(log)
        error = running.error()
    assert isinstance(error, TopicReplaced)
    assert log.positions() == {0: 20}
