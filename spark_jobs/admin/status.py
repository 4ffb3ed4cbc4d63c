"""What each consumer group has done and what it waits for: for `outbox status`. Reads, and locks nothing."""

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

    lag             offsets that a read_committed reader could have and the group has not; None while Kafka is away.
    pinned          offsets that wait behind a transaction that is open; None while Kafka is away.
    applied, duplicates, dead   messages since the group began.
    dead_letters    those that wait for a person now; ``retrying`` are tried again in the next round.
    moved_at        when an offset was moved last.
    losses          what Kafka lost before the group read it, and nobody has accepted.
    troubles        why partitions can't go on, each with its name.
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
        """Return what a person should look at; nothing when all is as it should be."""
        found = [f"group {self.group}: {trouble}" for trouble in self.troubles]
        if self.losses:
            found.append(f"group {self.group}: {self.losses} losses that nobody has accepted: `outbox offsets show`")
        if self.dead_letters:
            found.append(
                f"group {self.group}: {self.dead_letters:,} dead letters: `outbox dead-letters list --side consumer`"
            )
        return found


def look(connection: psycopg.Connection[Any], schema: str, kafka: KafkaView) -> tuple[list[GroupState], str | None]:
    """Return the groups, and why Kafka's figures are missing, if they are.

    Raises ConsumerUnavailable when Postgres is away, SchemaError without the tables or a right.
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
