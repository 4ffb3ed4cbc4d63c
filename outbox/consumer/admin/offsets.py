"""Show the offsets of groups with those of Kafka, and move them by hand: `outbox offsets`.

A move is one transaction. It raises the group's generation, which waits for a task that is about to commit and fences
all later ones; writes the new offsets, accepts the open losses of the partitions, and adds a row to ``audit``. What the
group has stored is read after the fence, and Kafka is asked again where that is more than it had before. A consumer
that is running is fenced, and continues from the new offsets when it is started again.

| the offset moves | what follows                                                                                      |
|------------------|---------------------------------------------------------------------------------------------------|
| back             | messages are read again; repeats are recognized by their ids, or dead if their day is forgotten   |
| back, with       | messages are read and applied again: no ids are remembered                                        |
| OffsetsOnly      |                                                                                                   |
| forward          | messages are never read: only with ``skip``, and the audit records which                          |
| outside of Kafka | refused                                                                                           |
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from outbox.consumer.admin.moves import Move, Wanted, after_losses, gone, move, refuse_outside, refuse_some, target
from outbox.consumer.connections import process_name
from outbox.consumer.errors import ConsumerUnavailable, NotAuthorized
from outbox.consumer.groups import CLAIM_ALL, GroupRows
from outbox.consumer.kafka_admin import KafkaAdmin, TopicMissing, TopicSnapshot
from outbox.consumer.losses import kind_of
from outbox.consumer.model import LossKind, OffsetBounds, Partition, StoredOffset
from outbox.consumer.postgres_errors import clear_errors
from outbox.consumer.statements import note, statement
from outbox.errors import NotFound, OperationRefused

_Losses = Mapping[int, Sequence[tuple[str, int]]]
_Decide = Callable[[Mapping[int, StoredOffset], _Losses], list[Move]]

WAIT_SECONDS: Final = 60.0
SHOWN_LOSSES: Final = 1000
"""How many losses of a group are shown."""

_GROUPS: Final = """
SELECT grp AS "group", generation, owner, taken_at, forgotten_before FROM {groups}
 WHERE %(grp)s::text IS NULL OR grp = %(grp)s ORDER BY grp"""
_POSITIONS: Final = """
SELECT grp, topic, part, topic_id, next_offset, updated_at FROM {offsets}
 WHERE %(grp)s::text IS NULL OR grp = %(grp)s ORDER BY grp, topic, part"""
GIVEN_UP: Final = "unconfirmed_from IS NOT NULL AND updated_at <= now() - interval '5 minutes'"
"""SQL: a row of offsets whose consumer was killed and has given up a range, which the next claim records. A younger
range may still be confirmed.
"""
_OPEN_LOSSES: Final = """
SELECT id, grp, topic, part, kind, first_offset, end_offset, found_at, detail FROM {losses}
 WHERE accepted_at IS NULL AND (%(grp)s::text IS NULL OR grp = %(grp)s)
 UNION ALL
