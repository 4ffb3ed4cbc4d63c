"""At-most-once: rows are deleted, durably, before they are sent. Events that Kafka does not acknowledge may be lost.

| what happens                                  | what follows                                                      |
|-----------------------------------------------|-------------------------------------------------------------------|
| killed before the rows are deleted            | nothing was sent; the next holder of the lane reads them          |
| killed after that                             | at most one batch of each lane is lost, silently                  |
| Postgres refuses the DELETE of a lane's rows, | nothing of that lane is sent, and nothing of it is lost; the      |
| or a trigger or row security keeps them       | others go on                                                      |
| Postgres refuses it for all (a lock, a full   | nothing is sent or lost of lanes whose rows it still has; the     |
| disk, read only), and answers                 | rows are read again                                               |
| the result of the DELETE is lost              | the batch is not sent, and counted as lost                        |
| another session has locked the lane's row     | its rows stay, and are read again; the other lanes are sent       |
| it sleeps between the DELETE and the sending, | what has not been given to librdkafka is not sent, and what has   |
| past its lease                                | is dropped after ``delivery.timeout.ms``: lost, and counted. The  |
|                                               | next holder may have sent later events of the keys by then        |
| the machine is suspended then                 | the same; but librdkafka's clock stood still: what it has, it may |
|                                               | send in the moment before the publisher drops it                  |
| Kafka fails, or does not answer in time       | what is not acknowledged may be lost, and is counted              |
| an event is refused before it is sent         | a dead letter at once; later events of its key are sent, as they  |
|                                               | are not read again. Each of them that can't be is a dead letter   |
| the broker refuses a request                  | each event in it is a dead letter: it does not say which is at    |
|                                               | fault; later ones of their keys may be on Kafka by then           |
| Postgres is down when a dead letter is kept,  | it is lost, and counted; those of the other lanes are kept if     |
| or refuses it                                 | they can be                                                       |
| an event's topic is paused, missing, or is    | its row stays, and it is not read again before that ends          |
| known not to take messages                    |                                                                   |
| Kafka can't be asked for a topic              | nothing is deleted                                                |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from outbox.errors import OutboxError, SchemaError
from relay.core.ports import (
    NOTHING,
    Batches,
    Claim,
    Fetched,
    Receipt,
    StatementCutShort,
    Unavailable,
    UnsettledBatch,
    kind_of,
)
from relay.database import unavailable_on_error
from relay.polling.source import PollingSource
from relay.settle.retries import Failures


class AtMostOnceSource(PollingSource):
    """A polling source whose events leave the table when they are read. See ports.Source for the contract.

    ``on_lost`` is called with a lane and the number of events that may not have reached Kafka. Refused ones become dead
    letters at once. It never reads ahead, because rows are deleted when they are read. ``must_stay`` returns
    whether an event must, as its topic is paused or can't be written to: a publisher would find that out too late. It
    decides by the event's kind, and may raise Unavailable.
    """

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        schema: str,
        failures: Failures,
        *,
        on_lost: Callable[[int, int], None],
        must_stay: Callable[[Claim], bool] = lambda _: False,
        **options: Any,
    ) -> None:
        super().__init__(connect, schema, failures, overlap=False, **options)
        self.settlement.settles_first = True
        # The statement that deletes the rows checks the leases too. Behind a pooler it may run in another session, and
        # proves nothing about what was read before it.
        self._settles_with_read = self.session.pooled
        self._on_lost = on_lost
        self._must_stay = must_stay
        self._sent: dict[int, int] = {}

    def fetch(self, limits: Mapping[int, int]) -> Fetched:
        """Return the lowest events of these lanes, after deleting their rows."""
        fetched = self._publishable(super().fetch(limits))
        failed = self._delete(fetched.batches)
        refused = [failed[lane] for lane in limits if isinstance(failed.get(lane), SchemaError)]
        if refused and len(refused) == len(limits):
            # A failure of the whole turn, and not of a lane.
            raise refused[0]
        batches = {lane: claims for lane, claims in fetched.batches.items() if lane not in failed}
        for lane in batches:
            self.reader.note_due(lane, refused=False)
        return Fetched(batches, {**fetched.failed, **failed})

    def settle(self, receipts: Mapping[int, Receipt]) -> dict[int, OutboxError]:
        """Keep refused events as dead letters, and count lost ones: their rows are deleted already."""
        sent, self._sent = self._sent, {}
        failed: dict[int, OutboxError] = {}
        problem: Unavailable | None = None
        for lane, receipt in receipts.items():
            count, kept = sent.pop(lane, 0), receipt.count
            if refused := receipt.refused:
                try:
                    with unavailable_on_error(f"keeping dead letters of lane {lane}"):
                        self._failures.bury(self.connection, lane, refused)
                except (Unavailable, SchemaError) as error:
                    # Their rows are deleted, so they are lost. Those of the other lanes may not be.
                    kept = len(receipt.published.rows)
                    if isinstance(error, SchemaError | StatementCutShort):
                        failed[lane] = error
                    else:
                        problem = problem or error
                else:
                    for claim, _ in refused:
                        self._on_dead(lane, claim)
            if count > kept:
                self._on_lost(lane, count - kept)
        self._lose(sent)
        if problem is not None:
            raise problem
        return failed

    def close(self) -> None:
        self._lose(self._sent)
        super().close()

    def _delete(self, batches: Batches) -> dict[int, OutboxError]:
        """Delete the rows of these batches. Returns the lanes whose rows stay, so that they must not be sent."""
        for lane, claims in batches.items():
            self.settlement.lanes[lane].unsettled = UnsettledBatch(claims)
        # Set before the result arrives, which may be lost although the rows are deleted.
        self._sent = {lane: len(claims) for lane, claims in batches.items()}
        try:
            try:
                failed = self.settlement.settle(list(batches))
            except SchemaError:
                # Lanes whose rows have moved are settled by another statement: before it was refused, the one for the
                # other lanes may have been committed.
                failed = self._delete_each([lane for lane in batches if self.settlement.lanes[lane].unsettled])
        except Unavailable:
            if self.connection.info.transaction_status == TransactionStatus.IDLE:
                # The server has answered: only what is settled is deleted.
                lanes = self.settlement.lanes
                self._sent = {lane: count for lane, count in self._sent.items() if not lanes[lane].unsettled}
            raise
        for lane in failed:
            # Never sent: as unsettled rows they would be deleted with the next turn.
            self.settlement.lanes[lane].unsettled = NOTHING
            self._sent.pop(lane, None)
        return failed

    def _delete_each(self, lanes: Sequence[int]) -> dict[int, OutboxError]:
        """Delete the rows of lanes one by one, because they can't be deleted together. Returns those that failed."""
        failed: dict[int, OutboxError] = {}
        counts = {lane: self._sent.pop(lane) for lane in lanes}
        for lane in lanes:
            # Only now, as nothing is lost of lanes whose turn has not come.
            self._sent[lane] = counts[lane]
            try:
                failed |= self.settlement.settle([lane])
            except SchemaError as error:
                failed[lane] = error
            if lane in failed:
                del self._sent[lane]
        return failed

    def _publishable(self, fetched: Fetched) -> Fetched:
        """Return what may be published now. The rest stays in the table; the publisher says that it is left out."""
        kinds = {kind_of(claim): claim for claims in fetched.batches.values() for claim in claims}
        stay = {kind for kind, claim in kinds.items() if self._must_stay(claim)}
        kept = {lane: [c for c in claims if kind_of(c) not in stay] for lane, claims in fetched.batches.items()}
        return replace(fetched, batches={lane: claims for lane, claims in kept.items() if claims})

    def _lose(self, sent: Mapping[int, int]) -> None:
        for lane, count in sent.items():
            self._on_lost(lane, count)
        self._sent = {}
