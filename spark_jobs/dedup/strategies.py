"""How a job prevents an event from having its effect twice. docs/guides/strategies.md helps to choose.

| strategy    | needs                              | costs                  | can't do                                 |
|-------------|------------------------------------|------------------------|------------------------------------------|
| Dedup       | an id in each message              | a row for each message | recognize ids that were forgotten        |
| Natural     | an idempotent effect               | nothing                | sums, counters; sources that repeat late |
| Version     | a version that rises with a change | a query of the sink    | anything but the newest state of a key   |
| Fingerprint | nothing                            | a hash and a row each  | tell two equal events from a repeat      |
| OffsetsOnly | a source that never repeats        | nothing                | notice any repeat                        |

Strategies are not needed for reading again after a crash, because offsets move with the effect. They recognize messages
that the producer sent twice, under two offsets; OffsetsOnly is for a source that never does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, LiteralString

import psycopg
from psycopg import sql

from outbox.consumer.errors import JobError
from outbox.consumer.ids import DAY_OF_ID
from outbox.consumer.model import MessageRef
from outbox.consumer.statements import statement

if TYPE_CHECKING:
    from pyspark.sql import Column

    from spark_jobs.ids import Ids

# Every INSERT into processed_messages has the same ORDER BY, also those of outbox/consumer/groups.py, and COPY the same
# order (processed.copy_ids): two transactions with the same ids wait for each other in one direction only.
_REMEMBER: Final = """
INSERT INTO {processed_messages} (grp, day, message_id)
SELECT %(grp)s, {day}, message_id FROM batch ORDER BY {day}, message_id"""
REMEMBER_THESE: Final = """
INSERT INTO {processed_messages} (grp, day, message_id)
SELECT %(grp)s, {day}, message_id FROM pg_catalog.unnest(%(ids)s::uuid[]) AS given (message_id)
 ORDER BY {day}, message_id"""
"""SQL: the same with ids that are not in ``batch``."""
# Not a join: with one key for all that would be of each row with each other.
_KEEP_FIRST: Final = """
DELETE FROM batch USING (
    SELECT ctid AS place, pg_catalog.rank() OVER (PARTITION BY {key} ORDER BY {order}) AS rank
      FROM batch) AS ranked
 WHERE ranked.place = batch.ctid AND ranked.rank > 1"""
REMEMBER_FRESH: Final = """
WITH fresh AS (
    INSERT INTO {processed_messages} (grp, day, message_id)
    SELECT %(grp)s, {day}, message_id FROM batch ORDER BY {day}, message_id
        ON CONFLICT DO NOTHING RETURNING message_id)
DELETE FROM batch WHERE NOT EXISTS (SELECT 1 FROM fresh WHERE fresh.message_id = batch.message_id)"""
"""SQL: leaves in ``batch``, in which no id is there twice, only the ids that are new."""
_FORGOTTEN_BEFORE: Final = "SELECT forgotten_before - date '1970-01-01' FROM {groups} WHERE grp = %(grp)s"
_FORGOTTEN: Final = """
SELECT DISTINCT message_topic, message_part, message_offset, groups.forgotten_before FROM batch, {groups} AS groups
 WHERE groups.grp = %(grp)s AND {day} < groups.forgotten_before AND {day} <> date '1970-01-01'
 ORDER BY 1, 2, 3 LIMIT %(most)s"""
# A key's last tombstone cancels all that come before it, whatever their versions: the key starts over after it.
_DROP_ENDED: Final = """
DELETE FROM batch USING (
    SELECT DISTINCT ON (message_key) message_key, message_topic, message_part, message_offset
      FROM batch WHERE message_tombstone
     ORDER BY message_key, message_topic DESC, message_part DESC, message_offset DESC) AS ended
 WHERE ended.message_key = batch.message_key
   AND (batch.message_topic, batch.message_part, batch.message_offset)
     < (ended.message_topic, ended.message_part, ended.message_offset)"""
# A tombstone has no payload and so no key columns, only Kafka's key.
_OF_KEY: Final = "{key}, CASE WHEN message_tombstone THEN message_key END"
_DROP_OLD: Final = """
DELETE FROM batch USING {table} AS stored
 WHERE {same} AND stored.{stored} {at_least} batch.{version}{living}"""
# Except for messages after a tombstone of their key: the effect deletes the newer row.
_LIVING: Final = """
   AND NOT EXISTS (
       SELECT FROM batch AS gone
        WHERE gone.message_tombstone AND gone.message_key = batch.message_key
          AND (gone.message_topic, gone.message_part, gone.message_offset)
            < (batch.message_topic, batch.message_part, batch.message_offset))"""
_CHECK: Final = "SELECT {casts} FROM batch"
# A row without a version is neither newer nor older: it would never be written, or never be replaced. Nor would one
# whose version is greater than all that may follow.
_VERSIONED: Final = """
BEGIN
    IF EXISTS (SELECT FROM (SELECT * FROM batch{messages}) AS rows WHERE {version} IS NULL{greatest}) THEN
        RAISE EXCEPTION USING MESSAGE = {why};
    END IF;
