"""The keys of a group's dead letters, which the driver keeps between rounds: reading 100,000 of them takes 100 ms.

| what happens                          | what follows                                                                |
|---------------------------------------|-----------------------------------------------------------------------------|
| a round stores dead letters           | it adds their keys                                                          |
| a round fails, or an abandoned task   | the keys are read again: there may be dead letters that the driver does not |
| has applied a range after all         | know                                                                        |
| dead letters are retried              | the keys are read again                                                     |
| the last one of a key is discarded    | the key is kept: its next message is put behind nothing, which the next     |
|                                       | ``GroupStore.state`` finds; it is retried, and the keys are read again      |

So there may be too many keys, which costs a detour, and never too few, which would cost the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from outbox.consumer.letters import DeadLetter
from spark_jobs.sink import GroupStore

Keys = Mapping[str, AbstractSet[bytes]]
"""Keys by topic."""


class DeadKeyCache:
    def __init__(self, store: GroupStore, topics: Sequence[str]) -> None:
        self._store = store
        self._topics = topics
        self._keys: dict[str, set[bytes]] | None = None

    def by_topic(self) -> Keys:
        if self._keys is None:
            self._keys = {}
            for topic, key in self._store.dead_keys(self._topics):
                self._keys.setdefault(topic, set()).add(key)
        return self._keys

    def add(self, letters: Iterable[DeadLetter]) -> None:
        if self._keys is not None:
            for letter in letters:
                if letter.key is not None:
                    self._keys.setdefault(letter.record.place[0], set()).add(letter.key)

    def forget(self) -> None:
        self._keys = None
