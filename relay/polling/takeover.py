"""The database's side of taking over lanes; see kafka/takeover.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from psycopg import errors

from outbox._clients.counting import counted
from outbox.errors import OutboxError, SchemaError
from relay.core.lease import Lease
from relay.core.marker import RECOVER, Identity, Marker, StateLost, resume
from relay.core.ports import NOTHING, LaneLocked
from relay.database import one_write, unavailable_on_error
from relay.polling.queries import Queries
from relay.polling.session import Session
from relay.settle.retries import Failures
from relay.settle.settlement import SettlementLane
from relay.settle.statements import array, lease_values


class RowTakeover:
    """See ports.TakeoverStore. ``on_adopted`` is called with each lane, and the marker to go on from."""

    def __init__(
        self,
        session: Session,
        queries: Queries,
        failures: Failures,
        on_adopted: Callable[[int, Marker | None], None],
    ) -> None:
        self._session = session
        self._settlement = session.settlement
        self._connection = session.connection
        self._queries = queries
        self._failures = failures
        self._on_adopted = on_adopted
        self._identity: Identity | None = None

    def lane_count(self) -> int:
        self._session.free()
        with unavailable_on_error("counting lanes"):
            ((count,),) = self._session.rows(self._queries.lane_count)
        return int(count)

    def identity(self, leases: Sequence[Lease]) -> tuple[Identity | None, dict[int, OutboxError]]:
        self._session.free()
        with unavailable_on_error("looking at the lanes"):
            rows = self._session.rows(self._queries.still_held, **lease_values(leases))
        self._identity = Identity(*rows[0][1:]) if rows else None
        held = {row[0] for row in rows}
        lost: dict[int, OutboxError] = {
            lease.lane: self._settlement.lane_lost(lease.lane) for lease in leases if lease.lane not in held
        }
        return self._identity, lost

    def adopt_settled(
        self, leases: Sequence[Lease], markers: Mapping[int, Marker | None], own_id: str | None
    ) -> dict[int, tuple[Marker | None, Identity]]:
        """Adopt in one statement: nearly all of a worker's lanes have nothing to settle, whatever has happened to it.

        A transaction for each takes seconds. Leaves what ``adopt`` would refuse, lanes without a lease of ours, and
        those that are locked.
        """
        identity = self._identity
        adopted: dict[int, tuple[Marker | None, Identity]] = {}
        asked: dict[int, Lease] = {}
        if identity is None:
            return adopted
        for lease in leases:
            marker = markers[lease.lane]
            if self._is_ours(self._settlement.lanes[lease.lane], marker, own_id):
                self._on_adopted(lease.lane, marker)
                adopted[lease.lane] = marker, identity
            elif marker is None or (
                marker.system_identifier == identity.system_identifier and marker.timeline <= identity.timeline
            ):
                asked[lease.lane] = lease
        if not asked:
            return adopted
        given = [markers[lane] for lane in asked]
        self._session.free()
        try:
            with unavailable_on_error("taking lanes over"), one_write(self._session.connection):
                rows = self._session.rows(
                    self._queries.adopt_settled,
                    **lease_values(list(asked.values())),
                    batches=array([None if marker is None else marker.batch for marker in given]),
                    first=array([marker is not None and marker.is_first_of(identity) for marker in given]),
                    lsns=array([None if marker is None else marker.commit_lsn for marker in given]),
                    system_identifier=identity.system_identifier,
                    timeline=identity.timeline,
                    own_id=own_id,
                )
        except SchemaError:
            # Of one lane, perhaps: ``adopt`` finds out which.
            return adopted
        for lane, _ in rows:
            marker = markers[lane]
            self._note_adopted(asked[lane], marker, None if marker is None else marker.batch, own_id)
            adopted[lane] = marker, identity
        return adopted

    def adopt(self, lease: Lease, marker: Marker | None, own_id: str | None) -> tuple[Marker | None, Identity]:
        """Settle the rows that the lane's last marker names, if the lease is still ours, before anything is fetched.

        Writes ``own_id`` into the lane's row in the same transaction: from its commit on, the next holder fences it.
        None for a worker without transactions. Returns the marker to go on from (None: there has never been one) and
        the database's identity. Raises LaneLost, or StateLost when marker and table contradict each other.
        """
        lane = lease.lane
        held_lane = self._settlement.lanes[lane]
        with self._session.transaction(lease, f"taking lane {lane} over"):
            try:
                held = self._connection.execute(self._queries.held, lease_values([lease])).fetchone()
            except errors.LockNotAvailable as error:
                raise LaneLocked(lane) from error
            if held is None:
                held_lane.unsettled = NOTHING
                raise self._settlement.lane_lost(lane)
            last_batch, *identity, insert_lsn = held
            here = Identity(*identity)
            adopted = resume(lane, last_batch, marker, here)
            if adopted is not None and adopted.commit_lsn is not None and adopted.commit_lsn > insert_lsn:
                raise StateLost(
                    f"lane {lane}: Kafka holds events from farther on in the WAL than this server has written: it has "
                    f"lost commits (a restore, or a failover to a standby that was behind): {RECOVER}"
                )
            batch, commit_lsn = last_batch, None
            if adopted is not None and adopted.batch != last_batch:
                # A position on another timeline says nothing here.
                commit_lsn = adopted.commit_lsn if adopted.timeline == here.timeline else None
                batch = adopted.batch
                self._settle_marker(lane, adopted)
            self._connection.execute(
                self._queries.adopted, {"lane": lane, "batch": batch, "own_id": own_id, "commit_lsn": commit_lsn}
            )
        self._note_adopted(lease, adopted, batch, own_id)
        return adopted, here

    def _note_adopted(self, lease: Lease, adopted: Marker | None, batch: int | None, own_id: str | None) -> None:
        held_lane = self._settlement.lanes[lease.lane]
        lease.former_id, lease.last_batch = own_id, batch
        held_lane.unsettled = NOTHING
        held_lane.expected = batch if own_id is not None else None
        held_lane.own_id = own_id
        held_lane.row_matches = True
        self._on_adopted(lease.lane, adopted)

    def _is_ours(self, held: SettlementLane, marker: Marker | None, own_id: str | None) -> bool:
        """Return whether there is nothing to take over: only the publisher is new, and all of the lane is settled.

        The row names us and has the marker's batch: the last statement on it has found or written that. ``identity``
        has checked the lease after the producers were initialized again: a later holder fences them. Without this, a
        failed turn would cost a transaction for each lane of the worker.
        """
        return (
            own_id is not None
            and held.own_id == own_id
            and held.row_matches
            and not held.unsettled
            and marker is not None
            and marker.batch == held.expected
            and self._identity == Identity(marker.system_identifier, marker.timeline, marker.outbox)
            and not self._session.pooled
        )

    def _settle_marker(self, lane: int, adopted: Marker) -> None:
        ids = list(adopted.positions)
        ((gone, _),) = self._session.rows(
            self._queries.settle_marker, lane=lane, ids=ids, event_ids=list(adopted.event_ids)
        )
        if gone != len(ids):
            # They were durable before they were published, and no other relay settles them.
            raise StateLost(
                f"lane {lane}: Kafka holds batch {adopted.batch} with {counted(len(ids), 'event')}, of which Postgres "
                f"has only {gone}: it has lost commits (a restore, or a failover to a standby that was behind), "
                f"or events were deleted by hand: {RECOVER}"
            )
        self._failures.forget(self._connection, lane, ids)