END"""
_GREATEST: Final = " OR {version}::text OPERATOR(pg_catalog.=) ANY ('{{NaN,Infinity,infinity}}')"
_WITH_INFINITY: Final = ("numeric", "real", "double precision", "date", "timestamp", "interval")
MESSAGES: Final = " WHERE NOT message_tombstone"
"""SQL: without tombstones, which have no payload to take a version from."""
# The types in the form that casts need. Without the length of texts, because a cast silently truncates a longer text,
# which an assignment refuses. A domain is replaced by its base type for the same reason. And the schema of the
# operators by which Postgres itself sorts a type: the search path may have planted ones. Only types of extensions have
# their own; pg_catalog's also take arrays, enums, ranges, rows and texts of all kinds.
_TYPES: Final = """
WITH RECURSIVE known AS (
    SELECT attnum, attname, atttypid AS type, atttypmod AS modifier FROM pg_catalog.pg_attribute
     WHERE attrelid = pg_catalog.to_regclass(%(table)s)::oid AND attnum > 0 AND NOT attisdropped
     UNION ALL
    SELECT attnum, attname, typbasetype, typtypmod FROM known JOIN pg_catalog.pg_type ON pg_type.oid = type
     WHERE typtype = 'd')
SELECT attname, pg_catalog.format_type(type, CASE WHEN coalesce(nullif(typelem, 0::oid), type) IN (
           'varchar'::regtype::oid, 'bpchar'::regtype::oid, 'bit'::regtype::oid, 'varbit'::regtype::oid)
           THEN -1 ELSE modifier END),
       coalesce((SELECT nspname FROM pg_catalog.pg_opclass
                   JOIN pg_catalog.pg_amop ON amopfamily = opcfamily AND amoplefttype = opcintype
                    AND amoprighttype = opcintype AND amopstrategy = 3
                   JOIN pg_catalog.pg_operator ON pg_operator.oid = amopopr
                   JOIN pg_catalog.pg_namespace ON pg_namespace.oid = oprnamespace
                  WHERE opcintype = type AND opcdefault AND opcmethod = 403::oid), 'pg_catalog')
  FROM known JOIN pg_catalog.pg_type ON pg_type.oid = type WHERE typtype <> 'd' ORDER BY attnum"""
_TRUNCATING: Final = frozenset({"name", '"char"'})
WHOLE_TIMES: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS]XXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS]",
}
"""Options for Spark's to_json, which by default writes milliseconds, so that different times could become equal."""

_EARLIEST: Final = sql.SQL("message_topic, message_part, message_offset")
_LATEST: Final = sql.SQL("message_topic DESC, message_part DESC, message_offset DESC")


Known = Sequence["Ids"] | None
"""The ids of the rows in ``batch``; None if only the database has them."""


