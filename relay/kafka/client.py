"""Helpers for librdkafka clients: an admin client, their logger, callbacks that keep nothing alive, error texts."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from outbox._clients.kafka import ConnectionErrors, complete, refused_options


class Admin(AdminClient):
    """A silent admin client, whose errors say why its connections fail: make requests in ``explaining``.

    Raises ConfigurationError when librdkafka refuses the options.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._errors = ConnectionErrors()
        values: dict[str, Any] = {**complete(options), "error_cb": self._errors.hear}
        try:
            super().__init__(values, logger=silent())
        except KafkaException as error:
            raise refused_options(error) from error

    def explaining(self) -> AbstractContextManager[None]:
        """Add why connections fail to the KafkaException of a request that is made, and awaited, in this block."""
        return self._errors.explaining(self)


def text_of(error: KafkaException) -> str:
    """Return the error text of librdkafka or the broker."""
    inner = error.args[0]
    return inner.str() if isinstance(inner, KafkaError) else str(error)


def is_end(error: KafkaError) -> bool:
    """Return whether an error event is only the end of a partition. Raises KafkaException if it is an error.

    Returns False if rights on the group are missing: a reader with assigned partitions and offsets needs none, but
    librdkafka looks up the group's coordinator anyway, reports the refusal, and reads on.
    """
    if error.code() == KafkaError._PARTITION_EOF:
        return True
    if error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
        raise KafkaException(error)
    return False


def headers_of(message: Message) -> dict[str, Any]:
    """Return a record's headers; none if a name is not UTF-8, which another program may have written.

    For such a name the client's C code returns a broken list with an exception set. Only a caller in C, such as map(),
    is certain to notice it. Call it only once: a second call returns the list without the error, and reading it
    crashes.
    """
    try:
        [found] = map(Message.headers, [message])
    except SystemError:
        return {}
    return dict(found or ())


def reader_options(options: Mapping[str, str], group: str, isolation: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a consumer that reads assigned partitions, and always from their leaders."""
    return {
        **complete(options),
        # A follower in the reader's own rack may lag behind the leader.
        "client.rack": "",
        "group.id": group,
        "enable.auto.commit": False,
        "isolation.level": isolation,
        "allow.auto.create.topics": False,
        **more,
    }


def create_topic(admin: Admin, topic: NewTopic, seconds: float) -> None:
    """Create a topic, unless it exists. Raises KafkaException."""
    try:
        # Without an explicit timeout the client waits a minute for a controller that has just died.
        with admin.explaining():
            admin.create_topics([topic], operation_timeout=seconds, request_timeout=seconds)[topic.topic].result()
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise


def partitions_text(numbers: Collection[int]) -> str:
    """Return partitions for error texts: all of a few, the first of many."""
    some = sorted(numbers)
    shown = ", ".join(map(str, some[:10])) + (", …" if len(some) > 10 else "")
    return f"partition{'s' if len(some) > 1 else ''} {shown}"


def silent() -> logging.Logger:
    """Return a silent logger for librdkafka, whose lines would otherwise bypass the structured log on stderr."""
    logger = logging.getLogger("relay.librdkafka")
    logger.setLevel(logging.CRITICAL + 1)
    return logger


def weak_callback(method: Callable[..., None]) -> Callable[..., None]:
    """Return a callback for librdkafka that does not keep its object alive.

    The producer refers to its callbacks, and the object to the producer: only Python's garbage collector would free
    such a cycle, and with it librdkafka's threads and connections.
    """
    reference = weakref.WeakMethod(method)

    def call(*values: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*values)

    return call
