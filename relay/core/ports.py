"""The vocabulary of the loop: sources of events, publishers, and results.

Independent of Postgres and Kafka clients. A Source and a Publisher serve all lanes of one worker, from one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from outbox.errors import OutboxError, SchemaError
from outbox.event import DEAD_LETTER
from relay.core.lease import Lease
from relay.core.marker import StateLost

if TYPE_CHECKING:
    from relay.core.marker import Identity, Marker


class StreamLost(StateLost):
    """The slot may have missed events: the lanes stop until an operator acts (``outbox cdc status``)."""


class WalPosition(NamedTuple):
    """An event's position in the WAL, in commit order.

    ``commit_lsn`` is the byte position of its transaction's commit record, ``number`` its place among the events of
    that transaction, from 1; ``xid`` is the transaction's id, without the epoch.
    """

    commit_lsn: int
    number: int
    xid: int


class Claim(NamedTuple):
    """One event from a source, with its position there.

    A tuple, not a dataclass: a relay creates tens of thousands of these a second.

    ``position`` is the row's id. ``at`` is its position in the stream, if it came from there. ``lane`` is -1 where it
    is not needed. ``value`` is the payload's bytes, None for a tombstone. ``time`` is RFC 3339 in UTC. ``headers`` are
    the row's.
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
    def key(self) -> tuple[str, str]:
        """Return the aggregate, whose events keep their order."""
        return self.aggregate_type, self.aggregate_id

    @property
    def size(self) -> int:
        return 0 if self.value is None else len(self.value)


class RecordMetadata(NamedTuple):
    """The place of a published event on Kafka."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class UnsettledBatch:
    """Events of a lane that Kafka has acknowledged and Postgres has not settled, in order.

    They are of one turn, or of two (``then``). ``records`` are their places on Kafka, if they were requested.
    ``number`` is that of the lane's batch, as in its marker; None if they were sent without a transaction. Columns, not
    an object for each event: a relay settles tens of thousands a second.
    """

    rows: Sequence[Claim] = ()
    records: Sequence[RecordMetadata | None] = ()
    number: int | None = None

    def part(self, start: int, stop: int | None = None) -> UnsettledBatch:
        return UnsettledBatch(self.rows[start:stop], self.records[start:stop], self.number)

    def then(self, later: UnsettledBatch) -> UnsettledBatch:
        """Return the events of two turns, neither of which is in a Kafka transaction."""
        assert self.number is None
        assert later.number is None
        return UnsettledBatch([*self.rows, *later.rows], [*self.records, *later.records])

    @property
    def commit_lsn(self) -> int | None:
        """The position in the WAL up to which the lane is published, if its events came from there."""
        at = self.rows[-1].at if self.rows else None
        return None if at is None else at.commit_lsn

    def covers(self, other: UnsettledBatch) -> bool:
        """Return whether these include all rows of the other, of the same Kafka transaction if there is one."""
        rows = {claim.position for claim in self.rows}
        return bool(rows) and self.number == other.number and all(claim.position in rows for claim in other.rows)

    def __bool__(self) -> bool:
        return bool(self.rows) or self.number is not None


NOTHING: Final = UnsettledBatch()

Refusal = tuple[Claim, str]
"""An event that can't be published as it is, however long one waits, and why. Its key waits, or it is skipped."""

Kind = tuple[str, bool]
"""An aggregate type, and whether the event is a copy for a dead-letter topic: they determine an event's topic."""


def kind_of(claim: Claim) -> Kind:
    return claim.aggregate_type, DEAD_LETTER in (claim.headers or ())


Batches = Mapping[int, Sequence[Claim]]
"""Events by lane, each lane's in the order of publishing: those of a turn, or of one of its publishes."""

Confirm = Callable[[float], Mapping[int, OutboxError]]
"""Source.confirm: takes a deadline, returns the lanes that must not be published."""


class Unavailable(OutboxError):
    """The turn can't be completed now.

    Read again; wait first, except after BatchRefused.
    """


class BrokerUnavailable(Unavailable):
    """The brokers are unavailable, slow, or refuse."""


class DatabaseUnavailable(Unavailable):
    """The database is unavailable, slow, or accepts no writes at present."""


class StatementCutShort(DatabaseUnavailable):
    """A lock or a limit of time ended only the statement: the session is as good as before."""


