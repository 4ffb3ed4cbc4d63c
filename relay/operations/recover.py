"""Compares an outbox with its topics after Postgres or Kafka has lost something, for ``outbox recover``.

A restore takes Postgres back to a point, and Kafka keeps what was published after it. Each event is one of these:

| Postgres has it     | Kafka                   | so                                                                   |
|---------------------|-------------------------|----------------------------------------------------------------------|
| in ``events``       | has it                  | published since: it is settled, not published again                  |
| in ``events``       | has its id, and another | another event, with an id of the writer's own: it is published, and  |
|                     | content                 | named: consumers may drop it by its id                               |
| in ``events``       | lacks it                | it waits for a relay                                                 |
|                     | lacks it, and has a     | superseded: in a compacted topic it counts as published, as it would |
|                     | later one of its key    | now delete the later one. So do rows of the next two                 |
| in ``scheduled``    | has it                  | published since: it is deleted, or it would go out again             |
| in ``dead_letters`` | has it                  | retried since: it is discarded, and its key goes on                  |
| in ``published``    | has it                  | nothing                                                              |
| in ``published``    | lacks it                | Kafka has lost it: named, and with ``resend`` put back into events,  |
|                     |                         | under its own row id: before the later events of its key, which wait |
|                     | lacks it, and has a     | overtaken: named, and left to `outbox replay`, as it would come      |
|                     | later one of its key    | behind that one                                                      |
|                     | begins behind its place | expired: counted; retention has deleted it                           |
|                     | with nothing older      |                                                                      |
|                     | may have compacted it   | expired, too: a later event of its key follows, or it is a tombstone |
| nowhere             | has it                  | Postgres has lost it: named, as consumers may have applied it        |

An event is lost for sure if it was written after the point, by the database's clock, or published well after it: if it
was committed by then, it would have a row. Only the archive tells the others, which Kafka got about the point, from
those that were settled just before it. Without one they are ``unsure``; and if it begins only after the point, so are
all from before that.

Lanes are held and repaired as by reconcile.py, which has the crash table; what is on Kafka is settled first, so running
it again finishes.
"""

from __future__ import annotations

import datetime as dt
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, Final, LiteralString, NamedTuple

from psycopg import sql

from outbox._clients.counting import counted
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.errors import OperationRefused
from outbox.event import DEAD_LETTER, REPLAY
from relay.core.marker import Marker
from relay.database import unavailable_on_error
from relay.kafka.client import unavailable_on_kafka_error
from relay.kafka.offsets import Offsets, Partition
from relay.kafka.state_topic import MarkersRead
from relay.operations import recover_statements as statements
from relay.operations.dead_letters import DeadLetters, Selection
from relay.operations.hidden_events import HangingPartition
from relay.operations.holding import Holding
from relay.operations.lane_rows import MARGIN, Lane, LaneComparison, content_of
from relay.operations.reconcile import LOCK_SECONDS, Findings, Reconciler
from relay.operations.topic_scan import TopicRecord, committed_since, first_times
from relay.operations.trace import time_of, topics_of

CLOCKS: Final = dt.timedelta(minutes=1)
"""How far the clocks of relays and database may differ: messages have the relay's."""
_NOTHING_DELETED: Final = (0, 0.0)
_AUDIT_IDS: Final = 10_000
_LATEST: Final = dt.datetime(9999, 12, 29, tzinfo=dt.UTC)
"""The time of records whose writer made one up that no calendar has. In every zone Python has it."""
_RESTORED: Final = "Postgres was restored to a point before events of this lane were published"

_UNSETTLED: Final = "its marker names events that are not settled, and only the topics show whether Kafka has them"
_PUT_BACK: Final = "its marker may name events that are put back"


class EventPlace(NamedTuple):
    """An event, and where it is or was on Kafka. ``at`` is Kafka's time, or that of the archive.

    ``copy``: it is a copy for a dead-letter topic, which has the id of its event.
    """

    event_id: str
    aggregate_id: str
    topic: str
    partition: int
    offset: int
    at: dt.datetime
    copy: bool = False


class StandingRow(NamedTuple):
    """A row of ``scheduled`` or ``dead_letters``. Several may have the same event id. Without a lane it is 0."""

    lane: int
    id: int
    event_id: str
    superseded: bool


