"""How long events take from their transaction to Kafka, or to the sink: histograms by topic.

The relay counts whole turns. A consumer takes the times of a batch's messages from their headers before the batch is
applied, and counts them once its transaction is committed. It takes a sample of a large batch: messages come in the
order of their partition, so every n-th one stands for n with an error of less than one n-th message a bucket.
"""

from __future__ import annotations

import datetime as dt
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from outbox.event import CE_TIME, DEAD_LETTER, REPLAY

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily

    from outbox.consumer.messages import Headers

BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
"""Limits of objectives that outboxes have, from 5 ms to an hour."""
MOST_TOPICS: Final = 100
"""Further topics share one histogram, with the topic ""."""
SAMPLED: Final = 128
"""Of how many messages of a batch the times are read at most."""
APPLY_DELAY: Final = "outbox_consumer_apply_delay_seconds"
APPLY_DELAY_HELP: Final = (
    "Time from the transaction that wrote an event (ce_time) to the COMMIT of its effect, by the sink's clock; without "
    "replays, copies of dead letters, and dead letters that are retried. Of more than "
    f"{SAMPLED} messages of a batch a sample stands for all. "
    f'Beyond {MOST_TOPICS} topics the others share the topic "".'
)


class WrittenAt(NamedTuple):
    """When the events of some messages were written, in seconds since 1970. Each time stands for ``each`` messages."""

    each: int
    seconds: tuple[float, ...]


def sampled(messages: int) -> slice:
    """Return which of so many messages to look at: at most SAMPLED, evenly spread."""
    each = -(-messages // SAMPLED) or 1
    return slice((each - 1) // 2, None, each)


def written_at(headers: Sequence[Headers], each: int = 1) -> WrittenAt:
    """Return when the events of messages with these headers were written. Messages that do not say it are left out.

    Copies for dead-letter topics and replays are left out: they keep the time of the first publishing.
    """
    return WrittenAt(each, tuple(seconds for one in headers if (seconds := _seconds(one)) is not None))


def _seconds(headers: Headers) -> float | None:
    # Of several headers with the same name any may count: this is for a metric.
    named = dict(headers)
    value = named.get(CE_TIME)
    if value is None or DEAD_LETTER in named or REPLAY in named:
        return None
    try:
        when = dt.datetime.fromisoformat(value.decode())
        return when.timestamp() if when.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


@dataclass(slots=True)
class _Delays:
    """The events of a topic: how many of each bucket, the last one without a limit, and the sum of their delays."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    seconds: float = 0.0


class TopicDelays:
    """A histogram for each topic. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._topics: dict[str, _Delays] = {}

    def add(self, topic: str, within: Sequence[int], seconds: float) -> None:
        """Add events: how many were within each of BUCKETS and of all, and the sum of their delays."""
        with self._lock:
            if topic not in self._topics and len(self._topics) >= MOST_TOPICS:
                topic = ""
            delays = self._topics.setdefault(topic, _Delays())
            for bucket, count in enumerate(within):
                delays.counts[bucket] += count
            delays.seconds += seconds

    def observe(self, topic: str, written: WrittenAt, now: float | None) -> None:
        """Add events that were written then, and are done now. Without a known time, add none.

        An event of the future, whose writer has set its time, is done at once.
        """
        if now is None or not written.seconds:
            return
        delays = [max(now - at, 0.0) for at in written.seconds]
        buckets = [0] * (len(BUCKETS) + 1)
        for delay in delays:
            buckets[bisect_left(BUCKETS, delay)] += written.each
        self.add(topic, list(accumulate(buckets)), written.each * sum(delays))

    def add_all(self, other: TopicDelays) -> None:
        """Add what another one has now."""
        with other._lock:
            now = [(topic, list(delays.counts), delays.seconds) for topic, delays in other._topics.items()]
        for each in now:
            self.add(*each)

    def family(self, name: str, text: str, labels: Mapping[str, str] | None = None) -> HistogramMetricFamily:
        """Return the histograms for Prometheus, with these labels and ``topic``."""
        from prometheus_client.core import HistogramMetricFamily

        labels = labels or {}
        found = HistogramMetricFamily(name, text, labels=[*labels, "topic"])
        self.add_to(found, *labels.values())
        return found

    def add_to(self, family: HistogramMetricFamily, *labels: str) -> None:
        """Add the histograms to a family, with these values of its labels besides ``topic``."""
        limits = [*(str(float(limit)) for limit in BUCKETS), "+Inf"]
        with self._lock:
            for topic, delays in self._topics.items():
                buckets = list(zip(limits, map(float, delays.counts), strict=True))
                family.add_metric([*labels, topic], buckets, delays.seconds)
