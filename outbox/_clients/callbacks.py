"""Callbacks of librdkafka clients: their errors arrive, and they keep no object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

CALLBACKS: Final = frozenset({"error_cb", "stats_cb", "throttle_cb", "on_commit", "on_delivery"})
"""The options of a client that are callbacks whose errors arrive where it is polled."""


def without_callbacks(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those that a service gives to its consumer alone."""
    own = CALLBACKS | {"logger", "statistics.interval.ms"}
    return {name: value for name, value in options.items() if name not in own}


def raising(callback: Callable[..., None]) -> Callable[..., None]:
    """Return a callback for librdkafka whose exceptions arrive where the client is polled.

    Before Python 3.12, confluent-kafka keeps only the value of an exception that leaves a callback. One that C code has
    raised has no instance yet: a KafkaException of ``consumer.commit`` becomes a raised KafkaError, which no ``except``
    catches, and a KeyError its key. An exception that Python code has caught is an instance.
    """

    def call(*values: Any) -> None:
        try:
            callback(*values)
        except BaseException:  # noqa: TRY203  catching makes the instance
            raise

    return call


def weak_callback(method: Callable[..., None]) -> Callable[..., None]:
    """Return a callback for librdkafka that is ``raising``, and does not keep its object alive.

    The producer refers to its callbacks, and the object to the producer: only Python's garbage collector would free
    such a cycle, and with it librdkafka's threads and connections.
    """
    reference = weakref.WeakMethod(method)

    @raising
    def call(*values: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*values)

    return call
