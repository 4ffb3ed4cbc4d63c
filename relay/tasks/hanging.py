"""Ends a hanging transaction: its coordinator considers it ended, but a partition still waits for its end.

A broker that restarts can lose the markers of a prepared transaction (KAFKA-20734). The partition then holds the
transaction open for the producer id that wrote it. The coordinator assigns the same producer id, with a higher epoch,
to the next producer of the same transactional.id; when that producer writes to the partition and aborts, the abort
marker ends the hanging transaction too, and read_committed readers see neither. So an ordinary client can end it if the
transactional.id is known. If it is not, Kafka's own tool can, see ``abort_command``.

It can only be aborted: committing it would also publish a record of ours.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, Final

from confluent_kafka import KafkaException

from relay.core.ports import BrokerUnavailable
from relay.kafka.client import text_of, unavailable_on_kafka_error
from relay.kafka.fencing import ShortLivedProducer
from relay.kafka.offsets import Offsets, Undecided

_SECONDS: Final = 30.0
_DECIDE_SECONDS: Final = 5.0


def abort_hanging(
    options: Mapping[str, Any], client_options: Mapping[str, str], ids: Collection[str], hanging: Collection[Undecided]
) -> list[Undecided]:
    """Abort what hangs in these partitions under one of the ids, fencing their producers. Returns what still hangs.

    Raises Unavailable when the brokers don't answer.
    """
    left = list(hanging)
    for transactional_id in sorted(ids):
        if not left:
            break
        _abort(options, transactional_id, left)
        with unavailable_on_kafka_error("after the abort of what hangs"):
            ends = {found.partition: found.end for found in left}
            left = Offsets(client_options).await_decided(ends, _DECIDE_SECONDS)
    return left


def abort_command(bootstrap_servers: str, undecided: Undecided) -> str:
    """Return the command of Kafka's distribution that aborts the transaction that a partition waits for."""
    return (
        f"kafka-transactions.sh --bootstrap-server {bootstrap_servers} abort --topic {undecided.partition.topic} "
        f"--partition {undecided.partition.number} --start-offset {undecided.stable}"
    )


def read_command(bootstrap_servers: str, undecided: Undecided) -> str:
    """Return the command of Kafka's distribution that shows the records from the hanging transaction's first on."""
    return (
        f"kafka-console-consumer.sh --bootstrap-server {bootstrap_servers} --topic {undecided.partition.topic} "
        f"--partition {undecided.partition.number} --offset {undecided.stable} "
        f"--max-messages {undecided.end - undecided.stable} --timeout-ms 10000 --isolation-level read_uncommitted "
        "--property print.headers=true --property print.key=true --property print.offset=true"
    )


def _abort(options: Mapping[str, Any], transactional_id: str, hanging: Collection[Undecided]) -> None:
    producer = ShortLivedProducer(options, transactional_id)
    try:
        producer.init_transactions(_SECONDS)
        producer.begin_transaction()
        for found in hanging:
            # Abort markers go only to partitions that the transaction has written to.
            producer.produce(found.partition.topic, b"", b"aborted", partition=found.partition.number)
        deadline = time.monotonic() + _SECONDS
        while len(producer) and time.monotonic() < deadline:
            producer.poll(0.1)
        producer.abort_transaction(_SECONDS)
    except KafkaException as error:
        text = text_of(producer.explained(error))
        raise BrokerUnavailable(
            f"Kafka, aborting what hangs under the transactional.id {transactional_id!r}: {text}"
        ) from error
    finally:
        producer.purge()
