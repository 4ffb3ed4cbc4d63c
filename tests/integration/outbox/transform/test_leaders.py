"""Input partitions that seem to have no leader; tests/integration/outbox/test_leaders.py kills those of some."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from support import wait_until
from transform_support import copied, place, running

from outbox.transform import InputLost, _positions, _session

__all__ = ["place"]


def test_one_whose_session_fails_as_it_begins_is_not_said_to_stand_still(place, monkeypatch):
    """Nothing comes in it that would say so."""
    begin, check = _session.beginnings, _session.require_whole
    left = [(place.source, 1)]
    failed: list[int] = []

    def later(*args: Any) -> Any:
        begun, leaderless = begin(*args)
        late = {left.pop()} if left else set()
        return [each for each in begun if (each.topic, each.partition) not in late], leaderless | late

    def fails_once(consumer: Any, positions: Any, *more: Any) -> Any:
        if not failed and len(positions) == 4:
            failed.extend(one.partition for one in member.stalled(0))
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return check(consumer, positions, *more)

    monkeypatch.setattr(_positions, "NEW_SECONDS", 0.0)
    monkeypatch.setattr(_session, "_LEADER_SECONDS", 0.5)
    monkeypatch.setattr(_session, "beginnings", later)
    monkeypatch.setattr(_session, "require_whole", fails_once)
    member = place.member(copied(place))
    with running(member):
        wait_until(lambda: failed, 60, "the session to fail")
        place.feed(range(3), partition=0)
        wait_until(lambda: member.committed == 3, 60, "the next one")
        wait_until(lambda: member.stalled(0) == [], 60, "nothing to wait")
        assert failed == [1]


def test_its_log_is_checked_before_its_messages_are_used(place, monkeypatch):
    monkeypatch.setattr(_positions, "NEW_SECONDS", 0.0)
    require_whole = _session.require_whole
    asked: list[set[int]] = []

    def without_a_leader(consumer: Any, positions: Any, *more: Any) -> set[Any]:
        asked.append({each.partition for each in positions})
        if len(asked) > 1:
            raise InputLost("it was cut")
        return require_whole(consumer, positions, *more) | {(place.source, 1)}

    for partition in range(4):
        place.feed(range(partition, partition + 1), partition=partition)
    with running(place.member(copied(place))):
        wait_until(lambda: place.position() == 4, 60, "the position")
    monkeypatch.setattr(_session, "require_whole", without_a_leader)
    place.feed(range(4, 8), partition=1)

    def checked() -> None:
        with running(place.member(copied(place))):
            wait_until(lambda: len(asked) > 1, 60, "the check")

    with pytest.raises(InputLost, match="it was cut"):
        checked()
    assert asked == [{0, 1, 2, 3}, {1}]
    assert place.positions()[1].offset == 1
