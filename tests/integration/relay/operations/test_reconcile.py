"""``outbox relay reconcile``, run as a command, on outboxes of a real size."""

from __future__ import annotations

import json
import math
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from raw_kafka import HangingTransaction
from reconcile_support import Outbox, hanging, outbox, relay_settings, unverified
from support import IMPATIENT, wait_until

from outbox._app.settings import client_options
from relay.config import Settings, load, producer_options, state_topic_name
from relay.core.marker import Marker
from relay.database import Connector
from relay.kafka.offsets import Offsets
from relay.kafka.takeover import own_ids
from relay.operations import hidden_events, topic_scan
from relay.operations.hidden_events import abort_hanging
from relay.operations.holding import Holding
from relay.operations.lane_rows import _SETTLE_ROWS, LaneComparison
from relay.operations.reconcile import Reconciler

__all__ = ["hanging", "outbox", "unverified"]

NEVER = 0.2
"""How long commands wait here for what is ended by nothing. Transactions that are to be decided
for them must be awaited first (await_transactions)."""


def settings_of(outbox: Outbox) -> Settings:
    kafka = {"bootstrap.servers": outbox.kafka.bootstrap_servers}
    return load(database_url=outbox.url, name=outbox.name, delivery="exactly-once", kafka=kafka)


def filled(outbox: Outbox, *large: int) -> dict[int, int]:
    """Lanes 0 to 5 have lost their markers, with events that are on Kafka and some that are not; give how many are.

    Lane 2 has ``large`` many events of each kind.
    """
    keys = [outbox.keys(kind) for kind in (0, 1)]
    published: dict[int, int] = {}
    for lane in range(8):
        sizes = large if lane == 2 else (40, 30)
        for kind, size in enumerate(sizes):
            outbox.add(kind, keys[kind][lane], size)
        if lane < 6:
            rows = outbox.rows(lane)
            there = [row for number, row in enumerate(rows) if number % 5]
            outbox.publish(there)
            published[lane] = len(there)
    outbox.run("UPDATE outbox.lanes SET last_batch = 7 WHERE lane < 6")
    return published


def test_six_of_eight_lanes_with_many_rows_in_one_and_three_kills(outbox):
    published = filled(outbox, 26_000, 100)
    wanted = {row[1] for lane in range(6) for row in outbox.rows(lane)}
    others = [outbox.lane(lane) for lane in (6, 7)]
    looked = outbox.reconcile()
    assert looked.returncode == 1, looked.stderr
    states = {state["lane"]: state for state in json.loads(looked.stdout)["lanes"]}
    assert {lane: state["found"] for lane, state in states.items() if state["problem"]} == published
    assert states[2]["rows"] == 26_100
    killed = outbox.reconcile("--apply", "--reason", "at once", failpoints="reconcile.taken=kill")
    assert killed.returncode == -signal.SIGKILL
    # A lane settles its pages and then an empty one, so lanes 0 and 1 have four: the sixth is the large one's second of
    # three.
    killed = outbox.reconcile("--apply", "--reason", "first", failpoints="reconcile.settling=kill@6")
    assert killed.returncode == -signal.SIGKILL
    assert len(outbox.rows(2)) == 26_100 - 2 * _SETTLE_ROWS
    killed = outbox.reconcile("--apply", "--reason", "second", failpoints="reconcile.marking=kill")
    assert killed.returncode == -signal.SIGKILL
    # It does not wait long for the end of the markers' transaction, which is open.
    outbox.program, outbox.decide_seconds = IMPATIENT, 2.0
    repaired = outbox.reconcile("--apply", "--reason", "third")
    assert repaired.returncode == 0, repaired.stderr
    left = {row[1] for lane in range(6) for row in outbox.rows(lane)}
    assert left == wanted - outbox.published().keys()
    assert len(left) == len(wanted) - sum(published.values())
    # `outbox recover` has these only from there.
    settled = outbox.run(
        "SELECT jsonb_array_elements_text(details -> 'event_ids_on_kafka') FROM outbox.audit"
        " WHERE what = 'reconcile settles'"
    )
    assert {event_id for (event_id,) in settled} == wanted - left
    markers = outbox.state.last_markers(range(8))
    for lane in range(6):
        assert markers[lane].batch == 8
        row = outbox.lane(lane)
        assert (row["owner"], row["last_batch"], row["lease_until"]) == (None, 8, "-infinity")
        assert row["transactional_id"] is None
    assert [outbox.lane(lane) for lane in (6, 7)] == others
    # Each time, all six had their problem still.
    broken = "SELECT why, (details ->> 'lane')::integer FROM outbox.audit WHERE what = 'reconcile' ORDER BY id"
    assert outbox.run(broken) == [(why, lane) for why in ("at once", "first", "second", "third") for lane in range(6)]


