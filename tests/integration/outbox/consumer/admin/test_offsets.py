"""What Kafka loses, and where groups begin, on real Kafka and Postgres. The driver runs without Spark."""

from __future__ import annotations

import re

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from offsets_driver import GROUP, Driver, driver
from psycopg.types.json import Jsonb
from reconcile_support import other_program
from support import wait_until

from outbox.consumer import kafka_admin
from outbox.consumer.admin import status
from outbox.consumer.admin.offsets import SHOWN_LOSSES
from outbox.consumer.errors import DataLost, TopicRecreated
from outbox.consumer.kafka_admin import TopicMissing
from outbox.consumer.model import Loss, LossKind, OffsetBounds
from outbox.errors import NotFound, OperationRefused
from spark_jobs.postgres.group_store import AddedEnds

__all__ = ["driver"]


def test_retention_that_was_faster_is_recorded_once_grows_and_is_accepted(driver):
    for part in (0, 1):
        driver.send(part, 10)
    driver.meet()
    driver.read(0, 2)
    driver.read(1, 10)
    driver.delete_before(0, 5)
    command = f"outbox offsets reset {GROUP} --topic {driver.topic} --to loss --reason …"
    with pytest.raises(DataLost, match="retention removed messages 2 to 4") as caught:
        driver.look()
    assert f"`{command}`" in str(caught.value)
    assert driver.losses() == [(0, "retention", 2, 5, False)]
    # While the group stands retention goes on: the same record, larger.
    driver.delete_before(0, 7)
    for _ in range(2):
        driver.runner = driver.start()
        with pytest.raises(DataLost):
            driver.look()
    assert driver.losses() == [(0, "retention", 2, 7, False)]
    assert driver.positions() == {0: 2, 1: 10}
    before = driver.generation()
    moved = driver.offsets().reset(GROUP, driver.topic, "loss", "counted by hand")
    # Nothing that Kafka still has was passed over: no --skip was needed.
    assert [(one.part, one.before, one.after, one.skipped) for one in moved.moves] == [
        (0, 2, 7, None),
        (1, 10, 10, None),
    ]
    assert driver.losses() == [(0, "retention", 2, 7, True)]
    assert driver.positions() == {0: 7, 1: 10}
    assert moved.generation == driver.generation() == before + 1
    [(what, why, details)] = driver.audit()
    assert (what, why, details["to"], details["generation"]) == ("offsets reset", "counted by hand", "loss", before + 1)
    assert details["partitions"][0]["before"] == 2
    assert details["losses"] == 1
    driver.runner = driver.start()
    driver.runner._begin()
    driver.read(0, 10)
    driver.look()
    # A second loss of that place is a record of its own.
    driver.send(0, 5)
    driver.delete_before(0, 12)
    with pytest.raises(DataLost):
        driver.look()
    assert driver.losses()[1:] == [(0, "retention", 10, 12, False)]


def test_a_hundred_thousand_messages_that_were_given_up_do_not_hide_what_halts_the_group(driver):
    driver.send(0, 10)
    driver.meet()
    driver.read(0, 2)
    driver.delete_before(0, 7)
    driver.rows(
        "INSERT INTO consumer.losses (grp, topic, topic_id, part, first_offset, end_offset, kind, detail) "
        "SELECT grp, topic, topic_id, 0, n, n + 1, 'given-up', 'why' "
        "FROM consumer.offsets, generate_series(1000000, 1099999) n WHERE part = 0",
        result=False,
    )
    with pytest.raises(DataLost):
        driver.look()
    [group], _ = driver.offsets().show(GROUP)
    assert (group.open_losses, len(group.losses), group.losses[0]["kind"]) == (100_001, SHOWN_LOSSES, "retention")
    shown = driver.command("show", "--group", GROUP).stdout
    assert "and 99,001 losses more" in shown
    # Their topics come behind all that is shown.
    others = [f"{driver.topic}-{end}" for end in "zy"]
    driver.rows(
        "INSERT INTO consumer.losses (grp, topic, topic_id, part, first_offset, end_offset, kind, detail) "
        "SELECT %s, topic, 'id', 0, 1, 2, 'given-up', 'why' FROM unnest(%s::text[]) AS topic",
        GROUP,
        others,
        result=False,
    )
    shown = driver.command("show", "--group", GROUP).stdout
    assert re.findall(r"--topic (\S+) --to loss", shown) == [driver.topic, *sorted(others)]
    assert {loss["topic"] for loss in driver.offsets().show(GROUP)[0][0].losses} == {driver.topic}
    [group], _ = driver.offsets().show(GROUP, losses=0)
    assert (group.open_losses, group.losses, group.lost_topics) == (100_003, [], [driver.topic, *sorted(others)])
    for topic in others:
        driver.offsets().forget(GROUP, topic, "why")
    offsets = driver.offsets()
    [state], _, _ = status.look(offsets._connection, "consumer", offsets._kafka)
    assert state.losses == 100_001
    moved = driver.offsets().reset(GROUP, driver.topic, "loss", "counted")
    assert (len(moved.accepted), driver.positions()[0]) == (100_001, 7)
    assert driver.audit()[-1][2]["losses"] == 100_001
    [group], _ = driver.offsets().show(GROUP)
    assert (group.open_losses, group.losses) == (0, [])


