"""A member of an inbox's group as a process of its own; its argument is JSON.

sleep_at   before the transaction with this number, the process halts itself, until somebody wakes it.
at         [point, which time, signal]: the process sends itself a signal at a point of at-most-once's transactions.
rejects    the handler rejects the messages with this key, which become dead letters.
external   the effect is no part of the handler's transaction, as a call of another system is none.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import psycopg

from outbox.consumer.groups import GroupRows
from outbox.inbox import Consumer, KafkaMessage, Reject
from outbox.inbox._assigned import Assigned
from outbox.inbox._at_most_once import AtMostOnceApplier

POINTS = {
    # Before the first COMMIT, and after it; in the second transaction; after the second COMMIT.
    "given-up": (GroupRows, "mark_unconfirmed"),
    "between": (Assigned, "moved"),
    "confirming": (GroupRows, "confirm"),
    "handled": (AtMostOnceApplier, "_call"),
    "applied": (AtMostOnceApplier, "_count"),
}

INSERT = "INSERT INTO effects (topic, part, at, key, n, member) VALUES (%s, %s, %s, %s, %s, %s)"
# Waits for nothing, and gives up nothing while a slow machine stalls. Of a rebalance it hears by a heartbeat.
FAST = {"fetch.wait.max.ms": 20, "session.timeout.ms": 6000, "heartbeat.interval.ms": 500}


def with_fast(kafka: Mapping[str, Any]) -> dict[str, Any]:
    """These options and FAST. With the protocol ``consumer``, the broker chooses how long a session is."""
    broker_chooses = (
        {"session.timeout.ms", "heartbeat.interval.ms"} if kafka.get("group.protocol") == "consumer" else set()
    )
    return {name: value for name, value in FAST.items() if name not in broker_chooses} | dict(kafka)


def apply(connection: psycopg.Connection[Any], message: KafkaMessage, member: str = "") -> None:
    """The effect of a message: a row that nothing keeps from being written twice."""
    key, value = message.key(), message.value()
    assert value is not None
    row = message.topic(), message.partition(), message.offset(), key.decode() if key else None, json.loads(value)["n"]
    connection.execute(INSERT, (*row, member))


class Sleepy(psycopg.Connection[Any]):
    """Sleeps once, between two transactions."""

    begun = 0
    sleep_at = -1

    def transaction(self, *arguments: Any, **options: Any) -> Any:
        Sleepy.begun += 1
        if Sleepy.begun == Sleepy.sleep_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().transaction(*arguments, **options)


def interrupt(point: str, nth: int, number: int) -> None:
    """Send this process a signal behind the nth call of a point's function."""
    kind, name = POINTS[point]
    function: Callable[..., Any] = getattr(kind, name)
    calls = 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        found = function(*arguments, **options)
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), number)
        return found

    setattr(kind, name, interrupted)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    given = json.loads(sys.argv[1])
    Sleepy.sleep_at = given.get("sleep_at", -1)
    if "at" in given:
        interrupt(*given["at"])
    consumer = Consumer(
        lambda: Sleepy.connect(given["url"], autocommit=True),
        [given["topic"]],
        group=given["group"],
        kafka={"bootstrap.servers": given["servers"], **with_fast(given.get("kafka", {}))},
        batch=given.get("batch", 100),
        dedup=given.get("dedup", True),
        delivery=given.get("delivery", "exactly-once"),
        on_failure="dead-letter" if "rejects" in given else "stop",
    )
    other = psycopg.connect(given["url"], autocommit=True) if given.get("external") else None
    rejected = given.get("rejects", "").encode()

    def handle(connection: psycopg.Connection[Any], message: KafkaMessage) -> None:
        if message.key() == rejected:
            raise Reject("no such order")
        apply(other or connection, message, given["name"])

    consumer.run(handle)
    print("ended")


if __name__ == "__main__":
    main()
