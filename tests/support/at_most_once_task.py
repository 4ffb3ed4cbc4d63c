"""A task of an at-most-once job as a process of its own, which kills itself at a point: one for each line of JSON.

Each is answered with its exit status. The effect is a call of another system: a row that is committed at once, for each
message.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import psycopg
from consumer_group import COLUMNS, ConsumerGroup, numbered

from outbox.consumer.groups import GroupRows
from spark_jobs.dedup.strategies import OffsetsOnly
from spark_jobs.postgres.at_most_once import AtMostOnceTransaction
from spark_jobs.task import partition as task
from spark_jobs.task.input import in_memory

POINTS = {
    # Before the COMMIT of the move, and behind it; confirmed, and no effect; behind the effect, before its COMMIT.
    "given-up": (GroupRows, "mark_unconfirmed"),
    "moved": (AtMostOnceTransaction, "move"),
    "confirmed": (GroupRows, "confirm"),
    "applied": (AtMostOnceTransaction, "apply"),
}


def run(url: str, start: int, count: int, at: str | None = None, fails: bool = False) -> dict[str, Any]:
    """Run a range of numbered messages. ``at``: kill this process there, or behind the effect of the third message."""

    def effect(cursor: psycopg.Cursor[Any], rows: Any) -> None:
        with psycopg.connect(url, autocommit=True) as other:
            for n in rows["n"].to_pylist():
                other.execute("INSERT INTO calls (n) VALUES (%s)", (n,))
                if at == "third" and n == start + 2:
                    os.kill(os.getpid(), signal.SIGKILL)
        cursor.execute("INSERT INTO numbers SELECT n FROM batch")
        if fails:
            raise ValueError("the provider is away")

    made = ConsumerGroup(url).plan(*(0, start, count, COLUMNS, effect), strategy=OffsetsOnly(), at_most_once=True)
    (report,) = task.apply_rows(made, in_memory([numbered(range(start, start + count), start=start)]))
    return report.to_pylist()[0]


def interrupt(point: str) -> None:
    kind, name = POINTS[point]
    function: Callable[..., Any] = getattr(kind, name)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        function(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(kind, name, interrupted)


def alone(given: dict[str, Any]) -> int:
    """Run it in a fork, because the imports take longer than it does; return how that has ended."""
    if (child := os.fork()) == 0:
        try:
            if given["at"] in POINTS:
                interrupt(given["at"])
            run(**given)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for line in sys.stdin:
        print(alone(json.loads(line)), flush=True)