class DeliveryTimeout(BrokerUnavailable):
    """The batch was not acknowledged in time. A smaller one is tried next."""


class BatchRefused(BrokerUnavailable):
    """The broker refuses the batch without naming the event. Smaller batches isolate it."""


class TopicUnusable(BrokerUnavailable):
    """A topic can't be written to: it is missing, forbidden, stalled, or its name is refused."""


class IdBusy(BrokerUnavailable):
    """The last transaction of a transactional.id can't be ended: most likely a partition has no leader.

    No producer gets the id before that. If the transaction was undecided, it is aborted.
    """


class NotFenced(BrokerUnavailable):
    """Former publishers of all lanes that were to join can't be fenced. Nothing was done with them.

    Lanes that have joined go on: the publisher is as good as before.
    """


class UndecidedTransaction(BrokerUnavailable):
    """A partition ends in a transaction that is neither committed nor aborted."""


class LaneLocked(DatabaseUnavailable):
    """Another session has locked the lane's row. The worker's other lanes continue."""

    def __init__(self, lane: int) -> None:
        super().__init__(
            f"lane {lane}: another session has its row in the table of lanes locked; find it in pg_stat_activity"
        )


class StandingError(SchemaError):
    """Postgres refuses a statement until data or schema change."""


class LaneLost(OutboxError):
    """Another relay holds the lane now: publish and settle nothing more."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a source's fetch for one turn.

    failed       lanes whose events must not be published now: with LaneLost another relay has the lane, with any other
                 error it has to be taken over again.
    known        False while nothing is known of events (the stream is not read yet): finding none is then no success.
    settling     lanes whose previous turn is settled while this one is published; the next ``settle`` has the result.
    unconfirmed  only ``Source.confirm`` shows whether the previous turn is settled, the leases are valid and the events
                 durable: no reader may see the events before.
    retried      lanes whose events have been refused before.
    """

    batches: Batches = field(default_factory=dict)
    failed: Mapping[int, OutboxError] = field(default_factory=dict)
    known: bool = True
    settling: Collection[int] = ()
    unconfirmed: bool = False
    retried: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of sending one lane's batch.

    ``published`` and ``refused`` are in the order of sending. An event in neither may or may not have reached Kafka,
    and is read and sent again. ``left_out``: events were not sent because their topic can't be written to.
    """

    published: UnsettledBatch = NOTHING
    refused: Sequence[Refusal] = ()
    left_out: bool = False

    @property
    def count(self) -> int:
        """Return the number of events of which it is known what became of them."""
        return len(self.published.rows) + len(self.refused)


@dataclass(frozen=True, slots=True)
class Completed:
    """The events were sent without a failure. Lanes without a receipt are read again.

    ``publisher_unusable``: the publisher must still not be used again.
    """

    receipts: Mapping[int, Receipt]
    publisher_unusable: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """Settle the receipts and read again, with a new publisher if this one is unusable.

    Retrying a single message would break the order. ``receipts`` have the events that are proven to be refused.
    ``blamed`` are the lanes of which the broker refused something, empty if unknown; ``likeliest`` are the positions,
    by lane, of the events that are most likely at fault. ``publisher_unusable``: False if none of the events is
    published, nor will be: the publisher goes on with the lanes that it has.
    """

    error: Unavailable
    receipts: Mapping[int, Receipt] = field(default_factory=dict)
    blamed: Collection[int] = ()
    likeliest: Mapping[int, int] = field(default_factory=dict)
    publisher_unusable: bool = True


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """None of the events is published, because these lanes were not confirmed. ``publisher_unusable`` as above."""

    lanes: Mapping[int, OutboxError]
    publisher_unusable: bool = False


Sent = Completed | Failed | Unconfirmed
"""The result of a publish. Closed: every match over it ends in assert_never."""


class TakeoverStore(Protocol):
    """The database's side of taking lanes over; see kafka/takeover.py."""

    def lane_count(self) -> int: ...

    def identity(self, leases: Sequence[Lease]) -> tuple[Identity | None, Mapping[int, OutboxError]]:
        """Return the database's identity, and the lanes that have another owner. No identity if all of them have."""

    def adopt_settled(
        self, leases: Sequence[Lease], markers: Mapping[int, Marker | None], own_id: str | None
    ) -> Mapping[int, tuple[Marker | None, Identity]]:
        """Adopt those of the lanes that have nothing to settle, in one step. The others are for ``adopt``."""

    def adopt(self, lease: Lease, marker: Marker | None, own_id: str | None) -> tuple[Marker | None, Identity]:
        """Settle the marker's events, and write our id into the lane's row. Returns the marker to go on from."""


