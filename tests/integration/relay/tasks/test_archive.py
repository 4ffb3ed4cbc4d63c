"""The archive's upkeep on real Postgres: partitions made ahead and dropped, once among all, and never in the way."""

from __future__ import annotations

import datetime as dt
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
import pytest
from psycopg import sql
from rows_and_roles import login_role
from structlog.testing import capture_logs
from support import stop_clock, wait_until, with_path_of_role
from threads import in_background
from typer.testing import CliRunner

from outbox._app import schema_drift as schema_check
from outbox._app.settings import RelaySettings
from outbox.consumer.retention import _LOCK as IDS_LOCK
from relay.audit.ledger import turn_on
from relay.cli.app import app
from relay.database import LOCK_PART, Connector
from relay.tasks.archive import _LIMIT, _TRY_LOCK, Retention

EVENT = (
    "INSERT INTO outbox.published (lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at, "
    "published_at) SELECT 0, g, gen_random_uuid(), 'Order', 'a', 'T', now(), %s FROM generate_series(1, %s) g"
)
# Notes whether who deletes rows outside of any partition keeps relays from archiving.
NOTE_LOCKS = """
CREATE TABLE public.locks (mode text);
CREATE FUNCTION public.note_locks() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO public.locks SELECT mode FROM pg_locks
     WHERE relation = 'outbox.published'::regclass AND pid = pg_backend_pid();
    RETURN NULL;
END $$;
CREATE TRIGGER note_locks AFTER DELETE ON outbox.published_default EXECUTE FUNCTION public.note_locks()"""
# Takes longer than any limit there is.
SLOW = """
CREATE SEQUENCE public.tries;
CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM nextval('public.tries');
    PERFORM pg_sleep(600) WHERE current_setting('statement_timeout') <> '0';
    RETURN old;
END $$"""


__all__ = ["with_path_of_role"]

pytestmark = pytest.mark.usefixtures("with_path_of_role")


class Archive:
    """The archive of one database, seen by its owner. For those who keep it, the day does not end."""

    def __init__(self, database: Any) -> None:
        self.url = database.url
        self.admin = database.connect(autocommit=True)
        self.today, self._clock = stop_clock(self.url)
        self.noon = midnight(self.today) + dt.timedelta(hours=12)

    def rows(self, query: str, *values: Any) -> list[Any]:
        return self.admin.execute(query, values).fetchall()

    def day(self, days: int) -> dt.date:
        return self.today + dt.timedelta(days=days)

    def fill(self, days: int, count: int = 1) -> None:
        """Publish events ``days`` from today, at the day's first moment."""
        self.admin.execute(EVENT, (midnight(self.day(days)), count))

    def partition(self, start: dt.date, end: dt.date) -> str:
        name = f"published_{start:%Y_%m_%d}"
        self.admin.execute(
            sql.SQL("CREATE TABLE {} PARTITION OF outbox.published FOR VALUES FROM ({}) TO ({})").format(
                sql.Identifier("outbox", name), sql.Literal(midnight(start)), sql.Literal(midnight(end))
            )
        )
        return name

    def partitions(self) -> dict[str, int]:
        """Rows of each partition."""
        return dict(
            self.rows(
                "SELECT c.relname, (SELECT count(*) FROM outbox.published p WHERE p.tableoid = c.oid) "
                "FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
                "WHERE i.inhparent = 'outbox.published'::regclass ORDER BY 1"
            )
        )

    def address(self, options: str = "", **more: str) -> str:
        """The URL for those who keep it."""
        parameters = {"options": f"{self._clock} {options}".strip()} | more
        return f"{self.url}?{urlencode(parameters, quote_via=quote)}"

    def retention(self, days: int = 7, **options: str) -> Retention:
        return Retention(Connector(self.address(**options), "test"), "outbox", days)


@pytest.fixture
def archive(outbox_postgres):
    return Archive(outbox_postgres)


def midnight(day: dt.date) -> dt.datetime:
    return dt.datetime(day.year, day.month, day.day, tzinfo=dt.UTC)


def named(day: dt.date) -> str:
    return f"published_{day:%Y_%m_%d}"


