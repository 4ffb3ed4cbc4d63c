"""Messages that an inbox's handler can't apply: they stop the consumer or become dead letters, and their keys wait."""

from __future__ import annotations

import signal
import threading
import time
import uuid
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer as KafkaConsumer
from inbox_log import _quick, keys, log
from inbox_support import Log, apply
from uuid_utils.compat import uuid7

from outbox.inbox import HandlerFailed, Reject, _member

__all__ = ["_quick", "log"]

OLD = uuid.UUID("01900000-0000-7000-8000-000000000000")


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


@pytest.fixture
def on_sigterm():
    """Sets the handler of the service around the consumer."""
    before = signal.getsignal(signal.SIGTERM)
    yield lambda handler: signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGTERM, before)


def test_a_stop_during_a_failure_ends_the_next_run(log):
    """Else a service that runs it again after an error would never end."""
    log.produce(keys(1))
    calls = []

    def handle(connection, message):
        calls.append(message.offset())
        consumer.stop()
        raise ValueError("no such order")

    consumer = log.consumer(attempts=1)
    with pytest.raises(HandlerFailed):
        consumer.run(handle)
    consumer.run(handle)
    assert calls == [0]
    # That stop was for one run.
    with pytest.raises(HandlerFailed):
        consumer.run(handle)
    assert calls == [0, 0]


def test_the_handler_of_the_service_hears_a_signal_during_a_failure(log, on_sigterm):
    log.produce(keys(1))
    heard = []

    def service(number, frame):
        heard.append(number)

    def handle(connection, message):
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("no such order")

    on_sigterm(service)
    with pytest.raises(HandlerFailed):
        log.consumer(attempts=1).run(handle)
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is service


def test_what_the_handler_of_the_service_raises_does_not_interrupt_a_transaction(log, on_sigterm):
    log.produce(keys(3))

    def service(number, frame):
        raise SystemExit(143)

    def handle(connection, message):
        signal.raise_signal(signal.SIGTERM)
        apply(connection, message)

    on_sigterm(service)
    with pytest.raises(SystemExit) as ended:
        log.consumer().run(handle)
    assert ended.value.code == 143
    log.check()


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


@pytest.mark.parametrize("options", [{}, {"dedup": False}, {"on_failure": "dead-letter"}])
def test_a_handler_that_commits_stops_the_consumer_and_the_rest_of_its_batch_is_recorded(log, options):
    """Its COMMIT has moved the position, and no handler is called for what is behind it."""
    log.produce(["other", *keys(3, 1), *keys(16, 4)])
    poison = Poison(2, key=b"k0")
    poison.how = lambda connection: connection.execute("COMMIT")
    with log.consuming(poison, batch=10, **options) as running:
        error = running.error()
    assert isinstance(error, HandlerFailed)
    assert (error.offset, error.given_up) == (3, True)
    assert log.run("SELECT array_agg(at ORDER BY at) FROM effects") == [([0, 1, 2, 3],)]
    lost = log.run("SELECT first_offset, end_offset, kind FROM consumer.losses ORDER BY first_offset")
    assert lost == [(at, at + 1, "given-up") for at in range(3, 10)]
    assert log.run("SELECT next_offset, applied FROM consumer.offsets") == [(10, 3)]
    with log.consuming(**options) as running:
        running.wait(lambda: log.positions() == {0: 20}, "the rest")
    assert log.run("SELECT count(*) FROM effects") == [(14,)]


def test_a_handler_that_rolls_back_has_failed_and_nothing_is_lost(log):
    log.produce(keys(20))
    poison = Poison(1)
    poison.how = lambda connection: connection.execute("ROLLBACK")
    with log.consuming(poison, batch=10, on_failure="dead-letter") as running:
        running.wait(lambda: log.positions() == {0: 20}, "the position")
    assert [(one["message_offset"], one["reason"]) for one in log.letters()] == [(11, "failed")]
    assert log.run("SELECT count(*) FROM effects UNION ALL SELECT count(*) FROM consumer.losses") == [(19,), (0,)]


