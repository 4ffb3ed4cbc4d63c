"""The archive: one partition of ``published`` for each day, created in advance and dropped when it has expired.

Relays and `outbox db prune` do the same work under one advisory lock, so that it is done once. Rows of a day without a
partition go to the default one: publishing does not depend on maintenance. Creating and dropping partitions needs the
rights of the tables' owner; a relay without them logs a warning once a day when something is due, and `outbox db prune`
can do it from cron instead. Partitions created by hand (for a month, say) are kept as long as any of their days, and no
others are created for those days. Nor is one created for a day of which the default partition has many rows: moving
them would keep relays from archiving. For the same reason a relay gives up where the default partition takes long to
read, and tries again an hour later; `outbox db prune` takes the time that it needs.

Old rows of the default partition are deleted in steps (``outbox._clients.blocks``); what an error leaves of them goes
at the next run.

The day is that of the database's clock, which can be wrong: if it jumps ahead by years, everything expires at once. So
nothing is dropped automatically that expired more than MOST_OVERDUE_DAYS ago. Where maintenance runs, each day is
dropped within hours of its expiry; a longer delay means that the clock jumped, that maintenance did not run for days,
or that fewer days are kept than before. An operator can tell these apart, and runs ``outbox db prune --force``.
"""

from __future__ import annotations

import datetime as dt
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, LiteralString

import psycopg
import structlog
from psycopg import errors, sql

from outbox._clients import blocks
from outbox._clients.counting import counted
from outbox._clients.postgres import first_line
from outbox.errors import OperationRefused, SchemaError
from relay.database import unavailable_on_error

log = structlog.get_logger("relay")

# Of this outbox alone. Transaction-level: PgBouncer leaks session locks.
_WAIT_FOR_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0)) IS NOT NULL"
_TRY_LOCK: Final = "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))"
_AHEAD: Final = 3
_MOST_MOVED: Final = 10_000
"""No partition is created for a day of which the default partition has more rows."""
MOST_OVERDUE_DAYS: Final = 3
"""Partitions that expired longer ago are dropped only by an operator. Relays may rest over a weekend without that, and
a wrong clock costs at most these days."""

# The bounds of each partition; NULL for MINVALUE, MAXVALUE and infinity.
_RANGES: Final = """
SELECT relname, (regexp_match(bounds, $r$FROM \\('(\\d[^']*)'\\)$r$))[1]::timestamptz,
       (regexp_match(bounds, $r$TO \\('(\\d[^']*)'\\)$r$))[1]::timestamptz
  FROM (SELECT c.relname, pg_get_expr(c.relpartbound, c.oid) AS bounds
          FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
         WHERE i.inhparent = {parent}::regclass) AS parts
 WHERE bounds <> 'DEFAULT' ORDER BY 2, 1"""

# Partitions that Postgres does not drop, as a view or a function depends on them.
_NEEDED: Final = """
SELECT c.relname
  FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
 WHERE i.inhparent = {parent}::regclass AND EXISTS (
       SELECT FROM pg_depend d LEFT JOIN pg_rewrite r ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid
        WHERE d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid AND d.deptype = 'n'
          AND (r.ev_class <> c.oid OR d.classid = 'pg_proc'::regclass))"""

Ranges = list[tuple[str, dt.datetime | None, dt.datetime | None]]

_TODAY: Final = "SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date"

# An INSERT that was routed to the default partition and then waits for the ATTACH fails. So relays wait for the
# parent's lock instead, before their rows are routed.
_HOLD_BACK: Final = "LOCK TABLE ONLY {parent} IN SHARE ROW EXCLUSIVE MODE"

# The default partition may hold rows of that day already, and ATTACH refuses while it does.
_CREATE: Final = (
    "CREATE TABLE {partition} (LIKE {parent} INCLUDING ALL)",
    """
WITH moved AS (DELETE FROM {default} WHERE published_at >= {start} AND published_at < {end} RETURNING *)
INSERT INTO {partition} SELECT * FROM moved""",
    "ALTER TABLE {parent} ATTACH PARTITION {partition} FOR VALUES FROM ({start}) TO ({end})",
)

