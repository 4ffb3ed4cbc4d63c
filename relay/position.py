"""Positions of events: in the WAL, or as rows."""

from __future__ import annotations

from typing import NamedTuple


class WalPosition(NamedTuple):
    """An event's position in the WAL, in commit order.

    ``commit_lsn`` is the byte position of its transaction's commit record, ``number`` its place among the events of
    that transaction, from 1; ``xid`` is the transaction's id, without the epoch.
    """

    commit_lsn: int
    number: int
    xid: int


def up_to(at: WalPosition, end_lsn: int) -> WalPosition:
    """Return the position, or the last possible one before ``end_lsn``: a number is an int in the table."""
    return at if at.commit_lsn < end_lsn else WalPosition(end_lsn - 1, 2**31 - 1, 0)


def has_row(position: int) -> bool:
    """Return whether a position is a row's id. An event that was written as a message has a negative number."""
    return position > 0
