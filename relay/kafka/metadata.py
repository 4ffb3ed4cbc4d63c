"""What the brokers say about topics, asked at most once a second, however many topics are in trouble."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    ClusterMetadata,
    ConfigResource,
)

from outbox._clients.kafka import OptionsRefused
from outbox._clients.kafka_client import Admin
from outbox._clients.kafka_rules import is_silence

_SHARED_SECONDS: Final = 1.0


class SharedMetadata:
    """The metadata of all topics, and settings of some. An answer or a failure serves for a second. Not thread-safe.

    admin  the client that asks; another one after each failure of ``topics``, and where ``note`` says so.
    """

    def __init__(self, options: Mapping[str, Any], clock: Callable[[], float]) -> None:
        self.admin = Admin(options)
        self._options = options
        self._clock = clock
        self._asked_at = self._until = 0.0
        self._answer: ClusterMetadata | KafkaError | None = None
        self._min_in_sync: dict[str, int | None] = {}

    def forget(self) -> None:
        self._answer = None

    def note(self, errors: Iterable[KafkaException]) -> None:
        """Note how requests failed, when none is in flight: after a time-out another client asks."""
        if any(is_silence(error.args[0]) for error in errors):
            self._another_client()

    def _another_client(self) -> None:
        # While a file of certificates is replaced, there is none; the present one goes on until the next failure.
        with suppress(OptionsRefused):
            self.admin = Admin(self._options)

    def topics(self, seconds: float, since: float = float("-inf")) -> ClusterMetadata:
        """Return the metadata, waiting for at most ``seconds``. Raises KafkaException when no broker answers.

        An answer to a question from before ``since``, by the clock, does not serve.
        """
        if self._answer is None or self._clock() >= self._until or self._asked_at < since:
            self._min_in_sync = {}
            self._asked_at = self._clock()
            try:
                # All topics, not only those that matter: a request by name could make the broker create one.
                with self.admin.explaining():
                    self._answer = self.admin.list_topics(timeout=seconds)
            except KafkaException as error:
                # Not the exception: its traceback would keep all that its callers have.
                self._answer = error.args[0]
                # A client reads its certificates once; by now they may be renewed.
                self._another_client()
            self._until = self._clock() + _SHARED_SECONDS
        if isinstance(self._answer, KafkaError):
            raise KafkaException(self._answer)
        return self._answer

    def min_in_sync(self, topic: str, others: Collection[str], seconds: float) -> int | None:
        """Return the topic's min.insync.replicas; None if it can't be read. ``others`` are asked for along with it."""
        if topic not in self._min_in_sync:
            wanted = {name: ConfigResource(ConfigResource.Type.TOPIC, name) for name in {topic, *others}}
            try:
                answers = self.admin.describe_configs(list(wanted.values()), request_timeout=seconds)
            except KafkaException:
                answers = {}
            failed = []
            for name, resource in wanted.items():
                try:
                    self._min_in_sync[name] = int(answers[resource].result()["min.insync.replicas"].value)
                except (KafkaException, KeyError) as error:
                    self._min_in_sync[name] = None
                    failed += [error] if isinstance(error, KafkaException) else []
            self.note(failed)
        return self._min_in_sync[topic]