class Source(Protocol):
    """The source of the events of a worker's lanes.

    The contract:

    1. ``fetch`` returns unsettled events in the order of publishing, and the same ones again until they are settled.
    2. They are durable, and the lane's lease was checked after they were read; if ``unconfirmed``, after ``confirm``.
    3. ``settle`` takes results in fetch order. Polling settles row by row, a WAL source only a contiguous prefix.
    4. Settling is durable after the next ``fetch`` or ``flush``; of lanes in ``settling`` after the next ``settle``.
    5. All raise Unavailable, SchemaError or StateLost; then the caller closes the source. After a SchemaError or
       StatementCutShort of ``settle`` or ``flush`` it may instead drop and hold the lane, and settle it later, or in
       smaller parts. ``fetch`` may also raise ConfigurationError, which ends the relay.
    """

    store: TakeoverStore

    def hold(self, lease: Lease) -> None:
        """Start reading a lane."""

    def drop(self, lane: int) -> None:
        """Forget a lane and its unsettled events."""

    def fetch(self, limits: Mapping[int, int]) -> Fetched:
        """Settle the turns before, and return up to ``limits[lane]`` events of each of these lanes."""

    def confirm(self, deadline: float) -> Mapping[int, OutboxError]:  # noqa: ARG002
        """Wait until readers may see the fetched events, at most until ``deadline`` by time.monotonic().

        Returns the lanes whose events they must not see, as in ``Fetched.failed``. Also raises Unavailable at the
        deadline. By default there are none: a fetch has settled everything.
        """
        return {}

    def leave_out(self, kinds: frozenset[Kind]) -> None:
        """Do not fetch events of these kinds from now on; see Publisher.unpublishable_kinds."""

    def go_on_without(self, lanes: Collection[int]) -> None:
        """Do not let other lanes wait for these, which have failed for long."""

    def pause(self, lanes: Collection[int]) -> Mapping[int, OutboxError]:  # noqa: ARG002
        """Do not let other lanes wait for these, which are paused: they are in no ``fetch`` until they are left out
        here. Called in each turn while lanes are paused. Returns as ``settle`` does; by default nothing has to be done.
        """
        return {}

    def settle(self, receipts: Mapping[int, Receipt]) -> Mapping[int, OutboxError]:
        """Record each lane's result; refused events at once. Returns lanes that failed, as in ``Fetched.failed``."""

    def flush(self, lanes: Collection[int]) -> Mapping[int, OutboxError]:
        """Settle these lanes durably. Returns as ``settle`` does."""

    def wait(self, lanes: Collection[int], seconds: float, stop: threading.Event) -> bool:
        """Wait for events of these lanes, at most about ``seconds``, or until ``stop``. Returns whether to fetch."""

    def close(self) -> None:
        """Close the connection. Safe to call twice."""


class Publisher(Protocol):
    """Publishes the events of a worker's lanes.

    Contract: ``publish`` sends each lane's events in order and waits until Kafka has acknowledged or failed each. If an
    event is refused or fails, no later event of the same key is published; a refused one delays no other key.
    (At-most-once, where nothing is read again, the key goes on after a refused one.)
    """

    def join(self, leases: Sequence[Lease]) -> Mapping[int, OutboxError]:
        """Take over lanes from their former publishers. Returns those that can't be, with the reasons.

        A lane must be joined before its events are published, by each new publisher. Raises Unavailable when no lane
        can be.
        """

    def publish(self, batches: Batches, confirm: Confirm | None = None) -> Sent:
        """Publish and wait for the acknowledgements. No reader may see any of it before ``confirm`` has returned."""

    def unpublishable_kinds(self) -> frozenset[Kind]:
        """Return the kinds of events that can't be published at present because of their topic."""

    def serve(self) -> None:
        """Do the client's other work, before each fetch and while idle. Raises Unavailable: then it is unusable."""

    def close(self) -> None:
        """Discard what is queued and disconnect. Safe to call twice."""
