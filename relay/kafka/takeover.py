"""Taking lanes over from whoever may have written them in transactions. The order of the steps is the protocol.

1. The lane was acquired in Postgres: its epoch is ours; its row still names the former holder's transactional ids.
2. Those ids are fenced (once for all lanes of a former holder), and with them those of the worker that wrote the last
   marker, if it is another one: a failover may have lost what the row said. Nothing of it can be committed after that.
   A row that names nobody was released, and its last batch settled before that: if the marker is ahead of it, the row
   is from before its writer took the lane, and the writer is fenced too.
3. The lane's marker is read, up to a high watermark that is decided.
4. One Postgres transaction checks the epoch again, compares marker and ``last_batch`` (see marker.py), settles the rows
   that the marker names, and writes our own ids into the row. Only then the lane is published.

Why it holds: whoever can write a lane writes under the ids that the lane's row names. The fence comes after the
acquire. A former holder that comes back after it initializes its ids again, reads the leases after that, and finds the
lane gone; one from before the fence can commit nothing any more, and what it had committed is in the marker.

| crash or pause                             | outcome                                                                 |
|--------------------------------------------|-------------------------------------------------------------------------|
| after the acquire, before the fence        | the former holder may still commit; its marker is read after the fence  |
| after the fence, before our ids are there  | the next taker fences the former ids again: harmless                    |
| the former holder had other lanes too      | its transaction is aborted, no reader saw it; it reads those lanes again|
| it released the lane (ids NULL) and sleeps | it has no open transaction with the lane's events, and no lease         |
| two takers fence the same ids              | init_transactions does no harm twice; the epoch lets one of them publish|
| our own init meets a taker's fence         | the taker acquired before; the leases are read after our init           |
| our own ids can't be initialized again     | new ids take the lanes over from the old ones, as another worker would  |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from outbox.errors import OutboxError, SchemaError
from relay.failpoints import failpoint
from relay.kafka.state_topic import StateTopic
from relay.lease import LEGACY_ID, Lease
from relay.marker import Identity, Marker, StateLost, resume
from relay.ports import IdBusy, LaneBusy, LaneLost, TakeoverStore, Unavailable

PRODUCERS = 2
"""Producers of a worker that take turns; each has an id of its own."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """The lanes that may be published from now on, with the marker of each; and those that may not, with the reason."""

    markers: Mapping[int, tuple[Marker | None, Identity]] = field(default_factory=dict)
    failed: Mapping[int, OutboxError] = field(default_factory=dict)


def own_ids(base: str) -> list[str]:
    """Return the transactional ids of a worker whose lanes' rows name ``base``."""
    return [f"{base}.{number}" for number in range(PRODUCERS)]


def ids_to_fence(named: str, lane: int, name: str) -> list[str]:
    """Return the transactional ids under which a lane may have been written whose row names ``named``."""
    return [f"{name}.relay.{lane}"] if named == LEGACY_ID else own_ids(named)


class Takeover:
    """Takes lanes over. ``own_base`` is what the lanes' rows are to name, None for a worker without transactions.

    ``fence`` is given one transactional id; see fencing.py. ``name`` is the outbox's. ``abandoned`` are bases that this
    process used before: their producers are gone, so nothing that was not decided can be committed under them, but by
    an EndTxn that is on its way. What that one could commit has its markers in the lanes' partitions, where it is read
    as undecided until it is. So they need no fence, which they may not get for as long as a broker is away.
    """

    def __init__(
        self,
        store: TakeoverStore,
        state: StateTopic,
        fence: Callable[[str], None],
        name: str,
        own_base: str | None,
        *,
        abandoned: Collection[str] = (),
    ) -> None:
        self._store = store
        self._state = state
        self._fence = fence
        self._name = name
        self._own_base = own_base
        self._own_bases = {own_base, *abandoned}

    def take_over(self, leases: Sequence[Lease]) -> TakenOver:
        """Take these lanes over. Raises Unavailable when a server is away: then all is to be done again."""
        identity, lost = self._store.identity(leases)
        failed: dict[int, OutboxError] = dict(lost)
        left = [lease for lease in leases if lease.lane not in failed]
        if identity is None or not left:
            return TakenOver({}, failed)
        # Not needed for safety: a zombie, an outbox that took this name, or the relay of a primary from before a
        # failover need not fence the rightful relay, again and again.
        seen, left = self._rightful(left, identity, failed)
        failed |= self._fence_former(left, seen)
        left = [lease for lease in left if lease.lane not in failed]
        failpoint("takeover.fenced")
        read = self._state.read([lease.lane for lease in left])
        failed |= read.problems
        failpoint("takeover.marker_read")
        markers: dict[int, tuple[Marker | None, Identity]] = {}
        for lease in left:
            if lease.lane in failed:
                continue
            adopted = self.adopt(lease, read.markers[lease.lane])
            if isinstance(adopted, OutboxError):
                failed[lease.lane] = adopted
            else:
                markers[lease.lane] = adopted
        failpoint("takeover.settled")
        return TakenOver(markers, failed)

    def adopt(self, lease: Lease, marker: Marker | None) -> tuple[Marker | None, Identity] | OutboxError:
        """Settle one lane by its marker; return the error that concerns this lane alone, if there is one."""
        try:
            return self._store.adopt(lease, marker, self._own_base)
        except (LaneBusy, LaneLost, StateLost, SchemaError) as error:
            return error

    def _rightful(
        self, leases: Sequence[Lease], identity: Identity, failed: dict[int, OutboxError]
    ) -> tuple[Mapping[int, Marker | None], list[Lease]]:
        """Return the last marker of each lane, and the lanes whose marker does not forbid to go on."""
        seen = self._state.read([lease.lane for lease in leases], decided=False)
        failed |= seen.problems
        for lane, marker in seen.markers.items():
            try:
                resume(lane, None, marker, identity.system_identifier, identity.timeline)
            except StateLost as error:
                failed[lane] = error
        return seen.markers, [lease for lease in leases if lease.lane not in failed]

    def _fence_former(self, leases: Sequence[Lease], seen: Mapping[int, Marker | None]) -> dict[int, OutboxError]:
        """Fence each id once; return the lanes that could not be, because of an id that others do not share.

        Raise Unavailable when the first one fails: the brokers are away. One that is busy says nothing of others.
        """
        ids: dict[str, list[int]] = {}
        for lease in leases:
            for base in sorted(_may_have_written(lease, seen.get(lease.lane)) - self._own_bases):
                for each in ids_to_fence(base, lease.lane, self._name):
                    ids.setdefault(each, []).append(lease.lane)
        failed: dict[int, OutboxError] = {}
        for number, (each, lanes) in enumerate(ids.items()):
            if failed.keys() >= set(lanes):
                continue
            try:
                self._fence(each)
            except Unavailable as error:
                if number == 0 and not isinstance(error, IdBusy):
                    raise
                failed |= dict.fromkeys(lanes, error)
        return failed


def _may_have_written(lease: Lease, marker: Marker | None) -> set[str]:
    """Return which workers may still have a transaction with events of the lane open, by what lanes' rows name."""
    writer = None if marker is None else marker.writer
    if lease.former_id is None:
        # Whoever releases a lane settles it first. So a marker ahead of the row is of a worker that the row forgot.
        return set() if marker is None or writer is None or marker.batch == lease.last_batch else {writer}
    return {lease.former_id} if writer is None else {lease.former_id, writer}
