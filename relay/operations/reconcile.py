"""Repairs lanes whose marker and table contradict each other, from the contents of their topics.

For a lane that stopped with StateLost, it is unknown which of its rows are on Kafka. The topics record it: every event
carries its id. So the rows of such lanes are looked up in their topics (read_committed, from shortly before the oldest
row was written, each topic once for all lanes); those found are settled, and a new marker is written. Two cases can't
be repaired. Events that Kafka has and Postgres has lost: they were published, and their business rows are gone. And
events whose messages the topic's retention has deleted: they are published again.

A lane that stopped with UndecidedTransaction waits for the end of a transaction that its broker has lost (KAFKA-20734).
It is aborted, in the lane's partition of the state topic and in the events' partitions, if the outbox still has the
rows of the hidden events: they are published again. Otherwise nothing is done, because those events would be lost.

Relays may keep running: it holds only the lanes that it repairs. Each is taken in Postgres (epoch), then the
transactional.ids in its row and its last marker are fenced; reconcile's own id is in the row before its markers are
written. The rows are listed in a temporary table: connect to the server itself, not to a pooler.

| killed                                    | what follows                                                   |
|-------------------------------------------|----------------------------------------------------------------|
| a lane is taken                           | its lease runs out; it is still stopped, its row names whom to |
|                                           | fence                                                          |
| events' partitions have been decided      | the same: the state topic's is not yet                         |
| some rows are settled                     | the same; running it again finishes                            |
| the lane's partition has been decided     | the lane goes on, or is still stopped: what is on Kafka is     |
|                                           | settled                                                        |
| marker written, last_batch not            | marker and last_batch still contradict, or agree; the row      |
|                                           | names reconcile's transactional.id                             |
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

from confluent_kafka import KafkaException
from psycopg import errors, sql

from outbox._app.settings import client_options
from outbox._clients.counting import counted
from outbox.errors import OperationRefused, SchemaError
from relay.config import Settings, producer_options, state_topic_name
from relay.core.marker import Identity, Marker, StateLost, resume
from relay.core.ports import Unavailable, UndecidedTransaction
from relay.database import Connector, unavailable_on_error
from relay.failpoints import failpoint
from relay.kafka.client import text_of
from relay.kafka.fencing import ShortLivedProducer, fence, initialize
from relay.kafka.offsets import Partition, Undecided
from relay.kafka.state_topic import MarkersRead, StateTopic
from relay.kafka.takeover import own_ids
from relay.operations.audit import note
from relay.operations.hidden_events import HangingPartition, HiddenEvents
from relay.operations.holding import LEASE_SECONDS, Holding, taken
from relay.operations.lane_rows import Lane, LaneComparison, LaneRows
from relay.parts import build_router
from relay.settle.statements import names_of
from relay.wal.replication import Replication, lsn_text

LOCK_SECONDS: Final = 10
_KAFKA_SECONDS: Final = 30.0
_AUDIT_IDS: Final = 10_000

_LANES: Final = """
SELECT lane, last_batch, (SELECT system_identifier::text FROM pg_control_system()),
       {timeline}, {this_outbox},
       (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint, transactional_id,
       bool_or(last_batch IS NOT NULL OR transactional_id IS NOT NULL) OVER ()
  FROM {lanes} ORDER BY lane"""

# LIMIT prevents the planner from reversing the join; see settle/statements.py.
_GONE: Final = """
SELECT count(*)
  FROM unnest(%(ids)s::bigint[], %(event_ids)s::uuid[]) AS named(id, event_id)
  LEFT JOIN LATERAL (SELECT true AS there FROM ONLY {events} AS e
                      WHERE e.lane = %(lane)s AND e.id = named.id AND e.event_id = named.event_id LIMIT 1) AS e ON true
 WHERE e.there IS NULL"""

_TAKE: Final = """
UPDATE {lanes} SET owner = %(owner)s, epoch = epoch + 1,
       lease_until = clock_timestamp() + make_interval(secs => %(lease)s)
 WHERE lane = %(lane)s
RETURNING epoch, transactional_id"""

_OWN: Final = """
UPDATE {lanes} AS l SET transactional_id = %(own)s,
       lease_until = clock_timestamp() + make_interval(secs => %(lease)s)
  FROM {leases} WHERE {ours}
RETURNING l.lane"""

_DONE: Final = """
UPDATE {lanes} AS l SET last_batch = %(batch)s, owner = NULL, lease_until = '-infinity', transactional_id = NULL
  FROM {leases} WHERE {ours} RETURNING 1"""


@dataclass(frozen=True, slots=True)
class Findings:
    lanes: Sequence[LaneComparison]
    hanging: Sequence[HangingPartition]

    @property
    def problems(self) -> list[LaneComparison]:
        return [state for state in self.lanes if state.problem is not None]


class Reconciler:
    """Compares lanes with their topics, and repairs them. Not on a standby.

    ``settings`` are the relays', with the delivery exactly-once.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._connect = Connector(settings.require_database(), "outbox relay reconcile")
        self._prefix = f"{settings.name}.relay."
        self._own = f"{self._prefix}reconcile-{uuid.uuid4()}"
        self._router = build_router(settings)
        self._client = client_options(settings)
        self._producer = producer_options(settings)
        self._state = StateTopic(self._client, state_topic_name(settings), replication=settings.state_replication)
        self._ended: dict[int, int] | None = None
        self._names = names_of(settings.db_schema)
        self._connection = self._connect()
        archive = settings.relay.archive_days > 0
        self._rows = LaneRows(self._connection, self._names, self._router, self._client, archive=archive)
        self._hidden = HiddenEvents(self._rows, self._router, self._state, self._client, self._producer)

    def look(self, lanes: Collection[int] | None = None, *, search: bool = True) -> Findings:
        """Compare all lanes, or these; with ``search``, look up the rows of lanes with a problem in their topics."""
        states = self._compared(self._chosen(lanes))
        undecided = self._hidden.undecided()
        for found in undecided:
            topic, lane = found.partition
            if topic == self._state.name and lane in states:
                states[lane] = replace(states[lane], problem=str(found.error(self._state.decide_seconds)))
        hanging = self._hidden.examine(undecided, list(self._lanes()))[0] if undecided else []
        broken = [lane for lane, state in states.items() if state.problem is not None]
        if broken and search:
            self._rows.list_rows(broken)
            stuck = {found.topic for found in hanging}
            self._rows.search(
                {topic: since for topic, since in self._rows.topics(broken).items() if topic not in stuck}
            )
            superseded = self._rows.superseded()
            for lane, count in self._rows.found().items():
                states[lane] = replace(states[lane], found=count, superseded=superseded.get(lane, ()))
        return Findings(list(states.values()), hanging)

    def former_markers(self, lanes: int) -> dict[int, Marker]:
        """Return the last markers of numbers that the outbox had once, and would have again with so many lanes."""
        read = self._state.read(set(range(lanes)) - self._lanes().keys())
        return {lane: marker for lane, marker in read.markers.items() if marker is not None}

    def upgraded(self) -> Findings:
        """Return the state of all lanes, of which some stop for no other reason than a new system identifier.

        That is what pg_upgrade leaves. Raises OperationRefused in any other case.
        """
        findings = self.look(search=False)
        seen = self._lanes()
        read = self._state.read([state.lane for state in findings.problems], decided=False)
        for state in findings.problems:
            marker, here = read.markers.get(state.lane), seen[state.lane]
            if marker is None or marker.system_identifier == here.system or state.lane in read.problems:
                raise OperationRefused(
                    f"{state.problem}. That is not for want of pg_upgrade; see `outbox relay reconcile`"
                )
            before = Identity(marker.system_identifier, marker.timeline, here.outbox)
            try:
                resume(state.lane, here.last_batch, marker, before)
            except StateLost as error:
                raise OperationRefused(
                    f"{error}. pg_upgrade keeps the tables as they are; this is a restore"
                ) from error
            if here.last_batch != marker.batch and self._gone(state.lane, marker):
                raise OperationRefused(
                    f"lane {state.lane}: events of batch {marker.batch} are on Kafka, and neither settled nor in the "
                    "table. pg_upgrade keeps the tables as they are; see `outbox relay reconcile`"
                )
        if not findings.problems:
            raise OperationRefused("no lane's marker names another server: there is nothing to do")
        return findings

    def repair(self, findings: Findings, reason: str) -> list[LaneComparison]:
        """Fence the lanes that have a problem, settle their events that are on Kafka, and write new markers.

        Returns the new state of these lanes. Raises OperationRefused when another process took one meanwhile, or a
        hanging transaction can't be aborted without loss, and SchemaError without the rights of the tables' owner; it
        is safe to run it again.
        """
        broken = {state.lane: state for state in findings.problems}
        # The audit first: without the right to write it, nothing is changed.
        self._audit(broken.values(), findings.hanging, reason)
        if not broken and not findings.hanging:
            return []
        self._state.require(len(self._lanes()))
        with Holding(self._connect, self._settings.db_schema) as holding:
            self._take(holding, broken)
            failpoint("reconcile.taken")
            # All before the search: an open transaction of one lane hides what another has committed behind it.
            self._fence(holding, broken)
            return self._repair(holding, broken, reason)

    def close(self) -> None:
        self._connection.close()

    def _repair(self, holding: Holding, broken: dict[int, LaneComparison], reason: str) -> list[LaneComparison]:
        undecided = self._hidden.undecided()
        if any(found.partition.topic != self._state.name for found in undecided):
            broken |= self._decide_events(holding, undecided)
        if not broken:
            return []
        self._settle_found(holding, list(broken), reason)
        failpoint("reconcile.settled")
        found, superseded = self._rows.found(), self._rows.superseded()
        # Not earlier: no relay goes on with a lane while its partition is undecided. What is on Kafka is settled by
        # now, so a relay that goes on publishes only the rest.
        held = {Partition(self._state.name, lane) for lane in holding.epochs}
        self._hidden.abort(holding.former(), [found for found in undecided if found.partition in held])
        failpoint("reconcile.decided")
        fresh = self._write_markers(holding, broken)
        failpoint("reconcile.marked")
        rows = self._rows.count(list(broken))
        repaired = []
        for lane, marker in fresh.items():
            self._release(holding, lane, marker)
            counts = rows.get(lane, 0), found.get(lane, 0), superseded.get(lane, ())
            repaired.append(LaneComparison(lane, marker.batch, marker.batch, None, *counts))
        return repaired

    def _settle_found(self, holding: Holding, lanes: Sequence[int], reason: str) -> None:
        """Settle the rows of lanes that are held and that are on Kafka. The audit has them first."""
        self._find(lanes)
        with unavailable_on_error("writing the audit"), self._connection.transaction():
            superseded = self._rows.superseded()
            for lane, ids in self._rows.found_ids().items():
                self._note_settled("reconcile settles", reason, ids, superseded.get(lane, ()), {"lane": lane})
        for lane in lanes:
            self._rows.settle(lane, holding.values([lane]))

    def _find(self, lanes: Sequence[int]) -> None:
        """List the rows of lanes that are held, and find those on Kafka."""
        self._rows.list_rows(lanes)
        self._rows.search(self._rows.topics(lanes))

    # -- looking

    def _chosen(self, lanes: Collection[int] | None) -> list[int]:
        there = self._lanes()
        for lane, here in there.items():
            if here.transactional_id is not None and not here.transactional_id.startswith(self._prefix):
                raise OperationRefused(
                    f"a relay with another OUTBOX_NAME had lane {lane} (transactional id {here.transactional_id!r}), "
                    "and the markers are in that outbox's state topic. Set OUTBOX_NAME to the relays'; if all relays "
                    "have a new name, or this is a copy, first set transactional_id in outbox.lanes to NULL"
                )
        unknown = set(lanes or ()) - there.keys()
        if unknown:
            raise SchemaError(f"the outbox has no lane {min(unknown)}: it has {len(there)}, from 0")
        return sorted(there if lanes is None else set(lanes))

    def _lanes(self) -> dict[int, Lane]:
        with unavailable_on_error("reading lanes"):
            try:
                rows = self._connection.execute(sql.SQL(_LANES).format(**self._names)).fetchall()
            except errors.ObjectNotInPrerequisiteState as error:
                raise SchemaError(
                    "this server is a standby: run this on the primary, or promote this one first"
                ) from error
        return {lane: Lane(*values) for lane, *values in rows}

    def _compared(self, lanes: Sequence[int]) -> dict[int, LaneComparison]:
        states: dict[int, LaneComparison] = {}
        rows = self._rows.count(lanes)
        left = list(lanes)
        while left:
            before = self._lanes()
            read = self._state.read(left, decided=False)
            # The WAL's end as well: what the markers name was committed before it.
            after = self._lanes()
            seen = {lane: _beside(read.markers.get(lane), before[lane], after[lane]) for lane in left}
            compared = {lane: self._compare(lane, seen[lane], read) for lane in left}
            now = self._lanes()
            for lane, (marker, problem) in compared.items():
                # A running relay changes both sides; only a lane that did not change meanwhile can have a
                # contradiction.
                if problem is None or now[lane].last_batch == before[lane].last_batch:
                    batch = marker.batch if marker is not None else None
                    states[lane] = LaneComparison(lane, seen[lane].last_batch, batch, problem, rows.get(lane, 0))
            left = [lane for lane in left if lane not in states]
        return dict(sorted(states.items()))

    def _compare(self, lane: int, seen: Lane, read: MarkersRead) -> tuple[Marker | None, str | None]:
        """Return the marker, and why a relay would stop on the lane, if it would."""
        if lane in read.problems:
            return None, str(read.problems[lane])
        marker = read.markers[lane]
        if seen.disowns(marker):
            raise OperationRefused(
                f"{self._state.name!r} holds markers of another outbox, which has, or had, the same OUTBOX_NAME, and "
                "this one has never published exactly-once. Choose a new one for this outbox"
            )
        try:
            resume(lane, seen.last_batch, marker, Identity(seen.system, seen.timeline, seen.outbox))
        except StateLost as error:
            return marker, str(error)
        if marker is None:
            return marker, None
        if seen.last_batch != marker.batch and (gone := self._gone(lane, marker)):
            lost = counted(gone, "event")
            return marker, f"lane {lane}: Kafka holds {lost} of batch {marker.batch} that Postgres has lost"
        if marker.commit_lsn is not None and marker.commit_lsn >= (end := self._end_of(marker.timeline, seen)):
            return marker, (
                f"lane {lane}: Kafka holds events up to {lsn_text(marker.commit_lsn)} of timeline {marker.timeline}, "
                f"of which this server, on timeline {seen.timeline}, has the WAL up to {lsn_text(end)} only: it has "
                "lost commits"
            )
        return marker, None

    def _gone(self, lane: int, marker: Marker) -> int:
        values = {"lane": lane, "ids": list(marker.positions), "event_ids": list(marker.event_ids)}
        [(gone,)] = self._rows.run(_GONE, values, "looking for the marker's rows")
        return int(gone)

    def _end_of(self, timeline: int, seen: Lane) -> int:
        """Return where a timeline ended in this server's history; the WAL's end if it is current, or not in it."""
        if timeline == seen.timeline:
            return seen.insert_lsn
        if self._ended is None:
            url = self._settings.require_database()
            with closing(Replication(url, "outbox relay reconcile")) as replication:
                self._ended = replication.switches(seen.timeline)
        return self._ended.get(timeline, seen.insert_lsn)

    # -- hanging transactions

    def _decide_events(self, holding: Holding, undecided: Sequence[Undecided]) -> dict[int, LaneComparison]:
        """Abort hanging transactions in partitions of events that can be published again. Returns their lanes."""
        hanging, lanes = self._hidden.examine(undecided, list(self._lanes()))
        topics = self._rows.topics(list(holding.epochs))
        # In topics that the held lanes do not need, leave alone what has no rows here: transactions of other programs,
        # and those whose events are all settled.
        hanging = [found for found in hanging if found.held or found.topic in topics]
        ours = {(found.topic, found.partition) for found in hanging}
        self._hidden.require_rows(hanging)
        more = sorted(lanes - holding.epochs.keys())
        states = self._compared(more)
        self._take(holding, more)
        self._fence(holding, more)
        self._hidden.abort(holding.former(), [found for found in undecided if found.partition in ours])
        return states

    # -- holding lanes

    def _take(self, holding: Holding, lanes: Collection[int]) -> None:
        for lane in sorted(lanes):
            with unavailable_on_error(f"taking lane {lane}"), self._connection.transaction():
                self._connection.execute("SELECT set_config('lock_timeout', %s, true)", (f"{LOCK_SECONDS}s",))
                try:
                    row = self._connection.execute(
                        sql.SQL(_TAKE).format(**self._names),
                        {"lane": lane, "owner": holding.owner, "lease": LEASE_SECONDS},
                    ).fetchone()
                except errors.LockNotAvailable as error:
                    raise OperationRefused(
                        f"lane {lane}: another session has its row in outbox.lanes locked for more than "
                        f"{LOCK_SECONDS} s; find it in pg_stat_activity, end it, and run this again"
                    ) from error
            if row is None:
                raise OperationRefused(f"lane {lane} is gone: the number of lanes was changed; run this again")
            holding.add(lane, row[0], [] if row[1] is None else own_ids(row[1]))

    def _fence(self, holding: Holding, lanes: Collection[int]) -> None:
        # A failover may have lost what a row said of the marker's writer.
        for lane, marker in self._state.read(lanes, decided=False).markers.items():
            if marker is not None and marker.writer is not None:
                holding.add_former(lane, own_ids(marker.writer))
        for transactional_id in sorted(holding.former(lanes)):
            fence(self._producer, transactional_id, _KAFKA_SECONDS, _KAFKA_SECONDS)

    def _write_markers(self, holding: Holding, lanes: Mapping[int, LaneComparison]) -> dict[int, Marker]:
        """Write a new marker for each lane in one transaction, and verify it by reading."""
        fresh: dict[int, Marker] = {}
        for last in (False, False, True):
            producer = self._producer_of_own()
            # After our own init_transactions, and before anything is written under this id: the next holder of a lane
            # fences it.
            mine = {"own": self._own, "lease": LEASE_SECONDS, **holding.values(lanes)}
            kept = {lane for (lane,) in self._rows.run(_OWN, mine, "checking the lanes")}
            for lane in sorted(lanes.keys() - kept):
                raise taken(lane)
            fresh = self._fresh(holding, lanes)
            try:
                producer.begin_transaction()
                for lane, marker in fresh.items():
                    producer.produce(self._state.name, marker.encode(), b"marker", partition=lane)
                failpoint("reconcile.marking")
                producer.commit_transaction(_KAFKA_SECONDS)
                break
            except KafkaException as error:
                # A relay that was taking over a lane may fence us once; it then finds that its epoch is over.
                if last:
                    raise Unavailable(f"Kafka, writing fresh markers: {text_of(producer.explained(error))}") from error
            finally:
                producer.purge()
        written = self._state.last_markers(fresh)
        if written != fresh:
            raise Unavailable("Kafka: the fresh markers were committed, and others are read; run this again")
        return fresh

    def _producer_of_own(self) -> ShortLivedProducer:
        # One of the ids that the next holder fences.
        producer = ShortLivedProducer(self._producer, own_ids(self._own)[0])
        try:
            initialize(producer, _KAFKA_SECONDS, _KAFKA_SECONDS)
        except KafkaException as error:
            raise Unavailable(f"Kafka, beginning as {self._own!r}: {text_of(producer.explained(error))}") from error
        return producer

    def _fresh(self, holding: Holding, lanes: Mapping[int, LaneComparison]) -> dict[int, Marker]:
        read = self._state.read(lanes)
        for problem in read.problems.values():
            if isinstance(problem, UndecidedTransaction):
                raise problem
        seen = self._lanes()
        fresh: dict[int, Marker] = {}
        for lane, state in lanes.items():
            # Former writers are fenced: no marker of theirs can follow this one.
            last, here = read.markers.get(lane), seen[lane]
            batch = max(state.next_batch, here.last_batch or 0, 0 if last is None else last.batch + 1)
            fresh[lane] = Marker(batch, holding.epochs[lane], here.system, here.timeline, outbox=here.outbox)
        return fresh

    def _release(self, holding: Holding, lane: int, fresh: Marker) -> None:
        values = {**holding.values([lane]), "batch": fresh.batch}
        if not self._rows.run(_DONE, values, f"releasing lane {lane}"):
            raise taken(lane)
        holding.done(lane)

    # -- audit

    def _audit(self, states: Collection[LaneComparison], hanging: Sequence[HangingPartition], reason: str) -> None:
        with unavailable_on_error("writing the audit"), self._connection.transaction():
            for state in states:
                details = {"lane": state.lane, "problem": state.problem, "batch": state.next_batch, "rows": state.rows}
                self._note("reconcile", reason, details)
            if hanging and not states:
                found = [f"{part.topic} partition {part.partition} at {part.stable}" for part in hanging]
                self._note("reconcile", reason, {"hanging": found})

    def _note_settled(
        self, what: str, reason: str, ids: Sequence[str], superseded: Collection[str], details: Mapping[str, object]
    ) -> None:
        """Record the ids of events that will be settled, in parts, and apart from the others those that are superseded.

        All of them: without an archive, nothing else shows ``outbox recover`` that they are no loss.
        """
        apart = set(superseded)
        for start in range(0, len(ids), _AUDIT_IDS):
            part = ids[start : start + _AUDIT_IDS]
            ids_of = {
                "event_ids_on_kafka": [event_id for event_id in part if event_id not in apart],
                "superseded": [event_id for event_id in part if event_id in apart],
            }
            self._note(what, reason, {**details, "settled": len(part), **ids_of})

    def _note(self, what: str, reason: str, details: Mapping[str, object]) -> None:
        note(self._connection, self._names, what, reason, details)


def _beside(marker: Marker | None, before: Lane, after: Lane) -> Lane:
    """Return a lane as it was while its marker was read.

    A relay that settles batches meanwhile goes on with it, so its marker was sound.
    """
    if marker is None or before.last_batch == after.last_batch:
        return after
    settled = (before.last_batch or 0) <= marker.batch <= (after.last_batch or 0) + 1
    return after._replace(last_batch=marker.batch) if settled else after
