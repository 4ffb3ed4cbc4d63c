"""Texts go between us and Postgres in UTF-8, whatever the defaults of the role and the database are."""

from __future__ import annotations

from typing import Any, Final

import psycopg

from outbox.errors import SchemaError

UTF8: Final = "UTF8"
"""The ``client_encoding`` of every connection of our own."""


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
