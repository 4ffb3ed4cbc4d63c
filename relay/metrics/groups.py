"""Consumer groups as the relay sees them: also a group whose consumer is gone, or runs once an hour.

A consumer shows its own figures while it runs. These are read from the groups' rows in the sink and from Kafka, so they
last until an operator has the group forgotten (`outbox offsets forget`).
"""

from __future__ import annotations

import datetime as dt
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from outbox.consumer.admin.offsets import Group, Offsets
from outbox.consumer.admin.status import GroupCounts, has_tables, read_counts
from outbox.consumer.errors import ConsumerUnavailable, NotAuthorized
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.postgres_errors import clear_errors, connect
from outbox.errors import SchemaError
from relay.core.ports import BrokerUnavailable, DatabaseUnavailable
from relay.kafka.client import accepted_before
from relay.metrics import gauges

MOST: Final = 100
"""How many groups, topics of groups or partitions a metric has: those with the highest values."""
LATE_SECONDS: Final = 10.0
"""The limit of the objective for applying that this relay measures."""
_STALE_SECONDS: Final = 60.0
# After a look, rest for so many times as long as it took: with ten thousand partitions it takes Python a while.
_REST: Final = 10.0
_KAFKA_SECONDS: Final = 5.0
_CONNECT_SECONDS: Final = 5
# A partition that has moved within this time stands no longer than since then.
_MOVING_SECONDS: Final = 30.0
# How old the first waiting message of a partition is, where this relay has not seen it come: at least so old.
_AGES: Final = (60.0, 300.0, 900.0, 3_600.0, 21_600.0, 86_400.0, 604_800.0)

log = structlog.get_logger("relay")

_Position = tuple[str, str, int, int]
"""A group, a topic, a partition, and the next offset to apply."""
_Key = TypeVar("_Key", str, tuple[str, str], tuple[str, str, int])


@dataclass(frozen=True, slots=True)
class GroupLags:
    """One reading of all groups.

    lags      offsets that are committed in Kafka and not applied, by group and topic.
    late      those of them whose messages were published more than LATE_SECONDS ago.
    waits     by group, topic and partition: for how many seconds messages have waited while the offset did not move.
    progress  when an offset of the group last moved, by the sink's clock; when it was taken over if none has.
    """

    lags: Mapping[tuple[str, str], int]
    late: Mapping[tuple[str, str], int]
    waits: Mapping[tuple[str, str, int], float]
    progress: Mapping[str, float]


def group_metrics(found: GroupLags) -> Iterator[GaugeMetricFamily]:
    lags = _highest(found.lags)
    yield gauges(
        "group_lag_messages",
        "Offsets that are committed in Kafka and not applied by the group, whether its consumer runs or not.",
        ["group", "topic"],
        lags,
    )
    yield gauges(
        "group_late_messages",
        f"Of these, messages that were published more than {LATE_SECONDS:g} seconds ago.",
        ["group", "topic"],
        ((key, found.late.get(key, 0)) for key, _ in lags),
    )
    yield gauges(
        "group_wait_seconds",
        "How long messages have waited in a partition while the group's offset has not moved.",
        ["group", "topic", "partition"],
        (((group, topic, str(part)), seconds) for (group, topic, part), seconds in _highest(found.waits)),
    )
    yield gauges(
        "group_last_progress_timestamp_seconds",
        "When the group last moved an offset, by the sink's clock.",
        ["group"],
        (([group], at) for group, at in _highest(found.progress)),
    )


def count_metrics(counts: GroupCounts) -> Iterator[GaugeMetricFamily]:
    """Yield what waits for an operator; without a table that this role can't read."""
    for name, text, found in (
        ("dead_letters", "Dead letters of the group that wait for an operator", counts.dead_letters),
        ("calls_stuck", "Calls to other systems that wait for an operator", counts.stuck),
        (
            "calls_overdue_seconds",
            "How long the oldest due call to another system has waited for a caller",
            counts.overdue_seconds,
        ),
        ("losses", "Messages or ranges that the group has lost or given up, and that are not accepted", counts.losses),
    ):
        if found is not None:
            values = (([group], count) for group, count in _highest(found))
            yield gauges(f"group_{name}", f"{text}.", ["group"], values)


def _highest(values: Mapping[_Key, float]) -> list[tuple[_Key, float]]:
    return sorted(values.items(), key=lambda one: (-one[1], one[0]))[:MOST]


