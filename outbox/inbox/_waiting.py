"""Keep up with the dead letters of a member's partitions: those to be retried, and which keys have any."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, Final

import psycopg

from outbox.consumer.model import Partition
from outbox.inbox._applier import Applier
from outbox.inbox._assigned import Assigned
from outbox.inbox._letters import LOOKED_AT, Letters, NewLetters
from outbox.inbox._session import Session

_RETRIED_AT_ONCE: Final = 100
_TURN_SECONDS: Final = 1.0


class WaitingLetters:
    """Which keys have dead letters; and retries what an operator, or the end of another dead letter, has released."""

    def __init__(self, letters: Letters, session: Session, applier: Applier) -> None:
        self._letters = letters
        self._session = session
        self._applier = applier
        self._new_letters = NewLetters(letters)
        # Of each topic, one set for all partitions; and which of these keys are to be looked at next.
        self.keys: dict[str, set[bytes]] = {}
        self._keys_to_look_at: deque[tuple[str, bytes]] = deque()

    def read(self, connection: psycopg.Connection[Any], topics: set[str]) -> tuple[int, dict[str, set[bytes]]]:
        """Read all keys of topics, in the transaction of a claim. The result is for ``claimed``."""
        newest = self._letters.newest(connection)
        return newest, {topic: self._letters.keys(connection, topic) for topic in topics}

    def claimed(self, newest: int, keys: Mapping[str, set[bytes]]) -> None:
        """Begin with what ``read`` has returned, after its transaction was committed."""
        self._new_letters.claimed(newest)
        for topic, found in keys.items():
            known = self.keys.setdefault(topic, found)
            known.intersection_update(found)
            known.update(found)

    def keep_up(self, parts: Mapping[Partition, Assigned]) -> None:
        """Apply the dead letters that an operator retries, and those that wait behind one that is gone."""
        if not parts:
            return
        with self._session.transaction() as connection:
            self._letters.look(connection)
            waiting, behind = self._letters.with_letters(connection, parts.keys())
            for partition in behind:
                part = parts[partition]
                released, part.released = self._letters.release(connection, partition, part.released)
                if released:
                    waiting.add(partition)
        for partition in sorted(waiting):
            part = parts[partition]
            left = _RETRIED_AT_ONCE
            while left and part.position is not None and self._applier.retry(part):
                left -= 1
        until = time.monotonic() + _TURN_SECONDS
        while self._check_keys() and time.monotonic() < until:
            pass

    def _check_keys(self) -> bool:
        """Note which keys have dead letters now, some of them in each call. Returns whether to look on at once."""
        if not self._keys_to_look_at:
            self._keys_to_look_at.extend((topic, key) for topic, keys in self.keys.items() for key in keys)
        looked_at: dict[str, list[bytes]] = defaultdict(list)
        for _ in range(min(LOOKED_AT, len(self._keys_to_look_at))):
            topic, key = self._keys_to_look_at.popleft()
            looked_at[topic].append(key)
        with self._session.transaction() as connection:
            # Of other members too: the key of a message may have moved to another partition.
            added, more = self._new_letters.look(connection, self.keys, self._letters.look(connection))
            gone = {topic: self._letters.gone(connection, topic, keys) for topic, keys in looked_at.items()}
        for topic, keys in gone.items():
            self.keys[topic] -= keys
        for topic, added_key in added:
            if added_key is not None:
                self.keys[topic].add(added_key)
        return more or any(gone.values())
