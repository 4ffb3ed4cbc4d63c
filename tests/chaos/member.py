"""A member of one of the run's groups, as a process: ``member.py ROLE JSON`` with what the group is given.

The inbox's effect of a message is a row that says which message it was, and a reserved call of the payment provider.
The transformer makes a record of it that says so. A message that says nothing to them is refused.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
from collections.abc import Iterator
from typing import Any, Final
from uuid import UUID

import orjson
import psycopg

from chaos.payments import payments
from outbox.inbox import Consumer, KafkaMessage, Reject, message_id
from outbox.stopping import Stopping
from outbox.transform import Record, Transformer

FROM: Final = "from"
"""The header of a record: the place of the message it was made of, as that of dead letters has it."""
_EFFECT: Final = "INSERT INTO effects (event_id, topic, part, at) VALUES (%(id)s, %(topic)s, %(part)s, %(at)s)"
# The table that a Spark task has in its place.
_RESERVE: Final = f"""
WITH batch AS (SELECT %(id)s::uuid AS message_id, %(topic)s::text AS message_topic, %(part)s::integer AS message_part,
                      %(at)s::bigint AS message_offset, %(key)s::text AS message_key)
{payments.reserve()}"""


def main() -> None:
    """Consume until SIGTERM; print what all threads are doing at SIGUSR1."""
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    given: dict[str, Any] = json.loads(sys.argv[2])
    if (mutation := given.pop("mutation")) != "none":
        import mutant

        mutant.mutate(mutation)
    {"inbox": _consume, "transform": _transform}[sys.argv[1]](given)


def _consume(given: dict[str, Any]) -> None:
    if given["delivery"] == "exactly-once":
        given["on_failure"] = "dead-letter"
    Consumer(given.pop("database"), given.pop("topics"), **given).run(_apply)


def _transform(given: dict[str, Any]) -> None:
    results = given.pop("results")

    def transform(message: KafkaMessage) -> Iterator[Record]:
        id_ = _checked(message)
        place = f"{message.topic()}-{message.partition()}@{message.offset()}"
        yield Record(results, message.key(), b"", [("ce_id", str(id_).encode()), (FROM, place.encode())])

    stop = Stopping()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    Transformer(transform, **given).run(stop)


def _apply(connection: psycopg.Connection[Any], message: KafkaMessage) -> None:
    try:
        id_ = _checked(message)
    except ValueError as error:
        raise Reject(str(error)) from error
    key = (message.key() or b"").decode(errors="backslashreplace").replace("\0", "")
    row = {"id": id_, "topic": message.topic(), "part": message.partition(), "at": message.offset(), "key": key}
    connection.execute(_EFFECT, row)
    connection.execute(_RESERVE.encode(), row)


def _checked(message: KafkaMessage) -> UUID:
    """Return a message's id. Raises for one without, and ValueError for what is neither JSON nor said to be bytes."""
    value = message.value()
    if value is not None and dict(message.headers() or ()).get("content-type") != b"application/octet-stream":
        orjson.loads(value)
    return message_id(message)


if __name__ == "__main__":
    main()
