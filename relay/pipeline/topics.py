"""The topics that events go to, or may go to: with their routes, waiting events, and what Kafka says of them."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from confluent_kafka import IsolationLevel, KafkaException

from outbox._app.settings import client_options
from outbox._clients.counting import counted
from outbox._clients.kafka_client import EARLIEST, LATEST, Admin, answered
from outbox.errors import SchemaError
from outbox.event import DEAD_LETTER
from relay.config import Settings
from relay.core.ports import BrokerUnavailable
from relay.insights import read_rows
from relay.kafka.client import text_of, unavailable_on_kafka_error
from relay.kafka.metadata import SharedMetadata
from relay.parts import build_router
from relay.settle.statements import names_of

_SECONDS: Final = 5.0
_MOST_LOOKED_AT: Final = 100
"""Events of a lane that are looked at: those of a missing topic are passed by the others, and come first."""

_FIRST_KINDS: Final = """
SELECT DISTINCT e.aggregate_type, coalesce(e.headers ? %(copy)s, false) AS copy FROM {lanes} AS l
 CROSS JOIN LATERAL (SELECT aggregate_type, headers FROM {events} AS e
                      WHERE e.lane = l.lane ORDER BY e.id LIMIT %(most)s) AS e"""

# For a role that may not read headers, as a monitor: what a relay wrote may be a copy, and writers write none.
_FIRST_WRITTEN: Final = """
SELECT DISTINCT e.aggregate_type, false AS copy FROM {lanes} AS l
 CROSS JOIN LATERAL (SELECT aggregate_type, from_relay FROM {events} AS e
                      WHERE e.lane = l.lane ORDER BY e.id LIMIT %(most)s) AS e
 WHERE NOT e.from_relay"""


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic.

    types        the aggregate types that go there, as far as known: from the routes and from waiting events.
    waiting      events that wait for it, of the first 100,000 rows of the outbox; ``oldest_at``: the first one's time.
    partitions   None if there is no such topic.
    first, end   the sums of the partitions' offsets; None if Kafka does not tell.
    under_replicated, leaderless   partitions that lack a replica in sync, or a leader.
    """

    topic: str
    types: Sequence[str]
    on_failure: str | None
    dead_letter_topic: str | None
    waiting: int
    oldest_at: dt.datetime | None
    partitions: int | None = None
    replicas: int | None = None
    first: int | None = None
    end: int | None = None
    under_replicated: int = 0
    leaderless: int = 0

    @property
    def problem(self) -> str | None:
        if self.partitions is None:
            return "does not exist" if self.waiting else None
        if self.leaderless:
            return f"{counted(self.leaderless, 'partition')} without a leader"
        if self.under_replicated:
            return f"{counted(self.under_replicated, 'partition')} without all replicas in sync"
        return None


def topics(settings: Settings, waiting: Sequence[Mapping[str, Any]]) -> tuple[list[TopicState], str | None]:
    """Return the topics by name, and why Kafka's part is missing; None if it is not.

    waiting   aggregate_type, copy, events, oldest: EventSearch.waiting_types.

    Topics that exist are listed if the routes or the template can lead to them.
    """
    router = build_router(settings)
    types: dict[str, list[str]] = {}
    for name in sorted({*(settings.routes or {}), *(row["aggregate_type"] for row in waiting)}):
        types.setdefault(router.known_topic(name) or "(no route)", []).append(name)
    waits: dict[str, list[Mapping[str, Any]]] = {}
    for row in waiting:
        waits.setdefault(router.known_topic(row["aggregate_type"], copy=row["copy"]) or "(no route)", []).append(row)
    away, there = None, {}
    try:
        there = _described(settings, types.keys() | waits.keys(), router.may_write)
    except BrokerUnavailable as error:
        away = str(error)
    found = []
    for topic in sorted({*types, *waits, *there}):
        rows = waits.get(topic, ())
        route = None
        if topic in types and topic != "(no route)":
            route = router.route(types[topic][0])
        found.append(
            TopicState(
                topic,
                types.get(topic, ()),
                None if route is None else str(route.on_failure),
                None if route is None else route.dead_letter_topic,
                sum(row["events"] for row in rows),
                min((row["oldest"] for row in rows), default=None),
                **there.get(topic, {}),
            )
        )
    return found, away


class MissingTopics:
    """Looks for topics that do not exist and for which events wait. Its client stays open."""

    def __init__(self, settings: Settings) -> None:
        self._schema = settings.db_schema
        self._router = build_router(settings)
        self._servers = settings.require_kafka()
        self._metadata = SharedMetadata(client_options(settings), time.monotonic)

    def look(self, connection: psycopg.Connection[Any]) -> list[str]:
        """Return the missing topics of the first events of each lane.

        Raises BrokerUnavailable when no broker answers, and what ``read_rows`` raises.
        """
        names, bound = names_of(self._schema), {"most": _MOST_LOOKED_AT, "copy": DEAD_LETTER}
        doing = "looking at the first events"
        try:
            rows = read_rows(connection, doing, _FIRST_KINDS, names, bound)
        except SchemaError:
            rows = read_rows(connection, doing, _FIRST_WRITTEN, names, bound)
        known = self._router.known_topic
        wanted = {topic for row in rows if (topic := known(row["aggregate_type"], copy=row["copy"]))}
        try:
            return sorted(wanted - self._metadata.topics(_SECONDS).topics.keys())
        except KafkaException as error:
            raise BrokerUnavailable(f"Kafka does not answer at {self._servers}: {text_of(error)}") from error


def _described(settings: Settings, named: Collection[str], may_write: Any) -> dict[str, dict[str, Any]]:
    with unavailable_on_kafka_error("asking for its topics"):
        admin = Admin(client_options(settings))
        # All topics, not only these: a request by name could make the broker create it.
        with admin.explaining():
            cluster = admin.list_topics(timeout=_SECONDS)
        ours = {name: found for name, found in cluster.topics.items() if name in named or may_write(name)}
        parts = [(name, number) for name, found in ours.items() for number in found.partitions]
        sums: dict[str, dict[str, int]] = {name: {} for name in ours}
        for what, spec in (("first", EARLIEST), ("end", LATEST)):
            for part, answer in admin.ask_offsets(parts, spec, IsolationLevel.READ_COMMITTED, _SECONDS).items():
                # A partition without a leader has no offsets now.
                with suppress(KafkaException):
                    sums[part.topic][what] = sums[part.topic].get(what, 0) + answered(part, answer).offset
    return {
        name: {
            "partitions": len(found.partitions),
            "replicas": max((len(part.replicas) for part in found.partitions.values()), default=0),
            "under_replicated": sum(len(part.isrs) < len(part.replicas) for part in found.partitions.values()),
            "leaderless": sum(part.leader not in cluster.brokers for part in found.partitions.values()),
            **sums[name],
        }
        for name, found in ours.items()
    }
