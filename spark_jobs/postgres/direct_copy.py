"""The fast path of an ``Insert``: COPY rows directly into the sink's table, and ids into processed_messages if the
strategy remembers them.

It has the same result as the path through ``batch``, with half of the work for the database, as long as nothing goes
wrong. A repeat, a row that the table refuses, or an id of a forgotten day ends the transaction with
``FallbackToBatch``, and the driver runs the range again through ``batch``, which handles them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg

from outbox._clients.postgres import pipeline
from outbox.consumer.postgres_errors import passing
from outbox.consumer.statements import IMMEDIATE
from spark_jobs.dedup.strategies import (
    Dedup,
    DedupStore,
    Fingerprint,
    OffsetsOnly,
    Strategy,
    ask_forgotten_before,
    column_types,
    identifier,
)
from spark_jobs.effects.mapped import Insert
from spark_jobs.outcomes import FallbackToBatch
from spark_jobs.postgres.copying import Unfit, copy_rows

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_jobs.ids import Ids

# A table, not a view, without features that COPY ignores or does not support: rules, row security, GENERATED ALWAYS.
# And a description of the columns: binary values are identified only by their position.
_LOOK: Final = """
SELECT c.relkind IN ('r', 'p') AND NOT c.relhasrules AND NOT c.relrowsecurity
       AND NOT pg_catalog.bool_or(a.attidentity = 'a' AND a.attname = ANY(%(columns)s)),
       c.oid::text || pg_catalog.string_agg(
           pg_catalog.format(' %%I %%s %%s', a.attname, a.atttypid, a.atttypmod), '' ORDER BY a.attnum)
  FROM pg_catalog.pg_class AS c
  JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE c.oid = pg_catalog.to_regclass(%(table)s)::oid
 GROUP BY c.oid"""
# Raised although the server is not away: two transactions lock rows and ids in different orders (through ``batch`` the
# ids come first), or a table's columns have another width by now.
_OURS: Final = (psycopg.errors.DeadlockDetected, psycopg.errors.ProtocolViolation)
_WHOLE: Final = ("smallint", "integer", "bigint")
# Types for which reading a text, as COPY does, equals a cast from text, as on the path through ``batch``.
_TEXTS: Final = ("text", "character varying", "bpchar", "uuid", "json", "jsonb", "interval", "inet")
_TIMES: Final = ("date", "timestamp without time zone", "timestamp with time zone")
_FROM_TEXT: Final = frozenset({*_TEXTS, *_TIMES, *_WHOLE, "boolean", "numeric", "real", "double precision"})
# Types to which text is sent as it is; and those for which only the usual form is sent, as a value, while any other
# form goes through ``batch``.
_AS_TEXT: Final = frozenset({"character varying", "bpchar"})
_STRICT: Final = frozenset({"uuid", "json", "jsonb"})
_SPELT: Final = {"timestamptz": "timestamp with time zone", "timestamp": "timestamp without time zone"}

_FEW: Final = 2_000
"""Up to this many ids are inserted by a statement, which needs no answer of its own; more of them by COPY."""

OTHERWISE: Final = "otherwise"
"""In place of a type: the whole row is sent as CSV."""


@dataclass(frozen=True, slots=True)
class DirectCopy:
    """The target of a direct copy.

    table    of the sink.
    columns  table column → column of the rows.
    kinds    table column → the type as which its values are sent, or OTHERWISE.
    seen     a description of the table when that was decided.
    """

    table: str
    columns: Mapping[str, str]
    kinds: Mapping[str, str]
    seen: str

    def apply(
        self, cursor: psycopg.Cursor[Any], dedup: DedupStore, strategy: Strategy, rows: Iterable[pa.RecordBatch]
    ) -> int:
        """Copy rows, and ids if they are remembered. Returns the number of rows. Raises FallbackToBatch."""
        ids: list[Ids] | None = [] if strategy.remembers else None
        counts: list[int] = []
        try:
            copy_rows(cursor, identifier(self.table), self.kinds, self._columns(rows, counts, ids))
            self._finish(cursor, dedup, ids)
        except (psycopg.Error, Unfit) as error:
            if isinstance(error, psycopg.Error) and passing(error) and not isinstance(error, _OURS):
                raise
            raise FallbackToBatch from error
        return sum(counts)

    def _columns(
        self, rows: Iterable[pa.RecordBatch], counts: list[int], ids: list[Ids] | None
    ) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.compute as pc

        from spark_jobs.dedup.processed import ids_of

        for batch in rows:
            counts.append(batch.num_rows)
            if ids is not None:
                ids.append(ids_of(batch.column("message_id")))
            # A tombstone has nothing to insert.
            gone = batch.column("message_tombstone")
            if gone.true_count:
                batch = batch.filter(pc.invert(gone))  # noqa: PLW2901
            yield pa.RecordBatch.from_pydict({there: batch.column(here) for there, here in self.columns.items()})

    def _finish(self, cursor: psycopg.Cursor[Any], dedup: DedupStore, ids: list[Ids] | None) -> None:
        """Insert the ids, and check everything; all of it is sent before the first answer is awaited."""
        from spark_jobs.dedup import processed

        connection = cursor.connection
        small = ids is not None and sum(map(len, ids)) <= _FEW
        if ids is not None and not small:
            # COPY does not go into a pipeline.
            processed.copy_ids(cursor, dedup, ids)
        with pipeline(connection):
            # COPY has locked the table, so it can't be altered any more until COMMIT.
            looked = _ask(connection.cursor(), self.table, self.columns)
            if ids is not None and small:
                processed.insert_ids(connection.cursor(), dedup, ids)
            # After the ids were inserted: see strategies.forgotten_before.
            asked = None if ids is None else ask_forgotten_before(connection.cursor(), dedup)
            connection.cursor().execute(IMMEDIATE)
        if _answer(looked) != (True, self.seen):
            raise FallbackToBatch
        if ids is not None and asked is not None:
            row = asked.fetchone()
            before = None if row is None else row[0]
            if before is not None and processed.any_before(ids, before):
                raise FallbackToBatch


def direct_for(
    cursor: psycopg.Cursor[Any], effect: object, strategy: Strategy, columns: Mapping[str, str], payload: Sequence[str]
) -> DirectCopy | None:
    """Return the target of a direct copy; None if the result would differ from that of the path through ``batch``.

    columns  of ``batch``, with their Postgres types; ``payload`` are those of the payload.
    """
    if not isinstance(effect, Insert) or not isinstance(strategy, Dedup | Fingerprint | OffsetsOnly):
        return None
    # Read first: if the table is altered before the next query, the task notices, because it compares this again.
    _, seen = _look(cursor, effect.table, ())
    types = column_types(cursor, effect.table)
    pairs = effect.pairs(payload, types)
    kinds = {
        there: _sent_as(columns[here], types[there].name) if here in columns else None for there, here in pairs.items()
    }
    plain, _ = _look(cursor, effect.table, pairs)
    if None in kinds.values() or not plain:
        return None
    return DirectCopy(effect.table, pairs, {there: kind for there, kind in kinds.items() if kind is not None}, seen)


def _look(cursor: psycopg.Cursor[Any], table: str, columns: Iterable[str]) -> tuple[bool, str]:
    """Return whether COPY into these columns is the same as INSERT, and a description of the table."""
    return _answer(_ask(cursor, table, columns))


def _ask(cursor: psycopg.Cursor[Any], table: str, columns: Iterable[str]) -> psycopg.Cursor[Any]:
    values = {"table": identifier(table).as_string(cursor), "columns": list(columns)}
    return cursor.execute(_LOOK, values)


def _answer(asked: psycopg.Cursor[Any]) -> tuple[bool, str]:
    row = asked.fetchone()
    return (False, "") if row is None else (bool(row[0]), str(row[1]))


def _sent_as(here: str, there: str) -> str | None:
    """Return the type as which values of type ``here`` are sent to a column of type ``there``.

    OTHERWISE if they must be sent as text, with the same result as the cast on the path through ``batch``; None if the
    result would differ.
    """
    bare = there.partition("(")[0]
    if _SPELT.get(here, here).partition("(")[0] == bare:
        return here
    if here == "text":
        if bare in _AS_TEXT:
            return here
        return (there if bare in _STRICT else OTHERWISE) if bare in _FROM_TEXT else None
    return OTHERWISE if here in _WHOLE and bare in {*_WHOLE, "numeric", "text", "character varying"} else None
