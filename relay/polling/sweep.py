"""Finds events below the low-water marks that are free to go, beside the turns.

A mark may pass by the row of an INSERT that took very long between drawing its id and writing (see low_water_mark.py).
So each lane is swept once a minute, from its lowest id to its mark. Behind a blocked key there may be millions of rows,
and below them as many dead index entries: a turn must not wait for them. A thread with a connection of its own, open
only for the sweep, walks them in windows, and rests after each window as long as it took.

A sweep only names events. The reader checks them, and reads them by their ids before anything else of their lane:

| what happens                               | what follows                                                            |
|--------------------------------------------|-------------------------------------------------------------------------|
| the row is committed behind the window     | the next sweep finds it                                                 |
| a key is freed in the middle of a sweep    | windows from then on name its rows, though lower ones wait. A name      |
|                                            | counts only if the failures that the lane had are still there in a look |
|                                            | that is sent after the window; a freed key lowers the mark instead      |
| the event is published, or its key blocked,| the read does not return it                                             |
| before the read                            |                                                                         |
| very many events are named                 | the sweep of the lane ends, and begins again when they are published    |
| the sweep of a lane fails, or takes longer | turns and the other lanes' sweeps go on; the lane is swept again a      |
| than a minute                              | minute after the begin, or the end. A window is one statement, so no    |
|                                            | size of the range exceeds the statement limit                           |
| the source is closed                       | its statement is interrupted, and the thread ends                       |
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import psycopg
import structlog

from outbox.event import DEAD_LETTER
from relay.background import interrupt
from relay.core.ports import Kind
from relay.database import begin_session, is_pooled, one_write, unavailable_on_error
from relay.polling.low_water_mark import LOWEST
from relay.polling.queries import Queries
from relay.settle.statements import KEEP_TO_THE_INDEX

log = structlog.get_logger("relay")

_SWEEP_SECONDS: Final = 60.0
_AGAIN_SECONDS: Final = 1.0
# Rows in a window: some 20 ms of the server's time behind a blocked key.
_WINDOW: Final = 5000
# Names in the hands of the reader, for each lane.
_MOST: Final = 500


class Sweep:
    """The sweeps of a worker's lanes, one at a time. ``connect`` opens a connection."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], queries: Queries) -> None:
        self._connect = connect
        self._queries = queries
        self.due_at: dict[int, float] = {}
        """When the next sweep of a lane is due, by time.monotonic()."""
        self._lock = threading.Lock()
        self._found: dict[int, list[int]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection: psycopg.Connection[Any] | None = None

    def hold(self, lane: int) -> None:
        self.due_at[lane] = time.monotonic() + _SWEEP_SECONDS

    def begin(self, marks: Mapping[int, int], left_out: Collection[Kind]) -> None:
        """Start to sweep the lanes that are due, up to these marks, unless a sweep is in progress."""
        now = time.monotonic()
        if (self._thread is not None and self._thread.is_alive()) or all(self.due_at[lane] > now for lane in marks):
            return
        # With those that are due soon: a connection for each lane would cost more.
        lanes = {lane: mark for lane, mark in marks.items() if self.due_at[lane] <= now + _SWEEP_SECONDS / 2}
        # However it ends.
        self.due_at |= dict.fromkeys(lanes, now + _SWEEP_SECONDS)
        self._thread = threading.Thread(target=self._run, args=(lanes, left_out), name="sweep", daemon=True)
        self._thread.start()

    def take(self, lanes: Collection[int]) -> dict[int, list[int]]:
        """Return the ids that were found in these lanes, in order, once."""
        if not self._found:
            return {}
        with self._lock:
            return {lane: self._found.pop(lane) for lane in list(self._found) if lane in lanes}

    def close(self) -> None:
        """End the sweep in progress, if any, at once."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._lock:
            self._stop.set()
            if self._connection is not None:
                interrupt(self._connection)
        # One that still connects to a dead host ends by itself.
        thread.join(1.0)

    # In the thread

    def _run(self, lanes: Mapping[int, int], left_out: Collection[Kind]) -> None:
        left, failed = list(lanes), dict[int, Exception]()
        try:
            # One connection, unless it breaks.
            while left and not self._stop.is_set():
                with unavailable_on_error("sweeping"), self._connected() as connection:
                    while left and not connection.closed and not self._stop.is_set():
                        lane = left.pop(0)
                        try:
                            with unavailable_on_error(f"sweeping lane {lane}"):
                                found = self._sweep(connection, lane, lanes[lane], left_out)
                            seconds = 0.0 if self._stop.is_set() else _AGAIN_SECONDS if found else _SWEEP_SECONDS
                            self.due_at[lane] = time.monotonic() + seconds
                        except Exception as error:  # noqa: BLE001  the other lanes must be swept
                            failed[lane] = error
        except Exception as error:  # noqa: BLE001  the turns go on
            failed |= dict.fromkeys(left, error)
        if self._stop.is_set():
            self.due_at |= dict.fromkeys([*left, *failed], time.monotonic())
        elif failed:
            log.warning(
                "lanes could not be swept for late events; they will be a minute later",
                lanes=[*failed],
                error=str(next(iter(failed.values()))),
            )

    @contextlib.contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        connection = self._connect()
        try:
            with self._lock:
                self._connection = connection
            if begin_session(connection):
                connection.execute(KEEP_TO_THE_INDEX, {"local": False})
            yield connection
        finally:
            with self._lock:
                self._connection = None
                connection.close()

    def _sweep(
        self, connection: psycopg.Connection[Any], lane: int, mark: int, left_out: Collection[Kind]
    ) -> list[int]:
        values: dict[str, Any] = {"lane": lane, "mark": mark, "window": _WINDOW, "most": _MOST, "copy": DEAD_LETTER}
        values["left_types"] = [kind for kind, _ in left_out]
        values["left_copies"] = [copy for _, copy in left_out]
        found: list[int] = []
        rows, above = _WINDOW, LOWEST
        while rows == _WINDOW and len(found) < _MOST and not self._stop.is_set():
            began = time.monotonic()
            rows, above, free = self._window(connection, {**values, "above": above})
            if free:
                found += free
                with self._lock:
                    self._found[lane] = list(found)
            self._stop.wait(time.monotonic() - began)
        return found

    def _window(self, connection: psycopg.Connection[Any], values: Mapping[str, Any]) -> tuple[int, int, list[int]]:
        with one_write(connection):
            if is_pooled(connection):
                connection.execute(KEEP_TO_THE_INDEX, {"local": True})
            ((rows, above, free),) = connection.execute(self._queries.sweep, values).fetchall()
        return rows, above, free