def test_one_lane_alone_and_each_topic_once(outbox, monkeypatch):
    """In this process, to see how often the topics are read."""
    from relay.cli.relay import reconcile as command

    published = filled(outbox, 300, 100)
    before = {lane: outbox.lane(lane) for lane in range(8) if lane != 3}
    read: list[list[str]] = []

    class Counted(topic_scan.Consumer):
        def assign(self, partitions) -> None:
            read.append(sorted({partition.topic for partition in partitions}))
            super().assign(partitions)

    monkeypatch.setattr(topic_scan, "Consumer", Counted)
    monkeypatch.setenv("OUTBOX_KAFKA__BOOTSTRAP_SERVERS", outbox.kafka.bootstrap_servers)
    monkeypatch.setenv("OUTBOX_NAME", outbox.name)
    command(lane=[3], apply=True, reason="one", database_url=outbox.url, as_json=True)
    assert read == [sorted(outbox.topics)]
    assert {lane: outbox.lane(lane) for lane in before} == before
    assert outbox.lane(3)["last_batch"] == 8
    assert len(outbox.rows(3)) == 70 - published[3]
    read.clear()
    command(lane=None, apply=True, reason="all", database_url=outbox.url, as_json=True)
    assert read == [sorted(outbox.topics)]
    assert sum(len(outbox.rows(lane)) for lane in range(6)) == 750 - sum(published.values())


def test_what_is_settled_goes_into_the_archive_and_another_event_under_its_id_does_not(outbox):
    """As after a restore, where a writer gives ids of its own making: that event is published."""
    outbox.add(0, outbox.keys(0)[1], 5)
    rows = outbox.rows(1)
    outbox.publish(rows[:4])
    outbox.run("UPDATE outbox.lanes SET last_batch = 7 WHERE lane = 1")
    outbox.run("UPDATE outbox.events SET payload = '{\"n\": 77}' WHERE id = %s", rows[2][0])
    outbox.program = IMPATIENT
    with psycopg.connect(outbox.url) as other:
        other.execute("SELECT FROM outbox.lanes WHERE lane = 1 FOR UPDATE")
        done = outbox.reconcile("--apply", "--reason", "locked")
    assert done.returncode == 1
    assert "lane 1: another session has its row in outbox.lanes locked" in done.stderr
    assert outbox.rows(1) == rows
    outbox.program = Outbox.program
    archived = {"RELAY__ARCHIVE_DAYS": "7"}
    done = outbox.command("relay", "reconcile", "--apply", "--reason", "archived", settings=archived)
    assert done.returncode == 0, done.stderr
    assert outbox.rows(1) == [rows[2], rows[4]]
    kept = outbox.run("SELECT event_id::text FROM outbox.published ORDER BY id")
    assert [event_id for (event_id,) in kept] == [rows[number][1] for number in (0, 1, 3)]