def prune(archive: Archive, *arguments: str, status: int = 0, **environment: str) -> str:
    environment = {"OUTBOX_DATABASE_URL": archive.address()} | environment
    done = CliRunner().invoke(app, ["db", "prune", *arguments], env=environment)
    assert done.exit_code == status, (done.output, done.exception)
    return done.stdout if status == 0 else done.stderr


def test_the_coming_days_have_partitions_and_rows_that_came_too_early_are_moved_into_them(archive):
    archive.fill(0, 3)
    archive.fill(1, 2)
    archive.fill(-1)
    archive.retention().keep()
    expected = {named(archive.day(days)): 0 for days in range(4)}
    assert archive.partitions() == expected | {
        named(archive.day(0)): 3,
        named(archive.day(1)): 2,
        "published_default": 1,
    }
    archive.fill(2)
    assert archive.partitions()[named(archive.day(2))] == 1
    assert schema_check.check(archive.url) == []
    with capture_logs() as logs:
        archive.retention().keep()
    assert logs == []


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "America/Los_Angeles"])
def test_old_partitions_and_old_rows_outside_of_any_are_dropped_whatever_the_sessions_time_zone(archive, zone):
    for days in (-9, -8, -7, -1):
        archive.partition(archive.day(days), archive.day(days + 1))
        archive.fill(days)
    archive.fill(-10, 2)
    archive.fill(-5)
    archive.retention(options=f"-c timezone={zone}").keep()
    kept = {named(archive.day(days)): 1 for days in (-7, -1)} | {named(archive.day(days)): 0 for days in range(4)}
    assert archive.partitions() == kept | {"published_default": 1}


def test_relays_archive_while_many_old_rows_outside_of_any_partition_are_deleted(archive):
    archive.retention().keep()
    archive.partition(archive.day(-9), archive.day(-8))
    archive.fill(-10, 2)
    archive.admin.execute(NOTE_LOCKS)
    archive.retention().keep()
    assert archive.partitions() == {named(archive.day(days)): 0 for days in range(4)} | {"published_default": 0}
    assert archive.rows("SELECT mode FROM public.locks WHERE mode = 'AccessExclusiveLock'") == []


def test_old_rows_stay_deleted_though_a_partition_cannot_be_dropped(archive):
    """A dump reads the archive for hours; deleting the rows again each minute would be in vain."""
    archive.retention().keep()
    old = archive.partition(archive.day(-9), archive.day(-8))
    archive.fill(-10, 2)
    with psycopg.connect(archive.url) as dump:
        dump.execute("LOCK TABLE outbox.published IN ACCESS SHARE MODE")
        with capture_logs() as logs:
            archive.retention().keep()
        assert "lock timeout" in next(line["error"] for line in logs if "error" in line)
        assert (archive.partitions()["published_default"], old in archive.partitions()) == (0, True)
    archive.retention().keep()
    assert old not in archive.partitions()


def test_a_partition_that_a_person_made_stays_while_any_of_its_days_is_kept(archive):
    """A month's partition, as pg_partman would make it: none is made for its days, and it goes as a whole."""
    past = archive.partition(archive.day(-40), archive.day(-10))
    month = archive.partition(archive.day(-10), archive.day(2))
    archive.admin.execute("CREATE TABLE outbox.mine (LIKE outbox.published)")
    archive.admin.execute(
        sql.SQL("ALTER TABLE outbox.published ATTACH PARTITION outbox.mine FOR VALUES FROM (MINVALUE) TO ({})").format(
            sql.Literal(midnight(archive.day(-50)))
        )
    )
    archive.fill(-9)
    plan = archive.retention().prune(dry_run=False, force=True)
    assert sorted(plan.drop) == sorted(["mine", past])
    assert plan.create == [archive.day(2), archive.day(3)]
    assert archive.partitions()[month] == 1


def test_a_dry_run_says_what_would_be_done_and_changes_nothing(archive):
    old = archive.partition(archive.day(-9), archive.day(-8))
    archive.fill(-10, 2)
    archive.fill(0)
    before = archive.partitions()
    plan = json.loads(prune(archive, "--dry-run", "--days", "7", "--json"))
    assert plan == {
        "dry_run": True,
        "oldest_kept": str(archive.day(-7)),
        "created": [str(archive.day(days)) for days in range(4)],
        "dropped": [old],
        "stray_rows": 2,
        "overdue_days": 2,
    }
    text = prune(archive, "--dry-run", "--days", "7")
    assert f"partition {old}: would be dropped" in text
    assert f"partition for {archive.today}: would be created" in text
    assert archive.partitions() == before
    done = json.loads(prune(archive, "--json", OUTBOX_RELAY__ARCHIVE_DAYS="7"))
    assert done == plan | {"dry_run": False}
    assert "nothing to do" in prune(archive, "--days", "7")


