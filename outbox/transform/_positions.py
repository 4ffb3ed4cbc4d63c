"""Positions in partitions, and those after messages."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from outbox._clients.backoff import doubled, jittered
from outbox._clients.kafka_rules import cut_logs
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.model import Partition
from outbox.transform._plan import SECONDS, Progress, logger
from outbox.transform._topics import described
from outbox.transform.errors import InputLost

_PARTITIONS: Final = "partitions="
"""In a position's metadata, before how many partitions the topic had when the group came to it."""
DOUBT_SECONDS: Final = 20.0
"""How long a position is asked for again that is missing, or lower than before; at most half of the poll interval."""
NEW_SECONDS: Final = 3.0
"""The same for a position that is missing and that this process has never had: the group may be new there."""
_LASTING: Final = (
    "if that lasts though all brokers are there, restart the group's coordinator: it may wait for the end of a "
    "transaction that it has missed"
)
# How far a producer's clock may be behind.
_SLACK_SECONDS: Final = 5.0
_POLL_INTERVAL_MS: Final = 300_000  # librdkafka's default


def answered(positions: list[TopicPartition]) -> list[TopicPartition]:
    """Return the positions of an answer. Raises KafkaException if one has an error instead."""
    for position in positions:
        if position.error is not None:
            raise KafkaException(position.error)
    return positions


def committed(
    consumer: Consumer,
    kafka: KafkaAdmin,
    partitions: Sequence[TopicPartition],
    progress: Progress,
    options: Mapping[str, Any],
    stop: threading.Event,
) -> list[TopicPartition]:
    """Return the group's positions in these partitions, when they can be believed, or at ``stop``.

    A broker of Kafka 4.0 to 4.4 may answer with none, or with an earlier one than is known. If it loses and regains the
    coordinator's partition while it loads the positions, the end of the first load counts as the end of the second
    (CoordinatorRuntime.load looks up the partition's context and does not compare its epoch). The next write ends the
    second load. What that has not read stays missing until the broker restarts; if this is the end of a transaction,
    requests for the positions time out.

    If an answer stays the same, it is accepted where the group is new, or where an operator may have set the group's
    position between two runs. Where this run had read further, Kafka has lost the position, as that of a group with
    members can't be set back; the run goes on from its own. A position that was set back while this run was no member
    is not noticed.

    Raises InputLost where it has lost it with its topic, which was created again.
    """
    own = progress.positions
    known = {**progress.former, **own}
    asked = [TopicPartition(each.topic, each.partition) for each in partitions]
    interval_seconds = int(options.get("max.poll.interval.ms", _POLL_INTERVAL_MS)) / 1000
    before: dict[Partition, int] = {}
    attempts, since = 0, time.monotonic()
    while True:
        found = _answer(consumer, asked) if asked else []
        doubtful = {
            at: each.offset
            for each in found
            if each.offset < (known[at].offset if (at := (each.topic, each.partition)) in known else 0)
        }
        if not doubtful or stop.is_set():
            return found
        if doubtful != before:
            logger.info("group %s asks again for positions that it does not have, or not any more", options["group.id"])
            before, attempts, since = doubtful, 0, time.monotonic()
        elif time.monotonic() - since >= min(
            DOUBT_SECONDS if known.keys() & doubtful.keys() else NEW_SECONDS, interval_seconds / 2
        ):
            break
        stop.wait(jittered(doubled(attempts, 0.1, 1.0)))
        attempts += 1
    lost = own.keys() & doubtful.keys()
    if topics := {topic for topic, _ in lost}:
        ids = {topic: str(found.topic_id) for topic, found in described(kafka, topics).items()}
        if gone := topics - ids.keys():
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, f"{min(gone)} is gone"))
        require_same_topics(ids, progress.topic_ids, options["group.id"])
    for topic, partition in sorted(known.keys() & doubtful.keys()):
        offset, here = doubtful[topic, partition], known[topic, partition].offset
        now = f"at offset {offset}" if offset >= 0 else "without a position"
        then = f"this process had it at {here}"
        if (topic, partition) in lost:
            then += ", and goes on from there; to read again, stop all its transformers, set it back, and start them"
        logger.warning("group %s has %s-%d %s, where %s", options["group.id"], topic, partition, now, then)
    return [own[at] if (at := (each.topic, each.partition)) in lost else each for each in found]


