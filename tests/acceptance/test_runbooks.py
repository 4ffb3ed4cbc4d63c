"""The runbooks, each against the failure that it is about: it shows the cause, and its way out ends the failure.

Commands and queries come out of docs/operations/runbooks.md itself; see runbooks.py. They are run with the rights that
the page names. ``firing`` evaluates the real alert rules on what real relays and consumers show.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from alerting import RULES, Samples, collected, firing, scraped
from confluent_kafka.admin import AdminClient, NewPartitions
from external_support import payments, provider, sink
from failing_relays import let_pass
from offsets_driver import GROUP, Driver, driver, without_spark
from pause_support import pause
from prometheus_client import CollectorRegistry
from proxy import TcpProxy
from psycopg import sql
from raw_kafka import HangingTransaction
from reconcile_support import hanging, unverified
from runbooks import PLACEHOLDERS, SECTIONS, Operator, Section, placeholders
from support import drained, end_leases, logged, look_up, owners, wait_until
from task_sink import Sink as NumbersSink
from task_sink import event_id
from typer.testing import CliRunner
from wal_support import set_up, streaming, to_wal

from outbox import Event, Outbox
from outbox._app.prometheus import serve
from outbox.consumer import letters
from outbox.consumer.errors import DataLost, Fenced, Interrupted
from outbox.consumer.letters import DeadLetter
from outbox.sandbox._ports import free_ports
from outbox.testing.fixtures import RelayProcess, Topics, token
from relay.cli.app import app
from relay.core.pauses import ALL, scopes_of
from relay.failpoints import VARIABLE
from relay.kafka.state_topic import StateTopic
from spark_jobs.driver.poison_search import PoisonSearch
from spark_jobs.driver.round_context import Counts, OffsetRanges, RoundState
from spark_jobs.driver.runner import Options, Runner
from spark_jobs.health import ConsumerHealth
from spark_jobs.job import ConsumerJob
from spark_jobs.metrics import ConsumerMetrics
from spark_jobs.postgres.lock_monitor import LockMonitor
from spark_jobs.task import partition as task
from spark_jobs.task.feed import rejected_from

__all__ = ["driver", "hanging", "provider", "sink", "unverified", "without_spark"]

IMPATIENT = (str(Path(__file__).parents[1] / "support" / "impatient.py"),)
LEASE = 1.0
FIND_HANGING = "kafka-transactions.sh --bootstrap-server BROKERS find-hanging"
TYPED: dict[str, set[str]] = {}
"""By the title of a section, what its tests have typed of it."""


def of(title: str) -> Callable[..., Any]:
    """Return the parameters that name the section which a test follows."""
    assert title in SECTIONS, title
    return pytest.mark.parametrize("section", [SECTIONS[title]], ids=lambda section: section.anchor)


@pytest.fixture
def role(outbox_postgres) -> Iterator[Callable[..., str]]:
    """A function that makes a role of these kinds, and returns its name."""
    made = []

    def make(*kinds: str) -> str:
        name = f"{kinds[0]}_{token()}"
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        made.append(name)
        grants = ["db", "roles", *(f"{kind}={name}" for kind in kinds), "--apply"]
        done = CliRunner().invoke(app, grants, env={"OUTBOX_DATABASE_URL": outbox_postgres.url})
        assert done.exit_code == 0, done.output
        return name

    with outbox_postgres.connect(autocommit=True) as admin:
        yield make
        for name in made:
            admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))


@pytest.fixture
def monitor(outbox_postgres, role) -> str:
    """The address of the database for a role that may only look."""
    name = role("monitor", "consumer-monitor")
    change(outbox_postgres.url, f"GRANT pg_monitor TO {name}")
    return outbox_postgres.url.replace("postgres@", f"{name}@")


@pytest.fixture
def address() -> str:
    """Where the relay, or the consumer, of the test shows its metrics."""
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def settings(outbox_kafka, address) -> dict[str, Any]:
    """Settings of a relay, and of the commands."""
    return {
        "name": outbox_kafka.name("outbox"),
        "create_topics": False,
        "kafka__bootstrap_servers": outbox_kafka.bootstrap_servers,
        "kafka__reconnect_backoff_max_ms": 200,
        "relay__lease_seconds": LEASE,
        "relay__max_backoff_seconds": 0.2,
        "relay__metrics_address": address,
    }


@pytest.fixture
def operator(section, outbox_postgres, role, monitor, outbox_relay, settings) -> Iterator[Operator]:
    """Somebody who follows the section of the test."""

    def start(*arguments: str, **more: Any) -> RelayProcess:
        # The factory has a name of its own for these.
        servers = settings["kafka__bootstrap_servers"]
        given = {
            "program": IMPATIENT,
            "bootstrap_servers": servers,
            **settings,
            "kafka__bootstrap_servers": None,
            **more,
        }
        return outbox_relay(*arguments, **{name: value for name, value in given.items() if value is not None})

    operators = outbox_postgres.url.replace("postgres@", f"{role('operator', 'consumer-operator')}@")
    made = Operator(section, monitor, operators, outbox_postgres.url, settings, start)
    yield made
    for title, steps in made.typed.items():
        TYPED.setdefault(title, set()).update(steps)


@pytest.fixture
def orders(outbox_postgres, outbox_kafka) -> Orders:
    return Orders(outbox_postgres, outbox_kafka)


class Orders:
    """An aggregate type, its topic, and events of it."""

    def __init__(self, database: Any, kafka: Any, *, exists: bool = True) -> None:
        self.url = database.url
        self.kafka = kafka
        self.kind = kafka.name("Order")
        self.topic = f"{self.kind.lower()}-events"
        self.options = {"bootstrap.servers": kafka.bootstrap_servers}
        if exists:
            kafka.create_topic(self.topic, 1)

    def add(self, count: int, *, seconds_ago: int = 0) -> None:
        """Write events, of a key each."""
        with psycopg.connect(self.url) as connection:
            connection.execute(
                "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload, created_at)"
                " SELECT %s, 'k' || n, 'T', '{}', now() - %s * interval '1 second' FROM generate_series(1, %s) AS n",
                (self.kind, seconds_ago, count),
            )

    def published(self, count: int) -> None:
        """Wait until so many events are published, and none is left."""
        assert len(self.kafka.consume(self.topic, count)) == count
        drained(self.url)


def change(url: str, statement: str) -> None:
    """Change a database by hand."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())