def test_a_relay_that_lives_loses_the_lanes_that_are_repaired_and_no_others(outbox, outbox_relay):
    """It goes on with them without a second repair, if the first one is killed when the markers are written."""
    keys = outbox.keys(0)
    # No lane may change hands because the machine stands still.
    settings = {"name": outbox.name, "delivery": "exactly-once", "relay__max_backoff_seconds": 0.5}
    settings["relay__lease_seconds"] = 15
    relay = outbox_relay(**settings)
    for lane in range(8):
        outbox.add(0, keys[lane], 50)
    wait_until(lambda: outbox.left() == 0, 60, "the outbox to drain")
    relay.terminate()
    relay.wait()
    # Lane 5 only: its marker is older than its batch.
    outbox.run("UPDATE outbox.lanes SET last_batch = last_batch + 5 WHERE lane = 5")
    for lane in range(8):
        outbox.add(0, keys[lane], 50)
    outbox.publish(outbox.rows(5)[:20])
    relay = outbox_relay(**settings)
    relay.wait_for_log("outbox relay reconcile")
    wait_until(lambda: outbox.left(" WHERE lane <> 5") == 0, 60, "the others")
    epochs = dict(outbox.run("SELECT lane, epoch FROM outbox.lanes WHERE lane <> 5"))
    killed = outbox.reconcile("--apply", "--reason", "beside a relay", failpoints="reconcile.marked=kill")
    assert killed.returncode == -signal.SIGKILL
    outbox.run("UPDATE outbox.lanes SET lease_until = '-infinity' WHERE lane = 5")
    wait_until(lambda: outbox.left() == 0, 60, "lane 5")
    assert dict(outbox.run("SELECT lane, epoch FROM outbox.lanes WHERE lane <> 5")) == epochs
    found = outbox.published()
    assert len(found) == 800
    assert set(found.values()) == {1}
    relay.terminate()
    assert relay.wait() == 0


@pytest.fixture
def beside(outbox, monkeypatch):
    """Look at lanes as beside a relay that writes a marker of lane 3 whenever the markers are to be read."""
    desk = Reconciler(settings_of(outbox))
    read = desk._state.read
    producer = Producer({"bootstrap.servers": outbox.kafka.bootstrap_servers})

    def look(markers: Iterator[Marker]) -> dict[int, LaneComparison]:
        def written(lanes, **options):
            # No marker is left if it reads again and again.
            producer.produce(outbox.state.name, next(markers).encode(), b"marker", partition=3)
            assert producer.flush(30) == 0
            return read(lanes, **options)

        monkeypatch.setattr(desk._state, "read", written)
        return {state.lane: state for state in desk.look(search=False).lanes}

    yield look
    desk.close()


def test_a_lane_that_is_faster_than_its_marker_is_read_has_no_problem(outbox, beside):
    outbox.run("UPDATE outbox.lanes SET last_batch = 1 WHERE lane IN (3, 5)")

    def markers() -> Iterator[Marker]:
        for batch in (4, 7, 10):
            outbox.run("UPDATE outbox.lanes SET last_batch = %s WHERE lane = 3", batch)
            # Of rows that are settled by the time that they are looked for.
            yield outbox.marker(batch - 1, [(1, str(uuid.uuid4()))])

    states = beside(markers())
    assert states[3].problem is None
    # Another one that has a problem, and stands still, is found beside it.
    assert "the state topic holds no marker" in (states[5].problem or "")


def test_what_is_committed_while_the_markers_are_read_is_not_lost(outbox, beside):
    outbox.run("UPDATE outbox.lanes SET last_batch = 7 WHERE lane = 3")

    def markers() -> Iterator[Marker]:
        outbox.add(0, outbox.keys(0)[3], 1)
        [(end,)] = outbox.run("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint")
        yield replace(outbox.marker(7), commit_lsn=end - 1)

    assert beside(markers())[3].problem is None


