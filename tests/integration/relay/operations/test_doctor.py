"""`outbox doctor` on real services: what it explains, and what it finds."""

from __future__ import annotations

import datetime as dt
import os

import orjson
import psycopg
from doctor_support import found, in_postgres, settings
from rows_and_roles import NOW, put
from typer.testing import CliRunner

from outbox import Event, Outbox
from outbox._clients.checks import Level
from outbox.sandbox.versions import DEFAULT
from relay.cli.app import app
from relay.config import Delivery, load, producer_options
from relay.database import Connector
from relay.operations.doctor import EXPLAINED, examine
from relay.operations.doctor import kafka as doctor_kafka
from relay.operations.doctor import postgres as doctor_postgres
from relay.operations.doctor.postgres import check_ids
from relay.operations.doctor.run import run


def test_every_delivery_is_explained(outbox_postgres, outbox_kafka, monkeypatch):
    name = outbox_kafka.name("outbox")
    for delivery in Delivery:
        findings = found(given := settings(outbox_postgres, outbox_kafka, delivery=delivery, name=name))
        assert findings[f"delivery {delivery}"] == (Level.OK, EXPLAINED[delivery])
        assert findings["tables"][0] is Level.OK
        # The embedded broker is alone.
        assert findings["Kafka brokers"][0] is Level.WARNING
        # Only exactly-once has a state topic, and depends on the ends of transactions, which some brokers can lose.
        exactly_once = delivery is Delivery.EXACTLY_ONCE
        assert (f"state topic {name}.relay.state" in findings) is exactly_once
        version = findings.get("Kafka's version")
        newer = (os.environ.get("OUTBOX_KAFKA_VERSION") or DEFAULT) >= "4.3"
        assert (version and version[0]) == ((Level.WARNING if newer else Level.OK) if exactly_once else None)
    # As if this broker had the setting that tells a newer one.
    monkeypatch.setattr(doctor_kafka, "_SINCE_4_3", "log.dirs")
    level, text = found(given)["Kafka's version"]
    assert level is Level.WARNING
    assert "KAFKA-20734" in text


def test_what_would_break_the_promise_is_a_failure(outbox_postgres, outbox_kafka):
    name = outbox_kafka.name("outbox")
    state = outbox_kafka.create_topic(f"{name}.relay.state", 2, {"cleanup.policy": "delete"})
    unclean = outbox_kafka.create_topic(outbox_kafka.name("unclean"), 1, {"unclean.leader.election.enable": "true"})
    compacted = outbox_kafka.create_topic(outbox_kafka.name("compacted"), 1, {"cleanup.policy": "compact"})
    missing = outbox_kafka.name("missing")
    given = settings(
        outbox_postgres,
        outbox_kafka,
        delivery="exactly-once",
        name=name,
        routes={"A": unclean, "B": compacted, "C": missing},
    )
    given.kafka["transaction.timeout.ms"] = "9000000"
    findings = [(finding.level, finding.about, finding.found) for finding in examine(given)]
    failures = {(about, text) for level, about, text in findings if level is Level.FAILURE}
    assert (f"state topic {state}", "cleanup.policy=delete could lose markers") in failures
    assert (f"topic {unclean}", "unclean.leader.election.enable=true: acknowledged events can be lost") in failures
    assert (f"topic {missing}", "does not exist yet (C)") in failures
    assert any(about == "transaction.timeout.ms" for about, _ in failures)
    assert any(level is Level.WARNING and about == f"topic {compacted}" for level, about, _ in findings)


def test_the_tables_and_what_waits_in_them(outbox_postgres, outbox_kafka):
    given = settings(outbox_postgres, outbox_kafka)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        event = put(connection, "outbox.events", created_at=NOW - dt.timedelta(minutes=10))
        put(connection, "outbox.failures", lane=event["lane"], id=event["id"], next_attempt_at=NOW)
        findings = list(examine(given))
        status = [one for one in findings if one.about == "status"]
        problems = ["no relay is running, and 1 event waiting", "1 event retrying: `outbox dead-letters list`"]
        assert [(one.level, one.found) for one in status] == [(Level.WARNING, text) for text in problems]
        assert "failures without an event" not in {one.about for one in findings}
        connection.execute("DELETE FROM outbox.events")
        level, text = found(given)["failures without an event"]
        assert (level, text.startswith("the events of 1 failure were deleted by hand")) == (Level.WARNING, True)
        connection.execute("ALTER TABLE outbox.lanes DROP CONSTRAINT lanes_counters")
    findings = found(given)
    assert findings["tables"][0] is Level.FAILURE
    assert "lanes_counters" in findings["tables"][1]
    # What needs no more than the rows is checked all the same.
    assert findings["status"][0] is Level.WARNING


