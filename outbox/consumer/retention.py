"""How long ids are remembered: daily partitions of processed_messages, created ahead and dropped when they are old.

| rows                                             | forgotten                                                     |
|--------------------------------------------------|---------------------------------------------------------------|
| of a day that has a partition                    | with the partition: the day is older than keep_days, and none |
|                                                  | of its rows was seen within keep_days                         |
| of another day (the default partition)           | by group and day, under the same two conditions, in steps     |
| of ids without a time (counted as 1970-01-01)    | never                                                         |

keep_days count back from today, or from the newest day that has ids, whichever is earlier: else all ids would be
forgotten while the database's clock is ahead, and of what comes again later, some would be new, and some too old.

The transaction that forgets ids, or one before it, raises ``forgotten_before`` of the groups that had such rows, and of
no others: a group that reads an old topic for the first time has forgotten nothing. A task reads it after inserting its
ids, so a message whose id may have been forgotten becomes a dead letter instead of being applied twice.

Creating and dropping partitions needs locks that conflict with those of tasks, so they time out quickly and are tried
again later. A role that does not own the tables can't create or drop any; the rows then go to the default partition,
from which they are deleted when they are old. The owner can run `outbox db prune --consumer` for such consumers.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
from psycopg import errors, sql

from outbox._clients import blocks
from outbox._clients.postgres import first_line
from outbox.consumer import connections
from outbox.consumer.errors import ConsumerUnavailable
from outbox.consumer.ids import NO_TIME
from outbox.consumer.postgres_errors import clear_errors
from outbox.consumer.statements import statement
from outbox.errors import SchemaError

KEEP_DAYS: Final = 14
"""The default, in whole days besides today."""

# The lock's name contains the schema: another sink in this database must not wait for this one.
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtextextended('outbox ids ' || %s::text, 0))"
_TRY_LOCK: Final = """
SELECT pg_try_advisory_xact_lock(hashtextextended('outbox ids ' || %s::text, 0)),
       set_config('lock_timeout', %s, true)"""
_AHEAD: Final = 3
_AT_ONCE: Final = 100
"""Partitions that one transaction creates. Each takes four places in the server's lock table until COMMIT, which by
default has 6,400; when it is full, any statement of any session may fail."""
# Below deadlock_timeout's default of 1 s, so that maintenance gives up before a task is cancelled.
_GIVE_WAY: Final = "500ms"
_MOST_HELD: Final = 3
"""After so many locked partitions the rest is left to the next time: a dump locks all of them."""

# What each partition covers, from and to; NULL for MINVALUE and MAXVALUE.
_RANGES: Final = """
SELECT relname, (regexp_match(bounds, $r$FROM \\('(\\d[^']*)'\\)$r$))[1]::date,
       (regexp_match(bounds, $r$TO \\('(\\d[^']*)'\\)$r$))[1]::date
  FROM (SELECT c.relname, pg_get_expr(c.relpartbound, c.oid) AS bounds
          FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
         WHERE i.inhparent = {parent}::regclass) AS parts
 WHERE bounds <> 'DEFAULT' ORDER BY 2, 1"""
_TODAY: Final = "SELECT (now() AT TIME ZONE 'UTC')::date"
# Without ids of days to come: the clock of their writer is ahead.
_ANY_OF: Final = """
SELECT day FROM {processed_messages}
 WHERE day >= %(low)s AND day < %(high)s AND day <= (seen_at AT TIME ZONE 'UTC')::date LIMIT 1"""
_NEWEST_STRAY: Final = """
SELECT max(d.day) FROM {groups} AS g CROSS JOIN LATERAL (
       SELECT p.day FROM {processed_messages_default} AS p
        WHERE p.grp = g.grp AND p.day > %(no_time)s AND p.day <= (p.seen_at AT TIME ZONE 'UTC')::date
        ORDER BY p.day DESC LIMIT 1) AS d"""
# Not ATTACH, which would not block a task that has already chosen the default partition for its row.
_CREATE: Final = "CREATE TABLE {partition} PARTITION OF {processed_messages} FOR VALUES FROM ({low}) TO ({high})"

_HOLD_BACK: Final = "LOCK TABLE {partition} IN SHARE MODE"
_SEEN_LATELY: Final = (
    "SELECT EXISTS (SELECT FROM {partition} WHERE seen_at >= now() - make_interval(days => %(keep_days)s))"
)
_FORGET: Final = """
UPDATE {groups} AS g SET forgotten_before = greatest(g.forgotten_before, %(high)s)
 WHERE EXISTS (SELECT FROM {partition} AS p WHERE p.grp = g.grp)"""
_DROP: Final = "DROP TABLE {partition}"

# By group and day through an index: ids without a time, of which there may be very many, are not read.
STRAY: Final = """
SELECT g.grp, d.day FROM {groups} AS g CROSS JOIN LATERAL (
       SELECT p.day FROM {processed_messages_default} AS p
        WHERE p.grp = g.grp AND p.day > %(no_time)s AND p.day < %(horizon)s
        GROUP BY p.day HAVING max(p.seen_at) < now() - make_interval(days => %(keep_days)s)) AS d"""
# Returns also the steps through the table's blocks that have such rows.
_FORGET_STRAY: Final = """
WITH old AS MATERIALIZED ({stray}),
raised AS (
    UPDATE {groups} AS g SET forgotten_before = greatest(g.forgotten_before, x.day + 1)
      FROM (SELECT grp, max(day) AS day FROM old GROUP BY grp) AS x WHERE x.grp = g.grp)
SELECT array_agg(grp), array_agg(day), ARRAY(
       SELECT DISTINCT (p.ctid::text::point)[0]::bigint / {step}
         FROM old JOIN {processed_messages_default} AS p ON p.grp = old.grp AND p.day = old.day ORDER BY 1)
  FROM old"""
# A task that had read ``forgotten_before`` earlier may have added ids of that day meanwhile. MATERIALIZED: by the index
# on days each step would pass over what those before it have deleted.
_DELETE_STRAY: Final = """
WITH step AS MATERIALIZED (
    SELECT ctid AS place, grp, day FROM {processed_messages_default}
     WHERE {in_step} AND seen_at < now() - make_interval(days => %(keep_days)s))
DELETE FROM {processed_messages_default} WHERE ctid = ANY(ARRAY(
    SELECT place FROM step JOIN unnest(%(groups)s::text[], %(days)s::date[]) AS old (grp, day) USING (grp, day)))"""

_DEFAULT_HOLDS: Final = """
SELECT EXISTS (SELECT FROM {groups} AS g CROSS JOIN LATERAL (
       SELECT FROM {processed_messages_default} AS p WHERE p.grp = g.grp AND p.day = %(day)s LIMIT 1) AS d)"""
_COUNT_STRAY: Final = """
SELECT count(*) FROM ({stray}) AS old JOIN {processed_messages_default} AS p ON p.grp = old.grp AND p.day = old.day"""
_OWNER: Final = "SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = {parent}::regclass"

_DROP_DEPENDENTS: Final = "drop what depends on it"

_BUSY: Final = (errors.LockNotAvailable, errors.QueryCanceled, errors.DeadlockDetected)
_FAILURES: Final = (*_BUSY, errors.InsufficientPrivilege, errors.DependentObjectsStillExist, errors.OutOfMemory)


@dataclass(frozen=True, slots=True)
class RetentionResult:
    """What was done: partitions created and dropped, and rows deleted from the default one.

    problem  why something could not be done.
    denied   the role lacks a right for it.
    needed   something else depends on what should be dropped, such as a view.
    """

    made: Sequence[str] = ()
    dropped: Sequence[str] = ()
    deleted_rows: int = 0
    problem: str | None = None
    denied: bool = False
    needed: bool = False

    def problem_figures(self) -> dict[str, str]:
        """Return the problem for a log, with what the operator can do."""
        figures = {} if self.problem is None else {"problem": self.problem}
        if self.denied:
            figures["to_do"] = "run `outbox db prune --consumer` as the tables' owner, from cron"
        elif self.needed:
            figures["to_do"] = _DROP_DEPENDENTS
        return figures


class IdRetention:
    """The ids that all groups of one sink remember.

    keep_days   whole days besides today, 1 or more.
    name        of the session, which is kept open; a driver shares its own.
    """

    def __init__(self, url: str, schema: str, keep_days: int, name: str = "outbox upkeep") -> None:
        self._url = url
        self._name = name
        self._schema = schema
        self._keep_days = keep_days

    def make(self) -> RetentionResult:
        """Create partitions for the days that are kept, a few ahead, and one for ids without a time.

        By the database's clock. One query if all exist. A day that has rows in the default partition stays there, which
        is correct but slower to forget.
        """
        made: list[str] = []
        tried: set[dt.date] = set()
        try:
            while (names := self._make_step(tried)) is not None:
                made += names
        except _FAILURES as error:
            return RetentionResult(made=tuple(sorted(made)), **_why([error]))
        return RetentionResult(made=tuple(sorted(made)))

    def forget(self) -> RetentionResult:
        """Drop the partitions of old days, and delete such rows from the default partition.

        Does nothing while another driver is doing it. A partition that another session has locked stays;
        the others go.
        """
        try:
            with self._transaction() as connection:
                horizon, old = self._old(connection)
        except _FAILURES as error:
            return RetentionResult(**_why([error]))
        dropped: list[str] = []
        failures: list[psycopg.Error] = []
        needed: list[psycopg.Error] = []
        deleted = 0
        for name, high in old:
            try:
                if self._drop(name, high):
                    dropped.append(name)
            except errors.DependentObjectsStillExist as error:
                needed.append(error)
            except _FAILURES as error:
                failures.append(error)
                # A consumer's own rights are enough for the default partition.
                if isinstance(error, errors.InsufficientPrivilege) or len(failures) == _MOST_HELD:
                    break
        try:
            for rows in self._delete_stray(horizon):
                deleted += rows
        except _FAILURES as error:
            failures.append(error)
        return RetentionResult(dropped=tuple(dropped), deleted_rows=deleted, **_why([*failures, *needed]))

    def prune(self, wait_seconds: float = 30.0) -> Iterator[RetentionResult]:
        """Make and forget what is due, and yield each result; for operators and cron.

        wait_seconds  how long to retry while tasks hold the locks.

        Raises SchemaError without the rights of the tables' owner or where something depends on an old day, and
        ConsumerUnavailable when Postgres is away or tasks hold the locks for too long. What was done by then stays
        done.
        """
        deadline, doing = time.monotonic() + wait_seconds, "keeping the days of processed_messages"
        with clear_errors(doing):
            for step in (self.make, self.forget):
                while True:
                    done = step()
                    yield done
                    if done.problem is None:
                        break
                    text = f"Postgres, {doing}: {done.problem}"
                    if done.denied:
                        raise SchemaError(f"{text}; run it as the owner of the tables, {self._owner()}")
                    if done.needed:
                        raise SchemaError(f"{text}; {_DROP_DEPENDENTS}")
                    if time.monotonic() >= deadline:
                        raise ConsumerUnavailable(
                            f"{text}; tasks may be using them. What is done stays done, run it again"
                        )
                    time.sleep(0.5)

    def due(self) -> RetentionResult:
        """Return what ``prune`` would do now. Changes nothing, and takes no lock that could block a task."""
        with clear_errors("looking at the days of processed_messages"), self._transaction() as connection:
            horizon, old = self._old(connection)
            values = {"keep_days": self._keep_days, "horizon": horizon, "no_time": NO_TIME}
            stray = statement(self._schema, STRAY)
            return RetentionResult(
                made=sorted(
                    _named(day)
                    for day in self._missing(connection)
                    if not self._value(connection, _DEFAULT_HOLDS, {"day": day})
                ),
                dropped=[
                    name
                    for name, _ in old
                    if not self._value(connection, _SEEN_LATELY, values, partition=self._partition(name))
                ],
                deleted_rows=self._value(connection, _COUNT_STRAY, values, stray=stray),
            )

    def _old(self, connection: psycopg.Connection[Any]) -> tuple[dt.date, list[tuple[str, dt.date]]]:
        """Return the first day that is kept, and the partitions before it with the days on which they end."""
        ranges = [
            (name, low, high)
            for name, low, high in self._ranges(connection)
            if low is not None and low > NO_TIME and high is not None
        ]
        today: dt.date = self._value(connection, _TODAY)
        newest = self._newest(connection, [bounds for _, *bounds in ranges])
        horizon = min(today, newest or today) - dt.timedelta(days=self._keep_days)
        return horizon, [(name, high) for name, _, high in ranges if high <= horizon]

    def _newest(self, connection: psycopg.Connection[Any], ranges: Sequence[Sequence[dt.date]]) -> dt.date | None:
        """Return the newest day that has ids; None if there is none."""
        stray: dt.date | None = self._value(connection, _NEWEST_STRAY, {"no_time": NO_TIME})
        for low, high in reversed(ranges):
            row = self._run(connection, _ANY_OF, {"low": low, "high": high}).fetchone()
            if row is not None:
                day: dt.date = row[0]
                return max(day, stray or day)
        return stray

    def _owner(self) -> str:
        with self._transaction() as connection:
            return str(self._value(connection, _OWNER, parent=self._parent(connection)))

    def _missing(self, connection: psycopg.Connection[Any]) -> list[dt.date]:
        today: dt.date = self._value(connection, _TODAY)
        ranges = self._ranges(connection)
        # The days of new messages first.
        days = [today + dt.timedelta(days=ahead) for ahead in range(_AHEAD, -self._keep_days - 1, -1)]
        return [
            day
            for day in (NO_TIME, *days)
            if not any((low is None or low <= day) and (high is None or day < high) for _, low, high in ranges)
        ]

    def _make_step(self, tried: set[dt.date]) -> list[str] | None:
        """Try some of the missing days that were not tried, and return the new partitions; None if none is missing."""
        with self._transaction() as connection:
            if tried.issuperset(self._missing(connection)):
                return None
            connection.execute("SET LOCAL statement_timeout = '5s'; SET LOCAL lock_timeout = '3s'")
            connection.execute(_LOCK, (self._schema,))
            connection.execute("SET LOCAL lock_timeout = '1s'")
            days = [day for day in self._missing(connection) if day not in tried][:_AT_ONCE]
            tried.update(days)
            return [_named(day) for day in days if self._make(connection, day)]

    def _make(self, connection: psycopg.Connection[Any], day: dt.date) -> bool:
        low, high = sql.Literal(day), sql.Literal(day + dt.timedelta(days=1))
        try:
            with connection.transaction():
                self._run(connection, _CREATE, partition=self._partition(_named(day)), low=low, high=high)
        except (errors.CheckViolation, errors.DuplicateTable):
            # The default partition has rows of the day, or the day's partition exists but was detached.
            return False
        return True

    def _drop(self, name: str, high: dt.date) -> bool:
        """Drop one partition unless one of its rows was seen lately. Tasks of other days wait only for the DROP."""
        partition = self._partition(name)
        with self._giving_way() as (connection, locked):
            if not locked:
                return False
            [(there,)] = connection.execute("SELECT to_regclass(%s)", (partition.as_string(connection),))
            if there is None:
                return False
            self._run(connection, _HOLD_BACK, partition=partition)
            values = {"keep_days": self._keep_days, "high": high}
            if self._value(connection, _SEEN_LATELY, values, partition=partition):
                return False
            self._run(connection, _FORGET, values, partition=partition)
            self._run(connection, _DROP, partition=partition)
        return True

    def _delete_stray(self, horizon: dt.date) -> Iterator[int]:
        """Delete old rows of the default partition in steps, and yield how many each of them had."""
        values = {"keep_days": self._keep_days, "horizon": horizon, "no_time": NO_TIME}
        with self._giving_way() as (connection, locked):
            if not locked:
                return
            names = {"stray": statement(self._schema, STRAY), "step": sql.Literal(blocks.STEP)}
            [(groups, days, numbers)] = self._run(connection, _FORGET_STRAY, values, **names)
        for number in numbers:
            with self._giving_way() as (connection, locked):
                if not locked:
                    return
                old = values | {"groups": groups, "days": days}
                deleted = self._run(connection, _DELETE_STRAY, old, in_step=blocks.in_step(number)).rowcount
            yield deleted

    @contextmanager
    def _giving_way(self) -> Iterator[tuple[psycopg.Connection[Any], bool]]:
        """Begin a transaction that gives way. Yields also whether no other driver is forgetting ids."""
        with self._transaction() as connection:
            [(locked, _)] = connection.execute(_TRY_LOCK, (self._schema, _GIVE_WAY))
            yield connection, locked

    def _ranges(self, connection: psycopg.Connection[Any]) -> list[tuple[str, dt.date | None, dt.date | None]]:
        return self._run(connection, _RANGES, parent=self._parent(connection)).fetchall()

    def _parent(self, connection: psycopg.Connection[Any]) -> sql.Literal:
        return sql.Literal(self._partition("processed_messages").as_string(connection))

    def _partition(self, name: str) -> sql.Identifier:
        return sql.Identifier(self._schema, name)

    def _transaction(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        return connections.transaction(self._url, self._name, reset=False)

    def _run(
        self,
        connection: psycopg.Connection[Any],
        query: LiteralString,
        values: Mapping[str, object] | None = None,
        **names: sql.Composable,
    ) -> psycopg.Cursor[Any]:
        return connection.execute(statement(self._schema, query, **names), values)

    def _value(
        self,
        connection: psycopg.Connection[Any],
        query: LiteralString,
        values: Mapping[str, object] | None = None,
        **names: sql.Composable,
    ) -> Any:
        [(value,)] = self._run(connection, query, values, **names)
        return value


def _why(failures: Sequence[psycopg.Error]) -> dict[str, Any]:
    """Return problem, denied and needed of a RetentionResult. What a role must not do will not pass by itself."""
    if not failures:
        return {}
    denied = [error for error in failures if isinstance(error, errors.InsufficientPrivilege)]
    # What is busy may be free the next time.
    busy = [error for error in failures if not isinstance(error, errors.DependentObjectsStillExist)]
    problem = first_line((denied or busy or failures)[0])
    return {"problem": problem, "denied": bool(denied), "needed": not busy}


def _named(day: dt.date) -> str:
    return f"processed_messages_{day:%Y%m%d}"
