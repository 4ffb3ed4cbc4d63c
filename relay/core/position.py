"""Positions of events in the WAL."""

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
