"""Settles batches of the stream by row and position, or moves them to the table.

Events that can't be published as they are move to the table. For that, events without a row get one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

import orjson

from outbox.errors import OutboxError
from relay.failpoints import failpoint
from relay.polling.source import PollingSource
from relay.ports import Claim, Published, Receipt, Refused
from relay.retries import Failures
from relay.settlement import UnsettledBatch
from relay.wal.channel import Channel
from relay.wal.events import UNREADABLE
from relay.wal.lane import InTable, StreamLane
from relay.wal.queries import StreamQueries


class StreamSettling:
    """Settles events from the stream. ``on_dead`` is called with a lane and an event that is a dead letter now."""

    def __init__(
        self, table: PollingSource, queries: StreamQueries, failures: Failures, on_dead: Callable[[int, Claim], None]
    ) -> None:
        self._table = table
        self._connection = table.connection
        self._settlement = table.settlement
        self._queries = queries
        self._failures = failures
        self._on_dead = on_dead

    def settle(self, lane: StreamLane, batch: Sequence[Claim], receipt: Receipt) -> OutboxError | None:
        """Record the result of a batch. Returns the lane's error, if it has one.

        Refused events move the lane to the table. So does a batch of which the publisher has published nothing because
        it can't be published as it is.
        """
        number = lane.lease.lane
        settlement = self._settlement.lanes[number]
        if len(receipt.results) == len(batch) and all(isinstance(outcome, Published) for _, outcome in receipt.results):
            settlement.pending = UnsettledBatch.of(receipt, batch[-1].at)
            return None
        refused: list[tuple[Claim, str]] = []
        published = set()
        for claim, outcome in receipt.results:
            match outcome:
                case Published():
                    published.add(claim.position)
                case Refused():
                    refused.append((claim, outcome.reason))
                case _:
                    assert_never(outcome)
        if refused or receipt.needs_rows or receipt.left_out:
            return self._resolve(lane, batch, receipt, published, refused)
        if receipt.results or receipt.batch is not None:
            reached = None
            for claim in batch:
                if claim.position not in published:
                    break
                reached = claim.at
            settlement.pending = UnsettledBatch.of(receipt, reached)
        # Events not known to be published come again. The published ones have to be settled before that.
        failed = self._settlement.settle([number]) if settlement.pending else {}
        if lane.channel is not None:
            lane.channel.rewind((-1, -1), ())
        return failed.get(number)

    def _resolve(
        self,
        lane: StreamLane,
        batch: Sequence[Claim],
        receipt: Receipt,
        published: set[int],
        refused: list[tuple[Claim, str]],
    ) -> OutboxError | None:
        """Settle published events, record refused ones, and leave the rest of the batch to the table."""
        number = lane.lease.lane
        left = [claim for claim in batch if not claim.has_row and claim.position not in published]
        dead: list[Claim] = []

        def leave() -> None:
            rows = {claim.position: row for claim, row in zip(left, self._spilled(left), strict=True)}
            moved = [(rows.get(claim.position, claim), reason) for claim, reason in refused]
            if moved:
                dead.extend(self._failures.record(self._connection, number, moved))
            self._connection.execute(self._queries.set_streaming, {"streaming": False, **lane.key})

        pending = replace(UnsettledBatch.of(receipt, batch[-1].at), claims=())
        error = self._settle_with(lane, pending, f"settling lane {number}", leave)
        if error is not None:
            return error
        lane.state = InTable()
        self._table.reader.read_all_again(number)
        assert lane.channel is not None
        lane.channel.done(batch)
        for claim in dead:
            self._on_dead(number, claim)
        return None

    def bury(self, lane: StreamLane, channel: Channel, claim: Claim) -> None:
        """Keep an unreadable event as a dead letter."""
        self.write_to_table(lane, [claim])
        channel.done([claim])

    def write_to_table(self, lane: StreamLane, claims: Sequence[Claim]) -> None:
        """Write rows for events without one, and advance the lane's position to the last of the claims.

        Pending events must have been settled before.
        """
        number = lane.lease.lane
        unreadable: list[Claim] = []

        def write() -> None:
            rows = self._spilled([claim for claim in claims if not claim.has_row])
            unreadable.extend(row for row in rows if row.aggregate_type == UNREADABLE)
            if unreadable:
                self._failures.bury_at_once(self._connection, number, unreadable)

        error = self._settle_with(lane, UnsettledBatch(at=claims[-1].at), f"writing events of lane {number}", write)
        if error is not None:
            raise error
        failpoint("stream.spilled")
        for row in unreadable:
            self._on_dead(number, row)

    def _settle_with(
        self, lane: StreamLane, pending: UnsettledBatch, doing: str, more: Callable[[], None]
    ) -> OutboxError | None:
        """Settle ``pending``, and call ``more`` in the same transaction. Returns the error if the lane is not held.

        If that fails, ``pending`` is discarded: its position must not be settled without the rest.
        """
        settled = self._settlement.lanes[lane.lease.lane]
        before, settled.pending = settled.pending, pending
        try:
            error = self._table.session.settle_with(lane.lease.lane, doing, more)
        except BaseException:
            settled.pending = before
            raise
        if error is not None:
            settled.pending = before
        return error

    def _spilled(self, claims: Sequence[Claim]) -> list[Claim]:
        if not claims:
            return []
        cursor = self._connection.execute(
            self._queries.spill,
            {
                "event_ids": [claim.event_id for claim in claims],
                "kinds": [claim.aggregate_type for claim in claims],
                "keys": [claim.aggregate_id for claim in claims],
                "types": [claim.event_type for claim in claims],
                "payloads": [claim.value for claim in claims],
                "headers": [
                    None if claim.headers is None else orjson.dumps(claim.headers).decode() for claim in claims
                ],
                "times": [claim.time or None for claim in claims],
            },
        )
        return [claim._replace(position=row[0], at=None) for claim, row in zip(claims, cursor.fetchall(), strict=True)]
