"""Partitions that have leaders again. tests/integration/outbox/test_leaders.py kills a broker that leads some."""

from __future__ import annotations

import threading
from typing import Any

from inbox_support import Log

from outbox.consumer.groups import GroupRows
from outbox.inbox._kafka import Admin


def test_all_that_have_leaders_again_are_claimed_together(outbox_postgres, outbox_kafka, monkeypatch):
    log = Log(outbox_postgres, outbox_kafka, 12)

    def produced() -> None:
        for partition in range(12):
            log.produce([f"k{partition}"], partition=partition)

    produced()
    with log.consuming() as member:
        member.wait(lambda: log.count() == 12, "the effects")
    produced()
    led = threading.Event()
    look, claim = Admin.look, GroupRows.claim
    whole: list[bool] = []
    claims: list[list[int]] = []

    def looked(admin: Admin, *arguments: Any) -> Any:
        whole.append(led.is_set())
        ids, bounds = look(admin, *arguments)
        return ids, {at: there for at, there in bounds.items() if whole[-1] or at[1] == 0}

    def claimed(group: GroupRows, connection: Any, partitions: Any, *more: Any) -> Any:
        claims.append(sorted(part for _, part in partitions))
        return claim(group, connection, partitions, *more)

    monkeypatch.setattr(Admin, "look", looked)
    monkeypatch.setattr(GroupRows, "claim", claimed)
    with log.consuming() as member:
        # Two for the first one, with the check of its log, and then one for each attempt.
        member.wait(lambda: len(whole) >= 4, "attempts")
        led.set()
        member.wait(lambda: log.count() == 24, "the effects of all")
    assert claims == [[0], list(range(1, 12))]
    assert whole.count(True) == 2
    log.check()
