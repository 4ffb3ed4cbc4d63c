"""The outbox's database, for a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg

from relay.config import Settings, load
from relay.database import Connector


@contextmanager
def outbox_session(database_url: str | None, command: str) -> Iterator[tuple[psycopg.Connection[Any], Settings]]:
    """Yield a connection in autocommit, which the server shows as this command's, and the settings."""
    settings = load(database_url=database_url)
    with closing(Connector(settings.require_database(), f"outbox {command}")()) as connection:
        yield connection, settings
