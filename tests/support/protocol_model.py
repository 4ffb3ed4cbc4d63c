"""The exactly-once protocol of workers with several lanes, as a model small enough to search completely.

``FakePostgres`` and ``FakeKafka`` (protocol_servers) keep what the protocol counts on and nothing else. ``WorkerModel``
(protocol_worker) is a worker that sends one request a step. ``World`` puts them together, applies actions and raises
``Violation``. ``explore`` (protocol_search) tries all orders of actions, breadth first, so the trace that it finds is a
shortest one. What follows from a marker is decided by the real ``relay.core.marker.resume``.

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
holder of that id can then commit beside the next one. With an id for each lane Kafka alone would know whom to fence.

Not in the model: tampering (a state topic that was deleted, a restored dump), dropped commit markers (KAFKA-20734), how
lanes are spread. At-least-once workers may repeat what they published first; their delivery time-out is shorter than
the lease, so an expired lease drops what they have not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import permutations
from typing import Any, Final, NamedTuple

from invariants import Invariant
from protocol_servers import (
    SYSTEM,
    Base,
    Entry,
    FakeKafka,
    FakePostgres,
    LaneRow,
    Log,
    Row,
    Tables,
    TransactionalId,
    Violation,
)
from protocol_variants import EXACTLY, PRODUCE_FIRST, SPLIT_FETCH
from protocol_worker import Request, WorkerModel

from relay.core.marker import Marker, StateLost

_FAULTS: Final = {"kill", "expire", "crash", "timeout", "failover"}


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
def _wrong(published: tuple[Entry, ...], durable: tuple[Row, ...]) -> tuple[Invariant, str] | None:
    """Return what is wrong with a lane's events if these transactions are durable, and which invariant that breaks."""
    seen: dict[str, bool] = {}
    for entry in published:
        loose = seen.setdefault(entry.record, entry.loose)
        if not loose and sum(other.record == entry.record for other in published) > 1:
            return Invariant.NO_DOUBLE, f"on the topic: {', '.join(other.record for other in published)}"
    history: dict[str, list[str]] = {}
    keys: dict[str, str] = {}
    for row in durable:
        history.setdefault(row.key, []).append(row.event_id)
        keys[row.event_id] = row.key
    if phantoms := sorted(set(seen).difference(keys)):
        text = f"on the topic, but their transactions are not durable: {', '.join(phantoms)}"
        return Invariant.NOTHING_LEFT_BEHIND, text
    for key, written in history.items():
        sent = [event_id for event_id in seen if keys[event_id] == key]
        if sent != written[: len(sent)]:
            return Invariant.ORDER_OF_A_KEY, f"key {key} is out of order on the topic: {', '.join(sent)}"
    return None


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
            text = f"worker {action.who} stops, though every row and record is as it was written: {error}"
            raise Violation(Invariant.NEVER_STOPS, text) from error

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
            return f"worker {who} {told(self.workers[int(who)], request)}{fate}"
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
        lost = {row.event_id for row in now.history}.difference(row.event_id for row in now.rows)
        for number, log in enumerate(self.kafka.logs):
            published = tuple(entry for entry in log.events if entry.taken or entry.transaction is None)
            if not published:
                continue
            here = durable if len(self.kafka.logs) == 1 else tuple(row for row in durable if row.lane == number)
            if wrong := _wrong(published, here):
                raise Violation(*wrong)
            lost.difference_update(entry.record for entry in published)
        if lost:
            # What was deleted when it was read is not lost yet.
            for worker in self.workers:
                for lane in worker.lanes:
                    if lane and lane.batch:
                        lost.difference_update(lane.batch.event_ids)
        if lost:
            left = [row.event_id for row in now.history if row.event_id in lost]
            raise Violation(Invariant.NO_LOSS, f"neither in the table nor on the topic: {left}")
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
                    text = f"{entry.transaction} can commit lane {number}, whose row names {named}"
                    raise Violation(Invariant.NAMED_IN_THE_ROW, text)

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
            raise Violation(Invariant.EACH_IS_PUBLISHED, f"a healthy worker leaves rows behind: {self.pg.now.rows}")
        published = {entry.record for log in self.kafka.logs for entry in log.events}
        if published != {row.event_id for row in self.pg.now.history}:
            raise Violation(Invariant.NO_LOSS, f"on the topic: {published}, written: {self.pg.now.history}")

    def key(self, left: int) -> int:
        """Name the state by its hash.

        Workers are alike, of ids only counts which are the same, and of an epoch whether it is the current one (with
        unflushed commits, or a failover to come, how far from it: an older epoch may come back).
        """
        parts = [hash(self._part_of(worker)) for worker in self.workers]
        common = (left, self.begun, hash(self._part_of_servers()))
        # The workers in the order of their own parts: only of those that are the same there, all orders are tried.
        if len(self._orders) > 1 and len(set(parts)) == len(parts):
            orders = [min(self._orders, key=lambda order: [parts[one] for one in order])]
        else:
            orders = self._orders
        return min(hash((common, *[parts[one] for one in order], self._same_ids(order))) for order in orders)

    def _part_of(self, worker: WorkerModel) -> tuple[Any, ...]:
        """Return what a worker adds to the key, but for the ids that it knows."""
        now, back = self.pg.now, bool(self.pg.unflushed) or self.pg.before is not None
        lanes: list[Any] = []
        for lane, row in zip(worker.lanes, now.lanes, strict=True):
            if lane is None:
                lanes.append(None)
            else:
                distance = lane.epoch - row.epoch
                lanes.append((distance if back else distance == 0, lane[1], lane[3:]))
        unconfirmed = []
        for number, epoch in worker.unconfirmed:
            known = worker.lanes[number]
            unconfirmed.append((number, known is not None and known.epoch == epoch))
        valid = [(worker.base, which) in self.kafka.valid for which in range(self.producers)]
        own = (worker.phase, worker.which, worker.rows, worker.queue, worker.stale, worker.refused)
        return (*own, tuple(lanes), tuple(unconfirmed), tuple(valid), len(worker.fenced), len(worker.abandoned))

    def _part_of_servers(self) -> tuple[Any, ...]:
        """Return what Postgres and Kafka add to the key, but for the ids that they know."""
        now = self.pg.now
        parts: list[Any] = [now[1:]]
        for tables in self._tables():
            for old, new in zip(tables.lanes, now.lanes, strict=True):
                parts.append((old.epoch - new.epoch, old.leased, old.last_batch))
            if tables is not now:
                parts.append(tables[1:])
        for log in self.kafka.logs:
            for entries in log:
                for record, transaction, taken in entries:
                    parts.append((record, taken, transaction and transaction[1]))
                parts.append(None)
        return tuple(parts)

    def _same_ids(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """Return all ids that the state knows, numbered as they are met; the parts say how many there are of what."""
        bases: list[Base | None] = []
        for one in order:
            worker = self.workers[one]
            bases += (worker.base, *sorted(worker.fenced), *sorted(worker.abandoned))
            bases += [lane.former for lane in worker.lanes if lane is not None]
        for tables in self._tables():
            bases += [row.base for row in tables.lanes]
        for log in self.kafka.logs:
            for entries in log:
                bases += [entry.transaction[0] for entry in entries if entry.transaction]
        numbers: dict[Base | None, int] = {None: 0}
        same = [numbers.setdefault(base, len(numbers)) for base in bases]
        for base, which in sorted(self.kafka.under_way):
            same += (numbers.setdefault(base, len(numbers)), which)
        return tuple(same)

    def _tables(self) -> tuple[Tables, ...]:
        before = (self.pg.before,) if self.pg.before is not None else ()
        return (self.pg.now, *self.pg.unflushed, *before)


def told(worker: WorkerModel, request: Request) -> str:
    """Return what a worker does, for the trace of a run."""
    lanes = ", ".join("LMNO"[lane] for lane in request.lanes)
    producer = f"{worker.base}.{worker.which}"
    match request.name:
        case "init":
            return f"init_transactions({producer})"
        case "replace":
            return f"init_transactions({producer}), after a refused message"
        case "fence":
            lane = worker.lanes[request.lanes[0]]
            assert lane
            return f"fences {lane.former}.{worker.next_fenced(lane)}, for {lanes}"
        case "turn":
            how = "reads" if SPLIT_FETCH in worker.mutations else "settles and reads"
            return f"{how} {lanes or 'nothing'}"
        case "send" if worker.queue:
            sent = [f"marker {what.batch}" if isinstance(what, Marker) else what for _, what in worker.queue[0]]
            return f"produces {', '.join(sent)} under {producer}"
        case "send":
            return f"EndTxn({producer}, commit)"
    return f"{_REQUESTS[request.name]} {lanes}".rstrip()


_REQUESTS: Final = {
    "acquire": "acquires",
    "read": "reads the marker of",
    "adopt": "settles the marker and writes its id into the row of",
    "renew": "takes a new base id",
    "secure": "settles, and what it read is durable",
    "release": "releases",
}