@contextmanager
def forgotten(url: str, statement: str) -> Iterator[int]:
    """Hold what a statement locks, in a session that forgets its transaction; yield its process id."""
    connection = psycopg.connect(url, application_name="forgetful")
    connection.execute(statement.encode())
    try:
        yield connection.info.backend_pid
    finally:
        connection.close()


def shows(address: str, name: str, value: float) -> bool:
    """Return whether a process shows a figure."""
    return scraped(address).get(f'outbox_{name}instance="{address}"}}') == value


def alarmed(address: str, *alerts: str, before: Samples | None = None, later: float = 0.0) -> None:
    """Wait until exactly these alerts fire for what a relay shows."""
    wanted, last = set(alerts), set[str]()

    def fires() -> bool:
        nonlocal last
        last = firing(scraped(address), before, later=later)
        return last == wanted

    try:
        wait_until(fires, what="alerts")
    except AssertionError as error:
        raise AssertionError(f"{sorted(last)} fire, and not {sorted(wanted)}") from error


# --- The page as a whole


def rules() -> dict[str, str]:
    """Return the anchor of each alert's runbook."""
    found = re.findall(r"- alert: (\w+)\n.*?runbook: runbooks\.md#(\S+)", RULES.read_text(), re.DOTALL)
    assert len(found) == RULES.read_text().count("- alert:")
    return dict(found)


def test_every_alert_has_a_runbook_and_every_runbook_a_test(request):
    anchors = {section.anchor: section for section in SECTIONS.values()}
    for alert, anchor in rules().items():
        assert alert in anchors[anchor].alerts, alert
    assert {alert for section in SECTIONS.values() for alert in section.alerts} == set(rules())
    tests = {
        mark.args[1][0].title
        for test in vars(request.module).values()
        for mark in getattr(test, "pytestmark", ())
        if mark.name == "parametrize" and isinstance(mark.args[1][0], Section)
    }
    assert tests == set(SECTIONS)


def test_what_is_to_be_put_in_place_of_a_word_is_said():
    assert len(PLACEHOLDERS) > 8
    steps = {step for section in SECTIONS.values() for step in section.steps}
    assert {word for step in steps for word in placeholders(step)} == PLACEHOLDERS
    # A query with an unknown word fails when it is run.
    typed = " ".join(re.sub(r"\bOUTBOX_\w+", "", one) for section in SECTIONS.values() for one in section.commands)
    assert set(re.findall(r"\b[A-Z][A-Z_]+\b", typed)) <= PLACEHOLDERS


# --- Relays


@of("No relay is running")
def test_no_relay_is_running(operator, orders, settings, address):
    relay = operator.start()
    orders.add(1)
    orders.published(1)
    alarmed(address)
    relay.kill()
    orders.add(3)
    assert firing(scraped(address)) == {"OutboxNotPublishing"}
    wait_until(
        lambda: "no relay is running, and 3 events wait" in operator.look("outbox status").text, what="the lease"
    )
    assert " gone " in operator.look("outbox status").text
    assert operator.look("curl -s", RELAY=address).status == 7
    assert "relay stopped" not in relay.log()
    relay = operator.run_relay("outbox relay run")
    orders.published(4)
    alarmed(address)
    relay.terminate()
    assert relay.wait() == 0
    assert "relay stopped" in relay.log().splitlines()[-1]
    # One that does not reach Postgres.
    relay = operator.start(database_url="postgresql://127.0.0.1:1/x")
    line = "[-]control-loop failed: postgres_unavailable"
    wait_until(lambda: line in operator.look("curl -s", RELAY=address).text, what="it to say so")
    assert "waiting for Postgres" in relay.log()
    alarmed(address, "OutboxNotPublishing", "OutboxRelayNotReady")


@of("No relay is running")
def test_no_relay_holds_the_first_lane(operator, orders, address):
    operator.start()
    alarmed(address)
    with forgotten(orders.url, "SELECT FROM outbox.lanes WHERE lane = 0 FOR UPDATE") as pid:
        wait_until(lambda: "OutboxNotPublishing" in firing(scraped(address)), what="the alert")
        shown = operator.look("outbox status").text
        assert " running " in shown
        assert re.search(r"^0 +0 +- +- ", shown, re.MULTILINE), shown
        there = operator.follow("A lane stands still")
        assert there.query("pg_locks")[0]["pid"] == pid
        there.execute("pg_terminate_backend", PID=pid)
    alarmed(address)


@of("The oldest event gets older")
def test_a_lane_whose_lease_lies_in_the_future(operator, orders, address):
    url = orders.url
    change(
        url,
        "UPDATE outbox.lanes SET owner = 'long-gone', lease_until = clock_timestamp() + interval '1 day', epoch = 7"
        " WHERE lane = 2",
    )
    orders.add(20, seconds_ago=100)
    operator.start()
    wait_until(lambda: look_up(url, "SELECT DISTINCT lane FROM outbox.events") == [(2,)], what="the other lanes")
    alarmed(address, "OutboxBacklogOld")
    shown = operator.look("outbox status").text
    assert re.search(r"the oldest event has waited for \d+ s \(lanes 2\)", shown)
    assert re.search(r"^2 +\d+ +\d+ s +long-gone", shown, re.MULTILINE)
    assert not re.search(r"^long-gone", shown, re.MULTILINE)
    assert "[-]" not in operator.look("curl -s", RELAY=address).text
    operator.own("outbox relay release", LANE=2)
    orders.published(20)
    alarmed(address)


