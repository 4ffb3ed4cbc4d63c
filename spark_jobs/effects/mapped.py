"""Effects without handwritten SQL: columns mapped to a table. ``statements`` returns the SQL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from outbox.consumer.errors import JobError
from spark_jobs.dedup.strategies import MESSAGES, ColumnType, identifier, refuse_truncating, versioned

_INSERT: Final = "INSERT INTO {table} ({columns}) SELECT {values} FROM batch{messages}"
_LATEST: Final = "message_topic DESC NULLS LAST, message_part DESC NULLS LAST, message_offset DESC NULLS LAST"
# In the order of keys, so that two transactions never wait for each other in a circle. ON CONFLICT refuses a second row
# of a key in the same statement, so only the latest row of each key is selected. Of two rows of one message, or of
# none, neither is the latest: both are selected, and so refused instead of dropped.
_UPSERT: Final = """
INSERT INTO {table} AS stored ({columns})
SELECT {values} FROM {rows}{messages} ORDER BY {key}
    ON CONFLICT ({conflict}) {action}"""
_RANKED: Final = """(
    SELECT *, pg_catalog.rank() OVER (PARTITION BY {key} ORDER BY {order}) AS outbox_batch_rank
      FROM batch{messages}) AS latest
 WHERE outbox_batch_rank = 1"""
# Only the last tombstone of each key: otherwise each row of a key would be compared with each of its tombstones.
_GONE: Final = """(
        SELECT DISTINCT ON (message_key::{type}) message_key::{type} AS outbox_batch_key,
               message_topic AS outbox_batch_topic, message_part AS outbox_batch_part,
               message_offset AS outbox_batch_offset
          FROM batch WHERE message_tombstone AND message_key IS NOT NULL
         ORDER BY message_key::{type}, message_topic DESC, message_part DESC, message_offset DESC) AS gone"""
_THEN: Final = "(gone.outbox_batch_topic, gone.outbox_batch_part, gone.outbox_batch_offset)"
# Without rows that a later tombstone deletes again.
_NOT_ENDED: Final = """
   AND NOT EXISTS (
       SELECT FROM {gone}
        WHERE gone.outbox_batch_key {equals} batch.{here}::{type}
          AND {then} > (batch.message_topic, batch.message_part, batch.message_offset))"""
# Run before the upsert for keys that have messages after their tombstone, and after it for all others: the result is
# that of applying the messages one by one.
_DELETE: Final = """
DELETE FROM {table} AS stored USING {gone}
 WHERE stored.{conflict} {equals} gone.outbox_batch_key
   AND {begun} (
       SELECT FROM batch
        WHERE NOT batch.message_tombstone AND batch.{here}::{type} {equals} gone.outbox_batch_key
          AND (batch.message_topic, batch.message_part, batch.message_offset) > {then})"""
PLACED: Final = frozenset({"message_topic", "message_part", "message_offset", "message_tombstone"})
"""The columns of rows that are messages. A transform that shuffles need not keep them."""

Columns = Mapping[str, str] | Sequence[str] | None
"""Table column → column of ``batch``; or names that are the same in both; or None: all of the payload's. After a
shuffle None means all columns of its result, but only those columns about messages that the table has."""


@dataclass(frozen=True, slots=True)
class Insert:
    """Append a row for each message: once for each event with Dedup, once for each offset with OffsetsOnly.

    table    of the sink, ``name`` or ``schema.name``.
    columns  see Columns. Tombstones are ignored.
    """

    table: str
    columns: Columns = None

    def statements(
        self, payload: Sequence[str], types: Mapping[str, ColumnType], *, placed: bool = True
    ) -> list[sql.Composed]:
        """Return the SQL for a batch whose payload has these columns and a table of these types. Raises JobError.

        placed  the rows of ``batch`` are messages, with the columns of PLACED; not so after an aggregation.
        """
        pairs = self.pairs(payload, types)
        return [
            sql.SQL(_INSERT).format(
                table=identifier(self.table),
                columns=_listed(pairs.keys()),
                values=_cast(pairs, types),
                messages=_messages(payload, placed),
            )
        ]

    def pairs(self, payload: Sequence[str], types: Mapping[str, ColumnType]) -> dict[str, str]:
        """Return the columns to write: table column → column of ``batch``. Raises JobError."""
        return _pairs(self.table, self.columns, payload, types)


@dataclass(frozen=True, slots=True)
class Upsert:
    """Keep one row for each key: insert it, or update the existing one.

    table    of the sink, ``name`` or ``schema.name``; it needs a unique index on exactly the key's columns.
    key      the key's columns in the table.
    columns  see Columns; they must include the key's.
    version  a column of the table: only a row with a higher version updates the existing one. A message whose
             version is NULL, NaN or infinity is refused; a stored row without one is older than any.
    keep     columns of the table that are set on insert and never updated, such as ``created_at``.
    deletes  a tombstone (a message without a payload) deletes the row whose key is the message's Kafka key. For keys
             of one column. By default tombstones are ignored.
             A transform that filters by the payload's columns drops tombstones, in which these are NULL, and nothing
             is deleted. Let them pass: ``message_tombstone OR …``. Refused with a transform that shuffles, as its joins
             may drop tombstones too.

    The latest message of each key in a batch counts, or the one with the highest version. Two rows of one message with
    the same key are refused. After a shuffle whose rows no longer identify messages, so are any two rows with the same
    key.
    """

    table: str
    key: Sequence[str]
    columns: Columns = None
    version: str | None = None
    keep: Sequence[str] = ()
    deletes: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.key, str) or not self.key:
            raise JobError(f"Upsert: key must be a list of column names, not {self.key!r}")
        if self.deletes and len(self.key) != 1:
            raise JobError("Upsert: deletes needs a key of one column: it is compared with the message's Kafka key")

    def statements(
        self, payload: Sequence[str], types: Mapping[str, ColumnType], *, placed: bool = True
    ) -> list[sql.Composed]:
        """Return the SQL; see Insert. Raises JobError."""
        if self.deletes and not placed:
            raise JobError(
                f"Upsert: deletes needs to know which rows are tombstones, and when they came: keep the columns "
                f"{', '.join(sorted(PLACED))} in the transform's result, and message_key"
            )
        pairs = _pairs(self.table, self.columns, payload, types)
        for name in (*self.key, *self.keep, *([self.version] if self.version else [])):
            if name not in pairs:
                raise JobError(f"Upsert: {name} is not among the columns {', '.join(pairs)}")
        changed = [name for name in pairs if name not in {*self.key, *self.keep}]
        action: sql.Composable = sql.SQL("DO NOTHING")
        if changed:
            action = sql.SQL("DO UPDATE SET {}").format(
                sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in changed)
            )
            if self.version:
                newer = " WHERE stored.{0} IS NULL OR excluded.{0} {1} stored.{0}"
                action += sql.SQL(newer).format(sql.Identifier(self.version), types[self.version].operator(">"))
        # Cast to the table's types: otherwise two spellings of one key could be in one statement.
        key = _cast({name: pairs[name] for name in self.key}, types)
        messages = _messages(payload, placed)
        upsert = sql.SQL(_UPSERT).format(
            table=identifier(self.table),
            columns=_listed(pairs.keys()),
            values=_cast(pairs, types),
            rows=self._latest(key, pairs, types, messages, placed=placed),
            messages=sql.SQL("") if placed or self.version else messages,
            key=key,
            conflict=_listed(self.key),
            action=action,
        )
        statements = [upsert]
        if self.deletes:
            before, after = (
                sql.SQL(_DELETE).format(
                    table=identifier(self.table),
                    conflict=sql.Identifier(self.key[0]),
                    begun=sql.SQL(begun),
                    **self._compared(pairs, types),
                )
                for begun in ("EXISTS", "NOT EXISTS")
            )
            statements = [before, upsert, after]
        if self.version:
            statements.insert(0, versioned(pairs[self.version], types[self.version], messages, "Upsert"))
        return statements

    def _latest(
        self,
        key: sql.Composable,
        pairs: Mapping[str, str],
        types: Mapping[str, ColumnType],
        messages: sql.Composable,
        *,
        placed: bool,
    ) -> sql.Composable:
        """Return the source of the upsert: the latest rows of each key, if rows have an order."""
        order = [_cast({self.version: pairs[self.version]}, types) + sql.SQL(" DESC")] if self.version else []
        if placed:
            order.append(sql.Composed([sql.SQL(_LATEST)]))
        if not order:
            return sql.SQL("batch")
        if self.deletes:
            messages = messages + sql.SQL(_NOT_ENDED).format(**self._compared(pairs, types))
        return sql.SQL(_RANKED).format(key=key, order=sql.SQL(", ").join(order), messages=messages)

    def _compared(self, pairs: Mapping[str, str], types: Mapping[str, ColumnType]) -> dict[str, sql.Composable]:
        """Return the SQL parts that compare a tombstone's key with a row's."""
        key = types[self.key[0]]
        kind = sql.SQL(key.name)
        return {
            "here": sql.Identifier(pairs[self.key[0]]),
            "type": kind,
            "equals": key.operator("="),
            "gone": sql.SQL(_GONE).format(type=kind),
            "then": sql.SQL(_THEN),
        }


def _messages(payload: Sequence[str], placed: bool) -> sql.SQL:
    """Return the condition that excludes tombstones, if the rows still have ``message_tombstone``."""
    return sql.SQL(MESSAGES if placed or "message_tombstone" in payload else "")


def _pairs(table: str, columns: Columns, payload: Sequence[str], types: Mapping[str, ColumnType]) -> dict[str, str]:
    if isinstance(columns, str):
        raise JobError(f"{table}: columns must be a list or a mapping, not {columns!r}")
    names = payload if columns is None else columns
    pairs = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
    if not pairs:
        raise JobError(f"{table}: there is no column to write")
    for name in pairs:
        if name not in types:
            raise JobError(f"{table} has no column {name}; map the job's columns to the table's with columns={{…}}")
        refuse_truncating(table, name, types[name])
    return pairs


def _listed(names: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))


def _cast(pairs: Mapping[str, str], types: Mapping[str, ColumnType]) -> sql.Composed:
    return sql.SQL(", ").join(types[there].cast(here) for there, here in pairs.items())