SELECT NULL, grp, topic, part, 'given-up', unconfirmed_from, unconfirmed_end, updated_at,
       format('%%s-%%s: messages %%s to %%s were given up (at-most-once), and their effect is not confirmed yet',
              topic, part, unconfirmed_from, unconfirmed_end - 1)
  FROM {offsets}
 WHERE {given_up} AND (%(grp)s::text IS NULL OR grp = %(grp)s)"""
# Those of one group come first by kind: what halts it is not behind 100,000 messages that were given up.
# Behind the first ones, each topic has a row.
_LOSSES: Final = """
SELECT * FROM (
    SELECT *, row_number() OVER by_kind AS place, lag(topic) OVER by_kind IS DISTINCT FROM topic AS of_topic,
           count(*) OVER (PARTITION BY grp) AS of_group
      FROM ({open}) AS open
    WINDOW by_kind AS (PARTITION BY grp ORDER BY kind = 'given-up', topic, part, id)) AS numbered
 WHERE place <= %(most)s OR of_topic ORDER BY grp, place"""
_COUNT_LOSSES: Final = "SELECT grp, count(*) FROM ({open}) AS open GROUP BY grp"

_PLACE: Final = frozenset({"grp", "place", "of_topic", "of_group"})
_NEW: Final = "INSERT INTO {groups} (grp, owner) VALUES (%(grp)s, %(owner)s) ON CONFLICT DO NOTHING"
_NEXT_GENERATION: Final = """
UPDATE {groups} SET generation = generation + 1, owner = %(owner)s, taken_at = now()
 WHERE grp = %(grp)s RETURNING generation, forgotten_before"""
_OPEN: Final = """
SELECT part, kind, min(first_offset) AS first_offset FROM {losses}
 WHERE grp = %(grp)s AND topic = %(topic)s AND accepted_at IS NULL GROUP BY part, kind"""
_WRITE: Final = """
INSERT INTO {offsets} AS o (grp, topic, part, topic_id, next_offset, generation, log_end)
VALUES (%(grp)s, %(topic)s, %(part)s, %(topic_id)s, %(after)s, %(generation)s, %(log_end)s)
ON CONFLICT (grp, topic, part) DO UPDATE
   SET topic_id = excluded.topic_id, next_offset = excluded.next_offset, log_end = excluded.log_end,
       leader_epoch = NULL, epoch_offset = NULL, updated_at = now()"""
_DELETE: Final = "DELETE FROM {offsets} WHERE grp = %(grp)s AND topic = %(topic)s AND part = %(part)s"
_ACCEPT: Final = """
UPDATE {losses} SET accepted_at = now()
 WHERE grp = %(grp)s AND topic = %(topic)s AND part = ANY(%(parts)s) AND accepted_at IS NULL
   AND (%(unseen)s OR found_at < now()) RETURNING id"""

_TROUBLES: Final = {
    LossKind.RECREATED: "the topic was created again",
    LossKind.RETENTION: "retention passed it",
    LossKind.CUT: "the log was cut",
}


@dataclass(frozen=True, slots=True)
class PartitionOffsets:
    """One partition of a group, with Kafka's offsets; None for unknown values.

    next_offset   None: Kafka has the partition, but the group has not read it yet.
    lag           how many offsets a read_committed reader could read and the group has not read.
    uncommitted   how many offsets are behind an open transaction.
    trouble       why the group can't continue from there.
    """

    topic: str
    part: int
    next_offset: int | None
    first: int | None
    end: int | None
    high_watermark: int | None
    lag: int | None
    uncommitted: int | None
    updated_at: dt.datetime | None
    trouble: str | None

    def first_waiting(self) -> int:
        """Return the offset of the first waiting message: that of Kafka's log where the group has not read it yet."""
        return max(self.next_offset or 0, self.first or 0)

    def waiting_before(self, newer: int | None) -> int:
        """Return how many offsets wait before the first message that is newer; without one all do."""
        end = self.end or 0
        return max((end if newer is None else min(newer, end)) - self.first_waiting(), 0)


@dataclass(frozen=True, slots=True)
class Group:
    """A group, its partitions, and its open losses: how many, the first of them, and the topics of all.

    open_losses   None if they were not read.
    """

    group: str
    generation: int
    owner: str
    taken_at: dt.datetime
    forgotten_before: dt.date | None
    positions: Sequence[PartitionOffsets]
    open_losses: int | None
    losses: Sequence[Mapping[str, Any]]
    lost_topics: Sequence[str]


@dataclass(frozen=True, slots=True)
class MoveResult:
    """The result of a move, or of its ``dry_run``. ``accepted``: ids of losses.

    generation         the group's new generation; None if nothing was changed.
    forgotten_before   ids of days before this one are no longer all remembered.
    unshown            why Kafka's own tools do not show the new offsets, if they don't.
    """

    group: str
    topic: str
    moves: Sequence[Move]
    accepted: Sequence[int]
    generation: int | None
    dry_run: bool
    forgotten_before: dt.date | None = None
    unshown: str | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    """Arguments of a move. ``to`` is for the audit, ``wait`` in seconds; ``unseen``: accept what it records itself."""

    group: str
    topic: str
    what: str
    why: str
    dry_run: bool
    wait: float
    skip: bool
    to: str | int | None = None
    part: int | None = None
    new: bool = False
    unseen: bool = False