@pytest.mark.parametrize(("partitions", "messages"), [(1, 1), (3, 9)])
def test_a_topic_that_was_created_again(driver, partitions, messages):
    """Shorter than the group's position, with fewer partitions; or longer, with more."""
    for part in (0, 1):
        driver.send(part, 5)
    driver.meet()
    driver.read(0, 5)
    driver.read(1, 4)
    driver.create_again(partitions)
    driver.send(0, messages)
    with pytest.raises(TopicRecreated, match="created again"):
        driver.look()
    assert driver.losses() == [(0, "recreated", 5, None, False), (1, "recreated", 4, None, False)]
    with pytest.raises(OperationRefused, match=f"skips offsets.*{driver.topic}-0 0 to {messages - 1}"):
        driver.offsets().reset(GROUP, driver.topic, "latest", "why")
    assert driver.losses()[0][-1] is False
    if partitions == 1:
        # An inbox would leave the dead letters of a partition with offsets to who reads it.
        with pytest.raises(OperationRefused, match=f"offsets of partition 1.*reset {GROUP} .*--to loss"):
            driver.offsets().reset(GROUP, driver.topic, 0, "why", part=0)
        assert driver.positions() == {0: 5, 1: 4}
    moved = driver.offsets().reset(GROUP, driver.topic, "loss", "made anew for more partitions")
    assert len(moved.accepted) == 2
    # A partition that the group has not met is picked up by the next round, and one that is gone is forgotten.
    assert driver.positions() == dict.fromkeys(range(min(partitions, 2)), 0)
    [(topic_id,)] = driver.rows("SELECT DISTINCT topic_id FROM consumer.offsets")
    assert topic_id == driver.runner._kafka.look([driver.topic])[0][driver.topic]
    driver.runner = driver.start()
    driver.runner._begin()
    driver.meet()
    driver.read(0, messages)
    driver.look()
    assert len(driver.positions()) == partitions


def test_a_topic_that_is_gone(driver, monkeypatch):
    monkeypatch.setattr(kafka_admin, "_UNHEARD_SECONDS", 0.3)
    driver.send(0, 3)
    driver.meet()
    driver.read(0, 2)
    driver.delete()
    with pytest.raises(TopicRecreated, match="the topic is gone") as caught:
        driver.look()
    assert f"`outbox offsets forget {GROUP} --topic" in str(caught.value)
    assert driver.losses() == [(0, "recreated", 2, None, False), (1, "recreated", 0, None, False)]
    with pytest.raises(TopicMissing, match="outbox offsets forget"):
        driver.offsets().reset(GROUP, driver.topic, "loss", "why")
    [group], away = driver.offsets().show(GROUP)
    assert away is None
    assert {one.trouble for one in group.positions} == {"the topic is gone"}
    planned = driver.offsets().forget(GROUP, driver.topic, "why", dry_run=True)
    assert [one.after for one in planned.moves] == [None, None]
    assert len(driver.positions()) == 2
    said = driver.command("forget", GROUP, "--topic", driver.topic, "--reason", "moved to another cluster")
    assert f"{driver.topic}-0: 2 → -  (forgotten)" in said.stdout
    assert driver.positions() == {}
    assert {row[-1] for row in driver.losses()} == {True}
    assert driver.audit()[0][:2] == ("offsets forget", "moved to another cluster")
    with pytest.raises(NotFound, match="knows nothing"):
        driver.offsets().forget(GROUP, driver.topic, "why")
    # Nobody has read it now: an ordinary mistake in the job, and no loss.
    driver.runner = driver.start()
    with pytest.raises(TopicMissing):
        driver.look()
    assert len(driver.losses()) == 2