def test_the_writer_of_the_last_marker_is_fenced_too(outbox):
    """As after a failover that has lost what the row said of it."""
    writer = f"{outbox.name}.relay.isolated"
    options = {"bootstrap.servers": outbox.kafka.bootstrap_servers, "transactional.id": own_ids(writer)[1]}
    isolated = Producer(options)
    isolated.init_transactions(30)

    def publish() -> None:
        isolated.begin_transaction()
        marker = replace(outbox.marker(5), writer=writer)
        isolated.produce(outbox.state.name, marker.encode(), b"marker", partition=3)
        isolated.commit_transaction(30)

    outbox.run("UPDATE outbox.lanes SET last_batch = 1 WHERE lane = 3")
    publish()
    outbox.kafka.await_transactions(outbox.state.name)
    done = outbox.reconcile("--apply", "--reason", "failover")
    assert done.returncode == 0, done.stderr
    with pytest.raises(KafkaException, match=r"(?i)fenced|epoch"):
        publish()
    assert outbox.state.last_markers([3])[3].batch == 6


def test_an_outbox_of_another_name_is_not_repaired(outbox):
    """Its markers would be missed in the state topic of this name, and the lanes of its relays would stop."""
    outbox.run("UPDATE outbox.lanes SET last_batch = 7, transactional_id = %s", f"{outbox.name}.relay.alive")
    before = [outbox.lane(lane) for lane in range(8)]
    other = {"NAME": f"{outbox.name}-other"}
    repair = ("relay", "reconcile", "--apply", "--reason", "?")
    recover = ("recover", "--since", "2020-01-01", "--reason", "?")
    for command in (("relay", "reconcile"), repair, ("relay", "upgraded", "--reason", "?"), recover):
        done = outbox.command(*command, settings=other)
        assert done.returncode == 1, done.stdout
        assert (
            f"a relay with another OUTBOX_NAME had lane 0 (transactional id '{outbox.name}.relay.alive')" in done.stderr
        )
    assert [outbox.lane(lane) for lane in range(8)] == before
    assert outbox.run("SELECT FROM outbox.audit") == []


# -- partitions that wait for the end of a transaction


def test_a_take_over_stops_before_what_is_undecided_and_reconcile_publishes_it_once(hanging, outbox_relay):
    """Part of the batch is committed, and the first repair is killed when it has settled that: it goes out no more."""
    hanging.batch, visible = hanging.batch[:7], hanging.batch[7:]
    hanging.publish(visible)
    hanging.hang()
    relay = outbox_relay(**relay_settings(hanging))
    relay.wait_for_log("KAFKA-20734", 60)
    wait_until(lambda: not hanging.rows(1), 60, "the other lane")
    assert len(hanging.rows(0)) == 10
    undecided = {(hanging.state.name, 0), *((topic, 1) for topic in hanging.topics)}
    # A commit of the other lane is answered before its markers are written.
    wait_until(lambda: hanging.undecided() == undecided, what="the other lane's transaction to end")
    looked = hanging.reconcile()
    assert looked.returncode == 1
    said = json.loads(looked.stdout)
    assert "neither committed nor aborted" in said["lanes"][0]["problem"]
    assert said["lanes"][1]["problem"] is None
    orders, invoices = hanging.topics
    assert {(part["topic"], part["partition"]): (part["events"], part["held"]) for part in said["hanging"]} == {
        (orders, 1): (5, 5),
        (invoices, 1): (2, 2),
    }
    assert all("--start-offset" in part["command"] for part in said["hanging"])
    assert hanging.undecided() == undecided
    relay.terminate()
    relay.wait()
    killed = hanging.reconcile("--apply", "--reason", "the broker lost them", failpoints="reconcile.settled=kill")
    assert killed.returncode == -signal.SIGKILL
    hanging.run("UPDATE outbox.lanes SET lease_until = '-infinity'")
    relay = outbox_relay(**relay_settings(hanging))
    relay.wait_for_log("KAFKA-20734", 60)
    assert hanging.rows(0) == hanging.batch
    done = hanging.reconcile("--apply", "--reason", "again")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not hanging.rows(0), 60, "the lane to go on")
    relay.terminate()
    assert relay.wait() == 0
    assert hanging.published() == Counter(row[1] for row in hanging.batch + visible + hanging.other)
    wait_until(lambda: hanging.undecided() == set(), what="all transactions to end")
    assert hanging.reconcile().returncode == 0