def test_scheduled_events_whose_ids_are_forgotten_when_they_are_due(outbox_postgres, outbox_kafka):
    given = settings(outbox_postgres, outbox_kafka, consumer={"keep_days": 3})
    outbox, days = Outbox(), [dt.timedelta(days=number) for number in range(6)]
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        with connection.transaction():
            outbox.add(connection, Event("A", "far", "T"), delay=days[5] * 2)
            near = [outbox.add(connection, Event("A", "near", "T"), delay=delay) for delay in days[:3]]
        assert "scheduled events" not in in_postgres(given)
        with connection.transaction():
            for event_id in near[1:]:
                outbox.reschedule(connection, event_id, delay=days[5])
        finding = in_postgres(given)["scheduled events"]
        assert finding.level is Level.WARNING
        assert finding.found.startswith("2 of the next 10,000 are due more than 3 days after")
        assert "scheduled events" not in in_postgres(settings(outbox_postgres, outbox_kafka))


def test_calls_that_nobody_makes(outbox_postgres, outbox_kafka):
    """The longest wait of a group is named, as `outbox status` and the metric do; not what waits for its turn."""
    given = settings(outbox_postgres, outbox_kafka)
    ago = {minutes: dt.datetime.now(dt.UTC) - dt.timedelta(minutes=minutes) for minutes in (2, 12, 20, -1)}

    def called(minutes: int, group: str = "g", **columns: object) -> None:
        values = {"state": "reserved", "next_attempt_at": ago[minutes], "message_offset": len(given_out), **columns}
        given_out.append(put(outbox_postgres.url, "consumer.reservations", grp=group, **values))

    given_out: list[dict[str, object]] = []
    for minutes, columns in ((2, {}), (-1, {}), (20, {"parked": True}), (20, {"state": "stuck"})):
        called(minutes, **columns)
    assert "calls of group g" not in found(given)
    called(12)
    called(20, "other", state="calling")
    findings = found(given)
    for group, minutes in {"g": 12, "other": 20}.items():
        assert findings[f"calls of group {group}"] == (Level.WARNING, f"a call has been due for {minutes} minutes")


EVENTS = (
    "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) "
    "SELECT 'A', g::text, 'T' FROM generate_series(1, %s) g"
)
ARCHIVE = """
INSERT INTO outbox.published (lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at)
SELECT lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at FROM outbox.events"""


def test_ids_that_would_be_given_again_or_are_taken_in_blocks(outbox_postgres, outbox_kafka):
    given = settings(outbox_postgres, outbox_kafka)
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute(EVENTS, (100,))

        def mended(following: int, table: str) -> None:
            finding = in_postgres(given)["ids of events"]
            assert finding.level is Level.FAILURE
            assert f"the next event gets the id {following}, and outbox.{table} has ids up to 100" in finding.found
            # What it says to do is what mends it.
            connection.execute(finding.do.split("; ")[1])
            connection.execute(EVENTS, (1,))
            assert connection.execute("SELECT max(id) FROM outbox.events").fetchone() == (101,)
            connection.execute("DELETE FROM outbox.events WHERE id > 100")

        # The table was copied, and its sequence was not.
        connection.execute("ALTER TABLE outbox.events ALTER COLUMN id RESTART WITH 40")
        mended(40, "events")
        connection.execute(ARCHIVE)
        assert "ids of events" not in in_postgres(given)
        connection.execute("TRUNCATE outbox.events RESTART IDENTITY")
        mended(1, "published")
        connection.execute("ALTER TABLE outbox.events ALTER COLUMN id SET CACHE 50")
        finding = in_postgres(given)["ids of events, cache"]
        assert (finding.level, "50 ids at once" in finding.found) == (Level.FAILURE, True)
        connection.execute(finding.do)
    assert not [about for about in in_postgres(given) if about.startswith("ids of events")]


def test_what_writers_add_while_the_ids_are_read_is_no_finding(outbox_postgres, outbox_kafka, monkeypatch):
    highest_id = doctor_postgres._highest_id
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:

        def beside_a_writer(*arguments):
            connection.execute(EVENTS, (1,))
            return highest_id(*arguments)

        monkeypatch.setattr(doctor_postgres, "_highest_id", beside_a_writer)
        assert "ids of events" not in in_postgres(settings(outbox_postgres, outbox_kafka))


