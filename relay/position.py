"""Where an event stands: in the WAL, or as a row."""

from __future__ import annotations

from typing import NamedTuple


class WalPosition(NamedTuple):
    """Where an event stands in the WAL, in the order in which transactions were committed.

    ``commit_lsn`` is the byte position of its transaction's commit record, ``number`` its place among the events of
    that transaction, from 1; ``xid`` is the transaction's id, without the epoch.
    """

    commit_lsn: int
    number: int
    xid: int


def up_to(at: WalPosition, end_lsn: int) -> WalPosition:
    """Return the place, or the last one that an event can have before ``end_lsn``: a number is an int in the table."""
    return at if at.commit_lsn < end_lsn else WalPosition(end_lsn - 1, 2**31 - 1, 0)


def has_row(position: int) -> bool:
    """Return whether a position is a row's id. An event that was written as a message has a negative number instead."""
    return position > 0
