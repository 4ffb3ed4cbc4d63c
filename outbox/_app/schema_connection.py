"""A connection for changes of the tables, whose errors say what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
import sqlalchemy as sa

from outbox._clients.credentials import password_for
from outbox._clients.postgres import UTF8, check_encoding, first_line
from outbox._clients.search_path import PIN, PIN_LOCAL, is_pooled
from outbox.errors import SchemaError, TablesInUse
from outbox.urls import display_url, libpq_url

Database = str | Callable[[], psycopg.Connection[Any]]
"""An address, or a function that connects: for a host application with connections of its own."""

_ADVICE: Final = {
    "25P03": "the command was stopped for too long; run it again",
    "25006": "this connection may only read: use the primary server and a role that may write",
    "2BP01": "if it is `outbox cdc setup`'s publication: `outbox cdc drop` first, and set it up again afterwards",
    "3F000": "create the tables with `outbox db upgrade`, or correct the schema's name",
    "40P01": "other transactions use these tables; try again when they have ended",
    "42501": "use the role that owns the database or these tables",
    "42704": "create the role first (CREATE ROLE … LOGIN), or correct its name",
    "42P01": "create the tables with `outbox db upgrade`, or correct the schema's name",
    "42P07": "`outbox db upgrade` did not create this table; continue with the migrations that did",
    "55P03": "long transactions use these tables; try again when they have ended",
    "57014": "it was cancelled, by hand or by the role's statement_timeout; raise that, and try again",
}
"""What to do, by SQLSTATE."""
_IN_USE: Final = frozenset({"40P01", "55P03"})
"""SQLSTATEs of a deadlock, and of a lock that was not to be had in time."""


@contextmanager
def connected(url: Database) -> Iterator[sa.Connection]:
    """Open a connection that is READ COMMITTED whatever the server's default is, with names pinned to pg_catalog.

    Raises ConfigurationError when the address can't be parsed, SchemaError in place of every database error.
    """
    address = libpq_url(url) if isinstance(url, str) else ""
    shown = display_url(address) if isinstance(url, str) else "the database"

    def connect() -> psycopg.Connection[Any]:
        # libpq parses the URL, so that it means the same here as in the relay.
        try:
            if isinstance(url, str):
                opened = psycopg.connect(address, client_encoding=UTF8, **password_for(address))
            else:
                opened = url()
            check_encoding(opened)
            # Before SQLAlchemy's first query; behind a pooler the transactions below are pinned.
            if not is_pooled(opened):
                opened.execute(PIN)
            opened.commit()
            return opened
        except (psycopg.Error, UnicodeError) as error:
            raise SchemaError(
                f"{shown}: {first_line(error)}; see that the server runs, and that OUTBOX_DATABASE_URL has "
                "the right host, database and user"
            ) from error

    engine = sa.create_engine(
        "postgresql+psycopg://",
        creator=connect,
        poolclass=sa.pool.NullPool,
        isolation_level="READ COMMITTED",
        # Looked up by each new connection, before its first transaction is pinned.
        use_native_hstore=False,
    )
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(PIN_LOCAL))
    try:
        with engine.connect() as connection:
            yield connection
    except sa.exc.DBAPIError as error:
        state = getattr(error.orig, "sqlstate", None) or ""
        advice = _ADVICE.get(state)
        kind = TablesInUse if state in _IN_USE else SchemaError
        raise kind(f"{shown}: {first_line(error.orig or error)}" + (f"; {advice}" if advice else "")) from error
    finally:
        engine.dispose()