@of("The oldest event gets older")
def test_kafka_is_away(operator, outbox_postgres, unverified, address, settings):
    """It stands still for a while, and answers nobody."""
    there = Orders(outbox_postgres, Topics(unverified.bootstrap_servers))
    settings["kafka__bootstrap_servers"] = unverified.bootstrap_servers
    operator.start()
    there.add(1)
    there.published(1)
    unverified.pause_broker(0)
    try:
        there.add(40, seconds_ago=100)
        wait_until(lambda: "OutboxBacklogOld" in firing(scraped(address)), what="the alert")
        reason = re.compile(r"lane-0\b.*: kafka_unavailable for ")
        wait_until(lambda: reason.search(operator.look("curl -s", RELAY=address).text), what="the reason")
        shown = operator.look("outbox status").text
        assert re.search(r"the oldest event has waited for \d+ s \(lanes 0, 1, 2, 3\)", shown)
    finally:
        unverified.resume_broker(0)
    there.published(41)
    alarmed(address)


@of("The backlog grows")
def test_the_backlog_grows(operator, orders, address):
    """A forgotten session has locked the events; and more relays share the lanes."""
    url = orders.url
    relay = operator.start(relay__instance="first")
    wait_until(lambda: shows(address, "backlog_events{", 0), what="the first look")
    before = scraped(address)
    relay.pause()
    orders.add(10_400)
    with forgotten(url, "SELECT FROM outbox.events FOR UPDATE") as pid:
        relay.resume()
        wait_until(lambda: "OutboxBacklogGrows" in firing(scraped(address), before), what="the alert")
        operator.watch("outbox status --watch", lambda line: re.search(r"published \d+/s", line) is not None)
        there = operator.follow("An old transaction")
        assert there.query("pg_stat_activity")[0]["pid"] == pid
        there.execute("pg_terminate_backend", PID=pid)
    more = operator.run_relay("outbox relay run --workers", relay__metrics_address=None)
    running = "SELECT count(*) FROM outbox.relays WHERE alive_until > clock_timestamp()"
    wait_until(lambda: look_up(url, running) == [(3,)], what="more relays")
    drained(url)
    # One of them may have the first lane, which shows the backlog, and they are not scraped.
    more.terminate()
    alarmed(address, before=before)


@of("An old transaction")
def test_a_session_forgets_its_transaction(operator, orders, address, outbox_postgres):
    """It holds a lock that keeps the events from being counted. And a slot that nobody reads."""
    operator.start()
    wait_until(lambda: shows(address, "backlog_events{", 0), what="the first look")
    with forgotten(orders.url, "LOCK TABLE outbox.events") as pid:
        wait_until(lambda: "OutboxBacklogUnknown" in firing(scraped(address)), what="the alert")
        oldest = operator.query("pg_stat_activity")[0]
        assert (oldest["pid"], oldest["state"], oldest["application_name"]) == (pid, "idle in transaction", "forgetful")
        assert oldest["query"] == "LOCK TABLE outbox.events"
        assert operator.execute("pg_terminate_backend", PID=pid) == [{"pg_terminate_backend": True}]
    alarmed(address)
    assert operator.query("pg_prepared_xacts") == []
    change(orders.url, f"SELECT pg_create_logical_replication_slot('{outbox_postgres.name}', 'pgoutput')")
    slots = {row["slot_name"]: row for row in operator.query("pg_replication_slots")}
    assert slots[outbox_postgres.name]["catalog_xmin_age"] is not None
    assert not slots[outbox_postgres.name]["active"]
    change(orders.url, f"SELECT pg_drop_replication_slot('{outbox_postgres.name}')")


@of("Something is paused")
def test_pauses_whose_reason_is_over(operator, orders, address):
    operator.start()
    for scope, values in (
        (ALL, {}),
        (scopes_of([1], [])[0], {"LANE": 1}),
        (scopes_of([], [orders.topic])[0], {"TOPIC": orders.topic}),
    ):
        pause(orders.url, scope, reason="a ledger is moved")
        orders.add(20)
        alarmed(address, "OutboxPaused")
        assert "a ledger is moved" in operator.look("outbox status").text
        option = "".join(f" --{word.lower()} {word}" for word in values)
        operator.act(f"outbox relay resume{option}", **values)
        drained(orders.url)
        alarmed(address)


@of("Something is paused")
def test_a_drain_that_does_not_end_and_a_relay_that_does_not_obey(operator, orders, address):
    url = orders.url
    operator.start()
    asleep = operator.start(relay__instance="asleep", relay__metrics_address=None, relay__lease_seconds=60)
    wait_until(lambda: "asleep" in owners(url), what="both relays")
    asleep.pause()
    written = f"INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type) VALUES ('{orders.kind}', '1', 'T')"
    with forgotten(url, written) as pid:
        shown = operator.act("outbox relay drain", status=1)
        assert f"open: session {pid} of" in shown
    pause(url, ALL, wait=False)
    assert "asleep" in operator.look("outbox status").text
    asleep.kill()
    end_leases(url, "asleep")
    wait_until(lambda: "asleep" not in operator.look("outbox status").text, what="the others to obey")
    operator.act("outbox relay drain")
    alarmed(address, "OutboxPaused")
    operator.act("outbox relay resume")
    alarmed(address)


