"""A key whose dead letters are in another partition than its messages: it waits for them, and nothing else does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from inbox_log import _quick, accept, recreate
from inbox_support import Log, apply
from support import wait_until
from uuid_utils.compat import uuid7

from outbox.consumer.admin.status import read_counts
from outbox.consumer.messages import stored_headers
from outbox.consumer.model import RejectedRecord
from outbox.inbox import Reject, TopicReplaced
from outbox.inbox._letters import Letters

__all__ = ["_quick"]

LETTER = """
INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_key, message_value,
                                   message_headers, message_time, reason, error, state)
VALUES (%s, %s, 'id', %s, %s, %s, %s, %s, now(), %s, 'x', 'dead') RETURNING id"""


def add(log: Log, part: int, offset: int, key: bytes, n: int, reason: str, message_id: str | None = None) -> int:
    """Add a dead letter of the log's group, and return its id."""
    headers = stored_headers([] if message_id is None else [("ce_id", message_id.encode())])
    [(number,)] = log.run(LETTER, log.group, log.topic, part, offset, key, b'{"n": %d}' % n, headers, reason)
    return int(number)


def reject_moved(connection: Any, message: Any) -> None:
    if message.key() == b"moved":
        raise Reject("no such order")
    apply(connection, message)


def looks(monkeypatch: Any) -> list[None]:
    """Grows with each look at the dead letters."""
    seen: list[None] = []
    look = Letters.with_letters

    def noted(*arguments: Any) -> Any:
        seen.append(None)
        return look(*arguments)

    monkeypatch.setattr(Letters, "with_letters", noted)
    return seen


def test_one_that_waits_for_another_partitions_letter_holds_up_no_other_key(outbox_postgres, outbox_kafka, monkeypatch):
    """Another partition's letter is earlier, and waits itself: for one that failed when its offset was read again."""
    log = Log(outbox_postgres, outbox_kafka, 2)
    log.produce(["other"], partition=0)
    with log.consuming(on_failure="dead-letter", dedup=False) as running:
        running.wait(lambda: log.positions().get(0) == 1, "the position")
    for part, at, reason in ((1, 9, "behind"), (0, 0, "behind"), (1, 5, "failed")):
        add(log, part, 100 + at, b"k", part * 10 + at, reason)
    found = looks(monkeypatch)
    with log.consuming(on_failure="dead-letter", dedup=False) as running:
        running.wait(lambda: len(found) >= 5, "looks at the letters")
        log.produce(["other"], partition=0)
        running.wait(lambda: log.count() == 2, "a message of another key")
        assert [one["state"] for one in log.letters()] == ["dead"] * 3
        log.retry()
        running.wait(lambda: not log.letters(), "the letters")
    # In some order: their ids give another one than their offsets.
    assert sorted(log.applied()["k"]) == [0, 15, 19]


@pytest.mark.parametrize(("offset", "reason"), [(50, "failed"), (200, "too-old")])
def test_one_that_is_retried_meanwhile_waits_for_another_partitions_letter(
    outbox_postgres, outbox_kafka, offset, reason
):
    """While letters of its partition are being retried, an operator retries both: it comes before these, or behind."""
    log = Log(outbox_postgres, outbox_kafka, 2)
    earlier = add(log, 0, 100, b"k", 0, reason)
    later = add(log, 1, offset, b"k", 1, "behind")
    busy = [add(log, 1, 100 + n, b"busy", n, "rejected") for n in range(3)]

    def retried_meanwhile(connection: Any, message: Any) -> None:
        if message.value() == b'{"n": 0}' and message.key() == b"busy":
            log.retry(ids=[earlier])
        apply(connection, message)

    # Of one that is too old each retry is chosen by itself, so the later one may be retried before.
    log.retry(ids=[*busy, *([later] if reason == "too-old" else [])])
    with log.consuming(retried_meanwhile, on_failure="dead-letter", dedup=False) as running:
        running.wait(lambda: not log.letters(), "the letters")
    assert log.applied() == {"k": [0, 1], "busy": [0, 1, 2]}


