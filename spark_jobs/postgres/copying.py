"""COPY Arrow batches into a table, without handling single rows in Python.

The binary format is used if it is implemented here for all of the columns' types: it saves the server from parsing,
which is most of the cost of COPY. Otherwise the rows are sent as CSV, which Arrow writes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    import pyarrow as pa

HEAD: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TAIL: Final = b"\xff\xff"


class Unfit(Exception):
    """A value that can't be encoded as its column's type. ``sqlstate`` is what Postgres would give for it."""

    def __init__(self, why: str, sqlstate: str) -> None:
        super().__init__(why)
        self.sqlstate = sqlstate


def copy_rows(
    cursor: psycopg.Cursor[Any], table: sql.Composable, columns: Mapping[str, str], batches: Iterable[pa.RecordBatch]
) -> None:
    """Stream these columns of the batches into a table's columns of the same names and these types. Raises Unfit."""
    from spark_jobs.postgres import encoding

    encoders = {name: encoding.encoder_of(kind) for name, kind in columns.items()}
    if None in encoders.values():
        copy_csv(cursor, table, list(columns), batches)
        return
    # Columns of fixed width come first, so that together they form one piece of each row.
    fixed = {name: encode for name, encode in encoders.items() if callable(encode)}
    texts = {name: encode for name, encode in encoders.items() if isinstance(encode, bytes)}
    with cursor.copy(_into(table, [*fixed, *texts], "binary")) as copy:
        copy.write(HEAD)
        for batch in batches:
            for part in encoding.parts(batch):
                copy.write(encoding.rows_of(part, fixed, texts))
        copy.write(TAIL)


def copy_csv(
    cursor: psycopg.Cursor[Any], table: sql.Composable, columns: Sequence[str], batches: Iterable[pa.RecordBatch]
) -> None:
    """Stream these columns of the batches into a table as text, for columns of any type. Raises Unfit."""
    from pyarrow import csv

    from spark_jobs.postgres.encoding import as_text

    # "all_valid" quotes every value but NULL, which distinguishes an empty text from NULL.
    options = csv.WriteOptions(include_header=False, quoting_style="all_valid")
    with cursor.copy(_into(table, columns, "csv")) as copy:
        for batch in batches:
            sink = io.BytesIO()
            csv.write_csv(as_text(batch.select(list(columns))), sink, options)
            copy.write(sink.getbuffer())


def _into(table: sql.Composable, columns: Sequence[str], form: str) -> sql.Composed:
    listed = sql.SQL(", ").join(map(sql.Identifier, columns))
    return sql.SQL("COPY {} ({}) FROM STDIN (FORMAT {})").format(table, listed, sql.SQL(form))