@of("A lane stands still")
def test_a_lane_whose_row_is_locked(operator, orders, address):
    operator.start()
    alarmed(address)
    with forgotten(orders.url, "SELECT FROM outbox.lanes WHERE lane = 1 FOR UPDATE") as pid:
        orders.add(20)
        alarmed(address, "OutboxLaneUnheld", "OutboxRelayNotReady")
        shown = operator.look("curl -s", RELAY=address).text
        assert re.search(r"\[-\]lane-1 failed: (lease_expired|lane_locked) for", shown)
        assert operator.query("pg_locks")[0]["pid"] == pid
        operator.execute("pg_terminate_backend", PID=pid)
    orders.published(20)
    alarmed(address)


@of("A lane stands still")
def test_a_lane_that_has_lost_its_state(operator, orders, address, settings):
    settings["delivery"] = "exactly-once"
    url = orders.url
    relay = operator.start()
    orders.add(20)
    orders.published(20)
    relay.terminate()
    assert relay.wait() == 0
    change(url, "UPDATE outbox.lanes SET last_batch = last_batch + 50 WHERE lane = 2")
    operator.start()
    orders.add(20)
    line = "[-]lane-2 failed: state_lost"
    wait_until(lambda: line in operator.look("curl -s", RELAY=address).text, what="the reason")
    alarmed(address, "OutboxRelayNotReady")
    shown = operator.own("outbox relay reconcile", status=1)
    assert re.search(r"^lane 2: .*marker", shown, re.MULTILINE)
    assert len(re.findall("as it should be", shown)) == 3
    # The way out of another reason refuses: test_upgraded.py.
    assert "lane 2" in operator.own("outbox relay upgraded", status=1)
    operator.own("outbox relay reconcile --lane", LANE=2)
    orders.published(40)
    alarmed(address)