def count_losses(connection: psycopg.Connection[Any], schema: str) -> dict[str, int]:
    """Return how many open losses each group has, if any. Raises psycopg.Error."""
    return dict(connection.execute(_over_losses(schema, _COUNT_LOSSES), {"grp": None}).fetchall())


class Offsets:
    """The offsets of all groups of one sink. ``connection`` is in autocommit; each move is one transaction.

    Raises ConsumerUnavailable when Postgres or Kafka is away, and SchemaError when tables or rights are missing.
    """

    def __init__(self, connection: psycopg.Connection[Any], schema: str, kafka: KafkaAdmin) -> None:
        self._connection = connection
        self._kafka = kafka
        self._schema = schema

    def show(self, group: str | None = None, *, losses: int | None = SHOWN_LOSSES) -> tuple[list[Group], str | None]:
        """Return one group or all, and the error if Kafka's offsets are missing. Raises NotFound.

        losses   how many of each group to return at most; None: their table need not be readable.
        """
        with clear_errors("reading the offsets"), self._connection.transaction():
            groups, positions = (self._rows(query, grp=group) for query in (_GROUPS, _POSITIONS))
            lost = [] if losses is None else self._rows(_LOSSES, grp=group, most=losses)
        if group is not None and not groups:
            self._no_such_group(group)
        counts = {loss["grp"]: loss["of_group"] for loss in lost}
        topics = sorted({row["topic"] for row in positions})
        kafka = TopicSnapshot({}, {}, (), frozenset())
        away: str | None = None
        if topics:
            try:
                kafka = self._kafka.snapshot(topics, high_watermarks=True, optional=lambda _: True)
            except (ConsumerUnavailable, NotAuthorized) as error:
                away = str(error)
        return [
            Group(
                **row,
                positions=_positions(
                    [one for one in positions if one["grp"] == row["group"]], kafka, known=away is None
                ),
                open_losses=None if losses is None else counts.get(row["group"], 0),
                losses=[
                    {name: value for name, value in loss.items() if name not in _PLACE}
                    for loss in lost
                    if loss["grp"] == row["group"] and loss["place"] <= (losses or 0)
                ],
                lost_topics=sorted({loss["topic"] for loss in lost if loss["grp"] == row["group"]}),
            )
            for row in groups
        ], away

    def reset(
        self,
        group: str,
        topic: str,
        to: Wanted,
        why: str,
        *,
        part: int | None = None,
        skip: bool = False,
        dry_run: bool = False,
        new: bool = False,
        wait_seconds: float = WAIT_SECONDS,
    ) -> MoveResult:
        """Move all partitions of a topic, or only ``part``.

        skip          messages may be skipped for good.
        dry_run       only return what would happen. Nothing is locked, and ``skip`` is not required.
        new           the group need not exist.
        wait_seconds  how long to wait for a task that has locked the offsets.

        Raises OperationRefused, NotFound, TopicMissing.
        """
        snapshot = self._kafka.snapshot([topic])
        if snapshot.missing:
            raise TopicMissing(
                f"there is no topic {topic}; create it, or have the group forget it: `outbox offsets forget {group} "
                f"--topic {topic} --reason '…'`",
                snapshot.missing,
            )
        bounds = {number: there for (_, number), there in snapshot.bounds.items()}
        if part is not None and part not in bounds:
            raise OperationRefused(f"{topic} has no partition {part}, but {min(bounds)} to {max(bounds)}")
        chosen = sorted(bounds) if part is None else [part]
        if isinstance(to, int):
            refuse_outside(topic, {number: bounds[number] for number in chosen}, to)
        times: Mapping[Partition, int | None] = {}
        if isinstance(to, dt.datetime):
            times = self._kafka.at_time(snapshot.bounds, to)

        def decide(stored: Mapping[int, StoredOffset], losses: _Losses) -> list[Move]:
            moves = []
            topic_id = snapshot.ids[topic]
            read = any(here.topic_id == topic_id for here in stored.values())
            bounds.update(self._later_ends(topic, topic_id, bounds, stored))
            for number in chosen:
                here, there = stored.get(number), bounds[number]
                if to == "loss":
                    after = after_losses(here, there, topic_id, losses.get(number, ()))
                else:
                    after = target(to, there, times.get((topic, number)))
                    if after == 0 and here is None and read and part is None:
                        # It was added to the topic, and may have to wait for others: the consumer begins it at 0.
                        after = None
                if after is not None:
                    moves.append(move(number, here, there, topic_id, after))
            # Partitions of the old topic that the new one does not have.
            ended = {n: here for n, here in stored.items() if n not in bounds and here.topic_id != topic_id}
            refuse_some(group, topic, () if part is None else ended)
            return moves + gone(ended)

        request = _Request(
            group=group,
            topic=topic,
            what="offsets set" if isinstance(to, int) else "offsets reset",
            why=why,
            to=to.isoformat() if isinstance(to, dt.datetime) else to,
            part=part,
            skip=skip,
            dry_run=dry_run,
            new=new,
            wait=wait_seconds,
        )
        return self._move(request, decide, bounds)

    def forget(
        self, group: str, topic: str, why: str, *, dry_run: bool = False, wait_seconds: float = WAIT_SECONDS
    ) -> MoveResult:
        """Remove the rows and open losses of a topic that a group no longer reads. Raises NotFound."""

        def decide(stored: Mapping[int, StoredOffset], losses: _Losses) -> list[Move]:
            if not stored and not losses:
                raise NotFound(f"group {group} knows nothing of {topic}; see `outbox offsets show`")
            return gone(stored)

        request = _Request(group, topic, "offsets forget", why, dry_run, wait_seconds, skip=True, unseen=True)
        return self._move(request, decide, {})

    def _later_ends(
        self, topic: str, topic_id: str, bounds: Mapping[int, OffsetBounds], stored: Mapping[int, StoredOffset]
    ) -> dict[int, OffsetBounds]:
        """Return where Kafka's partitions end now, of those that the group had read further before it was fenced.

        Only if Kafka still has less, its log was cut.
        """
        beyond = [
            number
            for number, here in stored.items()
            if here.topic_id == topic_id and number in bounds and here.next_offset > bounds[number].end
        ]
        if not beyond:
            return {}
        ends = self._kafka.ends([(topic, number) for number in beyond])
        return {number: replace(bounds[number], end=ends[topic, number]) for number in beyond}

    def _move(self, asked: _Request, decide: _Decide, bounds: Mapping[int, OffsetBounds]) -> MoveResult:
        owner = f"outbox offsets, {process_name()}"
        values = {"grp": asked.group, "topic": asked.topic, "owner": owner}
        moves: list[Move] = []
        accepted: list[int] = []
        generation: int | None = None
        found = 0
        forgotten: dt.date | None = None
        with clear_errors("moving the offsets"), self._connection.transaction():
            if asked.dry_run:
                groups = self._rows(_GROUPS, grp=asked.group)
                if not groups and not asked.new:
                    self._no_such_group(asked.group)
            else:
                limit = f"{max(int(asked.wait * 1000), 1)}ms"
                self._rows("SELECT set_config('lock_timeout', %(limit)s, true)", limit=limit)
                groups, found = self._fence(values, new=asked.new)
                generation = groups[0]["generation"]
            forgotten = groups[0]["forgotten_before"] if groups else None
            known = GroupRows(self._schema, asked.group).stored(self._connection, [asked.topic])
            stored = {part: here for (_, part), here in known.items()}
            losses: dict[int, list[tuple[str, int]]] = {}
            for row in self._rows(_OPEN, **values):
                losses.setdefault(row["part"], []).append((row["kind"], row["first_offset"]))
            moves = decide(stored, losses)
            if generation is not None:
                _refuse_skipping(asked, moves)
                for one in moves:
                    # An accepted loss without a move too: the epoch stored there would report it again.
                    halting = any(kind != LossKind.GIVEN_UP for kind, _ in losses.get(one.part, ()))
                    if one.changes or halting:
                        log_end = bounds[one.part].end if one.part in bounds else None
                        query = _DELETE if one.after is None else _WRITE
                        self._rows(query, **values, **asdict(one), generation=generation, log_end=log_end)
                touched = [asked.part] if asked.part is not None else list(losses)
                accepted = [row["id"] for row in self._rows(_ACCEPT, **values, parts=touched, unseen=asked.unseen)]
                if not accepted and not found and not any(one.changes for one in moves):
                    # Nothing changes, so a running consumer need not be fenced.
                    generation = None
                    raise psycopg.Rollback
                details = {
                    "group": asked.group,
                    "topic": asked.topic,
                    "to": asked.to,
                    "generation": generation,
                    "by": owner,
                    "partitions": [asdict(one) for one in moves],
                    # Their rows have the same time as this line.
                    "losses": len(accepted),
                }
                note(self._connection, self._schema, asked.what, asked.why, details)
        unshown = None
        shown = {(asked.topic, one.part): one.after for one in moves if one.after is not None}
        if generation is not None and shown:
            unshown = self._kafka.show_lag(asked.group, shown)
        return MoveResult(asked.group, asked.topic, moves, accepted, generation, asked.dry_run, forgotten, unshown)

    def _fence(self, values: Mapping[str, object], *, new: bool) -> tuple[list[dict[str, Any]], int]:
        """Fence running consumers, behind a task's commit. Returns the group's row, and how many losses it recorded."""
        if new:
            self._rows(_NEW, **values)
        raised = self._rows(_NEXT_GENERATION, **values)
        if not raised:
            self._no_such_group(str(values["grp"]))
        self._rows(CLAIM_ALL, **values, generation=raised[0]["generation"])
        found = GroupRows(self._schema, str(values["grp"])).lose_unconfirmed(self._connection, raised[0]["generation"])
        return raised, found

    def _no_such_group(self, group: str) -> None:
        known = [row["group"] for row in self._rows(_GROUPS, grp=None)]
        raise NotFound(f"there is no group {group}; known: {', '.join(known) or 'none'}")

    def _rows(self, query: LiteralString, **values: object) -> list[dict[str, Any]]:
        with self._connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(_over_losses(self._schema, query), values)
            return cursor.fetchall() if cursor.description is not None else []