def test_prune_wants_to_know_how_many_days_and_zero_keeps_today(archive):
    assert "no number of days to keep" in prune(archive, status=2)
    archive.fill(0)
    archive.fill(-1)
    prune(archive, "--days", "0")
    assert sum(archive.partitions().values()) == 1


def jump(archive: Archive, days: int) -> None:
    """Set the clock that upkeep sees."""
    for function in ("now", "clock_timestamp"):
        archive.admin.execute(
            sql.SQL("CREATE OR REPLACE FUNCTION stopped.{}() RETURNS timestamptz LANGUAGE sql STABLE RETURN {}").format(
                sql.Identifier(function), sql.Literal(archive.noon + dt.timedelta(days=days))
            )
        )


@pytest.mark.parametrize("days", [5, 365 * 70])
def test_a_clock_that_jumps_ahead_drops_nothing(archive, days):
    """Also where events were published at the wrong time already, and upkeep runs again and again."""
    for day in range(-7, 1):
        archive.partition(archive.day(day), archive.day(day + 1))
        archive.fill(day, 10)
    archive.retention().keep()
    jump(archive, days)
    archive.fill(days)
    retention = archive.retention()
    with capture_logs() as logs:
        for _ in range(3):
            retention.keep()
    refused = [line for line in logs if line["log_level"] == "error"]
    # Once a day by the relay's own clock, and midnight may come in between.
    assert len(refused) in {1, 2}
    assert f"should have been dropped {days - 1:,} days ago" in refused[0]["error"]
    assert "outbox db prune --force" in refused[0]["error"]
    assert sum(archive.partitions().values()) == 81
    assert archive.partitions()[named(archive.day(days))] == 1
    # The clock is right again: nothing was lost, and upkeep goes on.
    jump(archive, 1)
    with capture_logs() as logs:
        archive.retention().keep()
    assert [line["dropped"] for line in logs] == [[named(archive.day(-7))]]


@pytest.mark.parametrize("archived", [True, False])
def test_a_clock_that_jumps_ahead_leaves_the_ledger_as_it_is(archive, archived):
    """With at-most-once there is no archive."""
    turn_on(archive.admin, "outbox", None)
    settings = {"OUTBOX_RELAY__ARCHIVE_DAYS": "7"} if archived else {}
    archive.admin.execute("UPDATE outbox.ledger_state SET since = %s", (midnight(archive.day(-8)),))
    for day in range(-8, 1):
        if archived:
            archive.partition(archive.day(day), archive.day(day + 1))
        archive.admin.execute(
            "INSERT INTO outbox.ledger SELECT 'Order', extract(epoch FROM at) / 60, 1, 1, at FROM (SELECT %s) AS r(at)",
            (midnight(archive.day(day)),),
        )
    state = "SELECT since, (SELECT sum(events) FROM outbox.ledger) FROM outbox.ledger_state"
    prune(archive, **settings)
    assert archive.rows(state) == [(archive.noon - dt.timedelta(days=7), 7)]
    jump(archive, 365 * 70)
    assert "--force" in prune(archive, status=1, **settings)
    assert archive.rows(state) == [(archive.noon - dt.timedelta(days=7), 7)]
    prune(archive, "--force", **settings)
    assert archive.rows(state) == [(archive.noon + dt.timedelta(days=365 * 70 - 7), None)]


def test_rows_outside_of_any_partition_are_held_back_too(archive):
    archive.fill(-1, 10)
    jump(archive, 100)
    with capture_logs() as logs:
        archive.retention().keep()
    assert "0 partitions and 10 rows outside of any" in next(line["error"] for line in logs if "error" in line)
    assert archive.partitions()["published_default"] == 10


