"""Waits until what was written before a moment is published: ``outbox relay drain``, which pauses then.

Published must be: every event of a transaction that had a transaction id when the drain began. In two steps:

- Those transactions have ended: ``pg_snapshot_xmin`` has passed a transaction id of the drain's own. (A snapshot's xmax
  would not do; see polling/low_water_mark.py.) What they wrote is visible by now.
- No row is left in the scope up to the highest id after that.

Transactions that begin later may be published too, until relays obey the pause; what they leave waits.

| what happens                               | what follows                                                            |
|--------------------------------------------|-------------------------------------------------------------------------|
| the command is killed or cut off, or its   | nothing is paused; what was published is published. Give it again       |
| time is over                               |                                                                         |
| a relay is killed while it publishes       | its rows are still in the table, or its markers settle them             |
| an old transaction stays open              | the first step waits for it; the command names it                       |
| a key waits behind a dead letter           | its rows are left: the second step waits for an operator, and the       |
|                                            | command says so                                                         |
| the scope or a lane of it is paused        | the same                                                                |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from outbox._clients.counting import counted
from outbox.event import DEAD_LETTER
from relay.core.pauses import ALL, Scope, ScopeKind
from relay.database import unavailable_on_error
from relay.insights import read_pauses
from relay.kafka.routing import Router
from relay.settle.settlement import lanes_text
from relay.settle.statements import STATEMENT_LIMIT, names_of

COUNTED: Final = 10_000
"""How many events of each lane are counted."""
_COUNT_SECONDS: Final = 30

_BEGIN: Final = "SELECT pg_current_xact_id()::text::bigint"

# One snapshot: where the old transactions have ended in it, it has all of their rows. Ids by the primary key, lane by
# lane.
_STEP: Final = """
SELECT coalesce(pg_snapshot_xmin(pg_current_snapshot())::text::bigint > %(xid)s::bigint, true) AS ended,
       coalesce((SELECT max((SELECT e.id FROM {events} AS e WHERE e.lane = l.lane ORDER BY e.id DESC LIMIT 1))
                   FROM {lanes} AS l), 0) AS last,
       EXISTS (SELECT FROM {relays} WHERE alive_until >= clock_timestamp()) AS alive"""

# xact_start of other roles' sessions is shown to members of pg_read_all_stats only; the rest to all.
_OLD: Final = """
SELECT 'session ' || pid || coalesce(' of ' || usename, '') || coalesce(' (' || nullif(application_name, '') || ')', '')
       || coalesce(', open since ' || to_char(xact_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC', '')
  FROM pg_stat_activity
 WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() AND age(backend_xid) >= age(%(xid)s::text::xid)
 UNION ALL
SELECT 'prepared transaction ' || gid FROM pg_prepared_xacts WHERE age(transaction) >= age(%(xid)s::text::xid)"""

_LEFT: Final = """
SELECT l.lane, count(e.id) AS events,
       count(f.id) FILTER (WHERE isfinite(f.next_attempt_at)) AS retrying,
       EXISTS (SELECT FROM {failures} AS d
                WHERE d.lane = l.lane AND d.blocks AND NOT isfinite(d.next_attempt_at)) AS blocked
  FROM {lanes} AS l
 CROSS JOIN LATERAL (SELECT e.id FROM {events} AS e
                      WHERE e.lane = l.lane AND e.id <= coalesce(%(last)s::bigint, e.id){condition}
                      ORDER BY e.id LIMIT %(most)s) AS e
  LEFT JOIN {failures} AS f ON f.lane = l.lane AND f.id = e.id
 WHERE l.lane = coalesce(%(lane)s::smallint, l.lane)
 GROUP BY l.lane ORDER BY l.lane"""

_OF_KINDS: Final = """ AND EXISTS (SELECT FROM unnest(%(types)s::text[], %(copies)s::boolean[]) AS k(kind, copy)
                       WHERE k.kind = e.aggregate_type AND k.copy = coalesce(e.headers ? %(copy)s, false))"""

_KINDS: Final = """
SELECT DISTINCT aggregate_type AS kind, coalesce(headers ? %(copy)s, false) AS copy
  FROM {events} WHERE id <= coalesce(%(last)s::bigint, id)"""


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """What a drain still waits for. ``events`` are counted up to COUNTED in each lane; None if that took too long."""

    drained: bool
    events: int | None = None
    causes: Sequence[str] = ()

    def __str__(self) -> str:
        events = "an unknown number of events" if self.events is None else counted(self.events, "event")
        return "; ".join([f"{events} left", *self.causes])


class Drain:
    """A drain that begins now. With ``committed`` it does not wait for open transactions. Not on a standby."""

    def __init__(
        self, connection: psycopg.Connection[Any], schema: str, router: Router, *, committed: bool = False
    ) -> None:
        self._connection = connection
        self._schema = schema
        self._names = names_of(schema)
        self._router = router
        self._last: int | None = None
        self._xid: int | None = None
        if not committed:
            with unavailable_on_error("beginning a drain"):
                ((self._xid,),) = connection.execute(_BEGIN).fetchall()

    def look(self, scopes: Sequence[Scope]) -> dict[Scope, DrainProgress]:
        with unavailable_on_error("looking at a drain"):
            causes = self._step()
            return {scope: self._left(scope, causes) for scope in scopes}

    def _step(self) -> list[str]:
        """Take the next step. Returns what holds all scopes."""
        step = sql.SQL(_STEP).format(**self._names)
        ((ended, last, alive),) = self._connection.execute(step, {"xid": self._xid}).fetchall()
        causes = [] if alive else ["no relay is running"]
        if self._last is not None:
            return causes
        if self._xid is not None and not ended:
            # Views show the 32-bit form of a transaction id.
            old = self._connection.execute(_OLD, {"xid": str(self._xid % (1 << 32))}).fetchall()
            text = "a transaction from before the drain is open"
            return causes + ([f"{text}: {one}" for (one,) in old] or [text])
        self._last = last
        return causes

    def _left(self, scope: Scope, causes: Sequence[str]) -> DrainProgress:
        lanes = self._counted(scope)
        if lanes is None:
            return DrainProgress(
                drained=False, causes=[*causes, f"events could not be counted within {_COUNT_SECONDS} s"]
            )
        events = sum(row["events"] for row in lanes)
        if self._last is not None and not events:
            return DrainProgress(drained=True, events=0)
        causes = list(causes)
        if blocked := [row["lane"] for row in lanes if row["blocked"]]:
            causes.append(f"dead letters block keys of {lanes_text(blocked)}: `outbox dead-letters list`")
        if retrying := sum(row["retrying"] for row in lanes):
            causes.append(f"{counted(retrying, 'event', 'is')} retrying: `outbox dead-letters list`")
        for one in read_pauses(self._connection, self._schema) if lanes else ():
            if one.scope == scope or one.scope.kind is not scope.kind or ALL in {one.scope, scope}:
                causes.append(f"{one.scope} {'are' if one.scope == ALL else 'is'} paused")
        return DrainProgress(drained=False, events=events, causes=causes)

    def _counted(self, scope: Scope) -> list[dict[str, Any]] | None:
        values: dict[str, Any] = {
            "last": self._last,
            "most": COUNTED,
            "lane": int(scope.name) if scope.kind is ScopeKind.LANE else None,
            "copy": DEAD_LETTER,
        }
        try:
            with self._connection.transaction(), self._connection.cursor(row_factory=dict_row) as cursor:
                cursor.execute(STATEMENT_LIMIT, (f"{_COUNT_SECONDS}s",))
                condition = sql.SQL("")
                if scope.kind is ScopeKind.TOPIC:
                    rows = cursor.execute(sql.SQL(_KINDS).format(**self._names), values).fetchall()
                    known = self._router.known_topic
                    kinds = [row for row in rows if known(row["kind"], copy=row["copy"]) == scope.name]
                    values |= {"types": [row["kind"] for row in kinds], "copies": [row["copy"] for row in kinds]}
                    condition = sql.SQL(_OF_KINDS)
                return cursor.execute(sql.SQL(_LEFT).format(**self._names, condition=condition), values).fetchall()
        except psycopg.errors.QueryCanceled:
            return None
