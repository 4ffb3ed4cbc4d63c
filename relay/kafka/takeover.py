"""Takes lanes over from relays that may have written them in transactions. The order of the steps is the protocol.

1. The lane was acquired in Postgres: its epoch is ours; its row still names the former holder's transactional ids.
2. Those ids are fenced (once for all lanes of a former holder), and with them those of the worker that wrote the last
   marker, if it is another one: a failover may have lost an update of the row. They can commit nothing after that. A
   row that names no id was released after its last batch was settled: if the marker is ahead of it, the row is from
   before the marker's writer took the lane, and the writer is fenced too.
3. The lane's marker is read, up to a high watermark that is decided.
4. One Postgres transaction checks the epoch again, compares marker and ``last_batch`` (see marker.py), settles the rows
   that the marker names, and writes our own ids into the row. Only then is the lane published. Lanes that have nothing
   to settle share one statement, which does the same.

Why it holds: a lane is only ever written under the ids that its row names, and the fence comes after the acquire. A
former holder that comes back after the fence initializes its ids again, then reads the leases, and finds the lane gone;
one from before the fence can't commit any more, and what it had committed is in the marker.

| crash or pause                             | outcome                                                                 |
|--------------------------------------------|-------------------------------------------------------------------------|
| after the acquire, before the fence        | the former holder may still commit; its marker is read after the fence  |
| after the fence, before our ids are there  | the next taker fences the former ids again: harmless                    |
| the former holder had other lanes too      | its transaction is aborted, no reader saw it; it reads those lanes again|
| it released the lane (ids NULL) and sleeps | it has no open transaction with the lane's events, and no lease         |
| two takers fence the same ids              | init_transactions does no harm twice; the epoch lets one of them publish|
| our own init meets a taker's fence         | the taker acquired before; the leases are read after our init           |
| our init of one id, after a refusal, meets | the taker acquired before; the next turn's fetch checks the leases, and |
| a taker's fence                            | our other id stays fenced                                               |
| our own ids can't be initialized again     | new ids take the lanes over from the old ones, as another worker would  |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from outbox.errors import OutboxError, SchemaError
from relay.core.lease import LOCKED_SECONDS, Lease
from relay.core.marker import Identity, Marker, StateLost, check_origin
from relay.core.ports import (
    IdBusy,
    LaneLocked,
    LaneLost,
    NotFenced,
    StatementCutShort,
    TakeoverStore,
    Unavailable,
)
from relay.failpoints import failpoint
from relay.kafka.state_topic import StateTopic

PRODUCERS = 2
"""The number of a worker's producers, which alternate; each has its own id."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """The lanes that may be published from now on, with their markers; and those that may not, with the reasons."""

    markers: Mapping[int, tuple[Marker | None, Identity]] = field(default_factory=dict)
    failed: Mapping[int, OutboxError] = field(default_factory=dict)


def own_ids(base: str) -> list[str]:
    """Return the transactional ids of a worker whose lanes' rows have ``base``."""
    return [f"{base}.{number}" for number in range(PRODUCERS)]


