"""What a worker's lanes wait for, and whether the worker is ready: for metrics and ``/readyz``. No I/O.

A lane *waits* from the first attempt that failed until the first that succeeds. It *stands still* when it has waited
for longer than ``standing_seconds``, three leases: a restart of a broker or a failover of Postgres is over by then.

| what                                                          | shown as                          | ready           |
|---------------------------------------------------------------|-----------------------------------|-----------------|
| the relay has just started                                    |                                   | not yet         |
| a lane waits for less than three leases                       | ``lanes_waiting``, by reason      | yes             |
| a lane stands still                                           | the same                          | no              |
| the lease of a lane has run out, and could not be prolonged   | reason ``lease_expired``          | as any other    |
| no turn ends for three leases                                 | reason ``turn_unfinished``        | no              |
| Postgres does not answer the control loop, or refuses, for    | its reason; with no lane but      | no              |
| three leases                                                  | those that wait for it            |                 |
| the lanes were left to a relay that reaches the brokers       | ``ready`` is 0                    | no              |
| a transaction hangs in one of the outbox's topics             | reason ``hanging_transaction``    | no: what is     |
|                                                               |                                   | sent stays      |
|                                                               |                                   | hidden          |
| a standby without lanes                                       |                                   | yes             |
| events are refused, or are dead letters; a key waits          |                                   | yes: other keys |
| upkeep fails: the archive, a look at the slot                 | ``upkeep_wait_seconds``, by task  | yes: publishing |
|                                                               |                                   | goes on         |
| a topic is missing, forbidden, or takes nothing               | ``topics_unusable``               | yes: other      |
|                                                               |                                   | topics go on    |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from outbox.errors import SchemaError
from relay.lease import Lease
from relay.marker import StateLost
from relay.ports import BrokerUnavailable, DatabaseUnavailable, LaneBusy, StreamLost, UndecidedTransaction

STANDING_LEASES: Final = 3
"""A lane that has waited for so many leases stands still."""


class Reason(StrEnum):
    """Why a lane waits, or the worker as a whole."""

    KAFKA = "kafka_unavailable"
    """The brokers are away, slow, or refuse for now."""
    POSTGRES = "postgres_unavailable"
    """Postgres is away, slow, or takes no writes for now."""
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
    """The lease has run out and can't be prolonged, as for a locked row, and no other relay has taken the lane."""
    TURN_UNFINISHED = "turn_unfinished"
    """A turn does not end."""
    HANGING = "hanging_transaction"
    """No lane, but readers: a transaction hangs in a topic of events or in the state topic, and hides what lies behind
    it: ``outbox relay reconcile``."""
    OTHER = "other"
    """See the log."""


def reason_of(error: Exception) -> Reason:
    """Return the reason that an error of the loop stands for."""
    match error:
        case StreamLost():
            return Reason.STREAM_LOST
        case StateLost():
            return Reason.STATE_LOST
        case UndecidedTransaction():
            return Reason.UNDECIDED
        case LaneBusy():
            return Reason.LANE_LOCKED
        case BrokerUnavailable():
            return Reason.KAFKA
        case DatabaseUnavailable():
            return Reason.POSTGRES
        case SchemaError():
            return Reason.POSTGRES_REFUSES
        case _:
            return Reason.OTHER


@dataclass(frozen=True, slots=True)
class Wait:
    """The lanes that wait for one reason, and for how long the one that waits longest has waited.

    No lanes where the worker as a whole waits: it may hold none.
    """

    reason: Reason
    lanes: Sequence[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Health:
    """A worker at one moment."""

    ready: bool
    lanes: int
    waits: Sequence[Wait] = ()
    upkeep: Mapping[str, float] = field(default_factory=dict)
    """What fails beside publishing, and for how many seconds. It leaves the worker ready."""


@dataclass(frozen=True, slots=True)
class _Since:
    began: float
    reason: Reason


class WorkerHealth:
    """Keeps what the worker's loop and the control loop report. Safe to use from threads.

    ``standing_seconds`` is how long something may fail before the worker is not ready.
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
        """Record that an attempt of these lanes failed; return for how long one of them has waited at most."""
        now, reason = self._clock(), reason_of(error)
        with self._lock:
            for lane in lanes:
                known = self._waits.get(lane)
                # Whatever the reason is now: the lane has stood still since the first one.
                self._waits[lane] = _Since(now if known is None else known.began, reason)
            return max((now - self._waits[lane].began for lane in lanes), default=0.0)

    def goes_on(self, lanes: Collection[int]) -> None:
        """Record that these lanes wait no more, or are not ours."""
        with self._lock:
            for lane in lanes:
                self._waits.pop(lane, None)

    def control_waits(self, error: Exception) -> float:
        """Record that the control loop has failed; return for how long it has."""
        now, known = self._clock(), self._control
        self._control = _Since(now if known is None else known.began, reason_of(error))
        return now - self._control.began

    def upkeep_waits(self, name: str) -> float:
        """Record that something beside publishing has failed; return for how long it has."""
        now = self._clock()
        with self._lock:
            return now - self._upkeep.setdefault(name, now)

    def upkeep_goes_on(self, name: str) -> None:
        """Record that it has succeeded."""
        with self._lock:
            self._upkeep.pop(name, None)

    def ticked(self, *, started: bool) -> None:
        """Record that the control loop has reached Postgres. ``started``: the lanes it holds, if any, are published.

        Once started, a relay is so for good: a standby is ready, and stays so while it takes lanes over.
        """
        self._control = None
        self._ticked_at = self._clock()
        self._started = self._started or started

    def look(
        self, held: Sequence[Lease], turned_at: float, *, away: bool = False, besides: Sequence[Wait] = ()
    ) -> Health:
        """Return the worker's health. The last turn of its loop ended at ``turned_at``, by the same clock.

        ``away``: its lanes were left to a relay that reaches the brokers. ``besides`` stands still besides the lanes.
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
            hanging = _Since(turned_at, Reason.TURN_UNFINISHED)
            waits = {lease.lane: waits.get(lease.lane, hanging) for lease in held}
        all_waits = [Wait(since.reason, [lane], now - since.began) for lane, since in waits.items()]
        if (control := self._control) is not None:
            all_waits.append(Wait(control.reason, [], now - control.began))
        found = _by_reason([*all_waits, *besides])
        ticks = self._ticked_at is not None and now - self._ticked_at < self._standing
        stands = hangs or bool(besides) or any(wait.seconds >= self._standing for wait in found)
        return Health(self._started and ticks and not stands and not away, len(held), found, upkeep)


def _by_reason(waits: Sequence[Wait]) -> list[Wait]:
    by_reason: dict[Reason, list[Wait]] = {}
    for wait in waits:
        by_reason.setdefault(wait.reason, []).append(wait)
    return [
        Wait(reason, sorted(lane for wait in some for lane in wait.lanes), max(wait.seconds for wait in some))
        for reason, some in sorted(by_reason.items())
    ]