@pytest.mark.parametrize("moved", [False, True])
def test_nor_if_another_member_has_claimed_its_partition_since(log, moved):
    """Who has waited for the lock can't know how the transaction has ended, and may have applied the batch."""
    log.produce(keys(20))
    poison = Poison(1)

    def rolled_back_and_taken_over(connection: Any) -> None:
        connection.execute("ROLLBACK")
        poison.numbers.clear()
        log.run("UPDATE consumer.groups SET generation = generation + 1 RETURNING grp")
        end = "20" if moved else "next_offset"
        log.run(f"UPDATE consumer.offsets SET generation = generation + 1, next_offset = {end} RETURNING grp")

    poison.how = rolled_back_and_taken_over
    # Who is fenced claims again after two heartbeats.
    with log.consuming(poison, batch=20) as running:
        running.wait(lambda: poison.calls and log.count() == (0 if moved else 20), "the effects")
        running.wait(lambda: log.positions() == {0: 20}, "the position")
    assert log.run("SELECT count(*) FROM consumer.losses") == [(0,)]
    assert log.run("SELECT applied FROM consumer.offsets") == [(0 if moved else 20,)]


def test_what_a_handler_has_committed_is_recorded_after_an_outage(log):
    log.produce(keys(20))
    poison, away = Poison(1), []

    def commit_and_lose_the_server(connection: Any) -> None:
        connection.execute("COMMIT")
        away.extend("away" for _ in range(3))
        log.run("SELECT pg_terminate_backend(%s, 10000)", connection.info.backend_pid)

    def connect() -> psycopg.Connection[Any]:
        if away:
            raise psycopg.OperationalError(away.pop())
        return psycopg.connect(log.database.url)

    poison.how = commit_and_lose_the_server
    with log.consuming(poison, batch=20, database=connect) as running:
        error = running.error()
    assert isinstance(error, HandlerFailed)
    assert (error.offset, error.given_up, away) == (11, True, [])
    lost = log.run("SELECT first_offset, end_offset FROM consumer.losses ORDER BY first_offset")
    assert lost == [(at, at + 1) for at in range(11, 20)]
    assert log.run("SELECT next_offset, applied FROM consumer.offsets") == [(20, 11)]


def test_what_can_not_be_recorded_until_the_stop_is_said(log):
    log.produce(keys(20))
    poison, away = Poison(1), threading.Event()

    def commit_and_lose_the_server(connection: Any) -> None:
        connection.execute("COMMIT")
        away.set()
        running.consumer.stop()
        log.run("SELECT pg_terminate_backend(%s, 10000)", connection.info.backend_pid)

    def connect() -> psycopg.Connection[Any]:
        if away.is_set():
            raise psycopg.OperationalError("away")
        return psycopg.connect(log.database.url)

    poison.how = commit_and_lose_the_server
    with log.consuming(poison, batch=20, database=connect) as running:
        error = running.error()
    assert isinstance(error, HandlerFailed)
    assert "messages are lost, 9 of them" in str(error)
    assert "What may be lost is not recorded in consumer.losses" in str(error)
    assert log.run("SELECT count(*) FROM consumer.losses") == [(0,)]


def test_a_dead_letter_whose_handler_commits_is_recorded_and_kept(log):
    log.produce(keys(20))
    poison = Poison(1)
    with log.consuming(poison, on_failure="dead-letter", attempts=1) as running:
        running.wait(lambda: log.positions() == {0: 20}, "the position")

        def commit_and_fail(connection: Any) -> None:
            connection.execute("COMMIT")
            raise ValueError("no such order")

        poison.how = commit_and_fail
        log.retry()
        error = running.error()
    assert isinstance(error, HandlerFailed)
    assert (error.offset, error.given_up) == (11, True)
    assert log.run("SELECT first_offset, end_offset, kind FROM consumer.losses") == [(11, 12, "given-up")]
    assert [(one["message_offset"], one["state"], one["attempts"]) for one in log.letters()] == [(11, "dead", 2)]
    assert log.run("SELECT next_offset, applied, dead FROM consumer.offsets") == [(20, 19, 1)]


