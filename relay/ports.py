"""The only vocabulary the loop knows: where events come from, where they go, and what became of each.

Nothing here names Postgres or Kafka. A Source and a Publisher serve one lane each and are used from one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from outbox.errors import OutboxError


class At(NamedTuple):
    """Where an event stands in the WAL, in the order in which transactions were committed.

    ``commit_lsn`` is the byte position of its transaction's commit record, ``number`` its place among the events of
    that transaction, from 1; ``xid`` is the transaction's id, without the epoch.
    """

    commit_lsn: int
    number: int
    xid: int


def up_to(at: At, end_lsn: int) -> At:
    """Give the place, or the last one that an event can have before ``end_lsn``: a number is an int in the table."""
    return at if at.commit_lsn < end_lsn else At(end_lsn - 1, 2**31 - 1, 0)


class Claim(NamedTuple):
    """One event taken from a source, and where it stood there.

    A tuple and not a dataclass: a relay makes tens of thousands of these a second.
    ``position`` is the row's id; an event without a row has a negative number of its own.
    ``at`` is where it stands in the stream, if it came from there.
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
    at: At | None = None


class Published(NamedTuple):
    """Kafka has acknowledged the event: it may leave the outbox. Where it stands is told when it is asked for."""

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


class Unavailable(OutboxError):
    """A server is away, slow or has no leader. No event is at fault: wait, connect anew, read again."""


class BatchRefused(Unavailable):
    """The broker refuses something in the batch and does not say what. Smaller batches will show which event it is."""


class LaneLost(OutboxError):
    """Another relay holds the lane now (its epoch has moved on). Publish and settle nothing more."""


class Source(Protocol):
    """Where a lane's events come from.

    Contract: ``fetch`` gives unsettled events in the order in which they are to be published, and gives the same
    ones again until they are settled; what it gives, Postgres can't lose any more. ``settle`` takes results in fetch
    order; polling settles row by row, a source over the WAL can only confirm a contiguous prefix. What is settled is
    durable after the next ``fetch`` or ``flush``. All raise Unavailable or LaneLost, and after either the caller closes
    the source.
    """

    def fetch(self, limit: int) -> Sequence[Claim] | None:
        """Settle what is pending, and give up to ``limit`` events; none when there is nothing to publish now.

        None, and no empty sequence, when the source can't tell yet: it is not a success.
        """
        ...

    def settle(self, receipt: Receipt) -> None:
        """Take note of what became of a batch: the published ones are done with, of the refused ones a note is kept."""
        ...

    def flush(self) -> None:
        """Make durable what was settled."""
        ...

    def close(self) -> None:
        """Let go of the connection. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is known after a batch was sent.

    ``results`` names the events whose fate is known, in the order in which they were sent. An event that is missing
    may or may not have reached Kafka, and is to be read and sent again. With a ``failure`` the publisher is of no
    further use: settle the results, close it, make a new one, read again. Retrying one message would reorder.
    ``batch`` is the number of the Kafka transaction that holds the published ones, if there was one; ``spent`` says
    that nothing failed and still the publisher must not be used again.
    """

    results: Sequence[Result]
    failure: Unavailable | None = None
    batch: int | None = None
    spent: bool = False


class Publisher(Protocol):
    """Where a lane's events go.

    Contract: ``publish`` sends the claims in order and waits until Kafka has acknowledged or failed each. If an event
    is refused or fails, no later event of the same key is Published; a refused one holds up no other key.
    """

    def publish(self, claims: Sequence[Claim]) -> Receipt:
        """Publish and wait for the acknowledgements."""
        ...

    def close(self) -> None:
        """Drop whatever is still queued and disconnect. Safe to call twice."""
        ...
