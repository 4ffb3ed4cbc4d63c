"""The vocabulary of the loop: where events come from, where they go, and what became of each.

Nothing here names Postgres or Kafka. A Source and a Publisher serve all lanes of one worker and are used from one
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from outbox.errors import OutboxError
from relay.lease import Lease
from relay.marker import StateLost
from relay.position import WalPosition, has_row

if TYPE_CHECKING:
    from relay.marker import Identity, Marker


class StreamLost(StateLost):
    """Events may have passed the slot by: nothing is read until a person has looked (``outbox cdc status``)."""


class Claim(NamedTuple):
    """One event taken from a source, and where it stood there.

    A tuple and not a dataclass: a relay makes tens of thousands of these a second.
    ``position`` is the row's id; an event without a row has a negative number of its own.
    ``at`` is where it stands in the stream, if it came from there. ``lane`` is -1 where nobody needs it.
    ``value`` is the payload's bytes, None for a tombstone. ``time`` is RFC 3339 in UTC. ``headers`` are the row's.
    """

    position: int
    event_id: str
    aggregate_type: str
    aggregate_id: str
    event_type: str
    time: str
    value: bytes | None
    headers: Mapping[str, str] | None
    at: WalPosition | None = None
    lane: int = -1

    @property
    def has_row(self) -> bool:
        """Return whether the event is a row of ``events``. One that was written as a message has none."""
        return has_row(self.position)


class Published(NamedTuple):
    """Kafka has acknowledged the event: it may leave the outbox. Topic, partition and offset are there if asked for."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The event can't be published as it is; waiting for the broker would not help. Its key waits, or it is skipped."""

    reason: str


Outcome = Published | Refused
"""Closed: every match over it ends in assert_never."""

PUBLISHED: Final = Published()

Result = tuple[Claim, Outcome]

Kind = tuple[str, bool]
"""An aggregate type, and whether it is about copies for a dead-letter topic: what decides on an event's topic."""

Batches = Mapping[int, Sequence[Claim]]
"""The events of one turn by lane, each lane's in the order in which they are to be published."""


Confirm = Callable[[float], Mapping[int, OutboxError]]
"""Source.confirm."""


class Unavailable(OutboxError):
    """A server is away, slow or has no leader. No event is at fault: wait, connect anew, read again."""


class BrokerUnavailable(Unavailable):
    """It is the brokers that are away, slow, or refuse."""


class DatabaseUnavailable(Unavailable):
    """It is the database that is away, slow, or does not take writes just now."""


class Late(BrokerUnavailable):
    """The batch did not finish in the time that it may take. A smaller one will be tried."""


class BatchRefused(BrokerUnavailable):
    """The broker refuses something in the batch and does not say what. Smaller batches will show which event it is."""


class TopicUnusable(BrokerUnavailable):
    """A whole topic can't be written to: it is missing, forbidden, takes nothing, or its name is refused.

    No event is at fault.
    """

    def __init__(self, topic: str, text: str) -> None:
        super().__init__(text)
        self.topic = topic


class IdBusy(BrokerUnavailable):
    """The last transaction of a transactional.id can't be ended: a partition of it has no leader, most likely.

    No producer gets the id before that. What was not decided of it is aborted by now.
    """


class UndecidedTransaction(BrokerUnavailable):
    """A partition ends in a transaction that is neither committed nor aborted: what stands there can't be known yet.

    ``topic`` and ``partition`` name it; ``stable`` is the offset up to which all is decided, ``end`` where it ends.
    """

    def __init__(self, message: str, topic: str, partition: int, stable: int, end: int) -> None:
        super().__init__(message)
        self.topic = topic
        self.partition = partition
        self.stable = stable
        self.end = end

    @classmethod
    def at(cls, topic: str, partition: int, stable: int, end: int, seconds: float) -> UndecidedTransaction:
        """Return the error, which names the likely causes and the way out."""
        return cls(
            f"Kafka: {topic!r} partition {partition} is decided up to offset {stable} only and ends at {end}, for "
            f"{seconds:g} s now: a transaction there is neither committed nor aborted. Either another program has one "
            "open, or a broker that restarted has lost a transaction's markers (KAFKA-20734). Nothing is published "
            "before it is decided. Run `outbox relay reconcile`: it names the transaction and what ends it",
            topic,
            partition,
            stable,
            end,
        )


class LaneBusy(DatabaseUnavailable):
    """Another session has the lane's row locked. The lane waits, the worker's other lanes go on."""

    def __init__(self, lane: int) -> None:
        super().__init__(
            f"lane {lane}: another session has its row in the table of lanes locked; find it in pg_stat_activity"
        )


