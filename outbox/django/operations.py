"""The revisions in migrations/ as operations of Django's migrations.

The tables' own version table says which revision they have, and `django_migrations` which were asked for. So a revision
that is there already, because `outbox db upgrade` has run or another pod was faster, is not applied again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
import sqlalchemy as sa
from django.apps import apps
from django.db import connections
from django.db.migrations.operations import CreateModel
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ModelState

from outbox._app import migrate
from outbox._app.schema_connection import connected
from outbox.django.conf import options
from outbox.tables import DEFAULT_LANES

_LOG: Final = logging.getLogger("outbox.django")


class Revision(Operation):
    """Upgrade the tables to a revision as `outbox db upgrade` does, and back as `outbox db downgrade` does.

    Only in the database of OUTBOX["DATABASE"], whatever routers say, and in a transaction of its own.
    """

    reduces_to_sql = True
    reversible = True

    def __init__(self, revision: str) -> None:
        self.revision = revision

    def state_forwards(self, app_label: str, state: Any) -> None:
        """The models have all that is known of the tables."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        given, alias = options(), schema_editor.connection.alias
        if alias != given.database:
            return
        if schema_editor.collect_sql:
            script = migrate.sql(given.schema, given.lanes or DEFAULT_LANES, self._before(), self.revision)
            schema_editor.execute(script, params=None)
            return
        with _own(alias) as connect:
            migrate.repeated(_LOG.warning, lambda: migrate.upgrade(connect, given.schema, given.lanes, self.revision))

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        given, alias = options(), schema_editor.connection.alias
        if alias != given.database:
            return
        if schema_editor.collect_sql:
            schema_editor.execute(f"-- outbox db downgrade {self._before()}", params=None)
            return
        with _own(alias) as connect:
            migrate.repeated(_LOG.warning, lambda: migrate.downgrade(connect, given.schema, self._before()))

    def describe(self) -> str:
        return f"Upgrade the outbox's tables to {self.revision}"

    def _before(self) -> str:
        known = ["base", *migrate.revisions()]
        return known[known.index(self.revision) - 1]


@contextmanager
def _own(alias: str) -> Iterator[Callable[[], psycopg.Connection[Any]]]:
    """Yield a function that connects as Django does, its role included, but with a connection of its own.

    A migration's settings, such as the search path, and its commit stay apart from Django's transaction.
    """
    own = connections[alias].copy()
    own.settings_dict["OPTIONS"].pop("pool", None)  # a later user of the connection would inherit them

    def connect() -> psycopg.Connection[Any]:
        own.close()  # each try has a new one
        own.ensure_connection()
        return own.connection  # type: ignore[no-any-return]

    try:
        yield connect
    finally:
        own.close()


def behind(alias: str, schema: str, applied: int) -> str | None:
    """Return what is wrong with the tables if so many migrations were applied; None if nothing is. Raises SchemaError.

    Tables without a version table are those of other migrations, and a revision that is unknown here is a later one.
    """
    known = ["base", *migrate.revisions()]
    with _own(alias) as connect, connected(connect) as connection:
        there = migrate.current(connection, schema)
        if there is None:
            return None if sa.inspect(connection).has_table("events", schema=schema) else "there are no tables"
    if not set(there) <= set(known):
        return None
    at = max(map(known.index, there), default=0)
    return None if at >= min(applied, len(known) - 1) else f"the tables are at revision {known[at]}"


def models() -> list[CreateModel]:
    """Return the models as Django's migrations know them: of the newest version, for they are unmanaged."""
    return [
        CreateModel(state.name, list(state.fields.items()), state.options, state.bases, state.managers)
        for state in map(ModelState.from_model, apps.get_app_config("outbox").get_models())
    ]
