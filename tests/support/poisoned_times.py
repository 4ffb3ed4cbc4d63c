"""How long exactly-once takes to catch up with refused events, and how long at-least-once: on servers of its own.

    python tests/support/poisoned_times.py [--source wal] [--rounds 3] [--attempts 10]

2,000 events over 256 lanes with six refused ones in the middle, by turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from poisoned_relay import KEYS, Outboxed, relaying

from outbox.testing.fixtures import PrivateKafka, PrivatePostgres


def seconds(database: Any, topics: Any, delivery: str, source: str, attempts: int) -> tuple[float, float]:
    """Return how long one relay takes from the commit of the last event: for all others, and for the refused ones."""
    outboxed = Outboxed(database.url, topics)
    failures = {"on_failure": "block", "max_attempts": attempts, "min_backoff_seconds": 0.1, "max_backoff_seconds": 0.2}
    outboxed.write(2000)
    others = None
    with relaying(outboxed.settings(delivery, source=source, failures=failures)):
        while outboxed.waits():
            time.sleep(0.05)
        outboxed.write_all()
        began = time.monotonic()
        while len(outboxed.dead()) < len(KEYS):
            if others is None and outboxed.waits() <= 2 * len(KEYS):
                others = time.monotonic() - began
            time.sleep(0.02)
        ended = time.monotonic() - began
        return others or ended, ended


def main() -> None:
    """Measure both by turns, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=["polling", "wal"], default="polling")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attempts", type=int, default=10)
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"at-least-once": [], "exactly-once": []}
    with PrivatePostgres() as postgres, PrivateKafka() as kafka:
        server, cluster = postgres({"max_connections": "200"}), kafka()
        for number in range(given.rounds):
            for delivery, times in found.items():
                name = f"times_{number}_{delivery.replace('-', '_')}"
                with postgres.database(server, name) as database, kafka.topics(cluster) as topics:
                    times.append(seconds(database, topics, delivery, given.source, given.attempts))
                print(f"{number}: {delivery}: {times[-1][0]:.1f} s for the others, {times[-1][1]:.1f} s", flush=True)
    for number, what in enumerate(("the others", "all")):
        at_least, exactly = (statistics.median(each[number] for each in times) for times in found.values())
        print(f"{given.source}, {what}: {at_least:.1f} s, {exactly:.1f} s, {exactly / at_least:.2f} times as long")


if __name__ == "__main__":
    main()
