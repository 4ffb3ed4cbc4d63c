"""A lane as its reader knows it: above all its failures, and the keys that wait behind them. No I/O.

The low-water mark rises above rows that wait. When their key is freed, the mark has to be lowered before a newer row of
the key, above the mark, may be published. The read of a turn can meet a failure that was gone just before it: then it
returns the newer row alone. So the reader compares what it has read with the failures that it knows, and takes rows
back whose key waited when it last looked. Every failure for which a row below the mark waits is known. A known failure
may be gone already; then the read is repeated.

Keys are kept as digests: they can be 4,000 bytes long, and there can be 100,000 of them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, NamedTuple

from outbox.event import DEAD_LETTER
from relay.core.lease import Lease
from relay.core.ports import Claim

DIGEST: Final = "substr(sha256(convert_to(aggregate_id, 'UTF8')), 1, 16)"
"""SQL: what ``_digest`` computes."""

_Key = tuple[str, bytes]


class FailureRow(NamedTuple):
    """A row of ``failures``. ``digest`` stands for the aggregate's id; ``blocks``: later events of the key wait."""

    id: int
    aggregate_type: str
    digest: bytes
    blocks: bool


class KnownFailures:
    """The known failures of a lane. False if there are none."""

    def __init__(self) -> None:
        self._keys: dict[int, _Key | None] = {}
        self._ids: dict[_Key, set[int]] = {}
        self._total = 0

    def __bool__(self) -> bool:
        return bool(self._keys)

    def matches(self, count: int, total: int) -> bool:
        """Return whether this is the number of the known failures and the sum of their ids."""
        return (len(self._keys), self._total) == (count, total)

    def up_to(self, id_: int) -> list[int]:
        """Return the ids of the known failures up to this one, in order; negative if they do not block their key."""
        return [known if self._keys[known] else -known for known in sorted(self._keys) if known <= id_]

    def before(self, claim: Claim) -> set[int]:
        """Return the known failures that this event has to wait for."""
        if not self._ids or DEAD_LETTER in (claim.headers or ()):
            # A copy for a dead-letter topic waits for nothing.
            return set()
        known = self._ids.get((claim.aggregate_type, _digest(claim.aggregate_id)))
        return set() if known is None else {id_ for id_ in known if id_ < claim.position}

    def replace(self, rows: Iterable[FailureRow], asked: Collection[int] | None = None) -> int | None:
        """Record the failures that there are now, or with ``asked`` those of them that have these ids.

        Returns the lowest id of a failure that blocked its key and is gone; None if there is none.
        """
        found = {row.id: row for row in rows}
        freed = self.remove([id_ for id_ in (list(self._keys) if asked is None else asked) if id_ not in found])
        for row in found.values():
            if row.id in self._keys:
                continue
            key = self._keys[row.id] = (sys.intern(row.aggregate_type), row.digest) if row.blocks else None
            self._total += row.id
            if key is not None:
                self._ids.setdefault(key, set()).add(row.id)
        return freed

    def remove(self, ids: Iterable[int]) -> int | None:
        """Record that failures are gone. Returns the lowest id of one that blocked its key; None if there is none."""
        freed: int | None = None
        for id_ in ids:
            if id_ not in self._keys:
                continue
            key = self._keys.pop(id_)
            self._total -= id_
            if key is None:
                continue
            freed = id_ if freed is None else min(freed, id_)
            self._ids[key].discard(id_)
            if not self._ids[key]:
                del self._ids[key]
        return freed


@dataclass(slots=True)
class PolledLane:
    """What the reader knows of a lane.

    ``due``: how many due events its next turn may try. ``due_next``: that turn reads due events first; ``reading_due``:
    the last one had some. ``row_bytes``: the mean size of its events in the last turn.
    """

    lease: Lease
    failures: KnownFailures = field(default_factory=KnownFailures)
    failures_loaded: bool = False
    """Whether the lane's failures have been read since it was held, and since they were found to have changed."""
    recheck_ids: set[int] = field(default_factory=set)
    """Ids of events of which it is not known whether they are among the failures; while ``failures_loaded``."""
    due: int = 1
    due_next: bool = True
    reading_due: bool = False
    row_bytes: float = 0.0
    swept_ids: Sequence[int] = ()
    """What a sweep has found. Not to be read before a look shows that no failure of the lane is gone."""
    late_ids: Sequence[int] = ()
    """Ids below the mark, to be read before anything else."""


def _digest(aggregate_id: str) -> bytes:
    return sha256(aggregate_id.encode()).digest()[:16]
