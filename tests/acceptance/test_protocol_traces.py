"""What real relays do is a behaviour of the protocol's specification: TLC compares the steps that they record.

A mistake of a relay is found and named, also where no fault made it lose or repeat anything.
"""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex

import protocol_trace
import pytest
import traces
from support import MUTANT, drained, end_leases, ends, halted, look_up, owners, wait_until, write

from outbox import Event
from outbox._app import migrate as db
from relay.wal.lane_hash import lane_of


class Rig:
    """Relays that record their steps, of turns of two events. What they leave on Kafka."""

    def __init__(self, url, kafka, relay, order, file: Path) -> None:
        self.url = url
        self.kind, self._topic = order
        self._kafka, self._relay, self._file = kafka, relay, file
        self._name = kafka.name("outbox")

    def start(self, instance: str, delivery: str, failpoint: str = "", mutation: str = "none", **more):
        env = {protocol_trace.VARIABLE: str(self._file), "OUTBOX_FAILPOINTS": failpoint}
        settings = {"relay__instance": instance, "relay__batch_size": 2, "relay__lease_seconds": 60, **more}
        program = (MUTANT, f"{mutation}+records")
        return self._relay(env=env, delivery=delivery, name=self._name, program=program, **settings)

    def taken_over(self, delivery: str, failpoint: str):
        """Let a relay sleep at a failpoint, and another one publish the rest; wake the first, and return both."""
        db.change_lanes(self.url, 1)
        self.write(6)
        sleeper = self.start("sleeper", delivery, f"{failpoint}=pause@2")
        wait_until(lambda: halted(sleeper), what="the relay to sleep")
        end_leases(self.url)
        other = self.start("other", delivery)
        wait_until(lambda: owners(self.url) == {"other": 1}, what="the other relay to take the lane")
        drained(self.url)
        sleeper.resume()
        return sleeper, other

    def write(self, count: int, lanes: int = 1) -> None:
        """Write events of four keys, of as many in each lane."""
        by_lane = [[key for key in map(str, range(100)) if lane_of(self.kind, key, lanes) == at] for at in range(lanes)]
        keys = [key for same in zip(*by_lane, strict=False) for key in same]
        write(self.url, (Event(self.kind, keys[number % 4], "Written", {"n": number}) for number in range(count)))

    def steps(self) -> list[traces.Line]:
        return traces.load(self._file)

    def seen(self) -> list[str]:
        return [dict(message.headers())["ce_id"].decode() for message in self._kafka.consume(self._topic)]


@pytest.fixture
def rig(outbox_postgres, outbox_kafka, outbox_relay, order, tmp_path) -> Rig:
    return Rig(outbox_postgres.url, outbox_kafka, outbox_relay, order, tmp_path / "steps.jsonl")


def find(steps: list[traces.Line], relay: str, step: str) -> int:
    """Return where the last such step of a relay is."""
    return max(at for at, line in enumerate(steps) if line["relay"].startswith(relay) and line["step"] == step)


def test_at_least_once_a_relay_that_sleeps(rig):
    """It wakes with what it has read and checked in time, sends it once more, and settles nothing."""
    sleeper, other = rig.taken_over("at-least-once", "batch.fetched")
    sleeper.wait_for_log("lane lost")
    ends(other)
    ends(sleeper)
    steps, seen = rig.steps(), rig.seen()
    assert len(seen) == 8
    assert traces.check(steps, 0, seen) > 20

    sent = steps[find(steps, "sleeper", "sent")]
    # As if the lease had been checked when it woke.
    sent["since"] = sent["at"]
    with pytest.raises(traces.NotExplained) as refused:
        traces.check(steps, 0, seen)
    assert (refused.value.step["relay"], refused.value.step["step"]) == (sent["relay"], "sent")


def test_what_waits_for_its_topic(rig, outbox_kafka, order):
    """It is sent in vain beside events that are acknowledged. Exactly-once, the check knows no refusal."""
    db.change_lanes(rig.url, 1)
    absent = outbox_kafka.name("Absent")
    write(rig.url, [Event(kind, "k", "Written", {}) for kind in (absent, order[0]) for _ in range(2)])
    one = rig.start("one", "at-least-once", create_topics=False, relay__batch_size=8)
    assert len(outbox_kafka.consume(order[1], 2)) == 2
    topic = outbox_kafka.create_topic(f"{absent.lower()}-events", 1)
    drained(rig.url)
    ends(one)
    steps, late = rig.steps(), [dict(message.headers())["ce_id"].decode() for message in outbox_kafka.consume(topic)]
    assert len(late) == 2
    places = dict.fromkeys(late, (topic, 0)) | dict.fromkeys(rig.seen(), (order[1], 0))
    parts = traces.partitions(steps, 0, places)
    assert any(line["step"] == "failed" for line in parts[topic, 0])
    for place, part in parts.items():
        assert traces.check(part, 0, [event for event in places if places[event] == place]) > 4


