"""The Kafka clients of a member of a group, one after the other: what their errors mean, and when the next one begins.

| what Kafka or librdkafka reports                          | what follows                                         |
|-----------------------------------------------------------|------------------------------------------------------|
| a right is missing, or it refuses how the client joins    | the member ends: a new client would be refused       |
| records that can't be read, as with a wrong checksum      | the member ends                                      |
| it refuses the credentials                                | librdkafka connects again. The member ends once      |
|                                                           | that has lasted for REFUSED_SECONDS, and nothing     |
|                                                           | worked                                               |
| a connection fails after certificates were replaced       | a new client: it reads them when it is made          |
| fatal: another member has the ``group.instance.id``, or a | a new client, after a pause. A probe sees why, until |
|   broker says so once it has restarted                    | Kafka assigns it something                           |
| certificates are half replaced when a new client reads    | another one, after a pause                           |
|   them                                                    |                                                      |
| fatal for another reason, as with                         | the member ends                                      |
|   `group.protocol=consumer` for rights                    |                                                      |
| brokers away, a topic that is not there, a late poll      | librdkafka goes on by itself. A probe sees why       |
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from outbox._clients.backoff import pause
from outbox._clients.callbacks import raising
from outbox._clients.kafka import Certificates
from outbox._clients.kafka_rules import (
    LastingRefusal,
    fatal_cause,
    is_fatal,
    is_fenced,
    is_refusal,
    refuses_credentials,
)
from outbox.consumer.errors import ConsumerUnavailable
from outbox.consumer.kafka_errors import of_kafka
from outbox.consumer.stalled import Watch
from outbox.errors import ConfigurationError

READING: Final[Mapping[str, Any]] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # A position that Kafka does not have is an error, never a jump.
    "auto.offset.reset": "error",
    # Positions of an open transaction are waited for, too.
    "isolation.level": "read_committed",
    # Behind a transaction's marker there may be no message that would move the position.
    "enable.partition.eof": True,
}
"""Options of every member's consumer."""
_SHORT_SECONDS: Final = 60.0
"""Clients that lasted for less were replaced too soon: the pause before the next ones is longer."""


Rebalanced = Callable[[Any, list[TopicPartition]], None]


def subscribe(
    consumer: Consumer, topics: Collection[str], assigned: Rebalanced, revoked: Rebalanced, *, incremental: bool = False
) -> None:
    """Join the group, or join it again. What the callbacks raise is raised by the consumer's next ``poll``.

    A static member that comes back is given the partitions that it had, also those of topics to which it subscribed
    before (KIP-345). The callbacks do not see these. With a pattern they see all: librdkafka decides what matches.

    incremental  whether partitions are assigned and revoked one by one: cooperative, or with KIP-848.
    """
    patterns = any(topic.startswith("^") for topic in topics)

    def subscribed(partitions: list[TopicPartition]) -> list[TopicPartition]:
        return [each for each in partitions if patterns or each.topic in topics]

    def assign(kafka: Consumer, partitions: list[TopicPartition]) -> None:
        assigned(kafka, subscribed(partitions))

    def revoke(kafka: Consumer, partitions: list[TopicPartition]) -> None:
        known = subscribed(partitions)
        revoked(kafka, known)
        if incremental and len(known) < len(partitions):
            # Without this call librdkafka would take away all, refuse because of those it never had, and wait forever.
            kafka.incremental_unassign(known)

    consumer.subscribe(list(topics), on_assign=raising(assign), on_revoke=raising(revoke), on_lost=raising(revoke))


