"""How long events take from their transaction to Kafka, by the database's clock: a histogram for each topic.

A turn has thousands of events, so none is observed by itself. Times are RFC 3339 in UTC: as texts they sort like the
times that they name, and the events of a turn are nearly sorted. So a turn costs one sort, and one search for each
bucket.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily

from outbox._clients.clock import DatabaseClock
from outbox.consumer.delays import BUCKETS, MOST_TOPICS, TopicDelays
from outbox.event import DEAD_LETTER, REPLAY
from relay.core.ports import Claim
from relay.kafka.routing import Router

_TO_MINUTE: Final = len("2026-01-31T10:20:")
_TO_FRACTION: Final = _TO_MINUTE + len("30.123456")
_AFTER_ANY_TIME: Final = "~"
# Of tuples and texts, without a step of Python's for each event.
_HEADERS, _KIND, _TIME = (itemgetter(Claim._fields.index(name)) for name in ("headers", "aggregate_type", "time"))
_SECONDS: Final = itemgetter(slice(_TO_MINUTE, _TO_FRACTION))


class PublishDelays:
    """The delays of the events that this process has published. ``router`` is one of its own.

    Copies for dead-letter topics and replays are left out: they keep the time of the first publishing.
    """

    def __init__(self, registry: CollectorRegistry, clock: DatabaseClock, router: Router) -> None:
        self._clock = clock
        self._router = router
        self._delays = TopicDelays()
        registry.register(self)

    def observe(self, batches: Iterable[Sequence[Claim]], at: float) -> None:
        """Count events that Kafka had acknowledged at a time of time.monotonic()."""
        now = self._clock.at(at)
        if now is None:
            return
        times: dict[str, list[str]] = {}
        for batch in batches:
            rows = batch
            if any(headers and (DEAD_LETTER in headers or REPLAY in headers) for headers in map(_HEADERS, batch)):
                rows = [row for row in batch if not (row.headers and row.headers.keys() & {DEAD_LETTER, REPLAY})]
            kinds = set(map(_KIND, rows))
            if len(kinds) == 1:
                times.setdefault(kinds.pop(), []).extend(map(_TIME, rows))
                continue
            for row in rows:
                times.setdefault(row.aggregate_type, []).append(row.time)
        for kind, found in times.items():
            self._count(kind, found, now)

    def _count(self, kind: str, times: list[str], now: float) -> None:
        # Postgres has no text for infinity, which a writer may set.
        times = [time for time in times if time] if None in times else times
        times.sort()
        within = [len(times) - bisect_left(times, _text(now - limit)) for limit in BUCKETS]
        seconds = _sum(times[: bisect_right(times, _text(now))], now)
        self._delays.add(self._router.known_topic(kind) or "", [*within, len(times)], seconds)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        yield self._delays.family(
            "outbox_relay_publish_delay_seconds",
            "Time from the transaction that wrote an event (created_at) to Kafka's acknowledgement or commit, by the "
            "database's clock; without replays and copies of dead letters. "
            f'Topics beyond {MOST_TOPICS} share the label "".',
        )


def _text(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _sum(times: Sequence[str], now: float) -> float:
    """Return the sum of the delays of sorted times. A minute is parsed once; one that is no time counts as 0."""
    total, start = 0.0, 0
    while start < len(times):
        minute = times[start][:_TO_MINUTE]
        stop = bisect_left(times, minute + _AFTER_ANY_TIME, start)
        try:
            began = dt.datetime.fromisoformat(f"{minute}00+00:00").timestamp()
            seconds = sum(map(float, map(_SECONDS, times[start:stop])))
        except ValueError:
            pass
        else:
            total += (stop - start) * (now - began) - seconds
        start = stop
    return total