def test_one_that_is_too_old_is_applied_behind_another_partitions_letter(outbox_postgres, outbox_kafka):
    """An operator retries both. It comes first, so it is put behind the other one, and that it was retried is kept."""
    log = Log(outbox_postgres, outbox_kafka, 2)
    group = "INSERT INTO consumer.groups (grp, owner, forgotten_before) VALUES (%s, 'test', '2026-01-01') RETURNING grp"
    log.run(group, log.group)
    add(log, 1, 50, b"k", 0, "failed", str(uuid7()))
    add(log, 0, 100, b"k", 1, "too-old", "01900000-0000-7000-8000-000000000000")
    log.retry()
    with log.consuming(on_failure="dead-letter") as running:
        running.wait(lambda: not log.letters(), "the letters")
    assert log.applied() == {"k": [0, 1]}


def test_one_that_another_member_puts_back_meanwhile_is_waited_for(outbox_postgres, outbox_kafka):
    """Two members retry one partition, as for a while after its topic has got it again."""
    log = Log(outbox_postgres, outbox_kafka)
    letters, place = Letters("consumer", log.group), (log.topic, 0)
    ids = {add(log, 0, offset, b"k", 0, "failed") for offset in range(2)}
    log.retry()
    waits = "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    mine, other = log.database.connect(), log.database.connect()
    with ThreadPoolExecutor(1) as threads:
        found = letters.next(other, place, ids)
        assert found is not None
        letters.failed_again(other, found.letter.id, RejectedRecord((*place, 0), "failed", "again", None))
        taken = threads.submit(letters.next, mine, place, ids)
        wait_until(lambda: log.run(waits, mine.info.backend_pid), what="a wait for the lock")
        other.commit()
        behind = taken.result(60)
    assert (behind.offset(), behind.letter.behind) == (1, True)


@pytest.mark.parametrize("way", ["retry", "discard", "gone"])
def test_those_of_a_partition_that_is_no_longer_there_are_applied(outbox_postgres, outbox_kafka, way, monkeypatch):
    """The topic was created again, with fewer partitions: no member gets theirs."""
    log = Log(outbox_postgres, outbox_kafka, 3)
    log.produce(["moved", "moved"], partition=2)
    with log.consuming(reject_moved, on_failure="dead-letter") as running:
        running.wait(lambda: log.positions() == {0: 0, 1: 0, 2: 2}, "the dead letters")
    recreate(log)
    with log.consuming(on_failure="dead-letter") as running:
        assert isinstance(running.error(), TopicReplaced)
    accept(log)
    found = looks(monkeypatch)
    with log.consuming(on_failure="dead-letter") as running:
        log.produce(["moved"])
        running.wait(lambda: log.positions() == {0: 1}, "one that waits")
        first, second, third = log.letters()[1:] + log.letters()[:1]
        assert [one["reason"] for one in (first, second, third)] == ["rejected", "behind", "behind"]
        with log.database.connect() as connection:
            assert read_counts(connection, "consumer").dead_letters == {log.group: 3}
        if way == "gone":
            # As if it had been discarded while the second one was being written.
            log.run("DELETE FROM consumer.dead_letters WHERE id = %s RETURNING id", first["id"])
        else:
            reason = ["--reason", "test"] if way == "discard" else []
            done = log.command("dead-letters", way, "--side", "consumer", str(first["id"]), *reason)
            assert done.exit_code == 0, done.output
        looked = len(found)
        running.wait(lambda: len(found) >= looked + 5, "looks at the letters")
        log.produce(["other"])
        running.wait(lambda: log.applied()["other"], "a message of another key")
        running.wait(lambda: not log.letters(), "the letters")
        log.produce(["moved"])
        running.wait(lambda: log.positions() == {0: 3}, "the position")
    assert log.applied()["moved"] == ([0, 1, 2, 3] if way == "retry" else [1, 2, 3])
