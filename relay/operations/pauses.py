"""Pauses what relays publish, ends pauses, and drains: what an operator requests. Each change is audited.

The relays' side is in relay/pauses.py and relay/drains.py. Pausing what is paused, or resuming what is not, changes
nothing and is no error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from outbox.errors import ConfigurationError
from outbox.event import DEAD_LETTER
from relay.database import unavailable_on_error
from relay.drains import topic_of
from relay.insights import read_pauses
from relay.kafka.routing import Router
from relay.operations.audit import note
from relay.pauses import ALL, Paused, Scope, ScopeKind
from relay.settlement import lanes_text
from relay.statements import STATEMENT_LIMIT, names_of

read = read_pauses

COUNTED: Final = 10_000
"""How many of a drain's events are counted."""
_LOOK_SECONDS: Final = 0.2
_COUNT_SECONDS: Final = 5

# Of two commands at the same time, the second sees what the first has done. Relays and writers do not wait.
_ALONE: Final = "LOCK TABLE {pauses} IN SHARE ROW EXCLUSIVE MODE"
_LOCK_SECONDS: Final = 10

_INSERT: Final = """
INSERT INTO {pauses} (scope, name, reason, drain_xid)
VALUES (%(scope)s, %(name)s, %(reason)s, CASE WHEN %(drains)s THEN pg_current_xact_id()::text::bigint END)
RETURNING number, set_config('synchronous_commit', 'on', true)"""

_DELETE: Final = "DELETE FROM {pauses} WHERE number = %(number)s RETURNING set_config('synchronous_commit', 'on', true)"

_LANES: Final = "SELECT lane FROM {lanes} ORDER BY lane"

_STEP: Final = """
SELECT p.drain_xid, p.last_id, p.drained_at IS NOT NULL,
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint > p.drain_xid,
       EXISTS (SELECT FROM {relays} WHERE alive_until >= clock_timestamp())
  FROM {pauses} AS p WHERE p.number = %(number)s"""

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

_KINDS: Final = "SELECT DISTINCT aggregate_type, coalesce(headers ? %(copy)s, false) FROM {events}"


@dataclass(frozen=True, slots=True)
class Change:
    """What a command did to one scope. ``before`` and ``after`` have the same number if it did nothing."""

    scope: Scope
    before: Paused | None
    after: Paused | None

    @property
    def changed(self) -> bool:
        """Return whether the command did something."""
        return (self.before and self.before.number) != (self.after and self.after.number)


@dataclass(frozen=True, slots=True)
class Left:
    """What a drain still waits for. ``events`` are counted up to COUNTED in each lane; None if that took too long."""

    drained: bool
    events: int | None = None
    causes: Sequence[str] = ()


def pause(
    connection: psycopg.Connection[Any],
    schema: str,
    scopes: Sequence[Scope],
    reason: str | None,
    *,
    may_write: Callable[[str], bool],
) -> list[Change]:
    """Pause these scopes. A drain that is not complete becomes a pause.

    ``may_write`` returns whether a route leads to a topic. Raises ConfigurationError for an unknown lane or topic, and
    changes nothing then; SchemaError and Unavailable as ``read`` does.
    """
    return _set(connection, schema, scopes, reason, may_write, drains=False)


def drain(
    connection: psycopg.Connection[Any],
    schema: str,
    scopes: Sequence[Scope],
    reason: str | None,
    *,
    may_write: Callable[[str], bool],
) -> list[Change]:
    """Drain these scopes: publish what is written, then pause. A pause becomes a drain, so it is published until then.

    Raises as ``pause`` does.
    """
    return _set(connection, schema, scopes, reason, may_write, drains=True)


def resume(
    connection: psycopg.Connection[Any], schema: str, scopes: Sequence[Scope], reason: str | None
) -> list[Change]:
    """End the pauses and drains of exactly these scopes. Raises SchemaError and Unavailable as ``read`` does."""
    changes = []
    with _alone(connection, schema, "ending pauses") as (names, known):
        for scope in scopes:
            before = known.get(scope)
            if before is not None:
                connection.execute(sql.SQL(_DELETE).format(**names), {"number": before.number})
                note(connection, names, "resume", reason, _details(before))
            changes.append(Change(scope, before, None))
    return changes


def unconfirmed(
    connection: psycopg.Connection[Any], schema: str, numbers: Collection[int], seconds: float
) -> list[str]:
    """Wait until every running relay obeys these pauses. Returns the relays that do not after ``seconds``.

    Relays that are not running obey from their first turn. A drain in these numbers counts when it is complete.
    """
    deadline = time.monotonic() + seconds
    while True:
        waiting = [one for one in read(connection, schema) if one.number in set(numbers) and not one.draining]
        missing = sorted({instance for one in waiting for instance in one.unconfirmed})
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(_LOOK_SECONDS)