class Takeover:
    """Takes lanes over. ``own_base`` is written into the lanes' rows; None for a worker without transactions.

    ``fence`` takes one transactional id; see fencing.py. ``abandoned`` are bases that this process used before: their
    producers are gone, so only an EndTxn in flight could still commit under them. That transaction has records in the
    lanes' partitions, which are undecided until it ends. So these ids need no fence, which could fail as long as a
    broker is unavailable.
    """

    def __init__(
        self,
        store: TakeoverStore,
        state: StateTopic,
        fence: Callable[[str], None],
        own_base: str | None,
        *,
        abandoned: Collection[str] = (),
    ) -> None:
        self._store = store
        self._state = state
        self._fence = fence
        self._own_base = own_base
        self._own_bases = {own_base, *abandoned}

    def take_over(self, leases: Sequence[Lease]) -> TakenOver:
        """Take over these lanes. Raises Unavailable when a server is unavailable; the call must then be repeated."""
        identity, lost = self._store.identity(leases)
        failed: dict[int, OutboxError] = dict(lost)
        left = [lease for lease in leases if lease.lane not in failed]
        if identity is None or not left:
            return TakenOver({}, failed)
        # Not needed for safety: it prevents a zombie, another outbox with this name, or a relay of the primary from
        # before a failover from repeatedly fencing the rightful relay.
        seen, left = self._rightful(left, identity, failed)
        failed |= self._fence_former(left, seen)
        left = [lease for lease in left if lease.lane not in failed]
        failpoint("takeover.fenced")
        read = self._state.read([lease.lane for lease in left])
        failed |= read.problems
        failpoint("takeover.marker_read")
        adopted = self.adopt([lease for lease in left if lease.lane not in failed], read.markers)
        failpoint("takeover.settled")
        return TakenOver(adopted.markers, {**failed, **adopted.failed})

    def adopt(self, leases: Sequence[Lease], markers: Mapping[int, Marker | None]) -> TakenOver:
        """Settle lanes by their markers. A lane whose row a renewal has locked is tried again, for a moment."""
        adopted: dict[int, tuple[Marker | None, Identity]] = {}
        failed: dict[int, OutboxError] = {}
        for seconds in (0.0, *LOCKED_SECONDS):
            time.sleep(seconds)
            adopted |= self._store.adopt_settled(leases, markers, self._own_base)
            for lease in leases:
                failed.pop(lease.lane, None)
                if lease.lane in adopted:
                    continue
                try:
                    adopted[lease.lane] = self._store.adopt(lease, markers[lease.lane], self._own_base)
                except (LaneLocked, LaneLost, StateLost, SchemaError, StatementCutShort) as error:
                    failed[lease.lane] = error
            leases = [lease for lease in leases if isinstance(failed.get(lease.lane), LaneLocked)]
            if not leases:
                break
        return TakenOver(adopted, failed)

    def _rightful(
        self, leases: Sequence[Lease], identity: Identity, failed: dict[int, OutboxError]
    ) -> tuple[Mapping[int, Marker | None], list[Lease]]:
        """Return the last marker of each lane, and the lanes that their markers allow to go on."""
        seen = self._state.read([lease.lane for lease in leases], decided=False)
        failed |= seen.problems
        for lease in leases:
            try:
                check_origin(lease.lane, lease.last_batch, seen.markers.get(lease.lane), identity)
            except StateLost as error:
                failed[lease.lane] = error
        return seen.markers, [lease for lease in leases if lease.lane not in failed]

    def _fence_former(self, leases: Sequence[Lease], seen: Mapping[int, Marker | None]) -> dict[int, OutboxError]:
        """Fence each id once. Returns the lanes with an id that could not be fenced.

        Raises NotFenced if those are all lanes, and no id is only busy: then the brokers may be unavailable.
        """
        ids: dict[str, list[int]] = {}
        for lease in leases:
            for base in sorted(_may_have_written(lease, seen.get(lease.lane)) - self._own_bases):
                for each in own_ids(base):
                    ids.setdefault(each, []).append(lease.lane)
        failed: dict[int, OutboxError] = {}
        for each, lanes in ids.items():
            if failed.keys() >= set(lanes):
                continue
            try:
                self._fence(each)
            except Unavailable as error:
                # Without the traceback, which would keep the producer: its threads and connections last as long as it.
                failed |= dict.fromkeys(lanes, type(error)(str(error)))
        if failed and len(failed) == len(leases) and not any(isinstance(error, IdBusy) for error in failed.values()):
            raise NotFenced("; ".join(dict.fromkeys(map(str, failed.values()))))
        return failed


def _may_have_written(lease: Lease, marker: Marker | None) -> set[str]:
    """Return the bases of the workers that may still have an open transaction with events of the lane."""
    writer = None if marker is None else marker.writer
    if lease.former_id is None:
        # A lane is settled before it is released. So a marker ahead of the row is from a worker that the row does not
        # name.
        return set() if marker is None or writer is None or marker.batch == lease.last_batch else {writer}
    return {lease.former_id} if writer is None else {lease.former_id, writer}
