"""Everything that may happen to slot, publication and table: the relay says what to do, publishes nothing wrong, and
when that is done everything arrives once, in order. Judged by a read_committed reader and the business rows.
"""

from __future__ import annotations

import contextlib

import orjson
import psycopg
import pytest
from psycopg import sql
from support import Load, backlog, caught_up, check, ends, wait_until
from wal_support import cdc, run_outbox, set_up, streaming, to_wal

from outbox.errors import OperationRefused
from outbox.testing.fixtures import migrate, token

REPAIR = "run `outbox cdc setup --repair --reason"


class Stage:
    """An outbox under load, and its relay."""

    def __init__(self, url, start, settings):
        self.url = url
        self.slot = settings["wal__slot"]
        self._start = start
        self._settings = settings
        self.admin = psycopg.connect(url, autocommit=True)
        self.relay = None
        self._read = 0

    def start(self):
        self.relay = self._start(**self._settings)
        self._read = 0

    def stop(self):
        self.relay.terminate()
        assert self.relay.wait() == 0

    def says(self, *texts):
        """Wait for a new line of the log with these texts; give it. The relay goes on running."""

        def line():
            assert self.relay.running
            for found in self.relay.log()[self._read :].splitlines():
                if found.startswith("{"):
                    said = orjson.loads(found)
                    if said["level"] in {"warning", "error"} and all(text in said.get("error", "") for text in texts):
                        return said
            return None

        return wait_until(line, 30, f"the relay to say {texts}")

    def repair(self):
        """Do what it says."""

        def repaired():
            try:
                with cdc(self.url, self._settings) as commands:
                    commands.repair("somebody changed it")
            except OperationRefused as error:
                # By a relay that has just begun a session, and will find out why not to.
                if "is being read" not in str(error):
                    raise
                return False
            return True

        wait_until(repaired, 20, "the slot to be free")
        self.is_streaming()

    @contextlib.contextmanager
    def healed(self, fault):
        """Wait until the relay has healed what is done to the slot in this block."""
        healed = "SELECT why FROM outbox.audit WHERE what = 'cdc repair' AND why LIKE 'the relay %%' ORDER BY id"
        before = self.admin.execute(healed).fetchall()
        yield
        wait_until(lambda: len(self.admin.execute(healed).fetchall()) > len(before), 60, "the slot to be healed")
        assert fault in self.admin.execute(healed).fetchall()[-1][0]
        self.is_streaming()

    def is_streaming(self):
        wait_until(lambda: streaming(self.url), 30, "the lanes to stream")
        self._read = len(self.relay.log())

    def drop_slot(self):
        """Take it away from whoever reads it."""

        def dropped():
            self.admin.execute(
                "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots "
                "WHERE slot_name = %s AND active_pid IS NOT NULL",
                [self.slot],
            )
            with contextlib.suppress(psycopg.errors.ObjectInUse):
                self.admin.execute("SELECT pg_drop_replication_slot(%s)", [self.slot])
                return True

        wait_until(dropped, 20, "the slot to be dropped")

    def problem(self):
        with cdc(self.url, self._settings) as commands:
            return commands.status().problem


@pytest.fixture
def stage(outbox_postgres, outbox_relay, wal):
    settings = wal | {"delivery": "exactly-once", "log_format": "json", "relay__max_backoff_seconds": 0.5}
    # Longer than this machine ever takes: lanes that are lost would say other things.
    settings["relay__lease_seconds"] = 10
    to_wal(outbox_postgres.url, settings)
    stage = Stage(outbox_postgres.url, outbox_relay, settings)
    stage.start()
    stage.is_streaming()
    yield stage
    stage.admin.close()


def test_what_happens_to_slots(stage, outbox_kafka, order):
    """The relay replaces the slot by itself: every event is a row of the table."""
    kind, topic = order
    with Load(stage.url, kind) as load:
        load.more(30)
        # Moved past what was read.
        stage.stop()
        load.more(20)
        stage.admin.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [stage.slot])
        load.more(20)
        with stage.healed("it was advanced or created again"):
            stage.start()
        load.more(20)
        # Dropped, and made anew by hand, while it streams.
        with stage.healed(""):
            stage.drop_slot()
            load.more(20)
            stage.admin.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [stage.slot])
        load.more(20)
        # Dropped while nobody reads it.
        stage.stop()
        stage.drop_slot()
        load.more(20)
        with stage.healed("is gone: it was dropped"):
            stage.start()
        load.drain()
    assert stage.problem() is None
    assert check(stage.url, outbox_kafka.consume(topic)) == 0