@of("A lane stands still")
def test_postgres_refuses(operator, orders, address):
    """A trigger of somebody else's."""
    url = orders.url
    change(
        url,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'kept by law'; END $$;"
        "CREATE TRIGGER kept BEFORE DELETE ON outbox.events FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    relay = operator.start()
    orders.add(20)
    wait_until(lambda: ": postgres_refuses for " in operator.look("curl -s", RELAY=address).text, what="the reason")
    assert "kept by law" in relay.log()
    change(url, "DROP TRIGGER kept ON outbox.events")
    orders.published(20)
    alarmed(address)


@of("A server refuses the connection")
def test_a_broker_that_can_not_be_found(operator, orders, address, settings):
    """Certificates, passwords and rights: test_secured_servers.py."""
    right = settings["kafka__bootstrap_servers"]
    orders.add(5)
    settings["kafka__bootstrap_servers"] = "broker.invalid:9092"
    relay = operator.start()
    relay.wait_for_log("Failed to resolve")
    shown = operator.look("outbox doctor")
    assert (shown.status, "a connection failed" in shown.text, "Failed to resolve" in shown.text) == (1, True, True)
    relay.kill()
    settings["kafka__bootstrap_servers"] = right
    operator.start()
    orders.published(5)
    alarmed(address)


@of("A topic takes nothing")
def test_a_topic_is_missing(operator, outbox_postgres, outbox_kafka, address, settings):
    missing = Orders(outbox_postgres, outbox_kafka, exists=False)
    settings["routes"] = json.dumps({missing.kind: {"topic": missing.topic}})
    operator.start()
    missing.add(5)
    alarmed(address, "OutboxTopicUnusable")
    line = f"[-]topic-{missing.topic} failed: topic '{missing.topic}' does not exist, or"
    assert line in operator.look("curl -s", RELAY=address).text
    shown = operator.look("outbox doctor")
    assert (shown.status, f"topic {missing.topic}" in shown.text) == (1, True), shown.text
    outbox_kafka.create_topic(missing.topic)
    missing.published(5)
    alarmed(address)


@of("A topic got more partitions")
def test_partitions_are_added(operator, orders, address):
    relay = operator.start(delivery="exactly-once")
    orders.add(3)
    orders.published(3)
    admin = AdminClient(orders.options)
    counts = itertools.count(2)

    def added() -> bool:
        # One more, should it not have counted them before.
        admin.create_partitions([NewPartitions(orders.topic, next(counts))])[orders.topic].result(30)
        return "OutboxTopicGrown" in firing(scraped(address))

    wait_until(added, what="the alert")
    alarmed(address, "OutboxTopicGrown")
    shown = operator.look("curl -s", RELAY=address).text
    assert re.search(rf"partitions-{orders.topic} .*partitions were added \(\d+, now \d+\)", shown), shown
    relay.terminate()
    assert relay.wait() == 0
    operator.start(delivery="exactly-once")
    alarmed(address)


@of("A key is blocked")
def test_events_that_are_too_large(operator, orders, address, outbox_kafka, settings):
    """One is published after all, one is not."""
    small = outbox_kafka.create_topic(outbox_kafka.name("small"), 1, {"max.message.bytes": "20000"})
    settings |= {"routes": json.dumps({"Small": {"topic": small}}), "failures__max_attempts": 1}
    operator.start()
    with psycopg.connect(orders.url) as connection:
        for key in ("a", "b"):
            Outbox().add(connection, Event("Small", key, "Large", os.urandom(30_000)))
            Outbox().add(connection, Event("Small", key, "Behind", {}))
    alarmed(address, "OutboxKeyBlocked", "OutboxDeadLetters")
    listed = operator.look("outbox dead-letters list").text
    ids = re.findall(r"[0-9a-f]{8}-[0-9a-f-]{27}", listed)
    first, second = dict.fromkeys(ids)
    assert "Large" in listed
    assert json.loads(operator.act("outbox dead-letters show", EVENT_ID=first))["event_type"] == "Large"
    operator.act("outbox dead-letters discard", EVENT_ID=second)
    alarmed(address, "OutboxKeyBlocked", "OutboxDeadLetters")
    let_pass(outbox_kafka, small)
    operator.act("outbox dead-letters retry", EVENT_ID=first)
    found = [(message.key(), dict(message.headers())["event-type"]) for message in outbox_kafka.consume(small, 3)]
    assert found.index((b"a", b"Large")) < found.index((b"a", b"Behind"))
    assert (b"b", b"Large") not in found
    drained(orders.url)
    alarmed(address)


@of("Events may be lost")
def test_kafka_does_not_acknowledge_what_is_deleted(operator, outbox_postgres, unverified, address, settings):
    there = Orders(outbox_postgres, Topics(unverified.bootstrap_servers))
    settings["kafka__bootstrap_servers"] = unverified.bootstrap_servers
    relay = operator.start(delivery="at-most-once")
    there.add(1)
    there.published(1)
    before = scraped(address)
    unverified.pause_broker(0)
    try:
        there.add(10)
        wait_until(lambda: "OutboxEventsLost" in firing(scraped(address), before), what="the alert")
        assert 0 < sum(line["events"] for line in logged(relay, "events may be lost, as at-most-once allows")) <= 10
    finally:
        unverified.resume_broker(0)
    alarmed(address)
    relay.terminate()
    assert relay.wait() == 0
    # What test_kafka_is_away shows is true of this one.
    relay = operator.run_relay("OUTBOX_DELIVERY=at-least-once")
    (line,) = wait_until(lambda: logged(relay, "relay started"), what="the first line")
    assert line["delivery"] == "at-least-once"


@of("A transaction is undecided")
def test_a_relay_has_died_in_a_transaction(operator, orders, outbox_postgres, settings):
    url = orders.url
    relay = operator.start(
        delivery="exactly-once",
        relay__lease_seconds=60,
        kafka__transaction_timeout_ms=90_000,
        env={VARIABLE: "txn.confirmed=pause@2"},
    )
    wait_until(lambda: look_up(url, "SELECT bool_and(last_batch = 1) FROM outbox.lanes") == [(True,)], what="a marker")
    orders.add(3)
    metrics = ConsumerMetrics("g", [orders.topic], url, "consumer", orders.options)
    registry = CollectorRegistry()
    registry.register(metrics)
    wait_until(lambda: "ConsumerPinned" in firing(collected(registry)), what="the alert")
    shown = operator.look("outbox doctor").text
    assert f"topic {orders.topic} partition 0, transaction" in shown
    servers = {"BROKERS": orders.kafka.bootstrap_servers}
    shown = operator.look("kafka-transactions.sh --bootstrap-server BROKERS list", **servers).text
    (id_,) = re.findall(rf"^({settings['name']}\.relay\.\S+)\s.*\sOngoing", shown, re.MULTILINE)
    tool = "kafka-transactions.sh --bootstrap-server BROKERS describe"
    shown = operator.look(tool, **servers, TRANSACTIONAL_ID=id_).text
    assert f"{orders.topic}-0" in shown
    assert "90000" in shown
    relay.kill()
    end_leases(url)
    operator.start(delivery="exactly-once")
    wait_until(lambda: "ConsumerPinned" not in firing(collected(registry)), what="its heir to fence it")
    orders.published(3)


@of("A transaction is undecided")
def test_a_transaction_hangs(operator, hanging, address, settings, monkeypatch):
    """Of the lanes' last holder; the outbox still has its rows."""
    defaults = StateTopic.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "decide_seconds", 0.5)
    hanging.hang()
    settings |= {
        "kafka__bootstrap_servers": hanging.kafka.bootstrap_servers,
        "name": hanging.name,
        "delivery": "exactly-once",
        "kafka__transaction_timeout_ms": 2_000,
    }
    operator.start()
    alarmed(address, "OutboxTransactionHangs", "OutboxRelayNotReady")
    topic = hanging.topics[0]
    shown = operator.look(FIND_HANGING, BROKERS=hanging.kafka.bootstrap_servers, TOPIC=topic, MINUTES=0)
    assert re.search(rf"^{topic}\s+1\s", shown.text, re.MULTILINE), shown.text
    shown = operator.own("outbox relay reconcile", status=1)
    assert re.search(r"(\d+) events may be in it; the outbox still has the rows of \1", shown)
    operator.own("outbox relay reconcile --apply")
    wait_until(lambda: hanging.left() == 0, what="the events to be published")
    assert set(hanging.published().values()) == {1}
    alarmed(address)


@of("A transaction is undecided")
def test_a_transaction_of_another_program_hangs(operator, hanging, settings):
    """Nothing of the outbox ends it."""
    topic = hanging.topics[0]
    stranger = HangingTransaction(hanging.kafka.bootstrap_servers, hanging.kafka.name("stranger"))
    stranger.write(topic, 1, [(b"k", b"{}", {})])
    settings |= {
        "kafka__bootstrap_servers": hanging.kafka.bootstrap_servers,
        "name": hanging.name,
        "delivery": "exactly-once",
    }
    servers = {"BROKERS": hanging.kafka.bootstrap_servers, "TOPIC": topic}
    shown = operator.look(FIND_HANGING, **servers, MINUTES=0).text
    assert re.search(rf"^{topic}\s+1\s.*\s0\s", shown, re.MULTILINE), shown
    shown = operator.own("outbox relay reconcile", status=1)
    assert f"abort --topic {topic} --partition 1 --start-offset 0" in shown
    assert hanging.undecided() == {(topic, 1)}
    tool = "kafka-transactions.sh --bootstrap-server BROKERS abort"
    operator.own(tool, **servers, PARTITION=1, STABLE=0)
    assert hanging.undecided() == set()