def _answer(consumer: Consumer, partitions: list[TopicPartition]) -> list[TopicPartition]:
    try:
        return answered(consumer.committed(partitions, SECONDS))
    except KafkaException as error:
        inner: KafkaError = error.args[0]
        if inner.code() != KafkaError._TIMED_OUT:
            raise
        raise KafkaException(KafkaError(inner.code(), f"{inner.str()}; {_LASTING}")) from error


def partition_of(message: Message) -> Partition:
    return message.topic() or "", message.partition() or 0


def place_of(message: Message) -> tuple[Partition, int]:
    return partition_of(message), message.offset() or 0


def positions_after(
    messages: Sequence[Message], committed: Mapping[Partition, TopicPartition]
) -> dict[Partition, TopicPartition]:
    """Return the position after the last of these messages, by partition, with its leader's epoch and the metadata."""
    return {
        partition: moved(committed[partition], (message.offset() or 0) + 1, message.leader_epoch())
        for partition, message in {partition_of(message): message for message in messages}.items()
    }


def moved(position: TopicPartition, offset: int, leader_epoch: int | None) -> TopicPartition:
    """Return a position further on, with its metadata.

    leader_epoch  of a leader that had the log up to there: where the log was cut since, Kafka refuses the position.
    """
    epoch = -1 if leader_epoch is None else leader_epoch
    return TopicPartition(position.topic, position.partition, offset, position.metadata or "", epoch)


def require_same_topics(ids: Mapping[str, str], known: dict[str, str], group: str) -> None:
    """Raise InputLost if a topic has another id than was known; the ids are known from now on.

    librdkafka reads a topic that was created again on from where it was in the former one.
    """
    former = {topic: known[topic] for topic, id_ in ids.items() if known.get(topic, id_) != id_}
    known.update(ids)
    for topic, id_ in former.items():
        raise InputLost(
            f"group {group!r}: {topic} was deleted and created again (its id was {id_}, now {ids[topic]}). What it has "
            "before the group's positions may not have been read: see what is lost, and set the group's offsets by hand"
        )


def require_whole(
    consumer: Consumer, positions: Sequence[TopicPartition], options: Mapping[str, Any]
) -> set[Partition]:
    """Raise InputLost if a log was cut before a position, however long it is again.

    Returns the partitions whose leaders can't be asked now: they have to be before messages of theirs are used.
    librdkafka compares a position's epoch when it hears of another leader, and not with the leader that it begins with.
    """
    with_epoch = [each for each in positions if each.leader_epoch is not None]  # type: ignore[redundant-expr]
    known = {(each.topic, each.partition): each for each in with_epoch}
    asked = [TopicPartition(*at, OFFSET_END) for at in known]
    try:
        ends = consumer.offsets_for_times(asked, SECONDS) if asked else []
        away = {(end.topic, end.partition) for end in ends if end.error is not None and _is_away(end.error)}
        doubtful = {
            at: (known[at].offset, known[at].leader_epoch)
            for end in answered([end for end in ends if (end.topic, end.partition) not in away])
            if end.leader_epoch != known[at := (end.topic, end.partition)].leader_epoch
        }
        cut_at = cut_logs(options, doubtful, SECONDS, logger) if doubtful else {}
    except KafkaException as error:
        if not _is_away(error.args[0]):
            raise
        away, cut_at = set(known), {}
    for (topic, partition), cut in cut_at.items():
        raise InputLost(
            f"group {options['group.id']!r} has read {topic}-{partition} up to {known[topic, partition].offset}, and "
            f"of what was there Kafka's log has only the part before {cut}: it was cut. Nothing was skipped: see what "
            "is lost, and set the group's offsets by hand"
        )
    for topic, partition in away:
        logger.info("group %s waits for a leader of %s-%d", options["group.id"], topic, partition)
    return away


