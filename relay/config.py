"""What the relay derives from its settings: librdkafka's options and the timeouts of each delivery.

Kafka's own options are passed to librdkafka: ``OUTBOX_KAFKA__LINGER_MS`` or ``[kafka] "linger.ms"``. Options that would
break the guarantee of the chosen delivery are refused.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from outbox._app.choices import Delivery, SourceKind
from outbox._app.settings import Settings, load
from outbox._topics import STATE_SUFFIX
from outbox.errors import ConfigurationError

__all__ = [
    "Delivery",
    "Settings",
    "SourceKind",
    "delivery_seconds",
    "load",
    "producer_options",
    "shared_source_note",
    "state_topic_name",
]

_RETRIES: Final = frozenset({"retries", "message.send.max.retries"})
_TIMEOUTS: Final = ("delivery.timeout.ms", "message.timeout.ms")

# Any other value of these options would lose, duplicate or reorder events, or send them to an unverified server.
_REQUIRED: Final = {
    "acks": {"all", "-1"},
    "request.required.acks": {"all", "-1"},
    "enable.idempotence": {"true"},
    "enable.gapless.guarantee": {"true"},
    "max.in.flight.requests.per.connection": {"1", "2", "3", "4", "5"},
    "max.in.flight": {"1", "2", "3", "4", "5"},
    "partitioner": {"murmur2", "murmur2_random", "consistent", "consistent_random", "fnv1a", "fnv1a_random"},
    "enable.ssl.certificate.verification": {"true"},
    "ssl.endpoint.identification.algorithm": {"https"},
}


# Options that each delivery requires. The user can't change them.
_DELIVERY: Final[dict[Delivery, dict[str, str]]] = {
    # No request is ever repeated; events that a broker does not acknowledge are lost.
    Delivery.AT_MOST_ONCE: {
        # Or 0: relay.at_most_once_acks.
        "acks": "1",
        "enable.idempotence": "false",
        "enable.gapless.guarantee": "false",
        "message.send.max.retries": "0",
    },
    # A failed message must fail those behind it too: they may have the same key. librdkafka calls the option
    # experimental; a test checks that it keeps the order.
    Delivery.AT_LEAST_ONCE: {"enable.gapless.guarantee": "true"},
    # A failed message aborts the whole transaction.
    Delivery.EXACTLY_ONCE: {
        # Long, because a commit counts as clean only if it ends before any request can have been repeated.
        "retry.backoff.ms": "1000",
        "retry.backoff.max.ms": "1000",
    },
}


def producer_options(settings: Settings) -> dict[str, str]:
    """Return librdkafka's options for the chosen delivery; the user's override ours.

    Raises ConfigurationError for an option that would break the guarantee.
    """
    settings.require_kafka()
    if settings.delivery is Delivery.AT_MOST_ONCE:
        acks = {"acks", "request.required.acks"}
        _refuse_given(settings, acks, "remove it, and set OUTBOX_RELAY__AT_MOST_ONCE_ACKS to 0 or 1")
        _refuse_given(settings, _DELIVERY[settings.delivery].keys() | _RETRIES)
    else:
        # A message that librdkafka gives up can be overtaken: only the turn's deadline ends its retries.
        _refuse_given(settings, (_DELIVERY[settings.delivery].keys() - _REQUIRED.keys()) | _RETRIES)
    for name, allowed in _REQUIRED.items():
        value = settings.kafka.get(name)
        if value is not None and value.lower() not in allowed:
            raise ConfigurationError(
                f"kafka option {name}={value} would break {settings.delivery}: "
                f"it must be {' or '.join(sorted(allowed))}"
            )
    ours = {
        "client.id": "outbox-relay",
        "acks": "all",
        "enable.idempotence": "true",
        # The Java client's partitioner (murmur2), so that all producers of a topic agree.
        "partitioner": "murmur2_random",
        "compression.type": "lz4",
        # For large requests while a backlog is drained; at the end of a turn everything is flushed at once.
        "linger.ms": "5",
        # A turn is bounded by its bytes; more than a turn is never queued.
        "queue.buffering.max.kbytes": "65536",
        # The broker's default limit; librdkafka's own is lower than the largest event plus our headers.
        "message.max.bytes": "1048588",
        "log.connection.close": "false",
    }
    if "request.required.acks" in settings.kafka:
        del ours["acks"]
    given = {name: value for name, value in settings.kafka.items() if name not in _TIMEOUTS}
    if settings.delivery is Delivery.EXACTLY_ONCE:
        # The coordinator may abort a transaction only when its relay can't be working on it any more.
        ours["transaction.timeout.ms"] = str(max(int(delivery_seconds(settings) * 3000), 60_000))
    # 0 means never: the publisher enforces the deadline itself, see BatchProducer.drain. At-most-once nothing comes
    # again, so what a relay that slept still has is dropped: other relays may have sent what comes after it.
    once = settings.delivery is Delivery.AT_MOST_ONCE
    timeout_ms = int(delivery_seconds(settings) * 1000) if once else 0
    own = _DELIVERY[settings.delivery] | {"delivery.timeout.ms": str(timeout_ms)}
    if once:
        own["acks"] = str(settings.relay.at_most_once_acks)
    return ours | given | own


def _refuse_given(settings: Settings, names: AbstractSet[str], advice: str = "remove it") -> None:
    for name in sorted(names & settings.kafka.keys()):
        raise ConfigurationError(f"kafka option {name!r} is set by the relay itself for {settings.delivery}; {advice}")


def state_topic_name(settings: Settings) -> str:
    return settings.name + STATE_SUFFIX


def shared_source_note(settings: Settings) -> str | None:
    """Return what to look at if records are not the outbox's: one with another name may have the same ``ce_source``."""
    if settings.given_name is None or "ce_source" in settings.model_fields_set:
        return None
    return (
        "if another outbox writes these topics, its records may be among them: OUTBOX_CE_SOURCE has the default, so "
        "they look like this outbox's"
    )


def delivery_seconds(settings: Settings) -> float:
    """Return how long a batch may wait for acknowledgements: ``delivery.timeout.ms``, or two thirds of the lease.

    Raises ConfigurationError unless it is shorter than the lease. At-most-once it is half the lease at most: each event
    needs that much of the lease when it is sent, and the time since its row was deleted must not eat that up.
    """
    lease = settings.relay.lease_seconds
    once = settings.delivery is Delivery.AT_MOST_ONCE
    for name in _TIMEOUTS:
        given = settings.kafka.get(name)
        if given is None:
            continue
        milliseconds = int(given) if given.isdecimal() else 0
        if once and not 0 < milliseconds <= lease * 500:
            raise ConfigurationError(
                f"kafka option {name}={given} must be above 0 and at most half the lease of {lease * 1000:.0f} ms "
                "with at-most-once: events that have less of their lease left than this are deleted and not sent. "
                f"Set it to {lease * 500:.0f} or lower, or raise OUTBOX_RELAY__LEASE_SECONDS"
            )
        if not 0 < milliseconds < lease * 1000:
            raise ConfigurationError(
                f"kafka option {name}={given} must be a number above 0 and below the lease of {lease * 1000:.0f} ms: "
                "a message still under way when the lane changes hands would be sent twice. Lower it, or raise "
                "OUTBOX_RELAY__LEASE_SECONDS"
            )
        return milliseconds / 1000
    return lease / 2 if once else lease * 2 / 3
