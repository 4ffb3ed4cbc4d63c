"""Find the message that keeps failing while both servers answer, by reading smaller and smaller parts of its range.

A message can crash a Python worker (C code, memory that runs out), be stored with a wrong checksum, or make a statement
run into a time limit. To the driver that is a failure like any other, and waiting does not help. The driver does not
know which message it is, but half of the failed range may succeed.

| what is known of a partition                 | what is read of it next                                              |
|----------------------------------------------|----------------------------------------------------------------------|
| nothing                                      | the planned range                                                    |
| it failed, fewer than SAME times in a row    | the same, together with the others                                   |
| SAME times with the same error               | half of it, in a round of its own, alternating with the others       |
| the half passed                              | half of the rest of the failed range                                 |
| the half failed                              | half of that                                                         |
| a single offset failed SAME times, for long  | the driver decides: end and name it, or keep trying                  |
| all of the failed range has passed           | the planned range: the cause was an outage                           |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from outbox.consumer.model import Partition, Range

SAME: Final = 3
"""How many times in a row the same range must fail with the same error before it is divided."""


@dataclass(slots=True)
class _Case:
    """What is known of a partition that fails.

    start   the group's next offset there.
    until   the end of the smallest range that has failed, not included.
    times   how often it failed in a row, at this offset and with this error.
    alone   how often a range of a single offset failed; ``since`` when.
    last    the round in which it was last tried.
    """

    start: int
    until: int
    error: str
    times: int = 0
    alone: int = 0
    since: float = 0.0
    last: int = 0

    @property
    def suspect(self) -> bool:
        return self.times >= SAME


class PoisonSearch:
    """Tracks the partitions that fail, and how much of each to read at once. The driver reports every result to it."""

    def __init__(self, verdict_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._verdict_seconds = verdict_seconds
        self._clock = clock
        self._cases: dict[Partition, _Case] = {}
        self._rounds = 0
        self._others_first = False

    def narrowed(self, ranges: Mapping[Partition, Range]) -> dict[Partition, Range]:
        """Return what to read of the planned ranges now: all, those that do not fail, or a part of one that does."""
        self._rounds += 1
        for partition, span in ranges.items():
            self._note_position(partition, span.start)
        suspects = {partition for partition in ranges if partition in self._cases and self._cases[partition].suspect}
        others = {partition: span for partition, span in ranges.items() if partition not in suspects}
        if not suspects:
            return others
        self._others_first = not self._others_first
        if others and self._others_first:
            return others
        partition = min(suspects, key=lambda one: (self._cases[one].last, one))
        case, span = self._cases[partition], ranges[partition]
        case.last = self._rounds
        half = max(1, (case.until - case.start) // 2)
        return {partition: replace(span, end=min(span.start + half, span.end))}

    def failed(self, ranges: Mapping[Partition, Range], error: str, *, certain: bool) -> bool:
        """Record that these ranges could not be applied. Equal texts mean the same error.

        Returns whether the next round reads less because of it; then it need not wait.

        certain  each range failed by itself; otherwise one did, and the others may have been cancelled with it.
        """
        narrowed = False
        for partition, span in ranges.items():
            case = self._cases.get(partition)
            if case is None or case.start != span.start or (case.error != error and not case.suspect):
                case = self._cases[partition] = _Case(span.start, span.end, error)
            less = span.end < case.until
            case.until = min(case.until, span.end)
            case.times += 1
            narrowed |= case.suspect and case.until - case.start > 1 and (less or case.times == SAME)
            single = certain and span.end - span.start == 1
            case.alone = case.alone + 1 if single and case.error == error else int(single)
            if case.alone == 1:
                case.since = self._clock()
            case.error = error
        return narrowed

    def passed(self, ranges: Mapping[Partition, Range]) -> None:
        """Record that these ranges were applied, each to its end or beyond."""
        for partition, span in ranges.items():
            case = self._cases.get(partition)
            if case is not None and (not case.suspect or span.end >= case.until):
                del self._cases[partition]

    def found(self, partition: Partition) -> int | None:
        """Return the offset that failed by itself SAME times or more, for ``verdict_seconds`` or longer, if any."""
        case = self._cases.get(partition)
        if case is None or case.alone < SAME or self._clock() - case.since < self._verdict_seconds:
            return None
        return case.start

    def _note_position(self, partition: Partition, start: int) -> None:
        case = self._cases.get(partition)
        if case is None or case.start == start:
            return
        if case.suspect and case.start < start < case.until:
            case.start, case.alone = start, 0
        else:
            del self._cases[partition]
