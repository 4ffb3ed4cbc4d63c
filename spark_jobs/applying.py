"""Rows into ``batch``, without repeats, into the effect: the part of a transaction that is the same for all of them.

A message that breaks this is a culprit: it is named, the transaction is rolled back, and the driver runs the range
again without it, with the message as a dead letter in the same transaction. So the fast way carries no raw values
along, and one bad row costs one row.

| what fails                                   | how the culprit is found                                             |
|----------------------------------------------|----------------------------------------------------------------------|
| COPY: a value that the column's type refuses | Uncopyable; again with all columns as text, cast part by part        |
| the effect: see _DATA                        | the batch in halves, each under a savepoint, in the order of offsets |
| the effect raises Reject                     | it says so itself                                                    |
| its id is of a day that is forgotten         | by a query, after the ids went in                                    |
| anything else of the database                | nothing to find: the job ends (EffectFailed), or is tried again      |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from spark_jobs.copying import Unfit, beyond, copy_csv, copy_rows, has_beyond
from spark_jobs.errors import Reject
from spark_jobs.strategies import Book, Place, Strategy

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_jobs.identity import Ids
    from spark_jobs.job import PythonEffect

# Two rows for one, data that does not fit, constraints, values beyond a limit (too long for an index), and what a
# trigger or function of the sink raises on purpose.
_DATA: Final = ("21", "22", "23", "44", "54", "P0001", "P0004")
# A session that was ended, or a server that is read-only since a failover: another try may find another server.
_PASSING: Final = frozenset({"25006", "25P03", "25P04"})
META_PLACE: Final = {"message_topic": "text", "message_part": "integer", "message_offset": "bigint"}
"""The columns that say which message a row is, with their types."""
IMMEDIATE: Final = "SET CONSTRAINTS ALL IMMEDIATE"


@dataclass(frozen=True, slots=True)
class Culprit:
    """A message that can't be applied, and why. ``reason`` is one of those of ``dead_letters``."""

    place: Place
    reason: str
    error: str
    sqlstate: str | None = None


class Culprits(Exception):
    """Ends the transaction: these messages have to be taken out first."""

    def __init__(self, found: Sequence[Culprit]) -> None:
        super().__init__(f"{len(found)} messages can't be applied; the first: {found[0]}")
        self.found = found


class Uncopyable(Exception):
    """Ends the transaction: a value does not fit its column in ``batch``. The lenient way finds out which."""


class Broken(Exception):
    """Ends the transaction: the effect fails whatever the messages are."""


def passing(error: psycopg.Error) -> bool:
    """Say whether the same may work on another try."""
    # psycopg counts limits of the program among what is operational; a value that is too long stays too long.
    operational = isinstance(error, psycopg.OperationalError) and not (error.sqlstate or "").startswith("54")
    return operational or error.sqlstate in _PASSING


def by_data(error: psycopg.Error) -> bool:
    """Say whether it is the rows' fault."""
    return (error.sqlstate or "").startswith(_DATA)


