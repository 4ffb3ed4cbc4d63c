"""Faults of what a consumer's tasks run: at a number of a message, once or for as long as a file is there.

The functions go to executors, which do not have this module: all of them are made within others.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spark_jobs.payloads.decoding import Json

Transform = Callable[[Any], Any]


def fault_at(
    number: int,
    *,
    once: Path | None = None,
    while_there: Path | None = None,
    seen: Path | None = None,
    kills: bool = False,
) -> Any:
    """Return a function of a number that has a fault at this one, and returns it otherwise.

    once         The fault is there once; then this file is.
    while_there  The fault is there while this file is.
    seen         The fault waits for this file, which ``announcing`` makes: without rows there is nothing to commit.
    kills        The fault ends the Python worker with SIGKILL instead of raising an error.
    """

    def passed(n: Any) -> Any:
        faulty = n == number and (once is None or not once.exists()) and (while_there is None or while_there.exists())
        if not faulty:
            return n
        deadline = time.monotonic() + 120
        while seen is not None and not seen.exists():
            assert time.monotonic() < deadline, "no rows have come to the task"
            time.sleep(0.01)
        if once is not None:
            once.touch()
        if kills:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the transform fails here")

    return passed


def by_map(passed: Callable[[Any], Any]) -> Transform:
    """Return a transform that gives its rows in small batches: what the worker has written last, it still holds."""

    def pieces(frames: Iterator[Any]) -> Iterator[Any]:
        for frame in frames:
            for first in range(0, len(frame), 500):
                piece = frame[first : first + 500]
                yield piece.assign(n=piece["n"].map(passed))

    return lambda rows: rows.mapInPandas(pieces, rows.schema)


def stalling(seen: Path, go: Path) -> Callable[[], None]:
    """Return a function whose first call of all makes the file ``seen`` and waits for ``go``."""

    def stall() -> None:
        try:
            seen.touch(exist_ok=False)
        except FileExistsError:
            return
        deadline = time.monotonic() + 240
        while not go.exists():
            assert time.monotonic() < deadline, "the task was not let go"
            time.sleep(0.01)

    return stall


def at(number: int, stall: Callable[[], None]) -> Callable[[Any], Any]:
    """Return a function of a number that stalls at this one, and returns it."""

    def passed(n: Any) -> Any:
        if n == number:
            stall()
        return n

    return passed


def reading(passed: Callable[[Any], Any]) -> Any:
    """Return a decoder that gives each number to a function, in the task that has read its message."""

    class Reading:
        """Not at the module's level: executors do not have this module."""

        def task_plan(self) -> Any:
            fields, plan = Json("n int").task_plan()

            def made() -> Any:
                read = plan()

                def one(value: bytes, header: bytes | None) -> Any:
                    (n,) = read(value, header)
                    return (passed(n),)

                return one

            return fields, made

    return Reading()
