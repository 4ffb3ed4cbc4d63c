"""The ids of topics, asked for from time to time: another id says that a topic was deleted and created again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Final

_SECONDS: Final = 10.0


class TopicIds:
    """Asks for topics' ids. Does not wait for Kafka.

    describe  asks for topics, and returns at once; an unknown topic's future raises KafkaException.
    """

    def __init__(self, describe: Callable[[Iterable[str]], Mapping[str, Future[Any]]]) -> None:
        self._describe = describe
        self._asked: Mapping[str, Future[Any]] = {}
        self._due = time.monotonic()

    def look(self, topics: Iterable[str]) -> dict[str, str]:
        """Return the ids that have come since the last look; of topics that are not there, none."""
        if self._asked:
            if not all(future.done() for future in self._asked.values()):
                return {}
            asked, self._asked = self._asked, {}
            return {name: str(future.result().topic_id) for name, future in asked.items() if not future.exception()}
        if time.monotonic() >= self._due and (wanted := set(topics)):
            self._asked = self._describe(wanted)
            self._due = time.monotonic() + _SECONDS
        return {}
