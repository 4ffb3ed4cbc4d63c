"""What holds for every Kafka client: its options, which errors are refusals, and whether a log was cut."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from outbox.errors import ConfigurationError

_VERIFIED: Final = {"enable.ssl.certificate.verification": "true", "ssl.endpoint.identification.algorithm": "https"}


def require_verification(options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for options that would send credentials and events to a server that is not verified."""
    for name, required in _VERIFIED.items():
        value = str(options.get(name, required))
        if value.lower() != required:
            raise ConfigurationError(
                f"kafka option {name}={value} would turn off the verification of the broker's certificate: remove it, "
                "and name the certificate authority in ssl.ca.location"
            )


_CUT_AT: Final = re.compile(r"end offset is (\d+)")


def cut_logs(
    options: Mapping[str, Any],
    positions: Mapping[tuple[str, int], tuple[int, int]],
    seconds: float,
    logger: logging.Logger,
) -> dict[tuple[str, int], int]:
    """Return the partitions whose leader's log was cut before a position, and at which offset (KIP-320).

    options    of a consumer, with a group id, which it does not join.
    positions  of each partition an offset, and the epoch of a leader that had the log up to there.

    Raises KafkaException when a leader does not answer within ``seconds``, or refuses.
    """
    ours = {
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "isolation.level": "read_uncommitted",
        # What comes is not used: it says that the position is valid.
        "queued.min.messages": 1,
        "fetch.message.max.bytes": 1024,
    }
    passing = {KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}
    cut_codes = {KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION}
    consumer = Consumer({**options, **ours}, logger=logger)
    found: dict[tuple[str, int], int] = {}
    left = dict(positions)
    deadline = time.monotonic() + seconds
    try:
        consumer.assign([TopicPartition(*at, offset, leader_epoch=epoch) for at, (offset, epoch) in left.items()])
        while left:
            if time.monotonic() > deadline:
                topic, part = min(left)
                text = f"the leader of {topic}-{part} did not say whether its log was cut"
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, text))
            for message in consumer.consume(len(left), 0.2):
                at, error = (message.topic() or "", message.partition() or 0), message.error()
                if error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                    # Assigning partitions does not need it; librdkafka looks for the coordinator all the same.
                    continue
                if error is not None and error.code() in cut_codes and "truncation" in error.str():
                    # librdkafka has the offset in the text alone. Without one, the log has no epoch as old as that.
                    cut = _CUT_AT.search(error.str())
                    found[at] = int(cut[1]) if cut else 0
                elif error is not None and error.code() not in passing:
                    raise KafkaException(error)
                if left.pop(at, None):
                    consumer.incremental_unassign([TopicPartition(*at)])
    finally:
        consumer.close()
    return found


def is_refusal(error: KafkaError) -> bool:
    """Return whether Kafka refuses the client's credentials, what they do not allow, or how it joins a group."""
    return error.code() in {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.INVALID_SESSION_TIMEOUT,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    }


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


def is_silence(error: KafkaError) -> bool:
    """Return whether a request was not answered in time. Its client may never be answered: see ``KafkaAdmin``."""
    return error.code() == KafkaError._TIMED_OUT


def is_fatal(error: KafkaError) -> bool:
    """Return whether the client can't be used any more. In a consumer's message only the code says so, not the flag."""
    return error.fatal() or error.code() == KafkaError._FATAL


def fatal_cause(error: KafkaError) -> KafkaError:
    """Return the error that made a client unusable, with the same text; the given one if the text names none.

    A consumer's message has the code _FATAL, and the cause in its text alone (rd_kafka_set_fatal_error0), in front:
    "Fatal error: Broker: Group authorization failed: ConsumerGroupHeartbeat fatal error: …".
    """
    if error.code() != KafkaError._FATAL:
        return error
    codes = {code for name in dir(KafkaError) if name.isupper() and isinstance(code := getattr(KafkaError, name), int)}
    named = {f"Fatal error: {KafkaError(code).str()}: ": code for code in codes}
    found = max((text for text in named if error.str().startswith(text)), key=len, default=None)
    return error if found is None else KafkaError(named[found], error.str(), fatal=True)


def is_fenced(error: KafkaError) -> bool:
    """Return whether another member has the ``group.instance.id``: a new client can join, perhaps after a while."""
    return fatal_cause(error).code() in {KafkaError.FENCED_INSTANCE_ID, KafkaError.UNRELEASED_INSTANCE_ID}


def refuses_credentials(error: KafkaError) -> bool:
    """Return whether a connection's credentials were refused: see ``LastingRefusal`` for when that is final."""
    return error.code() in {KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED}


REFUSED_SECONDS: Final = 300.0
"""How long Kafka may refuse the credentials, which may be changing at the moment."""
# librdkafka reports the same failure of a broker's connections every 30 s. What is further apart is another refusal.
_APART_SECONDS: Final = 120.0


class LastingRefusal:
    """A refusal of a client's credentials, which is believed once it has lasted for REFUSED_SECONDS.

    librdkafka reports as _AUTHENTICATION also what passes: a broker that ends before it has answered the handshake, and
    a token that could not be renewed, while the last one is still good. A password may be changing.

    believed  the error, once it was heard for that long and nothing worked meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.believed: KafkaError | None = None
        self._clock = clock
        self._first: float | None = None
        self._last = 0.0

    def hear(self, error: KafkaError) -> bool:
        """Note an error of the client's ``error_cb`` or of a request; return whether it is such a refusal."""
        if not refuses_credentials(error):
            return False
        now = self._clock()
        if self._first is None or now - self._last > _APART_SECONDS:
            self._first = now
        self._last = now
        if now - self._first >= REFUSED_SECONDS:
            self.believed = error
        return True

    def forget(self) -> None:
        """Note that something worked: a message came, or a request was answered."""
        self._first = self.believed = None


# librdkafka's jitter is 20 %; the rest is for the clock's and the caller's own delays.
_CLEAN_PART: Final = 0.8 * 0.9


def clean_seconds(options: Mapping[str, Any]) -> float:
    """Return how long a commit may take if librdkafka has surely sent it once: see relay/kafka/transactional.py."""
    # Its defaults.
    backoff_ms = min(int(options.get("retry.backoff.ms", 100)), int(options.get("retry.backoff.max.ms", 1000)))
    return backoff_ms / 1000 * _CLEAN_PART


CLEAN_OFFSETS_SECONDS: Final = 0.45
"""How long send_offsets_to_transaction may take if librdkafka has surely sent the positions once.

It waits 500 ms before it sends them again, whatever its options are.
"""