def test_partitions_that_are_added_begin_at_0_unless_messages_went_before(driver):
    driver.look()
    assert driver.positions() == {0: 0, 1: 0}
    driver.add_partitions(4)
    driver.send(3, 6)
    driver.delete_before(3, 4)
    with pytest.raises(DataLost, match="never read it and its first 4 messages") as caught:
        driver.look()
    assert [loss.part for loss in caught.value.losses] == [3]
    assert driver.losses() == [(3, "retention", 0, 4, False)]
    assert driver.positions() == {0: 0, 1: 0}
    moved = driver.offsets().reset(GROUP, driver.topic, "loss", "why")
    assert [(one.part, one.before, one.after) for one in moved.moves] == [(0, 0, 0), (1, 0, 0), (3, None, 4)]
    driver.runner = driver.start()
    driver.runner._begin()
    driver.read(3, 6)
    driver.look()
    # The other one is none of the group's before it has messages.
    assert driver.positions() == {0: 0, 1: 0, 3: 6}
    driver.send(2, 1)
    assert driver.step() == {2: (0, 1)}


@pytest.mark.parametrize("restarted", [False, True])
def test_the_others_are_read_to_where_they_ended_when_one_was_added(driver, restarted):
    """However far ahead of the others one is: a key may have moved into it."""
    driver.send(0, 10)
    driver.meet()
    driver.runner = driver.start(most=4)
    assert driver.step() == {0: (0, 4)}
    driver.add_partitions(3)
    assert driver.step() == {0: (4, 8)}
    driver.send(1, 1)
    if restarted:
        driver.runner = driver.start(most=4)
    assert driver.step() == {0: (8, 10)}
    assert driver.step() == {1: (0, 1)}


def test_the_ends_that_a_driver_of_version_0_1_has_noted_are_waited_for(driver):
    driver.meet()
    noted = {driver.topic: {"2": {"topic_id": "id", "ends": {"0": 10, "1": 0}}}}
    driver.rows("UPDATE consumer.groups SET added_ends = %s", Jsonb(noted), result=False)
    ends = {(driver.topic, 0): 10, (driver.topic, 1): 0}
    assert driver.runner._store.added_ends({driver.topic: "id"}) == {(driver.topic, 2): AddedEnds({}, ends)}


@pytest.mark.parametrize("restarted", [False, True])
def test_many_partitions_take_turns(outbox_postgres, outbox_kafka, restarted):
    """Also where every round is the first one of a driver: what is stored says whose turn it is."""
    driver = Driver(outbox_postgres, outbox_kafka, 40)
    for part in range(40):
        driver.send(part, 3)
    driver.runner = driver.start(most=16)
    rounds = []
    for _ in range(5):
        if restarted:
            driver.runner = driver.start(most=16)
        rounds.append(driver.step())
    assert [len(one) for one in rounds] == [16] * 5
    for three in (rounds[:3], rounds[1:4], rounds[2:]):
        assert {part for one in three for part in one} == set(range(40))


def test_a_group_that_has_lost_a_topic_is_not_new(driver):
    """The topic was made again, and its old offsets were forgotten: what it holds now was never read."""
    driver.runner = driver.start(start="latest")
    driver.look()
    lost = Loss(driver.topic, 0, "another", 0, None, LossKind.RECREATED, "gone")
    driver.runner._store.record_losses([lost], driver.runner._begin())
    driver.offsets().forget(GROUP, driver.topic, "it was made anew")
    driver.send(0, 3)
    driver.runner = driver.start(start="latest")
    assert driver.step() == {0: (0, 3)}


def test_a_new_group_begins_at_the_end_if_it_is_told_to(driver):
    """What went before it is no loss. Everything else begins at 0: partitions and topics that come later."""
    driver.send(0, 5)
    driver.send(1, 2)
    driver.delete_before(0, 3)
    driver.runner = driver.start(start="latest")
    driver.look()
    assert driver.positions() == {0: 5, 1: 2}
    assert driver.losses() == []
    driver.send(0, 2)
    driver.runner = driver.start(start="latest")
    assert driver.step() == {0: (5, 7)}
    driver.add_partitions(4)
    driver.send(2, 4)
    driver.send(3, 6)
    # The other one has asked for this topic's leaders before there was a partition 3.
    driver.admin = AdminClient({"bootstrap.servers": driver.topics.bootstrap_servers})
    driver.delete_before(3, 1)
    with pytest.raises(DataLost, match="first 1 messages"):
        driver.step()
    assert driver.positions() == {0: 7, 1: 2}
    driver.offsets().reset(GROUP, driver.topic, "loss", "why")
    driver.runner = driver.start(start="latest")
    # The other new one waits for this one, which the reset has made known.
    assert driver.step() == {3: (1, 6)}
    assert driver.step() == {2: (0, 4)}


