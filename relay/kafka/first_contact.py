"""The first request to Kafka: a relay that starts without it says so at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import structlog
from confluent_kafka import KafkaError, KafkaException

from outbox._clients.kafka import CIRCUMSTANCES
from outbox._clients.kafka_client import Admin
from relay.kafka.client import text_of

log = structlog.get_logger("relay")

_SECONDS: Final = 2.0
_EFFECTS: Final = frozenset({KafkaError._ALL_BROKERS_DOWN})


def log_unreachable(options: Mapping[str, str]) -> None:
    """Log once if no broker answers within two seconds: the addresses, and why the last connection failed.

    A turn waits for longer, because a broker that restarts needs more time; without events there is no turn at all.
    """
    failed: list[str] = []

    def heard(error: KafkaError) -> None:
        if error.code() not in _EFFECTS:
            failed.append(CIRCUMSTANCES.sub("", error.str()))

    admin = Admin(options, heard)
    try:
        with admin.explaining():
            admin.list_topics(timeout=_SECONDS)
    except KafkaException as error:
        why = failed[-1] if failed else text_of(error)
        log.warning(
            "Kafka does not answer; this relay waits for it. See OUTBOX_KAFKA__BOOTSTRAP_SERVERS",
            brokers=options["bootstrap.servers"],
            error=why,
        )
