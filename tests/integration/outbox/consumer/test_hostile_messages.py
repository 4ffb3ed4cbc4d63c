"""One table of hostile messages over all readers: the inbox, from topic to topic, and the Spark tasks'."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

import orjson
import psycopg
import pytest
from hostile_messages import MESSAGES, TOPIC, write
from inbox_support import Log
from range_support import task_decoder
from support import wait_until
from transform_support import running

from outbox.consumer.admin.dead_letters import DeadLetters, Selection, readable
from outbox.consumer.letters import DeadLetterStore
from outbox.consumer.model import Range, RejectedRecord
from outbox.inbox import Reject, _member, message_id, once
from outbox.transform import DEAD_LETTER, Record, Transformer
from spark_jobs.task.feed import Feed
from spark_jobs.task.reader import RangeReader, ReaderSettings

COUNT = len(MESSAGES)
DEAD = {number: one.reason for number, one in enumerate(MESSAGES) if one.reason is not None}
UNDECODABLE = {number: one.undecodable for number, one in enumerate(MESSAGES) if one.undecodable is not None}


@pytest.fixture
def log(outbox_postgres, outbox_kafka, monkeypatch) -> Log:
    monkeypatch.setattr(_member, "_UPKEEP_SECONDS", 0.1)
    found = Log(outbox_postgres, outbox_kafka)
    found.topic = outbox_kafka.create_topic(outbox_kafka.name("hostile"), config=TOPIC)
    write(found.servers, found.topic)
    return found


def handle(connection: Any, message: Any) -> None:
    """An effect of each message, of which a handler reads everything."""
    size = sum(len(name) + len(value or b"") for name, value in message.headers() or ())
    insert = "INSERT INTO effects (topic, part, at, n) VALUES (%s, %s, %s, %s)"
    connection.execute(insert, (message.topic(), message.partition(), message.offset(), size + message.timestamp()[0]))


def applied(log: Log) -> list[int]:
    return [at for (at,) in log.run("SELECT at FROM effects ORDER BY at")]


def look(log: Log) -> list[int]:
    """What operators see of the letters: all of them, whole. Returns their ids."""
    with psycopg.connect(log.database.url, autocommit=True) as connection:
        desk = DeadLetters(connection, "consumer")
        listed = desk.list(Selection(group=log.group))
        shown = [readable(desk.show(row["id"])) for row in listed]
    assert len(listed) == len(log.letters())
    for row in shown:
        message = MESSAGES[row["offset"]]
        orjson.dumps(row, default=str)
        names = [header["key"] for header in row["headers"]]
        assert len(names) == len(message.headers)
        if message.undecodable is not None:
            assert message.undecodable.decode("utf-8", "backslashreplace") in names
            # As stored: bytes in base64, or null for a name that the client does not say.
            kept = [header["key_base64"] for header in row["headers"] if header.get("key_base64") is not None]
            assert kept == [base64.b64encode(message.undecodable).decode()]
    return [row["id"] for row in listed]


def raw_names(letter: dict[str, Any]) -> list[bytes]:
    """The bytes of a stored letter's header names that are not UTF-8, where they are known."""
    kept = [header.get("key_base64") for header in letter["message_headers"]]
    return [base64.b64decode(one) for one in kept if one is not None]


@pytest.mark.parametrize("dedup", [True, False])
def test_the_inbox(log, dedup):
    with log.consuming(handle, on_failure="dead-letter", dedup=dedup) as consumer:
        consumer.wait(lambda: log.positions().get(0) == COUNT, "the position")
    dead = DEAD if dedup else dict.fromkeys(UNDECODABLE, "undecodable")
    found = {letter["message_offset"]: letter for letter in log.letters()}
    assert {at: letter["reason"] for at, letter in found.items()} == dead
    assert {at: raw_names(letter) for at, letter in found.items() if at in UNDECODABLE} == {
        at: [name] for at, name in UNDECODABLE.items()
    }
    assert applied(log) == [number for number in range(COUNT) if number not in dead]
    look(log)


