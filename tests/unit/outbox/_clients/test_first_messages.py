"""Which messages are sent by themselves. On a broker: integration/relay/kafka/test_publisher.py."""

from __future__ import annotations

from outbox._clients import first_messages
from outbox._clients.first_messages import FirstMessages

TOPIC = "order-events"


def test_a_partition_has_no_first_message_again_for_a_minute():
    first = FirstMessages("murmur2_random")
    first.now = 0.0
    assert first.may_come(TOPIC)
    assert not first.is_known(TOPIC)
    first.learn(TOPIC, 1)
    assert first.is_first(TOPIC, "a")
    first.sent(TOPIC, "a")
    # On its way: what comes behind it waits.
    assert first.may_come(TOPIC)
    assert not first.is_first(TOPIC, "b")
    assert first.acknowledged() == []
    first.now = 59.0
    assert not first.may_come(TOPIC)
    assert not first.is_first(TOPIC, "b")
    first.now = 60.0
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


def test_one_acknowledgement_says_where_a_message_has_arrived():
    first = FirstMessages("murmur2_random")
    first.learn(TOPIC, 3)
    # Keys are partitions where those are given.
    first.sent(TOPIC, 0)
    first.sent(TOPIC, 1)
    assert first.is_on_its_way(TOPIC, 0)
    first.arrived(TOPIC, 0, 2)
    # Another one than was expected: nothing is known of the one.
    assert [first.cold(TOPIC, partition) for partition in range(3)] == [0, 1, None]
    assert [first.is_first(TOPIC, partition) for partition in range(3)] == [True, False, False]
    first.learn(TOPIC, 0)
    first.sent(TOPIC, 7)
    first.arrived(TOPIC, 0, 2)
    assert not first.is_known(TOPIC)
    assert not first.is_on_its_way(TOPIC, 0)


def test_which_keys_are_in_random_partitions():
    random = {name: [FirstMessages(name).is_random(key) for key in (None, b"", b"k")] for name in PARTITIONERS}
    assert random == PARTITIONERS


PARTITIONERS = {
    "random": [True, True, True],
    "consistent": [False, False, False],
    "consistent_random": [True, True, False],
    "murmur2": [False, False, False],
    "murmur2_random": [True, False, False],
    "fnv1a": [False, False, False],
    "fnv1a_random": [True, False, False],
}
