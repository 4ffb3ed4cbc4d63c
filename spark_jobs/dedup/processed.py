"""COPY ids into processed_messages: a third of the cost of an INSERT that reads them from ``batch``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql

from spark_jobs import ids as identity
from spark_jobs.ids import Ids
from spark_jobs.postgres.copying import HEAD, TAIL, Unfit
from spark_jobs.postgres.encoding import POSTGRES_DAY

if TYPE_CHECKING:
    from spark_jobs.dedup.strategies import DedupStore


def ids_of(texts: pa.Array) -> Ids:
    """Return the ids of a batch. Raises Unfit for a text that is not a UUID in the form 8-4-4-4-12."""
    ids, wrong = identity.parsed(texts)
    if wrong.any():
        raise Unfit("an id that is no UUID", "22P02")
    return ids


def copy_ids(cursor: psycopg.Cursor[Any], dedup: DedupStore, batches: Sequence[Ids]) -> None:
    """Insert ids under their days. Raises UniqueViolation for an id that exists or is repeated.

    In the order of days and then of ids, which is also that of the table's partitions: two transactions with the same
    ids wait for each other in one direction only.
    """
    ids = identity.in_order(_joined(batches))
    into = sql.SQL("COPY {} (grp, day, message_id) FROM STDIN (FORMAT binary)").format(
        sql.Identifier(dedup.schema, "processed_messages")
    )
    with cursor.copy(into) as copy:
        copy.write(HEAD)
        copy.write(_rows(dedup.group.encode(), identity.days(ids), ids))
        copy.write(TAIL)


def insert_ids(cursor: psycopg.Cursor[Any], dedup: DedupStore, batches: Sequence[Ids]) -> None:
    """Do the same in one statement, for a few ids."""
    from spark_jobs.dedup.strategies import REMEMBER_THESE

    dedup.run(cursor, REMEMBER_THESE, ids=[one.tobytes().hex() for one in _joined(batches)])


def any_before(batches: Sequence[Ids], day: int) -> bool:
    """Return whether an id is of a day before this one, in days since 1970-01-01. Ids without a time are ignored."""
    found = identity.days(_joined(batches))
    return bool(((found < day) & (found != 0)).any())


def _joined(batches: Sequence[Ids]) -> Ids:
    return np.concatenate([np.zeros((0, 16), np.uint8), *batches])


def _rows(group: bytes, days: Any, ids: Ids) -> bytes:
    """Encode rows of three fields, each after its length, in network byte order."""
    encoded = np.zeros(
        len(ids),
        [
            ("fields", ">i2"),
            ("group_length", ">i4"),
            ("group", np.uint8, (len(group),)),
            ("day_length", ">i4"),
            ("day", ">i4"),
            ("id_length", ">i4"),
            ("id", np.uint8, (16,)),
        ],
    )
    encoded["fields"] = 3
    encoded["group_length"], encoded["group"] = len(group), np.frombuffer(group, np.uint8)
    encoded["day_length"], encoded["day"] = 4, days - POSTGRES_DAY
    encoded["id_length"], encoded["id"] = 16, ids
    return encoded.tobytes()