class _Base:
    """The base of strategies, and by its defaults of those that store nothing."""

    __slots__ = ()
    remembers: ClassVar[bool] = False

    def reduce(self, cursor: psycopg.Cursor[Any], dedup: DedupStore, ids: Known, *, suspect: bool) -> None:
        """Leave in ``batch`` only the rows to be applied. ``suspect``: repeats are likely."""
        raise NotImplementedError

    def check(self, cursor: psycopg.Cursor[Any]) -> None:
        """Raise the database's error if a row can't be compared with a table. Most compare none."""

    def too_old(self, cursor: psycopg.Cursor[Any], dedup: DedupStore, most: int) -> list[tuple[MessageRef, str]]:  # noqa: ARG002
        """Return the first ``most`` messages whose day the group has forgotten, each with an explanation."""
        return []


class _Remembering(_Base):
    """The base of strategies that store each id."""

    __slots__ = ()
    remembers: ClassVar[bool] = True

    def reduce(self, cursor: psycopg.Cursor[Any], dedup: DedupStore, ids: Known, *, suspect: bool) -> None:
        """Leave in ``batch`` only messages that were never applied."""
        if not suspect:
            try:
                with cursor.connection.transaction():
                    if ids is None:
                        dedup.run(cursor, _REMEMBER)
                    else:
                        from spark_jobs.dedup import processed

                        processed.copy_ids(cursor, dedup, ids)
                return
            except psycopg.errors.UniqueViolation:
                # There are repeats. The savepoint has removed the ids; find the repeats in the slower way.
                pass
        cursor.execute("ANALYZE batch")
        # Of messages with one id the one with the lowest offset counts, with all rows that were made of it.
        cursor.execute(keep_first(sql.SQL("message_id"), _EARLIEST))
        dedup.run(cursor, REMEMBER_FRESH)

    def too_old(self, cursor: psycopg.Cursor[Any], dedup: DedupStore, most: int) -> list[tuple[MessageRef, str]]:
        # Most groups have forgotten nothing; then no row has to be read.
        if forgotten_before(cursor, dedup) is None:
            return []
        rows = dedup.run(cursor, _FORGOTTEN, most=most).fetchall()
        why = "its id is of a day before {}, and such ids are no longer all remembered: it may have been applied before"
        return [((topic, part, offset), why.format(before)) for topic, part, offset, before in rows]


@dataclass(frozen=True, slots=True)
class Dedup(_Remembering):
    """Remember the id of every message that was applied. The default.

    key                     a header by which messages are recognized that have it, instead of their id. With
                            "idempotency-key", events with the same idempotency key are applied once.
    allow_producer_repeats  apply messages without an id too, once for each topic, partition and offset. If the producer
                            sends one again, it has another offset: it is not recognized, and applied again.

    Only ids of version 7 can be forgotten by day: those made of a key or of a place are kept forever.
    """

    key: str | None = None
    allow_producer_repeats: bool = False
    required: ClassVar[tuple[str, ...]] = ("message_id",)

    def __post_init__(self) -> None:
        if self.key == "":
            raise JobError("Dedup: key must be the name of a header, such as 'idempotency-key'")


@dataclass(frozen=True, slots=True)
class Natural(_Base):
    """For an idempotent effect, such as an upsert by ``key``. The last message of each key in a batch is kept.

    key  columns of ``batch``.
    Nothing is remembered. If a source repeats an old message after a newer one, the row goes back: use Version then.
    """

    key: Sequence[str]

    def __post_init__(self) -> None:
        _check_columns("Natural: key", self.key)

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(self.key)

    def reduce(self, cursor: psycopg.Cursor[Any], dedup: DedupStore, ids: Known, *, suspect: bool) -> None:  # noqa: ARG002  one shape for all
        """Leave in ``batch`` the last message of each key, with all of its rows."""
        keys = sql.SQL(", ").join(map(sql.Identifier, self.key))
        cursor.execute(keep_first(sql.SQL(_OF_KEY).format(key=keys), _LATEST))