@of("Upkeep fails")
def test_the_relay_lacks_a_right(operator, orders, address, role, outbox_postgres):
    name = role("relay")
    change(orders.url, f"REVOKE SELECT ON outbox.streams FROM {name}")
    relay = operator.start(database_url=orders.url.replace("postgres@", f"{name}@"))
    orders.add(3)
    orders.published(3)
    alarmed(address, "OutboxUpkeepFails", later=600)
    shown = operator.look("curl -s", RELAY=address).text
    assert re.search(r"\[-\]upkeep-slot failed: for \d+ s \(leaves it ready\)", shown)
    assert "permission denied for table streams" in relay.log()
    operator.own("outbox db roles", ROLE=name)
    alarmed(address, later=600)


def wal_moves(url: str, mebibytes: int = 2) -> None:
    """Write so much into the WAL, and what the server writes by itself every few seconds."""
    padding = f"SELECT pg_logical_emit_message(false, 'pad', repeat('x', {mebibytes << 20}))"
    change(url, padding)
    change(url, "CHECKPOINT")


@pytest.fixture
def on_wal(outbox_kafka, settings) -> dict[str, Any]:
    """Settings of a relay that reads the WAL; the slot may keep a mebibyte."""
    settings["wal__slot"] = outbox_kafka.name("slot").replace("-", "_")
    settings["wal__retained_limit_bytes"] = 1 << 20
    return settings


@of("The slot is lost or keeps WAL")
def test_nobody_reads_the_slot(operator, on_wal, orders, address):
    """One that was set up and is not wanted; then one that is, and whose relay is missing."""
    url = orders.url
    set_up(url, on_wal)
    polling = operator.start()
    wal_moves(url)
    alarmed(address, "OutboxSlotRetainsWal")
    shown = operator.look("outbox cdc status")
    assert (shown.status, "ALERT" in shown.text, "nobody" in shown.text) == (1, True, True), shown.text
    operator.own("outbox cdc drop", SLOT=on_wal["wal__slot"])
    alarmed(address)
    polling.terminate()
    assert polling.wait() == 0
    to_wal(url, on_wal)
    orders.add(3)
    wal_moves(url)
    assert operator.look("outbox cdc status").status == 1
    operator.run_relay("OUTBOX_SOURCE=wal outbox relay run")
    orders.published(3)
    wait_until(lambda: streaming(url), what="the lanes to stream")
    orders.add(1)
    wait_until(lambda: wal_moves(url, 0) or not firing(scraped(address)), what="the slot to move")
    assert "The stream is whole." in operator.look("outbox cdc status").text


@of("The slot is lost or keeps WAL")
def test_an_old_transaction_keeps_wal(operator, on_wal, orders, address):
    url = orders.url
    to_wal(url, on_wal)
    operator.start(source="wal")
    wait_until(lambda: streaming(url), what="the lanes to stream")
    with forgotten(url, "SELECT pg_current_xact_id()") as pid:
        wal_moves(url)
        orders.add(3)
        orders.published(3)
        alarmed(address, "OutboxSlotRetainsWal")
        assert re.search(r"read by +server process \d+", operator.look("outbox cdc status").text)
        there = operator.follow("An old transaction")
        assert there.query("pg_stat_activity")[0]["pid"] == pid
        there.execute("pg_terminate_backend", PID=pid)
    wait_until(lambda: wal_moves(url, 0) or not firing(scraped(address)), what="the slot to move")


@of("The slot is lost or keeps WAL")
def test_the_slot_is_lost(operator, on_wal, orders, address):
    url = orders.url
    to_wal(url, on_wal)
    relay = operator.start(source="wal")
    wait_until(lambda: streaming(url), what="the lanes to stream")
    relay.terminate()
    assert relay.wait() == 0
    # A slot alone the relay would replace by itself.
    change(url, "DROP PUBLICATION outbox_relay")
    orders.add(3)
    operator.start(source="wal")
    wait_until(lambda: "OutboxSlotUnhealthy" in firing(scraped(address)), what="the alert")
    assert "PROBLEM" in operator.look("outbox cdc status").text
    operator.own("outbox cdc setup --repair")
    orders.published(3)
    alarmed(address)


@of("Duplicates are seen")
def test_a_relay_dies_before_it_has_settled_what_it_sent(operator, orders, outbox_relay):
    """The same event stands in its topic twice; also with an archive, which has one place of it."""
    relay = operator.start(env={VARIABLE: "batch.acknowledged=kill@1"})
    orders.add(1)
    assert relay.wait() == -9
    end_leases(orders.url)
    operator.start(relay__archive_days=1)
    found = orders.kafka.consume(orders.topic, 2)
    drained(orders.url)
    (event_id,) = {dict(message.headers())["ce_id"].decode() for message in found}
    shown = operator.look("outbox trace", EVENT_ID=event_id, TOPIC=orders.topic).text
    assert re.findall(rf"on Kafka .*{orders.topic}-0 offset (\d)", shown) == ["0", "1"], shown


# --- Consumers


