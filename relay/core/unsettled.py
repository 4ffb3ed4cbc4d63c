"""Settles what a lane has published and another source may not have settled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from outbox.errors import OutboxError, SchemaError
from relay.core.lane import Lane
from relay.core.ports import NOTHING, Receipt, Source, StatementCutShort

# A lane whose events wait for a lock to be settled delays the others: it is retried after this many times as long.
_LOCK_WAITS: Final = 5


def pause_after_lock(lane: Lane, waited_seconds: float) -> float:
    return min(_LOCK_WAITS * waited_seconds, lane.lease.ttl_seconds)


def settle_again(source: Source, lane: Lane) -> Mapping[int, OutboxError]:
    """Settle ``lane.unsettled``, of which rows may be gone already. Returns the lanes for which that failed.

    If an event can't be settled, those before it are, and the error names it.
    """
    number, left = lane.lease.lane, lane.unsettled
    size = len(left.rows)
    while left:
        part = left.part(0, size)
        failed: Mapping[int, OutboxError]
        try:
            failed = {**source.settle({number: Receipt(part)}), **source.flush([number])}
        except (SchemaError, StatementCutShort) as error:
            source.drop(number)
            source.hold(lane.lease)
            if isinstance(error, StatementCutShort):
                failed = {number: error}
            elif len(part.rows) > 1:
                size = len(part.rows) // 2
                continue
            else:
                text = f"event {part.rows[0].event_id} is published, but can't be settled: {error}"
                failed = {number: type(error)(text)}
        if failed:
            lane.unsettled = left
            return failed
        left = left.part(size)
    lane.unsettled = NOTHING
    return {}
