"""What a worker's next source may take over from the one before: where to read its lanes from. No I/O.

A source is replaced after every failure. If each began with a lane's lowest id, it would walk again over all rows
behind a blocked key, and a statement that takes too long for that would fail for ever. A mark says that no transaction
can commit an id up to it any more, and that rows up to it wait for failures or for topics that are left out. The next
source may start from it if

- the server is the same and has lost nothing: same identity, timeline and start time, and its WAL is at least as long
  (what the mark rests on was flushed before it rose). Why the start time: a server that was started again may be an
  older copy of its files, which gives ids out again, and whose WAL is soon as long. The mark in the lane's row went
  back with it.
- the lease is the same: another holder may have changed what waits.
- it is below all rows that were published and may not be settled.
- it comes with the failures that were known: those that are gone by now lower it.
- the topics of that time are still left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from relay.core.ports import Kind
from relay.polling.blocked_keys import KnownFailures


@dataclass(frozen=True, slots=True)
class Server:
    """Which server it is, the position up to which its WAL was written, and when it was started."""

    system_identifier: str
    timeline: int
    wal_position: int
    started_at: str

    def has_become(self, now: Server) -> bool:
        """Return whether ``now`` is this server, later."""
        same = replace(now, wal_position=self.wal_position) == self
        return same and self.wal_position <= now.wal_position


@dataclass(frozen=True, slots=True)
class KeptLane:
    """A lane's epoch and mark, the failures and late events that were known, and when its next sweep is due."""

    epoch: int
    mark: int
    failures: KnownFailures
    late_ids: Sequence[int]
    sweep_at: float


@dataclass(slots=True)
class KeptMarks:
    """The marks that a source leaves to the next one of the same worker. Marks that a source takes are gone from it.

    ``unanswered`` are lanes of which due events were read and nothing became known: the next source reads them together
    with the lane's other events, once. Alone, a topic that does not answer would keep these waiting for good.
    """

    server: Server | None = None
    left_out: frozenset[Kind] = frozenset()
    lanes: dict[int, KeptLane] = field(default_factory=dict)
    unanswered: frozenset[int] = frozenset()