def test_a_new_group_begins_with_what_is_left_if_it_is_told_to(driver):
    """On a topic whose first messages retention has removed; what is removed later is a loss."""
    driver.send(0, 5)
    driver.send(1, 2)
    driver.delete_before(0, 3)
    with pytest.raises(DataLost, match='start="earliest-available"'):
        driver.step()
    assert driver.positions() == {}
    driver.runner = driver.start(start="earliest-available")
    assert driver.step() == {0: (3, 5), 1: (0, 2)}
    assert driver.positions() == {0: 5, 1: 2}
    driver.send(0, 2)
    driver.delete_before(0, 6)
    with pytest.raises(DataLost, match="messages 5 to 5"):
        driver.step()


def test_a_transaction_that_is_open_when_a_group_begins_at_the_end_is_read(driver):
    driver.send(0, 2)
    open_one = other_program(driver.topics, driver.topic, 0)
    driver.send(0, 1)
    driver.runner = driver.start(start="latest")
    driver.look()
    assert driver.positions() == {0: 2, 1: 0}
    open_one.commit_transaction(30)
    wait_until(lambda: driver.runner._kafka.look([driver.topic])[1][driver.topic, 0].end == 5, what="the commit")
    assert driver.step() == {0: (2, 5)}


def test_a_group_that_reads_another_topic_already_is_not_new(driver):
    other = driver.topics.create_topic(driver.topics.name("other"), 1)
    driver.offsets().reset(GROUP, other, "latest", "why", new=True)
    driver.send(0, 3)
    driver.runner = driver.start(start="latest")
    assert driver.step() == {0: (0, 3)}


def test_a_group_begins_with_all_of_its_partitions_or_with_none(driver):
    """A crash in between leaves no row: the group is as new as before, and no partition of it begins at 0."""
    driver.send(0, 5)
    driver.send(1, 2)
    driver.rows("ALTER TABLE consumer.offsets ADD CONSTRAINT crash CHECK (part <> 1)", result=False)
    driver.runner = driver.start(start="latest")
    with pytest.raises(psycopg.errors.CheckViolation):
        driver.look()
    assert driver.positions() == {}
    driver.rows("ALTER TABLE consumer.offsets DROP CONSTRAINT crash", result=False)
    driver.send(0, 1)
    driver.runner = driver.start(start="latest")
    driver.look()
    assert driver.positions() == {0: 6, 1: 2}
    # The answer to that COMMIT may have been lost as well: then another driver finds the rows, and goes on from them.
    driver.send(1, 1)
    driver.runner = driver.start(start="latest")
    assert driver.step() == {1: (2, 3)}


def test_a_log_that_was_cut(driver):
    """No election can be had here that loses messages; a position beyond the end looks the same to the driver."""
    driver.send(0, 5)
    driver.meet()
    driver.rows("UPDATE consumer.offsets SET next_offset = 9 WHERE part = 0 RETURNING 1")
    with pytest.raises(DataLost, match=r"log ends at 5: it was cut.*--to TIME"):
        driver.look()
    assert driver.losses() == [(0, "cut", 5, 9, False)]
    # Until somebody comes, the log has grown past the position: what is there now was never read.
    driver.send(0, 10)
    [group], _ = driver.offsets().show(GROUP)
    assert [loss["kind"] for loss in group.losses] == ["cut"]
    moved = driver.offsets().reset(GROUP, driver.topic, "loss", "broker 3 lost its disk")
    assert [(one.before, one.after) for one in moved.moves if one.changes] == [(9, 5)]
    assert driver.losses()[0][-1] is True


def test_what_comes_behind_an_open_transaction_is_uncommitted(driver):
    driver.look()
    open_one = other_program(driver.topics, driver.topic, 0)
    driver.send(0, 4)
    extents = driver.runner._kafka.look([driver.topic], high_watermarks=True)[1]
    assert extents[driver.topic, 0] == OffsetBounds(0, 0, 5, 0)
    assert extents[driver.topic, 1].uncommitted == 0
    # Not asked for, not paid for.
    assert driver.runner._kafka.look([driver.topic])[1][driver.topic, 0].uncommitted is None
    [group], _ = driver.offsets().show(GROUP)
    assert [(one.lag, one.uncommitted, one.high_watermark) for one in group.positions] == [(0, 5, 5), (0, 0, 0)]
    with pytest.raises(OperationRefused, match="offsets 0 to 0"):
        driver.offsets().reset(GROUP, driver.topic, 3, "why", part=0, skip=True)
    open_one.abort_transaction(30)
    wait_until(lambda: driver.runner._kafka.look([driver.topic])[1][driver.topic, 0].end == 6, what="the abort")
    assert driver.offsets().show(GROUP)[0][0].positions[0].lag == 6
