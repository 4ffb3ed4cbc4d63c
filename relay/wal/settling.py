"""Settles batches of the stream, or moves them to the table when events of them can't be published as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

from outbox.errors import OutboxError
from relay.core.ports import Claim, Published, Receipt, Refused
from relay.core.position import WalPosition
from relay.polling.source import PollingSource
from relay.settle.retries import Failures
from relay.settle.settlement import UnsettledBatch
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

        Refused events move the lane to the table; so do events that were left out.
        """
        number = lane.lease.lane
        refused: list[tuple[Claim, str]] = []
        for claim, outcome in receipt.results:
            match outcome:
                case Published():
                    pass
                case Refused():
                    refused.append((claim, outcome.reason))
                case _:
                    assert_never(outcome)
        if refused or receipt.left_out:
            return self._move_to_table(lane, batch, receipt, refused)
        settlement = self._settlement.lanes[number]
        if receipt.results or receipt.batch is not None:
            settlement.pending = UnsettledBatch.of(receipt)
        if len(receipt.results) == len(batch):
            return None
        # Events not known to be published come again. The published ones have to be settled before that.
        failed = self._settlement.settle([number]) if settlement.pending else {}
        if lane.channel is not None:
            lane.channel.rewind()
        return failed.get(number)

    def _move_to_table(
        self, lane: StreamLane, batch: Sequence[Claim], receipt: Receipt, refused: Sequence[tuple[Claim, str]]
    ) -> OutboxError | None:
        """Settle published events, record refused ones, and leave the rest of the batch to the table."""
        number = lane.lease.lane
        dead: list[Claim] = []

        def leave() -> None:
            if refused:
                dead.extend(self._failures.record(self._connection, number, refused))
            self._connection.execute(self._queries.set_streaming, {"streaming": False, **lane.key})

        settled = self._settlement.lanes[number]
        before, settled.pending = settled.pending, UnsettledBatch.of(receipt)
        try:
            error = self._table.session.settle_with(number, f"settling lane {number}", leave)
        except BaseException:
            settled.pending = before
            raise
        if error is not None:
            settled.pending = before
            return error
        lane.state = InTable()
        self._table.reader.read_all_again(number)
        assert lane.channel is not None
        lane.channel.done(positions(batch))
        for claim in dead:
            self._on_dead(number, claim)
        return None


def positions(claims: Sequence[Claim]) -> list[WalPosition]:
    """Return the positions of those that came from the stream."""
    return [claim.at for claim in claims if claim.at is not None]
