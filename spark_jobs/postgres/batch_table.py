"""Load rows into ``batch``, drop repeats, run the effect: the steps that all transactions have in common.

A message that makes a step fail is rejected: the transaction is rolled back, and the driver runs the range again
without the message, which it stores as a dead letter in the same transaction. So the fast path carries no raw values,
and one bad row costs one row.

| what fails                                   | how the rejected message is found                                    |
|----------------------------------------------|----------------------------------------------------------------------|
| COPY: a value that the column's type refuses | CopyError; again in parts, halved down to single rows                |
| the effect, with an error of ``by_data``     | the batch in halves, each under a savepoint, in the order of offsets |
| parts fail together, but none by itself      | there is none: each message was applied once, in smaller batches     |
| the effect raises Reject                     | Reject has its id                                                    |
| an id is of a day that is forgotten          | by a query, after the ids were inserted                              |
| any other error of the database              | not searched: the job tries again if it may pass, also where a       |
|                                              | function has wrapped it, or ends (EffectFailed)                      |

At most ``max_dead`` + 1 rejected messages are named: with that many the job ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from outbox.consumer.errors import shown
from outbox.consumer.model import META_PLACE, MessageRef, RejectedRecord, refs_of
from outbox.consumer.postgres_errors import by_data, caused_by, passing
from outbox.consumer.statements import IMMEDIATE
from spark_jobs.dedup.strategies import DedupStore, Strategy
from spark_jobs.errors import Reject, StagedRowsLost
from spark_jobs.outcomes import CopyError, EffectError, RejectedRecords
from spark_jobs.postgres.copying import Unfit, copy_rows
from spark_jobs.postgres.fitting import copy_fitting

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_jobs.ids import Ids
    from spark_jobs.job import PythonEffect

STAGED_BY: Final = "outbox_batch_staged_by"
STAGED_AT: Final = "outbox_batch_staged_at"
"""Columns of a staging table: which attempt of a task staged a row, and in which order."""

_PLACE: Final = "message_topic, message_part, message_offset"
_HOLD: Final = """
CREATE TEMPORARY TABLE outbox_batch_held ON COMMIT DROP AS
SELECT *, pg_catalog.dense_rank() OVER (ORDER BY message_topic, message_part, message_offset) AS outbox_batch_held_at
  FROM batch"""
_HELD: Final = """
SELECT DISTINCT message_topic, message_part, message_offset FROM outbox_batch_held
 ORDER BY message_topic, message_part, message_offset"""
_MOST_TAKEN_BACK: Final = 1_000
"""How many rolled-back messages may be left in the file of ``batch`` before it is emptied."""


class BatchTable:
    """One use of the table ``batch``, in an open transaction.

    columns   of ``batch``, with their Postgres types.
    bisect    find rejected messages; otherwise an error caused by the rows is an EffectError.
    max_dead  more rejected messages than this are an EffectError.
    """

    def __init__(
        self,
        cursor: psycopg.Cursor[Any],
        dedup: DedupStore,
        columns: Mapping[str, str],
        strategy: Strategy,
        effect: str | PythonEffect,
        *,
        bisect: bool,
        max_dead: int,
    ) -> None:
        self._cursor = cursor
        self._dedup = dedup
        self._columns = columns
        self._strategy = strategy
        self._effect = effect
        self._bisecting = bisect
        self._max_dead = max_dead
        self.placed = set(META_PLACE) <= set(columns)
        """The rows have the columns that identify their messages."""
        self._kept: list[pa.RecordBatch] = []
        self._staged: tuple[sql.Identifier, list[str]] | None = None
        self._ids: list[Ids] | None = None
        self._listed = sql.SQL(", ").join(map(_in_query, columns))
        fields = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(column), sql.SQL(kind)) for column, kind in columns.items()
        )
        cursor.execute(sql.SQL("CREATE TEMPORARY TABLE batch ({}) ON COMMIT DROP").format(fields))

    def copy(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Stream rows into ``batch``. Raises CopyError."""
        try:
            copy_rows(self._cursor, sql.Identifier("batch"), self._columns, self._ids_while(self._kept_while(batches)))
        except (psycopg.Error, Unfit) as error:
            if isinstance(error, psycopg.Error) and (passing(error) or not by_data(error)):
                raise
            if not self._bisecting:
                raise EffectError(shown(error)) from error
            raise CopyError from error

    def copy_leniently(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Do the same after ``copy`` has raised CopyError. Raises RejectedRecords where values do not fit."""
        found: list[RejectedRecord] = []
        table = sql.Identifier("batch")
        copy_fitting(self._cursor, table, self._columns, self._kept_while(batches), found, self._max_dead)
        if found:
            raise RejectedRecords(found)

    def take(self, staged: sql.Identifier, names: Sequence[str], rows: int) -> None:
        """Fill ``batch`` from a staging table, with the rows that were staged under ``names``, which are ``rows``.

        Raises StagedRowsLost if rows are missing.
        """
        self._staged = staged, list(names)
        source, order = self._taken()
        insert = sql.SQL("INSERT INTO batch ({0}) SELECT {0} FROM {1} ORDER BY {2}")
        try:
            taken = self._cursor.execute(insert.format(self._listed, source, order), ()).rowcount
        except psycopg.errors.UndefinedTable as error:
            raise StagedRowsLost(f"{staged.as_string(None)} is gone: another driver has dropped it") from error
        if taken != rows:
            raise StagedRowsLost(
                f"{rows} rows were staged and {taken} are there: Postgres has crashed meanwhile, which empties a "
                "staging table"
            )
        if taken > 1000:
            self._cursor.execute("ANALYZE batch")

    def _taken(self) -> tuple[sql.Composable, sql.Composable]:
        """Return the staged rows as a SQL source, and their order.

        The order is that of the messages or, if rows no longer identify messages, that of the tasks and their rows.
        """
        assert self._staged is not None
        staged, names = self._staged
        mine, by = sql.Literal(names), sql.Identifier(STAGED_BY)
        source = sql.SQL("(SELECT * FROM {} WHERE {} = ANY({}::text[])) AS staged").format(staged, by, mine)
        first = (
            sql.SQL(_PLACE) if self.placed else sql.SQL("pg_catalog.array_position({}::text[], {})").format(mine, by)
        )
        return source, first + sql.SQL(", {}").format(sql.Identifier(STAGED_AT))

    def places(self) -> set[MessageRef]:
        return set(self._cursor.execute("SELECT message_topic, message_part, message_offset FROM batch").fetchall())

    def reduce(self, *, suspect: bool, forgiven: AbstractSet[MessageRef] = frozenset()) -> None:
        """Leave only the rows to be applied. Raises RejectedRecords.

        Messages are rejected whose day is forgotten, unless they are ``forgiven``, and those whose key or version
        does not fit the sink's table.
        """
        try:
            with self._cursor.connection.transaction():
                self._strategy.reduce(self._cursor, self._dedup, self._ids, suspect=suspect)
        except psycopg.Error as error:
            if passing(error) or not by_data(error):
                raise
            if not self._bisecting:
                raise EffectError(shown(error)) from error
            found = self._bisect(lambda: self._strategy.check(self._cursor))
            raise (RejectedRecords(found) if found else EffectError(shown(error))) from error
        most = self._max_dead + 1 + len(forgiven)
        old = [one for one in self._strategy.too_old(self._cursor, self._dedup, most) if one[0] not in forgiven]
        if old:
            rejected = [RejectedRecord(place, "too-old", why) for place, why in old]
            if not self._bisecting:
                raise EffectError(f"{rejected[0].place}: {rejected[0].error}")
            raise RejectedRecords(rejected)

    def count(self) -> int:
        [(count,)] = self._cursor.execute("SELECT count(*) FROM batch").fetchall()
        return int(count)

    def per_partition(self) -> dict[tuple[str, int], int]:
        """Return the number of rows in ``batch`` for each topic and partition."""
        rows = self._cursor.execute("SELECT message_topic, message_part, count(*) FROM batch GROUP BY 1, 2").fetchall()
        return {(topic, part): count for topic, part, count in rows}

    def apply(self, *, at_most_once: bool = False) -> None:
        """Run the effect. Raises RejectedRecords or EffectError; errors that may pass are raised as they are.

        at_most_once  do not run a function again for parts of the rows, to find the messages at which it fails: a
                      savepoint does not take back its effects elsewhere. When RejectedRecords is raised, SQL has been
                      applied to the other messages.
        """
        once = at_most_once and callable(self._effect)
        try:
            self._run()
            return
        except RejectedRecords as error:
            if once:
                raise EffectError(f"{error.found[0].place}: {error.found[0].error}") from error
            raise
        except psycopg.Error as error:
            if passing(error):
                raise
            if once or not (self._bisecting and by_data(error)):
                raise EffectError(shown(error)) from error
        found = self._bisect(self._run)
        if found:
            raise RejectedRecords(found)

    def _bisect(self, do: Callable[[], object]) -> list[RejectedRecord]:
        """Call ``do`` for smaller and smaller parts of ``batch``, in offset order. Return the messages that fail.

        All rows of a message are in the same part, so a message is applied or refused as a whole.
        """
        refill = sql.SQL(
            "INSERT INTO batch ({0}) SELECT {0} FROM outbox_batch_held "
            "WHERE outbox_batch_held_at BETWEEN %s AND %s ORDER BY outbox_batch_held_at"
        ).format(self._listed)
        self._cursor.execute("DROP TABLE IF EXISTS pg_temp.outbox_batch_held")
        # Under a name that no table of the sink has: a temporary table hides others.
        self._cursor.execute(_HOLD)
        self._cursor.execute("CREATE INDEX ON outbox_batch_held (outbox_batch_held_at)")
        places = self._cursor.execute(_HELD).fetchall()
        found: list[RejectedRecord] = []
        filled = 0
        # The first and the last message of each part, counted from 1.
        parts = [(1, len(places))] if places else []
        while parts:
            low, high = parts.pop()
            # Rolled-back rows stay in the file of ``batch``, and each statement reads all of it: the time would grow
            # with the square of the number of rejected messages. ObjectInUse: the effect has left a cursor open.
            if filled > _MOST_TAKEN_BACK:
                with suppress(psycopg.errors.ObjectInUse), self._cursor.connection.transaction():
                    self._cursor.execute("TRUNCATE batch")
                filled = 0
            filled += high - low + 1
            try:
                with self._cursor.connection.transaction():
                    self._cursor.execute("DELETE FROM batch")
                    self._cursor.execute(refill, (low, high))
                    do()
            except psycopg.Error as error:
                if passing(error):
                    raise
                if not by_data(error):
                    raise EffectError(shown(error)) from error
                if low < high:
                    middle = (low + high) // 2
                    # The lower half comes first: the order of offsets is the order of effects.
                    parts += [(middle + 1, high), (low, middle)]
                    continue
                if len(found) == self._max_dead:
                    raise EffectError(
                        f"more than {self._max_dead} messages of one batch fail (max_dead); the last: {shown(error)}"
                    ) from error
                found.append(RejectedRecord(places[low - 1], "failed", shown(error), error.sqlstate))
        return found

    def _run(self) -> None:
        """Run the effect over ``batch`` inside a savepoint, and check deferred constraints."""
        if isinstance(self._effect, str):
            # Inside EXECUTE the server itself refuses COMMIT and ROLLBACK.
            body = sql.SQL("BEGIN EXECUTE {}; END").format(sql.Literal(self._effect)).as_string(self._cursor)
            with self._cursor.connection.transaction():
                self._cursor.execute(sql.SQL("DO {}").format(sql.Literal(body)))
                self._cursor.execute(IMMEDIATE)
            return
        rows = self._rows()
        try:
            with self._cursor.connection.transaction():
                self._effect(self._cursor, rows)
                self._cursor.execute(IMMEDIATE)
            return
        except Reject as reject:
            refs = dict.fromkeys(self._rejected(reject, rows))
            rejected = [RejectedRecord(place, "rejected", reject.why) for place in list(refs)[: self._max_dead + 1]]
            if not self._bisecting:
                raise EffectError(f"{rejected[0].place}: {reject.why}") from reject
            raise RejectedRecords(rejected) from reject
        except psycopg.Error:
            raise
        except Exception as error:
            # Functions raise an error of Postgres as one of their own, and so do object-relational mappers.
            found = caused_by(error)
            if found is None or not passing(found):
                raise EffectError(f"the effect raised {shown(error)}") from error
        raise found

    @staticmethod
    def _rejected(reject: Reject, rows: pa.Table) -> list[MessageRef]:
        if not {"message_id", *META_PLACE} <= set(rows.column_names):
            raise EffectError(
                f"the effect rejected {reject.message_ids[0]} ({reject.why}), but the transform's rows are of no one "
                f"message, so none can be put aside: keep message_id, {_PLACE}, or raise another error"
            ) from reject
        wanted = set(reject.message_ids)
        found = [
            place for place, name in zip(refs_of(rows), rows["message_id"].to_pylist(), strict=True) if name in wanted
        ]
        if not found:
            raise EffectError(
                f"the effect rejected {reject.message_ids[0]}, which is no message_id of its batch"
            ) from reject
        return found

    def _rows(self) -> pa.Table:
        """Return the rows that are in ``batch`` as an Arrow table, in their original order."""
        import pyarrow as pa

        if not self._kept and self._staged is not None:
            self._kept = read_rows(self._cursor, self._columns, *self._taken()).to_batches()
        if not self._kept:
            return read_rows(self._cursor, self._columns, sql.SQL("batch"), sql.SQL("ctid"))
        table = pa.Table.from_batches(self._kept)
        left = self.count()
        if left == table.num_rows:
            # The usual case, without a tuple for each of hundreds of thousands of rows.
            return table
        if self.placed:
            places = self.places()
            table = table.filter(pa.array([place in places for place in refs_of(table)], pa.bool_()))
        if left < table.num_rows:
            # Some rows of a message, or of none, were dropped and others kept; only the database knows which.
            order = sql.SQL(_PLACE + ", ctid" if self.placed else "ctid")
            table = read_rows(self._cursor, self._columns, sql.SQL("batch"), order)
        return table

    def _ids_while(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Keep the ids of the batches that pass. If one is not in the usual form, the database's are used instead."""
        from spark_jobs.dedup.processed import ids_of

        self._ids = [] if self._strategy.remembers else None
        for batch in batches:
            if self._ids is not None:
                try:
                    self._ids.append(ids_of(batch.column("message_id")))
                except Unfit:
                    self._ids = None
            yield batch

    def _kept_while(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            # Only a Python effect needs the rows; SQL reads the table.
            if callable(self._effect):
                self._kept.append(batch.select(list(self._columns)))
            yield batch


def _in_query(name: str) -> sql.SQL:
    """Return an identifier for a query with parameters, in which percent signs must be doubled."""
    return sql.SQL(sql.Identifier(name).as_string(None).replace("%", "%%"))


def read_rows(
    cursor: psycopg.Cursor[Any], columns: Mapping[str, str], source: sql.Composable, order: sql.Composable
) -> pa.Table:
    """Return rows as an Arrow table of these types, with uuid and jsonb as text."""
    import pyarrow as pa

    kinds: dict[str, pa.DataType] = {
        "integer": pa.int32(),
        "smallint": pa.int16(),
        "bigint": pa.int64(),
        "double precision": pa.float64(),
        "real": pa.float32(),
        "boolean": pa.bool_(),
        "date": pa.date32(),
        "timestamptz": pa.timestamp("us", "UTC"),
        "timestamp": pa.timestamp("us"),
        "bytea": pa.binary(),
    }
    # In another zone than UTC, psycopg can't read the first or the last hours that a time may have.
    more = {"uuid": "::text", "jsonb": "::text", "timestamptz": " AT TIME ZONE 'UTC'"}
    listed = sql.SQL(", ").join(
        sql.SQL("{}::{}{}").format(sql.Identifier(name), sql.SQL(kind), sql.SQL(more.get(kind, "")))
        for name, kind in columns.items()
    )
    rows = cursor.execute(sql.SQL("SELECT {} FROM {} ORDER BY {}").format(listed, source, order)).fetchall()
    arrays = {}
    for index, (name, kind) in enumerate(columns.items()):
        values = [row[index] for row in rows]
        if kind.startswith("numeric"):
            precision, scale = kind.removeprefix("numeric(").rstrip(")").split(",")
            arrays[name] = pa.array(values, pa.decimal128(int(precision), int(scale)))
        else:
            arrays[name] = pa.array(values, kinds.get(kind, pa.string()))
    return pa.table(arrays)
