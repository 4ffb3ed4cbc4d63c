"""The outbox's tables in a database: upgrade, downgrade, offline SQL, and the number of lanes.

Alembic does the work, with a version table of its own inside the schema, so a host application's own alembic history
in the same database is not touched. Each change is one transaction under an advisory lock: pods that start at the
same moment upgrade once.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

import outbox
from outbox.errors import ConfigurationError, SchemaError
from outbox.tables import DEFAULT_LANES, MAX_LANES, lane_expression
from outbox.urls import display_url, sqlalchemy_url

_LOCK: Final = 0x6F7574626F780001
"""Advisory lock of everything that changes the schema."""


@dataclass(frozen=True, slots=True)
class History:
    """One line of migrations: where its files are and where its tables go by default."""

    folder: str
    schema: str
    guarded: tuple[str, ...]
    """Tables that must be empty before a downgrade may drop them."""


OUTBOX: Final = History("versions", "outbox", ("events",))
CONSUMER: Final = History("consumer", "consumer", ("offsets",))


def upgrade(url: str, schema: str = "outbox", lanes: int | None = None) -> None:
    """Bring the outbox's tables to this version. Does nothing when they are.

    lanes counts at the first upgrade only (4 if not given). Raises ConfigurationError when it differs from what is
    there, SchemaError when the database refuses.
    """
    if lanes is not None and not 1 <= lanes <= MAX_LANES:
        raise ConfigurationError(f"lanes must be 1 to {MAX_LANES}, not {lanes}")
    with _transaction(url) as connection:
        _run(OUTBOX, connection, schema, "upgrade", "head", lanes or DEFAULT_LANES)
        there = connection.execute(sa.select(sa.func.count()).select_from(_lanes(schema))).scalar_one()
        if lanes is not None and there != lanes:
            raise ConfigurationError(f"this outbox has {there} lanes; `outbox db lanes {lanes}` changes that")


def upgrade_consumer(url: str, schema: str = "consumer") -> None:
    """Bring the consumers' tables to this version; they may live in another database than the outbox's."""
    with _transaction(url) as connection:
        _run(CONSUMER, connection, schema, "upgrade", "head")


def downgrade(
    url: str, schema: str | None = None, revision: str = "base", *, history: History = OUTBOX, drop_rows: bool = False
) -> None:
    """Go back to a revision. Raises SchemaError when rows would be lost and ``drop_rows`` is not given."""
    schema = schema or history.schema
    with _transaction(url) as connection:
        for name in history.guarded if not drop_rows else ():
            table = sa.table(name, schema=schema)
            if (
                sa.inspect(connection).has_table(name, schema=schema)
                and connection.execute(sa.select(sa.exists().select_from(table))).scalar_one()
            ):
                raise SchemaError(
                    f"{schema}.{name} still has rows, which a downgrade would drop; let them drain, or say --drop-rows"
                )
        _run(history, connection, schema, "downgrade", revision)


def sql(
    schema: str | None = None,
    lanes: int = DEFAULT_LANES,
    start: str | None = None,
    end: str = "head",
    *,
    history: History = OUTBOX,
) -> str:
    """Give the SQL of an upgrade, for Flyway or psql: the same text for the same version and arguments."""
    schema = schema or history.schema
    output = io.StringIO()
    config = _config(history, schema, lanes, create_schema=start is None)
    config.attributes["output"] = output
    command.upgrade(config, f"{start}:{end}" if start else end, sql=True)
    return output.getvalue()


def revisions(history: History = OUTBOX) -> list[str]:
    """Give the revisions, the oldest first."""
    script = ScriptDirectory.from_config(_config(history, history.schema, DEFAULT_LANES, create_schema=False))
    return [revision.revision for revision in script.walk_revisions()][::-1]


def change_lanes(url: str, lanes: int, schema: str = "outbox") -> None:
    """Give the outbox another number of lanes. It must be drained, and no relay may hold a lane.

    Raises SchemaError when it is not drained, when a lease is alive, or when writers keep the table locked.
    """
    expression = lane_expression(lanes)
    events = sa.table("events", schema=schema)
    table = _lanes(schema)
    with _transaction(url) as connection:
        connection.execute(sa.text("SET LOCAL lock_timeout = '5s'"))
        try:
            name = connection.dialect.identifier_preparer.format_table(events)
            connection.execute(_ddl("LOCK TABLE %(name)s IN ACCESS EXCLUSIVE MODE", name=name))
        except sa.exc.OperationalError as error:
            raise SchemaError("the events are in use by long transactions; try again when those have ended") from error
        left = connection.execute(sa.select(sa.func.count()).select_from(events)).scalar_one()
        if left:
            raise SchemaError(f"{left} events are not published yet; stop the writers and let the outbox drain first")
        held = connection.execute(
            sa.select(sa.func.count()).select_from(table).where(table.c.lease_until >= sa.func.clock_timestamp())
        ).scalar_one()
        if held:
            raise SchemaError(f"relays hold {held} lanes; stop them first")
        # Dropping and adding works on every version of Postgres; the table is empty, so nothing is rewritten.
        change = Operations(MigrationContext.configure(connection))
        change.drop_column("events", "lane", schema=schema)
        change.add_column(
            "events",
            sa.Column("lane", sa.SmallInteger, sa.Computed(expression, persisted=True), nullable=False),
            schema=schema,
        )
        change.create_primary_key("events_pkey", "events", ["lane", "id"], schema=schema)
        # An epoch never goes down: a relay that sleeps through all this must not find its old one again.
        highest = connection.execute(sa.select(sa.func.coalesce(sa.func.max(table.c.epoch), 0))).scalar_one()
        connection.execute(sa.delete(table))
        connection.execute(sa.insert(table), [{"lane": lane, "epoch": highest + 1} for lane in range(lanes)])


def folder() -> Path:
    """Where the migrations are: inside the library in an installed wheel, at the root in a checkout."""
    package = Path(outbox.__file__).parent
    for place in (package / "migrations", package.parent / "migrations"):
        if (place / "env.py").is_file():
            return place
    raise SchemaError(f"no migrations beside {package}: the installation is incomplete, install the package again")


def _run(
    history: History,
    connection: sa.Connection,
    schema: str,
    direction: str,
    revision: str,
    lanes: int = DEFAULT_LANES,
) -> None:
    there = sa.inspect(connection).has_schema(schema)
    config = _config(history, schema, lanes, create_schema=not there)
    config.attributes["connection"] = connection
    getattr(command, direction)(config, revision)


def _config(history: History, schema: str, lanes: int, *, create_schema: bool) -> Config:
    place = folder()
    config = Config()
    config.set_main_option("script_location", str(place).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", str(place / history.folder).replace("%", "%%"))
    config.attributes.update(schema=schema, lanes=lanes, create_schema=create_schema)
    return config


@contextmanager
def _transaction(url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(sqlalchemy_url(url), poolclass=sa.pool.NullPool)
    try:
        with engine.begin() as connection:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            yield connection
    except sa.exc.DBAPIError as error:
        first_line = str(error.orig).strip().partition("\n")[0]
        raise SchemaError(f"{display_url(url)}: {first_line}") from error
    finally:
        engine.dispose()


def _ddl(text: str, **names: str) -> sa.DDL:
    """A statement with names put in; they must be quoted already."""
    return sa.DDL(text, context=names)  # type: ignore[no-untyped-call]


def _lanes(schema: str) -> Any:
    return sa.table("lanes", sa.column("lane"), sa.column("epoch"), sa.column("lease_until"), schema=schema)
