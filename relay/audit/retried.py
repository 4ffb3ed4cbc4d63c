"""Where events stand that an operator has put back when later ones of their keys had gone out.

Such an event comes behind the last event of its key that was written before the retry and stands before it, or in
another partition. One pass over the events of a key finds that of all its retried ones: to compare each of these with
each event takes minutes where thousands of one key were retried.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any
from uuid import UUID


def behind(rows: Iterable[tuple[Any, ...]]) -> dict[UUID, int]:
    """Return the retried events that come behind later ones of their keys, each with the highest id of those.

    rows  key, id, event_id, partition and offset; with an event_id of a retry, and without one of an event that was
          written. The rows of each key are together, in the order of the retries and of what was written.
    """
    found: dict[UUID, int] = {}
    for _, of_key in groupby(rows, itemgetter(0)):
        written: dict[int, _HighestIds] = defaultdict(_HighestIds)
        for _, id_, event_id, partition, offset in of_key:
            if event_id is None:
                written[partition].add(offset, id_)
                continue
            for number, ids in written.items():
                last = ids.before(offset if number == partition else math.inf)
                if last is not None and last > max(id_, found.get(event_id, id_)):
                    found[event_id] = last
    return found


class _HighestIds:
    """The highest id of the events up to each offset of a partition: only the offsets at which it rises are kept."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._ids: list[int] = []

    def add(self, offset: int, id_: int) -> None:
        at = bisect_left(self._offsets, offset)
        if at and self._ids[at - 1] >= id_:
            return
        end = bisect_right(self._ids, id_, at)
        self._offsets[at:end] = [offset]
        self._ids[at:end] = [id_]

    def before(self, offset: float) -> int | None:
        """Return the highest id of the events before an offset, of all before infinity; None if there is none."""
        at = bisect_left(self._offsets, offset)
        return self._ids[at - 1] if at else None