class Consumer:
    """A consumer of a driver's topic that steps over what it reads, for there is no Spark; and what it shows.

    url  of the sink, where it is not the driver's.
    """

    def __init__(self, driver: Driver, address: str | None = None, url: str | None = None) -> None:
        kafka = {"bootstrap.servers": driver.topics.bootstrap_servers}
        job = ConsumerJob(group=GROUP, topics=[driver.topic], effect="SELECT 1")
        self.reports: list[tuple[str, dict[str, Any]]] = []
        self._url = url or driver.url
        self._metrics = ConsumerMetrics(GROUP, [driver.topic], self._url, "consumer", kafka)
        self._health = ConsumerHealth(300.0)
        self._registry = CollectorRegistry()
        self._registry.register(self._metrics)
        options = Options(self._url, kafka, patience=30.0, max_backoff_seconds=0.2)
        self.runner = Runner(None, job, options, self._report, self._health.succeeded, self._health.behind)
        # It looks each five seconds.
        self.runner._lock_monitor = lambda: LockMonitor(self._url, GROUP, self._report, 0.1)
        self.runner._rounds.apply = self._step_over
        if address is not None:
            serve(address, self._registry, "consumer.metrics_address", self._health.look)

    def samples(self) -> Samples:
        """Return what it shows to Prometheus."""
        return collected(self._registry)

    def alerts(self, before: Samples | None = None) -> set[str]:
        """Return which of the consumers' alerts fire."""
        return {alert for alert in firing(self.samples(), before) if alert.startswith("Consumer")}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run it in a thread."""
        stop = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(self.runner.continuous, stop)
            try:
                yield
            finally:
                stop.set()
            running.result(60)

    def _report(self, text: str, figures: Mapping[str, Any]) -> None:
        self.reports.append((text, dict(figures)))
        self._metrics.observe(text, figures)
        self._health.observe(text, figures)

    def _step_over(self, span: OffsetRanges, generation: int) -> Counts:
        self.runner._rounds._step_over(span, RoundState(), generation)
        return Counts()


@of("A consumer stands still")
def test_kafka_lost_what_a_group_had_not_read(operator, driver):
    for part in (0, 1):
        driver.send(part, 10)
    driver.meet()
    driver.read(0, 2)
    driver.read(1, 9)
    driver.delete_before(0, 5)
    consumer = Consumer(driver)
    with pytest.raises(DataLost, match="outbox offsets reset"):
        consumer.runner.once(threading.Event())
    before = consumer.samples()
    assert consumer.alerts() == {"ConsumerStandsStill"}
    assert "ConsumerGone" in firing({}, before)
    assert "1 losses that nobody has accepted: `outbox offsets show`" in operator.look("outbox status").text
    assert "retention" in operator.look("outbox offsets show", GROUP=GROUP).text
    operator.act("outbox offsets reset", GROUP=GROUP, TOPIC=driver.topic)
    # Where nothing was lost, it goes neither back nor on.
    assert driver.positions() == {0: 5, 1: 9}
    consumer = Consumer(driver)
    consumer.runner.once(threading.Event())
    assert driver.positions() == {0: 10, 1: 10}
    assert (consumer.alerts(before), "ConsumerGone" in firing(consumer.samples(), before)) == (set(), False)


@of("A consumer stands still")
def test_the_sink_is_away_and_then_locked(operator, driver, address):
    parts = urlsplit(driver.url)
    with TcpProxy("127.0.0.1", parts.port) as proxy:
        consumer = Consumer(driver, address, driver.url.replace(f":{parts.port}/", f":{proxy.port}/"))
        driver.send(0, 3)
        with consumer.running():
            wait_until(lambda: driver.positions().get(0) == 3, what="the first round")
            wait_until(lambda: "[+]servers ok" in operator.look("curl -s", CONSUMER=address).text, what="it to say so")
            proxy.stop()
            line = "[-]servers failed: waiting for "
            wait_until(lambda: line in operator.look("curl -s", CONSUMER=address).text, what="it to say so")
            assert consumer.alerts() == {"ConsumerServerAway"}
            proxy.start()
            wait_until(lambda: "[+]servers ok" in operator.look("curl -s", CONSUMER=address).text, what="it to say so")
            wait_until(lambda: consumer.alerts() == set(), what="the alert to be over")
            with forgotten(driver.url, "SELECT FROM consumer.offsets FOR UPDATE") as pid:
                driver.send(0, 4)
                waiting = wait_until(lambda: dict(consumer.reports).get("waiting for a lock"), what="the log")
                assert waiting["blocked_by"].startswith(f"session {pid} (forgetful")
                assert waiting["to_end_it"] == f"SELECT pg_terminate_backend({pid})"
                operator.execute("pg_terminate_backend", PID=pid)
            wait_until(lambda: driver.positions()[0] == 7, what="it to go on")


@of("A partition stands still")
def test_a_message_that_always_runs_into_a_limit_while_the_other_partition_moves(operator, driver):
    """The second of three messages; the sink ends its statement each time."""
    consumer = Consumer(driver)
    step_over = consumer.runner._rounds.apply

    def apply(span: OffsetRanges, generation: int) -> Counts:
        here = span.ranges.get((driver.topic, 0))
        if here is None or not here.start <= 1 < here.end:
            return step_over(span, generation)
        step_over(span.only([at for at in span.ranges if at != (driver.topic, 0)]), generation)
        failed = Interrupted(f"{driver.topic}-0: QueryCanceled: canceling statement due to statement timeout")
        failed.by_partition = {(driver.topic, 0): failed}
        raise failed

    consumer.runner._rounds.apply = apply
    consumer.runner._search = PoisonSearch()
    old = int(time.time() * 1000) - 600_000
    for part in (0, 1):
        driver.send(part, 3, timestamp=old)
    with consumer.running():
        found = wait_until(lambda: dict(consumer.reports).get("a partition stands still"), what="the log")
        assert (found["partition"], found["offset"]) == (0, 1)
        driver.rows(
            "UPDATE consumer.offsets SET updated_at = now() - interval '10 minutes' WHERE part = 0", result=False
        )
        driver.send(1, 2)
        wait_until(lambda: driver.positions() == {0: 1, 1: 5}, what="the other partition to move")
        assert consumer.alerts() == {"ConsumerPartitionStandsStill"}
        assert f"{driver.topic}-0 stands at offset 1 since " in operator.look("outbox status").text
        assert "2" in operator.look("outbox offsets show", GROUP=GROUP).text
    operator.act("outbox offsets set", GROUP=GROUP, TOPIC=driver.topic, PARTITION=0, OFFSET=2)
    consumer = Consumer(driver)
    consumer.runner.once(threading.Event())
    assert (driver.positions(), consumer.alerts()) == ({0: 3, 1: 5}, set())


@of("A consumer falls behind")
def test_a_hundred_thousand_messages_wait_in_one_partition(operator, driver):
    consumer = Consumer(driver)
    driver.send(1, 1)
    consumer.runner.once(threading.Event())
    before = consumer.samples()
    for _ in range(2):
        driver.send(0, 50_001)
    assert "ConsumerLagGrows" in consumer.alerts(before)
    shown = operator.look("outbox offsets show", GROUP=GROUP).text
    assert re.search(rf"{driver.topic}-0\b.*100[,.]?002", shown), shown
    consumer.runner.once(threading.Event())
    assert consumer.alerts() == set()


@of("A consumer is fenced")
def test_two_processes_run_one_group(operator, driver):
    """Each is started again when it has ended."""
    consumer = Consumer(driver)
    driver.send(0, 1)
    consumer.runner.once(threading.Event())
    before = consumer.samples()
    for _ in range(5):
        other, consumer = consumer, Consumer(driver)
        consumer.runner.once(threading.Event())
        with pytest.raises(Fenced, match="was taken over") as fenced:
            other.runner._round(None)
    assert consumer.alerts(before) == {"ConsumerFenced"}
    shown = operator.look("outbox consumers groups", GROUP=GROUP).text
    (owner,) = re.findall(r"generation 6, taken over by (\S+) at", shown)
    assert owner in str(fenced.value)
    # The other one is stopped.
    consumer.runner.once(threading.Event())
    assert consumer.alerts() == set()


def alarms(group: str, url: str, kafka: Any) -> set[str]:
    """Return which of the consumers' alerts fire for the group of a sink that reads the topic t."""
    registry = CollectorRegistry()
    registry.register(ConsumerMetrics(group, [], url, "consumer", {"bootstrap.servers": kafka.bootstrap_servers}))
    return {alert for alert in firing(collected(registry)) if alert.startswith("Consumer")}


