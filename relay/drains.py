"""Finds out when a drain is complete. From then on it is a pause; see pauses.py.

Published must be: every event of a transaction that had a transaction id when the drain was requested. In two steps,
the second recorded in the drain's row, so that any relay goes on with it:

1. Those transactions have ended: ``pg_snapshot_xmin`` has passed ``drain_xid``, the id of the request's own
transaction. (A snapshot's xmax would not do; see polling/low_water_mark.py.) What they wrote is visible by now.
2. ``last_id`` is the highest id in the scope's lanes after that. When no row up to it is left, the scope is drained:
``drained_at`` is set.

Transactions that begin later may be published too, until relays obey; what they leave waits as under a pause.

| what happens                               | what follows                                                            |
|--------------------------------------------|-------------------------------------------------------------------------|
| the relay that looks is killed             | every relay looks; another goes on with the recorded step               |
| a relay is killed while it publishes       | its rows are still in the table, or its markers settle them             |
| an old transaction stays open              | step 1 waits for it; the command names it                               |
| a key waits behind a dead letter           | its rows are left: step 2 waits for an operator; the command says so    |
| a lane of the scope is paused by itself    | the same                                                                |
| the source is switched                     | nothing: the rows in the table count, whoever reads them                |
| two relays look at the same time           | ``last_id`` is recorded once: where it is not set yet                   |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql

from outbox.event import DEAD_LETTER
from relay.database import begin_session, unavailable_on_error
from relay.kafka.routing import NoRoute, Router
from relay.pauses import CurrentPauses, Scope, ScopeKind
from relay.ports import Kind
from relay.statements import names_of

log = structlog.get_logger("relay")

# A topic's events are found by reading all of them, which takes at most this part of the time.
_SEARCH_PART: Final = 1 / 5

_OPEN: Final = """
SELECT p.number, p.scope, p.name, pg_snapshot_xmin(pg_current_snapshot())::text::bigint > p.drain_xid AS ended,
       p.last_id
  FROM {pauses} AS p WHERE p.drain_xid IS NOT NULL AND p.drained_at IS NULL ORDER BY p.number"""

# By the primary key, lane by lane.
_NOTE_ID: Final = """
UPDATE {pauses} SET last_id = coalesce((SELECT max((SELECT e.id FROM {events} AS e WHERE e.lane = l.lane
                                                      ORDER BY e.id DESC LIMIT 1))
                                          FROM {lanes} AS l WHERE l.lane = coalesce(%(lane)s::smallint, l.lane)), 0)
 WHERE number = %(number)s AND last_id IS NULL
RETURNING last_id"""

_LEFT: Final = """
SELECT EXISTS (SELECT FROM {lanes} AS l
                CROSS JOIN LATERAL (SELECT FROM {events} AS e WHERE e.lane = l.lane AND e.id <= %(last)s LIMIT 1) AS e
                WHERE l.lane = coalesce(%(lane)s::smallint, l.lane))"""

_LEFT_OF: Final = """
SELECT EXISTS (SELECT FROM {events} AS e
                 JOIN unnest(%(types)s::text[], %(copies)s::boolean[]) AS k(kind, copy)
                   ON k.kind = e.aggregate_type AND k.copy = coalesce(e.headers ? %(copy)s, false)
                WHERE e.id <= %(last)s)"""

_KINDS: Final = """
SELECT DISTINCT e.aggregate_type, coalesce(e.headers ? %(copy)s, false) FROM {events} AS e WHERE e.id <= %(last)s"""

# Synchronous: a pause that a crash undoes would begin to publish again.
_DRAINED: Final = """
UPDATE {pauses} SET drained_at = clock_timestamp() WHERE number = %(number)s AND drained_at IS NULL
RETURNING number, set_config('synchronous_commit', 'on', true)"""


@dataclass(frozen=True, slots=True)
class _Drain:
    """A row of _OPEN."""

    number: int
    scope: Scope
    ended: bool
    last_id: int | None

    @property
    def lane(self) -> int | None:
        """Return the lane, if it is one lane's drain."""
        return int(self.scope.name) if self.scope.kind is ScopeKind.LANE else None


class Drains:
    """Takes the steps of all drains. Call ``look`` from time to time, from one thread.

    While no drain is known, a look does nothing: ``pauses`` are those that the control loop has read.
    """

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        schema: str,
        router: Router,
        pauses: CurrentPauses,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._names = names_of(schema)
        self._router = router
        self._pauses = pauses
        self._clock = clock
        self._connection: psycopg.Connection[Any] | None = None
        # The kinds of events that a topic has, and when to search again.
        self._kinds: dict[int, Collection[Kind]] = {}
        self._search_at: dict[int, float] = {}

    def look(self) -> None:
        """Take the steps that can be taken now. Raises Unavailable or SchemaError."""
        if not self._pauses.now.drains:
            self.close()
            return
        try:
            with unavailable_on_error("looking at drains"):
                if self._connection is None:
                    self._connection = self._connect()
                    begin_session(self._connection)
                for drain in self._open(self._connection):
                    self._go_on(self._connection, drain)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _open(self, connection: psycopg.Connection[Any]) -> list[_Drain]:
        return [
            _Drain(number, Scope(ScopeKind(kind), name), ended, last_id)
            for number, kind, name, ended, last_id in self._run(connection, _OPEN).fetchall()
        ]

    def _go_on(self, connection: psycopg.Connection[Any], drain: _Drain) -> None:
        if not drain.ended:
            return
        last = drain.last_id
        if last is None:
            row = self._run(connection, _NOTE_ID, number=drain.number, lane=drain.lane).fetchone()
            if row is None:
                return
            last = row[0]
        if self._is_left(connection, drain, last):
            return
        if self._run(connection, _DRAINED, number=drain.number).fetchone() is not None:
            log.info("drained, and paused from now on", scope=str(drain.scope))

    def _is_left(self, connection: psycopg.Connection[Any], drain: _Drain, last: int) -> bool:
        if drain.scope.kind is not ScopeKind.TOPIC:
            row = self._run(connection, _LEFT, last=last, lane=drain.lane).fetchone()
            return row is not None and bool(row[0])
        known = self._kinds.get(drain.number, ())
        if known:
            # Ends at the first event, while there are many.
            types, copies = [kind for kind, _ in known], [copy for _, copy in known]
            values = {"types": types, "copies": copies, "copy": DEAD_LETTER, "last": last}
            row = self._run(connection, _LEFT_OF, **values).fetchone()
            if row is not None and row[0]:
                return True
        began = self._clock()
        if began < self._search_at.get(drain.number, began):
            return True
        rows = self._run(connection, _KINDS, copy=DEAD_LETTER, last=last).fetchall()
        ended = self._clock()
        self._search_at[drain.number] = ended + (ended - began) / _SEARCH_PART
        kinds = self._kinds[drain.number] = [
            (kind, copy) for kind, copy in rows if topic_of(self._router, kind, copy=copy) == drain.scope.name
        ]
        return bool(kinds)

    def _run(self, connection: psycopg.Connection[Any], query: str, **values: Any) -> psycopg.Cursor[Any]:
        return connection.execute(sql.SQL(query).format(**self._names), values)


def topic_of(router: Router, aggregate_type: str, *, copy: bool) -> str | None:
    """Return the topic of events of a kind; None without a route."""
    try:
        route = router.route(aggregate_type)
    except NoRoute:
        return None
    return route.dead_letter_topic if copy else route.topic
