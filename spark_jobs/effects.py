"""Effects that need no SQL of one's own: columns mapped to a table. The statements can be looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from spark_jobs.errors import JobError
from spark_jobs.strategies import identifier, refuse_cutting

_INSERT: Final = "INSERT INTO {table} ({columns}) SELECT {values} FROM batch{messages}"
_MESSAGES: Final = " WHERE NOT message_tombstone"
_LATEST: Final = ", message_topic DESC, message_part DESC, message_offset DESC"
# One row for each key, the latest: a second one in the same statement would be refused. In the order of keys, so that
# two transactions never wait for each other in a circle.
_UPSERT: Final = """
WITH latest AS (
    SELECT DISTINCT ON ({key}) * FROM batch{messages} ORDER BY {key}{order})
INSERT INTO {table} AS stored ({columns})
SELECT {values} FROM latest ORDER BY {key}
    ON CONFLICT ({conflict}) {action}"""
_DELETE: Final = """
WITH latest AS (
    SELECT DISTINCT ON (message_key) * FROM batch
     ORDER BY message_key, message_topic DESC, message_part DESC, message_offset DESC)
DELETE FROM {table} AS stored USING latest
 WHERE latest.message_tombstone AND stored.{conflict} = latest.message_key::{type}"""

Columns = Mapping[str, str] | Sequence[str] | None
"""Table column → column of ``batch``; or names that are the same in both; or None: all of the payload's."""


@dataclass(frozen=True, slots=True)
class Insert:
    """Append a row for each message. With Dedup, each event is one row once.

    table    of the sink, ``name`` or ``schema.name``.
    columns  see Columns. Tombstones are passed over.
    """

    table: str
    columns: Columns = None

    def statements(
        self, payload: Sequence[str], types: Mapping[str, str], *, placed: bool = True
    ) -> list[sql.Composed]:
        """Give the SQL for a batch whose payload has these columns and a table of these types. Raises JobError.

        placed  the rows of ``batch`` are messages, with META's columns; not so after an aggregation.
        """
        pairs = self.pairs(payload, types)
        return [
            sql.SQL(_INSERT).format(
                table=identifier(self.table),
                columns=_listed(pairs.keys()),
                values=_cast(pairs, types),
                messages=sql.SQL(_MESSAGES if placed else ""),
            )
        ]

    def pairs(self, payload: Sequence[str], types: Mapping[str, str]) -> dict[str, str]:
        """Give the table's columns that are written, each with the one of ``batch``. Raises JobError."""
        return _pairs(self.table, self.columns, payload, types)


@dataclass(frozen=True, slots=True)
class Upsert:
    """Keep one row for each key: insert it, or update what is there.

    table    of the sink, ``name`` or ``schema.name``; it needs a unique index over exactly the key's columns.
    key      the key's columns in the table.
    columns  see Columns; the key's must be among them.
    version  a column of the table: a row is only updated by one with a higher version.
    keep     columns of the table that are written when a row is inserted and never updated, as ``created_at``.
    deletes  a tombstone (a message without a payload) deletes the row whose key is the message's Kafka key. For keys
             of one column. Without it tombstones are passed over.
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
        self, payload: Sequence[str], types: Mapping[str, str], *, placed: bool = True
    ) -> list[sql.Composed]:
        """Give the SQL for a batch whose payload has these columns and a table of these types. Raises JobError.

        placed  the rows of ``batch`` are messages, with META's columns; not so after an aggregation.
        """
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
                action += sql.SQL(" WHERE excluded.{0} > stored.{0}").format(sql.Identifier(self.version))
        newest = sql.Composed([sql.SQL(_LATEST if placed else "")])
        if self.version:
            version = _cast({self.version: pairs[self.version]}, types)
            newest = sql.SQL(", {} DESC NULLS LAST").format(version) + newest
        made = [
            sql.SQL(_UPSERT).format(
                table=identifier(self.table),
                columns=_listed(pairs.keys()),
                values=_cast(pairs, types),
                # As the table has them: two spellings of one key must not meet in one statement.
                key=_cast({name: pairs[name] for name in self.key}, types),
                conflict=_listed(self.key),
                order=newest,
                messages=sql.SQL(_MESSAGES if placed else ""),
                action=action,
            )
        ]
        if self.deletes and placed:
            made.append(
                sql.SQL(_DELETE).format(
                    table=identifier(self.table), conflict=sql.Identifier(self.key[0]), type=_type(types[self.key[0]])
                )
            )
        return made


def _pairs(table: str, columns: Columns, payload: Sequence[str], types: Mapping[str, str]) -> dict[str, str]:
    if columns is None:
        pairs = {name: name for name in payload}
    elif isinstance(columns, Mapping):
        pairs = dict(columns)
    elif isinstance(columns, str):
        raise JobError(f"{table}: columns must be a list or a mapping, not {columns!r}")
    else:
        pairs = {name: name for name in columns}
    if not pairs:
        raise JobError(f"{table}: there is no column to write")
    for name in pairs:
        if name not in types:
            raise JobError(f"{table} has no column {name}; map the job's columns to the table's with columns={{…}}")
        refuse_cutting(table, name, types[name])
    return pairs


def _listed(names: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))


def _cast(pairs: Mapping[str, str], types: Mapping[str, str]) -> sql.Composed:
    """The batch's columns as the table's types: text to uuid, for one, Postgres does not do by itself."""
    return sql.SQL(", ").join(
        sql.SQL("{}::{}").format(sql.Identifier(here), _type(types[there])) for there, here in pairs.items()
    )


def _type(name: str) -> sql.SQL:
    # As format_type() spells it, quoted where it has to be.
    return sql.SQL(name)
