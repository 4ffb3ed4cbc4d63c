"""The metrics of the state of the whole outbox."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric

from relay import insights
from relay.core.pauses import ScopeKind
from relay.database import Connector
from relay.insights import LaneState, OutboxState, Verified
from relay.metrics import gauge, gauges
from relay.metrics.topics import MOST_TOPICS, TopicBacklog, TopicBacklogs, topic_metrics

_STALE_SECONDS: Final = 60.0


def outbox_metrics(
    state: OutboxState, topics: Mapping[str, TopicBacklog] | None, expected_relays: int
) -> Iterator[Metric]:
    """Yield the metrics of an outbox's state, and of its topics' backlogs; None where that takes too long."""
    if state.backlog is not None:
        yield gauge(
            "backlog_events",
            f"Events that wait to be published; estimated above {insights.COUNTED:,} in a lane.",
            state.backlog,
        )
    if state.counted and topics is not None and state.backlog is not None:
        yield gauge(
            "backlog_oldest_age_seconds",
            "Age of the oldest waiting event, except in paused lanes; 0 without any, absent while counting takes too "
            "long.",
            state.oldest_seconds or 0.0,
        )
        yield from topic_metrics(topics)
    if state.retrying is not None:
        yield gauge("events_retrying", "Events that failed and are retrying.", state.retrying)
    if state.dead_letters is not None:
        yield gauge("dead_letters", "Dead letters.", state.dead_letters)
    if state.blocking is not None:
        yield gauge("dead_letters_blocking", "Dead letters that block later events of their keys.", state.blocking)
    if state.scheduled is not None:
        yield gauge("scheduled_events", f"Scheduled events, counted up to {insights.COUNTED:,}.", state.scheduled)
        overdue = max(-(state.next_due_seconds or 0.0), 0.0)
        yield gauge("scheduled_overdue_seconds", "How long the first scheduled event is overdue.", overdue)
    yield gauge("lanes", "Lanes of the outbox.", len(state.lanes))
    yield gauge("lanes_unheld", "Lanes that no relay holds.", sum(not lane.held for lane in state.lanes))
    yield gauges(
        "pauses",
        "Pauses by what they cover.",
        ["scope"],
        (([kind], sum(one.scope.kind is kind for one in state.pauses)) for kind in ScopeKind),
    )
    if "relays" not in state.hidden:
        yield gauge("relays_alive", "Running relays.", sum(relay.alive for relay in state.relays))
        yield gauge("relays_expected", "Relays that should run: relay.expected_relays.", expected_relays)
    yield from _audit_metrics(state.verified)
    yield gauge(
        "last_look_timestamp_seconds", "When these metrics of the outbox were read from Postgres.", state.at.timestamp()
    )


def _audit_metrics(verified: Sequence[Verified]) -> Iterator[Metric]:
    """Yield the metrics of `outbox audit --follow`; none if it has never run."""
    if not verified:
        return
    shown = verified[:MOST_TOPICS]
    yield gauges(
        "audit_verified_until_timestamp_seconds",
        "Until when `outbox audit --follow` has verified the topic's events: on Kafka, and applied by every group, "
        "except for the counted differences.",
        ["topic"],
        (([one.topic], one.verified_until.timestamp()) for one in shown),
    )
    for name, text, column in (
        ("missing", "Events missing on Kafka or in a group.", "missing"),
        ("repeated", "Events with more than one record.", "repeated"),
        ("other_differences", "Events unknown, out of order, in a wrong partition, or changed.", "other"),
        ("skipped_minutes", "Minutes that could not be verified, for lack of records.", "skipped"),
    ):
        family = CounterMetricFamily(f"outbox_audit_{name}", text, labels=["topic"])
        for one in shown:
            family.add_metric([one.topic], getattr(one, column))
        yield family


class OutboxWatch:
    """Reads the state of the outbox from time to time, and exposes it while this relay holds the first lane.

    Every relay sees the same backlog; were each to show it, a sum over relays would count it as often. Nor does each
    count the rows: behind an old snapshot the dead ones cost as much, which many relays must not pay at the same time.
    """

    def __init__(
        self,
        connect: Connector,
        schema: str,
        instance: str,
        registry: CollectorRegistry,
        topics: TopicBacklogs,
        expected_relays: int = 1,
    ) -> None:
        self._expected = expected_relays
        self._connect = connect
        self._schema = schema
        self._instance = instance
        self._topics = topics
        self._state: OutboxState | None = None
        self._backlogs: Mapping[str, TopicBacklog] | None = None
        self._looked = 0.0
        registry.register(self)

    def look(self) -> None:
        """Read the state of the outbox, if it is ours to show. Raises Unavailable or SchemaError."""
        with self._connect() as connection:
            ours = self._holds_first(insights.read_lanes(connection, self._schema))
            state = insights.look_at_tables(connection, self._schema) if ours else None
            self._backlogs = self._topics.look(connection, state) if state is not None and state.counted else None
            self._state = state
        self._looked = time.monotonic()

    def shows(self) -> bool:
        """Return whether this relay shows the outbox: it holds the first lane, by a reading that is not stale."""
        return self._shown() is not None

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the last reading; none if it is stale, or if another relay holds the first lane."""
        if (state := self._shown()) is not None:
            yield from outbox_metrics(state, self._backlogs, self._expected)

    def _shown(self) -> OutboxState | None:
        state = self._state
        if state is None or time.monotonic() - self._looked > _STALE_SECONDS:
            return None
        return state if self._holds_first(state.lanes) else None

    def _holds_first(self, lanes: Sequence[LaneState]) -> bool:
        return bool(lanes) and lanes[0].held and lanes[0].owner == self._instance