def test_ids_begin_again_above_those_of_all_tables_and_of_the_writers(outbox_postgres):
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute(EVENTS, (100,))
        connection.execute(ARCHIVE)
        connection.execute("DELETE FROM outbox.events WHERE id > 50")
        connection.execute("ALTER TABLE outbox.events ALTER COLUMN id RESTART WITH 40")
        (finding,) = check_ids(connection, "outbox")
        assert "outbox.published has ids up to 100" in finding.found
        # By the time that it is mended, a writer may have passed them.
        connection.execute("ALTER TABLE outbox.events ALTER COLUMN id RESTART WITH 300")
        connection.execute(finding.do.split("; ")[1])
        connection.execute(EVENTS, (1,))
        assert connection.execute("SELECT max(id) >= 300 FROM outbox.events").fetchone() == (True,)


def test_an_archive_that_is_too_large_to_look_through_is_left_out(outbox_postgres, outbox_kafka, monkeypatch):
    monkeypatch.setattr(doctor_postgres, "_ARCHIVE_LIMIT", "50ms")
    with psycopg.connect(outbox_postgres.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE slow AS SELECT 1")
        connection.execute(EVENTS, (1,))
        connection.execute(ARCHIVE)
        connection.execute("TRUNCATE outbox.events RESTART IDENTITY")
        with connection.transaction():
            # Whoever reads it waits, as for a large one.
            connection.execute("LOCK TABLE outbox.published IN ACCESS EXCLUSIVE MODE")
            with Connector(outbox_postgres.url, "test")() as reader:
                findings = list(check_ids(reader, "outbox"))
    assert findings == []


def test_a_lease_that_is_too_long_for_the_brokers_transactions(outbox_postgres, outbox_kafka):
    """The broker's limit is 15 minutes unless it is raised."""

    def advised(lease_seconds: int, **kafka: str) -> str:
        given = settings(outbox_postgres, outbox_kafka, delivery="exactly-once", relay={"lease_seconds": lease_seconds})
        given.kafka.update({name.replace("_", "."): value for name, value in kafka.items()})
        checks = doctor_kafka.checks(given, producer_options(given), 4, [])
        for finding in run(check for check in checks if check.about == "Kafka's settings"):
            if finding.about == "transaction.timeout.ms":
                assert finding.level is Level.FAILURE
                return f"{finding.found}; {finding.do}"
        return ""

    above = "902000 is above the broker's transaction.max.timeout.ms of 900000: no transaction can begin; "
    assert advised(451).startswith(f"{above}it is twice the lease: set OUTBOX_RELAY__LEASE_SECONDS to 450 or less")
    assert advised(450) == ""
    assert "set kafka.delivery.timeout.ms to 300000 or less" in advised(3000, delivery_timeout_ms="400000")


def test_servers_that_are_away_are_findings_and_not_tracebacks(monkeypatch):
    monkeypatch.setattr("relay.operations.doctor.kafka._SECONDS", 2.0)
    given = load(database_url="postgresql://u@127.0.0.1:1/db", kafka={"bootstrap.servers": "127.0.0.1:1"})
    findings = found(given)
    assert findings["Postgres"][0] is Level.FAILURE
    assert findings["Kafka"][0] is Level.FAILURE


def test_the_command(outbox_postgres, outbox_kafka):
    environment = {
        "OUTBOX_DATABASE_URL": outbox_postgres.url,
        "OUTBOX_KAFKA__BOOTSTRAP_SERVERS": outbox_kafka.bootstrap_servers,
    }
    runner = CliRunner()
    said = runner.invoke(app, ["doctor", "--delivery", "exactly-once", "--json"], env=environment)
    report = orjson.loads(said.stdout)
    assert report["delivery"] == "exactly-once"
    # The test's Postgres runs with fsync off, which no doctor can let pass.
    assert {finding["about"] for finding in report["findings"] if finding["level"] == "failure"} == {"Postgres fsync"}
    assert said.exit_code == 1
    # A block for each finding, within a narrow terminal; nothing is cut off.
    narrow = runner.invoke(app, ["doctor"], env={**environment, "COLUMNS": "80"}).stdout
    assert (max(map(len, narrow.splitlines())) <= 80, "…" in narrow) == (True, False)
    assert "\nok       delivery at-least-once\n         A row is deleted after Kafka acknowledged it: " in f"\n{narrow}"
    fsync = narrow.partition("\nfailure  Postgres fsync\n         ")[2]
    assert "\n         → " in fsync.partition("\nok ")[0]
    assert runner.invoke(app, ["doctor", "--delivery", "twice"], env=environment).exit_code == 2
    assert runner.invoke(app, ["doctor"], env={}).exit_code == 2
