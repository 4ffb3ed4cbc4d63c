"""A host application's own alembic takes our history in as a branch. As its own tables: test_autogenerate.py."""

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
from sqlalchemy import NullPool, create_engine
# The tests' user is called outbox, which would make that its default schema.
options = {"options": "-c search_path=public"}
engine = create_engine(context.config.get_main_option("url"), poolclass=NullPool, connect_args=options)
with engine.connect() as connection:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
"""


def test_a_host_application_can_include_our_history_as_a_branch(empty, tmp_path):
    """The opt-in of docs/operations/migrations.md: version_locations with the branch label ``outbox``."""
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(ENVIRONMENT)
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
