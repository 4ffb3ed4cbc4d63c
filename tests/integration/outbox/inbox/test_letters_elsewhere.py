"""A key whose dead letters are in another partition than its messages: it waits for them, and nothing else does."""

from __future__ import annotations

from typing import Any

from inbox_log import _quick
from inbox_support import Log, apply

from outbox.inbox._letters import Letters

__all__ = ["_quick"]

LETTER = """
INSERT INTO consumer.dead_letters (grp, topic, topic_id, part, message_offset, message_key, message_value,
                                   message_headers, message_time, reason, error, state)
VALUES (%s, %s, 'id', %s, %s, 'k', %s, '[]', now(), %s, 'x', 'dead') RETURNING id"""


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
        log.run(LETTER, log.group, log.topic, part, 100 + at, b'{"n": %d}' % (part * 10 + at), reason)
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
