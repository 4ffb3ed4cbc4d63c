"""Copy rows of which some may not fit their columns, and name the messages of those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """Copy rows as ``copy_rows`` does, except for those that do not fit, whose messages are added to ``found``.

    A batch that fails is halved, each part under a savepoint, down to single rows. Raises EffectError for a row that
    does not identify its message, and RejectedRecords when there are more than ``max_dead``.
    """
    places = {record.place for record in found}
    for batch in batches:
        parts = [batch]
        while parts:
            part = parts.pop()
            try:
                with cursor.connection.transaction():
                    copy_rows(cursor, table, columns, [part])
                continue
            except (Unfit, psycopg.Error) as error:
                why, state = _reason(error)
            half = part.num_rows // 2
            if half:
                parts += [part.slice(half), part.slice(0, half)]
                continue
            if not META_PLACE.keys() <= set(part.schema.names):
                raise EffectError(
                    f"{why}; it is a row of the transform, of no one message, so no message can be put aside for it"
                )
            (place,) = refs_of(part)
            if place not in places:
                places.add(place)
                found.append(RejectedRecord(place, "failed", why, state))
            if len(found) > max_dead:
                raise RejectedRecords(found)


def _reason(error: Unfit | psycopg.Error) -> tuple[str, str | None]:
    """Return why a row does not fit, and the SQLSTATE. Raises any error that is not about rows."""
    if isinstance(error, Unfit):
        return str(error), error.sqlstate
    if passing(error) or not by_data(error):
        raise error
    # COPY names the column in the context.
    _, named, column = (error.diag.context or "").partition("column ")
    return f"column {column.partition(':')[0]}: {shown(error)}" if named else shown(error), error.sqlstate
