"""Connections to Postgres, whatever its roles and databases have set: encoding, durability, pipelines, errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg

from outbox.errors import SchemaError

UTF8: Final = "UTF8"
"""The ``client_encoding`` of every connection of our own."""

SYNCHRONOUS: Final = """pg_catalog.set_config('synchronous_commit',
       CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
            ELSE pg_catalog.current_setting('synchronous_commit') END, true)"""
"""SQL: makes the transaction's COMMIT one that Postgres can't lose when it stops. The setting takes effect there, so
any of its statements can have this."""


def check_encoding(connection: psycopg.Connection[Any]) -> None:
    """Raise SchemaError, and close the connection, if its database takes text in any encoding: SQL_ASCII.

    A text there need not be UTF-8, and one that is not would stop its lane.
    """
    if connection.info.parameter_status("server_encoding") == "SQL_ASCII":
        name = connection.info.dbname
        connection.close()
        raise SchemaError(
            f"the database {name!r} has the encoding SQL_ASCII, which does not say what its texts are; create one with "
            "ENCODING 'UTF8', and move the tables there"
        )


@contextmanager
def pipeline(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Open psycopg's pipeline for the block; raise the first error of its statements, at the end of the block at last.

    A fast server answers while the block still sends. psycopg raises that error inside the block, then logs a warning
    about the statements behind it, which Postgres skips: https://www.postgresql.org/docs/current/libpq-pipeline-mode.html
    """
    first: psycopg.Error | None = None
    try:
        with connection.pipeline():
            try:
                yield
            except psycopg.Error as error:
                first = error
    except psycopg.Error:
        if first is None:
            raise
    if first is not None:
        raise first


def first_line(error: BaseException) -> str:
    """Return the first line of a Postgres error, which says what happened; the others have details and advice."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, with the driver's errors that SQLAlchemy's carry as ``orig``."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        if isinstance(driver := getattr(error, "orig", None), BaseException):
            yield driver
        error = error.__cause__
