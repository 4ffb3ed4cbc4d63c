"""Lists the Kafka transactions that are open under an outbox's ids or in its topics, and aborts one if that is safe.

The coordinators know which transactions are open, and under which transactional.id; the partitions' leaders know from
which offset on readers wait for which producer. A partition that waits for a producer whose transaction its coordinator
has ended *hangs*. So the leaders are asked first, then the coordinators, then the leaders again: what was open before,
is not open at any coordinator, and is open still, hangs. (If no coordinator shows its id at all, the user may lack
DESCRIBE on it: then it counts as hanging only when it is older than brokers let any transaction be.)

Aborting means fencing: a producer is initialized with the id. The coordinator then aborts the open transaction, and
refuses everything of the earlier producer. No event is lost by it, because a relay settles its rows only after their
transaction is committed: the events are still in the outbox, and are published again.

| the transaction                          | to abort it                                                               |
|------------------------------------------|---------------------------------------------------------------------------|
| open, under an id that lanes' rows name, | is safe: no live relay has the id. A relay that sleeps and wakes finds    |
| and none of these lanes has a lease      | itself fenced, and reads its lanes again, as after a take-over            |
| open, under an id of a relay that no     | is safe while no relay is running; otherwise it is not known which relay  |
| lane's row names                         | has it, and it ends at its time-out                                       |
| open, and one of its lanes has a lease   | is refused: the relay ends it, or is fenced by the next holder            |
| being committed or aborted               | is refused: it is decided. A partition without a leader delays it         |
| hanging                                  | is refused here: rows may be settled. `outbox relay reconcile` compares   |
| another program's                        | is refused: what it holds is not known here                               |
| that no coordinator shows                | is refused: it is not known whose it is                                   |
| taken over by a relay between the check  | fenced twice, which does no harm                                          |
| and the fence                            |                                                                           |
| killed between audit and fence           | the audit has a request without an effect; repeat it                      |
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import psycopg
from confluent_kafka import KafkaException
from psycopg import sql

from outbox.errors import OutboxError
from relay.database import unavailable_on_error
from relay.kafka.client import Admin, text_of
from relay.kafka.fencing import fence
from relay.kafka.hanging import abort_command
from relay.kafka.offsets import Offsets, Partition, Undecided
from relay.kafka.takeover import own_ids
from relay.kafka.wire import Address, Brokers, Described, OpenProducer, Unsupported
from relay.operations.audit import note
from relay.ports import BrokerUnavailable
from relay.settlement import lanes_text
from relay.statements import names_of

_SECONDS: Final = 10.0
_DECIDE_SECONDS: Final = 10.0
_OPEN: Final = ("Ongoing", "PrepareCommit", "PrepareAbort")
_ONGOING: Final = "Ongoing"
HANGING: Final = "Hanging"
"""The coordinator has ended the transaction, and a partition still waits for its end."""
UNKNOWN: Final = "Unknown"
"""A partition waits, and it is not visible for whom."""
LONGEST_SECONDS: Final = 915.0
"""The default of the brokers' transaction.max.timeout.ms, and some seconds for the coordinator."""

# What follows the outbox's name in the ids of its relays and of reconcile.
_UUID: Final = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_OURS: Final = re.compile(rf"\.relay\.({_UUID}\.\d+|reconcile-{_UUID}\.\d+)")

_NAMED: Final = """
SELECT lane, transactional_id, owner, owner IS NOT NULL AND lease_until >= clock_timestamp() FROM {lanes}
 WHERE transactional_id IS NOT NULL ORDER BY lane"""
_ALIVE: Final = "SELECT instance FROM {relays} WHERE alive_until >= clock_timestamp() ORDER BY instance"


class NotSafe(OutboxError):
    """The transaction must not be aborted, or there is none."""


@dataclass(frozen=True, slots=True)
class OpenPartition:
    """A partition that a transaction has written to, or may.

    ``first_offset`` is its first record there, None while there is none or it is not visible. Readers in read_committed
    see nothing from ``stable`` on, ``lag`` records: None if the partition is not one of the outbox's topics.
    """

    topic: str
    partition: int
    first_offset: int | None = None
    stable: int | None = None
    lag: int | None = None


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """One transaction. ``lanes`` are those whose rows name its id; ``holders`` the live relays that hold them."""

    transactional_id: str | None
    state: str
    ours: bool
    partitions: Sequence[OpenPartition]
    lanes: Sequence[int] = ()
    holders: Sequence[str] = ()
    producer_id: int | None = None
    epoch: int | None = None
    age_seconds: float | None = None
    timeout_seconds: float | None = None
    safe_to_abort: bool = False
    verdict: str = ""
    command: str | None = None


