"""The marks in the lanes' rows: where the next holder of a lane may start to read.

A fresh process, or one that takes a lane over, would walk from the lowest id over all rows behind a blocked key, and
over dead index entries that an old snapshot keeps: with ten million rows one turn of half a minute. That no transaction
can commit an id up to a mark any more, and that all rows up to it wait for failures, is a fact about the database, and
it is written there: a crash, a failover or a restore loses what it rests on only together with it. It holds

| as long as                                        | because                                                        |
|---------------------------------------------------|----------------------------------------------------------------|
| the failures up to the mark are those it was      | rows up to it become free only when one of these is gone. Who  |
| written for, and block as they did; a digest of   | finds others starts from the lowest id, whoever freed a key,   |
| that stands beside it                             | and whenever. So a mark is never too high                      |
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
from relay.polling.blocked_keys import BlockedKeys, PolledLane
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

    def left(self, failures: Mapping[int, BlockedKeys]) -> dict[int, int]:
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

    def keep(self, server: str, lanes: Collection[PolledLane], above: Mapping[int, int]) -> None:
        """Write the marks of these lanes that have changed; ``above`` are all marks by lane."""
        self._written_at = time.monotonic()
        digests = {lane.lease.lane: _digest(server, above[lane.lease.lane], lane.failures) for lane in lanes}
        marks = {number: (above[number], digest) for number, digest in digests.items()}
        changed = [lane.lease for lane in lanes if self._written.get(lane.lease.lane) != marks[lane.lease.lane]]
        if not changed:
            return
        values = {
            **lease_values(changed),
            "mark_lanes": array([lease.lane for lease in changed]),
            "marks": array([marks[lease.lane][0] for lease in changed]),
            "mark_failures": [marks[lease.lane][1] for lease in changed],
        }
        with one_write(self._session.connection):
            if self._session.pooled:
                self._session.accept(Server(*self._session.rows(SERVER)[0]))
            rows = self._session.rows(self._queries.keep_marks, **values)
        for (lane,) in rows:
            self._written[lane] = marks[lane]


def unsettled_above(mark: int, unsettled: Sequence[Claim]) -> int:
    """Return the mark, or a lower id above which everything is that may not be settled."""
    return min([mark, *(claim.position - 1 for claim in unsettled)])


def _digest(server: str, mark: int, failures: BlockedKeys) -> str:
    return sha256(",".join(map(str, (server, *failures.up_to(mark)))).encode()).hexdigest()
