"""``outbox db check``: every kind of drift, and what is none."""

from __future__ import annotations

import pytest
from migration_support import rows

from outbox._app import schema_drift as schema_check

# Beside each other in one database.
TOGETHER = {
    "ALTER TABLE outbox.events ENABLE ROW LEVEL SECURITY": "events: row security is not expected: enabled",
    "ALTER TABLE outbox.lanes FORCE ROW LEVEL SECURITY": (
        "lanes: row security is not expected: not enabled forced on the owner"
    ),
    "CREATE TRIGGER skip BEFORE UPDATE ON outbox.lanes FOR ROW EXECUTE FUNCTION tsvector_update_trigger()": (
        "lanes: trigger skip is not expected"
    ),
    "CREATE RULE skip AS ON INSERT TO outbox.events DO INSTEAD NOTHING": "events: rule skip is not expected",
    "ALTER TABLE outbox.events ALTER COLUMN id SET CACHE 100": "events: identity id is",
    'ALTER TABLE outbox.lanes ALTER COLUMN owner TYPE text COLLATE "C"': "lanes: column owner is",
    "ALTER TABLE outbox.events DROP CONSTRAINT events_one_payload": "events: constraint events_one_payload is missing",
    "ALTER TABLE outbox.events DROP CONSTRAINT events_size, ADD CONSTRAINT events_size CHECK (lane >= 0)": (
        "events: constraint events_size is"
    ),
    "ALTER TABLE outbox.events ALTER COLUMN lane DROP EXPRESSION": "events: column lane is",
    "ALTER TABLE outbox.events ALTER COLUMN event_id DROP DEFAULT": "events: column event_id is",
    "ALTER TABLE outbox.events ALTER COLUMN payload SET NOT NULL": "events: column payload is",
    "ALTER TABLE outbox.events ADD COLUMN more int": "events: column more is not expected",
    "CREATE INDEX more ON outbox.events (event_id) WHERE lane = 1": "events: index more is not expected",
    "ALTER TABLE outbox.lanes SET (fillfactor = 70)": "lanes: table is",
    "ALTER TABLE outbox.relays SET UNLOGGED": "relays: table is",
    "DROP TABLE outbox.audit": "audit: the table is missing",
    "COMMENT ON TABLE outbox.events IS NULL": "events: comment is missing",
    "UPDATE outbox.alembic_version SET version_num = 'outbox_0001'": (
        "alembic_version: is at outbox_0001, expected outbox_"
    ),
    "CREATE TABLE outbox.old () INHERITS (outbox.events)": "events: child outbox.old is not expected",
}
ALONE = {
    "DELETE FROM outbox.alembic_version": "alembic_version: is at no revision, expected outbox_",
    "ALTER TABLE outbox.lanes DROP COLUMN lane CASCADE": "lanes: column lane is missing",
    "ALTER TABLE outbox.lanes DROP CONSTRAINT lanes_lane_range, ALTER COLUMN lane TYPE text USING -5 - lane": (
        "lanes: column lane is"
    ),
    "DELETE FROM outbox.lanes WHERE lane = 1": "lanes: has the lanes [0, 2, 3]",
    "DROP SCHEMA outbox CASCADE": "events: the table is missing",
}


@pytest.mark.parametrize("changes", [TOGETHER, *({change: shown} for change, shown in ALONE.items())], ids=len)
def test_check_sees_every_kind_of_drift(outbox_postgres, changes):
    with outbox_postgres.connect() as connection:
        for change in changes:
            connection.execute(change)
    found = schema_check.check(outbox_postgres.url)
    for shown in changes.values():
        assert any(line.startswith(f"outbox.{shown}") for line in found), (shown, found)
    scratch = "SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'outbox_check%'"
    assert rows(outbox_postgres.url, scratch) == [(0,)]


def test_no_version_table_of_ours_is_no_drift(outbox_postgres):
    with outbox_postgres.connect() as connection:
        connection.execute("DROP TABLE outbox.alembic_version")
    assert schema_check.check(outbox_postgres.url) == []


def test_settings_of_autovacuum_are_the_operators(outbox_postgres):
    with outbox_postgres.connect() as connection:
        connection.execute("ALTER TABLE outbox.events SET (autovacuum_vacuum_scale_factor = 0.05)")
        connection.execute("ALTER TABLE outbox.lanes SET (autovacuum_enabled = off)")
    assert schema_check.check(outbox_postgres.url) == []


def test_check_on_the_search_path_of_a_role_called_as_the_schema(outbox_postgres):
    with outbox_postgres.connect() as connection:
        connection.execute("CREATE FUNCTION outbox.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        connection.execute(
            "CREATE TRIGGER f AFTER INSERT ON outbox.events FOR EACH STATEMENT EXECUTE FUNCTION outbox.f()"
        )
    found = schema_check.check(f"{outbox_postgres.url}?options=-csearch_path%3Doutbox")
    assert len(found) == 1
    assert "outbox.f()" in found[0]
