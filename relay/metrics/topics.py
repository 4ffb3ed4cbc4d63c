"""How long each topic's events have waited, and how many they are, apart from those that operators have paused.

A lane has the events of many topics in the order of their ids, and no index finds the first one of a topic. So each
lane is read from its lowest id, and events of paused topics are passed over: they may be millions. The next look goes
on from the place that was reached. Each minute it begins anew, as a transaction may commit events with lower ids late.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import psycopg
from prometheus_client.core import GaugeMetricFamily
from psycopg import sql
from psycopg.rows import dict_row

from outbox.event import DEAD_LETTER
from relay.core.pauses import ScopeKind
from relay.database import unavailable_on_error
from relay.insights import COUNTED, OutboxState
from relay.kafka.routing import Router
from relay.metrics import gauges
from relay.polling.low_water_mark import LOWEST
from relay.settle.statements import KEEP_TO_THE_INDEX, STATEMENT_LIMIT, array, names_of

MOST_TOPICS: Final = 100
"""How many topics have a metric: those whose events have waited longest."""
# Of each look, which comes every ten seconds.
_WALK_SECONDS: Final = 1.0
_ANEW_SECONDS: Final = 60.0
_STATEMENT_SECONDS: Final = 5

# The first event of each kind among the next ones of each lane.
_KINDS: Final = """
SELECT k.lane, k.kind, k.copy, k.events, k.first, k.last,
       extract(epoch FROM clock_timestamp() - e.created_at)::float8 AS seconds
  FROM unnest(%(lanes)s::smallint[], %(above)s::bigint[]) AS m(lane, above)
 CROSS JOIN LATERAL (
       SELECT m.lane, n.aggregate_type AS kind, n.copy, count(*) AS events, min(n.id) AS first, max(n.id) AS last
         FROM (SELECT e.id, e.aggregate_type, coalesce(e.headers ? %(copy)s, false) AS copy FROM {events} AS e
                WHERE e.lane = m.lane AND e.id > m.above ORDER BY e.id LIMIT %(most)s) AS n
        GROUP BY n.aggregate_type, n.copy) AS k
 CROSS JOIN LATERAL (
       SELECT {created_at} AS created_at FROM {events} AS e WHERE e.lane = k.lane AND e.id = k.first LIMIT 1) AS e
 ORDER BY k.lane"""


@dataclass(slots=True)
class _Walk:
    """How far a look has come in a lane, and how many events it has met there that are not paused."""

    at: int
    events: int = 0


@dataclass(frozen=True, slots=True)
class TopicBacklog:
    """The age of a topic's first event in seconds, and how many of its events were met."""

    seconds: float = 0.0
    events: int = 0


def topic_metrics(topics: Mapping[str, TopicBacklog]) -> Iterator[GaugeMetricFamily]:
    yield gauges(
        "backlog_topic_oldest_age_seconds",
        "Age of the topic's oldest waiting event, except in paused lanes, of the "
        f'{MOST_TOPICS} unpaused topics with the oldest ones. Events without a route have the topic "".',
        ["topic"],
        (([topic], one.seconds) for topic, one in topics.items()),
    )
    yield gauges(
        "backlog_topic_events",
        "Waiting events of the same topics, except in paused lanes: of each lane the first "
        f"{COUNTED:,} whose topics are not paused.",
        ["topic"],
        (([topic], one.events) for topic, one in topics.items()),
    )


class TopicBacklogs:
    """Reads how long the topics' events have waited, and how many they are. ``router`` is one of its own."""

    def __init__(self, schema: str, router: Router) -> None:
        self._kinds = sql.SQL(_KINDS).format(**names_of(schema))
        self._router = router
        self._paused: frozenset[str] = frozenset()
        # By lane, an id up to which there were only events of paused topics: the next look begins there.
        self._above: dict[int, int] = {}
        self._began = 0.0
        self._met_all = True

    def look(self, connection: psycopg.Connection[Any], state: OutboxState) -> Mapping[str, TopicBacklog] | None:
        """Return the backlog of each topic; None if that takes too long.

        Of topics and lanes that are not paused, as far as one of the topic's events is among the first COUNTED of a
        lane that are not paused. Events without a route have the topic "". Raises Unavailable or SchemaError.
        """
        self._begin(frozenset(one.scope.name for one in state.pauses if one.scope.kind is ScopeKind.TOPIC))
        topics: dict[str, TopicBacklog] = {}
        lanes = [lane.lane for lane in state.lanes if lane.events and not lane.paused]
        walks = {lane: _Walk(self._above.get(lane, LOWEST)) for lane in lanes}
        deadline = time.monotonic() + _WALK_SECONDS
        while walks:
            rows = self._read(connection, walks)
            if rows is None:
                return None
            walks = self._step(rows, walks, topics)
            if time.monotonic() > deadline:
                break
        self._met_all = all(walk.events for walk in walks.values())
        oldest = sorted(topics.items(), key=lambda one: one[1].seconds, reverse=True)
        return dict(oldest[:MOST_TOPICS])

    def _begin(self, paused: frozenset[str]) -> None:
        """Begin the walk anew, if it is time to and the last one met an event, or the end, of each lane."""
        now = time.monotonic()
        if paused != self._paused or (self._met_all and now - self._began >= _ANEW_SECONDS):
            self._paused, self._began = paused, now
            self._above.clear()

    def _read(
        self, connection: psycopg.Connection[Any], walks: Mapping[int, _Walk]
    ) -> Sequence[Mapping[str, Any]] | None:
        bound = {
            "lanes": array(list(walks)),
            "above": array([walk.at for walk in walks.values()]),
            "copy": DEAD_LETTER,
            "most": COUNTED,
        }
        with (
            unavailable_on_error("looking at the topics' first events"),
            suppress(psycopg.errors.QueryCanceled),
            connection.transaction(),
            connection.cursor(row_factory=dict_row) as cursor,
        ):
            cursor.execute(STATEMENT_LIMIT, (f"{_STATEMENT_SECONDS}s",))
            cursor.execute(KEEP_TO_THE_INDEX, {"local": True})
            return cursor.execute(self._kinds, bound).fetchall()
        return None

    def _step(
        self, rows: Iterable[Mapping[str, Any]], walks: Mapping[int, _Walk], met: dict[str, TopicBacklog]
    ) -> dict[int, _Walk]:
        """Add these rows to their topics. Returns the walks that go on: too many of the events were paused."""
        further = {}
        for lane, found in groupby(rows, itemgetter("lane")):
            walk, kinds = walks[lane], list(found)
            topics = [self._router.known_topic(row["kind"], copy=row["copy"]) or "" for row in kinds]
            others = [(topic, row) for topic, row in zip(topics, kinds, strict=True) if topic not in self._paused]
            for topic, row in others:
                known = met.get(topic, TopicBacklog())
                met[topic] = TopicBacklog(max(known.seconds, row["seconds"]), known.events + row["events"])
            last = max(row["last"] for row in kinds)
            if not walk.events:
                self._above[lane] = min((row["first"] - 1 for _, row in others), default=last)
            walk.at = last
            walk.events += sum(row["events"] for _, row in others)
            if walk.events < COUNTED and sum(row["events"] for row in kinds) == COUNTED:
                further[lane] = walk
        return further