def left(connection: psycopg.Connection[Any], schema: str, paused: Paused, router: Router) -> Left:
    """Return what a drain still waits for. Raises as ``read`` does."""
    names = names_of(schema)
    with unavailable_on_error("looking at a drain"):
        step = connection.execute(sql.SQL(_STEP).format(**names), {"number": paused.number}).fetchone()
        if step is None:
            return Left(drained=False, causes=["the drain was ended by somebody else"])
        xid, last, drained, ended, alive = step
        if drained:
            return Left(drained=True, events=0)
        causes = [] if alive else ["no relay is running"]
        if not ended:
            old = [row[0] for row in connection.execute(_OLD, {"xid": _short(xid)}).fetchall()]
            causes += [f"a transaction from before the drain is open: {one}" for one in old] or [
                "a transaction from before the drain is open"
            ]
        counted = _counted(connection, names, paused.scope, last, router)
    if counted is None:
        return Left(drained=False, causes=[*causes, f"events could not be counted within {_COUNT_SECONDS} s"])
    blocked = [row["lane"] for row in counted if row["blocked"]]
    if blocked:
        causes.append(f"dead letters block keys of {lanes_text(blocked)}: `outbox dead-letters list`")
    retrying = sum(row["retrying"] for row in counted)
    if retrying:
        causes.append(f"{retrying} events were refused and are tried again: `outbox dead-letters list`")
    held = [one for one in read(connection, schema) if not one.draining and _overlaps(one.scope, paused.scope)]
    causes += [f"{one.scope} {'are' if one.scope == ALL else 'is'} paused" for one in held if counted]
    return Left(drained=False, events=sum(row["events"] for row in counted), causes=causes)


def _counted(
    connection: psycopg.Connection[Any],
    names: Mapping[str, sql.Composable],
    scope: Scope,
    last: int | None,
    router: Router,
) -> list[dict[str, Any]] | None:
    values: dict[str, Any] = {
        "last": last,
        "most": COUNTED,
        "lane": int(scope.name) if scope.kind is ScopeKind.LANE else None,
        "copy": DEAD_LETTER,
    }
    try:
        with connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(STATEMENT_LIMIT, (f"{_COUNT_SECONDS}s",))
            condition = sql.SQL("")
            if scope.kind is ScopeKind.TOPIC:
                rows = cursor.execute(sql.SQL(_KINDS).format(**names), values).fetchall()
                pairs = [tuple(row.values()) for row in rows]
                kinds = [(kind, copy) for kind, copy in pairs if topic_of(router, kind, copy=copy) == scope.name]
                values |= {"types": [kind for kind, _ in kinds], "copies": [copy for _, copy in kinds]}
                condition = sql.SQL(_OF_KINDS)
            return cursor.execute(sql.SQL(_LEFT).format(**names, condition=condition), values).fetchall()
    except psycopg.errors.QueryCanceled:
        return None


def _overlaps(one: Scope, other: Scope) -> bool:
    """Return whether the first scope can hold back events of the second, which is another one."""
    return one != other and (one.kind is not other.kind or ALL in {one, other})


def _set(
    connection: psycopg.Connection[Any],
    schema: str,
    scopes: Sequence[Scope],
    reason: str | None,
    may_write: Callable[[str], bool],
    *,
    drains: bool,
) -> list[Change]:
    for scope in scopes:
        if scope.kind is ScopeKind.TOPIC and not may_write(scope.name):
            raise ConfigurationError(f"no route leads to topic {scope.name!r}; nothing was changed")
    before: dict[Scope, Paused | None] = {}
    with _alone(connection, schema, "setting pauses") as (names, known):
        lanes = {str(lane) for (lane,) in connection.execute(sql.SQL(_LANES).format(**names))}
        for scope in scopes:
            if scope.kind is ScopeKind.LANE and scope.name not in lanes:
                raise ConfigurationError(
                    f"the outbox has no lane {scope.name}, only 0 to {len(lanes) - 1}; nothing was changed"
                )
            before[scope] = there = known.get(scope)
            if there is not None and (there.drains if drains else not there.draining):
                continue
            if there is not None:
                connection.execute(sql.SQL(_DELETE).format(**names), {"number": there.number})
            values = {"scope": str(scope.kind), "name": scope.name, "reason": reason, "drains": drains}
            row = connection.execute(sql.SQL(_INSERT).format(**names), values).fetchone()
            assert row is not None
            details = {"scope": str(scope.kind), "name": scope.name, "number": row[0]}
            if there is not None:
                details["replaced"] = _details(there)
            note(connection, names, "drain" if drains else "pause", reason, details)
        after = {one.scope: one for one in read(connection, schema)}
    return [Change(scope, there, after[scope]) for scope, there in before.items()]


@contextmanager
def _alone(
    connection: psycopg.Connection[Any], schema: str, doing: str
) -> Iterator[tuple[Mapping[str, sql.Composable], Mapping[Scope, Paused]]]:
    """Open a transaction in which no one else changes pauses. Yields the tables' names and the pauses."""
    names = names_of(schema)
    with unavailable_on_error(doing), connection.transaction():
        connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(f"{_LOCK_SECONDS}s")))
        connection.execute(sql.SQL(_ALONE).format(**names))
        yield names, {one.scope: one for one in read(connection, schema)}


def _details(paused: Paused) -> dict[str, Any]:
    return {
        "scope": str(paused.scope.kind),
        "name": paused.scope.name,
        "number": paused.number,
        "state": paused.state,
        "requested_by": paused.requested_by,
        "requested_at": paused.requested_at.isoformat(),
        "reason": paused.reason,
    }


def _short(xid: int) -> str:
    """Return the 32-bit form of a transaction id, as the server's views show it."""
    return str(xid % (1 << 32))
