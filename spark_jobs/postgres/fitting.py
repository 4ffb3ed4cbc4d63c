"""Copy rows unless some do not fit their columns, and name the messages of those."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from outbox.consumer.errors import shown
from outbox.consumer.model import META_PLACE, RejectedRecord, refs_of
from outbox.consumer.postgres_errors import by_data, passing
from spark_jobs.outcomes import EffectError, RejectedRecords
from spark_jobs.postgres.copying import Unfit, copy_rows

if TYPE_CHECKING:
    import pyarrow as pa


def copy_fitting(
    cursor: psycopg.Cursor[Any],
    table: sql.Composable,
    columns: Mapping[str, str],
    batches: Iterable[pa.RecordBatch],
    found: list[RejectedRecord],
    max_dead: int,
) -> None:
    """Copy rows as ``copy_rows`` does. If some do not fit, copy none, and add the messages of those to ``found``.

    All is copied under one savepoint: a session with more than 64 that have written makes others slower. After an error
    the rows are only tried: a batch that fails is halved, down to single rows, each part under a savepoint that is
    rolled back. Raises EffectError for a row that does not identify its message, and RejectedRecords when there are
    more than ``max_dead``.
    """
    rest = iter(batches)
    parts: list[pa.RecordBatch] = []
    try:
        with cursor.connection.transaction():
            for batch in rest:
                parts = [batch]
                copy_rows(cursor, table, columns, parts)
        return
    except (Unfit, psycopg.Error) as error:
        whole, _ = _reason(error)
    places = {record.place for record in found}
    for row, why, state in _refused(cursor, table, columns, itertools.chain(parts, rest)):
        if not META_PLACE.keys() <= set(row.schema.names):
            raise EffectError(
                f"{why}; it is a row of the transform, of no one message, so no message can be put aside for it"
            )
        (place,) = refs_of(row)
        if place not in places:
            places.add(place)
            found.append(RejectedRecord(place, "failed", why, state))
        if len(found) > max_dead:
            raise RejectedRecords(found)
    if not found:
        raise EffectError(f"{whole}; each of the rows fits by itself")


def _refused(
    cursor: psycopg.Cursor[Any], table: sql.Composable, columns: Mapping[str, str], batches: Iterable[pa.RecordBatch]
) -> Iterator[tuple[pa.RecordBatch, str, str | None]]:
    """Return the rows that do not fit, one by one, each with the reason and the SQLSTATE."""
    for batch in batches:
        parts = [batch]
        while parts:
            part = parts.pop()
            try:
                with cursor.connection.transaction(force_rollback=True):
                    copy_rows(cursor, table, columns, [part])
                continue
            except (Unfit, psycopg.Error) as error:
                reason = _reason(error)
            half = part.num_rows // 2
            if half:
                parts += [part.slice(half), part.slice(0, half)]
            else:
                yield part, *_with_column(part, columns, *reason)


def _with_column(row: pa.RecordBatch, columns: Iterable[str], why: str, state: str | None) -> tuple[str, str | None]:
    """Return the reason with the column whose text Postgres can't store: of CSV, COPY converts a whole line."""
    import pyarrow as pa

    if state == psycopg.errors.CharacterNotInRepertoire.sqlstate and not why.startswith("column "):
        for name in columns:
            value = row.column(name)
            text = value.cast(pa.binary())[0].as_py() if pa.types.is_string(value.type) else None
            if text is not None and (b"\0" in text or text.decode("utf-8", "replace").encode() != text):
                return f"column {name}: {why}", state
    return why, state


def _reason(error: Unfit | psycopg.Error) -> tuple[str, str | None]:
    """Return why a row does not fit, and the SQLSTATE. Raises any error that is not about rows."""
    if isinstance(error, Unfit):
        return str(error), error.sqlstate
    if passing(error) or not by_data(error):
        raise error
    # COPY names the column in the context.
    _, named, column = (error.diag.context or "").partition("column ")
    return f"column {column.partition(':')[0]}: {shown(error)}" if named else shown(error), error.sqlstate