class GroupWatch:
    """Reads the groups from time to time, and exposes them while ``shows`` says so: one relay of an outbox does.

    url       the sink's database. If it is the outbox's own, it need not have tables of consumers.
    required  the database must have them.
    kafka     librdkafka's options.
    """

    def __init__(
        self,
        url: str,
        schema: str,
        kafka: Mapping[str, Any],
        shows: Callable[[], bool],
        registry: CollectorRegistry,
        *,
        required: bool = False,
    ) -> None:
        self._url = url
        self._schema = schema
        self._kafka_options = dict(kafka)
        self._kafka: KafkaAdmin | None = None
        self._shows = shows
        self._required = required
        self._since: dict[_Position, dt.datetime] = {}
        self._found: GroupLags | None = None
        self._counts: GroupCounts | None = None
        self._said = False
        self._looked = self._counted = self._rest_until = 0.0
        registry.register(self)

    def look(self) -> None:
        """Read the groups, if they are ours to show.

        Raises Unavailable, and if they are ``required`` SchemaError and BrokerUnavailable.
        """
        if not self._shows():
            self._found = self._counts = None
            return
        began = time.monotonic()
        if began < self._rest_until:
            return
        try:
            with accepted_before():
                self._found, self._said = self._read(), False
        except ConsumerUnavailable as error:
            raise DatabaseUnavailable(str(error)) from error
        except (SchemaError, BrokerUnavailable) as error:
            if self._required:
                raise
            # Consumers in the outbox's own database are shown if the relay may read their tables and their topics.
            # Others tell that Kafka is away.
            if not self._said:
                log.info("consumer groups are not shown", error=str(error))
            self._found, self._said = None, True
            return
        self._looked = time.monotonic()
        self._rest_until = self._looked + _REST * (self._looked - began)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if not self._shows():
            return
        found, counts, since = self._found, self._counts, time.monotonic() - _STALE_SECONDS
        if found is not None and since <= max(self._looked, self._rest_until):
            yield from group_metrics(found)
        if counts is not None and since <= max(self._counted, self._rest_until):
            yield from count_metrics(counts)

    def _read(self) -> GroupLags | None:
        with connect(self._url, "outbox relay groups", _CONNECT_SECONDS) as connection:
            if not self._required and not has_tables(connection, self._schema):
                return None
            # Shown whether Kafka answers or not.
            self._counts, self._counted = read_counts(connection, self._schema), time.monotonic()
            self._kafka = self._kafka or KafkaAdmin(self._kafka_options, seconds=_KAFKA_SECONDS)
            groups, away = Offsets(connection, self._schema, self._kafka).show(losses=None)
            with clear_errors("reading the clock"):
                ((now,),) = connection.execute("SELECT clock_timestamp()").fetchall()
        if away is not None:
            raise BrokerUnavailable(away)
        lags = Counter[tuple[str, str]]()
        for group in groups:
            for one in group.positions:
                if one.lag is not None:
                    lags[group.group, one.topic] += one.lag
        try:
            late, waits = _late(groups, now, self._kafka), self._waits(groups, now, self._kafka)
        except (NotAuthorized, ConsumerUnavailable) as error:
            raise BrokerUnavailable(str(error)) from error
        return GroupLags(lags, late, waits, {g.group: _moved(g).timestamp() for g in groups})

    def _waits(
        self, groups: Sequence[Group], now: dt.datetime, kafka: KafkaAdmin
    ) -> Mapping[tuple[str, str, int], float]:
        """Return how long messages have waited in each partition that does not move."""
        waits: dict[tuple[str, str, int], float] = {}
        still: dict[_Position, float] = {}
        for group in groups:
            for one in group.positions:
                if one.lag:
                    seconds = max((now - (one.updated_at or group.taken_at)).total_seconds(), 0.0)
                    waits[group.group, one.topic, one.part] = seconds
                    if seconds > _MOVING_SECONDS:
                        still[group.group, one.topic, one.part, one.first_waiting()] = seconds
        self._since = {position: at for position, at in self._since.items() if position in still}
        if new := still.keys() - self._since.keys():
            self._since |= _waiting_since({position: still[position] for position in new}, now, kafka)
        for position, seconds in still.items():
            waits[position[:3]] = min(seconds, (now - self._since[position]).total_seconds())
        return waits


def _late(groups: Sequence[Group], now: dt.datetime, kafka: KafkaAdmin) -> Counter[tuple[str, str]]:
    """Return how many offsets are late, by group and topic. One request to each broker, if there is any lag."""
    lagging = [(group.group, one) for group in groups for one in group.positions if one.lag and one.end is not None]
    at = now - dt.timedelta(seconds=LATE_SECONDS)
    first_newer = kafka.at_time({(one.topic, one.part) for _, one in lagging}, at)
    late = Counter[tuple[str, str]]()
    for group, one in lagging:
        late[group, one.topic] += one.waiting_before(first_newer[one.topic, one.part])
    return late


def _waiting_since(
    still: Mapping[_Position, float], now: dt.datetime, kafka: KafkaAdmin
) -> dict[_Position, dt.datetime]:
    """Return since when messages wait at these positions, at the latest; ``now`` if the first one came just now.

    Asks Kafka, only at the first sight of a position: a relay that starts, or takes over the first lane, has not seen
    its message come.
    """
    since, left = dict.fromkeys(still, now), dict(still)
    for age in _AGES:
        left = {position: seconds for position, seconds in left.items() if seconds >= age}
        if not left:
            break
        at = now - dt.timedelta(seconds=age)
        first_newer = kafka.at_time({position[1:3] for position in left}, at)
        left = {
            position: seconds
            for position, seconds in left.items()
            if (newer := first_newer[position[1:3]]) is None or newer > position[3]
        }
        since |= dict.fromkeys(left, at)
    return since


def _moved(group: Group) -> dt.datetime:
    return max((one.updated_at for one in group.positions if one.updated_at is not None), default=group.taken_at)