PUBLICATIONS = [
    ("DROP PUBLICATION outbox_relay",),
    (
        "ALTER PUBLICATION outbox_relay DROP TABLE outbox.events",
        "ALTER PUBLICATION outbox_relay ADD TABLE outbox.events {columns}",
    ),
    ("ALTER PUBLICATION outbox_relay SET TABLE outbox.events {columns} WHERE (id % 3 <> 0)",),
    (
        "ALTER PUBLICATION outbox_relay SET (publish = 'update')",
        "ALTER PUBLICATION outbox_relay SET (publish = 'insert')",
    ),
]


def test_what_happens_to_publications(stage, outbox_kafka, order):
    """Postgres 18 leaves out what is not published without a word. Each change stops the stream all the same, also one
    that was taken back: what a key said before must not be passed by by what it says after.
    """
    kind, topic = order
    (columns,) = stage.admin.execute(
        "SELECT '(' || string_agg(a.attname, ', ') || ')' FROM pg_publication_rel AS r JOIN pg_attribute AS a "
        "ON a.attrelid = r.prrelid AND a.attnum = ANY(r.prattrs)"
    ).fetchone()
    with Load(stage.url, kind) as load:
        for statements in PUBLICATIONS:
            # What was done while nobody looked can't be seen by looking afterwards.
            stage.relay.pause()
            for statement in statements:
                load.more(20)
                stage.admin.execute(statement.replace("{columns}", columns or ""))
            load.more(20)
            stage.relay.resume()
            said = stage.says("publication 'outbox_relay'", REPAIR)
            assert (said["event"], said["level"]) == ("lane stopped", "error")
            stage.repair()
        # Somebody else's table in it does no harm, but no relay starts with it.
        stage.admin.execute("CREATE TABLE other (n int)")
        stage.admin.execute("ALTER PUBLICATION outbox_relay ADD TABLE other")
        stage.admin.execute("INSERT INTO other VALUES (1)")
        load.more(20)
        stage.stop()
        stage.start()
        stage.says("publication 'outbox_relay' was changed", REPAIR)
        stage.repair()
        load.drain()
    assert stage.problem() is None
    assert check(stage.url, outbox_kafka.consume(topic)) == 0


def test_what_happens_to_the_table(stage, outbox_kafka, order):
    """What is undone is gone on with: nobody has to repair anything."""
    kind, topic = order
    insert = "INSERT INTO {} (aggregate_type, aggregate_id, event_type, payload) VALUES (%s, 'k0-0', 'Counted', %s)"
    with Load(stage.url, kind) as load:
        load.more(30)
        stage.admin.execute("ALTER TABLE outbox.events ADD COLUMN tenant text")
        load.more(50)
        caught_up(stage.url)
        stage.admin.execute("ALTER TABLE outbox.events DROP COLUMN tenant")
        load.more(50)
        caught_up(stage.url)
        assert "outbox db check" not in stage.relay.log()
        # The writer does not name this column; the relay reads it.
        stage.admin.execute("ALTER TABLE outbox.events RENAME COLUMN created_at TO made_at")
        load.more(20)
        said = stage.says("created_at", "outbox db check")
        assert said["level"] == "warning"
        stage.admin.execute("ALTER TABLE outbox.events RENAME COLUMN made_at TO created_at")
        stage.relay.wait_for_log("publishing again")
        load.drain()
        stage.is_streaming()
    assert check(stage.url, outbox_kafka.consume(topic)) == 0
    # The table is renamed; what is written meanwhile stands in it.
    key = stage.admin.execute("SELECT seq FROM business WHERE key = 'k0-0'").fetchone()
    seq = 0 if key is None else key[0]

    def count(table):
        nonlocal seq
        seq += 1
        with stage.admin.transaction():
            stage.admin.execute(
                "INSERT INTO business VALUES ('k0-0', %s) ON CONFLICT (key) DO UPDATE SET seq = excluded.seq", [seq]
            )
            stage.admin.execute(insert.format(table), (kind, orjson.dumps({"seq": seq}).decode()))

    stage.admin.execute("ALTER TABLE outbox.events RENAME TO archived")
    count("outbox.archived")
    stage.says("outbox db check")
    assert stage.relay.running
    stage.admin.execute("ALTER TABLE outbox.archived RENAME TO events")
    count("outbox.events")
    wait_until(lambda: backlog(stage.url) == 0, 30, "the stream to go on")
    # What somebody has truncated is gone, and nothing waits for it.
    stage.relay.pause()
    stage.admin.execute(insert.format("outbox.events"), (kind, '{"seq": -1}'))
    stage.admin.execute("TRUNCATE outbox.events")
    count("outbox.events")
    stage.relay.resume()
    wait_until(lambda: backlog(stage.url) == 0, 30, "the stream to go on")
    stage.is_streaming()
    assert stage.problem() is None
    stage.stop()
    assert check(stage.url, outbox_kafka.consume(topic)) == 0


