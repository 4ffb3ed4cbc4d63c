"""The compacted topic of markers: each lane has a partition, whose last committed record is the lane's marker.

When a marker is valid
    A lane's former holder is fenced first (see fencing.py), so that nothing can follow the marker that is read. Then
    the partition must be *decided*: its last stable offset, before which every transaction is committed or aborted, has
    reached its high watermark. For a read_committed reader the partition ends at the last stable offset: it would take
    the marker before an undecided transaction for the last one, and that transaction's events would be published again.
    A broker that restarts can lose the markers of a transaction that its coordinator calls committed (KAFKA-20734):
    init_transactions succeeds, and the partition stays undecided for good. So both offsets are compared, and an
    undecided partition is an error.

| the partition                                       | what follows                                          |
|-----------------------------------------------------|-------------------------------------------------------|
| last stable offset = high watermark                 | the marker is read                                    |
| the broker is still writing a transaction's markers | it is waited for                                      |
| undecided after that                                | UndecidedTransaction; nothing is published            |
| no leader, no answer                                | Unavailable; nothing is published                     |
| its last record is no marker                        | StateLost                                             |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import ConfigResource, NewPartitions  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from outbox._clients.kafka_client import Admin, silent_logger
from outbox._clients.kafka_rules import is_end
from outbox.errors import ConfigurationError
from relay.core.marker import Marker, StateLost
from relay.core.ports import BrokerUnavailable, UndecidedTransaction
from relay.kafka.client import (
    accepted_before,
    create_topic,
    partitions_text,
    reader_options,
    text_of,
    unavailable_on_kafka_error,
)
from relay.kafka.offsets import Offsets, Partition, Undecided

_READ_SECONDS: Final = 10.0
_DECIDE_SECONDS: Final = 10.0
# Aborted transactions may fill the end of a partition, and compaction leaves gaps; usually eight records suffice.
_FIRST_WINDOW: Final = 64
_WINDOW_GROWTH: Final = 8

# cleanup.policy: a marker is kept as long as its lane exists. unclean.leader.election: a leader that lacks records
# would show an old marker.
_STATE_CONFIG: Final = {"cleanup.policy": "compact", "unclean.leader.election.enable": "false"}
_STATE_TUNING: Final = {"segment.bytes": str(16 << 20), "min.cleanable.dirty.ratio": "0.1"}


@dataclass(frozen=True, slots=True)
class MarkersRead:
    """The markers of some lanes in the state topic: each lane is in ``markers`` or in ``problems``.

    A marker is None if there never was one.
    """

    markers: Mapping[int, Marker | None] = field(default_factory=dict)
    problems: Mapping[int, StateLost | UndecidedTransaction] = field(default_factory=dict)


class StateTopic:
    """The topic of markers, for all lanes. Thread-safe.

    ``decide_seconds`` is how long the control records of a transaction that has just ended may take to be written.
    """

    def __init__(
        self,
        options: Mapping[str, str],
        name: str,
        *,
        replication: int = -1,
        decide_seconds: float = _DECIDE_SECONDS,
    ) -> None:
        self.name = name
        self._options = dict(options)
        self._replication = replication
        self.decide_seconds = decide_seconds
        self._lock = threading.Lock()
        self._checked = 0
        self._hanging: frozenset[Partition] = frozenset()

    def require(self, lanes: int) -> None:
        """Create the topic with a partition for each lane, or check the existing one.

        Raises ConfigurationError when its settings could lose a marker, Unavailable when no broker answers.
        """
        with self._lock:
            if self._checked >= lanes:
                return
            with accepted_before():
                admin = Admin(self._options)
            try:
                with admin.explaining():
                    self._require(admin, lanes)
            except KafkaException as error:
                raise self._explained(error) from error
            self._checked = lanes

    def last_markers(self, lanes: Collection[int], *, decided: bool = True) -> dict[int, Marker | None]:
        """Return the markers that ``read`` returns. Raises the problem of the first lane that has one."""
        read = self.read(lanes, decided=decided)
        for problem in read.problems.values():
            raise problem
        return dict(read.markers)

    def read(self, lanes: Collection[int], *, decided: bool = True) -> MarkersRead:
        """Return each lane's last committed marker, and the problem of each lane without a valid one.

        Fence the lanes' former holders first. With ``decided=False`` an open transaction at the end is ignored: for a
        look before the fence, never as the basis for publishing. One consumer reads all partitions within a fixed time.
        Raises Unavailable when a partition can't be read to its end by then.
        """
        wanted = set(lanes)
        with (
            accepted_before(),
            unavailable_on_kafka_error(f"reading {self.name!r}"),
            closing(Consumer(self._reader_options(), logger=silent_logger())) as consumer,
        ):
            offsets = Offsets(self._options)
            there = wanted & {partition.number for partition in offsets.partitions({self.name})}
            low, ends, undecided = self._bounds(offsets, there, decided=decided)
            values = self._last_values(consumer, low, ends)
        markers: dict[int, Marker | None] = dict.fromkeys(wanted - there)
        broken: dict[int, StateLost | UndecidedTransaction] = {
            found.partition.number: UndecidedTransaction.at(
                self.name, found.partition.number, found.stable, found.end, self.decide_seconds
            )
            for found in undecided
        }
        for lane in ends:
            try:
                markers[lane] = Marker.decode(values[lane]) if lane in values else None
            except StateLost as error:
                broken[lane] = StateLost(f"{self.name!r} partition {lane}: {error}")
        return MarkersRead(markers, broken)

    def _reader_options(self) -> dict[str, Any]:
        more = {"auto.offset.reset": "error", "enable.partition.eof": True, "fetch.wait.max.ms": 10}
        return reader_options(self._options, "outbox-relay-state", "read_committed", more)

    def _bounds(
        self, offsets: Offsets, lanes: Collection[int], *, decided: bool
    ) -> tuple[dict[int, int], dict[int, int], list[Undecided]]:
        """Return the first and end offsets of each partition, and the partitions that are not decided in time.

        Does not wait again for a partition that was undecided last time: a worker's other lanes stand still meanwhile.
        """
        partitions = [Partition(self.name, lane) for lane in lanes]
        low = offsets.low(partitions)
        ends = offsets.high(partitions) if decided else offsets.stable(partitions)
        undecided = offsets.await_decided(ends, self.decide_seconds, known=self._hanging) if decided else []
        if decided:
            self._hanging = (self._hanging - set(partitions)) | {found.partition for found in undecided}
        for found in undecided:
            del ends[found.partition]
        return _by_lane(low), _by_lane(ends), undecided

    def _last_values(self, consumer: Consumer, low: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, bytes]:
        """Return the last committed record of each partition before its end; partitions without one are omitted."""
        deadline = time.monotonic() + _READ_SECONDS
        values: dict[int, bytes] = {}
        unread = {lane: end for lane, end in ends.items() if low[lane] < end}
        window = _FIRST_WINDOW
        while unread:
            starts = {lane: max(low[lane], end - window) for lane, end in unread.items()}
            values |= self._read_to_ends(consumer, starts, unread, deadline)
            unread = {lane: end for lane, end in unread.items() if lane not in values and starts[lane] > low[lane]}
            window *= _WINDOW_GROWTH
        return values

    def _read_to_ends(
        self, consumer: Consumer, starts: Mapping[int, int], ends: Mapping[int, int], deadline: float
    ) -> dict[int, bytes]:
        """Return the last record of each partition, reading from ``starts`` to the end of each."""
        consumer.assign([TopicPartition(self.name, lane, start) for lane, start in starts.items()])
        values: dict[int, bytes] = {}
        unread = set(starts)
        while unread:
            if time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"Kafka: {self.name!r} {partitions_text(unread)} could not be read to the end within "
                    f"{_READ_SECONDS:g} s; nothing is published before that"
                )
            message = consumer.poll(0.5)
            if message is None:
                continue
            lane = message.partition()
            error = message.error()
            if error is None:
                assert lane is not None
                values[lane] = message.value() or b""
            elif is_end(error) and lane is not None and (message.offset() or 0) >= ends[lane]:
                unread.discard(lane)
        return values

    def _require(self, admin: Admin, lanes: int) -> None:
        found = admin.list_topics(timeout=_READ_SECONDS).topics.get(self.name)
        if found is None:
            topic = NewTopic(
                self.name, lanes, replication_factor=self._replication, config={**_STATE_CONFIG, **_STATE_TUNING}
            )
            create_topic(admin, topic, _READ_SECONDS)
            self._await_leaders(admin, lanes)
        resource = ConfigResource(ConfigResource.Type.TOPIC, self.name)
        config = admin.describe_configs([resource], request_timeout=_READ_SECONDS)[resource].result()
        for name, wanted in _STATE_CONFIG.items():
            value = config[name].value
            if value != wanted:
                raise ConfigurationError(
                    f"the state topic {self.name!r} has {name}={value}, which could lose markers: "
                    f"set {name}={wanted} on it"
                )
        if found is not None and len(found.partitions) < lanes:
            more = admin.create_partitions([NewPartitions(self.name, lanes)], request_timeout=_READ_SECONDS)
            more[self.name].result()
            self._await_leaders(admin, lanes)

    def _await_leaders(self, admin: Admin, lanes: int) -> None:
        """Wait until every partition has a leader: brokers learn of a new topic one after the other."""
        deadline = time.monotonic() + _READ_SECONDS
        while True:
            found = admin.list_topics(timeout=_READ_SECONDS).topics.get(self.name)
            ready = [p for p in found.partitions.values() if p.leader >= 0] if found is not None else []
            if len(ready) >= lanes:
                return
            if time.monotonic() > deadline:
                raise BrokerUnavailable(f"Kafka: the new partitions of {self.name!r} have no leaders yet")
            time.sleep(0.02)

    def _explained(self, error: KafkaException) -> Exception:
        code = error.args[0].code()
        if code in {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}:
            return ConfigurationError(
                f"the relay may not create or describe the state topic {self.name!r}: create it with "
                f"{', '.join(f'{n}={v}' for n, v in _STATE_CONFIG.items())} and grant READ, WRITE, DESCRIBE and "
                "DESCRIBE_CONFIGS on it"
            )
        return BrokerUnavailable(f"Kafka, preparing the state topic {self.name!r}: {text_of(error)}")


def _by_lane(offsets: Mapping[Partition, int]) -> dict[int, int]:
    return {partition.number: offset for partition, offset in offsets.items()}