_LIMIT: Final = "SET LOCAL statement_timeout = '500ms'"
"""Postgres may read all of the default partition to move its rows, and again to attach the new one. Relays wait for the
lock and for both."""
_REST_SECONDS: Final = 3600.0

_READABLE: Final = "SELECT has_table_privilege({default}, 'SELECT')"

_ROWS_BY_DAY: Final = """
SELECT (published_at AT TIME ZONE 'UTC')::date, count(*) FROM {default} WHERE published_at < {before} GROUP BY 1"""

_DELETE_STRAY: Final = "DELETE FROM {default} WHERE {in_step} AND published_at < {before}"


# Missing rights, a table with that name, a lock that others hold.
_IN_THE_WAY: Final = (psycopg.ProgrammingError, psycopg.IntegrityError, errors.LockNotAvailable)
# Of one step: also rows that take long to read.
_GIVEN_UP: Final = (*_IN_THE_WAY, errors.QueryCanceled)


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """The work that is due: days to create a partition for, partitions to drop, and old rows in the default partition.

    ``oldest`` is the oldest day (UTC) that is kept. ``overdue_days``: how many days ago the oldest due data expired,
    apart from partitions that can't be dropped, as something depends on them.
    Once it is done, it is what this process has done, and ``failure`` is the first error of the rest.
    """

    oldest: dt.date
    create: Sequence[dt.date]
    drop: Sequence[str]
    stray_rows: int
    overdue_days: int = 0
    failure: psycopg.Error | None = None

    @property
    def held_back(self) -> bool:
        """Return whether nothing may be dropped before an operator has checked the clock."""
        return self.overdue_days > MOST_OVERDUE_DAYS

    @property
    def empty(self) -> bool:
        return not self.create and not self.drop and not self.stray_rows


def overdue(plan: PrunePlan) -> OperationRefused:
    """Return the error for due data that expired too long ago to trust the clock: nothing was dropped."""
    partitions, rows = counted(len(plan.drop), "partition"), counted(plan.stray_rows, "row")
    return OperationRefused(
        f"the archive is kept as it is: {partitions} and {rows} outside of any are from before {plan.oldest}, and the "
        f"first of them should have been dropped {counted(plan.overdue_days, 'day')} ago. "
        "Either the database's clock is wrong, or the archive was not maintained for days, or fewer days are kept than "
        "before. See `outbox db prune --dry-run`; when it is right, run `outbox db prune --force`"
    )


def raise_failure(plan: PrunePlan) -> None:
    """Raise SchemaError or Unavailable for what was not done."""
    if isinstance(plan.failure, errors.DependentObjectsStillExist):
        raise SchemaError(f"Postgres, keeping the archive: {first_line(plan.failure)}; drop what depends on it")
    if plan.failure is not None:
        with unavailable_on_error("keeping the archive"):
            raise plan.failure