def test_a_kill_while_what_hangs_is_ended_doubles_nothing(hanging, outbox_relay):
    """Part of the batch is committed: it may go out again at no time. A relay goes on without a second repair."""
    hanging.batch, visible = hanging.batch[:7], hanging.batch[7:]
    hanging.publish(visible)
    hanging.hang()
    killed = hanging.reconcile("--apply", "--reason", "first", failpoints="reconcile.decided=kill")
    assert killed.returncode == -signal.SIGKILL
    hanging.run("UPDATE outbox.lanes SET lease_until = '-infinity'")
    relay = outbox_relay(**relay_settings(hanging))
    wait_until(lambda: not hanging.rows(0) and not hanging.rows(1), 60, "the outbox to drain")
    relay.terminate()
    assert relay.wait() == 0
    assert hanging.published() == Counter(row[1] for row in hanging.batch + visible + hanging.other)


def test_what_the_outbox_has_no_more_is_not_aborted(hanging):
    hanging.decide_seconds = NEVER
    hanging.hang()
    lost = hanging.batch[0]
    hanging.run("DELETE FROM outbox.events WHERE id = %s", lost[0])
    before = hanging.undecided()
    done = hanging.reconcile("--apply", "--reason", "try")
    assert done.returncode == 1
    assert "of 5 events behind offset 0, which waits for the end of a transaction, the outbox has only 4" in done.stderr
    assert "kafka-transactions.sh" in done.stderr
    # What to do, with all that it needs.
    assert f"outbox replay --event-id {lost[1]};" in done.stderr
    assert "kafka-console-consumer.sh" in done.stderr
    looked = json.loads(hanging.reconcile().stdout)["hanging"]
    assert [part["missing"] for part in looked if part["missing"]] == [[lost[1]]]
    assert hanging.undecided() == before
    assert len(hanging.rows(0)) == 9
    assert hanging.lane(0)["transactional_id"] == hanging.former
    assert hanging.lane(0)["owner"] is None


def test_the_row_of_an_event_is_not_that_of_its_copy(hanging):
    """The event was put back, and its copy for a dead-letter topic, which has its id, is settled."""
    hanging.decide_seconds = NEVER
    (_, event_id, topic, key), *_ = hanging.batch
    transaction = HangingTransaction(hanging.kafka.bootstrap_servers, hanging.id)
    headers = {"ce_id": event_id}
    both = [(key.encode(), b"{}", headers), (key.encode(), b"{}", headers | {"outbox-dead-letter": "too large"})]
    transaction.write(topic, 1, both, int(time.time() * 1000) - 10_000)
    before = hanging.undecided()
    [part] = json.loads(hanging.reconcile().stdout)["hanging"]
    assert (part["events"], part["held"], part["missing"]) == (2, 1, [event_id])
    done = hanging.reconcile("--apply", "--reason", "try")
    assert (done.returncode, "of 2 events" in done.stderr, hanging.undecided()) == (1, True, before), done.stderr


def test_a_repair_that_leaves_settled_events_hidden_is_no_success(hanging):
    """No lane waits for them, and the outbox has none of their rows: nothing else would tell."""
    hanging.decide_seconds = NEVER
    hanging.hang(state=False)
    hanging.run("DELETE FROM outbox.events")
    before = hanging.undecided()
    apply = ("--apply", "--reason", "try")
    done = hanging.reconcile(*apply)
    assert [(part["events"], part["held"]) for part in json.loads(done.stdout)["hanging"]] == [(5, 0), (5, 0)]
    assert done.returncode == 1
    done = hanging.command("relay", "reconcile", *apply)
    assert (done.returncode, done.stdout.count("it is left alone. Kafka has 5 events")) == (1, 2), done.stdout
    assert f"outbox replay --event-id {hanging.batch[0][1]}" in done.stdout
    assert hanging.undecided() == before


