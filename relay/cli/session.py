"""The settings and the outbox's database, for a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated, Any

import psycopg
import typer

from relay.config import Settings, load
from relay.database import Connector

SinkOption = Annotated[
    str | None, typer.Option("--sink-url", help="The consumers' database, if it is another one; OUTBOX_RELAY__SINK_URL")
]


def load_with_sink(database_url: str | None, sink_url: str | None, **given: Any) -> Settings:
    """Return the settings, with these options of a command. Raises ConfigurationError."""
    return load(database_url=database_url, relay=None if sink_url is None else {"sink_url": sink_url}, **given)


@contextmanager
def outbox_session(database_url: str | None, command: str) -> Iterator[tuple[psycopg.Connection[Any], Settings]]:
    """Yield a connection in autocommit, which the server shows as this command's, and the settings."""
    settings = load(database_url=database_url)
    with closing(Connector(settings.require_database(), f"outbox {command}")()) as connection:
        yield connection, settings
