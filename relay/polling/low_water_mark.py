"""The id above which a lane's rows have to be read. No I/O.

Deleted rows leave dead index entries at the low end. Postgres skips them quickly unless an old snapshot (a forgotten
session, a long dump) keeps it from removing them; then each read would visit them all. So reads start above a low-water
mark, which rises to an id M only when no transaction can still commit an id up to M:

1. M is the last id settled, or the lane's last id while events wait; some seconds pass (``_SETTLE_SECONDS``), in which
   every INSERT that had drawn an id up to M gets its transaction id; then we draw a transaction id X of our own. (A
   snapshot's xmax would not do: it is the last completed id plus one, and transactions beyond it may already run.)
2. Once the snapshot's xmin has reached X, all those transactions have ended.
3. A read after that, still from the old mark, found nothing to publish up to M.

A reader's snapshot has no transaction id and does not hold back the mark; a forgotten writer does, as it must. The row
of an INSERT that takes longer than the wait in 1 between drawing its id and writing, as in a BEFORE trigger that
sleeps, is found below the mark by a sweep (sweep.py). So is one of a slow COPY, which keeps rows with event ids of
their own until it has many, unless its transaction has an id, as under the lock of docs/guides/writing-events.md.

Steps 1 and 2 are done for all lanes of a worker together: one transaction id a round, whatever the number of lanes.
Rows whose key waits for a failed event may be below the mark. When such a failure is gone, the mark is lowered to its
id before newer rows of the key are published, because the rows that it blocked have higher ids (blocked_keys.py). A
failure that stays, however often it is retried, or a new one, frees no rows.

A mark is a fact about the database: it holds for the next source of the same worker (``KeptMarks``), and for the next
holder of the lane (``RowMarks``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

LOWEST: Final = -(2**63)
_LOOK_SECONDS: Final = 1.0
_SETTLE_SECONDS: Final = 5.0
_ROUND_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Marks:
    """The id above which a read starts in each lane. ``writers_ended``: step 2 was complete before the read."""

    by_lane: dict[int, int]
    writers_ended: bool


class LowWaterMarks:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: dict[int, int] = {}
        self._targets: dict[int, int] = {}
        self._candidates: dict[int, int] = {}
        self._candidates_at = 0.0
        self._xid: int | None = None
        self._writers_ended = False
        self._looked_at = clock()

    def reset(self, lane: int) -> None:
        for known in (self._marks, self._targets, self._candidates):
            known.pop(lane, None)

    def keep(self, lane: int, mark: int) -> None:
        self._marks[lane] = mark

    def lower(self, lane: int, id_: int) -> None:
        """Make the next read start no higher than after this id."""
        if lane in self._marks:
            self._marks[lane] = min(self._marks[lane], id_)
        self._candidates.pop(lane, None)

    def advance_and_get(self, lanes: Collection[int], *, draw_xid: Callable[[], int], xmin: Callable[[], int]) -> Marks:
        """Let marks rise if it is time, and return those of lanes. Queries the database at most once a second."""
        now = self._clock()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._look(now, draw_xid, xmin)
        return Marks({lane: self._marks.get(lane, LOWEST) for lane in lanes}, self._writers_ended)

    def mark(self, lane: int) -> int:
        return self._marks.get(lane, LOWEST)

    def seen(self, marks: Marks, lane: int, lowest: int | None) -> None:
        """Record the lowest id that a read which started at ``marks`` found in the lane."""
        ended, candidate = marks.writers_ended and self._writers_ended, self._candidates.get(lane)
        if ended and candidate is not None and (lowest is None or lowest > candidate):
            self._marks[lane] = candidate
            del self._candidates[lane]

    def may_rise_to(self, lane: int, id_: int) -> None:
        """Record an id to which the mark may rise: the last one settled, or the lane's last one if rows wait."""
        self._targets[lane] = max(id_, self._targets.get(lane, LOWEST))

    @property
    def want_last_ids(self) -> bool:
        """Return whether ids that are recorded now may become the next ones to which marks rise."""
        return not self._candidates

    def _look(self, now: float, draw_xid: Callable[[], int], xmin: Callable[[], int]) -> None:
        if self._writers_ended and (not self._candidates or now - self._candidates_at >= _ROUND_SECONDS):
            # All marks have risen, or lanes that are not read delay the round.
            self._candidates, self._writers_ended = {}, False
        if not self._candidates:
            self._candidates = {n: last for n, last in self._targets.items() if last > self._marks.get(n, LOWEST)}
            self._candidates_at, self._xid = now, None
        elif self._xid is None:
            if now - self._candidates_at >= _SETTLE_SECONDS:
                self._xid = draw_xid()
        elif not self._writers_ended:
            self._writers_ended = xmin() >= self._xid