class Retention:
    """Maintains one outbox's archive. ``days`` is the number of whole days that are kept besides today."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], schema: str, days: int) -> None:
        self._connect = connect
        self._schema = schema
        self._days = days
        self._parent = sql.Identifier(schema, "published")
        self._default = sql.Identifier(schema, "published_default")
        self._lock = f"outbox archive {schema}"
        self._warned_on: dt.date | None = None
        self._create_after = -math.inf

    def keep(self) -> None:
        """Do the work that is due, in one relay only. Raises Unavailable when Postgres can't be reached."""
        with unavailable_on_error("keeping the archive"), self._connect() as connection:
            try:
                done = self._do(connection, _TRY_LOCK, force=False)
                failure = None if done is None else done.failure
            except _IN_THE_WAY as error:
                done, failure = None, error
        held_back = done is not None and done.held_back
        first_today = (failure is not None or held_back) and self._first_today()
        if failure is not None and first_today:
            # Publishing goes on in any case.
            log.warning(
                "an old partition of the archive is not dropped; drop what depends on it"
                if isinstance(failure, errors.DependentObjectsStillExist)
                else "the archive's partitions could not be kept; rows go to the default partition meanwhile. "
                "Run `outbox db prune` as the tables' owner",
                error=first_line(failure),
            )
        if done is None:
            return
        if held_back:
            if first_today:
                log.error("old partitions of the archive are not dropped", error=str(overdue(done)))
            done = replace(done, drop=[], stray_rows=0)
        if done.stray_rows:
            log.info("old rows of the archive are deleted", rows=done.stray_rows)
        if done.create or done.drop:
            log.info("archive kept", created=[str(day) for day in done.create], dropped=list(done.drop))

    def prune(self, *, dry_run: bool, force: bool = False) -> PrunePlan:
        """Do the work that is due, or with ``dry_run`` only return it; see ``raise_failure``.

        Without ``force``, raises OperationRefused when the due data expired too long ago; the coming days'
        partitions are still created.
        """
        with unavailable_on_error("keeping the archive"), self._connect() as connection:
            if dry_run:
                with connection.transaction():
                    return self._plan(connection)
            plan = self._do(connection, _WAIT_FOR_LOCK, force=force)
            assert plan is not None
        if plan.held_back and not force:
            raise_failure(plan)
            raise overdue(plan)
        return plan

    def _do(self, connection: psycopg.Connection[Any], lock: LiteralString, *, force: bool) -> PrunePlan | None:
        """Return what was done; None if another relay is doing it."""
        with self._step(connection, lock) as locked:
            if not locked:
                return None
            plan = self._plan(connection)
        if lock == _TRY_LOCK and time.monotonic() < self._create_after:
            plan = replace(plan, create=[])
        failure = None
        if plan.stray_rows and (force or not plan.held_back):
            deleted, failure = self._delete_stray(connection, lock, plan.oldest)
            plan = replace(plan, stray_rows=deleted)
        done = self._change(connection, lock, plan, force=force)
        return done if failure is None else replace(done, failure=failure)

    def _change(
        self, connection: psycopg.Connection[Any], lock: LiteralString, plan: PrunePlan, *, force: bool
    ) -> PrunePlan:
        """Drop and create partitions, each in its own transaction, and return what was done.

        What fails keeps nothing else from being done, but for more of the same: relays wait at each.
        """
        failures: list[psycopg.Error] = []
        dropped: list[str] = []
        created: list[dt.date] = []
        may_drop = force or not plan.held_back
        for name in plan.drop if may_drop else ():
            try:
                with self._step(connection, lock) as locked:
                    # Others may have done it between two steps.
                    if locked and name in {name for name, *_ in self._ranges(connection)}:
                        connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(self._schema, name)))
                        dropped.append(name)
            except errors.DependentObjectsStillExist as error:
                failures.append(error)
            except _GIVEN_UP as error:
                failures.append(error)
                break
        try:
            for day in plan.create:
                with self._step(connection, lock) as locked:
                    if locked and not _covered(day, self._ranges(connection)):
                        self._create(connection, day, limited=lock == _TRY_LOCK)
                        created.append(day)
        except _GIVEN_UP as error:
            failures.append(error)
            if isinstance(error, errors.QueryCanceled):
                self._create_after = time.monotonic() + _REST_SECONDS
        done = replace(plan, create=created, drop=dropped if may_drop else plan.drop)
        return replace(done, failure=failures[0]) if failures else done

    @contextmanager
    def _step(self, connection: psycopg.Connection[Any], lock: LiteralString) -> Iterator[bool]:
        """Begin a transaction, and yield whether it has the lock."""
        with connection.transaction():
            ((locked,),) = connection.execute(lock, (self._lock,)).fetchall()
            # Creating and dropping take locks that block every archiving relay, also while they wait behind a dump:
            # give up before a relay does, which waits a tenth of its lease.
            connection.execute("SET LOCAL lock_timeout = '400ms'")
            connection.execute("SET LOCAL idle_in_transaction_session_timeout = '5s'")
            yield locked

    def _delete_stray(
        self, connection: psycopg.Connection[Any], lock: LiteralString, oldest: dt.date
    ) -> tuple[int, psycopg.Error | None]:
        """Delete rows that no partition had. Return how many, and the error that ended it.

        Before the changes, as relays wait for these.
        """
        deleted, before = 0, sql.Literal(_midnight(oldest))
        try:
            for in_step in blocks.steps(connection, self._default):
                with self._step(connection, lock) as locked:
                    if not locked:
                        break
                    step = sql.SQL(_DELETE_STRAY).format(default=self._default, in_step=in_step, before=before)
                    rows = connection.execute(step).rowcount
                deleted += rows
        except _GIVEN_UP as error:
            return deleted, error
        return deleted, None

    def _plan(self, connection: psycopg.Connection[Any]) -> PrunePlan:
        ((today,),) = connection.execute(_TODAY).fetchall()
        oldest = today - dt.timedelta(days=self._days)
        end = today + dt.timedelta(days=_AHEAD + 1)
        default = sql.Literal(self._default.as_string(connection))
        ranges = self._ranges(connection)
        parent = sql.Literal(self._parent.as_string(connection))
        needed = {name for (name,) in connection.execute(sql.SQL(_NEEDED).format(parent=parent))}
        ((readable,),) = connection.execute(sql.SQL(_READABLE).format(default=default)).fetchall()
        rows: dict[dt.date, int] = {}
        # Without the right to read them there is none to delete or move them either.
        if readable:
            query = sql.SQL(_ROWS_BY_DAY).format(default=self._default, before=sql.Literal(_midnight(end)))
            rows = dict(connection.execute(query).fetchall())
        stray = [day for day in rows if day < oldest]
        old = [(name, high.astimezone(dt.UTC).date()) for name, _, high in ranges if high and high <= _midnight(oldest)]
        due = [day for name, day in old if name not in needed] + [day + dt.timedelta(days=1) for day in stray]
        return PrunePlan(
            oldest=oldest,
            create=[
                day
                for day in (today + dt.timedelta(days=ahead) for ahead in range(_AHEAD + 1))
                if not _covered(day, ranges) and rows.get(day, 0) <= _MOST_MOVED
            ],
            drop=[name for name, _ in old],
            stray_rows=sum(rows[day] for day in stray),
            overdue_days=(oldest - min(due)).days if due else 0,
        )

    def _ranges(self, connection: psycopg.Connection[Any]) -> Ranges:
        parent = sql.Literal(self._parent.as_string(connection))
        return connection.execute(sql.SQL(_RANGES).format(parent=parent)).fetchall()

    def _create(self, connection: psycopg.Connection[Any], day: dt.date, *, limited: bool) -> None:
        connection.execute(sql.SQL(_HOLD_BACK).format(parent=self._parent))
        if limited:
            connection.execute(_LIMIT)
        names = {
            "partition": sql.Identifier(self._schema, f"published_{day:%Y_%m_%d}"),
            "parent": self._parent,
            "default": self._default,
            "start": sql.Literal(_midnight(day)),
            "end": sql.Literal(_midnight(day + dt.timedelta(days=1))),
        }
        for statement in _CREATE:
            connection.execute(sql.SQL(statement).format(**names))

    def _first_today(self) -> bool:
        """Return whether this is the first complaint of the day, by the relay's own clock."""
        today = dt.datetime.now(dt.UTC).date()
        first, self._warned_on = self._warned_on != today, today
        return first


def _covered(day: dt.date, ranges: Ranges) -> bool:
    """Return whether a partition has any part of a day."""
    start, end = _midnight(day), _midnight(day + dt.timedelta(days=1))
    return any((low is None or low < end) and (high is None or high > start) for _, low, high in ranges)


def _midnight(day: dt.date) -> dt.datetime:
    return dt.datetime(day.year, day.month, day.day, tzinfo=dt.UTC)