@dataclass(frozen=True, slots=True)
class Version(_Base):
    """Apply only messages newer than the stored version. The newest message of each key in a batch is kept.

    table       of the sink, as ``name`` or ``schema.name``, with the stored version.
    key         columns of ``batch`` that have the same names in the table, or a mapping batch column → table column.
    version     a column of ``batch`` that rises with every change of a key.
    stored      the version's column in the table; by default the same name.
    tombstones  the effect deletes a key's row on its tombstone, and then writes the messages after it: versions start
                over there, and messages before a key's last tombstone in a batch are dropped. Use False for an effect
                that ignores tombstones. With Upsert and Insert the job sets this itself.
    """

    table: str
    key: Sequence[str] | Mapping[str, str]
    version: str
    stored: str | None = None
    tombstones: bool = True

    def __post_init__(self) -> None:
        if not self.table or not self.version:
            raise JobError("Version: table and version must be named")
        _check_columns("Version: key", self.key)

    @property
    def required(self) -> tuple[str, ...]:
        return (*self.key, self.version)

    def reduce(self, cursor: psycopg.Cursor[Any], dedup: DedupStore, ids: Known, *, suspect: bool) -> None:  # noqa: ARG002
        """Leave in ``batch`` the newest message of each key, if it is newer than the table's row."""
        types, pairs, stored = self._resolved(cursor)
        self._refuse_greatest(cursor, types[stored])
        # Cast to the table's types, so that 9 is less than 10 and the table's index is used.
        casts = {here: types[there].cast(here) for here, there in pairs.items()}
        version = types[stored].cast(self.version)
        order = version + sql.SQL(" DESC, ") + _LATEST
        keys = sql.SQL(", ").join(casts.values())
        if self.tombstones:
            cursor.execute(_DROP_ENDED)
        cursor.execute(keep_first(sql.SQL(_OF_KEY).format(key=keys), order))
        same = sql.SQL(" AND ").join(
            sql.SQL("stored.{} {} batch.").format(sql.Identifier(there), types[there].operator("=")) + casts[here]
            for here, there in pairs.items()
        )
        cursor.execute(
            sql.SQL(_DROP_OLD).format(
                table=identifier(self.table),
                same=same,
                stored=sql.Identifier(stored),
                at_least=types[stored].operator(">="),
                version=version,
                living=sql.SQL(_LIVING if self.tombstones else ""),
            )
        )

    def check(self, cursor: psycopg.Cursor[Any]) -> None:
        """Raise the database's error for a key or version in ``batch`` that does not fit the table's types."""
        types, pairs, stored = self._resolved(cursor)
        casts = [types[there].cast(here) for here, there in pairs.items()]
        casts.append(types[stored].cast(self.version))
        cursor.execute(sql.SQL(_CHECK).format(casts=sql.SQL(", ").join(casts)))
        self._refuse_greatest(cursor, types[stored])

    def _refuse_greatest(self, cursor: psycopg.Cursor[Any], kind: ColumnType) -> None:
        """Raise the database's error for a version of NaN or infinity. One that is NULL has not come this far."""
        if kind.has_infinity:
            cursor.execute(versioned(self.version, kind, sql.SQL(MESSAGES), "Version"))

    def _resolved(self, cursor: psycopg.Cursor[Any]) -> tuple[dict[str, ColumnType], dict[str, str], str]:
        """Return the table's types, the key's columns (batch → table), and its version column. Raises JobError."""
        pairs = dict(self.key) if isinstance(self.key, Mapping) else {name: name for name in self.key}
        types = column_types(cursor, self.table)
        stored = self.stored or self.version
        for name in (*pairs.values(), stored):
            if name not in types:
                raise JobError(f"Version: {self.table} has no column {name}")
            refuse_truncating(self.table, name, types[name])
        return types, pairs, stored


