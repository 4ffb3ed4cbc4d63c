"""Logs and counts what the worker's loop and the control loop report: at once, and again each minute while it lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from relay.core.health import WorkerHealth
from relay.core.lane import listed
from relay.core.marker import StateLost
from relay.core.ports import Claim, LaneLost, StandingError

log = structlog.get_logger("relay")

# A longer wait is logged as an error, and again each time this has passed.
_STANDING_SECONDS: Final = 60.0
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_EVENTS: Final = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000)


class TurnMetrics:
    """The metrics of this process's turns. Counters start at zero with each process.

    ``delays`` records how long events took until Kafka had acknowledged them, at a time of time.monotonic().
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.delays: Callable[[Sequence[Sequence[Claim]], float], None] | None = None
        self.events = Counter(
            "outbox_relay_events",
            "Events by result: published, refused (by Kafka, each attempt), dead (became a dead letter), lost "
            "(at-most-once only).",
            ["result"],
            registry=registry,
        )
        for result in ("published", "refused", "dead", "lost"):
            self.events.labels(result)
        self.turns = Histogram(
            "outbox_relay_turn_events", "Events that a turn sent.", buckets=_EVENTS, registry=registry
        )
        self.stages = Histogram(
            "outbox_relay_turn_seconds",
            "Duration of a turn's stage: read (also settles the previous turn, if both are one statement), publish "
            "(until Kafka's acknowledgement or commit), settle.",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        for stage in ("read", "publish", "settle"):
            self.stages.labels(stage)
        self.lanes_lost = Counter(
            "outbox_relay_lanes_lost", "Lanes that another relay took from this one.", registry=registry
        )
        self.most_events = Gauge(
            "outbox_relay_turn_limit_events",
            "Most events of a lane in a turn: relay.batch_size, or fewer after turns that were late or too large.",
            registry=registry,
        )
        self.most_lanes = Gauge(
            "outbox_relay_turn_limit_lanes",
            "Most lanes in a turn: all of this worker's, or fewer after such turns.",
            registry=registry,
        )
        self.last_turn = Gauge(
            "outbox_relay_last_turn_timestamp_seconds",
            "When the last turn ended; 0 before the first.",
            registry=registry,
        )


class Reminder:
    """Decides when a lasting problem is logged: when it begins or changes, and again each minute."""

    def __init__(self) -> None:
        self._last: tuple[str, float] | None = None

    def is_due(self, problem: str) -> bool:
        now = time.monotonic()
        if self._last is not None and self._last[0] == problem and now - self._last[1] < _STANDING_SECONDS:
            return False
        self._last = problem, now
        return True

    def over(self) -> None:
        """Record that the problem is over: the next one is logged at once."""
        self._last = None


class LoopReports:
    """Logs and counts the reports of the worker's loop and source, and records waits in the health. Never raises."""

    def __init__(self, health: WorkerHealth, meter: TurnMetrics) -> None:
        self.count = 0
        self._health = health
        self._meter = meter
        self._reminders: dict[int, Reminder] = {}

    def published(self, batches: Sequence[Sequence[Claim]], at: float) -> None:
        """Count events that Kafka had acknowledged at this time.monotonic(), and record how long they took."""
        count = sum(map(len, batches))
        self.count += count
        self._meter.events.labels("published").inc(count)
        if self._meter.delays is not None:
            self._meter.delays(batches, at)

    def turn(self, events: int, read_seconds: float, publish_seconds: float, settle_seconds: float) -> None:
        self._meter.turns.observe(events)
        for stage, seconds in (("read", read_seconds), ("publish", publish_seconds), ("settle", settle_seconds)):
            self._meter.stages.labels(stage).observe(seconds)
        self._meter.last_turn.set(time.time())

    def turn_limits(self, events: int, lanes: int) -> None:
        self._meter.most_events.set(events)
        self._meter.most_lanes.set(lanes)

    def refused(self, lane: int, claim: Claim, reason: str) -> None:
        self._meter.events.labels("refused").inc()
        log.warning("event refused", lane=lane, **_shown(claim), reason=reason)

    def dead(self, lane: int, claim: Claim) -> None:
        self._meter.events.labels("dead").inc()
        log.error("event is a dead letter now; see `outbox dead-letters show`", lane=lane, **_shown(claim))

    def lost(self, lane: int, count: int) -> None:
        self._meter.events.labels("lost").inc(count)
        log.error("events may be lost, as at-most-once allows", lane=lane, events=count)

    def unavailable(self, lanes: Collection[int], error: Exception, wait_seconds: float) -> None:
        """Log why lanes wait until they are retried, or that another relay has taken them."""
        if isinstance(error, LaneLost):
            self._forget(lanes)
            log.warning("lane lost", lanes=listed(lanes), error=str(error))
            return
        seconds = self._health.waits(lanes, error)
        if isinstance(error, StateLost | StandingError):
            # It waits until an operator has acted; then it goes on by itself.
            if self._is_due(lanes, str(error)):
                log.error("lane stopped", lanes=listed(lanes), error=str(error))
        elif seconds >= _STANDING_SECONDS:
            # Not by its text, which may differ each time.
            if self._is_due(lanes, type(error).__name__):
                log.error("still waiting", lanes=listed(lanes), error=str(error), seconds=round(seconds))
        else:
            log.warning(
                "waiting for a server", lanes=listed(lanes), error=str(error), wait_seconds=round(wait_seconds, 2)
            )

    def recovered(self, lanes: Collection[int]) -> None:
        """Log the first success after ``unavailable``."""
        self._forget(lanes)
        log.info("publishing again", lanes=listed(lanes))

    def _is_due(self, lanes: Collection[int], what: str) -> bool:
        """Return whether this was not logged within the last minute for one of the lanes."""
        due = [lane for lane in lanes if self._reminders.setdefault(lane, Reminder()).is_due(what)]
        return bool(due)

    def _forget(self, lanes: Collection[int]) -> None:
        self._health.goes_on(lanes)
        for lane in lanes:
            self._reminders.pop(lane, None)


class FailureLog:
    """Logs failures outside of the loop: the first one, and again every minute.

    ``text`` is the first message. If an operator is needed, it is an error from the beginning.
    """

    def __init__(self, text: str, **named: str) -> None:
        self._text = text
        self._named = named
        self._reminder = Reminder()

    def failed(self, error: Exception, seconds: float) -> None:
        """Log a failed attempt, if it is due. ``seconds``: the time since the first one."""
        # Not by its text, which may differ each time.
        if not self._reminder.is_due(type(error).__name__):
            return
        if seconds >= _STANDING_SECONDS:
            log.error("still waiting", **self._named, error=str(error), seconds=round(seconds))
        else:
            write = log.error if isinstance(error, StandingError) else log.warning
            write(self._text, **self._named, error=str(error))

    def over(self) -> None:
        self._reminder.over()


def _shown(claim: Claim) -> dict[str, str]:
    return {"event_id": claim.event_id, "aggregate_type": claim.aggregate_type, "event_type": claim.event_type}
