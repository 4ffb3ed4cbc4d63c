"""A consumer's Prometheus metrics: base units, one prefix, no ids or keys as labels.

Message counts are stored in the sink and change with the effect, so they continue across restarts of a consumer.
Figures that need a server are requested at each scrape, with a limit of a few seconds. While a server is away its
figures are left out rather than repeated; ``…_up`` is then 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any, Final, Generic, TypeVar

import psycopg
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from psycopg.rows import dict_row

from outbox import __version__
from outbox.consumer.delays import APPLY_DELAY, APPLY_DELAY_HELP, TopicDelays
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.model import OffsetBounds, Partition
from outbox.consumer.postgres_errors import clear_errors, connect
from outbox.consumer.progress import progress
from outbox.consumer.statements import statement
from outbox.errors import OutboxError

T = TypeVar("T")

_PREFIX: Final = "outbox_consumer_"
_PATIENCE: Final = 4.0
_BUCKETS: Final = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_RESERVATIONS: Final = """
SELECT topic, part, count(*) AS unsettled, count(*) FILTER (WHERE state = 'stuck') AS stuck,
       greatest(0, extract(epoch FROM now()
           - min(next_attempt_at) FILTER (WHERE state <> 'stuck' AND NOT parked))::float8) AS overdue
  FROM {reservations} WHERE grp = %(grp)s AND settled_at IS NULL GROUP BY topic, part"""

# name: (column of progress, help)
_COUNTED: Final = {
    "messages_applied": ("applied", "Messages whose effect is in the sink, each once."),
    "messages_duplicate": ("duplicates", "Messages that were dropped: applied before, or not the newest."),
    "messages_dead": ("dead", "Messages that became dead letters."),
}
_GAUGES: Final = {
    "next_offset": ("next_offset", "The next offset to apply."),
    "last_progress_timestamp_seconds": ("moved", "When the partition's offset moved last, by the sink's clock."),
    "dead_letters_waiting": ("dead_letters", "Dead letters that wait for an operator."),
    "dead_letters_retrying": ("retrying", "Dead letters that the next round retries."),
}
_LOG: Final = {
    "log_end_offset": ("end", "Where a read_committed reader of Kafka would stop."),
    "uncommitted_messages": ("uncommitted", "Offsets behind an open transaction."),
    "lag_messages": ("lag", "Offsets that are committed in Kafka and not applied yet."),
}
_RESERVED: Final = {
    "reservations_unsettled": ("unsettled", "Calls to other systems that are neither confirmed nor cancelled."),
    "reservations_stuck": ("stuck", "Calls that wait for an operator."),
    "reservations_overdue_seconds": ("overdue", "How long the oldest due call has waited for a caller."),
}


class ConsumerMetrics:
    """A collector for one group. Register it with a registry, and pass the runner's reports to ``observe``.

    url, schema  the sink's database, and the schema of the consumers' tables there.
    kafka        librdkafka's options: addresses and credentials.
    """

    def __init__(self, group: str, topics: Sequence[str], url: str, schema: str, kafka: Mapping[str, str]) -> None:
        self._group = group
        self._topics = tuple(topics)
        self._url = url
        self._schema = schema
        self._kafka_options = dict(kafka)
        self._kafka: KafkaAdmin | None = None
        self._sink_query = _BackgroundQuery(self._query_sink, "sink")
        self._kafka_query = _BackgroundQuery(self._query_kafka, "kafka")
        self._lock = threading.Lock()
        self._read = 0
        self._rounds = [0] * (len(_BUCKETS) + 1)
        self._round_seconds = 0.0
        self._last_round: float | None = None
        self.delays = TopicDelays()
        """The delays of what this process has applied."""

    def observe(self, text: str, figures: Mapping[str, Any]) -> None:
        """Count a round that the runner reports; other reports are ignored."""
        if text != "round":
            return
        seconds = figures["round_seconds"]
        bucket = next((at for at, limit in enumerate(_BUCKETS) if seconds <= limit), len(_BUCKETS))
        with self._lock:
            self._read = figures["read"]
            self._rounds[bucket] += 1
            self._round_seconds += seconds
            self._last_round = time.time()

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that the registry does not collect all figures when this is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return all current figures."""
        self._sink_query.start()
        self._kafka_query.start()
        yield from self._of_this_process()
        sink = self._sink_query.wait()
        bounds = self._kafka_query.wait()
        yield self._gauge("postgres_up", "1 when the sink's database answered.", int(sink is not None))
        yield self._gauge("kafka_up", "1 when Kafka answered.", int(bounds is not None))
        if sink is not None:
            yield from self._from_sink(*sink)
        if bounds is not None:
            yield from self._from_kafka(bounds, sink[0] if sink is not None else None)

    def _of_this_process(self) -> Iterable[Metric]:
        with self._lock:
            read, rounds, seconds, last = self._read, list(self._rounds), self._round_seconds, self._last_round
        counter = CounterMetricFamily(f"{_PREFIX}messages_read", "Messages read by this process.", labels=["group"])
        counter.add_metric([self._group], read)
        yield counter
        build = GaugeMetricFamily(
            f"{_PREFIX}build_info", "Always 1: the version is a label.", labels=["group", "version"]
        )
        build.add_metric([self._group, __version__], 1)
        yield build
        histogram = HistogramMetricFamily(
            f"{_PREFIX}round_seconds", "Duration of a round, from its plan to its last commit.", labels=["group"]
        )
        limits = [*map(str, _BUCKETS), "+Inf"]
        histogram.add_metric([self._group], [(at, sum(rounds[: n + 1])) for n, at in enumerate(limits)], seconds)
        yield histogram
        yield self.delays.family(APPLY_DELAY, APPLY_DELAY_HELP, {"group": self._group})
        if last is not None:
            yield self._gauge("last_round_timestamp_seconds", "When the last round that had messages ended.", last)

    def _from_sink(self, rows: Sequence[Mapping[str, Any]], reserved: Sequence[Mapping[str, Any]]) -> Iterable[Metric]:
        if rows:
            yield self._gauge("generation", "How often the group was taken over.", rows[0]["generation"])
        parts = [row for row in rows if row["topic"] is not None]
        for name, (column, text) in _COUNTED.items():
            yield self._by_partition(CounterMetricFamily, name, text, parts, column)
        for name, (column, text) in _GAUGES.items():
            yield self._by_partition(GaugeMetricFamily, name, text, parts, column)
        for name, (column, text) in _RESERVED.items():
            yield self._by_partition(GaugeMetricFamily, name, text, reserved, column)

    def _from_kafka(
        self, bounds: Mapping[Partition, OffsetBounds], rows: Sequence[Mapping[str, Any]] | None
    ) -> Iterable[Metric]:
        at = {(row["topic"], row["part"]): row["next_offset"] for row in rows or ()}
        found = [
            {
                "topic": topic,
                "part": part,
                "end": there.end,
                "uncommitted": there.uncommitted or 0,
                # A partition that was never read begins where Kafka's log does.
                "lag": max(0, there.end - at.get((topic, part), there.first)),
            }
            for (topic, part), there in sorted(bounds.items())
        ]
        for name, (column, text) in _LOG.items():
            if column != "lag" or rows is not None:
                yield self._by_partition(GaugeMetricFamily, name, text, found, column)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=["group"])
        gauge.add_metric([self._group], value)
        return gauge

    def _by_partition(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        rows: Iterable[Mapping[str, Any]],
        column: str,
    ) -> Metric:
        family = kind(f"{_PREFIX}{name}", text, labels=["group", "topic", "partition"])
        for row in rows:
            family.add_metric([self._group, row["topic"], str(row["part"])], row[column])
        return family

    def _query_sink(self) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        query = statement(self._schema, _RESERVATIONS)
        with (
            connect(self._url, f"outbox metrics {self._group}", connect_seconds=5) as connection,
            clear_errors("reading the metrics"),
        ):
            rows = progress(connection, self._schema, self._group)
            with connection.cursor(row_factory=dict_row) as cursor:
                return rows, cursor.execute(query, {"grp": self._group}).fetchall()

    def _query_kafka(self) -> Mapping[Partition, OffsetBounds]:
        if self._kafka is None:
            self._kafka = KafkaAdmin(self._kafka_options)
        return self._kafka.snapshot(self._topics, high_watermarks=True, optional=lambda _: True).bounds


class _BackgroundQuery(Generic[T]):
    """Queries a server in a thread of its own, one query at a time, so that a hanging server does not hang a scrape."""

    def __init__(self, query: Callable[[], T], name: str) -> None:
        self._query = query
        self._name = name
        self._lock = threading.Lock()
        self._running: Future[T] | None = None

    def start(self) -> None:
        """Start the query, unless the last one is still running."""
        with self._lock:
            if self._running is not None and not self._running.done():
                return
            self._running = Future()
            threading.Thread(target=self._run, args=(self._running,), name=f"metrics-{self._name}", daemon=True).start()

    def wait(self) -> T | None:
        """Return the answer; None when the server is away."""
        running = self._running
        assert running is not None
        try:
            return running.result(_PATIENCE)
        except (NoAnswer, OutboxError, psycopg.Error):
            return None

    def _run(self, running: Future[T]) -> None:
        try:
            running.set_result(self._query())
        except BaseException as error:  # noqa: BLE001  raised by wait()
            running.set_exception(error)
