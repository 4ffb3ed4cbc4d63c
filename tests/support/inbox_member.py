"""A member of an inbox's group as a process of its own; its argument is JSON.

sleep_at   before the transaction with this number, the process halts itself, until somebody wakes it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import psycopg
from inbox_support import FAST, apply

from outbox.inbox import Consumer


class Sleepy(psycopg.Connection[Any]):
    """Sleeps once, between two transactions."""

    begun = 0
    sleep_at = -1

    def transaction(self, *arguments: Any, **options: Any) -> Any:
        Sleepy.begun += 1
        if Sleepy.begun == Sleepy.sleep_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().transaction(*arguments, **options)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    given = json.loads(sys.argv[1])
    Sleepy.sleep_at = given.get("sleep_at", -1)
    consumer = Consumer(
        lambda: Sleepy.connect(given["url"], autocommit=True),
        [given["topic"]],
        group=given["group"],
        kafka={"bootstrap.servers": given["servers"], **FAST, **given.get("kafka", {})},
        batch=given.get("batch", 100),
        dedup=given.get("dedup", True),
    )
    consumer.run(lambda connection, message: apply(connection, message, given["name"]))
    print("ended")


if __name__ == "__main__":
    main()