@dataclass(frozen=True, slots=True)
class Sight:
    """The open transactions. ``unseen`` says what could not be read, and why."""

    transactions: Sequence[OpenTransaction]
    unseen: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Owners:
    """Which lanes' rows name an id, who holds these lanes, and which relays are alive."""

    lanes: Mapping[str, Sequence[int]]
    holders: Mapping[int, str]
    alive: Sequence[str]


@dataclass(slots=True)
class _Cluster:
    """The brokers, and the leaders of all partitions."""

    brokers: Mapping[int, Address]
    leaders: Mapping[Partition, int]
    unseen: list[str] = field(default_factory=list)


class Transactions:
    """Looks for open transactions, and aborts them. ``client_options`` are for readers, ``producer_options`` the
    relay's; ``name`` is the outbox's.

    Raises Unavailable when Postgres or Kafka can't be reached.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        schema: str,
        name: str,
        may_write: Callable[[str], bool],
        state_topic: str,
        client_options: Mapping[str, str],
        producer_options: Mapping[str, Any],
    ) -> None:
        self._connection = connection
        self._names = names_of(schema)
        self._name = name
        self._may_write = may_write
        self._state_topic = state_topic
        self._client = dict(client_options)
        self._producer = dict(producer_options)
        self._wire = Brokers(client_options)

    def look(self) -> Sight:
        """Return the transactions that are open now, under the outbox's ids or in its topics."""
        try:
            cluster = self._cluster()
            offsets = Offsets(self._client)
            ends = offsets.high([each for each in cluster.leaders if self._is_ours(each.topic)])
            undecided = {found.partition: found for found in offsets.await_decided(ends, 0.0)}
        except KafkaException as error:
            raise BrokerUnavailable(f"Kafka, looking for transactions: {text_of(error)}") from error
        before = self._open_producers(cluster, undecided)
        described = self._described(cluster)
        mine = [one for one in described if self._concerns(one)]
        parts = {part for one in mine for part in one.partitions if part in ends}
        after = self._open_producers(cluster, undecided.keys() | parts)
        # Their first records may be older than the second look, as a producer can go on with the next transaction.
        first = {(each.producer_id, each.partition): each.first_offset for each in after}
        ongoing = {(one.producer_id, part) for one in described for part in one.partitions}
        still = {(each.producer_id, each.partition, each.first_offset) for each in after}
        hanging = [
            each
            for each in before
            if (each.producer_id, each.partition) not in ongoing
            and (each.producer_id, each.partition, each.first_offset) in still
        ]
        owners = self._owners()
        found = [self._of_coordinator(one, first, undecided, owners) for one in mine]
        found += self._hanging(cluster, hanging, undecided, owners)
        seen = {each.partition for each in (*before, *after)} | parts
        found += [
            self._judged(OpenTransaction(None, UNKNOWN, ours=False, partitions=[_of(part, None, undecided)]), owners)
            for part in sorted(undecided.keys() - seen)
        ]
        ended = self._ended(offsets, found)
        found = [one for one in found if one.state != UNKNOWN or one.partitions[0] not in ended]
        return Sight(found, list(dict.fromkeys(cluster.unseen)))

    def abort(self, transactional_id: str, reason: str) -> OpenTransaction:
        """Abort the open transaction of an id by fencing it. Returns the transaction as it was.

        Raises NotSafe, with the reason, if that is not proved to be safe, or if readers still wait afterwards.
        """
        found = self.require_safe(transactional_id)
        with unavailable_on_error("writing the audit"), self._connection.transaction():
            details = {
                "transactional_id": transactional_id,
                "producer_id": found.producer_id,
                "epoch": found.epoch,
                "age_seconds": found.age_seconds,
                "lanes": list(found.lanes),
                "partitions": [[each.topic, each.partition, each.first_offset] for each in found.partitions],
            }
            note(self._connection, self._names, "abort transaction", reason, details)
        fence(self._producer, transactional_id)
        self._await_end(found)
        return found

    def require_safe(self, transactional_id: str) -> OpenTransaction:
        """Return the open transaction of an id. Raises NotSafe if it may not be aborted, or is not there."""
        sight = self.look()
        named = [one for one in sight.transactions if one.transactional_id == transactional_id]
        if not named:
            more = f" ({'; '.join(sight.unseen)})" if sight.unseen else ""
            raise NotSafe(f"no transaction is open under the id {transactional_id!r}{more}; nothing was done")
        for one in named:
            if not one.safe_to_abort:
                raise NotSafe(f"{transactional_id}: {one.verdict}. Nothing was done")
        return named[0]

    def _await_end(self, found: OpenTransaction) -> None:
        """Wait until readers get past the transaction's first records."""
        first = {
            Partition(each.topic, each.partition): each.first_offset
            for each in found.partitions
            if each.first_offset is not None and each.stable is not None
        }
        try:
            left = Offsets(self._client).await_decided({p: offset + 1 for p, offset in first.items()}, _DECIDE_SECONDS)
        except KafkaException as error:
            raise BrokerUnavailable(f"Kafka, after the abort: {text_of(error)}") from error
        if left:
            names = ", ".join(f"{each.partition.topic}-{each.partition.number}" for each in left)
            raise NotSafe(
                f"{found.transactional_id} is fenced, and its transaction is aborted at the coordinator; readers still "
                f"wait in {names}: look again with `outbox transactions`"
            )

    # What the brokers know

    def _cluster(self) -> _Cluster:
        admin = Admin(self._client)
        with admin.explaining():
            metadata = admin.list_topics(timeout=_SECONDS)
        leaders = {
            Partition(topic, number): part.leader
            for topic, of_topic in metadata.topics.items()
            for number, part in of_topic.partitions.items()
        }
        return _Cluster({id_: (str(each.host), each.port) for id_, each in metadata.brokers.items()}, leaders)

    def _open_producers(self, cluster: _Cluster, partitions: Collection[Partition]) -> list[OpenProducer]:
        found: list[OpenProducer] = []

        def refused(partition: Partition, reason: str) -> None:
            cluster.unseen.append(f"who has transactions open in topic {partition.topic!r}: {reason}")

        for id_, address in cluster.brokers.items():
            led = [partition for partition in partitions if cluster.leaders.get(partition) == id_]
            try:
                found += self._wire.open_producers(address, led, refused)
            except Unsupported as error:
                cluster.unseen.append(str(error))
        return found

    def _described(self, cluster: _Cluster) -> list[Described]:
        found: list[Described] = []
        for address in cluster.brokers.values():
            try:
                listed = self._wire.list_transactions(address, _OPEN)
                found += self._wire.describe_transactions(address, [each.transactional_id for each in listed])
            except Unsupported as error:
                cluster.unseen.append(str(error))
        return [one for one in found if one.state in _OPEN]

    def _id_of(self, cluster: _Cluster, producer_id: int) -> str | None:
        """Return the transactional.id of a producer id, if a coordinator still knows it."""
        for address in cluster.brokers.values():
            try:
                listed = self._wire.list_transactions(address, (), [producer_id])
            except Unsupported:
                continue
            if listed:
                return listed[0].transactional_id
        return None

    def _ended(self, offsets: Offsets, found: Sequence[OpenTransaction]) -> list[OpenPartition]:
        """Return the partitions of unknown transactions that readers have got past meanwhile."""
        unknown = [one.partitions[0] for one in found if one.state == UNKNOWN]
        if not unknown:
            return []
        try:
            stable = offsets.stable([Partition(each.topic, each.partition) for each in unknown])
        except KafkaException as error:
            raise BrokerUnavailable(f"Kafka, looking for transactions: {text_of(error)}") from error
        return [each for each in unknown if stable[Partition(each.topic, each.partition)] != each.stable]

    # What it means

    def _is_ours(self, topic: str) -> bool:
        return topic == self._state_topic or self._may_write(topic)

    def _is_our_id(self, transactional_id: str | None) -> bool:
        """Return whether relays or commands of this outbox make ids of this form."""
        if transactional_id is None or not transactional_id.startswith(self._name):
            return False
        return _OURS.fullmatch(transactional_id.removeprefix(self._name)) is not None

    def _concerns(self, one: Described) -> bool:
        return self._is_our_id(one.transactional_id) or any(self._is_ours(part.topic) for part in one.partitions)

    def _owners(self) -> _Owners:
        with unavailable_on_error("looking at the lanes"):
            rows = self._connection.execute(sql.SQL(_NAMED).format(**self._names)).fetchall()
            alive = self._connection.execute(sql.SQL(_ALIVE).format(**self._names)).fetchall()
        lanes: dict[str, list[int]] = {}
        for lane, base, _, _ in rows:
            for each in own_ids(base):
                lanes.setdefault(each, []).append(lane)
        holders = {lane: owner for lane, _, owner, held in rows if held}
        return _Owners(lanes, holders, [instance for (instance,) in alive])

    def _of_coordinator(
        self,
        one: Described,
        first: Mapping[tuple[int, Partition], int],
        undecided: Mapping[Partition, Undecided],
        owners: _Owners,
    ) -> OpenTransaction:
        age = None if one.started_ms < 0 else max(time.time() - one.started_ms / 1000, 0.0)
        return self._judged(
            OpenTransaction(
                transactional_id=one.transactional_id,
                state=one.state,
                ours=self._is_our_id(one.transactional_id) or one.transactional_id in owners.lanes,
                partitions=[
                    _of(part, first.get((one.producer_id, part)), undecided) for part in sorted(one.partitions)
                ],
                producer_id=one.producer_id,
                epoch=one.epoch,
                age_seconds=age,
                timeout_seconds=one.timeout_ms / 1000,
            ),
            owners,
        )

    def _hanging(
        self,
        cluster: _Cluster,
        hanging: Iterable[OpenProducer],
        undecided: Mapping[Partition, Undecided],
        owners: _Owners,
    ) -> list[OpenTransaction]:
        by_producer: dict[int, list[OpenProducer]] = {}
        for each in hanging:
            by_producer.setdefault(each.producer_id, []).append(each)
        found = []
        for producer_id, parts in by_producer.items():
            id_ = self._id_of(cluster, producer_id)
            last = min(each.last_ms for each in parts)
            age = max(time.time() - last / 1000, 0.0) if last >= 0 else None
            # Coordinators leave out ids that this user may not describe, without a word.
            proved = id_ is not None or (age is not None and age > LONGEST_SECONDS)
            one = OpenTransaction(
                transactional_id=id_,
                state=HANGING if proved else UNKNOWN,
                ours=self._is_our_id(id_) or id_ in owners.lanes,
                partitions=[_of(each.partition, each.first_offset, undecided) for each in sorted(parts, key=_place)],
                producer_id=producer_id,
                epoch=parts[0].epoch,
                age_seconds=age,
            )
            found.append(self._judged(one, owners))
        return found

    def _judged(self, one: OpenTransaction, owners: _Owners) -> OpenTransaction:
        lanes = list(owners.lanes.get(one.transactional_id or "", ()))
        holders = sorted({owners.holders[lane] for lane in lanes if lane in owners.holders})
        one = replace(one, lanes=lanes, holders=holders)
        safe, verdict, command = self._verdict(one, owners)
        return replace(one, safe_to_abort=safe, verdict=verdict, command=command)

    def _verdict(self, one: OpenTransaction, owners: _Owners) -> tuple[bool, str, str | None]:
        """Return whether aborting is safe, why, and the command to run, if there is one."""
        ends = "" if (left := _left(one)) is None else f"; its coordinator ends it within {left:.0f} s"
        if one.state == UNKNOWN:
            text = "readers wait here for a transaction that no coordinator shows: this user may not ask for it"
            return False, f"{text}, or it hangs; look again after {LONGEST_SECONDS / 60:.0f} minutes", None
        if one.state == HANGING:
            text = "its coordinator has ended it, and these partitions have lost its end (KAFKA-20734)"
            if one.ours:
                return False, f"{text}: reconcile compares what it holds with the outbox", "outbox relay reconcile"
            (part, *_) = one.partitions
            undecided = Undecided(Partition(part.topic, part.partition), part.first_offset or 0, part.first_offset or 0)
            command = abort_command(self._client.get("bootstrap.servers", "…"), undecided)
            return False, f"{text}. It is another program's: make sure that it does not need these records", command
        if one.state != _ONGOING:
            return False, "it is decided, and its markers are being written: has a partition no leader?", None
        if not one.ours:
            return False, f"another program has it open; what it holds is not known here{ends}", None
        if one.holders:
            return False, f"{', '.join(one.holders)} is alive and holds {lanes_text(_held(one, owners))}{ends}", None
        if not one.lanes and owners.alive:
            return (
                False,
                f"no lane's row names its relay, so it may be one of those that run: {', '.join(owners.alive)}{ends}",
                None,
            )
        why = f"no live relay has its id, and its events are still in the outbox{ends}"
        return True, why, f"outbox transactions --abort {one.transactional_id} --reason '…'"


def _held(one: OpenTransaction, owners: _Owners) -> list[int]:
    return [lane for lane in one.lanes if lane in owners.holders]


def _left(one: OpenTransaction) -> float | None:
    """Return the seconds until the coordinator aborts a transaction that stays open: it looks every ten seconds."""
    if one.age_seconds is None or one.timeout_seconds is None:
        return None
    return max(one.timeout_seconds - one.age_seconds, 0.0) + _SECONDS


def _of(part: Partition, first: int | None, undecided: Mapping[Partition, Undecided]) -> OpenPartition:
    found = undecided.get(part)
    if found is None:
        return OpenPartition(*part, first)
    return OpenPartition(*part, first, found.stable, found.end - found.stable)


def _place(each: OpenProducer) -> Partition:
    return each.partition
