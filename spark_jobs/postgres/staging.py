"""Staging tables: rows that Spark's tasks copy, for one transaction of the driver to apply.

Each round, or batch of a stream, has its own unlogged table. In a shared one, deleted rows would stay until VACUUM
removes them, which it can't while any old transaction is open, so each round would read past the rows of all earlier
rounds. A new table costs some 30 rows in the catalogs instead, and autovacuum keeps up.

| crash point                         | result                                                                         |
|-------------------------------------|--------------------------------------------------------------------------------|
| a task before or after its COMMIT   | Spark retries it under another name; the first attempt's rows are never read   |
| an abandoned task writes            | into a table that is never read; once that is dropped, its COPY fails          |
| the driver before it drops tables   | the next driver drops them                                                     |
| a table is locked (pg_dump, a task) | it is left to the next round, or to the next driver                            |
| Postgres crashes                    | the tables are unlogged, so they are empty; the count differs: tried again     |
| a newer driver drops it meanwhile   | the tasks' COPY fails, or the count differs; then the next attempt is Fenced   |
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from outbox.consumer.errors import ConsumerUnavailable
from outbox.consumer.groups import ONE_CONSUMER
from spark_jobs.postgres.batch_table import STAGED_AT, STAGED_BY
from spark_jobs.postgres.group_store import PostgresGroupStore

if TYPE_CHECKING:
    import pyarrow as pa

SHARED: Final = "staged_shared"
"""The kind of a table that the first of a batch's tasks creates."""

_OF_DRIVERS: Final = "staged"
_OWN: Final = {STAGED_BY: "text", STAGED_AT: "bigint"}
# Each table belongs to one round: what holds a lock on it is an abandoned task, or reads all tables, as pg_dump does.
_PATIENCE: Final = "SET LOCAL lock_timeout = '200ms'"
_LEFT: Final = """
SELECT relname FROM pg_class
 WHERE relkind = 'r' AND relnamespace = to_regnamespace(%(schema)s) AND relname LIKE %(like)s"""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a task needs to stage rows: the sink's URL, the table, the group, and the columns with their types."""

    url: str = field(repr=False)
    schema: str
    table: str
    group: str
    columns: Mapping[str, str]

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.table)

    def creating(self, condition: sql.SQL) -> sql.Composed:
        fields = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in self.staged_columns.items()
        )
        return sql.SQL("CREATE UNLOGGED TABLE {} {} ({})").format(condition, self.identifier, fields)

    @property
    def staged_columns(self) -> dict[str, str]:
        return {**self.columns, **_OWN}


@dataclass
class StagingTables:
    """The staging tables of a group. ``advice`` is part of the error that is raised if the group was taken over."""

    store: PostgresGroupStore
    advice: str = ONE_CONSUMER
    _made: list[sql.Identifier] = field(default_factory=list)
    """The tables that this driver has created and not dropped yet."""
    _cleaned: int | None = None

    def create(self, columns: Mapping[str, str], generation: int, *, check: bool) -> StagePlan:
        """Create a table.

        check  whether to raise Fenced, and create no table, if the group has been taken over: its new driver would not
               look for the table. Must be False while a transaction of ours holds the offsets: this is another session,
               and it would wait for a driver that takes the group over, which holds the group's row and waits for the
               offsets.
        """
        store = self.store
        plan = StagePlan(store.url, store.schema, new_name(store.group), store.group, columns)
        # Recorded before the table exists: if COMMIT gets no answer, it may have been created.
        self._made.append(plan.identifier)
        with self.store.transaction() as connection:
            if check:
                self.store.rows.require(connection, generation, advice=self.advice)
            connection.execute(plan.creating(sql.SQL("")))
        return plan

    def drop_made(self) -> None:
        """Drop the tables that this driver has created, whatever the outcome of the round."""
        self._made[:] = [table for table in self._made if not drop(self.store, table)]

    def drop_older(self, generation: int) -> None:
        """Drop the tables that older generations of the group have left; once for each generation. Raises Fenced."""
        if self._cleaned == generation:
            return
        with self.store.transaction() as connection:
            # A newer generation has no table yet: none can begin before this transaction ends.
            self.store.rows.require(connection, generation, advice=self.advice)
            older = [table for table in _left(self.store, connection) if table not in self._made]
        if not [table for table in older if not drop(self.store, table)]:
            self._cleaned = generation


def drop(store: PostgresGroupStore, table: sql.Identifier) -> bool:
    """Drop a table. Returns False if that must be tried again: a round does not fail because of it."""
    try:
        with store.transaction() as connection:
            connection.execute(_PATIENCE)
            # The driver that created it may be dropping it at the same time.
            connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(table))
    except (psycopg.Error, ConsumerUnavailable):
        return False
    return True


def new_name(group: str, kind: str = _OF_DRIVERS) -> str:
    return f"{kind}_{_digest(group)}_{uuid.uuid4().hex[:12]}"


def _left(
    store: PostgresGroupStore, connection: psycopg.Connection[Any], kind: str = _OF_DRIVERS
) -> list[sql.Identifier]:
    """Return all staging tables of a kind that a group has."""
    schema = sql.Identifier(store.schema).as_string(connection)
    values = {"schema": schema, "like": f"{kind}_{_digest(store.group)}_%".replace("_", r"\_")}
    return [sql.Identifier(store.schema, name) for (name,) in connection.execute(_LEFT, values)]


def create_shared(connection: psycopg.Connection[Any], plan: StagePlan) -> None:
    """Create a table for all tasks of a batch, unless one of them has."""
    # IF NOT EXISTS alone fails when two sessions create the table at the same time.
    connection.execute("SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended(%s, 0))", (plan.table,))
    connection.execute(plan.creating(sql.SQL("IF NOT EXISTS")))


def drop_shared(store: PostgresGroupStore) -> None:
    """Drop all SHARED tables of a group. What can't be dropped now is left to the next call.

    Not those that drivers have created: one that is newer than the caller may need them.
    """
    tables: list[sql.Identifier] = []
    with suppress(psycopg.Error, ConsumerUnavailable), store.transaction() as connection:
        tables = _left(store, connection, SHARED)
    for table in tables:
        drop(store, table)


def _digest(group: str) -> str:
    return hashlib.sha256(group.encode()).hexdigest()[:12]


def named(name: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches with the name of the attempt that stages them, and their rows numbered."""
    import pyarrow as pa

    rows = 0
    for batch in batches:
        numbers = pa.array(range(rows, rows + batch.num_rows), pa.int64())
        rows += batch.num_rows
        with_name = batch.append_column(STAGED_BY, pa.array([name] * batch.num_rows, pa.string()))
        yield with_name.append_column(STAGED_AT, numbers)
