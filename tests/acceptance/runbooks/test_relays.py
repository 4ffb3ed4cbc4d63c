"""The runbooks of relays and their database. Each shows the cause of its failure, and its way out ends it.

Commands and queries come out of docs/operations/runbooks.md itself; see runbooks.py. They are run with the rights that
the page names. ``firing`` evaluates the real alert rules on what real relays and consumers show.
"""

from __future__ import annotations

import json
import os
import re

import psycopg
from alerting import firing, scraped
from failing_relays import let_pass
from pause_support import pause
from rows_and_roles import execute
from runbook_support import alarmed, every_step_was_taken, forgotten, of, shows
from support import drained, end_leases, ends, look_up, owners, wait_until

from outbox import Event, Outbox
from outbox.sandbox._ports import free_ports
from relay.core.pauses import ALL, scopes_of
from relay.failpoints import VARIABLE


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
        lambda: "no relay is running, and 3 events waiting" in operator.look("outbox status").text, what="the lease"
    )
    assert " gone " in operator.look("outbox status").text
    assert operator.look("curl -s", RELAY=address).status == 7
    assert "relay stopped" not in relay.log()
    relay = operator.run_relay("outbox relay run")
    orders.published(4)
    alarmed(address)
    ends(relay)
    assert "relay stopped" in relay.log().splitlines()[-1]
    # One that does not reach Postgres.
    relay = operator.start(database_url="postgresql://127.0.0.1:1/x")
    line = "[-]control-loop failed: postgres_unavailable"
    wait_until(lambda: line in operator.look("curl -s", RELAY=address).text, what="it to say so")
    wait_until(lambda: "waiting for Postgres" in relay.log(), what="its log")
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


@of("The backlog grows")
def test_the_backlog_grows(operator, orders, address):
    """A forgotten session has locked the events; and more relays share the lanes."""
    url = orders.url
    # No lane is lost, which is an alert too, while the others start beside it.
    lease = {"relay__lease_seconds": 20}
    relay = operator.start(relay__instance="first", **lease)
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
    more = operator.run_relay("outbox relay run --workers", relay__metrics_address=None, **lease)
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
    execute(orders.url, f"SELECT pg_create_logical_replication_slot('{outbox_postgres.name}', 'pgoutput')")
    slots = {row["slot_name"]: row for row in operator.query("pg_replication_slots")}
    assert slots[outbox_postgres.name]["catalog_xmin_age"] is not None
    assert not slots[outbox_postgres.name]["active"]
    execute(orders.url, f"SELECT pg_drop_replication_slot('{outbox_postgres.name}')")


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
    ends(relay)
    execute(url, "UPDATE outbox.lanes SET last_batch = last_batch + 50 WHERE lane = 2")
    operator.start()
    orders.add(20)
    line = "[-]lane-2 failed: state_lost"
    wait_until(lambda: line in operator.look("curl -s", RELAY=address).text, what="the reason")
    alarmed(address, "OutboxRelayNotReady")
    shown = operator.own("outbox relay reconcile", status=1)
    assert re.search(r"^lane 2: .*marker", shown, re.MULTILINE)
    assert len(re.findall(": consistent", shown)) == 3
    operator.own("outbox relay reconcile --lane", LANE=2)
    orders.published(40)
    alarmed(address)


@of("A lane stands still")
def test_postgres_refuses(operator, orders, address):
    """A trigger of somebody else's."""
    url = orders.url
    execute(
        url,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'kept by law'; END $$;"
        "CREATE TRIGGER kept BEFORE DELETE ON outbox.events FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    relay = operator.start()
    orders.add(20)
    wait_until(lambda: ": postgres_refuses for " in operator.look("curl -s", RELAY=address).text, what="the reason")
    assert "kept by law" in relay.log()
    execute(url, "DROP TRIGGER kept ON outbox.events")
    orders.published(20)
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


@of("Relays are missing")
def test_one_relay_runs_where_two_should(operator, orders, address):
    other = f"127.0.0.1:{free_ports(1)[0]}"
    operator.start(relay__expected_relays=2)
    alarmed(address, "OutboxRelaysMissing")
    assert operator.look("outbox status").text.count("running") == 1
    operator.start(relay__expected_relays=2, relay__metrics_address=other)
    wait_until(lambda: firing(scraped(address, other)) == set(), what="the alert to be over")


@of("A scheduled event is overdue")
def test_a_session_has_a_scheduled_event_locked(operator, orders, address):
    execute(
        orders.url,
        "INSERT INTO outbox.scheduled (event_id, aggregate_type, aggregate_id, event_type, payload, not_before) "
        f"VALUES (gen_random_uuid(), '{orders.kind}', 'k', 'T', '{{}}', now() - interval '10 minutes')",
    )
    with forgotten(orders.url, "SELECT FROM outbox.scheduled FOR UPDATE"):
        operator.start()
        alarmed(address, "OutboxScheduledOverdue")
        assert "a scheduled event is overdue by 6" in operator.look("outbox status").text
    orders.published(1)
    alarmed(address)


def slot_is_fine(checks: str) -> str:
    return "" if "[-]upkeep-slot" in checks else checks


@of("Upkeep fails")
def test_the_relay_lacks_a_right(operator, orders, address, role, outbox_postgres):
    name = role("relay")
    execute(orders.url, f"REVOKE SELECT ON outbox.streams FROM {name}")
    relay = operator.start(database_url=orders.url.replace("postgres@", f"{name}@"))
    orders.add(3)
    orders.published(3)
    alarmed(address, "OutboxUpkeepFails", later=600)
    shown = operator.look("curl -s", RELAY=address).text
    assert re.search(r"\[-\]upkeep-slot failed: for \d+ s \(leaves it ready\)", shown)
    assert "permission denied for table streams" in relay.log()
    operator.own("outbox db roles relay=ROLE", ROLE=name)
    shown = wait_until(lambda: slot_is_fine(operator.look("curl -s", RELAY=address).text), what="the slot's check")
    # The outbox's database has consumers' tables too: what a role may not read there is not shown, and is no failure.
    assert "[-]upkeep-groups" not in shown
    assert "consumer groups are not shown" in relay.log()
    operator.own("outbox db roles consumer-monitor=ROLE", ROLE=name)
    alarmed(address, later=600)


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


def test_every_step_was_taken(request):
    """Runs last; of a section only if all of its tests were to run."""
    every_step_was_taken(request)