@dataclass(frozen=True, slots=True)
class Fingerprint(_Remembering):
    """For sources without ids: Dedup with ids made from the content (SHA-256).

    columns  decoded columns that identify a message. Default: Kafka's key and value, as bytes.
    time     a decoded timestamp column, also part of the identity; only with ``columns``. Ids then contain a time and
             can be forgotten by day; without it they are kept forever.
    """

    columns: Sequence[str] = ()
    time: str | None = None
    required: ClassVar[tuple[str, ...]] = ("message_id",)

    def __post_init__(self) -> None:
        if self.columns or isinstance(self.columns, str):
            _check_columns("Fingerprint: columns", self.columns)
            if "message_id" in {name.lower() for name in [*self.columns, self.time or ""]}:
                raise JobError("Fingerprint: message_id is made from the columns, and can't be one of them")
        elif self.time is not None:
            raise JobError("Fingerprint: time goes with columns")

    @property
    def decoded(self) -> bool:
        """Return whether the id is made from decoded columns instead of Kafka's key and value."""
        return bool(self.columns)

    def message_id(self) -> Column:
        """Return the id from decoded columns as a Spark column: a UUID of version 7 with ``time``, otherwise 8."""
        from pyspark.sql import functions as F  # noqa: N812

        names = [*self.columns, *([self.time] if self.time is not None and self.time not in self.columns else [])]
        # ignoreNullFields off: NULL and a missing column are different contents.
        options = {**WHOLE_TIMES, "ignoreNullFields": "false"}
        digest = F.sha2(F.to_json(F.struct(*map(F.col, names)), options).cast("binary"), 256)
        if self.time is None:
            return uuid8(digest)
        instant = F.lower(F.lpad(F.hex(F.unix_millis(F.col(self.time).cast("timestamp"))), 12, "0"))
        return _uuid(instant, 7, digest)


@dataclass(frozen=True, slots=True)
class OffsetsOnly(_Base):
    """Apply each offset once, and compare nothing: for topics without repeated events.

    Examples are the topics of an exactly-once relay, and of any producer that writes each event in one transaction, or
    once with idempotence. The offsets move in the transaction of the effect, so a crash repeats nothing. If a source
    repeats a message under another offset, or an operator sets the group back, the effect is repeated without notice.

    Messages need no id. One without an id gets a UUID of version 8 from its place and time, for Reject, Produce and
    External; it is the same each time the message is read.
    """

    required: ClassVar[tuple[str, ...]] = ()

    def reduce(self, cursor: psycopg.Cursor[Any], dedup: DedupStore, ids: Known, *, suspect: bool) -> None:
        """Leave ``batch`` unchanged: every row is applied."""


Strategy = Dedup | Natural | Version | Fingerprint | OffsetsOnly


@dataclass(frozen=True, slots=True)
class DedupStore:
    """The group's rows in the consumers' tables, such as the ids that are remembered."""

    schema: str
    group: str

    def run(self, cursor: psycopg.Cursor[Any], query: LiteralString, **values: object) -> psycopg.Cursor[Any]:
        """Execute a query with the tables' names and the group."""
        return cursor.execute(statement(self.schema, query, day=sql.SQL(DAY_OF_ID)), {"grp": self.group, **values})


def uuid8(digest: Column) -> Column:
    """Return a UUID of version 8 (RFC 9562: custom contents) from a hash in hexadecimal digits."""
    from pyspark.sql import functions as F  # noqa: N812

    return _uuid(digest, 8, F.substring(digest, 13, 18))


def _uuid(head: Column, version: int, rest: Column) -> Column:
    """Compose a UUID: the first 12 hexadecimal digits of ``head``, the version, the first 18 of ``rest``."""
    from pyspark.sql import functions as F  # noqa: N812

    return F.concat(
        F.substring(head, 1, 8),
        F.lit("-"),
        F.substring(head, 9, 4),
        F.lit(f"-{version}"),
        F.substring(rest, 1, 3),
        F.lit("-8"),
        F.substring(rest, 4, 3),
        F.lit("-"),
        F.substring(rest, 7, 12),
    )


def keep_first(key: sql.Composable, order: sql.Composable) -> sql.Composed:
    """Return the statement that leaves in ``batch`` the first row of each key; of one message, all that are first."""
    return sql.SQL(_KEEP_FIRST).format(key=key, order=order)


