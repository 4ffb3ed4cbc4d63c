"""Fences every producer that may still use a transactional.id."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox._clients.kafka import ConnectionErrors, complete, refused_options
from outbox._clients.kafka_client import silent_logger
from relay.core.ports import BrokerUnavailable, IdBusy
from relay.kafka.client import accepted_before, text_of

BUSY_SECONDS: Final = 2.0
"""How long to wait for an id whose last transaction has not ended: usually it takes much less, or hours."""

# A busy id is usually free within milliseconds. A client asks again only half a second later, a new one at once.
_FIRST_AGAIN_SECONDS: Final = 0.1
_CONNECT_SECONDS: Final = 0.5

_FENCE_SECONDS: Final = 10.0
# For an id that could not be fenced, and how long after that. Each attempt holds up the lanes that do not need it.
_LATER_SECONDS: Final = 3.0
_AGAIN_SECONDS: Final = 20.0

_FORBIDDEN: Final = frozenset(
    {KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}
)


def fence(
    options: Mapping[str, Any],
    transactional_id: str,
    seconds: float = _FENCE_SECONDS,
    busy_seconds: float = BUSY_SECONDS,
) -> None:
    """End the open transaction of a transactional.id, and fence every earlier producer with that id.

    options are librdkafka's, from config.producer_options. A commit that had begun is completed, any other transaction
    is aborted. Idempotent. On return the coordinator has decided the transaction; whether every partition has the
    markers is checked by the reader (see StateTopic).

    Raises Unavailable when the broker does not answer in time or refuses (IdBusy if the last transaction has not ended
    within ``busy_seconds``), ConfigurationError for an unknown option.
    """
    busy_until: float | None = None
    again_seconds = _FIRST_AGAIN_SECONDS
    while True:
        producer = ShortLivedProducer(options, transactional_id)
        try:
            initialize(producer, seconds, min(again_seconds, busy_seconds))
        except KafkaException as error:
            if is_busy(error):
                now = time.monotonic()
                busy_until = busy_until or now + busy_seconds
                if now < busy_until:
                    again_seconds *= 2
                    continue
            kind = IdBusy if is_busy(error) else BrokerUnavailable
            raise kind(_explained(producer.explained(error), transactional_id, seconds)) from error
        else:
            return
        finally:
            producer.purge()


class Fencing:
    """Fences ids, and remembers for a while which ones it can't fence: otherwise each lane that names such an id would
    wait for it again. Not thread-safe.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._failed: dict[str, tuple[type[BrokerUnavailable], str, float]] = {}

    def __call__(self, transactional_id: str) -> None:
        known = self._failed.get(transactional_id)
        if known is not None and time.monotonic() < known[2]:
            raise known[0](known[1])
        try:
            with accepted_before():
                fence(self._options, transactional_id, _FENCE_SECONDS if known is None else _LATER_SECONDS)
        except BrokerUnavailable as error:
            # Not the exception: its traceback would keep the producer, and those of the times before.
            self._failed[transactional_id] = type(error), str(error), time.monotonic() + _AGAIN_SECONDS
            raise
        self._failed.pop(transactional_id, None)


def initialize(producer: Producer, seconds: float, busy_seconds: float) -> None:
    """Call init_transactions; give up after ``busy_seconds`` if only the id's last transaction delays it."""
    # A client that is not connected yet looks for the coordinator again only half a second later. These requests
    # connect it: the first may be answered by an address of the settings, whose connection ends with the answer, the
    # second is answered by a broker. They name one topic: of all topics the answer is long, and would be taken for the
    # partitions that there are.
    with suppress(KafkaException):
        for _ in range(2):
            producer.list_topics("__transaction_state", timeout=_CONNECT_SECONDS)
    end, left_seconds = time.monotonic() + seconds, seconds
    while True:
        # In steps: connecting may take long, and only then it shows that the id is busy.
        try:
            return producer.init_transactions(min(busy_seconds, left_seconds))
        except KafkaException as error:
            left_seconds = end - time.monotonic()
            if is_busy(error) or not error.args[0].retriable() or left_seconds <= 0:
                raise


def is_busy(error: KafkaException) -> bool:
    return bool(error.args[0].code() == KafkaError.CONCURRENT_TRANSACTIONS)


class ShortLivedProducer(Producer):
    """A producer for one transaction, which retries quickly. Raises ConfigurationError for an unknown option."""

    def __init__(self, options: Mapping[str, Any], transactional_id: str) -> None:
        self._errors = ConnectionErrors()
        values = {
            **options,
            "transactional.id": transactional_id,
            # At-most-once has others.
            "acks": "all",
            "enable.idempotence": "true",
            "message.send.max.retries": "2147483647",
            # The relay's own backoff is long, to recognize a clean commit, which does not matter here.
            "retry.backoff.ms": "100",
            "retry.backoff.max.ms": "500",
            "error_cb": self._errors.hear,
        }
        try:
            super().__init__(complete(values), logger=silent_logger())
        except KafkaException as error:
            raise refused_options(error) from error

    def explained(self, error: KafkaException) -> KafkaException:
        """Return an exception of this producer, with the reason why its connections fail if that has caused it."""
        return self._errors.explained(error, self)


def _explained(error: KafkaException, transactional_id: str, seconds: float) -> str:
    code = error.args[0].code()
    doing = f"Kafka, fencing the transactional.id {transactional_id!r}"
    if code in _FORBIDDEN:
        return (
            f"{doing}: this user may not use it; grant WRITE and DESCRIBE on the transactional id "
            f"{transactional_id!r}, or on a prefix of it ({text_of(error)})"
        )
    if code in {KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT}:
        return (
            f"{doing}: the transaction coordinator did not answer within {seconds:g} s; is a broker away, or has "
            f"__transaction_state no leader? ({text_of(error)})"
        )
    if is_busy(error):
        return (
            f"{doing}: its last transaction can't be ended yet; has one of its partitions no leader, or too few "
            f"replicas in sync? ({text_of(error)})"
        )
    return f"{doing}: {text_of(error)}"
