"""The app, and Django's system checks of its setting and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.db import connections
from django.db.migrations.recorder import MigrationRecorder

from outbox.django.conf import Options, options, problems
from outbox.errors import ConfigurationError, SchemaError
from outbox.event import DEFAULT_SCHEMA


class OutboxConfig(AppConfig):
    """Its label, by which `migrate` and permissions know it, is ``outbox``."""

    name = "outbox.django"
    label = "outbox"
    verbose_name = "Outbox"

    def ready(self) -> None:
        checks.register(check_settings)
        checks.register(check_tables, checks.Tags.database)


def check_settings(**_: Any) -> list[checks.Error]:
    """Return what is wrong with the setting OUTBOX, and with the database that it names."""
    given = options()
    found = problems()
    try:
        _check_values(given)
    except ConfigurationError as error:
        found.append(f"OUTBOX: {error}")
    errors = [checks.Error(problem, hint="See docs/guides/django.md.", id="outbox.E001") for problem in found]
    if wrong := _database(given.database):
        errors.append(checks.Error(f"OUTBOX['DATABASE'] is {given.database!r}: {wrong}", id="outbox.E002"))
    return errors


def check_tables(databases: Sequence[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """Return a warning if the tables are not where `migrate` is recorded to have put them.

    It has nothing to do then. No error: this would keep `migrate` from what the hint says.
    """
    given = options()
    alias = given.database
    if alias not in (databases or ()) or check_settings():
        return []
    applied = sorted(
        name for app, name in MigrationRecorder(connections[alias]).applied_migrations() if app == "outbox"
    )
    if not applied:
        return []
    from outbox.django.operations import behind

    try:
        problem = behind(alias, given.schema, len(applied))
    except SchemaError as error:
        problem = str(error)
    if problem is None:
        return []
    return [
        checks.Warning(
            f"Schema {given.schema!r} in the database {alias!r}: {problem}; but {applied[-1]} is recorded as applied.",
            hint="OUTBOX named another database or schema then, or the tables were dropped. Run `outbox db upgrade`, "
            f"or `migrate outbox zero --fake --database={alias}`, and then `migrate outbox --database={alias}`.",
            id="outbox.W001",
        )
    ]


def _check_values(given: Options) -> None:
    """Raise ConfigurationError for a schema that no database has, or for too many lanes."""
    if given.schema != DEFAULT_SCHEMA:
        from outbox._app.migrate import check_name

        check_name(given.schema)
    if given.lanes is not None:
        from outbox.tables import lane_expression

        lane_expression(given.lanes)


def _database(alias: str) -> str | None:
    if alias not in connections:
        return f"DATABASES has no such alias; choose from {', '.join(connections)}"
    if connections[alias].vendor != "postgresql":
        return f"the outbox lives in Postgres, and this database is {connections[alias].display_name}"
    from django.db.backends.postgresql.psycopg_any import is_psycopg3

    return None if is_psycopg3 else "the driver must be psycopg 3; run: pip install 'outbox-kafka[django]'"