@of("A message can't be applied")
def test_the_sink_refuses_messages(operator, outbox_postgres, outbox_kafka, monkeypatch):
    """What a task names becomes a dead letter; one is applied after all, one is not."""
    sink = NumbersSink(outbox_postgres.url)
    sink.begin([0, 1])
    sink.run("CREATE TABLE numbers (n int CONSTRAINT small CHECK (n < 100), place bigint)")
    report = sink.apply([(event_id(n), 100 + n) for n in range(2)])
    with psycopg.connect(sink.url) as connection:
        found = [
            DeadLetter(one, event_id(one.place[2]), b"k", b"{}", "[]", 0) for one in rejected_from(report["detail"])
        ]
        letters.write(connection.cursor(), "consumer", "g", "id", found)
    assert alarms("g", sink.url, outbox_kafka) == {"ConsumerDeadLetters"}
    listed = operator.act("outbox dead-letters list")
    assert "small" in listed
    first, second = re.findall(r"^(\d+) ", listed, re.MULTILINE)
    assert json.loads(operator.act("outbox dead-letters show", DEAD_LETTER=first))["reason"] == "failed"
    sink.run("ALTER TABLE numbers DROP CONSTRAINT small")
    operator.act("outbox dead-letters retry", DEAD_LETTER=first)
    operator.act("outbox dead-letters discard", DEAD_LETTER=second)
    assert alarms("g", sink.url, outbox_kafka) == set()
    asked = {("t", 0, 0): (int(first), "failed")}
    monkeypatch.setattr(task, "run", lambda plan, rows: task.run_retry(plan, asked, rows))
    assert (sink.apply([(event_id(0), 100)])["outcome"], sink.numbers()) == ("applied", [100])
    assert sink.run("SELECT count(*) FROM consumer.dead_letters") == [(0,)]


@of("A call is stuck")
def test_a_provider_fails(operator, sink, provider, outbox_kafka):
    """One call is made again, one is taken back."""
    external = payments(provider.url, max_attempts=2, cancel=True)
    for name in ("bad", "worse"):
        provider.tell(name, "500", "500")
    again, never = map(str, sink.reserve(external, [("bad", "k"), ("worse", "l")]))
    sink.reserve(external, [("behind", "k")])
    assert sink.drain(external)["stuck"] == 2
    assert alarms("orders", sink.url, outbox_kafka) == {"ConsumerEffectStuck"}
    listed = operator.act("outbox external list")
    assert re.search(rf"^{again} .*stuck, may have happened, 2 attempts, 1 wait behind it: .*HTTP 500", listed, re.M)
    operator.act("outbox external retry", MESSAGE_ID=again)
    operator.act("outbox external cancel", MESSAGE_ID=never)
    assert alarms("orders", sink.url, outbox_kafka) == set()
    sink.drain(external)
    assert sink.states() == {"bad": "confirmed", "behind": "confirmed", "worse": "cancelled"}
    assert alarms("orders", sink.url, outbox_kafka) == set()


# --- All of it


def test_every_step_was_taken(request):
    """Runs last; of a section only if all of its tests were to run."""
    ran = {item.name for item in request.session.items if item.module is request.module}
    checked = 0
    for section in SECTIONS.values():
        tests = {
            f"{name}[{section.anchor}]"
            for name, test in vars(request.module).items()
            for mark in getattr(test, "pytestmark", ())
            if mark.args[1] == [section]
        }
        if tests <= ran:
            assert section.steps - TYPED.get(section.title, set()) == set(), section.title
            checked += 1
    assert checked > 0
