"""The exactly-once protocol of workers with several lanes, as a model small enough to search completely.

``FakePostgres`` and ``FakeKafka`` keep what the protocol counts on and nothing else. ``WorkerModel`` is a worker that
sends one request a step. ``World`` puts them together, applies actions and raises ``Violation``. ``explore`` tries all
orders of actions, breadth first, so the trace that it finds is a shortest one. What follows from a marker is decided
by the real ``relay.marker.resume``.

The protocol
------------
A worker has one base id (for its whole life, but see 4) and the transactional ids ``<base>.0`` and ``<base>.1`` (or
only the first: ``producers=1``). Turn k uses producer k mod 2, whose previous transaction was turn k - 2. The row of a
lane names the base id under which the lane may have been written; NULL: nobody needs to be fenced.

1. Start: init_transactions on both ids, before anything else.
2. Take a lane: acquire (epoch + 1, the row still names the former id); fence both former ids, once for all lanes
   acquired before; read the lane's marker up to a *decided* high watermark, and wait as long as it is undecided; one
   statement checks the epoch, settles the marker's rows, sets ``last_batch`` and writes the own id.
3. Turn: read rows; one statement for all lanes checks epoch, own id and ``last_batch``, settles the turn before, and is
   the flush barrier for the rows read; one Kafka transaction with a marker per lane. A lane that the statement does not
   match is dropped. The next turn begins when EndTxn was answered with success. The events and markers may be produced
   while the statement is under way, or before it (``PRODUCE_FIRST``): EndTxn comes after its answer, and if a lane of
   the turn is not matched, the transaction is aborted as in 4.
4. Any other outcome of a transaction: throw both producers away, init_transactions on both, then read the markers of
   all held lanes and settle them as in 2. An unanswered statement: the same, without new producers.
   Where init_transactions finds a transaction that is prepared and can't be ended, because a partition of it has no
   leader: take a new base id, and take the held lanes over from the one before, which needs no fence: its producers are
   gone.
5. Release: one statement checks epoch, own id and ``last_batch``, settles, sets the id to NULL and frees the lease.
   Only between turns.
6. An at-least-once worker fences, reads and settles as in 2, and writes NULL as its own id.

The statement of a turn has to check the own id as well: a worker whose release was carried out without an answer finds
its epoch unchanged, but the next taker will fence nobody.

What happens when
-----------------
A worker that is slow, stopped (SIGSTOP) or cut off is a worker whose next step comes late: the search covers that
without a name for it.

| crash, pause or race                             | outcome                                                          |
|--------------------------------------------------|------------------------------------------------------------------|
| after acquire, before the fence                  | the row names the former id: the next taker fences it            |
| between the fences of the two ids                | the next taker fences both again                                 |
| after the fences, before the own id is written   | nothing was published; the next taker fences the former ids      |
| own id written, nothing published                | the next taker fences an idle producer                           |
| rows read, statement not carried out             | nothing was published; the rows are read again                   |
| events produced, no EndTxn                       | the taker's fence aborts them; the marker is that of before      |
| EndTxn without an answer                         | init_transactions decides it; the marker says how                |
| EndTxn answered, markers not yet written         | the marker's reader waits; fencing waits too                     |
| they can't be written in one partition           | its worker goes on under a new base id, by the lanes' markers    |
| turn k prepared, turn k + 1 aborted              | the same: marker k is undecided until it is written              |
| turn k prepared, turn k + 1 prepared             | offsets keep the order: a reader sees k + 1 only after k         |
| committed, not settled                           | the marker names the rows; the taker settles them                |
| only lane L of {L, M} is taken                   | the transaction aborts, its worker begins again with M           |
| the former holder begins again after the fence   | acquire came before the fence: it finds L gone, publishes M only |
| it begins again between the fences of its ids    | it finds L gone; its second producer is fenced once more         |
| another lane of the same former id is acquired   | fence again: its worker may have begun again in between          |
| the worker takes a lane back that names its id   | no fence; the marker is read between turns, never during one     |
| released without an answer                       | the own id is gone from the row: the lane is dropped             |
| the same, where turns are produced first         | a lane is dropped before its release is sent, or an open         |
|                                                  | transaction would be left that nobody fences                     |
| released, markers not yet written                | nobody fences; the taker waits for the decided high watermark    |
| a lease runs out, its holder sleeps              | a zombie: fenced in Kafka, refused by the epoch in Postgres      |
| Postgres restarts and loses writers' commits     | rows that were lost were never published: the flush barrier      |
| Postgres fails over and loses a worker's commit  | one worker: ``last_batch`` does not match, StateLost, the lane   |
|                                                  | stops. Two workers: not covered, see below                       |

Actions
-------
| action            | stands for                                                                             |
|-------------------|----------------------------------------------------------------------------------------|
| kill              | kill -9 of a worker; it starts again with an empty memory and a new base id            |
| expire            | a lane's lease runs out by the database's clock, whether its holder is alive or not    |
| crash, keep n     | Postgres restarts; of the commits not yet flushed the first n survive                  |
| failover          | Postgres loses its last flushed commit (only with ``lossy``)                           |
| step: lost        | the request is carried out and its answer is lost (also: broker or database died)      |
| step: failed      | an event of the turn is refused: a lane is in trouble                                  |
| step: delayed     | EndTxn(commit) times out and is still under way: it may arrive later, or never         |
| step: doubled     | EndTxn(commit) was sent twice by the client: one is answered, the other arrives later  |
| late              | the EndTxn that is under way arrives                                                   |
| timeout           | the coordinator aborts an open transaction and fences its producer                     |
| written           | the coordinator has written a transaction's commit markers: readers see it             |

Known limit, shown by a test: a failover that loses an acquire, or a written id, loses the name of the id to fence. The
holder of that id can then commit beside the next one. With an id per lane, as before, Kafka alone knew whom to fence.

Not in the model: tampering (a state topic that was deleted, a restored dump), dropped commit markers (KAFKA-20734), how
lanes are spread. At-least-once workers may repeat what they published first; their delivery time-out is shorter than
the lease, so an expired lease drops what they have not sent.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, zip_longest
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

from relay.marker import Marker, StateLost, resume

SYSTEM: Final = "7300000000000000001"
ANSWERS: Final = ("ok", "lost", "delayed", "doubled")
EXACTLY: Final = "exactly-once"
AT_LEAST: Final = "at-least-once"

_FAULTS: Final = {"kill", "expire", "crash", "timeout", "failover"}

# Variants of the right protocol, in the same list as the mutations.
SPLIT_FETCH: Final = "split_fetch"  # reading and the statement are two steps, as they are in the relay
PRODUCE_FIRST: Final = "produce_first"  # the statement comes at any time between reading and EndTxn
CONCURRENT: Final = "concurrent"  # lanes are taken while a transaction is open, as by a thread of their own
RENEW: Final = "renew"  # a worker whose last transaction can't be ended goes on under a new base id

# What a worker could get wrong.
MUTATIONS: Final = {
    "id_before_fence": "acquire writes the own id before the former one is fenced",
    "leases_before_init": "after being fenced the leases are read first; producers are made when the next turn is sent",
    "null_while_open": "a lane is released with the id NULL while a transaction with it is open",
    "read_before_fence": "the marker is read before the former ids are fenced",
    "read_before_init": "after an unclean commit the marker is read before init_transactions",
    "lso_only": "the marker is read up to the last stable offset; an undecided transaction is ignored",
    "fence_first_only": "only the first of the two former ids is fenced",
    "fence_second_only": "only the second of the two former ids is fenced",
    "fence_remembered": "a former id that was fenced before is not fenced again for a lane acquired later",
    "turn_after_unknown": "turn k + 1 begins on the other producer although turn k's outcome is unknown",
    "no_last_batch": "settling does not expect last_batch",
    "no_epoch": "no statement asks for the epoch",
    "no_epoch_in_adopt": "the statement that takes over does not ask for the epoch",
    "no_epoch_in_turn": "the statement of the turn does not ask for the epoch",
    "no_id_in_turn": "the statement of the turn does not ask for the own id",
    "own_id_not_written": "taking over leaves the former id in the row",
    "own_lane_in_turn": "a lane taken back under the own id: its marker is read while a turn is being sent",
    "alo_no_fence": "an at-least-once worker takes over without fencing",
    "alo_no_settle": "an at-least-once worker fences and does not settle the marker's rows",
    "alo_null_first": "an at-least-once worker writes NULL when it acquires",
    "commit_unconfirmed": "what was produced before the statement is committed before it as well",
    "no_flush_barrier": "the statement of the turn commits without waiting for the flush",
    "empty_commit": "a statement with nothing to settle writes no WAL, so that its commit flushes nothing",
    "unnoticed_crash": "reads, and makes durable in the next transaction, on a connection that outlives a crash",
    "settle_before_ack": "rows are deleted when they are read",
    "marker_first": "the markers are committed in a transaction of their own, before the events",
    "reuse_producer": "after an unclean commit the same producers go on",
    "trust_doubled_commit": "a commit that raised nothing is clean, though EndTxn was sent twice",
    "resend_blind": "after a failure the turn is sent again without reading the markers",
    "adopt_without_settling": "taking over does not delete the marker's rows",
    "async_acquire": "a lane is taken with synchronous_commit=off",
}

Base: TypeAlias = int
TransactionalId: TypeAlias = tuple[Base, int]


class Violation(AssertionError):
    """The guarantee is broken: an event is on the topic that must not be, or one is lost."""


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


class _Saved:
    """Keeps its state in ``fields``, all of them immutable, so that saving and loading are cheap."""

    fields: tuple[str, ...]
    _values: attrgetter[tuple[Any, ...]]

    def __init_subclass__(cls) -> None:
        cls._values = attrgetter(*cls.fields)

    def save(self) -> tuple[Any, ...]:
        return self._values(self)

    def load(self, saved: tuple[Any, ...]) -> None:
        vars(self).update(zip(self.fields, saved, strict=True))


class FakePostgres(_Saved):
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


def _without(rows: Iterable[Row], batch: Marker | None) -> tuple[Row, ...]:
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


class FakeKafka(_Saved):
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


class Lane(NamedTuple):
    """What a worker knows of a lane that it has acquired.

    ``stage`` names the next step of taking over: fence → read → adopt → held. ``former`` is the base id that the row
    named, ``fenced`` how many of its ids are fenced. ``number`` is ``last_batch`` as this worker wrote it, ``batch``
    what is in the current turn, ``pending`` what Kafka has committed and Postgres does not know of.
    """

    epoch: int
    stage: str
    former: Base | None = None
    fenced: int = 0
    marker: Marker | None = None
    number: int | None = None
    batch: Marker | None = None
    pending: Marker | None = None


class Request(NamedTuple):
    """What a worker can do next; ``lanes`` are the lanes that it is about."""

    name: str
    lanes: tuple[int, ...] = ()


class WorkerModel(_Saved):
    """A worker that follows the protocol, one request a step.

    ``phase`` is that of the turn: init (twice) → idle → (secure) → send → idle. Lanes are taken and released while it
    is idle. ``rows`` is what was read and may not be durable yet, ``queue`` what is still to be produced.
    ``unconfirmed`` are the lanes and epochs of a turn that is being produced while its statement is still to come.
    """

    fields = ("base", "phase", "which", "lanes", "rows", "queue", "stale", "fenced", "unconfirmed", "abandoned")

    def __init__(self, pg: FakePostgres, kafka: FakeKafka, delivery: str, world: World) -> None:
        self.pg = pg
        self.kafka = kafka
        self.exactly = delivery == EXACTLY
        self.batch_size = world.batch_size
        self.producers = world.producers
        self.mutations = world.mutations
        self.kill()

    def kill(self) -> None:
        self.base = self.kafka.new_base() if self.exactly else None
        self.phase = "init" if self.exactly else "idle"
        self.which = 0
        self.lanes: tuple[Lane | None, ...] = (None,) * len(self.pg.now.lanes)
        self.rows: tuple[tuple[Row, ...] | None, ...] = ()
        self.queue: tuple[tuple[tuple[int, str | Marker], ...], ...] = ()
        self.stale = False
        self.fenced: frozenset[Base] = frozenset()
        self.unconfirmed: tuple[tuple[int, int], ...] = ()
        self.abandoned: frozenset[Base] = frozenset()

    def disconnect(self) -> None:
        """Postgres crashed. Between transactions nothing notices, but rows in hand are not to be trusted."""
        if "unnoticed_crash" in self.mutations:
            return
        if self.unconfirmed:
            self._again()
        elif self.phase == "secure":
            self._read_again()

    def late(self, lane: int) -> None:
        """The lease ran out: what an at-least-once worker has not delivered by then has timed out."""
        if not self.exactly:
            self._set(lane, None)

    # What it can do next

    def requests(self) -> Iterator[Request]:
        if self.phase == "init":
            yield Request("init")
            if RENEW in self.mutations and any(map(self.kafka.busy, self._own_ids())):
                yield Request("renew")
            return
        if self.phase == "secure":
            yield Request("secure")
            return
        if self.phase == "send":
            if self.unconfirmed:
                yield Request("secure")
            if self.queue or not self.unconfirmed or "commit_unconfirmed" in self.mutations:
                yield Request("send")
            if "null_while_open" in self.mutations:
                yield from self._releases()
            if CONCURRENT not in self.mutations:
                return
        yield from self._taking()
        if self.phase == "idle":
            yield from self._turns()
            yield from self._releases()

    def _taking(self) -> Iterator[Request]:
        fencing = set()
        for number, lane in enumerate(self.lanes):
            if (lane is None or lane.stage == "held") and not self.pg.now.lanes[number].leased:
                yield Request("acquire", (number,))
            elif lane is None:
                continue
            elif lane.stage == "fence" and (lane.former, lane.fenced) not in fencing:
                fencing.add((lane.former, lane.fenced))
                yield Request("fence", (number,))
            elif lane.stage == "read" and self._readable(number, lane):
                yield Request("read", (number,))
            elif lane.stage == "adopt":
                yield Request("adopt", (number,))

    def _readable(self, number: int, lane: Lane) -> bool:
        own = lane.former is not None and lane.former in {self.base, *self.abandoned}
        if own and self.phase != "idle" and "own_lane_in_turn" not in self.mutations:
            return False
        return "lso_only" in self.mutations or self.kafka.decided(number)

    def _turns(self) -> Iterator[Request]:
        """A turn has all lanes, or one: another that is in trouble waits."""
        held = [(number, lane) for number, lane in enumerate(self.lanes) if lane and lane.stage == "held"]
        work = tuple(
            number for number, lane in held if (self.exactly and self._next(lane) is None) or self._unread(number)
        )
        if work or any(lane.pending for _, lane in held):
            yield Request("turn", work)
        if len(work) > 1:
            for number in work:
                yield Request("turn", (number,))

    def _releases(self) -> Iterator[Request]:
        for number, lane in enumerate(self.lanes):
            if lane and lane.stage == "held":
                yield Request("release", (number,))

    def answers(self, request: Request) -> tuple[str, ...]:
        """Which faults the request can meet."""
        if request.name == "send":
            if not self.exactly:
                return ("ok", "lost")
            return ("ok", "failed") if self.queue else ANSWERS
        if request.name == "read" or (request.name == "turn" and SPLIT_FETCH in self.mutations):
            return ("ok",)
        return ("ok", "lost")

    def tell(self, request: Request) -> str:
        lanes = ", ".join("LMNO"[lane] for lane in request.lanes)
        match request.name:
            case "init":
                return f"init_transactions({self.base}.{self.which})"
            case "fence":
                lane = self.lanes[request.lanes[0]]
                assert lane
                return f"fences {lane.former}.{self._fencing(lane)}, for {lanes}"
            case "turn":
                how = "reads" if SPLIT_FETCH in self.mutations else "settles and reads"
                return f"{how} {lanes or 'nothing'}"
            case "send" if self.queue:
                told = [f"marker {what.batch}" if isinstance(what, Marker) else what for _, what in self.queue[0]]
                return f"produces {', '.join(told)} under {self.base}.{self.which}"
            case "send":
                return f"EndTxn({self.base}.{self.which}, commit)"
        return f"{_REQUESTS[request.name]} {lanes}".rstrip()

    # Steps

    def step(self, request: Request, answer: str = "ok") -> None:
        """Take one step. What was not answered is done again; a statement that settles: read the markers again."""
        if request.name == "send":
            self._send(answer)
            return
        before = self.save()
        getattr(self, f"_{request.name}")(*((request.lanes,) if request.lanes or request.name == "turn" else ()))
        if answer == "lost":
            self.load(before)
            if request.name == "release" and PRODUCE_FIRST in self.mutations:
                self._set(request.lanes[0], None)
            elif self.unconfirmed:
                self._again()
            elif request.name in {"turn", "secure"}:
                self._read_again()

    def _init(self) -> None:
        assert self.base is not None
        self.kafka.init_transactions((self.base, self.which))
        self.which = (self.which + 1) % self.producers
        if self.which == 0:
            self.stale = False
            self.phase = "send" if self.queue else "idle"

    def _own_ids(self) -> list[TransactionalId]:
        assert self.base is not None
        return [(self.base, which) for which in range(self.producers)]

    def _renew(self) -> None:
        """Go on under a new base id. Held lanes are taken over from the one before, and are to be read by now."""
        assert self.base is not None
        for each in self._own_ids():
            self.kafka.abandon(each)
        self.abandoned |= {self.base}
        self.base, self.which = self.kafka.new_base(), 0

    def _acquire(self, lanes: tuple[int, ...]) -> None:
        (number,) = lanes
        row = self.pg.now.lanes[number]
        changes: dict[str, Any] = {"epoch": row.epoch + 1, "leased": True}
        if "id_before_fence" in self.mutations or (not self.exactly and "alo_null_first" in self.mutations):
            changes["base"] = self.base
        self.pg.commit("async_acquire" not in self.mutations, lanes=self.pg.with_lane(number, **changes))
        stage = "fence"
        if row.base is None or row.base in {self.base, *self.abandoned}:
            stage = "read" if self.exactly else "adopt"
        elif row.base in self.fenced or self.mutations & {"read_before_fence", "" if self.exactly else "alo_no_fence"}:
            stage = "read"
        self._set(number, Lane(row.epoch + 1, stage, row.base))

    def _fencing(self, lane: Lane) -> int:
        return 1 if "fence_second_only" in self.mutations else lane.fenced

    def _fence(self, lanes: tuple[int, ...]) -> None:
        """Fence one id; it counts for all lanes that were acquired before and that name it."""
        chosen = self.lanes[lanes[0]]
        assert chosen
        assert chosen.former is not None
        self.kafka.fence((chosen.former, self._fencing(chosen)))
        enough = 1 if self.mutations & {"fence_first_only", "fence_second_only"} else self.producers
        for number, lane in enumerate(self.lanes):
            if lane and lane.stage == "fence" and lane[2:4] == chosen[2:4]:
                stage = "fence" if lane.fenced + 1 < enough else "read"
                if stage == "read" and "read_before_fence" in self.mutations:
                    stage = "adopt"
                self._set(number, lane._replace(fenced=lane.fenced + 1, stage=stage))
        if "fence_remembered" in self.mutations and chosen.fenced + 1 == enough:
            self.fenced |= {chosen.former}

    def _read(self, lanes: tuple[int, ...]) -> None:
        (number,) = lanes
        lane = self.lanes[number]
        assert lane
        fence = "read_before_fence" in self.mutations and lane.former not in {None, self.base} and not lane.fenced
        self._set(number, lane._replace(marker=self.kafka.marker(number), stage="fence" if fence else "adopt"))

    def _adopt(self, lanes: tuple[int, ...]) -> None:
        """Settle what the marker names and write the own id, if the epoch is still ours."""
        (number,) = lanes
        lane, row = self.lanes[number], self.pg.now.lanes[number]
        assert lane
        if row.epoch != lane.epoch and not self.mutations & {"no_epoch", "no_epoch_in_adopt"}:
            self._set(number, None)
            return
        rows, last = self.pg.now.rows, row.last_batch
        if self.exactly or (lane.former is not None and "alo_no_settle" not in self.mutations):
            try:
                rows, last = self._resume(number, lane, row)
            except StateLost:
                if not self.pg.lossy:
                    raise
                self._set(number, Lane(lane.epoch, "stopped"))
                return
        base = row.base if "own_id_not_written" in self.mutations else self.base
        self.pg.commit(rows=rows, lanes=self.pg.with_lane(number, last_batch=last, leased=True, base=base))
        self._set(number, Lane(lane.epoch, "held", number=last))

    def _resume(self, number: int, lane: Lane, row: LaneRow) -> tuple[tuple[Row, ...], int | None]:
        marker = resume(number, row.last_batch, lane.marker, SYSTEM, 1)
        if marker is None:
            return self.pg.now.rows, None
        rows = _without(self.pg.now.rows, marker)
        missing = len(self.pg.now.rows) - len(rows) != len(marker.positions)
        if "adopt_without_settling" in self.mutations:
            rows = self.pg.now.rows
        elif row.last_batch not in {None, marker.batch} and missing:
            raise StateLost(f"rows of batch {marker.batch} are missing: {self.pg.now.rows}")
        return rows, marker.batch

    def _turn(self, lanes: tuple[int, ...]) -> None:
        """Read the rows of these lanes; of the others only what is pending is settled."""
        self.rows = tuple(
            self._unread(number)[: self.batch_size] if number in lanes else None for number in range(len(self.lanes))
        )
        self.phase = "secure"
        if PRODUCE_FIRST in self.mutations and self.exactly:
            self._produce_first()
        elif not self.mutations & {SPLIT_FETCH, "unnoticed_crash"}:
            self._secure()

    def _produce_first(self) -> None:
        """Begin to produce what was read. Without any of it, the statement comes alone."""
        for number, lane in enumerate(self.lanes):
            if lane and (fetched := self.rows[number]) is not None:
                self._set(number, lane._replace(batch=self._batch(self._next(lane), fetched)))
        if any(lane and lane.batch for lane in self.lanes):
            self.rows = ()
            self._start()
            self.unconfirmed = tuple((n, lane.epoch) for n, lane in enumerate(self.lanes) if lane and lane.batch)

    def _unread(self, number: int) -> tuple[Row, ...]:
        lane = self.lanes[number]
        assert lane
        return _without((row for row in self.pg.now.rows if row.lane == number), lane.pending)

    def _next(self, lane: Lane) -> int | None:
        """Return what last_batch becomes. An at-least-once worker leaves it: it must go on matching the marker."""
        return lane.pending.batch if lane.pending and self.exactly else lane.number

    def _ours(self, lane: Lane, row: LaneRow) -> bool:
        if row.epoch != lane.epoch and not self.mutations & {"no_epoch", "no_epoch_in_turn"}:
            return False
        if row.base != self.base and not self.mutations & {"no_id_in_turn", "own_id_not_written"}:
            return False
        return row.last_batch == lane.number or "no_last_batch" in self.mutations

    def _secure(self) -> None:
        """Settle the turn before and prolong the leases, in one statement whose commit is the flush barrier."""
        rows, read, self.rows = self.pg.now.rows, self.rows, ()
        table = list(self.pg.now.lanes)
        settled, behind, self.unconfirmed = False, self.unconfirmed, ()
        for number, lane in enumerate(self.lanes):
            if lane is None or lane.stage != "held":
                continue
            if not self._ours(lane, table[number]):
                self._set(number, None)
                continue
            rows = _without(rows, lane.pending)
            last = self._next(lane)
            settled = settled or lane.pending is not None
            batch = lane.batch
            if not behind:
                fetched = read[number]
                batch = None if fetched is None else self._batch(last, fetched)
            if batch and "settle_before_ack" in self.mutations:
                rows = _without(rows, batch)
            table[number] = table[number]._replace(leased=True, last_batch=last)
            self._set(number, lane._replace(number=last, pending=None, batch=batch))
        flush = "no_flush_barrier" not in self.mutations and (settled or "empty_commit" not in self.mutations)
        self.pg.commit(flush, rows=rows, lanes=tuple(table))
        if not behind:
            self._start()
        elif any((lane := self.lanes[number]) is None or lane.batch is None or lane.epoch != n for number, n in behind):
            self._again()

    def _batch(self, last: int | None, rows: tuple[Row, ...]) -> Marker | None:
        """Return the marker of the next batch. Exactly-once begins with an empty one."""
        if self.exactly and last is None:
            return Marker(1, 0, SYSTEM, 1)
        if not rows:
            return None
        return Marker((last or 0) + 1, 0, SYSTEM, 1, tuple(row.id for row in rows), tuple(row.event_id for row in rows))

    def _start(self) -> None:
        markers = [(number, lane.batch) for number, lane in enumerate(self.lanes) if lane and lane.batch]
        events = tuple((number, event_id) for number, batch in markers for event_id in batch.event_ids)
        self.phase = "idle"
        if not markers:
            return
        parts: tuple[tuple[tuple[int, str | Marker], ...], ...] = (
            (events, tuple(markers)) if self.exactly else (events,)
        )
        if "marker_first" in self.mutations:
            parts = parts[::-1]
        self.queue = tuple(part for part in parts if part)
        self.phase = "send"
        if self.stale:
            self.phase, self.which = "init", 0

    def _send(self, answer: str) -> None:
        if not self.exactly:
            self._send_loose(answer)
            return
        assert self.base is not None
        transaction = self.base, self.which
        trusting = self.mutations & {"reuse_producer", "trust_doubled_commit", "turn_after_unknown"}
        try:
            if self.queue:
                self.kafka.produce(transaction, self.queue[0])
                self.queue = self.queue[1:]
                if answer == "failed":
                    self._unclean(transaction)
                    return
                if "marker_first" not in self.mutations or not self.queue:
                    return
            self.kafka.end_transaction(transaction, answer)
        except Fenced:
            self._again()
            return
        if answer == "ok" or (answer == "doubled" and trusting) or "turn_after_unknown" in self.mutations:
            if not self.queue:
                self._clean()
        else:
            self._unclean(transaction)

    def _send_loose(self, answer: str) -> None:
        for number, event_id in self.queue[0]:
            if self.lanes[number] is not None:
                self.kafka.produce_loose(number, str(event_id))
        if answer == "lost":
            self._each_held(lambda lane: lane._replace(batch=None))
        self._clean()

    def _clean(self) -> None:
        self.queue = ()
        self.unconfirmed = ()
        self._each_held(lambda lane: lane._replace(batch=None, pending=lane.batch) if lane.batch else lane)
        self.which = (self.which + 1) % self.producers
        self.phase = "idle"

    def _unclean(self, transaction: TransactionalId) -> None:
        if "reuse_producer" in self.mutations:
            self.kafka.abort(transaction)
            self._read_again()
        else:
            self._again()

    def _again(self) -> None:
        """Throw both producers away, and begin again with what Kafka and Postgres know of the lanes."""
        if "resend_blind" in self.mutations:
            self.queue = ()
            self._start()
        elif "read_before_init" in self.mutations:
            self._read_again()
            for number, lane in enumerate(self.lanes):
                if lane and lane.stage == "read":
                    self._read((number,))
        else:
            self._read_again()
            self.stale = "leases_before_init" in self.mutations
        self.which = 0
        if not self.stale:
            self.phase = "init"

    def _read_again(self) -> None:
        """Forget what was read and what is pending of the held lanes: the markers and Postgres know."""
        self.unconfirmed = ()
        if self.exactly:
            self._each_held(lambda lane: Lane(lane.epoch, "read"))
        self.rows, self.queue = (), ()
        self.phase = "idle"

    def _release(self, lanes: tuple[int, ...]) -> None:
        """Settle, name nobody to be fenced and free the lease, in one statement."""
        (number,) = lanes
        lane, row = self.lanes[number], self.pg.now.lanes[number]
        assert lane
        if self._ours(lane, row):
            rows = _without(self.pg.now.rows, lane.pending)
            freed = self.pg.with_lane(number, leased=False, base=None, last_batch=self._next(lane))
            self.pg.commit(rows=rows, lanes=freed)
        self._set(number, None)

    def _set(self, number: int, lane: Lane | None) -> None:
        self.lanes = (*self.lanes[:number], lane, *self.lanes[number + 1 :])

    def _each_held(self, change: Any) -> None:
        self.lanes = tuple(change(lane) if lane and lane.stage == "held" else lane for lane in self.lanes)


_REQUESTS: Final = {
    "acquire": "acquires",
    "read": "reads the marker of",
    "adopt": "settles the marker and writes its id into the row of",
    "renew": "takes a new base id",
    "secure": "settles, and what it read is durable",
    "release": "releases",
}


class Action(NamedTuple):
    """One thing that happens; ``who`` is a worker, a lane, an event id, a key, or how much a crash keeps."""

    name: str
    who: Any = ""
    how: str = ""
    what: Request | None = None

    @property
    def fault(self) -> bool:
        """Whether this counts against a search's number of faults; a lease that no worker knows of runs out anyway.

        A release is no fault, nor is a new base id, but they are counted: otherwise lanes go round for ever.
        """
        if self.name == "step":
            return self.how != "ok" or (self.what is not None and self.what.name in {"release", "renew"})
        return self.name in _FAULTS and self.how != "unheld"


@lru_cache(maxsize=20_000)
def _wrong(published: tuple[Entry, ...], durable: tuple[Row, ...]) -> str:
    """Return what is wrong with a lane's events if these transactions are durable."""
    seen: dict[str, bool] = {}
    for entry in published:
        loose = seen.setdefault(entry.record, entry.loose)
        if not loose and sum(other.record == entry.record for other in published) > 1:
            return f"twice on the topic: {', '.join(other.record for other in published)}"
    history: dict[str, list[str]] = {}
    keys: dict[str, str] = {}
    for row in durable:
        history.setdefault(row.key, []).append(row.event_id)
        keys[row.event_id] = row.key
    if phantoms := sorted(set(seen).difference(keys)):
        return f"on the topic, but their transactions are not durable: {', '.join(phantoms)}"
    for key, written in history.items():
        sent = [event_id for event_id in seen if keys[event_id] == key]
        if sent != written[: len(sent)]:
            return f"key {key} is out of order on the topic: {', '.join(sent)}"
    return ""


