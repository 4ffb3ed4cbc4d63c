"""Events that a hanging transaction hides from readers, and how to end it. For reconcile.py.

A broker that restarts can lose the markers of a prepared transaction (KAFKA-20734). The partition then holds the
transaction open for the producer id that wrote it. The coordinator assigns the same producer id, with a higher epoch,
to the next producer of the same transactional.id; when that producer writes to the partition and aborts, the abort
marker ends the hanging transaction too, and read_committed readers see neither. So an ordinary client can end it if the
transactional.id is known. If it is not, Kafka's own tool can. It can only be aborted: committing it would also publish
a record of ours.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from confluent_kafka import KafkaException

from outbox._clients.counting import counted
from outbox.errors import OperationRefused
from relay.core.ports import BrokerUnavailable, UndecidedTransaction
from relay.kafka.client import text_of, unavailable_on_kafka_error
from relay.kafka.fencing import ShortLivedProducer, initialize
from relay.kafka.offsets import Offsets, Partition, Undecided
from relay.kafka.routing import Router
from relay.kafka.state_topic import StateTopic
from relay.operations.lane_rows import LaneRows
from relay.operations.topic_scan import behind

_SECONDS: Final = 30.0
_DECIDE_SECONDS: Final = 5.0
_SAME_CLOCK_MS: Final = 2000
_NAMED: Final = 10
_MOST_MISSING: Final = 1000


@dataclass(slots=True)
class HangingPartition:
    """A partition that has waited too long for the end of a transaction.

    ``events`` may belong to that transaction, by their time; ``held`` of them still have their row in the outbox, and
    ``missing`` are the first of those without one. ``read`` shows them, ``command`` aborts the transaction, whoever
    began it: both are commands of Kafka's distribution.
    """

    topic: str
    partition: int
    stable: int
    end: int
    command: str
    read: str
    events: int = 0
    held: int = 0
    missing: list[str] = field(default_factory=list)

    @property
    def of_another(self) -> bool:
        """Whether the transaction is another program's: it is never aborted."""
        return self.events == 0

    @property
    def would_lose(self) -> bool:
        """Whether an abort would lose events: it is left alone, too."""
        return self.held < self.events

    @property
    def way_out(self) -> str:
        named = " ".join(f"--event-id {event_id}" for event_id in self.missing[:_NAMED])
        rest = self.events - self.held - len(self.missing[:_NAMED])
        more = f" (and {rest} more, see `outbox relay reconcile --json`)" if rest else ""
        return (
            f"Kafka has {counted(self.events - self.held, 'event')} that no read_committed reader sees, and that the "
            f"outbox no longer has. 1. Save what is there: {self.read} > saved. 2. Make sure that no program has the "
            f"transaction open, and end it: {self.command}. 3. Send all again: with relay.archive_days, outbox replay "
            f"{named}{more}; else write the saved events again, under the same event ids. They come after the later "
            "events of their keys. 4. If a lane has stopped: `outbox relay reconcile --apply --reason '…'` again"
        )


