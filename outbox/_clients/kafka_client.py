"""An admin client for everyone: silent, with the reasons of its failures, and offsets that are never a guess."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Final

from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ListOffsetsResultInfo, OffsetSpec  # type: ignore[attr-defined]

from outbox._clients.kafka import ConnectionErrors, complete, refused_options

EARLIEST: Final = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
LATEST: Final = OffsetSpec.latest()  # type: ignore[no-untyped-call]
STALE: Final = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
    }
)
"""Errors of a broker that has just come back or handed over a partition: the client's metadata is stale."""


class Admin(AdminClient):
    """A silent admin client, whose errors say why its connections fail: make requests in ``explaining``.

    heard  is called with each error event as well; it must not keep this object alive.

    Raises ConfigurationError when librdkafka refuses the options.
    """

    def __init__(self, options: Mapping[str, Any], heard: Callable[[KafkaError], None] | None = None) -> None:
        self.errors = errors = ConnectionErrors()

        def hear(error: KafkaError) -> None:
            errors.hear(error)
            if heard is not None:
                heard(error)

        values: dict[str, Any] = {**complete(options), "error_cb": hear}
        try:
            super().__init__(values, logger=silent_logger())
        except KafkaException as error:
            raise refused_options(error) from error

    def explaining(self) -> AbstractContextManager[None]:
        """Add why connections fail to the KafkaException of a request that is made, and awaited, in this block."""
        return self.errors.explaining(self)

    def ask_offsets(
        self, partitions: Iterable[tuple[str, int]], spec: OffsetSpec, isolation: IsolationLevel, seconds: float
    ) -> Mapping[TopicPartition, Future[ListOffsetsResultInfo]]:
        """Ask for offsets, and return at once: see ``answered``."""
        wanted = {TopicPartition(topic, part): spec for topic, part in partitions}
        if not wanted:
            return {}
        asked: Mapping[TopicPartition, Future[ListOffsetsResultInfo]] = self.list_offsets(
            wanted, isolation_level=isolation, request_timeout=seconds
        )
        return asked


def answered(at: TopicPartition, answer: Future[ListOffsetsResultInfo]) -> ListOffsetsResultInfo:
    """Return the answer for a partition. Raises KafkaException, also where there is none.

    Where a broker ends before it has answered for a partition, librdkafka gives OFFSET_INVALID, and no error. Taken for
    a number that is an end before everything: a loss of the whole log, or a topic without markers.
    """
    found = answer.result()
    if found.offset == OFFSET_INVALID:
        raise KafkaException(KafkaError(KafkaError.OFFSET_NOT_AVAILABLE, f"no answer for {at.topic}-{at.partition}"))
    return found


def silent_logger() -> logging.Logger:
    """Return a silent logger for librdkafka, whose lines would otherwise bypass the structured log on stderr."""
    logger = logging.getLogger("outbox.librdkafka")
    logger.setLevel(logging.CRITICAL + 1)
    return logger