class World:
    """One database, one Kafka, some workers; writers of one key exclude each other.

    ``written`` are the keys of events that are durable at the start. ``warm``: exactly-once has begun on all lanes,
    batch 1 is settled. ``strict``: the invariant that the proof stands on is checked as well: whoever can commit a lane
    does so under the id that the lane's row names.
    """

    def __init__(
        self,
        workers: Iterable[str] = (EXACTLY, EXACTLY),
        *,
        lanes: int = 2,
        producers: int = 2,
        batch_size: int = 2,
        written: str = "",
        warm: bool = True,
        lossy: bool = False,
        strict: bool = True,
        mutations: Iterable[str] = (),
    ) -> None:
        self.batch_size = batch_size
        self.producers = producers
        self.mutations = frozenset(mutations)
        self.strict = strict and not lossy
        self.deliveries = tuple(workers)
        self.pg = FakePostgres(lanes, lossy)
        self.kafka = FakeKafka(lanes)
        self.begun = 0
        if warm:
            self.kafka.logs = (Log(markers=(Entry(Marker(1, 0, SYSTEM, 1)),)),) * lanes
            self.pg.now = self.pg.now._replace(lanes=(LaneRow(last_batch=1),) * lanes)
        for key in written:
            self._begin(key, "")
            self.pg.commit_write(self.pg.now.writing[0], True)
        self.pg.before = None
        self.workers = [WorkerModel(self.pg, self.kafka, delivery, self) for delivery in self.deliveries]
        self._orders = [
            order
            for order in permutations(range(len(self.workers)))
            if all(self.deliveries[one] == delivery for one, delivery in zip(order, self.deliveries, strict=True))
        ]

    def save(self) -> tuple[Any, ...]:
        return self.pg.save(), self.kafka.save(), tuple(worker.save() for worker in self.workers), self.begun

    def load(self, saved: tuple[Any, ...]) -> None:
        pg, kafka, workers, self.begun = saved
        self.pg.load(pg)
        self.kafka.load(kafka)
        for worker, state in zip(self.workers, workers, strict=True):
            worker.load(state)

    def writable(self, key: str) -> bool:
        return all(row.key != key for row in self.pg.now.writing)

    def apply(self, action: Action) -> None:
        """Let it happen, then look whether the guarantee still holds."""
        if action.name == "step":
            self._step(action)
        else:
            getattr(self, f"_{action.name}")(action.who, action.how)
        self.check()

    def _begin(self, key: str, _: str) -> None:
        self.begun += 1
        self.pg.begin_write(f"{key}{self.begun}", key)

    def _commit(self, event_id: str, how: str) -> None:
        row = next(row for row in self.pg.now.writing if row.event_id == event_id)
        self.pg.commit_write(row, flush=how != "async")

    def _step(self, action: Action) -> None:
        assert action.what
        try:
            self.workers[action.who].step(action.what, action.how or "ok")
        except StateLost as error:
            raise Violation(f"worker {action.who} stops, though nobody tampered with anything: {error}") from error

    def _kill(self, worker: int, _: str) -> None:
        self.workers[worker].kill()

    def _expire(self, lane: int, _: str) -> None:
        self.pg.expire(lane)
        for worker in self.workers:
            worker.late(lane)

    def _crash(self, keep: int, _: str) -> None:
        self.pg.crash(keep)
        for worker in self.workers:
            worker.disconnect()

    def _failover(self, *_: object) -> None:
        """Behind a pooler: no worker notices."""
        self.pg.failover()

    def _timeout(self, transaction: TransactionalId, _: str) -> None:
        self.kafka.fence(transaction)

    def _late(self, transaction: TransactionalId, _: str) -> None:
        self.kafka.late(transaction)

    def _written(self, transaction: TransactionalId, _: str) -> None:
        self.kafka.written(transaction)

    def possible(self, keys: str) -> Iterator[Action]:
        """Everything that can happen now, if ``keys`` are the keys that are written, in this order."""
        if self.begun < len(keys) and self.writable(keys[self.begun]):
            yield Action("begin", keys[self.begun])
        for row in self.pg.now.writing:
            yield Action("commit", row.event_id, "async")
        for number, worker in enumerate(self.workers):
            for request in worker.requests():
                for answer in worker.answers(request):
                    yield Action("step", number, answer, request)
            if any(worker.lanes):
                yield Action("kill", number)
        yield from self._possible_in_postgres()
        yield from self._possible_in_kafka()

    def _possible_in_postgres(self) -> Iterator[Action]:
        for lane, row in enumerate(self.pg.now.lanes):
            if row.leased:
                known = (worker.lanes[lane] for worker in self.workers)
                held = any(other and other.epoch == row.epoch and other.stage != "stopped" for other in known)
                yield Action("expire", lane, "" if held else "unheld")
        for keep in range(len(self.pg.unflushed)):
            yield Action("crash", keep)
        if self.pg.before is not None:
            yield Action("failover")

    def _possible_in_kafka(self) -> Iterator[Action]:
        for transaction in self.kafka.transactions(taken=False):
            yield Action("timeout", transaction)
        for transaction in sorted(self.kafka.under_way):
            yield Action("late", transaction)
        for transaction in self.kafka.transactions(taken=True):
            yield Action("written", transaction)

    def tell(self, action: Action) -> str:
        """Return in words what the action is about to do."""
        name, who, how, request = action
        if request is not None:
            fate = "" if how in {"", "ok"} else f", answer {how}" if how == "lost" else f", {how}"
            return f"worker {who} {self.workers[int(who)].tell(request)}{fate}"
        if isinstance(who, tuple):
            who = f"{who[0]}.{who[1]}"
        elif name == "expire":
            who = f"lease of {'LMNO'[who]}"
        return " ".join(str(part) for part in (name, who, how) if part != "")

    def done(self, keys: str) -> bool:
        return not self.pg.now.rows and not self.pg.now.writing and self.begun >= len(keys)

    def check(self) -> None:
        """Nothing twice, nothing that no durable transaction wrote, in order by key, nothing gone from both sides."""
        durable, now = self.pg.durable.history, self.pg.now
        kept = {row.event_id for row in now.rows}
        for worker in self.workers:
            for lane in worker.lanes:
                if lane and lane.batch:
                    kept.update(lane.batch.event_ids)
        for number, log in enumerate(self.kafka.logs):
            published = tuple(entry for entry in log.events if not entry.open)
            here = durable if len(self.kafka.logs) == 1 else tuple(row for row in durable if row.lane == number)
            if wrong := _wrong(published, here):
                raise Violation(wrong)
            kept.update(entry.record for entry in published)
        if lost := [row.event_id for row in now.history if row.event_id not in kept]:
            raise Violation(f"lost, neither in the table nor on the topic: {lost}")
        if self.strict:
            self._check_writers()

    def _check_writers(self) -> None:
        able = None
        if PRODUCE_FIRST in self.mutations:
            # What was produced before the statement is in nobody's name yet; EndTxn is sent by those it has confirmed.
            able = {worker.base for worker in self.workers if worker.phase == "send" and not worker.unconfirmed}
            able |= {base for base, _ in self.kafka.under_way}
        for number, log in enumerate(self.kafka.logs):
            for entry in (*log.events, *log.markers):
                if not entry.open or not entry.transaction or (able is not None and entry.transaction[0] not in able):
                    continue
                if entry.transaction[0] != self.pg.now.lanes[number].base:
                    named = self.pg.now.lanes[number].base
                    raise Violation(f"{entry.transaction} can commit lane {number}, whose row names {named}")

    def drain(self) -> None:
        """Let one healthy worker work off everything, then demand that every event is on the topic."""
        for row in self.pg.now.writing:
            self.apply(Action("commit", row.event_id))
        for number in range(len(self.workers)):
            self.apply(Action("kill", number))
        for lane in range(len(self.pg.now.lanes)):
            self.apply(Action("expire", lane))
        for _ in range(10 + 12 * len(self.pg.now.lanes) + 6 * len(self.pg.now.rows)):
            for transaction in self.kafka.transactions(taken=True):
                self.apply(Action("written", transaction))
            for request in self.workers[0].requests():
                if request.name != "release":
                    self.apply(Action("step", 0, "ok", request))
                    break
        if self.pg.now.rows:
            raise Violation(f"a healthy worker leaves rows behind: {self.pg.now.rows}")
        published = {entry.record for log in self.kafka.logs for entry in log.events}
        if published != {row.event_id for row in self.pg.now.history}:
            raise Violation(f"on the topic: {published}, written: {self.pg.now.history}")

    def key(self, left: int) -> int:
        """Name the state by its hash.

        Workers are alike, of ids only counts which are the same, and of an epoch whether it is the current one (with
        unflushed commits, or a failover to come, how far from it: an older epoch may come back).
        """
        return min(self._key(order, left) for order in self._orders)

    def _key(self, order: tuple[int, ...], left: int) -> int:  # noqa: C901 - one line for each part of the state
        names: dict[Base | None, int] = {None: 0}

        def named(base: Base | None) -> int:
            return names.setdefault(base, len(names))

        now, back = self.pg.now, bool(self.pg.unflushed) or self.pg.before is not None
        parts: list[Any] = [left, self.begun, now[1:]]
        for one in order:
            worker = self.workers[one]
            parts.append((named(worker.base), worker.phase, worker.which, worker.rows, worker.queue, worker.stale))
            for number, epoch in worker.unconfirmed:
                known = worker.lanes[number]
                parts.append((number, known is not None and known.epoch == epoch))
            parts.extend(named(base) for base in sorted(worker.fenced))
            parts.append(len(worker.abandoned))
            parts.extend(named(base) for base in sorted(worker.abandoned))
            for lane, row in zip(worker.lanes, now.lanes, strict=True):
                if lane is None:
                    parts.append(None)
                    continue
                distance = lane.epoch - row.epoch
                parts.append((distance if back else distance == 0, named(lane.former), lane[1], lane[3:]))
            parts.extend((worker.base, which) in self.kafka.valid for which in range(self.producers))
        for tables in (now, *self.pg.unflushed, *([self.pg.before] if self.pg.before else ())):
            for old, new in zip(tables.lanes, now.lanes, strict=True):
                parts.append((old.epoch - new.epoch, old.leased, old.last_batch, named(old.base)))
            if tables is not now:
                parts.append(tables[1:])
        for log in self.kafka.logs:
            for entries in log:
                for record, transaction, taken in entries:
                    parts.append((record, taken, transaction and (named(transaction[0]), transaction[1])))
                parts.append(None)
        parts.extend((named(base), which) for base, which in sorted(self.kafka.under_way))
        return hash(tuple(parts))


