"""The reasons why a worker's lanes wait, and whether the worker is ready: for metrics and ``/readyz``. No I/O.

A lane *waits* from the first failed attempt until the first that succeeds. It *stands still* when it has waited for
longer than ``standing_seconds``, three leases: by then a restart of a broker or a failover of Postgres is over.

| what                                                       | shown as                         | ready           |
|------------------------------------------------------------|----------------------------------|-----------------|
| the relay has just started                                 |                                  | not yet         |
| a lane waits for less than three leases                    | ``lanes_waiting``, by reason     | yes             |
| a lane stands still                                        | the same                         | no              |
| the lease of a lane has expired, and could not be renewed  | reason ``lease_expired``         | as any other    |
| no turn ends for three leases                              | reason ``turn_unfinished``       | no              |
| Postgres does not answer the control loop, or refuses, for | its reason; with no lane but     | no              |
| three leases                                               | those that wait for it           |                 |
| the lanes were released for a relay that reaches Kafka     | ``ready`` is 0                   | no              |
| a transaction hangs in one of the outbox's topics          | reason ``hanging_transaction``   | no: what is     |
|                                                            |                                  | sent stays      |
|                                                            |                                  | hidden          |
| a standby without lanes                                    |                                  | yes             |
| the lanes are read from the other source                   | the check ``source``             | yes: others may |
|                                                            |                                  | read them       |
| events are refused, or are dead letters; a key waits       |                                  | yes: other keys |
| upkeep fails: the archive, the check of the slot           | ``upkeep_wait_seconds``, by task | yes: publishing |
|                                                            |                                  | goes on         |
| a topic is missing, forbidden, or takes nothing            | ``topics_unusable``              | yes: other      |
|                                                            |                                  | topics go on    |
| a topic got more partitions (exactly-once)                 | ``topics_grown``                 | yes: what they  |
|                                                            |                                  | have is sent    |
| an operator has paused lanes or topics                     | ``lanes_paused``,                | yes             |
|                                                            | ``topics_paused``                |                 |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from outbox._app.prometheus import Check
from outbox.errors import SchemaError
from relay.core.lease import Lease
from relay.core.marker import StateLost
from relay.core.ports import BrokerUnavailable, DatabaseUnavailable, LaneLocked, StreamLost, UndecidedTransaction

STANDING_LEASES: Final = 3
"""A lane that has waited for this many leases stands still."""


class Reason(StrEnum):
    """Why a lane, or the whole worker, waits."""

    KAFKA = "kafka_unavailable"
    """The brokers are unavailable, slow, or temporarily refuse."""
    POSTGRES = "postgres_unavailable"
    """Postgres is unavailable, slow, or temporarily accepts no writes."""
    POSTGRES_REFUSES = "postgres_refuses"
    """Postgres answers and refuses: a constraint, a trigger, missing rights or tables."""
    STATE_LOST = "state_lost"
    """Table and marker contradict each other: ``outbox relay reconcile``."""
    STREAM_LOST = "stream_lost"
    """The replication slot has a gap: ``outbox cdc status``."""
    UNDECIDED = "undecided_transaction"
    """Kafka holds a transaction that is neither committed nor aborted: ``outbox relay reconcile``."""
    LANE_LOCKED = "lane_locked"
    """Another session has the lane's row locked."""
    LEASE_EXPIRED = "lease_expired"
    """The lease has expired and can't be renewed, perhaps because its row is locked."""
    TURN_UNFINISHED = "turn_unfinished"
    """A turn does not end."""
    HANGING = "hanging_transaction"
    """Readers wait, not a lane: a transaction hangs, and hides the records behind it: ``outbox relay reconcile``."""
    OTHER = "other"
    """See the log."""


# The first that fits: some are kinds of others.
_REASONS: Final = (
    (StreamLost, Reason.STREAM_LOST),
    (StateLost, Reason.STATE_LOST),
    (UndecidedTransaction, Reason.UNDECIDED),
    (LaneLocked, Reason.LANE_LOCKED),
    (BrokerUnavailable, Reason.KAFKA),
    (DatabaseUnavailable, Reason.POSTGRES),
    (SchemaError, Reason.POSTGRES_REFUSES),
)