def test_the_inbox_retries_each_of_them(log):
    def reject(connection: Any, message: Any) -> None:
        raise Reject(message.headers())

    with log.consuming(reject, on_failure="dead-letter", most_dead=COUNT) as consumer:
        consumer.wait(lambda: log.positions().get(0) == COUNT, "the position")
    assert [letter["message_offset"] for letter in log.letters()] == list(range(COUNT))
    for command in (["list"], *(["show", str(id_)] for id_ in look(log))):
        found = log.command("dead-letters", *command, "--side", "consumer")
        assert found.exit_code == 0, found.output
    with log.consuming(handle, on_failure="dead-letter") as consumer:
        log.retry()
        consumer.wait(lambda: not log.run("SELECT FROM consumer.dead_letters WHERE state = 'retry'"), "the retries")
    assert {letter["message_offset"]: letter["reason"] for letter in log.letters()} == DEAD
    assert applied(log) == [number for number in range(COUNT) if number not in DEAD]


def test_once(log, outbox_kafka):
    """Each message twice, by a client's own loop: ids are recognized, whatever stands beside them."""
    found = outbox_kafka.consume(log.topic, COUNT)
    known = [number for number in range(COUNT) if number not in DEAD or MESSAGES[number].headers.get(b"ce_id")]
    for new in (True, False):
        for number in known:
            with log.database.connect() as connection:
                assert once(connection, found[number], consumer="billing") is new, MESSAGES[number].name
    assert len({message_id(found[number]) for number in known}) == len(known)


def test_from_topic_to_topic(log, outbox_kafka):
    target = outbox_kafka.create_topic(outbox_kafka.name("copies"), config=TOPIC)
    dead = outbox_kafka.create_topic(outbox_kafka.name("dead"))
    kafka = {"bootstrap.servers": log.servers}

    def copy(message: Any) -> list[Record]:
        return [Record(target, message.key(), message.value(), message.headers() or ())]

    member = Transformer(copy, topics=[log.topic], group=log.group, kafka=kafka, dead_letter_topic=dead)
    with running(member):
        wait_until(lambda: member.committed == COUNT, 60, "all messages")
    copies = outbox_kafka.consume(target, COUNT - len(UNDECODABLE))
    fine = [one for number, one in enumerate(MESSAGES) if number not in UNDECODABLE]
    assert [(one.key(), one.value()) for one in copies] == [(one.key, one.value) for one in fine]
    for letter, number in zip(outbox_kafka.consume(dead, len(UNDECODABLE)), UNDECODABLE, strict=True):
        headers = dict(letter.headers())
        assert headers[DEAD_LETTER] == b"UnicodeError: the name of a header is not UTF-8"
        assert UNDECODABLE[number].decode("utf-8", "backslashreplace") in headers
        assert (letter.key(), letter.value()) == (MESSAGES[number].key, MESSAGES[number].value)


def test_the_readers_of_spark(log):
    reader = RangeReader(ReaderSettings({"bootstrap.servers": log.servers}, log.group))
    try:
        parts = list(reader.range((log.topic, 0), Range("id", 0, COUNT)))
    finally:
        reader.close()
    decoder = task_decoder(None, "headers")
    feed = Feed(["message_id"], decoder.decoding(parts), max_dead=COUNT)
    rows = sum(batch.num_rows for batch in feed)
    # Payloads, which the other readers leave to the user's code.
    not_json = [number for number, one in enumerate(MESSAGES) if one.value not in {None, b"{}"}]
    dead = dict.fromkeys(not_json, "undecodable") | DEAD
    assert {one.place[2]: one.reason for one in feed.found} == dead
    assert rows == COUNT - len(dead)
    # All of them as letters, and as they are loaded to be retried.
    failed = partial(RejectedRecord, reason="failed", error="x")
    whole = [letter for part in parts for letter in decoder.incoming.letters(part, failed)]
    with psycopg.connect(log.database.url) as connection:
        assert DeadLetterStore("consumer", log.group).write(connection, "id", whole) == COUNT
        connection.execute("UPDATE consumer.dead_letters SET state = 'retry'")
    assert {at: raw_names(log.letters()[at]) for at in UNDECODABLE} == {at: [name] for at, name in UNDECODABLE.items()}
    look(log)
