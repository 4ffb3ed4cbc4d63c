"""A member of the run's inbox group, as a process: its effect of a message is a row that says which message it was."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, Final

import psycopg

from outbox.inbox import Consumer, KafkaMessage

_EFFECT: Final = "INSERT INTO effects (event_id, topic, part, at) VALUES (%s, %s, %s, %s)"


def main() -> None:
    """Consume until SIGTERM, as the argument says it: a JSON object."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    given: dict[str, Any] = json.loads(sys.argv[1])
    given["wait"] = tuple(given["wait"])
    Consumer(given.pop("database"), given.pop("topics"), **given).run(_apply)


def _apply(connection: psycopg.Connection[Any], message: KafkaMessage) -> None:
    event_id = dict(message.headers() or ())["ce_id"]
    connection.execute(_EFFECT, ((event_id or b"").decode(), message.topic(), message.partition(), message.offset()))


if __name__ == "__main__":
    main()