def shown(error: BaseException) -> str:
    """Give an error's kind and its first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


class Applying:
    """One use of the table ``batch``, in a transaction that is open.

    columns   of ``batch``, with their types in Postgres.
    bisect    find culprits; otherwise what the rows break is Broken.
    max_dead  more culprits than this are Broken.
    """

    def __init__(
        self,
        cursor: psycopg.Cursor[Any],
        book: Book,
        columns: Mapping[str, str],
        strategy: Strategy,
        effect: str | PythonEffect,
        *,
        bisect: bool,
        max_dead: int,
    ) -> None:
        self._cursor = cursor
        self._book = book
        self._columns = columns
        self._strategy = strategy
        self._effect = effect
        self._bisecting = bisect
        self._max_dead = max_dead
        self._kept: list[pa.RecordBatch] = []
        self._ids: list[Ids] | None = None
        self._listed = sql.SQL(", ").join(map(_in_query, columns))
        self._cast = sql.SQL(", ").join(
            sql.SQL("{}::{}").format(_in_query(name), sql.SQL(kind)) for name, kind in columns.items()
        )
        self._create("batch", columns)

    def copy(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Stream rows into ``batch``. Raises Uncopyable."""
        try:
            copy_rows(self._cursor, sql.Identifier("batch"), self._columns, self._ids_while(self._kept_while(batches)))
        except (psycopg.Error, Unfit) as error:
            if isinstance(error, psycopg.Error) and (passing(error) or not by_data(error)):
                raise
            if not self._bisecting:
                raise Broken(shown(error)) from error
            raise Uncopyable from error

    def copy_leniently(self, batches: Iterable[pa.RecordBatch]) -> None:
        """The same where ``copy`` met a value that does not fit. Raises Culprits, naming the messages."""
        found: list[Culprit] = []
        as_text = textual(self._columns)
        names = [name for name, kind in as_text.items() if kind == "text"]
        # Under names that no table of the sink has: a temporary table hides others.
        self._create("outbox_batch_incoming", {**as_text, "incoming_at": "bigint GENERATED ALWAYS AS IDENTITY"})
        incoming = sql.Identifier("outbox_batch_incoming")
        copy_csv(self._cursor, incoming, list(self._columns), self._kept_while(without_unfit(batches, names, found)))
        total = self._one("SELECT coalesce(max(incoming_at), 0) FROM outbox_batch_incoming")
        insert = sql.SQL(
            "INSERT INTO batch ({}) SELECT {} FROM outbox_batch_incoming "
            "WHERE incoming_at BETWEEN %s AND %s ORDER BY incoming_at"
        ).format(self._listed, self._cast)
        for number, error in self._halves(1, total, lambda low, high: self._cursor.execute(insert, (low, high))):
            row = self._cursor.execute(
                "SELECT message_topic, message_part, message_offset FROM outbox_batch_incoming WHERE incoming_at = %s",
                (number,),
            ).fetchone()
            assert row is not None
            found.append(Culprit((row[0], row[1], row[2]), "failed", shown(error), error.sqlstate))
        if found:
            raise Culprits(found)

    def take(self, staged: sql.Identifier, names: Sequence[str]) -> int:
        """Fill ``batch`` from a staging table, in which these names' columns are text. Gives the number of rows.

        Raises Culprits for messages with values that do not fit; Broken when the rows are no messages.
        """
        placed = "message_offset" in self._columns
        insert = sql.SQL("INSERT INTO batch ({}) SELECT {} FROM {} WHERE ").format(self._listed, self._cast, staged)
        order = sql.SQL(" ORDER BY message_topic, message_part, message_offset" if placed else " ORDER BY staged_at")
        try:
            with self._cursor.connection.transaction():
                taken = self._cursor.execute(insert + sql.SQL("staged_by = ANY(%s)") + order, (list(names),)).rowcount
            if taken > 1000:
                self._cursor.execute("ANALYZE batch")
            return taken
        except psycopg.Error as error:
            if passing(error):
                raise
            if not (self._bisecting and placed and by_data(error)):
                raise Broken(shown(error)) from error
        rows = self._cursor.execute(
            sql.SQL(
                "SELECT message_topic, message_part, message_offset, staged_at FROM {} WHERE staged_by = ANY(%s)"
            ).format(staged)
            + order,
            (list(names),),
        ).fetchall()
        some = insert + sql.SQL("staged_at = ANY(%s)") + order

        def part(low: int, high: int) -> None:
            self._cursor.execute(some, ([row[3] for row in rows[low - 1 : high]],))

        found = [
            Culprit(rows[number - 1][:3], "failed", shown(error), error.sqlstate)
            for number, error in self._halves(1, len(rows), part)
        ]
        raise Culprits(found)

    def places(self) -> set[Place]:
        """Give the places of the messages in ``batch``."""
        return set(self._cursor.execute("SELECT message_topic, message_part, message_offset FROM batch").fetchall())

    def reduce(self, *, suspect: bool, forgiven: AbstractSet[Place] = frozenset()) -> None:
        """Leave only what is to be applied. Raises Culprits.

        Those of days that are forgotten, but for the ``forgiven``; and those whose key or version the sink's table
        can't have.
        """
        try:
            with self._cursor.connection.transaction():
                self._strategy.reduce(self._cursor, self._book, self._ids, suspect=suspect)
        except psycopg.Error as error:
            if passing(error) or not by_data(error):
                raise
            if not self._bisecting:
                raise Broken(shown(error)) from error
            found = self._bisect(lambda: self._strategy.check(self._cursor))
            raise (Culprits(found) if found else Broken(shown(error))) from error
        old = [one for one in self._strategy.too_old(self._cursor, self._book) if one[0] not in forgiven]
        if old:
            culprits = [Culprit(place, "too-old", why) for place, why in old]
            if not self._bisecting:
                raise Broken(f"{culprits[0].place}: {culprits[0].error}")
            raise Culprits(culprits)

    def count(self) -> int:
        """Give the number of rows in ``batch``."""
        return int(self._one("SELECT count(*) FROM batch"))

    def per_partition(self) -> dict[tuple[str, int], int]:
        """Give the number of rows in ``batch`` of each topic and partition."""
        rows = self._cursor.execute("SELECT message_topic, message_part, count(*) FROM batch GROUP BY 1, 2").fetchall()
        return {(topic, part): count for topic, part, count in rows}

    def apply(self) -> None:
        """Run the effect. Raises Culprits or Broken; errors of servers that are away pass through."""
        try:
            self._run()
            return
        except psycopg.Error as error:
            if passing(error):
                raise
            if not (self._bisecting and by_data(error)):
                raise Broken(shown(error)) from error
        found = self._bisect(self._run)
        if found:
            raise Culprits(found)

    def _bisect(self, do: Callable[[], object]) -> list[Culprit]:
        """Do it over ever smaller parts of ``batch``, in the order of offsets; give the messages that make it fail."""
        self._cursor.execute(
            "CREATE TEMPORARY TABLE outbox_batch_held ON COMMIT DROP AS SELECT batch.*, "
            "row_number() OVER (ORDER BY message_topic, message_part, message_offset) AS held_at FROM batch"
        )
        places = self._cursor.execute(
            "SELECT message_topic, message_part, message_offset FROM outbox_batch_held ORDER BY held_at"
        ).fetchall()
        refill = sql.SQL(
            "INSERT INTO batch ({0}) SELECT {0} FROM outbox_batch_held WHERE held_at BETWEEN %s AND %s ORDER BY held_at"
        ).format(self._listed)

        def part(low: int, high: int) -> None:
            self._cursor.execute("DELETE FROM batch")
            self._cursor.execute(refill, (low, high))
            do()

        return [
            Culprit(places[number - 1], "failed", shown(error), error.sqlstate)
            for number, error in self._halves(1, len(places), part)
        ]

    def _halves(self, low: int, high: int, do: Callable[[int, int], object]) -> Iterator[tuple[int, psycopg.Error]]:
        """Do it for rows ``low`` to ``high``, in ever smaller parts where it fails; give the single rows that do."""
        found = 0
        parts = [(low, high)] if low <= high else []
        while parts:
            low, high = parts.pop()
            try:
                with self._cursor.connection.transaction():
                    do(low, high)
            except psycopg.Error as error:
                if passing(error):
                    raise
                if not by_data(error):
                    raise Broken(shown(error)) from error
                if low < high:
                    middle = (low + high) // 2
                    # The lower half comes first: the order of offsets is the order of effects.
                    parts += [(middle + 1, high), (low, middle)]
                    continue
                found += 1
                if found > self._max_dead:
                    raise Broken(
                        f"more than {self._max_dead} messages of one batch fail (max_dead); the last: {shown(error)}"
                    ) from error
                yield low, error

    def _run(self) -> None:
        """Run the effect over ``batch``, under a savepoint, with what it deferred."""
        if isinstance(self._effect, str):
            with self._cursor.connection.transaction():
                self._cursor.execute(self._effect.encode())
                self._cursor.execute(IMMEDIATE)
            return
        rows = self._rows()
        try:
            with self._cursor.connection.transaction():
                self._effect(self._cursor, rows)
                self._cursor.execute(IMMEDIATE)
        except Reject as reject:
            culprits = [Culprit(place, "rejected", reject.why) for place in self._rejected(reject, rows)]
            if not self._bisecting:
                raise Broken(f"{culprits[0].place}: {reject.why}") from reject
            raise Culprits(culprits) from reject
        except psycopg.Error:
            raise
        except Exception as error:
            raise Broken(f"the effect raised {shown(error)}") from error

    @staticmethod
    def _rejected(reject: Reject, rows: pa.Table) -> list[Place]:
        wanted = set(reject.message_ids)
        found = [
            place for place, name in zip(places_of(rows), rows["message_id"].to_pylist(), strict=True) if name in wanted
        ]
        if not found:
            raise Broken(
                f"the effect rejected {reject.message_ids[0]}, which is no message_id of its batch"
            ) from reject
        return found

    def _rows(self) -> pa.Table:
        """The rows of ``batch`` as Arrow: those that were copied and are still there, or read from the table."""
        import pyarrow as pa

        if not self._kept:
            return read_batch(self._cursor, self._columns)
        table = pa.Table.from_batches(self._kept)
        left = self.places()
        if len(left) < table.num_rows:
            table = table.filter(pa.array([place in left for place in places_of(table)], pa.bool_()))
        return table

    def _ids_while(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Keep the ids, and nothing else of the batches. Where one is spelt unusually, the database has them all."""
        from spark_jobs.processed import ids_of

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
            # Whole for a Python effect only; SQL sees the rows in the table.
            if callable(self._effect):
                self._kept.append(batch.select(list(self._columns)))
            yield batch

    def _create(self, name: str, columns: Mapping[str, str]) -> None:
        fields = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(column), sql.SQL(kind)) for column, kind in columns.items()
        )
        self._cursor.execute(
            sql.SQL("CREATE TEMPORARY TABLE {} ({}) ON COMMIT DROP").format(sql.Identifier(name), fields)
        )

    def _one(self, query: str) -> Any:
        row = self._cursor.execute(query.encode()).fetchone()
        assert row is not None
        return row[0]


def _in_query(name: str) -> sql.SQL:
    """Give an identifier for a query that is run with parameters, where a percent sign has to stand twice."""
    return sql.SQL(sql.Identifier(name).as_string(None).replace("%", "%%"))


def places_of(rows: pa.RecordBatch | pa.Table) -> Iterator[Place]:
    """Give the places of messages, row by row."""
    return zip(*(rows.column(name).to_pylist() for name in META_PLACE), strict=True)


def textual(columns: Mapping[str, str]) -> dict[str, str]:
    """Give types that take what the columns' own may refuse: text, but for what says which message it is."""
    return {name: META_PLACE.get(name, "text") for name in columns}


def without_unfit(
    batches: Iterable[pa.RecordBatch], names: Sequence[str], found: list[Culprit]
) -> Iterator[pa.RecordBatch]:
    """Give the rows whose columns ``names`` are text for Postgres, and add the others to ``found``.

    A NUL character or bytes that are no UTF-8 could not even be copied to find them there. Raises Broken when a row
    does not say which message it is.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    for batch in batches:
        good = pa.array([True] * batch.num_rows, pa.bool_())
        for name in names:
            column = batch.column(name)
            if has_beyond(column.type):
                bad, why = beyond(column), f"column {name} holds a time beyond the years 1 to 9999"
                good = pc.and_(good, pc.invert(bad))
                _add_culprits(batch, bad, why, "22008", found)
                continue
            if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
                continue
            as_bytes = column.cast(pa.binary())
            bad = pc.fill_null(pc.match_substring(as_bytes, "\0"), False)
            why = f"column {name} holds a NUL character, which text in Postgres can't"
            if not _is_utf8(column):
                broken = [value is not None and not _decodes(value) for value in as_bytes.to_pylist()]
                bad = pc.or_(bad, pa.array(broken, pa.bool_()))
                why = f"column {name} holds a NUL character, or bytes that are no UTF-8"
            good = pc.and_(good, pc.invert(bad))
            _add_culprits(batch, bad, why, "22021", found)
        yield batch.filter(good)


def _add_culprits(batch: pa.RecordBatch, bad: pa.Array, why: str, sqlstate: str, found: list[Culprit]) -> None:
    if not bad.true_count:
        return
    if not set(META_PLACE) <= set(batch.schema.names):
        raise Broken(f"{why}; it is a row of the transform, of no one message, so no message can be put aside for it")
    known = {culprit.place for culprit in found}
    places = places_of(batch.filter(bad))
    found.extend(Culprit(place, "failed", why, sqlstate) for place in places if place not in known)


def _is_utf8(column: pa.Array) -> bool:
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _decodes(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_batch(cursor: psycopg.Cursor[Any], columns: Mapping[str, str]) -> pa.Table:
    """Give the rows of ``batch`` as an Arrow table: uuid and jsonb as text, the rest as what it is."""
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
    listed = sql.SQL(", ").join(
        sql.SQL("{}::text").format(sql.Identifier(name)) if kind in {"uuid", "jsonb"} else sql.Identifier(name)
        for name, kind in columns.items()
    )
    rows = cursor.execute(sql.SQL("SELECT {} FROM batch").format(listed)).fetchall()
    arrays = {}
    for index, (name, kind) in enumerate(columns.items()):
        values = [row[index] for row in rows]
        if kind.startswith("numeric"):
            precision, scale = kind.removeprefix("numeric(").rstrip(")").split(",")
            arrays[name] = pa.array(values, pa.decimal128(int(precision), int(scale)))
        else:
            arrays[name] = pa.array(values, kinds.get(kind, pa.string()))
    return pa.table(arrays)