def _is_away(error: KafkaError) -> bool:
    """Return whether a partition's leader is missing, or does not answer."""
    # The last is librdkafka's answer if none of the partitions has a leader.
    return error.code() in {KafkaError.LEADER_NOT_AVAILABLE, KafkaError._TIMED_OUT, KafkaError._UNKNOWN_PARTITION}


def beginnings(
    consumer: Consumer,
    kafka: KafkaAdmin,
    positions: Sequence[TopicPartition],
    since: Mapping[Partition, float],
    start: str,
    group: str,
) -> tuple[list[TopicPartition], set[Partition]]:
    """Return where partitions without a position begin, and those that have no leader to say it.

    since  when those had none that have had none before.

    Raises InputLost if there are to be none without a position.
    """
    if start == "none" and positions:
        raise InputLost(f"group {group!r} has no position in {positions[0].topic}-{positions[0].partition}")
    begun: list[TopicPartition] = []
    leaderless: set[Partition] = set()
    wanted = {each.topic for each in positions}
    topics = described(kafka, wanted)
    led = _led(topics)
    for each in positions:
        try:
            # Otherwise librdkafka waits for a leader, of each such partition anew.
            if (at := (each.topic, each.partition)) in led:
                number = len(topics[each.topic].partitions)
                begun.append(_beginning(consumer, each, number, since.get(at), start, group))
                continue
        except KafkaException as error:
            if not _is_away(error.args[0]):
                raise
            topics = described(kafka, wanted)
            led = _led(topics)
        logger.info("group %s waits for a leader of %s-%d, to begin there", group, each.topic, each.partition)
        leaderless.add((each.topic, each.partition))
    return begun, leaderless


def has_leader(kafka: KafkaAdmin, partitions: Collection[Partition], seconds: float) -> bool:
    """Return whether one of these partitions has a leader. Raises KafkaException without an answer."""
    return not _led(described(kafka, {topic for topic, _ in partitions}, seconds)).isdisjoint(partitions)


def _led(topics: Mapping[str, Any]) -> set[Partition]:
    """Return the partitions that have leaders, by their topics' descriptions."""
    return {(topic, one.id) for topic, each in topics.items() for one in each.partitions if one.leader is not None}


def _beginning(
    consumer: Consumer, position: TopicPartition, now: int, since: float | None, start: str, group: str
) -> TopicPartition:
    """Return where a partition without a position begins, in a topic that has ``now`` partitions.

    With "latest" that is the end for the partitions that the topic had when the group came to it: a number that
    stands in the metadata of each of its positions. One that was added later is read from its beginning, and one that
    had no leader ``since`` a time from what has come since then.
    """
    first, end = consumer.get_watermark_offsets(position, SECONDS, cached=False)
    if start == "earliest":
        return TopicPartition(position.topic, position.partition, first)
    count = _first_partitions(consumer, position.topic, now)
    offset = end if position.partition < count else first
    if offset == end and since is not None:
        asked = TopicPartition(position.topic, position.partition, int((since - _SLACK_SECONDS) * 1000))
        [found] = answered(consumer.offsets_for_times([asked], SECONDS))
        # Below 0: nothing has come.
        offset = found.offset if 0 <= found.offset < end else end
    if offset > first:
        skipped = f"{position.topic}-{position.partition}, and skips what is before offset {offset}"
        logger.warning("group %s has no position in %s", group, skipped)
    return TopicPartition(position.topic, position.partition, offset, f"{_PARTITIONS}{count}")


def _first_partitions(consumer: Consumer, topic: str, now: int) -> int:
    """Return how many partitions a topic had when the group came to it, by the positions in those that it has now."""
    asked = [TopicPartition(topic, number) for number in range(now)]
    positions = answered(consumer.committed(asked, SECONDS))
    known = [position.metadata or "" for position in positions if position.offset >= 0]
    counts = [int(text.removeprefix(_PARTITIONS)) for text in known if re.fullmatch(_PARTITIONS + r"\d+", text)]
    # Positions that other tools have set say nothing of it; but the group has been in the topic.
    return min(counts, default=0 if known else now)