def goes_on(relay, url, kafka, order, wal) -> None:
    """What a relay waits for is set up under load."""
    kind, topic = order
    with Load(url, kind) as load:
        load.more(20)
        set_up(url, wal)
        wait_until(lambda: streaming(url), 30, "the lanes to stream")
        load.drain()
    ends(relay)
    assert check(url, kafka.consume(topic)) == 0


def test_an_outbox_that_is_polled_or_not_set_up(outbox_postgres, outbox_kafka, outbox_relay, wal, order):
    url, wal = outbox_postgres.url, wal | {"delivery": "exactly-once"}
    relay = outbox_relay(**wal)
    relay.wait_for_log("this outbox is read from another source; this relay waits. See `outbox relay switch`")
    with psycopg.connect(url, autocommit=True) as admin:
        # As if the tables had been copied to another server, without the slot.
        admin.execute("UPDATE outbox.lanes SET source = 'wal'")
        relay.wait_for_log("is not set up for this outbox: run `outbox cdc setup`")
        goes_on(relay, url, outbox_kafka, order, wal)


def test_a_database_that_is_not_utf8(outbox_postgres_server, outbox_kafka, outbox_relay, wal):
    name = f"latin_{token()}"
    with psycopg.connect(outbox_postgres_server.url(), autocommit=True) as admin:
        admin.execute(
            sql.SQL("CREATE DATABASE {} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0").format(sql.Identifier(name))
        )
    url = outbox_postgres_server.url(name)
    try:
        migrate(url)
        clear = "the database's encoding is LATIN1: source=wal needs UTF8; use source=polling"
        refused = run_outbox(url, wal, "cdc", "setup")
        assert (refused.returncode, clear in refused.stderr) == (1, True)
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute("UPDATE outbox.lanes SET source = 'wal'")
        relay = outbox_relay(database_url=url, **wal)
        relay.wait_for_log(clear)
        assert relay.running
        relay.kill()
    finally:
        outbox_postgres_server.drop_database(name)


def test_a_server_without_logical_wal(private_postgres, outbox_kafka, outbox_relay, wal, order):
    wal = wal | {"delivery": "exactly-once"}
    server = private_postgres({"wal_level": "replica"})
    url = private_postgres.database(server).url
    clear = "wal_level is 'replica': set wal_level = logical and restart Postgres, or use source=polling"
    for command in (("cdc", "setup"), ("relay", "switch", "wal")):
        refused = run_outbox(url, wal, *command)
        assert (refused.returncode, clear in refused.stderr) == (1, True)
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("UPDATE outbox.lanes SET source = 'wal'")
        relay = outbox_relay(database_url=url, **wal)
        relay.wait_for_log(clear)
        admin.execute("ALTER SYSTEM SET wal_level = 'logical'")
    server.stop()
    server.start()
    goes_on(relay, url, outbox_kafka, order, wal)
