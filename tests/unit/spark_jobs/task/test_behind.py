"""Which messages wait behind a dead letter of their key."""

from __future__ import annotations

from spark_jobs.task.behind import offsets_behind
from spark_jobs.task.incoming import Messages


def messages(topic: str, part: int, keys: dict[int, bytes | None]) -> Messages:
    none = [None] * len(keys)
    return Messages(topic, part, list(keys), [0] * len(keys), list(keys.values()), none, [[]] * len(keys))


def test_what_comes_after_a_dead_letter_of_its_key_is_behind_it():
    dead = {"t": {b"a": ("t", 0, 1), b"old": None}, "u": {b"": ("u", 0, 1)}, "x": {b"b": None}}
    here = messages("t", 0, {1: b"a", 2: b"a", 3: b"b", 4: None, 5: b"old", 6: b"a", 7: b""})
    assert offsets_behind(dead, here) == [2, 5, 6]
    # Another partition has the key because the topic got more partitions: all of its messages are later ones.
    assert offsets_behind(dead, messages("t", 1, {0: b"a", 1: b"a", 2: b"c"})) == [0, 1]
    assert offsets_behind(dead, messages("u", 0, {9: b"a", 1: b""})) == []
    assert offsets_behind({}, here) == []
