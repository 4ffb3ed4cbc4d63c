"""`manage.py migrate` makes the tables that `outbox db upgrade` makes, and neither minds what the other has done."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import psycopg
import pytest
from django_support import ROOT, Project

from outbox._app import migrate
from outbox.testing.fixtures import token

LATER = """
from alembic import context, op
revision, down_revision = "outbox_2", "outbox_1"
def upgrade():
    op.execute(f'COMMENT ON SCHEMA {context.config.attributes["schema"]} IS $$\\'later\\'$$')
def downgrade():
    op.execute(f'COMMENT ON SCHEMA {context.config.attributes["schema"]} IS NULL')
"""

NEXT = """
from django.db import migrations
from outbox.django.operations import Revision
class Migration(migrations.Migration):
    atomic = False
    dependencies = (("outbox", "0001_outbox"),)
    operations = (Revision("outbox_2"),)
"""


@pytest.fixture
def empty(outbox_postgres_server) -> Iterator[Callable[[], str]]:
    """A function that creates a database without tables."""
    names = []

    def create() -> str:
        names.append(f"django_{token()}")
        return outbox_postgres_server.create_database(names[-1])

    yield create
    for name in names:
        outbox_postgres_server.drop_database(name)


def test_from_zero_twice_and_back_beside_our_own_command_and_a_report(empty):
    """The last step: a table that is locked is waited for as by our own command. The first one writes nothing."""
    project = Project(default=empty())
    project.call("migrating.as_sql_and_from_zero_and_back", project.urls["default"])


def test_only_on_the_chosen_alias_in_its_schema_and_as_its_role(empty):
    schema, role = 'an "outbox" of 100%s', f"owner_{token()}"
    project = Project({"DATABASE": "events", "SCHEMA": schema, "LANES": 3}, default=empty(), events=empty())
    name = psycopg.conninfo.conninfo_to_dict(project.urls["events"])["dbname"]
    with psycopg.connect(project.urls["events"], autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role}")
        connection.execute(f"GRANT CREATE ON DATABASE {name} TO {role}")
        connection.execute(f"GRANT CREATE ON SCHEMA public TO {role}")
        project.databases["events"]["OPTIONS"] = {"assume_role": role}
        project.call("migrating.on_the_chosen_alias", schema, role)
        connection.execute(f"DROP OWNED BY {role} CASCADE")
        connection.execute(f"DROP ROLE {role}")


def test_a_second_outbox_in_another_schema_and_a_third_on_another_alias(empty):
    project = Project(default=empty(), events=empty())
    project.call("migrating.three_outboxes", project.urls["default"], project.urls["events"])


def test_tables_that_are_not_where_migrate_is_recorded_are_named(empty):
    project = Project(default=empty(), events=empty())
    check, quiet = "check --fail-level=WARNING --database=", (0, False)

    def warned(*commands: str) -> list[tuple[int, bool]]:
        return [(status, "outbox.W001" in text) for status, text in project.manage_each(*commands)]

    each = [f"{command}{alias}" for alias in project.urls for command in ("migrate --database=", check)]
    assert warned(f"{check}default", *each) == 5 * [quiet]
    project.outbox = {"DATABASE": "events"}
    # Then as the hint says.
    hinted = ("migrate outbox zero --fake --database=events", "migrate outbox --database=events")
    [(status, said), *_, after] = project.manage_each("migrate --database=events", *hinted, f"{check}events")
    assert status == 0
    assert "Schema 'outbox' in the database 'events': there are no tables; but 0001_outbox is recorded" in said
    assert (after[0], "outbox.W001" in after[1]) == quiet
    project.outbox = {"SCHEMA": "other"}
    project.call("migrating.without_tables_and_made_by_others", project.urls["default"])


@pytest.mark.parametrize("alias", ["default", "events"])
def test_dumpdata_leaves_the_tables_out_and_loaddata_writes_none(empty, tmp_path, alias):
    project = Project({"DATABASE": alias}, default=empty(), events=empty())
    project.call("migrating.dumped_and_loaded", str(tmp_path), alias)


def test_each_revision_is_a_migration(empty, tmp_path):
    shutil.copytree(ROOT / "migrations", tmp_path / "ours", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "ours" / "versions" / "0002_later.py").write_text(LATER)
    app = tmp_path / "later_migrations"
    shutil.copytree(ROOT / "outbox" / "django" / "migrations", app, ignore=shutil.ignore_patterns("__pycache__"))
    (app / "0002_later.py").write_text(NEXT)
    project = Project(default=empty())
    project.path = [str(tmp_path)]
    project.migration_modules = {"outbox": app.name}
    project.call("migrating.step_by_step", str(tmp_path / "ours"), project.urls["default"])


def test_every_revision_of_ours_has_its_migration():
    folders = (ROOT / "migrations" / "versions", ROOT / "outbox" / "django" / "migrations")
    ours, theirs = ({file.name for file in folder.glob("[0-9]*.py")} for folder in folders)
    assert ours == theirs
    texts = "".join(file.read_text() for file in sorted(folders[1].glob("[0-9]*.py")))
    assert all(f'Revision("{revision}")' in texts for revision in migrate.revisions())