def test_relays_that_rested_over_a_weekend_catch_up_by_themselves(archive):
    for day in range(-7, 0):
        archive.partition(archive.day(day), archive.day(day + 1))
        archive.fill(day)
    archive.retention().keep()
    jump(archive, 4)
    with capture_logs() as logs:
        archive.retention().keep()
    assert [line["dropped"] for line in logs] == [[named(archive.day(day)) for day in range(-7, -3)]]


def test_a_person_can_have_it_dropped_all_the_same(archive):
    """Fewer days are kept than before: that is what the person wants."""
    for day in range(-30, 1):
        archive.partition(archive.day(day), archive.day(day + 1))
        archive.fill(day)
    shown = prune(archive, "--dry-run", "--days", "7")
    assert "the first of these should have been dropped 22 days ago: nothing is dropped without --force" in shown
    line = prune(archive, "--days", "7", status=1)
    assert "23 partitions and 0 rows outside of any are from before" in line
    assert line.count("\n") == 1
    assert sum(archive.partitions().values()) == 31
    # Those of the coming days are made all the same.
    assert named(archive.day(3)) in archive.partitions()
    prune(archive, "--days", "7", "--force")
    assert sum(archive.partitions().values()) == 8


def test_many_relays_keep_the_archive_once(archive):
    archive.fill(0, 100)
    archive.fill(-10, 100)
    barrier = threading.Barrier(6)

    def keep(_: int) -> None:
        retention = archive.retention()
        barrier.wait(60)
        retention.keep()

    with capture_logs() as logs, ThreadPoolExecutor(6) as pool:
        assert [*pool.map(keep, range(6))] == [None] * 6
    # Another relay may come between two steps.
    assert [line["event"] for line in logs if "created" in line] == ["archive kept"]
    assert sum(line.get("rows", 0) for line in logs) == 100
    assert archive.partitions()[named(archive.today)] == 100
    assert sum(archive.partitions().values()) == 100


def test_the_upkeep_of_the_consumers_ids_in_the_same_database_does_not_hold_it_up(archive):
    with psycopg.connect(archive.url) as upkeep, capture_logs() as logs:
        upkeep.execute(IDS_LOCK, ("outbox",))
        archive.retention().keep()
    assert [line["event"] for line in logs] == ["archive kept"]


def test_the_first_partition_is_made_while_relays_publish(archive):
    """Rows for today come in all the time: they may be moved late, never lost, and nobody fails."""
    written: list[int] = []

    def publish(stop: threading.Event) -> None:
        count = 0
        with psycopg.connect(archive.url, autocommit=True) as connection:
            while not stop.is_set():
                connection.execute(EVENT, (archive.noon, 5))
                count += 5
        written.append(count)

    archive.partition(archive.day(-9), archive.day(-8))
    with in_background(publish), in_background(publish), in_background(publish):
        wait_until(lambda: sum(archive.partitions().values()) > 100, what="some rows")
        with capture_logs() as logs:
            archive.retention().keep()
    assert [line["event"] for line in logs] == ["archive kept"]
    assert "published_default" in archive.partitions()
    assert archive.partitions()["published_default"] == 0
    assert archive.partitions()[named(archive.today)] == sum(written)


def test_upkeep_that_can_not_be_done_is_said_once_a_day_and_is_no_error(archive):
    archive.admin.execute(sql.SQL("CREATE TABLE {} ()").format(sql.Identifier("outbox", named(archive.today))))
    archive.fill(0)
    retention = archive.retention()
    days = {dt.datetime.now(dt.UTC).date()}
    with capture_logs() as logs:
        retention.keep()
        retention.keep()
    # By the relay's own clock, which goes on.
    days.add(dt.datetime.now(dt.UTC).date())
    assert len(logs) <= len(days)
    assert {line["log_level"] for line in logs} == {"warning"}
    assert "already exists" in logs[0]["error"]
    assert archive.partitions() == {"published_default": 1}


