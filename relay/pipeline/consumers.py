"""The consumers' side for the operations page: their groups, dead letters, reservations, latency and audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import orjson
import psycopg

from outbox._app.settings import client_options
from outbox.consumer.admin.dead_letters import DeadLetters, readable
from outbox.consumer.admin.offsets import Group, Offsets
from outbox.consumer.admin.status import has_tables
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.external.reservations import Chosen, ReservationAdmin
from relay.config import Settings

_KAFKA_SECONDS: Final = 5.0
_MOST_CALLS: Final = 50

_Opened = TypeVar("_Opened")


def state_word(state: str) -> str:
    """Return the word for a dead letter's state that both sides have: ``retry`` is retrying, as an event is."""
    return "retrying" if state == "retry" else state


class Consumers:
    """Opens the sink for one request at a time. ``session`` yields a connection to it, in autocommit."""

    def __init__(self, settings: Settings, session: Callable[[], Any]) -> None:
        self._settings = settings
        self.session = session
        self._kafka: KafkaAdmin | None = None

    def exist(self) -> bool:
        """Return whether the database has the consumers' tables. Raises ConsumerUnavailable."""
        with self.session() as connection:
            return has_tables(connection, self._settings.consumer_schema)

    @contextmanager
    def opened(self, kind: Callable[[psycopg.Connection[Any], str], _Opened]) -> Iterator[_Opened]:
        """Yield what reads or changes the consumers' tables, for as long as its connection is open."""
        with self.session() as connection:
            yield kind(connection, self._settings.consumer_schema)

    def dead_letter(self, number: int) -> dict[str, Any]:
        with self.opened(DeadLetters) as letters:
            found = readable(letters.show(number))
        if found["value_encoding"] == "json":
            # A fragment of orjson's, as it stands in the message.
            found["value"] = orjson.dumps(found["value"]).decode()
        return found

    def stuck_calls(self) -> tuple[Mapping[str, int], Sequence[Mapping[str, Any]]]:
        """Return how many calls to other systems there are in each state, and the first of those that are stuck."""
        if not self.exist():
            return {}, []
        with self.opened(ReservationAdmin) as reservations:
            return reservations.counts(Chosen()), reservations.find(Chosen(), most=_MOST_CALLS)

    def positions(self, group: str) -> tuple[Group, str | None]:
        """Return a group's partitions, and why Kafka's offsets are missing; None if they are not. Raises NotFound."""
        self._kafka = self._kafka or KafkaAdmin(client_options(self._settings), seconds=_KAFKA_SECONDS)
        with self.session() as connection:
            groups, away = Offsets(connection, self._settings.consumer_schema, self._kafka).show(group)
        return groups[0], away