def test_a_refusal_ends_the_transaction_of_other_lanes_and_no_publisher(rig, outbox_kafka):
    """Both lanes say so: the check knows no refusal, and chaos leaves out lanes that have some."""
    db.change_lanes(rig.url, 2)
    small = outbox_kafka.name("Small")
    outbox_kafka.create_topic(f"{small.lower()}-events", 1, {"max.message.bytes": "5000"})
    rig.write(4, lanes=2)
    key = next(key for key in map(str, range(100)) if lane_of(small, key, 2) == 1)
    write(rig.url, [Event(small, key, "Written", {"text": token_hex(5_000)})])
    settings = {"create_topics": False, "relay__batch_size": 8, "failures__max_attempts": 1}
    one = rig.start("one", "exactly-once", **settings)
    drained(rig.url)
    ends(one)
    steps = rig.steps()
    assert len(rig.seen()) == 4
    failed = {line["lane"] for line in steps if line["step"] == "failed"}
    assert failed == {line["lane"] for line in steps if line["step"] == "refused"} == {0, 1}
    assert sum(line["step"] == "initialized" for line in steps) == 1


def test_exactly_once_a_relay_that_sleeps_before_its_commit(rig):
    """It is fenced meanwhile."""
    sleeper, other = rig.taken_over("exactly-once", "txn.confirmed")
    sleeper.wait_for_log("another relay")
    ends(other)
    ends(sleeper)
    steps, seen = rig.steps(), rig.seen()
    assert len(seen) == 6
    traces.check(steps, 0, seen)
    with pytest.raises(traces.NotExplained, match="Kafka does not have what the steps say"):
        traces.check(steps, 0, [*seen, seen[-1]])


def test_events_in_any_order_of_their_commits_and_a_relay_that_was_killed_before_its_worker_knew_the_lane(rig):
    """There is one behaviour for all the orders, of which there are too many to look at."""
    db.change_lanes(rig.url, 1)
    for name, count in (("first", 2), ("second", 28)):
        write(rig.url, (Event(rig.kind, f"{name} {number}", "Written", {}) for number in range(count)))
        relay = rig.start(name, "exactly-once", relay__batch_size=30)
        drained(rig.url)
        ends(relay)
        taken = "UPDATE outbox.lanes SET epoch = epoch + 1, owner = 'killed', lease_until = now() RETURNING epoch"
        look_up(rig.url, taken)
    assert [line["epoch"] for line in rig.steps() if line["step"] == "taken"] == [2, 4]
    assert traces.events(rig.steps(), 0) == 30
    assert traces.check(rig.steps(), 0, rig.seen()) > 10


def test_exactly_once_two_lanes_of_a_relay_that_is_killed_after_its_commit(rig):
    db.change_lanes(rig.url, 2)
    rig.write(8, lanes=2)
    killed = rig.start("killed", "exactly-once", "txn.committed=kill@2")
    assert killed.wait() == -9
    end_leases(rig.url)
    other = rig.start("other", "exactly-once")
    drained(rig.url)
    ends(other)
    steps, seen = rig.steps(), rig.seen()
    assert traces.lanes(steps) == [0, 1]
    for lane in traces.lanes(steps):
        traces.check(steps, lane, seen)

    joined = next(line for line in steps[find(steps, "other", "began") :] if line["step"] == "joined")
    assert joined["ids"]
    # As if nothing had been committed.
    joined |= {"batch": joined["batch"] - 1, "ids": []}
    with pytest.raises(traces.NotExplained) as refused:
        traces.check(steps, joined["lane"], seen)
    assert refused.value.step["step"] == "joined"


@pytest.mark.parametrize(
    ("delivery", "mutation", "step"),
    [("at-least-once", "settle_before_ack", "settled"), ("exactly-once", "marker_first", "committed")],
)
def test_a_mistake_without_a_fault(rig, delivery, mutation, step):
    """Kafka and Postgres have what they should."""
    db.change_lanes(rig.url, 1)
    rig.write(4)
    mutant = rig.start("mutant", delivery, mutation=mutation)
    wait_until(lambda: len(rig.seen()) == 4, what="all events")
    drained(rig.url)
    ends(mutant)
    with pytest.raises(traces.NotExplained) as refused:
        traces.check(rig.steps(), 0, rig.seen())
    assert refused.value.step["step"] == step
