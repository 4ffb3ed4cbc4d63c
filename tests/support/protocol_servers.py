"""Postgres and Kafka of the protocol's model: what the protocol counts on, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

from invariants import Invariant

from relay.core.marker import Marker

SYSTEM: Final = "7300000000000000001"
Base: TypeAlias = int
TransactionalId: TypeAlias = tuple[Base, int]


class Violation(AssertionError):
    """An invariant is broken: an event is on the topic that must not be, or one is lost."""

    def __init__(self, broken: Invariant, text: str) -> None:
        super().__init__(f"{broken}: {text}")
        self.broken = broken


class Fenced(Exception):
    """A newer producer, or a time-out, has taken this producer's right to write."""


class Row(NamedTuple):
    id: int
    event_id: str
    key: str
    lane: int


class LaneRow(NamedTuple):
    """A row of ``outbox.lanes``; ``base`` is its transactional_id."""

    epoch: int = 0
    leased: bool = False
    last_batch: int | None = None
    base: Base | None = None


class Tables(NamedTuple):
    """Everything that Postgres has committed, and the writers that have drawn an id and not committed yet.

    ``history`` holds every event whose transaction committed, in commit order. Rows leave ``rows`` when they are
    settled; only a crash takes an entry out of ``history``.
    """

    lanes: tuple[LaneRow, ...]
    next_id: int = 1
    writing: tuple[Row, ...] = ()
    rows: tuple[Row, ...] = ()
    history: tuple[Row, ...] = ()


class Saved:
    """Keeps its state in ``fields``, all of them immutable, so that saving and loading are cheap."""

    fields: tuple[str, ...]
    _values: attrgetter[tuple[Any, ...]]

    def __init_subclass__(cls) -> None:
        cls._values = attrgetter(*cls.fields)

    def save(self) -> tuple[Any, ...]:
        return self._values(self)

    def load(self, saved: tuple[Any, ...]) -> None:
        vars(self).update(zip(self.fields, saved, strict=True))


class FakePostgres(Saved):
    """Atomic transactions, and a write-ahead log of which a crash may lose the end that was not flushed.

    A commit with ``flush=False`` is visible at once and remembered in ``unflushed`` as the tables before it. A commit
    with ``flush=True`` makes itself and everything before it durable. Ids of lost rows are drawn again. ``before`` are
    the tables before the last flushed commit, for a failover that loses it.
    """

    fields = ("now", "unflushed", "before")

    def __init__(self, lanes: int, lossy: bool) -> None:
        self.lossy = lossy
        self.now = Tables((LaneRow(),) * lanes)
        self.unflushed: tuple[Tables, ...] = ()
        self.before: Tables | None = None

    @property
    def durable(self) -> Tables:
        return self.unflushed[0] if self.unflushed else self.now

    def commit(self, flush: bool = True, **changes: Any) -> None:
        if flush and self.lossy:
            self.before = self.now
        self.unflushed = () if flush else (*self.unflushed, self.now)
        self.now = self.now._replace(**changes)

    def crash(self, keep: int) -> None:
        """Lose the unflushed commits but the first ``keep``, and every transaction that was open."""
        if keep < len(self.unflushed):
            self.now = self.unflushed[keep]
        self.now = self.now._replace(writing=())
        self.unflushed = ()

    def failover(self) -> None:
        """Lose the last flushed commit."""
        if self.before is not None:
            self.now, self.before, self.unflushed = self.before, None, ()

    def begin_write(self, event_id: str, key: str) -> None:
        lane = (ord(key) - ord("a")) % len(self.now.lanes)
        row = Row(self.now.next_id, event_id, key, lane)
        self.now = self.now._replace(next_id=row.id + 1, writing=(*self.now.writing, row))

    def commit_write(self, row: Row, flush: bool) -> None:
        now = self.now
        self.commit(
            flush,
            writing=tuple(other for other in now.writing if other != row),
            rows=tuple(sorted((*now.rows, row))),
            history=(*now.history, row),
        )

    def with_lane(self, lane: int, **changes: Any) -> tuple[LaneRow, ...]:
        lanes = self.now.lanes
        return (*lanes[:lane], lanes[lane]._replace(**changes), *lanes[lane + 1 :])

    def expire(self, lane: int) -> None:
        """Time passes: nothing is written."""
        self.now = self.now._replace(lanes=self.with_lane(lane, leased=False))


def without(rows: Iterable[Row], batch: Marker | None) -> tuple[Row, ...]:
    if batch is None:
        return tuple(rows)
    gone = set(zip(batch.positions, batch.event_ids, strict=True))
    return tuple(row for row in rows if (row.id, row.event_id) not in gone)


class Entry(NamedTuple):
    """A record in a log. Without a transactional id it is decided: committed.

    ``taken``: its transaction is prepared, it will be committed whatever dies. Decided and ``taken``: an at-least-once
    worker wrote it.
    """

    record: Any
    transaction: TransactionalId | None = None
    taken: bool = False

    @property
    def open(self) -> bool:
        return self.transaction is not None and not self.taken

    @property
    def loose(self) -> bool:
        return self.transaction is None and self.taken


class Log(NamedTuple):
    """What Kafka holds of one lane, in the order of offsets, without what was aborted."""

    events: tuple[Entry, ...] = ()
    markers: tuple[Entry, ...] = ()