class LaneLost(OutboxError):
    """Another relay holds the lane now (its epoch has moved on). Publish and settle nothing more."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a source returned for one turn.

    ``failed`` are lanes whose events must not be published now: with LaneLost the lane is another relay's, with any
    other error it has to be taken over again. ``known`` is False while the source can't tell whether there are events
    (the stream is not read yet): finding nothing is then no success. ``settling`` are lanes whose turn before is being
    settled while these events are published; the ``settle`` that follows says what became of that. ``unconfirmed``
    says that all of that, leases and what is durable too, is known by ``Source.confirm`` only: no reader may see these
    events before.
    """

    batches: Batches = field(default_factory=dict)
    failed: Mapping[int, OutboxError] = field(default_factory=dict)
    known: bool = True
    settling: Collection[int] = ()
    unconfirmed: bool = False


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is known about one lane's batch after it was sent.

    ``results`` names the events whose fate is known, in the order in which they were sent. An event that is missing
    may or may not have reached Kafka, and is to be read and sent again. ``batch`` is the lane's number of the Kafka
    transaction that holds the published ones, if there was one. ``needs_rows`` says that nothing of the batch was
    published, because an event in it was not sent and others of it have no row: the source gives all of them rows.
    ``left_out`` says that events were not sent, because their topic can't be written to.
    """

    results: Sequence[Result] = ()
    batch: int | None = None
    needs_rows: bool = False
    left_out: bool = False


@dataclass(frozen=True, slots=True)
class Completed:
    """The turn was sent and nothing failed: a receipt for each lane. Those that it does not name are read again.

    With ``publisher_unusable`` the publisher must not be used again all the same.
    """

    receipts: Mapping[int, Receipt]
    publisher_unusable: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The publisher is of no further use: settle the receipts, close it, make a new one, read again.

    Retrying one message would reorder. ``blamed`` are the lanes of which the broker refused something, empty when it
    does not say which; ``likeliest`` are positions of events, by lane, that are at fault most likely.
    """

    error: Unavailable
    receipts: Mapping[int, Receipt] = field(default_factory=dict)
    blamed: Collection[int] = ()
    likeliest: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """Nothing of the turn is published: these lanes were not confirmed, for these reasons.

    ``publisher_unusable`` as in Completed: it had sent events by then.
    """

    lanes: Mapping[int, OutboxError]
    publisher_unusable: bool = False


Sent = Completed | Failed | Unconfirmed
"""What is known after a turn's batches were sent. Closed: every match over it ends in assert_never."""


class TakeoverStore(Protocol):
    """The database's side of taking lanes over; see kafka/takeover.py."""

    def lane_count(self) -> int:
        """Return how many lanes the outbox has."""
        ...

    def identity(self, leases: Sequence[Lease]) -> tuple[Identity | None, Mapping[int, OutboxError]]:
        """Return which database this is, and the lanes that have another owner. No identity when all of them have."""
        ...

    def adopt(self, lease: Lease, marker: Marker | None, own_id: str | None) -> tuple[Marker | None, Identity]:
        """Settle what the marker names, and write our id into the lane's row; return the marker to go on from."""
        ...


class Source(Protocol):
    """Where the events of a worker's lanes come from.

    Contract: ``fetch`` returns unsettled events in the order in which they are to be published, and returns the same
    ones again until they are settled; what it returns, Postgres can't lose any more, and the lane's lease was checked
    after it was read; or, where ``fetch`` says so, both hold after ``confirm``. ``settle`` takes results in fetch
    order; polling settles row by row, a source over the WAL can only confirm a contiguous prefix. What is settled is
    durable after the next ``fetch`` or ``flush``; or, where ``fetch`` says that it is under way, after the ``settle``
    behind that. All raise Unavailable or SchemaError, and after either the caller closes the source.
    """

    @property
    def store(self) -> TakeoverStore:
        """What takes lanes over in the database."""
        ...

    def hold(self, lease: Lease) -> None:
        """Begin to read a lane."""
        ...

    def drop(self, lane: int) -> None:
        """Forget a lane and what is pending of it."""
        ...

    def fetch(self, limits: Mapping[int, int]) -> Fetched:
        """Settle what is pending, and return up to ``limits[lane]`` events of each of these lanes."""
        ...

    def confirm(self, deadline: float) -> Mapping[int, OutboxError]:
        """Wait, until ``deadline`` by time.monotonic() at most, until what was fetched may be seen by readers.

        Return the lanes of which it must not be, with what ``Fetched.failed`` would hold. Raises Unavailable as well
        when time is up.
        """
        ...

    def leave_out(self, kinds: frozenset[Kind]) -> None:
        """Do not return events of these kinds from now on; see Publisher.paused."""
        ...

    def go_on_without(self, lanes: Collection[int]) -> None:
        """Do not let the others wait for these lanes, which have failed by themselves for long."""
        ...

    def settle(self, receipts: Mapping[int, Receipt]) -> Mapping[int, OutboxError]:
        """Record what became of each lane's batch; record the refused events at once.

        Return the lanes for which that failed, with what ``Fetched.failed`` would hold.
        """
        ...

    def flush(self, lanes: Collection[int]) -> Mapping[int, OutboxError]:
        """Make durable what was settled of these lanes. Return as ``settle`` does."""
        ...

    def wait(self, lanes: Collection[int], seconds: float, stop: threading.Event) -> bool:
        """Wait until these lanes may have events, about ``seconds`` at most, or until ``stop``.

        Return whether a fetch is worth it.
        """
        ...

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        ...


class Publisher(Protocol):
    """Where the events of a worker's lanes go.

    Contract: ``publish`` sends each lane's claims in order and waits until Kafka has acknowledged or failed each. If an
    event is refused or fails, no later event of the same key is Published; a refused one holds up no other key.
    (At-most-once, where nothing is read again, the key goes on after a refused one.)
    """

    def join(self, leases: Sequence[Lease]) -> Mapping[int, OutboxError]:
        """Take lanes over from whoever published them before. Return those that can't be, with the reason.

        A lane must have been joined before its events are published, and again after the publisher was made anew.
        Raise Unavailable when no lane can be.
        """
        ...

    def publish(self, batches: Batches, confirm: Confirm | None = None) -> Sent:
        """Publish and wait for the acknowledgements. Let no reader see any of it before ``confirm`` has returned."""
        ...

    def paused(self) -> frozenset[Kind]:
        """Return the kinds of events that can't be published for now because of their topic."""
        ...

    def serve(self) -> None:
        """Do what a client has to do now and then while nothing is published."""
        ...

    def close(self) -> None:
        """Drop whatever is still queued and disconnect. Safe to call twice."""
        ...
