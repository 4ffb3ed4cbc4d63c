"""Which messages are sent by themselves. On a broker: integration/relay/kafka/test_publisher.py."""

from __future__ import annotations

from outbox._clients import first_messages
from outbox._clients.first_messages import FirstMessages

TOPIC = "order-events"


def test_a_partition_has_no_first_message_again_for_a_minute():
    now = [0.0]
    first = FirstMessages("murmur2_random", lambda: now[0])
    assert first.may_come(TOPIC)
    assert not first.is_known(TOPIC)
    first.learn(TOPIC, 1)
    assert first.is_first(TOPIC, "a")
    first.sent(TOPIC, "a")
    # On its way: what comes behind it waits.
    assert first.may_come(TOPIC)
    assert not first.is_first(TOPIC, "b")
    assert first.acknowledged() == []
    now[0] = 59.0
    assert not first.may_come(TOPIC)
    assert not first.is_first(TOPIC, "b")
    now[0] = 60.0
    assert first.may_come(TOPIC)
    assert not first.is_known(TOPIC)
    first.learn(TOPIC, 1)
    assert first.is_first(TOPIC, "a")


def test_a_topic_of_unknown_partitions_has_one_first_message_until_they_are_known():
    first = FirstMessages("fnv1a")
    first.learn(TOPIC, 0)
    assert first.is_first(TOPIC, "a")
    first.sent(TOPIC, "a")
    assert not any(first.is_first(TOPIC, key) for key in "abc")
    assert first.acknowledged() == [TOPIC]
    # Nobody knows into which partition it went.
    first.learn(TOPIC, 3)
    assert first.is_first(TOPIC, "a")


def test_keys_are_hashed_once_and_not_remembered_without_end(monkeypatch):
    hashed: list[bytes] = []
    monkeypatch.setitem(first_messages._HASHES, "murmur2", lambda key: hashed.append(key) or 0)
    monkeypatch.setattr(first_messages, "_MOST_KEYS", 3)
    first = FirstMessages("murmur2_random")
    first.learn(TOPIC, 2)
    first.sent(TOPIC, "a")
    first.acknowledged()
    del hashed[:]
    for _ in range(2):
        assert not any(first.is_first(TOPIC, key) for key in "abc")
    assert hashed == [b"a", b"b", b"c"]
    # Others push these out.
    assert not any(first.is_first(TOPIC, key) for key in "dea")
    assert len(hashed) == 6