@dataclass(frozen=True)
class Search:
    """What ``explore`` did. ``complete`` says that nothing within the bounds was left out."""

    states: int
    steps: int
    depth: int
    complete: bool
    trace: tuple[str, ...] = ()
    violation: str = ""

    def __str__(self) -> str:
        whole = "all" if self.complete else "the first"
        told = f"{whole} {self.states} states, {self.steps} steps, depth {self.depth}"
        if not self.violation:
            return f"{told}: no violation"
        lines = [f"{number:3} {action}" for number, action in enumerate(self.trace, 1)]
        return "\n".join([told, *lines, f"    {self.violation}"])


class _Progress:
    """Remembers every step that is no fault, to find states from which no such steps lead to the end."""

    def __init__(self) -> None:
        self._from = array("q")
        self._to = array("q")
        self._done: list[int] = []

    def step(self, here: int, there: int) -> None:
        self._from.append(here)
        self._to.append(there)

    def done(self, state: int) -> None:
        self._done.append(state)

    def stuck(self, states: Iterable[int]) -> int | None:
        into: dict[int, list[int]] = {}
        for here, there in zip(self._from, self._to, strict=True):
            into.setdefault(there, []).append(here)
        live, todo = set(self._done), list(self._done)
        while todo:
            for state in into.get(todo.pop(), ()):
                if state not in live:
                    live.add(state)
                    todo.append(state)
        return next((state for state in states if state not in live), None)