def reason_of(error: Exception) -> Reason:
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), Reason.OTHER)


@dataclass(frozen=True, slots=True)
class Wait:
    """The lanes that wait for one reason (none: the whole worker), and how long the first of them has waited."""

    reason: Reason
    lanes: Sequence[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Health:
    ready: bool
    lanes: int
    waits: Sequence[Wait] = ()
    upkeep: Mapping[str, float] = field(default_factory=dict)
    """Failing tasks other than publishing, with how many seconds each has failed. They leave the worker ready."""
    checks: Sequence[Check] = ()
    """What was looked at, for ``/readyz?verbose``."""
    hanging_partitions: int = 0
    """Those in which a transaction hangs."""
    unusable_topics: Collection[str] = ()
    grown_topics: Collection[str] = ()
    paused_lanes: Sequence[int] = ()
    paused_topics: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Since:
    began: float
    reason: Reason


class WorkerHealth:
    """Collects the reports of the worker's loop and the control loop. Thread-safe.

    ``standing_seconds`` is how long something may fail until the worker is no longer ready.
    """

    def __init__(self, standing_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._standing = standing_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._waits: dict[int, _Since] = {}
        self._control: _Since | None = None
        self._upkeep: dict[str, float] = {}
        self._ticked_at: float | None = None
        self._started = False

    def waits(self, lanes: Collection[int], error: Exception) -> float:
        """Record a failed attempt of these lanes. Returns the longest time that one of them has waited."""
        now, reason = self._clock(), reason_of(error)
        with self._lock:
            for lane in lanes:
                known = self._waits.get(lane)
                # Even if the reason has changed, the lane has waited since the first one.
                self._waits[lane] = _Since(now if known is None else known.began, reason)
            return max((now - self._waits[lane].began for lane in lanes), default=0.0)

    def goes_on(self, lanes: Collection[int]) -> None:
        """Record that these lanes no longer wait, or are no longer ours."""
        with self._lock:
            for lane in lanes:
                self._waits.pop(lane, None)

    def control_waits(self, error: Exception) -> float:
        """Record that the control loop failed. Returns for how many seconds it has been failing."""
        now, known = self._clock(), self._control
        self._control = _Since(now if known is None else known.began, reason_of(error))
        return now - self._control.began

    def upkeep_waits(self, name: str) -> float:
        """Record that a task other than publishing failed. Returns for how many seconds it has been failing."""
        now = self._clock()
        with self._lock:
            return now - self._upkeep.setdefault(name, now)

    def upkeep_goes_on(self, name: str) -> None:
        with self._lock:
            self._upkeep.pop(name, None)

    def ticked(self, *, started: bool) -> bool:
        """Record that the control loop has reached Postgres. Returns whether it had failed before.

        ``started``: the lanes it holds, if any, are being published. A relay never goes back to not started: a standby
        is ready, and stays so while it takes over lanes.
        """
        failed, self._control = self._control is not None, None
        self._ticked_at = self._clock()
        self._started = self._started or started
        return failed

    def look(
        self,
        held: Sequence[Lease],
        turned_at: float,
        *,
        away: bool = False,
        hanging: Sequence[float] = (),
        topics: Mapping[str, str] = {},
        grown: Mapping[str, str] = {},
        source_problem: str | None = None,
    ) -> Health:
        """Return the worker's health. ``turned_at`` is when the last turn of its loop ended, by the same clock.

        ``away``: it released its lanes for a relay that reaches the brokers. ``hanging``: for how many seconds a
        transaction has hung, for each partition with one. ``topics``: those that can't be written to, with the reasons.
        ``grown``: those that got more partitions. ``source_problem``: why a relay of this source has no lanes to take.
        """
        now = self._clock()
        with self._lock:
            waits = {lease.lane: self._waits[lease.lane] for lease in held if lease.lane in self._waits}
            upkeep = {name: now - began for name, began in self._upkeep.items()}
        for lease in held:
            if (left := lease.remaining_seconds) < 0 and lease.lane not in waits:
                waits[lease.lane] = _Since(now + left, Reason.LEASE_EXPIRED)
        hangs = now - turned_at >= self._standing
        if hangs:
            unfinished = _Since(turned_at, Reason.TURN_UNFINISHED)
            waits = {lease.lane: waits.get(lease.lane, unfinished) for lease in held}
        lane_waits = [Wait(since.reason, [lane], now - since.began) for lane, since in waits.items()]
        # Read once: the control loop may reach Postgres meanwhile.
        control = None if (since := self._control) is None else Wait(since.reason, [], now - since.began)
        hidden = Wait(Reason.HANGING, [], max(hanging)) if hanging else None
        checks = [
            Check("started", self._started, "" if self._started else "no turn has ended without a failure yet"),
            self._control_check(control, now),
            Check("turns", not hangs, f"none has ended for {now - turned_at:.0f} s" if hangs else ""),
            Check("takes-part", not away, "its lanes are left to a relay that reaches Kafka" if away else ""),
            *self._lane_checks([lease.lane for lease in held], lane_waits),
            Check("transactions", passed=hidden is None, text="" if hidden is None else _text(hidden)),
            *_uncounted("upkeep", {name: f"for {seconds:.0f} s" for name, seconds in upkeep.items()}),
            *_uncounted("topic", topics),
            *(_uncounted("partitions", grown) if grown else []),
            *([Check("source", passed=False, text=source_problem, counts=False)] if source_problem else []),
        ]
        ready = all(check.passed for check in checks if check.counts)
        found = _by_reason([*lane_waits, *(wait for wait in (control, hidden) if wait is not None)])
        return Health(ready, len(held), found, upkeep, checks, len(hanging), list(topics), list(grown))

    def _control_check(self, wait: Wait | None, now: float) -> Check:
        if self._ticked_at is None:
            return Check(
                "control-loop", passed=False, text="has not reached Postgres yet" if wait is None else _text(wait)
            )
        silent = now - self._ticked_at
        if wait is None and silent >= self._standing:
            return Check("control-loop", passed=False, text=f"has not reached Postgres for {silent:.0f} s")
        passed = silent < self._standing and (wait is None or wait.seconds < self._standing)
        return Check("control-loop", passed, "" if wait is None else _text(wait))

    def _lane_checks(self, lanes: Sequence[int], waits: Sequence[Wait]) -> list[Check]:
        """Return one check for each lane: it fails when the lane stands still. A standby has none."""
        waiting = {wait.lanes[0]: wait for wait in waits}
        if not lanes:
            return [Check("lanes", passed=True, text="a standby holds none")]
        return [
            _ok(f"lane-{lane}")
            if (wait := waiting.get(lane)) is None
            else Check(f"lane-{lane}", wait.seconds < self._standing, _text(wait))
            for lane in sorted(lanes)
        ]


def _ok(name: str) -> Check:
    return Check(name, passed=True)


def _text(wait: Wait) -> str:
    return f"{wait.reason} for {wait.seconds:.0f} s"


def _uncounted(name: str, failing: Mapping[str, str]) -> list[Check]:
    """Return a check for each of these that fails, which leaves the worker ready; one that passes if none does."""
    found = [Check(f"{name}-{each}", passed=False, text=text, counts=False) for each, text in sorted(failing.items())]
    return found or [_ok(name)]


def _by_reason(waits: Sequence[Wait]) -> list[Wait]:
    by_reason: dict[Reason, list[Wait]] = {}
    for wait in waits:
        by_reason.setdefault(wait.reason, []).append(wait)
    return [
        Wait(reason, sorted(lane for wait in some for lane in wait.lanes), max(wait.seconds for wait in some))
        for reason, some in sorted(by_reason.items())
    ]
