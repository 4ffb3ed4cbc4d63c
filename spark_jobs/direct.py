"""The shortest way of an ``Insert``: rows by COPY straight into the sink's table, ids straight into processed_messages.

It does what the way through ``batch`` does, for half of the database's work, when nothing is the matter. Whatever is
the matter (a repeat, a row that the table refuses, an id of a day that is forgotten) ends the transaction with
``Roundabout``, and the driver runs the range again through ``batch``, which finds out what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg

from spark_jobs.applying import IMMEDIATE, copy_csv, passing
from spark_jobs.effects import Insert
from spark_jobs.strategies import Book, Dedup, Fingerprint, Strategy, column_types, forgotten_before, identifier

if TYPE_CHECKING:
    import pyarrow as pa

# A table proper, not a view; nothing that COPY passes over or can't do: rules, row security.
_PLAIN: Final = """
SELECT relkind IN ('r', 'p') AND NOT relhasrules AND NOT relrowsecurity
  FROM pg_class WHERE oid = to_regclass(%(table)s)"""
# COPY writes them, INSERT must not.
_ALWAYS: Final = """
SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%(table)s) AND attidentity = 'a'"""
_WHOLE: Final = ("smallint", "integer", "bigint")
# Of which reading a text, as COPY does, and casting it from text, as the way through ``batch`` does, are one thing.
_FROM_TEXT: Final = frozenset(
    {
        *(
            "text",
            "character varying",
            "bpchar",
            "numeric",
            "uuid",
            "json",
            "jsonb",
            "boolean",
            "date",
            "interval",
            "inet",
        ),
        *(*_WHOLE, "real", "double precision", "timestamp without time zone", "timestamp with time zone"),
    }
)
_SPELT: Final = {"timestamptz": "timestamp with time zone", "timestamp": "timestamp without time zone"}


class Roundabout(Exception):
    """Ends the transaction: the range has to go through ``batch``."""


@dataclass(frozen=True, slots=True)
class Direct:
    """Where rows go: the sink's table, and for each of its columns the one of the rows."""

    table: str
    columns: Mapping[str, str]

    def apply(self, cursor: psycopg.Cursor[Any], book: Book, strategy: Strategy, rows: Iterable[pa.RecordBatch]) -> int:
        """Copy rows and ids. Gives their number. Raises Roundabout."""
        ids: list[pa.Array] = []
        try:
            copy_csv(cursor, identifier(self.table), list(self.columns), self._columns(rows, ids))
            if strategy.remembers:
                self._remember(cursor, book, ids)
            cursor.execute(IMMEDIATE)
        except psycopg.Error as error:
            if passing(error):
                raise
            raise Roundabout from error
        return sum(map(len, ids))

    def _columns(self, rows: Iterable[pa.RecordBatch], ids: list[pa.Array]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.compute as pc

        for batch in rows:
            ids.append(batch.column("message_id"))
            # A tombstone has nothing to insert.
            gone = batch.column("message_tombstone")
            if gone.true_count:
                batch = batch.filter(pc.invert(gone))  # noqa: PLW2901
            yield pa.RecordBatch.from_pydict({there: batch.column(here) for there, here in self.columns.items()})

    @staticmethod
    def _remember(cursor: psycopg.Cursor[Any], book: Book, ids: list[pa.Array]) -> None:
        from spark_jobs import processed

        processed.copy_ids(cursor, book, ids)
        # After the ids went in: see strategies.forgotten_before.
        before = forgotten_before(cursor, book)
        if before is not None and processed.any_before(ids, before):
            raise Roundabout


def direct_for(
    cursor: psycopg.Cursor[Any], effect: object, strategy: Strategy, columns: Mapping[str, str], payload: Sequence[str]
) -> Direct | None:
    """Give where rows can go straight to; None when that would not be the same as the way through ``batch``.

    columns  of ``batch``, with their types in Postgres; ``payload`` are those that are the payload's.
    """
    if not isinstance(effect, Insert) or not isinstance(strategy, Dedup | Fingerprint):
        return None
    types = column_types(cursor, effect.table)
    pairs = effect.pairs(payload, types)
    if not all(here in columns and _same_as_cast(columns[here], types[there]) for there, here in pairs.items()):
        return None
    values = {"table": identifier(effect.table).as_string(cursor)}
    row = cursor.execute(_PLAIN, values).fetchone()
    always = {name for (name,) in cursor.execute(_ALWAYS, values).fetchall()}
    if row is None or not row[0] or always.intersection(pairs):
        return None
    return Direct(effect.table, pairs)


def _same_as_cast(here: str, there: str) -> bool:
    """Say whether what COPY writes for a column of type ``here`` is read by type ``there`` as a cast would make it."""
    here = _SPELT.get(here, here)
    bare = there.partition("(")[0]
    if here == "text":
        return bare in _FROM_TEXT
    if here in _WHOLE:
        return bare in {*_WHOLE, "numeric", "text", "character varying"}
    return here.partition("(")[0] == bare
