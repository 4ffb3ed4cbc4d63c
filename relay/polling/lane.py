"""A lane as the reader of a polling source knows it. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from relay.core.lease import Lease
from relay.polling.blocked_keys import BlockedKeys


@dataclass(slots=True)
class PolledLane:
    """What the reader knows of a lane.

    ``due``: how many due events its next turn may try. ``due_next``: that turn reads due events first; ``reading_due``:
    the last one had some. ``row_bytes``: the mean size of its events in the last turn.
    """

    lease: Lease
    failures: BlockedKeys = field(default_factory=BlockedKeys)
    known: bool = False
    """Whether the lane's failures have been read since it was held, and since they were found to have changed."""
    unsure: set[int] = field(default_factory=set)
    """Ids of events of which it is not known whether they are among the failures; while ``known``."""
    due: int = 1
    due_next: bool = True
    reading_due: bool = False
    row_bytes: float = 0.0
    found: Sequence[int] = ()
    """What a sweep has found. Not to be read before a look shows that no failure of the lane is gone."""
    late: Sequence[int] = ()
    """Ids below the mark, to be read before anything else."""