class HiddenEvents:
    """Finds and aborts transactions that hang in an outbox's topics. ``producer_options`` are the relay's."""

    def __init__(
        self,
        rows: LaneRows,
        router: Router,
        state: StateTopic,
        client_options: Mapping[str, str],
        producer_options: Mapping[str, Any],
    ) -> None:
        self._rows = rows
        self._router = router
        self._state = state
        self._client = client_options
        self._producer = producer_options

    def undecided(self) -> list[Undecided]:
        """Return the partitions of the outbox's topics that are still undecided after a wait."""
        with unavailable_on_kafka_error("asking for what is undecided"):
            offsets = Offsets(self._client)
            topics = {topic for topic in offsets.topics() if self._router.may_write(topic)} | {self._state.name}
            return offsets.await_decided(offsets.high(offsets.partitions(topics)), self._state.decide_seconds)

    def examine(
        self, undecided: Sequence[Undecided], lanes: Collection[int]
    ) -> tuple[list[HangingPartition], set[int]]:
        """Return the hanging partitions of events, and the lanes of the rows that the outbox has of them.

        One process writes the events of a transaction before its markers. So if a lane's partition of the state topic
        hangs too, events later than the markers there belong to other transactions. Otherwise a transaction lasts at
        most as long as its timeout.
        """
        markers = [found for found in undecided if found.partition.topic == self._state.name]
        events = [found for found in undecided if found.partition.topic != self._state.name]
        if not events:
            return [], set()
        self._rows.list_rows(lanes)
        timeout = int(self._producer.get("transaction.timeout.ms", 60_000))
        last = max(
            (seen.milliseconds + _SAME_CLOCK_MS for group in behind(self._client, markers) for seen in group),
            default=None,
        )
        bounds: dict[Partition, int] = {}
        hanging = {
            found.partition: HangingPartition(
                *found.partition, found.stable, found.end, self._command(found), self._read_command(found)
            )
            for found in events
        }
        held_lanes: set[int] = set()
        for group in behind(self._client, events):
            for seen in group:
                # The first undecided record belongs to the hanging transaction.
                bound = last if last is not None and seen.milliseconds <= last else seen.milliseconds + timeout
                bounds.setdefault(seen.partition, bound)
            hidden = [seen for seen in group if seen.event_id and seen.milliseconds <= bounds[seen.partition]]
            held = self._rows.held(hidden)
            held_lanes.update(held.values())
            for seen in hidden:
                part = hanging[seen.partition]
                part.events += 1
                if (seen.event_id, seen.mark) in held:
                    part.held += 1
                elif len(part.missing) < _MOST_MISSING:
                    part.missing.append(seen.event_id or "")
        return list(hanging.values()), held_lanes

    @staticmethod
    def require_rows(hanging: Sequence[HangingPartition]) -> None:
        """Raise OperationRefused unless the outbox has the rows of all these events."""
        lost = [found for found in hanging if found.would_lose]
        if lost:
            raise OperationRefused(
                "; ".join(
                    f"{found.topic!r} partition {found.partition}: of {counted(found.events, 'event')} behind offset "
                    f"{found.stable}, which waits for the end of a transaction, the outbox has only {found.held}"
                    for found in lost
                )
                + ". Aborting it would lose those that are not in the outbox, so nothing was done. "
                + "; ".join(f"{found.topic!r} partition {found.partition}: {found.way_out}" for found in lost)
            )

    def abort(self, ids: Collection[str], hanging: Sequence[Undecided]) -> None:
        """Abort what hangs under one of the transactional.ids. Raises UndecidedTransaction if something still does."""
        left = abort_hanging(self._producer, self._client, ids, hanging)
        for found in left:
            raise UndecidedTransaction(
                f"Kafka: {found.partition.topic!r} partition {found.partition.number} still waits, at offset "
                f"{found.stable}, for the end of a transaction of another producer than the lanes' rows name. If a "
                f"program has it open, end that, or wait for its time-out; else abort it: {self._command(found)}"
            )

    def _command(self, found: Undecided) -> str:
        return (
            f"kafka-transactions.sh --bootstrap-server {self._servers} abort --topic {found.partition.topic} "
            f"--partition {found.partition.number} --start-offset {found.stable}"
        )

    def _read_command(self, found: Undecided) -> str:
        return (
            f"kafka-console-consumer.sh --bootstrap-server {self._servers} --topic {found.partition.topic} "
            f"--partition {found.partition.number} --offset {found.stable} "
            f"--max-messages {found.end - found.stable} --timeout-ms 10000 --isolation-level read_uncommitted "
            "--property print.headers=true --property print.key=true --property print.offset=true"
        )

    @property
    def _servers(self) -> str:
        return self._client.get("bootstrap.servers", "…")


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


def _abort(options: Mapping[str, Any], transactional_id: str, hanging: Collection[Undecided]) -> None:
    producer = ShortLivedProducer(options, transactional_id)
    try:
        initialize(producer, _SECONDS, _SECONDS)
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