def test_a_busy_key_leaves_the_dead_letters_and_other_partitions_go_on(outbox_postgres, outbox_kafka, monkeypatch):
    """Messages of the key come faster than letters are retried: they wait in Kafka, and are not put behind those."""
    # More letters than are retried in several turns of the upkeep.
    monkeypatch.setattr(_member, "_UPKEEP_SECONDS", 0.2)
    monkeypatch.setattr(_member, "_TURN_SECONDS", 0.1)
    log = Log(outbox_postgres, outbox_kafka, 2)
    log.produce(["k1"] * 300, partition=0)
    poison = Poison(0)
    with log.consuming(poison, on_failure="dead-letter", attempts=1) as running:
        running.wait(lambda: len(log.letters()) == 300, "the dead letters")
        poison.numbers.clear()
        log.retry()
        fed = threading.Event()

        def feed() -> None:
            while not fed.is_set():
                log.produce(["k1"] * 40, partition=0)
                log.produce(["other"], partition=1)
                time.sleep(0.1)

        feeding = threading.Thread(target=feed)
        feeding.start()
        try:
            running.wait(lambda: log.run("SELECT FROM effects WHERE part = 1"), "the neighbour")
            assert log.letters()
            running.wait(
                lambda: log.run("SELECT FROM effects WHERE n > 300 AND key = 'k1'") and not log.letters(), "the key"
            )
        finally:
            fed.set()
            feeding.join()
        running.wait(lambda: log.count() == sum(map(len, log.written.values())), "the rest")
    log.check()


def test_a_consumer_stops_between_dead_letters(log):
    log.produce(["k1"] * 60)
    poison, begun = Poison(0), threading.Event()
    with log.consuming(poison, on_failure="dead-letter", attempts=1) as running:
        running.wait(lambda: len(log.letters()) == 60, "the dead letters")

        def slow(_: Any) -> None:
            begun.set()
            time.sleep(0.3)

        poison.numbers, poison.how = set(range(60)), slow
        log.retry()
        running.wait(begun.is_set, "the first retry")
    assert len(log.letters()) > 40


