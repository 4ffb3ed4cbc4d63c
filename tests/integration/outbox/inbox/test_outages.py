"""The inbox's consumer while servers fail, and where Kafka no longer has a stored position."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from inbox_log import _quick, keys, log, settings
from inbox_support import Log, apply
from proxy import TcpProxy
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from support import wait_until
from typer.testing import CliRunner

from outbox import SchemaError
from outbox.inbox import PositionLost, TopicReplaced, _member
from relay.cli.app import app

__all__ = ["_quick", "log"]


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


def losing(log: Log, lose: Callable[[], bool]) -> Callable[[], psycopg.Connection[Any]]:
    """Return a function that connects; the answers to those COMMITs are lost for which ``lose`` returns True."""

    class Losing(psycopg.Connection[Any]):
        @contextmanager
        def transaction(self, *arguments: Any, **options: Any) -> Iterator[Any]:
            with super().transaction(*arguments, **options) as block:
                yield block
            if lose():
                self.close()
                raise psycopg.OperationalError("the answer is lost")

    return lambda: Losing.connect(log.database.url, autocommit=True)


def test_lost_answers_to_commit(log):
    """Each second answer is lost, whatever was committed: the row shows what was applied."""
    commits = itertools.count(1)
    log.produce(keys(500))
    connect = losing(log, lambda: (number := next(commits)) > 1 and number % 2 == 1)
    with log.consuming(database=connect, batch=20, dedup=False) as running:
        running.wait(lambda: log.count() >= 500, "the effects")
        running.wait(lambda: log.positions()[0] == 500, "the position")
    assert next(commits) > 20
    log.check()


def test_the_lost_answer_to_the_commit_of_a_dead_letter(log, monkeypatch):
    """Later messages of its key wait behind it at once, not only when the member looks for letters of others."""
    monkeypatch.setattr(_member, "_UPKEEP_SECONDS", 3600.0)
    log.produce(["b"])
    lost: list[int] = []

    def lose() -> bool:
        if not lost and log.letters():
            lost.append(1)
            return True
        return False

    def handle(connection, message):
        if message.offset() == 1:
            raise ValueError("no")
        apply(connection, message)

    with log.consuming(handle, database=losing(log, lose), attempts=1, on_failure="dead-letter") as running:
        # The member has looked for letters once, and does not again.
        running.wait(lambda: log.positions().get(0) == 1, "the first message")
        log.produce(["a", "b", *["a"] * 60, "b"])
        running.wait(lambda: log.positions()[0] == 64, "the position")
    assert lost
    assert log.applied() == {"b": [0, 1, 2]}
    assert [letter["reason"] for letter in log.letters()] == ["failed", *["behind"] * 60]


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


def accept(log: Log) -> None:
    command = ["offsets", "reset", log.group, "--topic", log.topic, "--to", "loss", "--reason", "accounted for"]
    found = CliRunner().invoke(app, command, env=settings(log))
    assert found.exit_code == 0, found.output


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
    monkeypatch.setattr(_member, "_TOPIC_SECONDS", 0.1)
    log.produce(keys(20))
    with log.consuming(kafka={"topic.metadata.refresh.interval.ms": 200}) as running:
        running.wait(lambda: log.count() >= 20, "the effects")
        recreate(log)
        error = running.error()
    assert isinstance(error, TopicReplaced)
    assert log.positions() == {0: 20}


def recreate(log: Log) -> None:
    admin = AdminClient({"bootstrap.servers": log.servers})
    admin.delete_topics([log.topic], operation_timeout=30)[log.topic].result(30)

    def created() -> bool:
        future = admin.create_topics([NewTopic(log.topic, 1)], operation_timeout=30)[log.topic]
        return future.exception(30) is None

    wait_until(created, what="the topic")
