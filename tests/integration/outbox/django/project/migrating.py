"""What test_migrations.py runs: commands of manage.py, several in one process."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import psycopg
from django.core.management import call_command
from django.db import connection, connections, transaction

from outbox import Event, SchemaError, TargetError
from outbox._app import migrate, schema_drift
from outbox.django import DjangoOutbox, outbox
from outbox.django.apps import check_tables
from outbox.errors import OperationRefused


def command(*words: str, **options: Any) -> str:
    output = io.StringIO()
    call_command(*words, stdout=output, **options)
    return output.getvalue()


def value(statement: str, alias: str = "default") -> Any:
    with connections[alias].cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0]


def applied() -> bool:
    return value("SELECT count(*) FROM django_migrations WHERE app = 'outbox'") == 1


def as_sql_and_from_zero_and_back(url: str) -> None:
    as_sql()
    from_zero_and_back(url)
    back_beside_a_report(url)


def from_zero_and_back(url: str) -> None:
    command("migrate", "outbox")
    assert schema_drift.check(url) == []
    assert value("SHOW search_path") == '"$user", public'
    assert str(migrate.upgrade(url)) == f"nothing to do, the tables are at revision {migrate.revisions()[-1]} already"
    assert "No migrations to apply" in command("migrate", "outbox")
    assert "No changes detected" in command("makemigrations", "--check", "--dry-run")
    with transaction.atomic():
        outbox.add(Event("Order", 1, "OrderPlaced"))
    try:
        command("migrate", "outbox", "zero")
    except SchemaError as error:
        assert "outbox.events still has rows" in str(error)  # noqa: PT017
    else:
        raise AssertionError("the migration has dropped an event")
    assert applied()
    assert value("SELECT count(*) FROM outbox.events") == 1
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM outbox.events")
    command("migrate", "outbox", "zero")
    assert not applied()
    assert value("SELECT to_regclass('outbox.events')") is None
    # The tables are back before Django asks for them, as after another pod's migration.
    migrate.upgrade(url)
    command("migrate", "outbox")
    assert applied()
    # And gone before Django drops them.
    migrate.downgrade(url)
    command("migrate", "outbox", "zero")
    with transaction.atomic():
        command("migrate", "outbox")
        assert value("SHOW search_path") == '"$user", public'
    assert applied()
    assert schema_drift.check(url) == []


def back_beside_a_report(url: str) -> None:
    """The tables are locked until the first try to drop them has failed."""
    migrate._LOCK_TIMEOUT, migrate._FIRST_PAUSE_SECONDS = "50ms", 0.01
    command("migrate", "outbox")
    with psycopg.connect(url) as report:
        report.execute("SELECT count(*) FROM outbox.events")
        said: list[str] = []

        class Ending(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                said.append(record.getMessage())
                report.rollback()

        logging.getLogger("outbox.django").addHandler(Ending())
        command("migrate", "outbox", "zero")
    assert [text.rpartition("(")[2] for text in said] == ["try 1 of 6)"]
    assert value("SELECT to_regclass('outbox.events') IS NULL")


def as_sql() -> None:
    assert migrate.sql(start="base", end="outbox_1") in command("sqlmigrate", "outbox", "0001")
    assert "-- outbox db downgrade base" in command("sqlmigrate", "outbox", "0001", backwards=True)
    assert value("SELECT to_regnamespace('outbox')") is None


def without_tables_and_made_by_others(url: str) -> None:
    """Of the schema ``other``, where the migration is recorded for another one."""
    [warning] = check_tables(["default"])
    assert (warning.id, "Schema 'other' in the database 'default'" in warning.msg) == ("outbox.W001", True)
    migrate.upgrade(url, "other")
    assert check_tables(["default"]) == []
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE other.alembic_version")  # as if the project's own migrations had made them
    assert check_tables(["default"]) == []


def three_outboxes(default: str, events: str) -> None:
    second, third = DjangoOutbox(schema="second"), DjangoOutbox(schema="second", database="events", unique_keys=True)
    command("migrate")
    for url in (default, events):
        migrate.upgrade(url, "second")
    assert schema_drift.check(default) == schema_drift.check(default, "second") == []
    with transaction.atomic(), transaction.atomic(using="events"):
        for number, writer in enumerate((outbox, second, third)):
            writer.check()
            writer.add(Event("Order", number, "OrderPlaced", {"n": number}, idempotency_key="k"), lock_key=True)
            with transaction.atomic(), transaction.atomic(using="events"):
                writer.add(Event("Order", 9, "OrderPlaced"))
                transaction.set_rollback(True)
                transaction.set_rollback(True, using="events")
    ids = "SELECT string_agg(aggregate_id, ',') FROM {}.events"
    assert [value(ids.format(schema)) for schema in ("outbox", "second")] == ["0", "1"]
    assert value(ids.format("second"), "events") == "2"
    from outbox.django.models import WaitingEvent

    assert [event.aggregate_id for event in WaitingEvent.objects.all()] == ["0"]
    try:
        with transaction.atomic():
            third.add(Event("Order", 1, "OrderPlaced"))
    except TargetError as error:
        assert "transaction.atomic(using='events')" in str(error)  # noqa: PT017
    else:
        raise AssertionError("an event was written outside of a transaction")
    # The migrations of the app drop the tables of its own outbox only.
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM outbox.events")
    command("migrate", "outbox", "zero")
    assert value("SELECT to_regclass('outbox.events') IS NULL")
    assert value(ids.format("second")) == "1"


def on_the_chosen_alias(schema: str, owner: str) -> None:
    command("migrate")
    assert value("SELECT count(*) FROM pg_namespace WHERE nspname LIKE '%outbox%'") == 0
    command("migrate", "outbox", database="events")
    with connections["events"].cursor() as cursor:
        cursor.execute("SELECT nspname, nspowner::regrole::text FROM pg_namespace WHERE nspname LIKE '%outbox%'")
        assert cursor.fetchall() == [(schema, owner)]
    from outbox.django.models import Lane, WaitingEvent

    assert Lane.objects.count() == 3
    with transaction.atomic(using="events"):
        event_id = outbox.add(Event("Order", 1, "OrderPlaced", {"n": 1}))
    assert [event.event_id for event in WaitingEvent.objects.filter(aggregate_id="1")] == [event_id]
    try:
        with transaction.atomic():
            outbox.add(Event("Order", 1, "OrderPlaced"))
    except TargetError as error:
        assert "transaction.atomic(using='events')" in str(error)  # noqa: PT017
    else:
        raise AssertionError("an event was written outside of a transaction")


def dumped_and_loaded(folder: str, alias: str) -> None:
    """The project's rows go from one database to the other; the outbox's stay where they are."""
    from django.contrib.auth.models import User

    from outbox.django.models import Lane

    for name in ("default", "events"):
        command("migrate", database=name)
    User.objects.create(username="ann")
    with transaction.atomic(using=alias):
        outbox.add(Event("Order", 1, "OrderPlaced"))
    lanes = list(Lane.objects.values())
    dump = f"{folder}/dump.json"
    for options in ({}, {"use_base_manager": True}, {"use_natural_foreign_keys": True}):
        command("dumpdata", output=dump, **options)
        rows = json.loads(Path(dump).read_text())
        assert {row["model"] for row in rows} == {"auth.user", "auth.permission", "contenttypes.contenttype"}
    for name in ("default", "events"):
        assert json.loads(command("dumpdata", "outbox", "outbox.lane", database=name)) == []
    assert json.loads(command("dumpdata", "outbox.lane", primary_keys="0")) == []
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE outbox.lanes SET epoch = epoch + 1, owner = 'a relay'")
    taken = list(Lane.objects.values())
    assert taken != lanes
    for name in ("default", "events"):
        command("loaddata", dump, database=name)
        assert User.objects.using(name).get().username == "ann"
    assert list(Lane.objects.values()) == taken
    old = Path(folder, "old.json")
    old.write_text(json.dumps([{"model": "outbox.lane", "pk": 0, "fields": {"epoch": 0, "source": "polling"}}]))
    try:
        command("loaddata", str(old), database=alias)
    except OperationRefused as error:
        assert "Lane only reads, and nothing was written" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a lane was loaded")
    assert list(Lane.objects.values()) == taken
    assert value("SELECT count(*) FROM outbox.events", alias) == 1


def step_by_step(folder: str, url: str) -> None:
    """With a later revision than this version's, in ``folder``."""
    migrate.folder = lambda: Path(folder)
    command("migrate", "outbox", "0001")
    assert value("SELECT version_num FROM outbox.alembic_version") == "outbox_1"
    assert "'later'" in command("sqlmigrate", "outbox", "0002")
    command("migrate", "outbox")
    assert value("SELECT version_num FROM outbox.alembic_version") == "outbox_2"
    command("migrate", "outbox", "0001")
    assert value("SELECT version_num FROM outbox.alembic_version") == "outbox_1"
    command("migrate", "outbox", "zero")
    # A later revision stays when Django records the earlier ones.
    migrate.upgrade(url)
    command("migrate", "outbox", "0001")
    assert value("SELECT version_num FROM outbox.alembic_version") == "outbox_2"
    command("migrate", "outbox")
    # Both are recorded.
    assert check_tables(["default"]) == []
    for revision in ("outbox_1", "base"):
        migrate.downgrade(url, revision=revision)
        [warning] = check_tables(["default"])
        assert f"the tables are at revision {revision}; but 0002_later is recorded as applied" in warning.msg
    migrate.upgrade(url)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE outbox.alembic_version SET version_num = 'outbox_3'")
    assert check_tables(["default"]) == []
