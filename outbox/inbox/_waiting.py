"""Keep up with the dead letters of a member's partitions: those to be retried, and which keys have any."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import psycopg

from outbox.consumer.model import Partition
from outbox.inbox._assigned import Assigned
from outbox.inbox._letters import Letters
from outbox.inbox._retries import Retries
from outbox.inbox._session import Session

_PART_OF_TIME: Final = 0.01
"""How much of its time a member spends on reading the keys of dead letters: those of 100,000 take it 100 ms or more."""
_PART_WHILE_RETRYING: Final = 0.1
_LONGEST_REST: Final = 10.0
"""For how many seconds at most a look that released nothing is not repeated: of a key with 100,000 it may read all."""
_LOOKED_AT: Final = 100
"""Of how many dead letters it is found at a time whether their keys wait for another partition."""


class WaitingLetters:
    """Which keys have dead letters; and retries what an operator, or the end of another dead letter, has released.

    The keys are read at a claim, after retries, and from time to time. In between there may be too many: a message that
    is put behind nothing is released with the next upkeep. Some of those that another member adds may be missing: they
    are of keys that have moved from its partitions.

    Those of partitions that the group no longer has are retried by the member that has the topic's first one, under its
    claim. When there are more partitions again, two members may do so for a while: one of them locks a letter, and then
    looks once more whether it is behind another.
    """

    def __init__(self, letters: Letters, session: Session, retries: Retries) -> None:
        self._letters = letters
        self._session = session
        self._retries = retries
        # Of each topic, one set for all partitions.
        self.keys: dict[str, set[bytes]] = {}
        self._gone: dict[Partition, Partition] = {}
        # How far the keys of each partition's dead letters were looked at; see Letters.release.
        self._released: dict[Partition, bytes] = {}
        self._release_at: dict[Partition, float] = {}
        self._read_at = self._retried_at = 0.0
        self._last_turn: Partition = ("", -1)

    def read(self, connection: psycopg.Connection[Any], topics: Collection[str]) -> dict[str, set[bytes]]:
        """Read all keys of topics, in the transaction of a claim. The result is for ``know``."""
        began = time.monotonic()
        found = {topic: self._letters.keys(connection, topic) for topic in topics}
        others = {partition: first for partition, first in self._gone.items() if partition[0] not in topics}
        self._gone = others | self._letters.gone(connection, topics)
        ended = time.monotonic()
        self._read_at = ended + (ended - began) / _PART_OF_TIME
        self._retried_at = ended + (ended - began) / _PART_WHILE_RETRYING
        return found

    def know(self, keys: Mapping[str, set[bytes]]) -> None:
        """Continue with what ``read`` has returned, after its transaction was committed."""
        for topic, found in keys.items():
            # In place: every Assigned of the topic has this set as its dead_keys.
            known = self.keys.setdefault(topic, found)
            known.intersection_update(found)
            known.update(found)

    def keep_up(self, parts: Mapping[Partition, Assigned], go_on: Callable[[], bool] = lambda: True) -> None:
        """Apply the dead letters that an operator retries, and those that wait behind one that is gone.

        Meanwhile the messages of their partitions wait: of a busy key more could come behind the letters than are
        retried.

        go_on  asked after each letter.
        """
        if not parts:
            return
        claims = {partition: parts[first] for partition, first in self._gone.items() if first in parts} | dict(parts)
        with self._session.transaction() as connection:
            self._letters.by_index(connection)
            waiting, behind = self._letters.with_letters(connection, claims.keys())
            for partition in behind:
                began = time.monotonic()
                if began < self._release_at.get(partition, 0.0):
                    continue
                after = self._released.get(partition, b"")
                released, self._released[partition] = self._letters.release(connection, partition, after)
                if released:
                    waiting.add(partition)
                else:
                    ended = time.monotonic()
                    self._release_at[partition] = ended + min((ended - began) / _PART_OF_TIME, _LONGEST_REST)
        for partition in waiting:
            claims[partition].letters_first = True
        held = any(part.letters_first for part in parts.values())
        self._retry({partition: claims[partition] for partition in waiting}, go_on)
        if time.monotonic() >= (self._retried_at if held else self._read_at):
            with self._session.transaction() as connection:
                keys = self.read(connection, self.keys)
            self.know(keys)
            # Not before the keys are known: messages would be put behind letters that are gone.
            for partition in parts.keys() - {claims[one].partition for one in waiting}:
                parts[partition].letters_first = False

    def _retry(self, claims: Mapping[Partition, Assigned], go_on: Callable[[], bool]) -> None:
        """Retry a dead letter of each partition in turn, each under its claim."""
        # Where letters take long only one is tried in each upkeep: the next one begins with the following partition.
        left = deque(sorted(claims, key=lambda one: (one <= self._last_turn, one)))
        cleared: dict[Partition, set[int]] = {}
        while left:
            partition, claim = left[0], claims[left[0]]
            self._last_turn = partition
            if claim.position is None or not claim.letters_first:
                # The claim is lost, or a retry was interrupted: the next upkeep continues.
                left.popleft()
            elif not cleared.get(partition):
                with self._session.transaction() as connection:
                    self._letters.by_index(connection)
                    found = self._letters.hold_back(connection, partition, _LOOKED_AT)
                if found is None:
                    left.popleft()
                else:
                    cleared[partition] = found
                if found:
                    # However long the look took, a letter is tried: else none ever would be.
                    continue
            elif self._retries.retry(claim, partition, cleared[partition]):
                left.rotate(-1)
            else:
                del cleared[partition]
            if not go_on():
                return
