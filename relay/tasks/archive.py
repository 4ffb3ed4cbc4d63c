"""The archive: one partition of ``published`` for each day, created in advance and dropped when it has expired.

Relays and `outbox db prune` do the same work under one advisory lock, so that it is done once. Rows of a day without a
partition go to the default one: publishing does not depend on maintenance. Creating and dropping partitions needs the
rights of the tables' owner; a relay without them logs a warning once a day when something is due, and `outbox db prune`
can do it from cron instead. Partitions created by hand (for a month, say) are kept as long as any of their days, and no
others are created for those days.

The day is that of the database's clock, which can be wrong: if it jumps ahead by years, everything expires at once. So
nothing is dropped automatically that expired more than MOST_OVERDUE_DAYS ago. Where maintenance runs, each day is
dropped within hours of its expiry; a longer delay means that the clock jumped, that maintenance did not run for days,
or that fewer days are kept than before. An operator can tell these apart, and runs ``outbox db prune --force``.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
import structlog
from psycopg import errors, sql

from outbox._clients.errors import first_line
from outbox.errors import OperationRefused
from relay.database import unavailable_on_error

log = structlog.get_logger("relay")

# Of this outbox alone. Transaction-level: PgBouncer leaks session locks.
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"
_TRY_LOCK: Final = "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))"
_AHEAD: Final = 3
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

_READABLE: Final = "SELECT has_table_privilege({default}, 'SELECT')"

_STRAY: Final = """
SELECT count(*), min((published_at AT TIME ZONE 'UTC')::date) FROM {default} WHERE published_at < {before}"""

_DROP_STRAY: Final = "DELETE FROM {default} WHERE published_at < {before}"


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """The work that is due: days to create a partition for, partitions to drop, and old rows in the default partition.

    ``oldest`` is the oldest day (UTC) that is kept. ``overdue_days``: how many days ago the oldest due data expired.
    """

    oldest: dt.date
    create: Sequence[dt.date]
    drop: Sequence[str]
    stray_rows: int
    overdue_days: int = 0

    @property
    def held_back(self) -> bool:
        """Return whether nothing may be dropped before an operator has checked the clock."""
        return self.overdue_days > MOST_OVERDUE_DAYS

    @property
    def empty(self) -> bool:
        return not self.create and not self.drop and not self.stray_rows


def overdue(plan: PrunePlan) -> OperationRefused:
    """Return the error for due data that expired too long ago to trust the clock: nothing was dropped."""
    return OperationRefused(
        f"the archive is kept as it is: {len(plan.drop)} partitions and {plan.stray_rows} rows outside of any are "
        f"from before {plan.oldest}, and the first of them should have been dropped {plan.overdue_days} days ago. "
        "Either the database's clock is wrong, or the archive was not maintained for days, or fewer days are kept than "
        "before. See `outbox db prune --dry-run`; when it is right, run `outbox db prune --force`"
    )


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

    def keep(self) -> None:
        """Do the work that is due, in one relay only. Raises Unavailable when Postgres can't be reached."""
        with unavailable_on_error("keeping the archive"), self._connect() as connection, connection.transaction():
            if not self._locked(connection):
                return
            try:
                with connection.transaction():
                    done = self._begin(connection, force=False)
                with connection.transaction():
                    self._change(connection, done, force=False)
            except (psycopg.ProgrammingError, psycopg.IntegrityError, errors.LockNotAvailable) as error:
                # Missing rights, a table with that name, a lock that others hold: publishing goes on in any case.
                if self._first_today():
                    log.warning(
                        "the archive's partitions could not be kept; rows go to the default partition meanwhile. "
                        "Run `outbox db prune` as the tables' owner",
                        error=first_line(error),
                    )
                return
        if done.held_back and self._first_today():
            log.error("old partitions of the archive are not dropped", error=str(overdue(done)))
        dropped = [] if done.held_back else list(done.drop)
        if done.create or dropped or (done.stray_rows and not done.held_back):
            log.info("archive kept", created=[str(day) for day in done.create], dropped=dropped)

    def prune(self, *, dry_run: bool, force: bool = False) -> PrunePlan:
        """Do the work that is due, or with ``dry_run`` only return it. Raises SchemaError without the owner's rights.

        Without ``force``, raises OperationRefused when the due data expired too long ago; the coming days'
        partitions are still created.
        """
        with unavailable_on_error("keeping the archive"), self._connect() as connection, connection.transaction():
            if dry_run:
                return self._plan(connection)
            connection.execute(_LOCK, (self._lock,))
            plan = self._begin(connection, force=force)
            self._change(connection, plan, force=force)
        if plan.held_back and not force:
            raise overdue(plan)
        return plan

    def _locked(self, connection: psycopg.Connection[Any]) -> bool:
        row = connection.execute(_TRY_LOCK, (self._lock,)).fetchone()
        return bool(row and row[0])

    def _plan(self, connection: psycopg.Connection[Any]) -> PrunePlan:
        today: dt.date = self._row(connection, _TODAY)[0]
        oldest = today - dt.timedelta(days=self._days)
        names = {
            "parent": sql.Literal(self._parent.as_string(connection)),
            "default": sql.Literal(self._default.as_string(connection)),
        }
        ranges = connection.execute(sql.SQL(_RANGES).format(**names)).fetchall()

        def covered(day: dt.date) -> bool:
            start, end = _midnight(day), _midnight(day + dt.timedelta(days=1))
            return any((low is None or low < end) and (high is None or high > start) for _, low, high in ranges)

        stray, first_stray = 0, None
        # Without the right to read them there is none to delete them either.
        if self._row(connection, _READABLE, **names)[0]:
            before = sql.Literal(_midnight(oldest))
            stray, first_stray = self._row(connection, _STRAY, default=self._default, before=before)
        old = [(name, high.astimezone(dt.UTC).date()) for name, _, high in ranges if high and high <= _midnight(oldest)]
        due = [day for _, day in old] + ([] if first_stray is None else [first_stray + dt.timedelta(days=1)])
        return PrunePlan(
            oldest=oldest,
            create=[
                day for day in (today + dt.timedelta(days=ahead) for ahead in range(_AHEAD + 1)) if not covered(day)
            ],
            drop=[name for name, _ in old],
            stray_rows=stray,
            overdue_days=(oldest - min(due)).days if due else 0,
        )

    @staticmethod
    def _row(connection: psycopg.Connection[Any], query: LiteralString, **names: sql.Composable) -> Any:
        row = connection.execute(sql.SQL(query).format(**names)).fetchone()
        assert row is not None
        return row

    def _begin(self, connection: psycopg.Connection[Any], *, force: bool) -> PrunePlan:
        """Return what is due, and delete rows that no partition had: they stay deleted if ``_change`` fails."""
        # Creating and dropping take locks that block every archiving relay: give up soon.
        connection.execute("SET LOCAL lock_timeout = '2s'")
        connection.execute("SET LOCAL idle_in_transaction_session_timeout = '5s'")
        plan = self._plan(connection)
        if plan.stray_rows and (force or not plan.held_back):
            # First: it may take minutes, and relays wait for the lock of a DROP.
            before = sql.Literal(_midnight(plan.oldest))
            connection.execute(sql.SQL(_DROP_STRAY).format(default=self._default, before=before))
        return plan

    def _change(self, connection: psycopg.Connection[Any], plan: PrunePlan, *, force: bool) -> None:
        """Drop and create partitions."""
        if force or not plan.held_back:
            for name in plan.drop:
                connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(self._schema, name)))
        if plan.create:
            connection.execute(sql.SQL(_HOLD_BACK).format(parent=self._parent))
        for day in plan.create:
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


def _midnight(day: dt.date) -> dt.datetime:
    return dt.datetime(day.year, day.month, day.day, tzinfo=dt.UTC)
