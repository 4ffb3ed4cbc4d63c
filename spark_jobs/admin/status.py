"""Read the state of each consumer group, for `outbox status`. Read-only, and without locks."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from spark_jobs.admin.offsets import Offsets
from spark_jobs.driver.kafka_admin import KafkaView
from spark_jobs.postgres.progress import progress


@dataclass(frozen=True, slots=True)
class GroupState:
    """A consumer group, over all of its partitions.

    lag             offsets that a read_committed reader could read and the group has not; None while Kafka is
                    unavailable.
    pinned          offsets behind an open transaction; None while Kafka is unavailable.
    applied, duplicates, dead   the number of messages since the group began.
    dead_letters    dead letters that wait for an operator; ``retrying`` are retried in the next round.
    moved_at        when an offset was last moved.
    losses          how many losses of messages, before the group read them, no operator has accepted yet.
    troubles        why partitions can't go on, each with the partition's name.
    """

    group: str
    owner: str
    generation: int
    taken_at: dt.datetime
    partitions: int
    lag: int | None
    pinned: int | None
    applied: int
    duplicates: int
    dead: int
    dead_letters: int
    retrying: int
    moved_at: dt.datetime | None
    losses: int
    troubles: Sequence[str]

    def problems(self) -> list[str]:
        """Return the problems that need an operator; empty if there are none."""
        found = [f"group {self.group}: {trouble}" for trouble in self.troubles]
        if self.losses:
            found.append(f"group {self.group}: {self.losses} losses that nobody has accepted: `outbox offsets show`")
        if self.dead_letters:
            found.append(
                f"group {self.group}: {self.dead_letters:,} dead letters: `outbox dead-letters list --side consumer`"
            )
        return found


def look(connection: psycopg.Connection[Any], schema: str, kafka: KafkaView) -> tuple[list[GroupState], str | None]:
    """Return the groups, and why Kafka's figures are missing; None if they are not.

    Raises ConsumerUnavailable if Postgres is unavailable, SchemaError if tables or rights are missing.
    """
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in progress(connection, schema):
        rows.setdefault(row["grp"], []).append(row)
    groups, away = Offsets(connection, schema, kafka).show()
    found = []
    for group in groups:
        # A group may have been taken over, or forgotten, between the two reads.
        parts = [row for row in rows.get(group.group, ()) if row["topic"] is not None]
        known = [one for one in group.positions if one.lag is not None]
        found.append(
            GroupState(
                group=group.group,
                owner=group.owner,
                generation=group.generation,
                taken_at=group.taken_at,
                partitions=len(group.positions),
                lag=None if away else sum(one.lag or 0 for one in known),
                pinned=None if away else sum(one.pinned or 0 for one in group.positions),
                applied=sum(row["applied"] for row in parts),
                duplicates=sum(row["duplicates"] for row in parts),
                dead=sum(row["dead"] for row in parts),
                dead_letters=sum(row["dead_letters"] for row in parts),
                retrying=sum(row["retrying"] for row in parts),
                moved_at=max((row["updated_at"] for row in parts), default=None),
                losses=len(group.losses),
                troubles=[f"{one.topic}-{one.part}: {one.trouble}" for one in group.positions if one.trouble],
            )
        )
    return found, away