def explore(  # noqa: C901 - one loop, kept in one place for speed
    world: World, keys: str = "", *, faults: int, progress: bool = True, most: float = math.inf
) -> Search:
    """Try every order of actions with at most ``faults`` faults, breadth first, until a violation or the end.

    ``progress``: from every state, steps without faults must lead to all events being published and settled. A state is
    remembered by its hash.
    """
    start = world.save()
    first = world.key(faults)
    parents: dict[int, tuple[int, Action] | None] = {first: None}
    frontier = [(start, faults, first)]
    live = _Progress()
    depth = steps = 0
    while frontier:
        depth += 1
        following = []
        for saved, left, here in frontier:
            world.load(saved)
            if world.done(keys):
                live.done(here)
            for action in list(world.possible(keys)):
                fault = action.fault
                if fault and not left:
                    continue
                steps += 1
                world.load(saved)
                try:
                    world.apply(action)
                except Violation as error:
                    trace = _trace(world, start, _actions(parents, here, action))
                    return Search(len(parents), steps, depth, False, trace, str(error))
                there = world.key(left - fault)
                if progress and not fault and there != here:
                    live.step(here, there)
                if there not in parents:
                    parents[there] = (here, action)
                    following.append((world.save(), left - fault, there))
        frontier = following
        if len(parents) > most:
            return Search(len(parents), steps, depth, False)
    if progress and (state := live.stuck(parents)) is not None:
        trace = _trace(world, start, _actions(parents, state))
        return Search(len(parents), steps, depth, False, trace, "stuck: only a fault could lead to the end")
    return Search(len(parents), steps, depth, True)


def _actions(parents: dict[int, tuple[int, Action] | None], state: int, *last: Action) -> list[Action]:
    actions = list(last)
    while (step := parents[state]) is not None:
        state, action = step
        actions.insert(0, action)
    return actions


def _trace(world: World, start: tuple[Any, ...], actions: list[Action]) -> tuple[str, ...]:
    """Replay the actions and say what each was about to do."""
    told = []
    world.load(start)
    for action in actions:
        told.append(world.tell(action))
        try:
            world.apply(action)
        except Violation:
            break
    return tuple(told)