@pytest.mark.parametrize("batch", [1, 20])
def test_a_failed_message_is_a_dead_letter_and_its_key_waits_behind_it(log, batch):
    """Of four keys the third message fails, each in another way."""
    with psycopg.connect(log.database.url) as connection:
        connection.execute("CREATE TABLE late (n integer UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    log.produce(keys(60))
    poisons = {key: Poison(2, key=key.encode()) for key in ("k1", "k3", "k4", "k7")}
    errors = {"k1": "no such order", "k3": "was caught", "k4": "unknown currency", "k7": "late_n_key"}
    for poison, how in zip(poisons.values(), ("fail", "swallow", "reject", "deferred"), strict=True):
        poison.how = getattr(poison, how)

    def handle(connection, message):
        poisons.get(message.key().decode(), apply)(connection, message)

    with log.consuming(handle, on_failure="dead-letter", attempts=2, batch=batch) as running:
        running.wait(lambda: log.positions().get(0) == 60, "the position")
        letters = {letter["message_offset"]: letter for letter in log.letters()}
        firsts = {key: letters.pop(20 + int(key[1])) for key in poisons}
        assert sorted(letters) == [at for at in range(30, 60) if f"k{at % 10}" in poisons]
        assert {letter["reason"] for letter in letters.values()} == {"behind"}
        for key, first in firsts.items():
            assert errors[key] in first["error"]
            assert first["reason"] == ("rejected" if key == "k4" else "failed"), key
            assert first["sqlstate"] == ("23505" if key == "k7" else None), key
            assert first["attempts"] == (1 if key == "k4" else 2), key
        assert log.applied() == log.written | {key: [0, 1] for key in poisons}
        # The message is kept whole.
        assert bytes(firsts["k1"]["message_value"]) == b'{"n": 2}'
        assert firsts["k1"]["message_headers"][0]["key"] == "ce_id"
        # A retry that fails again changes nothing but its row.
        ids = [first["id"] for first in firsts.values()]
        log.retry(ids=ids)
        tried = "SELECT attempts FROM consumer.dead_letters WHERE state = 'dead' AND reason <> 'behind' ORDER BY 1"
        running.wait(lambda: log.run(tried) == [(2,), (3,), (3,), (3,)], "the retries")
        running.wait(lambda: {letter["state"] for letter in log.letters()} == {"dead"}, "those behind")
        for poison in poisons.values():
            poison.numbers.clear()
        log.produce(list(poisons))
        log.retry(ids=ids)
        running.wait(lambda: log.count() >= 64, "the effects")
    log.check()
    assert log.letters() == []
    # Those that come last may be behind, or after all that they could be behind.
    [(end, applied, dead)] = log.run("SELECT next_offset, applied, dead FROM consumer.offsets")
    assert (end, applied, 16 <= dead <= 20) == (64, 64, True)


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
    with psycopg.connect(log.database.url) as connection:
        insert = "INSERT INTO consumer.groups (grp, owner, forgotten_before) VALUES (%s, 'test', '2026-01-01')"
        connection.execute(insert, (log.group,))
    log.produce(["a", "b", "a"], ids=[uuid7(), OLD, uuid7()])
    with log.consuming(on_failure="dead-letter") as running:
        running.wait(lambda: log.positions().get(0) == 3, "the position")
        [letter] = log.letters()
        assert (letter["reason"], letter["message_id"]) == ("too-old", OLD)
        # Who retries it says that it was not applied.
        log.retry(ids=[letter["id"]])
        running.wait(lambda: log.count() >= 3, "the retry")
    assert log.letters() == []


def test_all_of_a_key_that_are_too_old_are_retried_at_once(log):
    """It was blocked until their days were forgotten."""
    poison = Poison(0)
    log.produce(["k1"] * 5, ids=[uuid.UUID(int=OLD.int + number) for number in range(5)])
    with log.consuming(poison, on_failure="dead-letter", attempts=1) as running:
        running.wait(lambda: log.positions().get(0) == 5, "the position")
        poison.numbers.clear()
        with psycopg.connect(log.database.url) as connection:
            connection.execute("UPDATE consumer.groups SET forgotten_before = '2026-01-01'")
        log.retry()
        dead = [("too-old", "dead")] * 5
        running.wait(lambda: [(one["reason"], one["state"]) for one in log.letters()] == dead, "the retries")
        log.retry(group=log.group, reason="too-old")
        running.wait(lambda: not log.letters(), "those that are too old")
    log.check()


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
    log.produce(keys(300))
    poison = Poison(0, key=b"k0")

    def handle(connection, message):
        if paused:
            poison.numbers.clear()
        poison(connection, message)

    with log.consuming(handle, attempts=1000) as running:
        running.wait(lambda: log.count() >= 300, "the effects")
    assert 100 <= paused[0] <= 120
    log.check()


def test_many_partitions_share_what_a_member_may_read_into_memory(outbox_postgres, outbox_kafka, monkeypatch):
    log = Log(outbox_postgres, outbox_kafka, 16)
    paused: dict[int, int] = {}

    class Pausing(KafkaConsumer):
        def pause(self, partitions):
            paused.setdefault(partitions[0].partition, self.position(partitions)[0].offset)
            super().pause(partitions)

    monkeypatch.setattr(_member.confluent_kafka, "Consumer", Pausing)
    monkeypatch.setattr(_member, "_TAKEN", 20)
    monkeypatch.setattr(_member, "_ALL_QUEUED", 160)
    for partition in range(16):
        log.produce([f"k{partition}-{number % 50}" for number in range(80)], partition=partition)

    def handle(connection, message):
        if len(paused) < 16:
            raise ValueError("not yet")
        apply(connection, message)

    with log.consuming(handle, attempts=1_000_000, wait=(0.1, 0.5)) as running:
        running.wait(lambda: log.count() >= 16 * 80, "the effects")
    assert min(paused.values()) >= 10
    assert max(paused.values()) <= 10 + 20
    log.check()
