"""How long it takes after a fault has been healed until new events are read or applied, and the backlog published."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from threads import Threads

from chaos.course import BILL, KIND_NAMES, ORDER
from chaos.history import EventIds, writer_and_number
from chaos.workload import Pace

STEADY: Final = [KIND_NAMES[number] for number in (ORDER, BILL)]
"""What nothing but faults holds up."""
_EVERY: Final = 0.2
_FULL: Final = 8_000
_EFFECTS: Final = "SELECT number, event_id::text FROM effects WHERE number > %s ORDER BY number"


class Clock:
    """Seconds in which events could be published: it stands while a server is down or operators stop everything.

    Not while a relay is halted or killed, or one of several brokers: others are there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds = 0
        self._passed = 0.0
        self._since = time.monotonic()

    def seconds(self) -> float:
        """Return how long it has run."""
        with self._lock:
            return self._passed if self._holds else self._passed + time.monotonic() - self._since

    def stop(self) -> None:
        """Let it stand, until ``start`` was called as often as this."""
        with self._lock:
            if not self._holds:
                self._passed += time.monotonic() - self._since
            self._holds += 1

    def start(self) -> None:
        """Let it go on, unless something else stops it."""
        with self._lock:
            self._holds -= 1
            self._since = time.monotonic()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Let it stand meanwhile."""
        self.stop()
        try:
            yield
        finally:
            self.start()


@dataclass(slots=True)
class Recovery:
    """One fault that was healed, and what the two recoveries took, in seconds.

    first_read   until an event is read that was committed after the healing, by the run's clock, whatever is struck
                 meanwhile. ``begun`` is what the clock showed, ``numbers`` what the writers had given by then.
    caught_up    until nothing is left of what was in the outbox after the healing, later faults included. ``mark``: the
                 highest id of it.
    """

    fault: str
    healed_at: float
    begun: float
    numbers: Mapping[int, int]
    first_read: float | None = None
    mark: int | None = None
    caught_up: float | None = None


class RecoveryWatch(Threads):
    """Looks at the outbox five times a second, past the proxies. Holds the writers back while the outbox is full.

    Other relays may be struck meanwhile: that is part of the time. ``kinds`` are the aggregate types that nothing but
    faults holds up; ``numbers`` returns how many events each writer has begun to write.
    """

    def __init__(
        self, url: str, kinds: Sequence[str], pace: Pace, numbers: Callable[[], Mapping[int, int]], clock: Clock
    ) -> None:
        self.recoveries: list[Recovery] = []
        self._url = url
        self._kinds = list(kinds)
        self._pace = pace
        self._numbers = numbers
        self._clock = clock
        self._unread = False
        self._stopped_at: Mapping[int, int] | None = None
        self._lock = threading.Lock()
        super().__init__({"recovery-watch": self._run})

    def healed(self, fault: str) -> None:
        """Begin to watch the recovery from a fault of this name."""
        with self._lock:
            begun = self._clock.seconds()
            self.recoveries.append(Recovery(fault, time.monotonic(), begun, dict(self._numbers())))
            self._unread = True

    def stop_clock(self) -> None:
        """Let the clock stand until an event is read that is committed from now on."""
        with self._lock:
            if self._stopped_at is None:
                self._clock.stop()
            self._stopped_at = dict(self._numbers())
            self._unread = True

    def read(self, event: int) -> None:
        """Record that a reader has seen an event."""
        if not self._unread:
            return
        writer, number = writer_and_number(event)
        with self._lock:
            if self._stopped_at is not None and number >= self._stopped_at.get(writer, 0):
                self._stopped_at = None
                self._clock.start()
            now = self._clock.seconds()
            unread = [each for each in self.recoveries if each.first_read is None]
            for each in unread:
                # Begun after the healing, so committed after it.
                if number >= each.numbers.get(writer, 0):
                    each.first_read = now - each.begun
            self._unread = self._stopped_at is not None or any(each.first_read is None for each in unread)

    def first_reads(self) -> list[float]:
        """Return what it took until new events were read, in order of length."""
        with self._lock:
            return sorted(each.first_read for each in self.recoveries if each.first_read is not None)

    def by_fault(self) -> dict[str, list[float]]:
        """Return what it took until new events were read, by the fault's name."""
        found: dict[str, list[float]] = {}
        with self._lock:
            for each in self.recoveries:
                if each.first_read is not None:
                    found.setdefault(each.fault, []).append(round(each.first_read, 2))
        return dict(sorted(found.items()))

    def catch_ups(self) -> list[float]:
        """Return what it took until the backlog was published, in order of length."""
        with self._lock:
            return sorted(each.caught_up for each in self.recoveries if each.caught_up is not None)

    def _run(self) -> None:
        connection: psycopg.Connection[Any] | None = None
        while not self._stop.wait(_EVERY):
            try:
                connection = connection or psycopg.connect(self._url, autocommit=True, connect_timeout=5)
                self._look(connection)
            except psycopg.OperationalError:
                # Postgres is away: nothing has recovered.
                if connection is not None:
                    connection.close()
                connection = None
        if connection is not None:
            with contextlib.suppress(psycopg.OperationalError):
                connection.close()

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            open_ones = [each for each in self.recoveries if each.caught_up is None]
        row = connection.execute(
            "SELECT count(*), coalesce(max(id), 0), min(id) FILTER (WHERE aggregate_type = ANY(%s)) FROM outbox.events",
            (self._kinds,),
        ).fetchone()
        assert row is not None
        count, highest, lowest = row
        self._pace.full = count > _FULL
        now = time.monotonic()
        for each in open_ones:
            if each.mark is None:
                each.mark = highest
            if lowest is None or lowest > each.mark:
                each.caught_up = now - each.healed_at


class EffectWatch(RecoveryWatch):
    """Looks at the effects of the group in Postgres: how long after a fault of a consumer until new events are applied.

    ``read`` is here that an effect is found.
    """

    def __init__(
        self, url: str, ids: EventIds, pace: Pace, numbers: Callable[[], Mapping[int, int]], clock: Clock
    ) -> None:
        super().__init__(url, (), pace, numbers, clock)
        self._ids = ids
        self._last = 0

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        if self._unread:
            # Of two that commit at the same time one may be passed over. More are to come.
            for number, event_id in connection.execute(_EFFECTS, (self._last,)).fetchall():
                self._last = number
                if (event := self._ids.event(event_id)) is not None:
                    self.read(event)
