"""The inbox's members as processes: killed, joined by others and put to sleep while they work through a backlog."""

from __future__ import annotations

import signal

import pytest
from inbox_support import Log, Process
from support import wait_until

MESSAGES = 4_000
KEYS = 200
# A slow machine's stall may end a session that is as short: then a member joins again, and no effect is there twice.
SHORT = {"session.timeout.ms": 3_000, "heartbeat.interval.ms": 300}


@pytest.fixture
def start(outbox_postgres, outbox_kafka, tmp_path):
    log = Log(outbox_postgres, outbox_kafka, 4)
    started: list[Process] = []

    def start(name: str, **options) -> Process:
        started.append(log.process(tmp_path, name, **options))
        return started[-1]

    start.log = log
    yield start
    for process in started:
        process.end()


def test_each_effect_is_there_once_whoever_is_killed_or_joins(start):
    log = start.log
    keys = [f"k{number}" for number in range(KEYS)]

    def backlog(count: int) -> None:
        log.produce([keys[number % KEYS] for number in range(count)])

    def written() -> int:
        return sum(map(len, log.written.values()))

    def join(name: str, **options) -> Process:
        """Start a member, and write until it has had its share: partitions move while others are at work."""

        def takes_part() -> bool:
            log.produce(keys[:20])
            return bool(log.run("SELECT 1 FROM effects WHERE member = %s LIMIT 1", name))

        member = start(name, **options)
        wait_until(takes_part, 60, f"the {name} member")
        return member

    def kill(member: Process) -> None:
        """Kill a member in the middle of a backlog."""

        def in_the_middle() -> bool:
            before = log.count()
            backlog(3_000)
            wait_until(lambda: log.count() > before + 300, 60, "progress")
            member.signal(signal.SIGSTOP)
            if log.count() < written():
                return True
            # This thread had to wait until all was done.
            member.signal(signal.SIGCONT)
            return False

        wait_until(in_the_middle, 60, "the middle of a backlog")
        member.signal(signal.SIGKILL)

    backlog(500)
    first = join("first", kafka=SHORT)
    second = join("second", kafka=SHORT)
    kill(first)
    third = join("third", batch=10, kafka=SHORT)
    kill(second)
    fourth = join("fourth", kafka=SHORT)
    backlog(max(KEYS, MESSAGES - written()))
    wait_until(lambda: log.count() >= written(), 120, "all effects")
    for member in (third, fourth):
        member.signal(signal.SIGTERM)
        assert member.wait() == 0, member.text()
    log.check()
    total = written()
    assert total >= MESSAGES
    assert log.run("SELECT sum(applied), sum(duplicates), sum(next_offset) FROM consumer.offsets") == [
        (total, 0, total)
    ]
    assert log.run("SELECT count(*) FROM consumer.processed_messages") == [(total,)]


def test_with_the_newer_protocol_of_groups_a_killed_member_repeats_nothing(start):
    """KIP-848: the broker assigns partitions, and chooses how long the session of a killed member is."""
    log = start.log
    options = {"batch": 20, "kafka": {"group.protocol": "consumer"}}

    def write() -> None:
        log.produce([f"k{number % KEYS}" for number in range(KEYS)])

    def both_take_part() -> bool:
        write()
        return len(log.run("SELECT DISTINCT member FROM effects")) == 2

    killed, left = (start(name, **options) for name in ("killed", "left"))
    wait_until(both_take_part, 60, "both members")
    for _ in range(10):
        write()
    killed.signal(signal.SIGKILL)
    wait_until(lambda: log.count() >= sum(map(len, log.written.values())), 120, "all effects")
    left.signal(signal.SIGTERM)
    assert left.wait() == 0, left.text()
    log.check()
    assert log.run("SELECT sum(applied), sum(duplicates) FROM consumer.offsets") == [(log.count(), 0)]


def test_who_wakes_after_a_long_sleep_changes_nothing(start):
    """Without ids: the positions alone have to hold."""
    log = start.log
    kafka = SHORT | {"partition.assignment.strategy": "cooperative-sticky"}
    options = {"dedup": False, "batch": 50, "kafka": kafka}
    log.produce([f"k{number % KEYS}" for number in range(2_000)])
    sleeper = start("sleeper", sleep_at=20, **options)
    wait_until(lambda: sleeper.asleep, 60, "the sleep")
    applied = log.count()
    assert 0 < applied < 2_000
    other = start("other", **options)
    # Kafka gives it the partitions when the sleeper's session has expired.
    wait_until(lambda: log.count() >= 2_000, 60, "all effects")
    sleeper.signal(signal.SIGCONT)
    # Its transaction finds that out, unless Postgres has ended it by then, and Kafka has taken the partitions.
    ends = ("was taken over from generation", "another claim has it", "revoking assignment")
    wait_until(lambda: any(map(sleeper.text().count, ends)) or log.count() > 2_000, 60, "what the sleeper does")
    assert log.count() == 2_000
    log.produce([f"k{number % KEYS}" for number in range(1_000)])
    wait_until(lambda: log.count() >= 3_000, 60, "the last effects")
    for member in (sleeper, other):
        member.signal(signal.SIGTERM)
        assert member.wait() == 0, member.text()
    log.check()
    assert log.run("SELECT sum(applied) FROM consumer.offsets") == [(3_000,)]
