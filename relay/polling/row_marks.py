"""The marks in the lanes' rows: where the next holder of a lane may start to read.

A fresh process, or one that takes a lane over, would walk from the lowest id over all rows behind a blocked key, and
over dead index entries that an old snapshot keeps: with ten million rows one turn of half a minute. A mark is stored in
the lane's row, in the database that it describes: no crash, failover or restore takes its grounds and leaves it.

| it is used only if                                | because                                                        |
|---------------------------------------------------|----------------------------------------------------------------|
| the failures up to the mark are those it was      | rows up to it become free only when one of these is gone. A    |
| written for, and block as they did; a digest of   | holder that finds others starts from the lowest id, so a mark  |
| that stands beside it                             | is never too high                                              |
| it is the same server                             | on another one, ids may begin anew                             |

It is written every few seconds, if it has changed: below all events that are published and may not be settled, while
nothing is left out, after a look at the failures, and not while a sweep's late events have still to be read. A mark
that is too low costs reading only.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import Final

from relay.core.ports import Claim
from relay.database import one_write
from relay.polling.blocked_keys import KnownFailures, PolledLane
from relay.polling.kept_marks import Server
from relay.polling.queries import SERVER, Queries
from relay.polling.session import Session
from relay.settle.statements import array, lease_values

_SECONDS: Final = 10.0


class RowMarks:
    """Reads and writes the marks of lanes that this worker holds. Nothing else may be in progress on the connection."""

    def __init__(self, session: Session, queries: Queries) -> None:
        self._session = session
        self._queries = queries
        self._written: dict[int, tuple[int, str]] = {}
        self._written_at = time.monotonic()

    def left(self, failures: Mapping[int, KnownFailures]) -> dict[int, int]:
        """Return the marks of lanes that are new here, with the failures that they have now, where they hold."""
        if not failures:
            return {}
        rows = self._session.rows(self._queries.left_marks, lanes=list(failures))
        for lane in failures:
            self._written.pop(lane, None)
        return {lane: mark for lane, mark, digest, server in rows if digest == _digest(server, mark, failures[lane])}

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._written_at >= _SECONDS

    def keep(self, server: str, lanes: Collection[PolledLane], marks: Mapping[int, int]) -> None:
        """Write those of these lanes' marks that have changed; ``marks`` are all of them."""
        self._written_at = time.monotonic()
        digests = {lane.lease.lane: _digest(server, marks[lane.lease.lane], lane.failures) for lane in lanes}
        given = {number: (marks[number], digest) for number, digest in digests.items()}
        changed = [lane.lease for lane in lanes if self._written.get(lane.lease.lane) != given[lane.lease.lane]]
        if not changed:
            return
        values = {
            **lease_values(changed),
            "mark_lanes": array([lease.lane for lease in changed]),
            "marks": array([given[lease.lane][0] for lease in changed]),
            "mark_failures": [given[lease.lane][1] for lease in changed],
        }
        with one_write(self._session.connection):
            if self._session.pooled:
                self._session.accept(Server(*self._session.rows(SERVER)[0]))
            rows = self._session.rows(self._queries.keep_marks, **values)
        for (lane,) in rows:
            self._written[lane] = given[lane]


def unsettled_above(mark: int, unsettled: Sequence[Claim]) -> int:
    """Return the mark, or a lower id above which everything is that may not be settled."""
    return min([mark, *(claim.position - 1 for claim in unsettled)])


def _digest(server: str, mark: int, failures: KnownFailures) -> str:
    return sha256(",".join(map(str, (server, *failures.up_to(mark)))).encode()).hexdigest()
