"""Events that a hanging transaction hides from readers, and how to end it. For reconcile.py."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outbox.errors import OperationRefused
from relay.core.ports import UndecidedTransaction
from relay.kafka.client import unavailable_on_kafka_error
from relay.kafka.offsets import Offsets, Partition, Undecided
from relay.kafka.routing import Router
from relay.kafka.state_topic import StateTopic
from relay.operations.lane_rows import LaneRows
from relay.operations.topic_scan import behind
from relay.tasks.hanging import abort_command, abort_hanging, read_command

_SAME_CLOCK_MS: Final = 2000
_NAMED: Final = 10
_MOST_MISSING: Final = 1000


@dataclass(frozen=True, slots=True)
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
    events: int
    held: int
    command: str
    read: str
    missing: Sequence[str] = ()

    @property
    def way_out(self) -> str:
        named = " ".join(f"--event-id {event_id}" for event_id in self.missing[:_NAMED])
        rest = self.events - self.held - len(self.missing[:_NAMED])
        more = f" (and {rest} more, see `outbox relay reconcile --json`)" if rest else ""
        return (
            f"Kafka has {self.events - self.held} events that no read_committed reader sees, and the outbox no longer "
            f"has them. 1. Save them: {self.read} > saved. 2. Make sure that no program has the transaction open, and "
            f"end it: {self.command}. 3. Send them again: with relay.archive_days, outbox replay {named}{more}; else "
            "write the saved events again, under the same event ids. They come after the later events of their keys. "
            "4. If a lane has stopped: `outbox relay reconcile --apply` again"
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
        counts: dict[Partition, tuple[int, int]] = {found.partition: (0, 0) for found in events}
        missing: dict[Partition, list[str]] = {found.partition: [] for found in events}
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
                of, there = counts[seen.partition]
                counts[seen.partition] = (of + 1, there + (seen.event_id in held))
                if seen.event_id not in held and len(missing[seen.partition]) < _MOST_MISSING:
                    missing[seen.partition].append(seen.event_id or "")
        return [
            HangingPartition(
                *found.partition,
                found.stable,
                found.end,
                *counts[found.partition],
                self._command(found),
                read_command(self._servers, found),
                missing[found.partition],
            )
            for found in events
        ], held_lanes

    @staticmethod
    def require_rows(hanging: Sequence[HangingPartition]) -> None:
        """Raise OperationRefused unless the outbox has the rows of all these events."""
        lost = [found for found in hanging if found.held < found.events]
        if lost:
            raise OperationRefused(
                "; ".join(
                    f"{found.topic!r} partition {found.partition}: of {found.events} events that wait behind offset "
                    f"{found.stable} for the end of a transaction, the outbox has {found.held} rows only"
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
                f"program has it open, end that, or wait for its time-out; else abort it: {self._command(found)}",
                *found.partition,
                found.stable,
                found.end,
            )

    def _command(self, found: Undecided) -> str:
        return abort_command(self._servers, found)

    @property
    def _servers(self) -> str:
        return self._client.get("bootstrap.servers", "…")
