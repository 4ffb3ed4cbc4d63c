"""An at-most-once group's members as processes: killed at each step, put to sleep, and joined by others.

The effects are calls of another system: nothing takes one back. Beside it an exactly-once group reads the same topic.
"""

from __future__ import annotations

import signal
from collections import defaultdict

import pytest
from inbox_support import Log, Process
from support import wait_until

BATCH = 10
# Who has the name of one that was killed gets its partition at once. So a session may be longer than any stall.
SUCCEEDING = {"group.instance.id": "one", "session.timeout.ms": 30_000}
MOST = {"delivery": "at-most-once", "external": True, "batch": BATCH}


class Groups:
    """The members of both groups: the exactly-once group has one, "exact"."""

    def __init__(self, log: Log, folder) -> None:
        self.log, self.folder = log, folder
        self.started: list[Process] = []

    def start(self, name: str, **options) -> Process:
        self.started.append(self.log.process(self.folder, name, **options))
        return self.started[-1]

    def neighbour(self) -> Process:
        return self.start("exact", group=self.neighbours)

    @property
    def neighbours(self) -> str:
        return f"{self.log.group}-exact"

    def passed(self, group: str, count: int) -> None:
        """Wait until a group has passed so many messages."""
        query = "SELECT sum(next_offset) FROM consumer.offsets WHERE grp = %s AND unconfirmed_from IS NULL"
        wait_until(lambda: self.log.run(query, group) == [(count,)], 120, "positions")

    def called(self) -> dict[int, list[int]]:
        """The offsets by partition whose effect the at-most-once group has had, in the order of the effects."""
        found: dict[int, list[int]] = defaultdict(list)
        for part, at in self.log.run("SELECT part, at FROM effects WHERE member <> 'exact' ORDER BY id"):
            found[part].append(at)
        return found

    def losses(self) -> list[tuple[int, int, int]]:
        query = "SELECT part, first_offset, end_offset FROM consumer.losses WHERE grp = %s ORDER BY id"
        return self.log.run(query, self.log.group)

    def check_neighbour(self) -> None:
        """The exactly-once group has all, once, and has lost nothing."""
        count = sum(map(len, self.log.written.values()))
        self.passed(self.neighbours, count)
        found = defaultdict(list)
        for key, n in self.log.run("SELECT key, n FROM effects WHERE member = 'exact' ORDER BY id"):
            found[key].append(n)
        assert found == self.log.written
        assert self.log.run("SELECT count(*) FROM consumer.losses WHERE grp <> %s", self.log.group) == [(0,)]


@pytest.fixture
def groups(outbox_postgres, outbox_kafka, tmp_path, request):
    found = Groups(Log(outbox_postgres, outbox_kafka, getattr(request, "param", 1)), tmp_path)
    yield found
    for process in found.started:
        process.end()


# Where each member dies in its third batch, or behind it, and its first message that is lost.
KILLS = [
    # Before the first COMMIT, and behind it.
    ("given-up", 3, None),
    ("between", 3, 0),
    # In the second transaction: before the first handler, and behind the sixth one.
    ("confirming", 3, 0),
    ("handled", 26, 6),
    # Behind the second COMMIT.
    ("applied", 3, None),
]


def test_each_kill_loses_at_most_a_batch_which_is_recorded_and_doubles_nothing(groups):
    """Each member goes on where the one before was killed."""
    groups.log.produce([f"k{number % 7}" for number in range(200)])
    groups.neighbour()
    begins, lost, missing = 0, [], set()
    for point, nth, first in KILLS:
        member = groups.start(point, at=[point, nth, signal.SIGKILL], kafka=SUCCEEDING, **MOST)
        assert member.wait() == -signal.SIGKILL, point
        third = begins + 2 * BATCH
        begins = third if point == "given-up" else third + BATCH
        if first is not None:
            lost.append((0, third, begins))
            missing |= set(range(third + first, begins))
    groups.start("last", kafka=SUCCEEDING, **MOST)
    groups.passed(groups.log.group, 200)
    assert groups.called() == {0: [at for at in range(200) if at not in missing]}
    assert groups.losses() == lost
    query = "SELECT applied, duplicates FROM consumer.offsets WHERE grp = %s"
    assert groups.log.run(query, groups.log.group) == [(200 - BATCH * len(lost), 0)]
    groups.check_neighbour()


def test_who_sleeps_between_the_two_transactions_has_no_late_effect(groups):
    groups.log.produce([f"k{number % 7}" for number in range(60)])
    groups.neighbour()
    kafka = {"heartbeat.interval.ms": 300}
    sleeper = groups.start("most 1", at=["between", 3, signal.SIGSTOP], kafka=kafka, **MOST)
    wait_until(lambda: sleeper.asleep, 60, "the sleep")
    other = groups.start("most 2", kafka=kafka, **MOST)
    # Kafka gives it the partition when the sleeper's session has expired.
    groups.passed(groups.log.group, 60)
    sleeper.signal(signal.SIGCONT)
    wait_until(lambda: "was taken over from generation" in sleeper.text(), 60, "what the sleeper does")
    groups.log.produce(["k0"] * 20)
    groups.passed(groups.log.group, 80)
    for member in (sleeper, other):
        member.signal(signal.SIGTERM)
        assert member.wait() == 0, member.text()
    assert groups.called() == {0: [*range(20), *range(30, 80)]}
    assert groups.losses() == [(0, 20, 30)]
    groups.check_neighbour()


@pytest.mark.parametrize("groups", [4], indirect=True)
def test_members_join_and_are_killed_and_each_loss_is_recorded(groups):
    log = groups.log
    keys = [f"k{number}" for number in range(50)]

    def join(name: str) -> Process:
        """Start a member, and write until it has had its share: partitions move while others are at work."""

        def takes_part() -> bool:
            log.produce(keys[:10])
            return bool(log.run("SELECT 1 FROM effects WHERE member = %s LIMIT 1", name))

        member = groups.start(name, **MOST)
        wait_until(takes_part, 60, f"the {name} member")
        return member

    def kill(member: Process) -> None:
        before = log.count()
        log.produce(keys * 12)
        wait_until(lambda: log.count() > before + 200, 60, "progress")
        member.signal(signal.SIGKILL)
        assert member.wait() == -signal.SIGKILL

    groups.neighbour()
    first = join("most 1")
    second = join("most 2")
    kill(first)
    third = join("most 3")
    kill(second)
    fourth = join("most 4")
    total = sum(map(len, log.written.values()))
    groups.passed(log.group, total)
    for member in (third, fourth):
        member.signal(signal.SIGTERM)
        assert member.wait() == 0, member.text()
    called, losses = groups.called(), groups.losses()
    recorded = {(part, at) for part, first, end in losses for at in range(first, end)}
    for part, end in log.positions().items():
        # Never twice, and in order: a key's messages are all in one partition.
        assert called[part] == sorted(set(called[part]))
        assert {(part, at) for at in set(range(end)) - set(called[part])} <= recorded
    # Each of the two that were killed had one batch of one partition under way.
    assert len(losses) <= 2
    assert all(end - first <= BATCH for _, first, end in losses)
    groups.check_neighbour()