def test_relays_do_not_wait_long_for_a_default_partition_that_takes_long_to_read(archive):
    """Each day by itself: what was done stays done. An operator has as much time as it takes."""
    archive.fill(0)
    archive.fill(1)
    archive.admin.execute(SLOW)
    archive.admin.execute(
        sql.SQL(
            "CREATE TRIGGER slow BEFORE DELETE ON outbox.published_default FOR EACH ROW "
            "WHEN (old.published_at >= {}) EXECUTE FUNCTION public.slow()"
        ).format(sql.Literal(midnight(archive.day(1))))
    )
    retention = archive.retention()
    with capture_logs() as logs:
        retention.keep()
        retention.keep()
    assert "statement timeout" in next(line["error"] for line in logs if "error" in line)
    assert archive.partitions() == {named(archive.today): 1, "published_default": 1}
    assert archive.rows("SELECT last_value FROM public.tries") == [(1,)]
    prune(archive, "--days", "7")
    assert archive.partitions() == {named(archive.day(days)): days < 2 for days in range(4)} | {"published_default": 0}


def test_a_view_of_an_old_day_keeps_only_that_day(archive):
    """Also a day that should have been dropped long ago; and not the ledger either."""
    viewed, _ = (archive.partition(archive.day(days), archive.day(days + 1)) for days in (-20, -9))
    archive.admin.execute(sql.SQL("CREATE VIEW public.of_a_day AS TABLE {}").format(sql.Identifier("outbox", viewed)))
    turn_on(archive.admin, "outbox", None)
    archive.admin.execute("INSERT INTO outbox.ledger VALUES ('Order', 0, 1, 1, %s)", (midnight(archive.day(-8)),))
    with capture_logs() as logs:
        archive.retention().keep()
    assert [viewed in line["error"] for line in logs if "error" in line] == [True]
    assert "drop what depends on it" in logs[0]["event"]
    coming = {named(archive.day(days)) for days in range(4)}
    assert archive.partitions().keys() == {viewed, "published_default"} | coming
    refused = prune(archive, "--days", "7", status=1)
    assert refused.endswith("drop what depends on it\n")
    assert archive.rows("SELECT FROM outbox.ledger") == []
    archive.admin.execute("DROP VIEW public.of_a_day")
    prune(archive, "--days", "7", "--force")
    assert archive.partitions().keys() == {"published_default"} | coming


def test_upkeep_gives_up_before_a_relay_that_archives(archive):
    """A relay waits behind the DROP that waits for a dump, and while rows are moved and a partition is attached."""
    with psycopg.connect(archive.address()) as connection, archive.retention()._step(connection, _TRY_LOCK):
        connection.execute(_LIMIT)
        query = "SELECT setting::int / 1000.0 FROM pg_settings WHERE name IN ('lock_timeout', 'statement_timeout')"
        [(lock,), (statement,)] = connection.execute(query + " ORDER BY name").fetchall()
    assert 0 < lock < statement
    assert lock + 2 * statement < RelaySettings().lease_seconds * LOCK_PART


def test_without_the_owners_rights_it_says_so_only_when_something_is_due(archive):
    with login_role(archive.admin, "keeper") as role:
        archive.admin.execute(f"GRANT USAGE ON SCHEMA outbox TO {role}; GRANT INSERT ON outbox.published TO {role}")
        with capture_logs() as logs:
            archive.retention(user=role).keep()
        assert "permission denied" in logs[0]["error"]
        assert "outbox db prune" in logs[0]["event"]
        prune(archive, "--days", "7")
        with capture_logs() as logs:
            archive.retention(user=role).keep()
        assert logs == []
        archive.partition(archive.day(-9), archive.day(-8))
        refused = prune(archive, "--days", "7", "--database-url", archive.address(user=role), status=1)
        assert refused.startswith("outbox: Postgres, keeping the archive: must be owner of table")
        assert refused.count("\n") == 1


def test_a_relay_that_waits_for_the_upkeep_finds_the_new_partition(archive):
    """Postgres refuses a row for the default partition if the right one was attached while it waited."""

    def publish() -> None:
        with psycopg.connect(archive.url, autocommit=True, application_name="late") as connection:
            connection.execute(EVENT, (archive.noon, 1))

    with ThreadPoolExecutor(1) as pool, psycopg.connect(archive.address()) as upkeep:
        retention = archive.retention()
        retention._create(upkeep, archive.today, limited=True)
        late = pool.submit(publish)
        waiting = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'late' AND wait_event_type = 'Lock'"
        wait_until(lambda: archive.rows(waiting), what="the relay waits")
    late.result()
    assert archive.partitions()[named(archive.today)] == 1
