"""The inbox's consumer on real servers: what it applies, what stops it, and what becomes of messages that fail."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from inbox_support import Log, apply
from proxy import TcpProxy
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from support import wait_until
from typer.testing import CliRunner
from uuid_utils.compat import uuid7

from outbox import ConfigurationError, Event, Outbox, SchemaError
from outbox.consumer.admin.dead_letters import DeadLetters, Selection
from outbox.consumer.groups import GroupStore
from outbox.consumer.progress import progress
from outbox.inbox import Consumer, HandlerFailed, PositionLost, Reject, TopicReplaced, _member, once
from relay.cli.app import app


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(_member, "_UPKEEP_SECONDS", 0.1)


@pytest.fixture
def log(outbox_postgres, outbox_kafka) -> Log:
    return Log(outbox_postgres, outbox_kafka)


def keys(count: int, different: int = 10) -> list[str]:
    return [f"k{number % different}" for number in range(count)]


def end(log: Log, partition: int = 0) -> int:
    """Where a read_committed reader ends."""
    reader = KafkaConsumer({"bootstrap.servers": log.servers, "group.id": "look", "isolation.level": "read_committed"})
    try:
        return reader.get_watermark_offsets(TopicPartition(log.topic, partition), 30)[1]
    finally:
        reader.close()


def settings(log: Log) -> dict[str, str]:
    """What the commands take."""
    return {"OUTBOX_DATABASE_URL": log.database.url, "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": log.servers}


# --- What is applied --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7, 1000])
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


def test_a_repeat_has_no_effect_wherever_it_is(outbox_postgres, outbox_kafka):
    log = Log(outbox_postgres, outbox_kafka, 2)
    ids = log.produce(keys(40, 1), partition=0)
    written = {key: list(numbers) for key, numbers in log.written.items()}
    log.produce(["other"] * 10, ids=ids[:10], partition=1)
    log.produce(["other"] * 5, ids=ids[-5:], partition=0)
    with log.consuming(batch=16) as running:
        running.wait(lambda: sum(log.positions().values()) >= 55, "all positions")
        # With the same name, ``once`` knows what the consumer has applied.
        with outbox_postgres.connect() as connection:
            assert not once(connection, {"ce_id": str(ids[3])}, consumer=log.group)
    applied = log.applied()
    # Which of the two partitions had an id first is a matter of chance.
    assert sorted(applied["k0"] + applied["other"]) == sorted(written["k0"])
    assert log.run("SELECT sum(applied), sum(duplicates) FROM consumer.offsets") == [(40, 15)]


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


def test_an_operator_sets_the_offsets_of_a_consumer_that_runs(log):
    log.produce(keys(20))
    with log.consuming(dedup=False, kafka={"heartbeat.interval.ms": 100}) as running:
        running.wait(lambda: log.count() >= 20, "the effects")
        command = ["offsets", "reset", log.group, "--topic", log.topic, "--to", "earliest", "--reason", "again"]
        found = CliRunner().invoke(app, command, env=settings(log))
        assert found.exit_code == 0, found.output
        log.produce(keys(5))
        running.wait(lambda: log.count() >= 45, "the effects")
    assert log.run("SELECT count(*), count(DISTINCT at) FROM effects") == [(45, 25)]


# --- Messages that fail -----------------------------------------------------------------------------------------------


class Poison:
    """A handler that fails at some numbers of a key, until it is cured."""

    def __init__(self, *numbers: int, key: bytes = b"k1") -> None:
        self.numbers, self.key = set(numbers), key
        self.calls: list[tuple[int, int]] = []
        self.how = self.fail

    def __call__(self, connection: Any, message: Any) -> None:
        apply(connection, message)
        n = int(message.value().split(b":")[1].rstrip(b"} "))
        if message.key() == self.key and n in self.numbers:
            self.calls.append((message.partition(), n))
            self.how(connection)

    def fail(self, connection: Any) -> None:
        raise ValueError("no such order")

    def swallow(self, connection: Any) -> None:
        try:
            connection.execute("SELECT 1/0")
        except psycopg.Error:
            pass

    def reject(self, connection: Any) -> None:
        raise Reject("unknown currency")

    def deferred(self, connection: Any) -> None:
        connection.execute("INSERT INTO late VALUES (1), (1)")

    def interrupt(self, connection: Any) -> None:
        with psycopg.connect(connection.info.dsn, autocommit=True) as admin:
            admin.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
        self.numbers.clear()


def test_a_failure_stops_the_consumer_before_the_message(log):
    log.produce(keys(50))
    poison = Poison(2)
    with log.consuming(poison, attempts=3, batch=20) as running:
        error = running.error()
    assert isinstance(error, HandlerFailed)
    assert (error.topic, error.partition, error.offset, error.attempts) == (log.topic, 0, 21, 3)
    assert isinstance(error.__cause__, ValueError)
    # What comes before it is applied; nothing behind it.
    assert log.run("SELECT count(*), max(at) FROM effects") == [(21, 20)]
    assert log.positions() == {0: 21}
    poison.numbers.clear()
    with log.consuming(poison) as running:
        running.wait(lambda: log.count() >= 50, "the effects")
    log.check()


def test_a_failure_that_passes_is_no_failure(log):
    log.produce(keys(50))
    poison = Poison(2)

    def handle(connection, message):
        if len(poison.calls) == 3:
            poison.numbers.clear()
        poison(connection, message)

    with log.consuming(handle, attempts=5) as running:
        running.wait(lambda: log.count() >= 50, "the effects")
    log.check()


@pytest.mark.parametrize(
    ("how", "batch"), [("fail", 1), ("fail", 20), ("swallow", 20), ("reject", 20), ("deferred", 20)]
)
def test_a_failed_message_is_a_dead_letter_and_its_key_waits_behind_it(log, how, batch):
    with psycopg.connect(log.database.url) as connection:
        connection.execute("CREATE TABLE late (n integer UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    log.produce(keys(60))
    poison = Poison(2)
    poison.how = getattr(poison, how)
    with log.consuming(poison, on_failure="dead-letter", attempts=2, batch=batch) as running:
        running.wait(lambda: log.positions().get(0) == 60, "the position")
        letters = log.letters()
        assert [letter["message_offset"] for letter in letters] == [21, 31, 41, 51]
        first, *behind = letters
        assert first["reason"] == ("rejected" if how == "reject" else "failed")
        texts = {
            "fail": "no such order",
            "swallow": "has caught",
            "reject": "unknown currency",
            "deferred": "late_n_key",
        }
        assert texts[how] in first["error"]
        assert first["sqlstate"] == ("23505" if how == "deferred" else None)
        assert first["attempts"] == len(poison.calls[-2:] if how != "reject" else [1])
        assert {letter["reason"] for letter in behind} == {"behind"}
        applied = log.applied()
        assert applied["k1"] == [0, 1]
        assert {key: numbers for key, numbers in applied.items() if key != "k1"} == {
            key: numbers for key, numbers in log.written.items() if key != "k1"
        }
        # The message is kept whole.
        assert bytes(first["message_value"]) == b'{"n": 2}'
        assert first["message_headers"][0]["key"] == "ce_id"
        # A retry that fails again changes nothing but its row.
        desk = DeadLetters(psycopg.connect(log.database.url, autocommit=True), "consumer")
        desk.retry(Selection(group=log.group, reason=first["reason"]))
        running.wait(lambda: log.letters()[0]["attempts"] > first["attempts"], "the retry")
        running.wait(lambda: {letter["state"] for letter in log.letters()} == {"dead"}, "those behind")
        poison.numbers.clear()
        log.produce(["k1"])
        desk.retry(Selection(group=log.group, reason=first["reason"]))
        running.wait(lambda: log.count() >= 61, "the effects")
        desk._connection.close()
    log.check()
    assert log.letters() == []
    assert log.run("SELECT next_offset, applied, dead FROM consumer.offsets") in ([(61, 61, 4)], [(61, 61, 5)])


def test_what_waits_behind_a_discarded_letter_is_applied(log):
    log.produce(keys(40))
    poison = Poison(1)
    with log.consuming(poison, on_failure="dead-letter", attempts=1) as running:
        running.wait(lambda: log.positions().get(0) == 40, "the position")
        with psycopg.connect(log.database.url, autocommit=True) as connection:
            DeadLetters(connection, "consumer").discard(Selection(reason="failed"), "no order")
        running.wait(lambda: log.count() >= 39, "those behind it")
    assert log.applied()["k1"] == [0, 2, 3]
    assert log.letters() == []


@pytest.mark.parametrize("on_failure", ["stop", "dead-letter"])
def test_a_message_without_an_id(log, on_failure):
    log.produce(keys(30), ids=[None if number == 17 else uuid7() for number in range(30)])
    with log.consuming(on_failure=on_failure) as running:
        if on_failure == "stop":
            error = running.error()
            assert isinstance(error, HandlerFailed)
            assert error.offset == 17
            assert "has no id" in str(error)
            assert log.count() == 17
        else:
            running.wait(lambda: log.positions().get(0) == 30, "the position")
            assert [(one["reason"], one["message_offset"]) for one in log.letters()] == [("no-id", 17), ("behind", 27)]
            assert log.count() == 28


def test_a_message_that_may_have_been_forgotten_is_a_dead_letter(log):
    old = uuid.UUID("01900000-0000-7000-8000-000000000000")
    with psycopg.connect(log.database.url) as connection:
        insert = "INSERT INTO consumer.groups (grp, owner, forgotten_before) VALUES (%s, 'test', '2026-01-01')"
        connection.execute(insert, (log.group,))
    log.produce(["a", "b", "a"], ids=[uuid7(), old, uuid7()])
    with log.consuming(on_failure="dead-letter") as running:
        running.wait(lambda: log.positions().get(0) == 3, "the position")
        [letter] = log.letters()
        assert (letter["reason"], letter["message_id"]) == ("too-old", old)
        # Who retries it says that it was not applied.
        with psycopg.connect(log.database.url, autocommit=True) as connection:
            DeadLetters(connection, "consumer").retry(Selection(ids=[letter["id"]]))
        running.wait(lambda: log.count() >= 3, "the retry")
    assert log.letters() == []


def test_too_many_dead_letters_in_a_row_stop_it(log):
    log.produce([f"k{number}" for number in range(20)])

    def broken(connection, message):
        raise KeyError("currency")

    with log.consuming(broken, on_failure="dead-letter", attempts=1, most_dead=5) as running:
        error = running.error()
    assert isinstance(error, HandlerFailed)
    assert "as the 5 before it: KeyError" in str(error)
    assert (error.offset, len(log.letters()), log.positions()) == (5, 5, {0: 5})


def test_what_waits_behind_a_failure_is_not_read_into_memory(log, monkeypatch):
    paused: list[int] = []

    class Pausing(KafkaConsumer):
        def pause(self, partitions):
            paused.append(self.position(partitions)[0].offset)
            super().pause(partitions)

    monkeypatch.setattr(_member.confluent_kafka, "Consumer", Pausing)
    monkeypatch.setattr(_member, "_TAKEN", 20)
    monkeypatch.setattr(_member, "_MOST_QUEUED", 100)
    log.produce(keys(1000))
    poison = Poison(0, key=b"k0")

    def handle(connection, message):
        if paused:
            poison.numbers.clear()
        poison(connection, message)

    with log.consuming(handle, attempts=1000) as running:
        running.wait(lambda: log.count() >= 1000, "the effects")
    assert 100 <= paused[0] <= 120
    log.check()


def test_a_handler_can_not_commit(log):
    log.produce(keys(5))
    with log.consuming(lambda connection, message: connection.commit(), attempts=1) as running:
        assert "Explicit commit() forbidden" in str(running.error())
    assert log.positions() == {0: 0}


# --- Servers that fail ------------------------------------------------------------------------------------------------


def test_a_session_that_postgres_ends_is_nobodys_fault(log):
    log.produce(keys(50))
    poison = Poison(2)
    poison.how = poison.interrupt
    with log.consuming(poison, attempts=1) as running:
        running.wait(lambda: log.count() >= 50, "the effects")
    assert len(poison.calls) == 1
    log.check()


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


def test_lost_answers_to_commit(log):
    """Each second answer is lost, whatever was committed: the row shows what was applied."""

    class Losing(psycopg.Connection[Any]):
        count = 0

        def transaction(self, *arguments: Any, **options: Any) -> Any:
            return _Losing(self, super().transaction(*arguments, **options))

    class _Losing:
        def __init__(self, connection: Any, block: Any) -> None:
            self._connection, self._block = connection, block

        def __enter__(self) -> Any:
            return self._block.__enter__()

        def __exit__(self, *error: object) -> Any:
            answer = self._block.__exit__(*error)
            Losing.count += 1
            if error[0] is None and Losing.count > 1 and Losing.count % 2:
                self._connection.close()
                raise psycopg.OperationalError("the answer is lost")
            return answer

    log.produce(keys(500))
    with log.consuming(database=lambda: Losing.connect(log.database.url), batch=20, dedup=False) as running:
        running.wait(lambda: log.count() >= 500, "the effects")
        running.wait(lambda: log.positions()[0] == 500, "the position")
    assert Losing.count > 20
    log.check()


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


# --- Positions that Kafka no longer has -------------------------------------------------------------------------------


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


# --- Fencing, and what is refused -------------------------------------------------------------------------------------


def test_a_new_topic_is_added_at_once(log):
    """A partition that another member claims later is no added one, which would begin at 0."""
    group = GroupStore("consumer", log.group, "one")
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
        ({"group": ""}, "can't be a name"),
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
