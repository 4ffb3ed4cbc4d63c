"""A host application's own alembic takes the tables in, as its own or as a branch."""

from __future__ import annotations

import re

import psycopg
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from migration_support import empty

from outbox import outbox_tables
from outbox._app import migrate as db
from outbox._app import schema_drift as schema_check
from outbox._app.schema_connection import connected
from outbox.errors import SchemaError

__all__ = ["empty"]

ENVIRONMENT = """
from alembic import context
from sqlalchemy import MetaData, NullPool, create_engine
from outbox import outbox_tables
metadata = MetaData()
outbox_tables(metadata)
# The tests' user is called outbox, which would make that its default schema.
options = {"options": "-c search_path=public"}
engine = create_engine(context.config.get_main_option("url"), poolclass=NullPool, connect_args=options)
with engine.connect() as connection:
    context.configure(
        connection=connection, target_metadata=metadata, include_schemas=True,
        include_name=lambda name, kind, parents: kind != "schema" or name == "outbox")
    with context.begin_transaction():
        context.run_migrations()
"""
TEMPLATE = """
from alembic import op
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
revision, down_revision = ${repr(up_revision)}, ${repr(down_revision)}
def upgrade():
    op.execute("CREATE SCHEMA IF NOT EXISTS outbox")
    ${upgrades}
def downgrade():
    ${downgrades}
"""


def test_a_host_application_takes_the_tables_into_its_own_history(empty, tmp_path):
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    (tmp_path / "script.py.mako").write_text(TEMPLATE)
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    config.set_main_option("path_separator", "os")
    config.set_main_option("url", empty.replace("postgresql://", "postgresql+psycopg://"))
    command.revision(config, "outbox", autogenerate=True)
    command.upgrade(config, "head")
    with psycopg.connect(empty) as connection:
        connection.execute("INSERT INTO outbox.lanes (lane) SELECT generate_series(0, 3)")
        connection.execute("ALTER TABLE outbox.published ATTACH PARTITION outbox.published_default DEFAULT")
    assert schema_check.check(empty) == []
    command.check(config)


def test_a_host_application_can_include_our_history_as_a_branch(empty, tmp_path):
    """The opt-in of docs/operations/migrations.md: version_locations with the branch label ``outbox``."""
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    (tmp_path / "script.py.mako").write_text(TEMPLATE)
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", f"{tmp_path / 'versions'}\n{db.folder() / 'versions'}")
    config.set_main_option("url", empty.replace("postgresql://", "postgresql+psycopg://"))
    command.upgrade(config, "outbox@head")
    assert schema_check.check(empty) == []


def test_the_version_table_of_a_host_application_is_not_taken_for_the_outboxs(empty):
    """Both in one schema, as with OUTBOX_SCHEMA=public."""
    said = r"public.alembic_version is not the outbox's: it is at '1975ea83b712'.*OUTBOX_SCHEMA"
    with psycopg.connect(empty) as connection:
        connection.execute("CREATE TABLE public.alembic_version AS SELECT '1975ea83b712'::varchar AS version_num")
    for change in (db.upgrade, db.upgrade_consumer, db.downgrade):
        with pytest.raises(SchemaError, match=said):
            change(empty, "public")
    assert re.match(said, schema_check.check(empty, "public")[-1])
    metadata = sa.MetaData()
    tables = outbox_tables(metadata, schema="public")
    with connected(empty) as connection, connection.begin():
        metadata.create_all(connection)
        connection.execute(sa.insert(tables.lanes), [{"lane": number} for number in range(4)])
    # Made by the host's own history: nothing is wrong.
    assert schema_check.check(empty, "public") == []
    with psycopg.connect(empty) as connection:
        connection.execute("UPDATE public.alembic_version SET version_num = 'outbox_0001'")
    with pytest.raises(SchemaError, match="is at revision 'outbox_0001', which this version does not have"):
        db.upgrade(empty, "public")
    assert "is at outbox_0001, expected outbox_" in schema_check.check(empty, "public")[-1]