def test_a_transaction_of_another_program_is_named_and_left_alone(hanging):
    hanging.decide_seconds = NEVER
    other = hanging.other_program(hanging.state.name, 0)
    done = hanging.reconcile("--apply", "--reason", "try")
    assert done.returncode == 1
    assert "the end of a transaction of another producer than the lanes' rows name" in done.stderr
    assert f"abort --topic {hanging.state.name} --partition 0 --start-offset" in done.stderr
    other.abort_transaction(30)
    hanging.kafka.await_transactions(hanging.state.name)
    assert hanging.reconcile().returncode == 0
    # Among the events it remains, and is no success.
    other = hanging.other_program(hanging.topics[0], 0)
    for arguments in ((), ("--apply", "--reason", "try")):
        done = hanging.reconcile(*arguments)
        assert (done.returncode, [part["events"] for part in json.loads(done.stdout)["hanging"]]) == (1, [0])
    other.abort_transaction(30)
    hanging.kafka.await_transactions(hanging.topics[0])
    assert hanging.reconcile().returncode == 0


def test_what_hangs_is_ended_for_good(hanging, monkeypatch):
    """Nothing of it comes back when the broker is asked for committed records; what follows it does."""
    monkeypatch.setattr(hidden_events, "_DECIDE_SECONDS", 1.0)
    hanging.hang(state=False)
    hanging.publish(hanging.other)
    settings = settings_of(hanging)
    assert state_topic_name(settings) == hanging.state.name
    options = client_options(settings)
    offsets = Offsets(options)
    undecided = offsets.await_decided(offsets.high(offsets.partitions(set(hanging.topics))), 0.0)
    assert len(undecided) == 2
    assert abort_hanging(producer_options(settings), options, [f"{hanging.name}.nobody"], undecided) == undecided
    assert abort_hanging(producer_options(settings), options, [hanging.id], undecided) == []
    assert hanging.published() == Counter(row[1] for row in hanging.other)
    consumer = Consumer({**options, "group.id": "test", "isolation.level": "read_uncommitted"})
    consumer.assign([TopicPartition(hanging.topics[0], 1, 0)])
    assert len(consumer.consume(5, 30)) == 5
    consumer.close()


def test_the_leases_of_other_lanes_are_renewed_while_one_is_settled(outbox, monkeypatch, caplog):
    """A large batch takes longer than a lease lasts. A lane whose row is locked at the end is named."""
    monkeypatch.setattr("relay.operations.holding._RENEW_SECONDS", 0.1)
    monkeypatch.setattr("relay.lanes._DUE_PART", math.inf)

    def renewed() -> set[int]:
        return {lane for (lane,) in outbox.run("SELECT lane FROM outbox.lanes WHERE lease_until > clock_timestamp()")}

    with psycopg.connect(outbox.url) as locking, Holding(Connector(outbox.url, "test"), "outbox") as holding:
        with psycopg.connect(outbox.url) as settling:
            settling.execute("SELECT FROM outbox.lanes WHERE lane = 1 FOR UPDATE")
            with psycopg.connect(outbox.url) as admin:
                admin.execute("UPDATE outbox.lanes SET owner = %s WHERE lane IN (0, 2)", (holding.owner,))
            for lane in (0, 1, 2):
                holding.add(lane, outbox.lane(lane)["epoch"], [])
            wait_until(lambda: renewed() == {0, 2}, 10, "the others to be renewed")
            settling.execute("UPDATE outbox.lanes SET owner = %s WHERE lane = 1", (holding.owner,))
        wait_until(lambda: renewed() == {0, 1, 2}, 10, "the settled one to be renewed")
        locking.execute("SELECT FROM outbox.lanes WHERE lane = 2 FOR UPDATE")
    assert renewed() == {2}
    assert "held lanes [2] were not released, as their rows are locked" in caplog.text