class Recovered(NamedTuple):
    """What was done: rows of ``events`` that were settled, by lane; and the number of those that were put back.

    ``locked``: ids of dead letters that another transaction had locked. They were left as they are.
    """

    settled: Mapping[int, Sequence[str]]
    resent: int
    locked: Sequence[str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between an outbox and its topics; see the table above.

    records     that were read; ``others`` of them are of another ``ce_source``: Kafka has not lost them, and no more.
    relays      that are running. What they have published since the restore counts as lost without an archive.
    lost        on Kafka, and in no table. ``unsure``: those that may be settled as well.
    found       rows of ``events`` that are on Kafka, by lane; ``changed``: those that have another content there.
    superseded  event ids of rows that count as found, as their topic may be compacted and has a later event of the key.
    missing     in the archive, and not on Kafka; ``overtaken``: those of them whose key has later events on Kafka.
    expired     in the archive, older than all that Kafka's retention has left where they were, or perhaps compacted:
                nothing is lost.
    archived_from  where the archive begins, if that is later than the point: of what was published before, it does not
                show whether it was settled. Else None.
    """

    since: dt.datetime
    until: dt.datetime
    records: int
    others: int
    relays: int
    lost: Sequence[EventPlace]
    unsure: Sequence[EventPlace]
    found: Mapping[int, Sequence[str]]
    changed: Sequence[str]
    superseded: Sequence[str]
    scheduled: Sequence[StandingRow]
    dead: Sequence[StandingRow]
    missing: Sequence[EventPlace]
    overtaken: Sequence[EventPlace]
    expired: int
    lanes: Sequence[LaneComparison]
    archived_from: dt.datetime | None

    @property
    def broken(self) -> list[LaneComparison]:
        """Lanes on which a relay would stop, or publish something again, each with the problem."""
        problems = [(state, self._problem(state)) for state in self.lanes]
        return [replace(state, problem=problem) for state, problem in problems if problem is not None]

    def _problem(self, state: LaneComparison) -> str | None:
        if state.problem is not None:
            return state.problem
        if self.found.get(state.lane):
            return _RESTORED
        # A mirror may have the marker, and not yet the events: a relay would settle them by it.
        return _UNSETTLED if state.marker_batch not in {None, state.last_batch} else None

    @property
    def differs(self) -> bool:
        """Whether there is something to repair, or to know."""
        return any((self.lost, self.unsure, self.broken, self.changed, self.scheduled, self.dead, self.missing))


class Recovery(Reconciler):
    """Compares everything that was published since a time. Raises what Reconciler raises."""

    _seen: Sequence[Any] = ()
    _lost: tuple[Collection[tuple[str, str]], dt.datetime | None] = (), None

    def compare(self, since: dt.datetime, until: dt.datetime) -> Comparison:
        """Return the differences. ``since`` is the point of the restore.

        Only records of our ``ce_source`` are our events, but Kafka has not lost what it has under another one.

        Raises OperationRefused while a transaction is open in a topic of events: it hides what Kafka has behind it.
        """
        self._seen = self._rows.run(statements.LANES, (), "reading lanes")
        findings = self.look(search=False)
        if findings.hanging:
            raise OperationRefused(_hides(findings.hanging))
        bound: dict[str, Any] = {"since": since, "until": until, "from": since - CLOCKS, "later": since + CLOCKS}
        # An empty archive shows nothing: it may have been off at the point, or pruned since. Of the minute before the
        # point it shows all only if it begins before that.
        first = None
        if self._settings.relay.archive_days:
            [(first,)] = self._rows.run(statements.ARCHIVE_FROM, (), "reading the archive")
        archived_from = first if first is not None and first > bound["later"] else None
        known = None if archived_from is None else archived_from + CLOCKS
        bound |= {"archived": first is not None and first <= bound["from"], "dead": DEAD_LETTER, "known": known}
        self._rows.list_rows([state.lane for state in findings.lanes])
        read, others = self._read_topics(self._starts(bound))
        kinds = self._rows.run(statements.STANDING_TYPES, (), "reading the kinds of events")
        compacted = self._rows.compacted([kind for (kind,) in kinds])
        values: dict[str, Any] = {"replay": REPLAY, "dead": DEAD_LETTER}
        values |= {"types": list(compacted), "topics": list(compacted.values())}

        def compared(statement: str, **names: sql.Composable) -> list[Any]:
            return self._rows.run(statement, values, "comparing events", there=sql.SQL(statements.THERE), **names)

        def standing(table: str, lane: sql.Composable, until: LiteralString) -> list[StandingRow]:
            names = {"table": self._names[table], "lane": lane, "until": sql.SQL(until).format(**self._names)}
            return [StandingRow(*row) for *row, _ in compared(statements.STANDING, **names)]

        [(relays,)] = self._rows.run(statements.RELAYS, (), "counting relays")
        lost = self._rows.run(statements.LOST, bound, "looking for what Postgres has lost")
        places = [(EventPlace(*place), later and known) for *place, later, known in lost]
        # Settled or lost, they are later than what Postgres had at the point.
        self._lost = {(row[2], row[1]) for *row, later, _ in lost if later}, since
        self._mark_found()
        missing, overtaken, expired = self._missing(bound, [place for place, _ in places])
        scheduled = standing("scheduled", sql.SQL("0"), "not_before")
        dead = standing("dead_letters", sql.Identifier("lane"), statements.BLOCKS_SINCE)
        superseded = [row.event_id for row in (*scheduled, *dead) if row.superseded]
        return Comparison(
            since,
            until,
            read,
            others,
            relays,
            [place for place, sure in places if sure],
            [place for place, sure in places if not sure],
            self._rows.found_ids(),
            [event_id for (event_id,) in compared(statements.CHANGED)],
            [*chain.from_iterable(self._rows.superseded().values()), *superseded],
            scheduled,
            dead,
            missing,
            overtaken,
            expired,
            findings.lanes,
            archived_from,
        )

    def recover(
        self, found: Comparison, reason: str, *, resend: bool = False, topics: Collection[str] = ()
    ) -> Recovered:
        """Settle what is on Kafka, so that nothing is published again, and let the lanes go on.

        ``resend``: put back what Kafka has lost, of ``topics`` or of all, except what was overtaken. Lanes of an
        exactly-once outbox get new markers.

        Raises OperationRefused when another process took one, and with ``resend`` while relays run or if one has run
        since the comparison: then nothing is changed.
        """
        broken = found.broken
        if resend:
            # Even if none is put back now: a run that was killed may have done that.
            known = {state.lane for state in broken}
            marked = [state for state in found.lanes if state.marker_batch is not None and state.lane not in known]
            broken += [replace(state, problem=_PUT_BACK) for state in marked]
        details = {
            "since": found.since.isoformat(),
            "until": found.until.isoformat(),
            "lanes": [state.lane for state in broken],
            "lost": len(found.lost),
            "missing": len(found.missing),
            "overtaken": len(found.overtaken),
            "resend": resend,
            "topics": sorted(topics),
            "event_ids_lost": [event.event_id for event in found.lost[:_AUDIT_IDS]],
        }
        with unavailable_on_error("putting back what Kafka has lost"), self._connection.transaction():
            resent = self._resend(found, topics) if resend else 0
            self._note("recover", reason, details | {"resent": resent})
            standing = [row.event_id for row in (*found.scheduled, *found.dead)]
            self._note_settled("recover settles", reason, standing, found.superseded, {})
        if any(state.last_batch is not None or state.marker_batch is not None for state in found.lanes):
            self.repair(Findings(broken, []), reason)
        else:
            self._settle([state.lane for state in broken], reason)
        settled = self._rows.found_ids()
        if found.scheduled:
            ids = [row.id for row in found.scheduled]
            self._rows.run(statements.UNSCHEDULE, {"ids": ids}, "deleting scheduled events")
        if not found.dead:
            return Recovered(settled, resent, [])
        letters = DeadLetters(self._connection, self._settings.db_schema)
        chosen = Selection(rows=[(row.lane, row.id) for row in found.dead])
        return Recovered(settled, resent, letters.discard(chosen, f"it is on Kafka: {reason}").locked)

    def _compare(self, lane: int, seen: Lane, read: MarkersRead) -> tuple[Marker | None, str | None]:
        """Leave out the markers of another outbox: this one has none, so none is written."""
        return (None, None) if seen.disowns(read.markers.get(lane)) else super()._compare(lane, seen, read)

    def _missing(
        self, bound: Mapping[str, Any], lost: Sequence[EventPlace]
    ) -> tuple[list[EventPlace], list[EventPlace], int]:
        """Return what Kafka has lost, what was overtaken of it, and how many events are expired.

        ``lost``: what Postgres has lost. Raises Unavailable when Kafka does not say what it compacts or deletes.
        """
        rows = self._rows.run(statements.MISSING, bound, "looking for what Kafka has lost")
        missing = [(EventPlace(*row[:7]), *row[7:]) for row in rows]
        where = [
            # Empty without a route.
            Partition(event.topic or self._router.known_topic(kind, copy=event.copy) or "", event.partition)
            for event, _, kind, *_ in missing
        ]
        left = self._left({place.topic for place in where})
        # By time: what Postgres has lost is later than all that it has, and what was never archived may be earlier.
        last_lost: dict[tuple[str, str], dt.datetime] = {}
        for place in lost:
            # The archive may not know the topic of an earlier one.
            for key in ((place.topic, place.aggregate_id), ("", place.aggregate_id)):
                last_lost[key] = max(place.at, last_lost.get(key, place.at))

        def overtaken(event: EventPlace, by_known: bool) -> bool:
            # A copy for a dead-letter topic has no order.
            at = last_lost.get((event.topic, event.aggregate_id))
            return not event.copy and (by_known or (at is not None and at >= event.at - CLOCKS))

        now, tombstone_seconds = dt.datetime.now(dt.UTC), cache(KafkaAdmin(self._client).tombstone_seconds)

        def compacted_away(topic: str, event: EventPlace, by_known: bool, followed: bool, tombstone: bool) -> bool:
            # Without a route, the topic is not known.
            seconds = tombstone_seconds(topic) if topic else None
            if seconds is None:
                return False
            later = by_known or followed or overtaken(event, by_known)
            return later or (tombstone and (now - event.at).total_seconds() > seconds)

        with unavailable_on_kafka_error("reading cleanup.policy of topics"):
            kept = [
                (event, by_known)
                for (event, by_known, _, *more), place in zip(missing, where, strict=True)
                if not _expired(event, *left.get(place, _NOTHING_DELETED))
                and not compacted_away(place.topic, event, by_known, *more)
            ]
        return (
            [event for event, _ in kept],
            [event for event, by_known in kept if overtaken(event, by_known)],
            len(missing) - len(kept),
        )

    def _resend(self, found: Comparison, topics: Collection[str]) -> int:
        """Put back what Kafka has lost, while the lanes' rows are locked. Returns the number of events."""
        overtaken = {(event.event_id, event.copy) for event in found.overtaken}
        wanted = [event for event in found.missing if not topics or event.topic in topics]
        back = [event for event in wanted if (event.event_id, event.copy) not in overtaken]
        if not back:
            return 0
        self._connection.execute("SELECT set_config('lock_timeout', %s, true)", (f"{LOCK_SECONDS}s",))
        lanes = self._rows.run(statements.LOCK_LANES, (), "locking the lanes")
        [(relays,)] = self._rows.run(statements.RELAYS, (), "counting relays")
        before = "later events of a key could be published before those that are put back"
        if relays:
            raise OperationRefused(f"{counted(relays, 'relay')} running: {before}. Stop all, and run this again")
        for _, lane, owner, lease_until, held in lanes:
            if held:
                raise OperationRefused(
                    f"{owner} holds lane {lane} until {lease_until}: {before}. Stop it, or wait until then, and run "
                    f"this again; if it is gone for good: `outbox relay release {lane} --reason '…'`"
                )
        if [row[:1] for row in lanes] != list(self._seen):
            raise OperationRefused(
                "relays have changed the lanes since the comparison began: they may have published later events of a "
                "key. Run this again"
            )
        self._rows.run(statements.READ_ALL, (), "releasing the lanes")
        values = {
            "event_ids": [event.event_id for event in back],
            "copies": [event.copy for event in back],
            "dead": DEAD_LETTER,
        }
        [(resent,)] = self._connection.execute(sql.SQL(statements.RESEND).format(**self._names), values).fetchall()
        return int(resent)

    def _settle(self, lanes: Sequence[int], reason: str) -> None:
        """Settle the rows of lanes that have no markers. They are searched again: relays may run."""
        with Holding(self._connect, self._settings.db_schema) as holding:
            self._take(holding, lanes)
            self._settle_found(holding, lanes, reason)

    def _find(self, lanes: Sequence[int]) -> None:
        """Find what the comparison has found, too: it began earlier, and read more topics."""
        super()._find(lanes)
        self._mark_found()

    def _mark_found(self) -> None:
        self._rows.run(statements.MARK_FOUND, None, "noting what stands on Kafka", there=sql.SQL(statements.THERE))
        self._rows.supersede(*self._lost)

    def _starts(self, bound: Mapping[str, Any]) -> dict[str, int]:
        """Return the topics that events can be in, each with the time (milliseconds) from which it must be read."""
        # An event is settled after it is published, perhaps much later, but it is written before.
        [(oldest, archived)] = self._rows.run(statements.ARCHIVED, bound, "reading the archive")
        rows = self._rows.topics(range(len(self._lanes())))
        # Those of rows too: what may not be described is not among the topics that Kafka lists.
        topics = {*topics_of(self._client, self._router.may_write), *(archived or ()), *rows}
        start = _milliseconds(min(oldest or bound["from"], bound["from"]) - MARGIN)
        return {topic: min(start, rows.get(topic, start)) for topic in topics}

    def _left(self, topics: Collection[str]) -> dict[Partition, tuple[int, float]]:
        """Return the first offset that is left in each partition, and the time (milliseconds) of its record.

        Of partition -1, which stands for one that is not known, both are the lowest of all the topic's partitions. Of
        topics that do not exist, nothing.
        """
        with unavailable_on_kafka_error("looking where topics begin"):
            offsets = Offsets(self._client)
            low = offsets.low(offsets.partitions(topics))
        times = first_times(self._client, offsets, {place: offset for place, offset in low.items() if offset})
        now, retention = time.time(), cache(KafkaAdmin(self._client).retention_seconds)
        left: dict[Partition, tuple[int, float]] = {}
        for place, offset in low.items():
            if not offset:
                one = _NOTHING_DELETED
            elif place in times:
                one = offset, times[place]
            else:
                # It is empty: retention by time does that, or an operator.
                with unavailable_on_kafka_error("reading retention.ms of topics"):
                    seconds = retention(place.topic)
                one = offset, -math.inf if seconds is None else (now - seconds) * 1000
            unknown = place._replace(number=-1)
            least = left.get(unknown, one)
            left |= {place: one, unknown: (min(one[0], least[0]), min(one[1], least[1]))}
        return left

    def _read_topics(self, starts: Mapping[str, int]) -> tuple[int, int]:
        """Copy the topics' records into a temporary table. Returns how many were read, and those of other sources."""
        read = others = 0
        for statement in statements.TABLE:
            self._rows.run(statement, None, "listing records")
        for group in committed_since(self._client, starts):
            rows = [(one, one.source in {"", self._settings.ce_source}) for one in group if one.event_id is not None]
            read, others = read + len(group), others + len(group) - sum(ours for _, ours in rows)
            with unavailable_on_error("listing records"), self._connection.cursor() as cursor:
                with cursor.copy(statements.COPY) as copy:
                    for one, ours in rows:
                        copy.write_row(_row(one, ours=ours))
        for statement in statements.INDEX:
            self._rows.run(statement, None, "listing records")
        return read, others


def _expired(event: EventPlace, offset: int, milliseconds: float) -> bool:
    """Return whether retention has deleted an event, if this is the first offset that it has left, and its time.

    By their offsets alone they may be of another log: of a mirror, or of a topic that was made anew.
    """
    # An archived offset is -1 if it is not known.
    return max(event.offset, 0) < offset and milliseconds >= _milliseconds(event.at - CLOCKS)


def _hides(hanging: Sequence[HangingPartition]) -> str:
    """Return what the transactions that are open in these partitions hide, and the way out."""
    return (
        "; ".join(
            f"{found.topic!r} partition {found.partition} waits, at offset {found.stable}, for the end of a "
            f"transaction with perhaps {counted(found.events, 'event')}, of which the outbox has {found.held}. If a "
            "program has it open, end that, or wait for its time-out. Else "
            + (f"save what the outbox does not have: {found.read} > saved; then " if found.would_lose else "")
            + f"abort it: {found.command}"
            for found in hanging
        )
        + ". Then run this again. Nothing was compared or changed: it is not known yet what Kafka has there"
    )


def _row(record: TopicRecord, *, ours: bool) -> tuple[Any, ...]:
    at = min(time_of(max(record.milliseconds, 0)) or _LATEST, _LATEST)
    key = (record.key or b"").decode(errors="replace").replace("\0", "")
    known = record.event_id, record.mark, record.copy, ours, content_of(record)
    return *known, *record.partition, record.offset, at, _written(record), key


def _written(record: TopicRecord) -> dt.datetime:
    """Return when the event was written, by the database's clock; the beginning of time if that is not known."""
    try:
        time = dt.datetime.fromisoformat(record.written)
        # Postgres takes no zone of 16 hours or more.
        return time.replace(tzinfo=dt.UTC) if time.tzinfo is None else time.astimezone(dt.UTC)
    except (ValueError, OverflowError):
        return dt.datetime.min.replace(tzinfo=dt.UTC)


def _milliseconds(time: dt.datetime) -> int:
    return max(int(time.timestamp() * 1000), 0)