def _over_losses(schema: str, query: LiteralString) -> sql.Composed:
    """Return a statement in which ``{open}`` are the open losses."""
    return statement(schema, query, open=statement(schema, _OPEN_LOSSES, given_up=sql.SQL(GIVEN_UP)))


def _refuse_skipping(asked: _Request, moves: Sequence[Move]) -> None:
    skipped = [f"{asked.topic}-{one.part} {one.skipped[0]} to {one.skipped[1] - 1}" for one in moves if one.skipped]
    if skipped and not asked.skip:
        raise OperationRefused(
            f"that skips offsets which the group has not read: {', '.join(skipped)}. Nothing was changed; --skip says "
            "that it is meant, and the audit keeps which"
        )


def _positions(rows: Sequence[Mapping[str, Any]], kafka: TopicSnapshot, *, known: bool) -> list[PartitionOffsets]:
    """Combine the stored offsets with Kafka's, including partitions that the group has not read yet.

    known  Kafka has answered.
    """
    stored = {(row["topic"], row["part"]): row for row in rows}
    topics = {topic for topic, _ in stored}
    met = stored.keys() | {at for at in (*kafka.bounds, *kafka.leaderless) if at[0] in topics}
    found = []
    for topic, part in sorted(met):
        row, there = stored.get((topic, part)), kafka.bounds.get((topic, part))
        trouble = _trouble(row, there, kafka.ids.get(topic)) if known else None
        if trouble is None and (topic, part) in kafka.leaderless:
            trouble = "it has no leader"
        at = None if row is None else row["next_offset"]
        found.append(
            PartitionOffsets(
                topic=topic,
                part=part,
                next_offset=at,
                first=None if there is None else there.first,
                end=None if there is None else there.end,
                high_watermark=None if there is None else there.high_watermark,
                lag=None if there is None or trouble is not None else there.end - (at or 0),
                uncommitted=None if there is None else there.uncommitted,
                updated_at=None if row is None else row["updated_at"],
                trouble=trouble,
            )
        )
    return found


def _trouble(row: Mapping[str, Any] | None, there: OffsetBounds | None, topic_id: str | None) -> str | None:
    if topic_id is None:
        return "the topic is gone"
    here = StoredOffset(topic_id, 0) if row is None else StoredOffset(row["topic_id"], row["next_offset"])
    kind = kind_of(here, there, topic_id)
    return None if kind is None else _TROUBLES[kind]