class MemberClients:
    """Judges the errors of a member's clients, and runs new ones where that helps.

    options  of its consumer. The ``error_cb`` in them is called, too.
    refused  makes the error that ends the member, from its text.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        topics: Collection[str],
        watch: Watch,
        logger: logging.Logger,
        refused: Callable[[str], Exception],
    ) -> None:
        self._options = options
        self._topics = topics
        self._watch = watch
        self._logger = logger
        self._refused = refused
        self._group = options["group.id"]
        self._certificates = Certificates(options)
        self._credentials = LastingRefusal()
        self._fenced: KafkaError | None = None
        # A broker that refuses the client sends no message: librdkafka would retry forever.
        self._final: KafkaError | None = None
        self._taken = False

    def run(self, run: Callable[[], KafkaError | None], stop: threading.Event) -> None:
        """Call ``run``, which makes clients and uses them, until ``stop`` or until it returns no error.

        It returns the error behind which new clients go on.
        """
        quick = 0
        try:
            while not stop.is_set():
                began = time.monotonic()
                # Before the clients read them.
                self._certificates, self._fenced = Certificates(self._options), None
                error = run()
                if error is None:
                    return
                self._logger.warning("group %s: a new client goes on: %s", self._group, error.str())
                self._watch.unassigned(self._topics)
                self._watch.failed(None, error.str())
                quick = quick + 1 if time.monotonic() - began < _SHORT_SECONDS else 0
                pause(stop, quick)
        finally:
            self._watch.assigned(())

    @contextmanager
    def making(self) -> Iterator[None]:
        """Make clients in this block. Raises ConfigurationError for options that librdkafka refuses.

        And KafkaException if it took them before: certificates are just being replaced, and later ones may be whole; or
        if it has got no token, until that has lasted.
        """
        try:
            yield
        except (KafkaException, ConfigurationError) as error:
            if isinstance(error, KafkaException) and refuses_credentials(error.args[0]):
                self.hear(error.args[0])
                self.check()
                raise
            text = f"kafka: {error.args[0].str()}" if isinstance(error, KafkaException) else str(error)
            if self._taken:
                raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text)) from error
            raise ConfigurationError(text) from error
        self._taken = True

    @property
    def lost(self) -> KafkaError | None:
        """The error behind which only new clients go on; None while these are of use."""
        return self._fenced or self._certificates.failed

    def hear(self, error: KafkaError) -> None:
        """Be the ``error_cb`` of the clients. It may be called anywhere, so what it hears is noted: see ``check``."""
        if not self._may_pass(error) and is_refusal(error):
            self._final = error
        self._certificates.hear(error)

    def check(self) -> None:
        """Raise the error that ends the member if one was heard that does not pass."""
        final = self._final or self._credentials.believed
        if final is not None:
            raise self._refused(str(of_kafka(final, f"Kafka, group {self._group}")))

    def judge(self, error: KafkaError, message: Message) -> None:
        """Raise the error that ends the member for this one, which came as a message; otherwise see ``lost``."""
        if is_fatal(error) and is_fenced(error):
            self._fenced = error
            return
        if self._may_pass(error):
            return
        about = f"Kafka, group {self._group}"
        if (topic := message.topic()) is not None:
            # A number below 0: all partitions.
            number = message.partition()
            about += f", {topic}" if number is None or number < 0 else f", {topic}-{number}"
        found = of_kafka(fatal_cause(error), about)
        if not isinstance(found, ConsumerUnavailable):
            raise self._refused(str(found))
        if is_fatal(error):
            look_at = "look at the group options, the brokers' version and the ACLs. Nothing was skipped"
            raise self._refused(f"{found}; {look_at}")
        self._note(error)

    def worked(self) -> None:
        """Note that a message came or that a request was answered: the credentials are good."""
        self._credentials.forget()

    def certificates_replaced(self) -> bool:
        """Return whether clients that can't connect may be able to if they are made anew."""
        return self._certificates.replaced()

    def _may_pass(self, error: KafkaError) -> bool:
        if refused := self._credentials.hear(error):
            self._note(error)
        return refused

    def _note(self, error: KafkaError) -> None:
        self._logger.warning("group %s: %s", self._group, error.str())
        self._watch.failed([None], error.str())
