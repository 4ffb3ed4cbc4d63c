"""Read the state of each consumer group, for `outbox status`. Read-only, and without locks."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import psycopg

from outbox._clients.counting import counted
from outbox._clients.visible import VisibleTables
from outbox.consumer.admin.offsets import Group, Offsets, count_losses
from outbox.consumer.errors import ConsumerUnavailable, NotAuthorized
from outbox.consumer.kafka_admin import KafkaAdmin
from outbox.consumer.postgres_errors import clear_errors
from outbox.consumer.progress import progress
from outbox.consumer.statements import statement

STANDING: Final = dt.timedelta(minutes=5)
"""A partition whose offset has not moved for this long stands still, if messages that are as old wait in it."""
_SHOWN: Final = 10
"""How many standing partitions of a group are named as problems; the others are counted."""

# Not to_regclass(), which needs USAGE on the schema.
_HAS_TABLES: Final = """
SELECT EXISTS (SELECT FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                WHERE n.nspname = %s AND c.relname = 'groups')"""
_NOW: Final = "SELECT clock_timestamp()"
_STUCK: Final = "SELECT grp, count(*) FROM {reservations} WHERE state = 'stuck' GROUP BY grp"
# Callers park what waits for an earlier call of its key. This reads the index `reservations_open` alone.
_OVERDUE: Final = """
SELECT grp, extract(epoch FROM now() - min(next_attempt_at))::float8 FROM {reservations}
 WHERE state IN ('reserved', 'calling', 'cancelling') AND NOT parked AND next_attempt_at <= now() GROUP BY grp"""
_Figure = TypeVar("_Figure", int, float)


@dataclass(frozen=True, slots=True)
class StandingPartition:
    """A partition in which messages have waited for STANDING, while its offset has not moved for as long.

    waiting  how many offsets have waited for that long.
    since    when the offset was moved last, or the group taken over if it never was.
    """

    topic: str
    part: int
    next_offset: int
    waiting: int
    since: dt.datetime


@dataclass(frozen=True, slots=True)
class GroupState:
    """A consumer group, over all of its partitions.

    lag             offsets that a read_committed reader could have and the group has not; None while Kafka is away.
    uncommitted     offsets behind an open transaction; None while Kafka is away.
    applied, duplicates, dead   messages since the group began.
    dead_letters    those that wait for a person now; ``retrying`` are tried again in the next round.
    stuck           calls to other systems that wait for a person.
    overdue_seconds for how long the oldest due call has waited for a caller; 0 if there is none.
    last_progress_at  when an offset last moved.
    standing        partitions that stand still although messages wait in them; None while Kafka is away.
    moving          whether the group has moved an offset within STANDING.
    losses          what Kafka lost before the group read it, or the group gave up, as long as it is not accepted.
    troubles        why partitions can't go on, each with its name.

    Counts of a table that the role can't read are None.
    """

    group: str
    owner: str
    generation: int
    taken_at: dt.datetime
    partitions: int
    lag: int | None
    uncommitted: int | None
    applied: int
    duplicates: int
    dead: int
    dead_letters: int | None
    retrying: int | None
    stuck: int | None
    overdue_seconds: float | None
    last_progress_at: dt.datetime | None
    standing: Sequence[StandingPartition] | None
    moving: bool
    losses: int | None
    troubles: Sequence[str]

    def problems(self) -> list[str]:
        """Return the problems that need an operator; empty if there are none."""
        found = [f"group {self.group}: {trouble}" for trouble in self.troubles]
        standing = self.standing or ()
        if standing and not self.moving:
            minutes = int(STANDING.total_seconds() / 60)
            waiting = counted(sum(one.waiting for one in standing), "offset")
            found.append(
                f"group {self.group}: {waiting} waiting, and it has moved nothing for {minutes} minutes: "
                "is a consumer running?"
            )
        elif standing:
            found += [self._problem_of(one) for one in standing[:_SHOWN]]
            if len(standing) > _SHOWN:
                more = counted(len(standing) - _SHOWN, "more partition")
                found.append(f"group {self.group}: {more} standing still")
        if self.stuck:
            found.append(f"group {self.group}: {counted(self.stuck, 'call')} stuck: `outbox external list`")
        if (overdue := overdue_text(self.overdue_seconds or 0)) is not None:
            found.append(f"group {self.group}: {overdue}: is `outbox external run` running?")
        if self.losses:
            losses = "1 loss" if self.losses == 1 else f"{self.losses:,} losses"
            found.append(f"group {self.group}: {losses} to accept: `outbox offsets show`")
        if self.dead_letters:
            found.append(
                f"group {self.group}: {counted(self.dead_letters, 'dead letter')}: "
                "`outbox dead-letters list --side consumer`"
            )
        return found

    def _problem_of(self, one: StandingPartition) -> str:
        return (
            f"group {self.group}: {one.topic}-{one.part} stands at offset {one.next_offset} since "
            f"{one.since.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S} UTC, {counted(one.waiting, 'offset')} waiting, and "
            f"other partitions move: the consumer's log says why; `outbox offsets set {self.group} {one.topic} "
            f"{one.part} {one.next_offset + 1} --skip --reason …` passes over the message there"
        )


def has_tables(connection: psycopg.Connection[Any], schema: str) -> bool:
    """Return whether the database has the consumers' tables in this schema. A service's own database has none.

    Needs no right on them. Raises ConsumerUnavailable.
    """
    with clear_errors("looking for the consumers' tables"):
        return connection.execute(_HAS_TABLES, (schema,)).fetchone() == (True,)


def overdue_calls(connection: psycopg.Connection[Any], schema: str) -> Mapping[str, float]:
    """Return for how many seconds the oldest due call of each group has waited for a caller. Raises psycopg.Error."""
    return dict(connection.execute(statement(schema, _OVERDUE)).fetchall())


def overdue_text(seconds: float) -> str | None:
    """Return the problem of a group whose oldest due call has waited for that long; None if that is not long."""
    if seconds <= STANDING.total_seconds():
        return None
    return f"a call has been due for {int(seconds / 60)} minutes"


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """What the sink alone says of all groups, by their names.

    partitions   the rows of PROGRESS; their dead letters are 0 if the role can't read these.
    dead_letters, retrying, stuck, overdue_seconds, losses   None if the role can't read their table.
    hidden       the tables that it can't read.
    """

    partitions: Mapping[str, Sequence[Mapping[str, Any]]]
    dead_letters: Mapping[str, int] | None
    retrying: Mapping[str, int] | None
    stuck: Mapping[str, int] | None
    overdue_seconds: Mapping[str, float] | None
    losses: Mapping[str, int] | None
    hidden: Mapping[str, str]


def read_counts(connection: psycopg.Connection[Any], schema: str) -> GroupCounts:
    """Return what the sink says of all groups.

    Raises ConsumerUnavailable if Postgres is unavailable, SchemaError if tables or rights on the groups are missing.
    """
    visible = VisibleTables(connection, schema)
    stuck: Mapping[str, int] = {}
    overdue: Mapping[str, float] = {}
    losses: Mapping[str, int] = {}
    with clear_errors("counting what waits for an operator"):
        with visible.reading("dead_letters"):
            connection.execute(statement(schema, "SELECT FROM {dead_letters} LIMIT 0"))
        with visible.reading("losses"):
            losses = count_losses(connection, schema)
        with visible.reading("reservations"):
            stuck = dict(connection.execute(statement(schema, _STUCK)).fetchall())
            overdue = overdue_calls(connection, schema)
    partitions: dict[str, list[Mapping[str, Any]]] = {}
    for row in progress(connection, schema, letters="dead_letters" not in visible.hidden):
        of_group = partitions.setdefault(row["grp"], [])
        if row["topic"] is not None:
            of_group.append(row)

    def by_group(table: str, count: Callable[[str], _Figure]) -> Mapping[str, _Figure] | None:
        return None if table in visible.hidden else {group: count(group) for group in partitions}

    return GroupCounts(
        partitions=partitions,
        dead_letters=by_group("dead_letters", lambda group: sum(row["dead_letters"] for row in partitions[group])),
        retrying=by_group("dead_letters", lambda group: sum(row["retrying"] for row in partitions[group])),
        stuck=by_group("reservations", lambda group: stuck.get(group, 0)),
        overdue_seconds=by_group("reservations", lambda group: overdue.get(group, 0.0)),
        losses=by_group("losses", lambda group: losses.get(group, 0)),
        hidden=visible.hidden,
    )


def look(
    connection: psycopg.Connection[Any], schema: str, kafka: KafkaAdmin
) -> tuple[list[GroupState], str | None, Mapping[str, str]]:
    """Return the groups; why Kafka's figures are missing, or None; and the tables that the role can't read.

    Raises what read_counts raises.
    """
    counts = read_counts(connection, schema)
    with clear_errors("reading the clock"):
        ((now,),) = connection.execute(_NOW).fetchall()
    groups, away = Offsets(connection, schema, kafka).show(losses=None)
    standing: Mapping[str, Sequence[StandingPartition]] = {}
    if away is None:
        try:
            standing = _standing(groups, now - STANDING, kafka)
        except (ConsumerUnavailable, NotAuthorized) as error:
            away = str(error)
    found = []
    for group in groups:
        # A group may have been taken over, or forgotten, between the two reads.
        parts = counts.partitions.get(group.group, ())
        known = [one for one in group.positions if one.lag is not None]
        figures: dict[str, Any] = {
            name: None if (of_groups := getattr(counts, name)) is None else of_groups.get(group.group, 0)
            for name in ("dead_letters", "retrying", "stuck", "overdue_seconds", "losses")
        }
        found.append(
            GroupState(
                group=group.group,
                owner=group.owner,
                generation=group.generation,
                taken_at=group.taken_at,
                partitions=len(group.positions),
                lag=None if away else sum(one.lag or 0 for one in known),
                uncommitted=None if away else sum(one.uncommitted or 0 for one in group.positions),
                applied=sum(row["applied"] for row in parts),
                duplicates=sum(row["duplicates"] for row in parts),
                dead=sum(row["dead"] for row in parts),
                **figures,
                last_progress_at=max((row["updated_at"] for row in parts), default=None),
                standing=None if away else standing.get(group.group, ()),
                moving=any(row["updated_at"] > now - STANDING for row in parts),
                troubles=[f"{one.topic}-{one.part}: {one.trouble}" for one in group.positions if one.trouble],
            )
        )
    return found, away, counts.hidden


def _standing(groups: Sequence[Group], since: dt.datetime, kafka: KafkaAdmin) -> dict[str, list[StandingPartition]]:
    """Return the partitions of each group that have not moved since a time, and in which older messages wait."""
    still = [
        (group.group, one, moved)
        for group in groups
        for one in group.positions
        if one.lag and one.end is not None and (moved := one.updated_at or group.taken_at) <= since
    ]
    if not still:
        return {}
    first_newer = kafka.at_time({(one.topic, one.part) for _, one, _ in still}, since)
    found: dict[str, list[StandingPartition]] = {}
    for group_name, one, moved in still:
        if waiting := one.waiting_before(first_newer[one.topic, one.part]):
            standing = StandingPartition(one.topic, one.part, one.first_waiting(), waiting, moved)
            found.setdefault(group_name, []).append(standing)
    return found
