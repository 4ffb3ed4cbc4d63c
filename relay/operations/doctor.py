"""``outbox doctor``: explains the chosen delivery, and checks whether Postgres and Kafka are set up for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from confluent_kafka import KafkaException

from outbox.errors import OutboxError
from relay.config import Delivery, Settings, delivery_seconds, producer_options
from relay.database import Connector
from relay.kafka.client import text_of
from relay.operations.doctor_kafka import check_kafka
from relay.operations.doctor_postgres import check_consumers, check_outbox, consumed_topics, count_rows, has_consumers
from relay.operations.findings import Finding, Level

EXPLAINED: Final[Mapping[Delivery, str]] = {
    Delivery.AT_MOST_ONCE: "A row is deleted before it is sent, and nothing is sent again: no event stands on Kafka "
    "twice, some may be lost (what was in flight when a relay, broker or connection failed). Lowest latency. For "
    "events that are worth nothing when late.",
    Delivery.AT_LEAST_ONCE: "A row is deleted after Kafka acknowledged it: no event is lost; after a crash at most one "
    "batch of each lane stands on Kafka twice, under the same event id. In order per key once repeats are dropped. For "
    "consumers that dedup by event id, as the Spark jobs here do; with OffsetsOnly such a batch is applied twice.",
    Delivery.EXACTLY_ONCE: "A batch and the note of what is in it are one Kafka transaction: for a reader with "
    "read_committed no event is lost and none stands there twice, in order per key, whatever is killed. Costs a few "
    "milliseconds per batch. For consumers that can't dedup, or do without it: Spark jobs with OffsetsOnly. To these a "
    "replay is a second event.",
}


def examine(settings: Settings) -> Iterator[Finding]:
    """Run all checks; an unreachable server is a finding too. Raises ConfigurationError for invalid settings."""
    yield Finding(Level.OK, f"delivery {settings.delivery}", EXPLAINED[settings.delivery])
    options = producer_options(settings)
    lease = settings.relay.lease_seconds
    yield Finding(
        Level.OK,
        "times",
        f"a killed relay's lanes are taken over after {lease:g} s; a batch that Kafka does not acknowledge within "
        f"{delivery_seconds(settings):g} s is dropped and read again",
    )
    lanes = 0
    consumed: Sequence[str] = ()
    try:
        with Connector(settings.require_database(), "outbox doctor")() as connection:
            yield from check_outbox(connection, settings)
            if has_consumers(connection, settings):
                consumed = consumed_topics(connection, settings)
                yield from check_consumers(connection, settings)
            lanes = count_rows(connection, settings, "lanes")
    except OutboxError as error:
        yield Finding(Level.FAILURE, "Postgres", str(error))
    try:
        yield from check_kafka(settings, options, lanes, consumed)
    except (OutboxError, KafkaException) as error:
        text = text_of(error) if isinstance(error, KafkaException) else str(error)
        yield Finding(Level.FAILURE, "Kafka", text, "check OUTBOX_KAFKA__BOOTSTRAP_SERVERS and the credentials")
