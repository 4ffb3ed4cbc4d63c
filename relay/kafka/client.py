"""What every librdkafka client here shares: its logger, callbacks that keep nothing alive, the text of errors."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message


def text_of(error: KafkaException) -> str:
    """Return what librdkafka or the broker said."""
    inner = error.args[0]
    return inner.str() if isinstance(inner, KafkaError) else str(error)


def is_end(error: KafkaError) -> bool:
    """Return whether what a reader was told is the end of a partition. Raises KafkaException for an error.

    A reader with partitions and offsets of its own needs no right on a group. librdkafka asks for the coordinator of
    its group all the same, says that it was refused, and reads on.
    """
    if error.code() == KafkaError._PARTITION_EOF:
        return True
    if error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
        raise KafkaException(error)
    return False


def headers_of(message: Message) -> dict[str, Any]:
    """Return a record's headers; none where a name is not UTF-8, which another program may have written.

    For such a name the client's C code leaves an error behind beside a broken list. Only a call from C, as by map(), is
    certain to notice it. Ask once only: a second call returns the list without the error, and who reads it crashes.
    """
    try:
        [found] = map(Message.headers, [message])
    except SystemError:
        return {}
    return dict(found or ())


def silent() -> logging.Logger:
    """Return a logger for librdkafka, so that its lines do not go to stderr past the structured log."""
    logger = logging.getLogger("relay.librdkafka")
    logger.setLevel(logging.CRITICAL + 1)
    return logger


def weak_callback(method: Callable[..., None]) -> Callable[..., None]:
    """Return a callback for librdkafka that does not keep its object alive.

    The producer holds its callbacks and the object holds the producer: such a ring would go only when Python looks for
    rings, and with it librdkafka's threads and connections.
    """
    reference = weakref.WeakMethod(method)

    def call(*values: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*values)

    return call