class FakeKafka(Saved):
    """Logs and the coordinator of all transactional ids.

    EndTxn(commit) is answered once the coordinator has prepared the commit (``Entry.taken``). The next transaction of
    the same id, and ``init_transactions``, wait until its markers are written; other ids do not. A read_committed
    reader sees nothing behind the first undecided entry. ``valid`` holds the ids whose current producer is the
    worker's own: a worker uses its ids alone, takers only fence them. ``under_way`` holds the ids with an
    EndTxn(commit) that is still on the network; fencing makes it void.
    """

    fields = ("logs", "valid", "under_way", "bases")

    def __init__(self, lanes: int) -> None:
        self.logs = (Log(),) * lanes
        self.valid: frozenset[TransactionalId] = frozenset()
        self.under_way: frozenset[TransactionalId] = frozenset()
        self.bases = 0

    def new_base(self) -> Base:
        self.bases += 1
        return self.bases

    def init_transactions(self, transaction: TransactionalId) -> None:
        self.fence(transaction)
        self.valid |= {transaction}

    def fence(self, transaction: TransactionalId) -> None:
        """Settle the id's transaction; no request of the producer that had it is obeyed any more."""
        self.written(transaction)
        self._replace(transaction, None)
        self.under_way -= {transaction}
        self.valid -= {transaction}

    def busy(self, transaction: TransactionalId) -> bool:
        """Return whether the id's transaction is prepared and not ended yet."""
        return any(entry.taken and entry.transaction == transaction for entry in self._entries())

    def abandon(self, transaction: TransactionalId) -> None:
        """Ask for the id and do not wait: what is open is aborted, what is prepared stays. It is not used again."""
        if not self.busy(transaction):
            self.fence(transaction)
        self.valid -= {transaction}

    def produce(self, transaction: TransactionalId, records: Iterable[tuple[int, str | Marker]]) -> None:
        self._check(transaction)
        self.written(transaction)
        for lane, record in records:
            self._append(lane, Entry(record, transaction))

    def produce_loose(self, lane: int, event_id: str) -> None:
        """Produce without a transaction."""
        self._append(lane, Entry(event_id, None, True))

    def end_transaction(self, transaction: TransactionalId, answer: str) -> None:
        self._check(transaction)
        if answer != "delayed":
            self._take(transaction)
        if answer in {"delayed", "doubled"}:
            self.under_way |= {transaction}

    def abort(self, transaction: TransactionalId) -> None:
        self._check(transaction)
        self._replace(transaction, None)

    def late(self, transaction: TransactionalId) -> None:
        """EndTxn arrives late. It names a producer, not a transaction, so it ends whichever is open now."""
        self.under_way -= {transaction}
        self._take(transaction)

    def written(self, transaction: TransactionalId) -> None:
        if self.busy(transaction):
            self.logs = tuple(
                Log(_write(log.events, transaction), _write(log.markers, transaction)) for log in self.logs
            )
            self.logs = tuple(log._replace(markers=_compact(log.markers)) for log in self.logs)

    def decided(self, lane: int) -> bool:
        """Return whether the lane's state partition is decided up to its high watermark."""
        return all(entry.transaction is None for entry in self.logs[lane].markers)

    def marker(self, lane: int) -> Marker | None:
        """Return the last marker before the last stable offset."""
        last = None
        for entry in self.logs[lane].markers:
            if entry.transaction is not None:
                break
            last = entry.record
        return last

    def transactions(self, taken: bool) -> list[TransactionalId]:
        found = {entry.transaction for entry in self._entries() if entry.transaction and entry.taken == taken}
        return sorted(found)

    def _entries(self) -> Iterator[Entry]:
        for log in self.logs:
            yield from log.events
            yield from log.markers

    def _append(self, lane: int, entry: Entry) -> None:
        log = self.logs[lane]
        if isinstance(entry.record, Marker):
            log = log._replace(markers=(*log.markers, entry))
        else:
            log = log._replace(events=(*log.events, entry))
        self.logs = (*self.logs[:lane], log, *self.logs[lane + 1 :])

    def _take(self, transaction: TransactionalId) -> None:
        self._replace(transaction, True)

    def _replace(self, transaction: TransactionalId, taken: bool | None) -> None:
        """Mark the id's open entries as taken; None: drop them."""
        if not any(entry.open and entry.transaction == transaction for entry in self._entries()):
            return
        self.logs = tuple(Log(*(_decide(entries, transaction, taken) for entries in log)) for log in self.logs)

    def _check(self, transaction: TransactionalId) -> None:
        if transaction not in self.valid:
            raise Fenced


def _decide(entries: tuple[Entry, ...], transaction: TransactionalId, taken: bool | None) -> tuple[Entry, ...]:
    found = []
    for entry in entries:
        if not entry.open or entry.transaction != transaction:
            found.append(entry)
        elif taken is not None:
            found.append(entry._replace(taken=True))
    return tuple(found)


def _write(entries: tuple[Entry, ...], transaction: TransactionalId) -> tuple[Entry, ...]:
    return tuple(
        Entry(entry.record) if entry.transaction == transaction and entry.taken else entry for entry in entries
    )


def _compact(markers: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Drop decided markers that a decided one follows directly: no read can return them."""
    return tuple(
        entry
        for entry, following in zip_longest(markers, markers[1:])
        if following is None or entry.transaction is not None or following.transaction is not None
    )
