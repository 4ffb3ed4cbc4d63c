"""A member of a group of outbox.transform in a process of its own, to be killed. Arguments: see ``main``."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator

from confluent_kafka import Message

from outbox.transform import Record, Transformer


def main(servers: str, source: str, target: str, group: str, batch: str) -> None:
    """Double each number of ``source`` into two records of ``target``, until SIGTERM."""

    def doubled(message: Message) -> Iterator[Record]:
        number = json.loads(message.value() or b"")["n"]
        for part in (0, 1):
            yield Record(target, message.key(), json.dumps({"n": 2 * number + part}).encode(), [("from", b"test")])

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    kafka = {"bootstrap.servers": servers, "session.timeout.ms": 2_500, "heartbeat.interval.ms": 500}
    # After ten seconds by default.
    kafka["reconnect.backoff.max.ms"] = 500
    Transformer(doubled, topics=[source], group=group, kafka=kafka, batch=int(batch), transaction_seconds=3.0).run(stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
