"""Reads the pipeline's figures regularly, and keeps those of the last minutes for the charts."""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from outbox.errors import OutboxError
from relay.insights import OutboxState
from relay.pipeline.overview import Overview, Reader

log = structlog.get_logger("page")

_IDLE_SECONDS: Final = 10.0
"""How often the figures are read while no browser shows them, so that the charts have a past."""
_INTEREST_SECONDS: Final = 30.0
_KEPT_SECONDS: Final = 3_600
_FIRST_SECONDS: Final = 15.0
_TICK_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from the writing of an event to its effect in the sink, of the newest that were applied."""

    median: float
    p95: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one moment, for the charts; None for what is not known. Rates are per second.

    topics   how long the oldest event of each topic has waited, in seconds; ``lags``: of each group, in offsets.
    """

    at: float
    backlog: int | None
    oldest_seconds: float | None
    written: float | None
    published: float | None
    applied: float | None
    latency: Latency | None
    topics: Mapping[str, float]
    lags: Mapping[str, int | None]


class Sampler:
    """Reads in a thread of its own, from the first look on until ``close``.

    reader    reads an overview.
    latency   reads the latency; it may fail without harm to the rest. So may ``topics``, for the topics' ages.
    """

    def __init__(
        self,
        reader: Reader,
        latency: Callable[[], Latency | None],
        topics: Callable[[OutboxState], Mapping[str, float] | None],
        refresh_seconds: float,
    ) -> None:
        self._reader = reader
        self._latency = latency
        self._topics = topics
        self._refresh = refresh_seconds
        self._lock = threading.Condition()
        self._samples: deque[Sample] = deque()
        self._latest: Overview | None = None
        # The readings that have begun, that have ended, and the one that is waited for.
        self._begun = self._ended = self._wanted = 0
        self._interest_until = 0.0
        self._thread: threading.Thread | None = None
        self._closed = False

    def latest(self) -> Overview | None:
        """Return the newest overview. Waits for the first one, but not for ever.

        If none was requested for a while, it first waits a little for a new one.
        """
        if self._begin():
            self.refresh()
        with self._lock:
            self._lock.wait_for(lambda: self._latest is not None or self._closed, _FIRST_SECONDS)
            return self._latest

    def taken(self) -> dt.datetime:
        """Return when the newest overview was read; now, if there is none yet."""
        with self._lock:
            return dt.datetime.fromtimestamp(self._samples[-1].at if self._samples else time.time(), dt.UTC)

    def samples(self, seconds: float) -> Sequence[Sample]:
        begin = time.time() - seconds
        with self._lock:
            return [sample for sample in self._samples if sample.at >= begin]

    def refresh(self) -> None:
        """Read again now, after a change, and wait for it."""
        with self._lock:
            if self._thread is None:
                return
            # One that is being read may be from before the change.
            self._wanted = wanted = self._begun + 1
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._ended >= wanted or self._closed, self._refresh + 1)

    async def ticks(self) -> AsyncIterator[int]:
        """Yield a number each time there is a new overview, until ``close``."""
        seen = -1
        while not self._closed:
            self._begin()
            if self._ended != seen:
                seen = self._ended
                yield seen
            await asyncio.sleep(_TICK_SECONDS)

    def end(self) -> None:
        """Let the thread and all ``ticks`` end, without waiting for them. A signal handler may call it."""
        self._closed = True

    def close(self) -> None:
        self.end()
        with self._lock:
            self._lock.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _begin(self) -> bool:
        """Start the thread. Returns whether it was running, and no overview was requested for a while."""
        with self._lock:
            idle = time.monotonic() >= self._interest_until
            self._interest_until = time.monotonic() + _INTEREST_SECONDS
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="page sampler", daemon=True)
                self._thread.start()
                return False
            if idle:
                self._wanted = self._begun + 1
                self._lock.notify_all()
            return idle

    def _run(self) -> None:
        before: Overview | None = None
        while not self._closed:
            with self._lock:
                self._begun += 1
            try:
                before = self._reader.read(before)
                self._take(before)
            except Exception as error:
                # A page that shows old figures as new ones would be worse than one that says so.
                why = str(error)
                if not isinstance(error, OutboxError):
                    log.exception("the figures can't be read")
                    why = f"{type(error).__name__}; see the log"
                self._reader.close()
                before = Overview(None, (), {"the pipeline": why}, None)
                self._take(before)
            with self._lock:
                watched = time.monotonic() < self._interest_until
                seconds = self._refresh if watched else _IDLE_SECONDS
                self._lock.wait_for(lambda: self._closed or self._wanted > self._begun, seconds)
        self._reader.close()

    def _take(self, overview: Overview) -> None:
        latency, topics = None, None
        outbox = overview.outbox
        if not overview.unseen:
            try:
                latency = self._latency()
                topics = self._topics(outbox) if outbox is not None and outbox.counted else None
            except OutboxError as error:
                log.warning("the latency and the topics' ages can't be read", error=str(error))
        sample = Sample(
            at=time.time(),
            backlog=None if outbox is None else outbox.backlog,
            oldest_seconds=None if outbox is None or outbox.backlog is None else (outbox.oldest_seconds or 0.0),
            written=overview.written,
            published=overview.published,
            applied=overview.applied,
            latency=latency,
            topics={name or "(no route)": age for name, age in (topics or {}).items()},
            lags={group.group: group.lag for group in overview.groups},
        )
        with self._lock:
            self._latest = overview
            self._ended = self._begun
            self._samples.append(sample)
            while self._samples[0].at < sample.at - _KEPT_SECONDS:
                self._samples.popleft()
            self._lock.notify_all()