def identifier(name: str) -> sql.Identifier:
    """Return ``table`` or ``schema.table`` as an identifier. Raises JobError for anything else."""
    parts = name.split(".")
    if not 1 <= len(parts) <= 2 or not all(parts):
        raise JobError(f"table: {name!r} must be NAME or SCHEMA.NAME")
    return sql.Identifier(*parts)


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The type of a column of the sink.

    name    as casts need it; from format_type(), which quotes names if necessary.
    schema  of the operators that compare its values.
    """

    name: str
    schema: str = "pg_catalog"

    @property
    def has_infinity(self) -> bool:
        """Return whether the type has NaN or infinity, which it sorts behind all other values."""
        return self.name.startswith(_WITH_INFINITY)

    def operator(self, name: LiteralString) -> sql.Composed:
        """Return the operator that compares two values of this type, whatever is in the search path."""
        return sql.SQL("OPERATOR({}.{})").format(sql.Identifier(self.schema), sql.SQL(name))

    def cast(self, column: str) -> sql.Composed:
        """Return a column of ``batch`` as a value of this type; Postgres does not convert text to uuid by itself."""
        return sql.SQL("{}::{}").format(sql.Identifier(column), sql.SQL(self.name))


def column_types(cursor: psycopg.Cursor[Any], table: str) -> dict[str, ColumnType]:
    """Return the columns of a table of the sink with their types. Raises JobError if there is no such table."""
    if table == "batch":
        raise JobError("table: batch is the name of the rows to apply; say which schema the sink's table is in")
    name = identifier(table).as_string(cursor)
    found = {column: ColumnType(*kind) for column, *kind in cursor.execute(_TYPES, {"table": name})}
    if not found:
        raise JobError(f"the sink has no table {table}; make it, or give the job's setup the SQL that does")
    return found


def versioned(column: str, kind: ColumnType, messages: sql.Composable, by: str) -> sql.Composed:
    """Return the statement that refuses rows of ``batch`` whose version is NULL, or the greatest of its type.

    messages  the condition that excludes tombstones.
    by        what compares versions, for the text of the error.
    """
    version, greatest = kind.cast(column), ""
    why = f"column {column}, by which {by} recognizes newer rows, is NULL"
    if kind.has_infinity:
        greatest, why = _GREATEST, f"{why}, NaN or infinity"
    body = sql.SQL(_VERSIONED).format(
        messages=messages,
        version=version,
        greatest=sql.SQL(greatest).format(version=version),
        why=sql.Literal(why),
    )
    return sql.SQL("DO {}").format(sql.Literal(body.as_string(None)))


def refuse_truncating(table: str, name: str, kind: ColumnType) -> None:
    """Raise JobError for a column whose type silently truncates a longer text, in casts and assignments alike."""
    if kind.name in _TRUNCATING:
        raise JobError(f"{table}: column {name} is of type {kind.name}, which cuts off a longer text; make it text")


def forgotten_before(cursor: psycopg.Cursor[Any], dedup: DedupStore) -> int | None:
    """Return the day since 1970-01-01 before which the group's ids are not all remembered; None if all are.

    Call it after inserting the ids, which locks the table against DROP: then nothing can be forgotten until COMMIT.
    """
    row = ask_forgotten_before(cursor, dedup).fetchone()
    return None if row is None else row[0]


def ask_forgotten_before(cursor: psycopg.Cursor[Any], dedup: DedupStore) -> psycopg.Cursor[Any]:
    """Ask for ``forgotten_before``, in a pipeline too: the cursor's only row, if there is one, has only that."""
    return dedup.run(cursor, _FORGOTTEN_BEFORE)


def _check_columns(what: str, names: Sequence[str] | Mapping[str, str]) -> None:
    """Raise JobError for what is no list of names, such as a text, which is a sequence of its letters."""
    if isinstance(names, str) or not names or not all(names):
        raise JobError(f"{what}: must be a list of column names, not {names!r}")
