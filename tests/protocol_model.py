"""The exactly-once protocol of one lane as a model small enough to search: every order of steps, every fault.

``FakePostgres`` and ``FakeKafka`` keep what the protocol counts on and nothing else; ``RelayModel`` is a relay that
takes one step at a time; ``World`` puts them together, applies actions and says what is wrong (``Violation``).
``explore`` tries all orders of actions, breadth first, so the trace that it finds is a shortest one. What is decided
from a marker is decided by the real ``relay.marker.resume``.

Each step is one request that Postgres or Kafka sees. A relay that is slow, stopped (SIGSTOP) or cut off is a relay
whose next step comes late, so the search covers that without a name for it. What can go wrong:

| action            | stands for                                                                             |
|-------------------|----------------------------------------------------------------------------------------|
| kill              | kill -9 of a relay; it starts again with an empty memory                               |
| expire            | the lease runs out by the database's clock, whether its holder is alive or not         |
| crash, keep n     | Postgres restarts; of the commits not yet flushed the first n survive                  |
| step: lost        | the request is carried out and its answer is lost (also: broker or database died)      |
| step: delayed     | EndTxn(commit) times out and is still under way: it may arrive later, or never         |
| step: doubled     | EndTxn(commit) was sent twice by the client: one is answered, the other arrives later  |
| late              | the EndTxn that is under way arrives                                                   |
| timeout           | the coordinator aborts the open transaction and fences its producer                    |
| written           | the coordinator has written the commit markers: readers see a transaction it had taken |

Not in the model: tampering (a state topic that was deleted, a restored dump), a standby that is behind, the spread of
lanes over relays. The first two are what ``StateLost`` is for, so here it must never be raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

from relay.marker import Marker, StateLost, resume

SYSTEM: Final = "7300000000000000001"
ANSWERS: Final = ("ok", "lost", "delayed", "doubled")

_FAULTS: Final = {"kill", "expire", "crash", "timeout"}

_REQUESTS: Final = {
    "acquire": "takes the lane",
    "init": "init_transactions",
    "read": "reads the marker",
    "adopt": "settles the marker's rows",
    "fetch": "settles and fetches",
    "secure": "settles, and what it fetched is durable",
}

# The fetch as relay/polling.py does it: one transaction reads, the next checks the epoch, settles and is the barrier.
# A crash between the two breaks the connection, so what was read is forgotten.
SPLIT_FETCH: Final = "split_fetch"

# What a relay could get wrong. The first five are the protocol's load-bearing walls; the others stand beside them.
MUTATIONS: Final = {
    "marker_first": "the marker is committed in a transaction of its own, before the events",
    "no_epoch_recheck": "no transaction in Postgres asks for the epoch; a fetched batch is sent by the next producer",
    "no_flush_barrier": "the fetch commits without waiting for the flush",
    "settle_before_ack": "rows are deleted when they are fetched",
    "reuse_producer": "after an unclean commit the same producer goes on",
    "trust_doubled_commit": "a commit that raised nothing is clean, though EndTxn was sent twice",
    "no_epoch_in_adopt": "taking over does not ask for the epoch",
    "no_epoch_in_fetch": "fetching does not ask for the epoch",
    "resend_blind": "after a failure the fetched batch is sent again without reading the marker",
    "read_before_init": "the marker is read before the older producer is fenced",
    "adopt_without_settling": "taking over does not delete the marker's rows",
    "async_acquire": "the lane is taken with synchronous_commit=off",
    "unnoticed_crash": "reads, and makes durable in the next transaction, on a connection that outlives a crash",
}


class Violation(AssertionError):
    """The guarantee is broken: an event is on the topic that must not be, or one is lost."""


class Fenced(Exception):
    """A newer producer, or a time-out, has taken this producer's right to write."""


class Row(NamedTuple):
    id: int
    event_id: str
    key: str


class Tables(NamedTuple):
    """Everything that Postgres has committed, and the writers that have drawn an id and not committed yet.

    ``history`` is the business's side of the story: every event whose transaction committed, in commit order. Rows
    leave ``rows`` when they are settled, and nothing but a crash takes an entry out of ``history``.
    """

    next_id: int = 1
    writing: tuple[Row, ...] = ()
    rows: tuple[Row, ...] = ()
    history: tuple[Row, ...] = ()
    epoch: int = 0
    leased: bool = False
    last_batch: int | None = None


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
    with ``flush=True`` makes itself and everything before it durable. Ids of lost rows are drawn again.
    """

    fields = ("now", "unflushed")

    def __init__(self) -> None:
        self.now = Tables()
        self.unflushed: tuple[Tables, ...] = ()

    @property
    def durable(self) -> Tables:
        return self.unflushed[0] if self.unflushed else self.now

    def commit(self, flush: bool = True, **changes: Any) -> None:
        self.unflushed = () if flush else (*self.unflushed, self.now)
        self.now = self.now._replace(**changes)

    def crash(self, keep: int) -> None:
        """Lose the unflushed commits but the first ``keep``, and every transaction that was open."""
        if keep < len(self.unflushed):
            self.now = self.unflushed[keep]
        self.now = self.now._replace(writing=())
        self.unflushed = ()

    def begin_write(self, event_id: str, key: str) -> None:
        row = Row(self.now.next_id, event_id, key)
        self.now = self.now._replace(next_id=row.id + 1, writing=(*self.now.writing, row))

    def commit_write(self, row: Row, flush: bool) -> None:
        now = self.now
        self.commit(
            flush,
            writing=tuple(other for other in now.writing if other != row),
            rows=tuple(sorted((*now.rows, row))),
            history=(*now.history, row),
        )

    def acquire(self, flush: bool) -> int | None:
        if self.now.leased:
            return None
        self.commit(flush, epoch=self.now.epoch + 1, leased=True)
        return self.now.epoch

    def expire(self) -> None:
        """Time passes: nothing is written."""
        self.now = self.now._replace(leased=False)

    def rows_without(self, batch: Marker) -> tuple[Row, ...]:
        gone = set(zip(batch.positions, batch.event_ids, strict=True))
        return tuple(row for row in self.now.rows if (row.id, row.event_id) not in gone)


class FakeKafka(_Saved):
    """One transactional.id: the current producer, its open transaction, and what a read_committed reader sees.

    EndTxn(commit) is answered once the coordinator has noted it (``taken``); from then on it will be committed
    whatever dies. The next transaction and ``init_transactions`` wait until it is. The topic of events is ``topic``;
    the compacted state partition is its last record, ``marker``. ``under_way`` is an EndTxn(commit) of the current
    producer that is still on the network: one of an older producer is refused when it arrives, so it is forgotten.
    """

    fields = ("producer", "open", "taken", "topic", "marker", "under_way")

    def __init__(self) -> None:
        self.producer = 0
        self.open: tuple[str | Marker, ...] = ()
        self.taken: tuple[str | Marker, ...] = ()
        self.topic: tuple[str, ...] = ()
        self.marker: Marker | None = None
        self.under_way = False

    @property
    def promised(self) -> tuple[str, ...]:
        """Every event that readers see or will see."""
        return (*self.topic, *(record for record in self.taken if isinstance(record, str)))

    def init_transactions(self) -> int:
        self.written()
        self.fence()
        return self.producer

    def fence(self) -> None:
        """Abort the open transaction; no request of the producer that had it is obeyed any more."""
        self.open = ()
        self.under_way = False
        self.producer += 1

    def produce(self, producer: int, record: str | Marker) -> None:
        self._check(producer)
        self.written()
        self.open = (*self.open, record)

    def end_transaction(self, producer: int, answer: str) -> None:
        self._check(producer)
        if answer != "delayed":
            self._take()
        if answer in {"delayed", "doubled"}:
            self.under_way = True

    def abort(self, producer: int) -> None:
        self._check(producer)
        self.open = ()

    def late(self) -> None:
        """EndTxn arrives late. It names a producer, not a transaction, so it ends whichever is open now."""
        self.under_way = False
        if self.open:
            self._take()

    def written(self) -> None:
        self.topic = self.promised
        for record in self.taken:
            if isinstance(record, Marker):
                self.marker = record
        self.taken = ()

    def _take(self) -> None:
        self.taken, self.open = (*self.taken, *self.open), ()

    def _check(self, producer: int) -> None:
        if producer != self.producer:
            raise Fenced


class RelayModel(_Saved):
    """A relay that follows the protocol, one request a step; ``phase`` names the step that comes next.

    acquire → init → read → adopt → fetch → send … send → (EndTxn) → fetch → …. ``batch`` is the marker of the batch
    that was fetched last, ``queue`` what is still to be produced of it, ``number`` the batch settled last, ``settle``
    the batch that Kafka has committed and Postgres does not know of, ``rows`` what was read and may not be
    durable yet.
    """

    fields = ("epoch", "producer", "phase", "marker", "number", "batch", "queue", "settle", "rows")

    def __init__(self, pg: FakePostgres, kafka: FakeKafka, batch_size: int, mutations: frozenset[str]) -> None:
        self.pg = pg
        self.kafka = kafka
        self.batch_size = batch_size
        self.mutations = mutations
        self.kill()

    def kill(self) -> None:
        self.phase = "acquire"
        self.epoch = 0
        self.producer = 0
        self.marker: Marker | None = None
        self.number = 0
        self.batch: Marker | None = None
        self.queue: tuple[str | Marker, ...] = ()
        self.settle: Marker | None = None
        self.rows: tuple[Row, ...] = ()

    def disconnect(self) -> None:
        """Postgres crashed. Between transactions nobody misses a connection, but while rows are in hand it counts."""
        if self.phase == "secure" and "unnoticed_crash" not in self.mutations:
            self.rows = ()
            self.settle = None
            self._again("init")

    def answers(self) -> tuple[str, ...]:
        """Which faults the next step's request can meet."""
        if self.phase == "acquire" and self.pg.now.leased:
            return ()
        if self.phase == "send":
            return ("ok",) if self.queue else ANSWERS
        return ("ok",) if self.phase == "read" else ("ok", "lost")

    def next_request(self) -> str:
        if self.phase != "send":
            return _REQUESTS[self.phase]
        if not self.queue:
            return "EndTxn(commit)"
        record = self.queue[0]
        return f"produces {record}" if isinstance(record, str) else f"produces marker {record.batch}"

    def step(self, answer: str = "ok") -> None:
        """Take one step. A request without an answer is made again, but EndTxn: that one makes the commit unclean."""
        if self.phase == "send":
            self._send(answer)
            return
        before = self.save()
        getattr(self, f"_{self.phase}")()
        if answer == "lost":
            self.load(before)

    def _acquire(self) -> None:
        epoch = self.pg.acquire(flush="async_acquire" not in self.mutations)
        if epoch is not None:
            self.epoch = epoch
            self.phase = "read" if "read_before_init" in self.mutations else "init"

    def _init(self) -> None:
        self.producer = self.kafka.init_transactions()
        if self.batch and self.mutations & {"resend_blind", "no_epoch_recheck"}:
            self._start(self.batch)
        else:
            self.phase = "adopt" if "read_before_init" in self.mutations else "read"

    def _read(self) -> None:
        self.marker = self.kafka.marker
        self.phase = "init" if "read_before_init" in self.mutations else "adopt"

    def _adopt(self) -> None:
        if self._lost("no_epoch_in_adopt"):
            return
        marker = resume(0, self.pg.now.last_batch, self.marker, SYSTEM, 1)
        if marker is None:
            self._start(self._marker(1, ()))
            return
        rows = self.pg.rows_without(marker)
        if "adopt_without_settling" in self.mutations:
            rows = self.pg.now.rows
        elif marker.batch != self.pg.now.last_batch and len(self.pg.now.rows) - len(rows) != len(marker.positions):
            raise StateLost(f"rows of batch {marker.batch} are missing: {self.pg.now.rows}")
        self.pg.commit(rows=rows, last_batch=marker.batch, leased=True)
        self.marker = None
        self.number = marker.batch
        self.phase = "fetch"

    def _fetch(self) -> None:
        rows = self.pg.rows_without(self.settle) if self.settle else self.pg.now.rows
        self.rows = rows[: self.batch_size]
        self.phase = "secure"
        if not self.mutations & {SPLIT_FETCH, "unnoticed_crash"}:
            self._secure()

    def _secure(self) -> None:
        if self._lost("no_epoch_in_fetch"):
            return
        changes: dict[str, Any] = {"leased": True}
        if self.settle:
            self.number = changes["last_batch"] = self.settle.batch
            changes["rows"] = self.pg.rows_without(self.settle)
            self.settle = None
        if "settle_before_ack" in self.mutations:
            changes["rows"] = tuple(row for row in changes.get("rows", self.pg.now.rows) if row not in self.rows)
        self.pg.commit(flush="no_flush_barrier" not in self.mutations, **changes)
        batch, self.rows = self.rows, ()
        self.phase = "fetch"
        if batch:
            self._start(self._marker(self.number + 1, batch))

    def _send(self, answer: str) -> None:
        assert self.batch is not None
        trusting = self.mutations & {"reuse_producer", "trust_doubled_commit"}
        try:
            if self.queue:
                self.kafka.produce(self.producer, self.queue[0])
                self.queue = self.queue[1:]
                if "marker_first" not in self.mutations or len(self.queue) != len(self.batch.event_ids):
                    return
            self.kafka.end_transaction(self.producer, answer)
            if answer in {"lost", "delayed"} or (answer == "doubled" and not trusting):
                self._unclean()
                return
        except Fenced:
            self._again("init")
            return
        if not self.queue:
            self.settle, self.batch = self.batch, None
            self.phase = "fetch"

    def _unclean(self) -> None:
        if "reuse_producer" in self.mutations:
            self.kafka.abort(self.producer)
            self._again("read")
        else:
            self._again("init")

    def _again(self, phase: str) -> None:
        """Begin again with what Kafka and Postgres know; nothing that this relay remembers counts, but its epoch."""
        if not self.mutations & {"resend_blind", "no_epoch_recheck"}:
            self.batch = None
        self.queue = ()
        self.phase = "read" if "read_before_init" in self.mutations else phase

    def _lost(self, mutation: str) -> bool:
        if self.mutations & {mutation, "no_epoch_recheck"} or self.pg.now.epoch == self.epoch:
            return False
        self.kill()
        return True

    def _start(self, batch: Marker) -> None:
        self.batch = batch
        self.queue = (batch, *batch.event_ids) if "marker_first" in self.mutations else (*batch.event_ids, batch)
        self.phase = "send"

    def _marker(self, number: int, rows: tuple[Row, ...]) -> Marker:
        ids, event_ids = tuple(row.id for row in rows), tuple(row.event_id for row in rows)
        return Marker(number, 0, SYSTEM, 1, ids, event_ids)


class Action(NamedTuple):
    """One thing that happens; ``who`` is a relay's number, an event id, a key, or how much a crash keeps."""

    name: str
    who: int | str = ""
    how: str = ""

    @property
    def fault(self) -> bool:
        """Whether this is one of the faults that a search is given a number of; an unheld lease runs out anyway."""
        return (self.name in _FAULTS and self.how != "unheld") or (self.name == "step" and self.how != "ok")


@lru_cache(maxsize=10_000)
def _wrong(published: tuple[str, ...], durable: tuple[Row, ...]) -> str:
    """Say what is wrong with this topic if these transactions are durable."""
    if len(published) != len(set(published)):
        return f"twice on the topic: {', '.join(published)}"
    history: dict[str, list[str]] = {}
    keys: dict[str, str] = {}
    for row in durable:
        history.setdefault(row.key, []).append(row.event_id)
        keys[row.event_id] = row.key
    if phantoms := sorted(set(published).difference(keys)):
        return f"on the topic, but their transactions are not durable: {', '.join(phantoms)}"
    for key, written in history.items():
        sent = [event_id for event_id in published if keys[event_id] == key]
        if sent != written[: len(sent)]:
            return f"key {key} is out of order on the topic: {', '.join(sent)}"
    return ""


class World:
    """One database, one transactional.id, some relays; writers of one key exclude each other."""

    def __init__(self, relays: int, batch_size: int = 2, mutations: Iterable[str] = ()) -> None:
        self.pg = FakePostgres()
        self.kafka = FakeKafka()
        self.relays = [RelayModel(self.pg, self.kafka, batch_size, frozenset(mutations)) for _ in range(relays)]
        self.begun = 0

    def save(self) -> tuple[Any, ...]:
        return self.pg.save(), self.kafka.save(), tuple(relay.save() for relay in self.relays), self.begun

    def load(self, saved: tuple[Any, ...]) -> None:
        pg, kafka, relays, self.begun = saved
        self.pg.load(pg)
        self.kafka.load(kafka)
        for relay, state in zip(self.relays, relays, strict=True):
            relay.load(state)

    def writable(self, key: str) -> bool:
        return all(row.key != key for row in self.pg.now.writing)

    def apply(self, action: Action) -> None:
        """Let it happen, then look whether the guarantee still holds."""
        getattr(self, f"_{action.name}")(action.who, action.how)
        self.check()

    def _begin(self, key: str, _: str) -> None:
        self.begun += 1
        self.pg.begin_write(f"{key}{self.begun}", key)

    def _commit(self, event_id: str, how: str) -> None:
        row = next(row for row in self.pg.now.writing if row.event_id == event_id)
        self.pg.commit_write(row, flush=how != "async")

    def _step(self, relay: int, answer: str) -> None:
        try:
            self.relays[relay].step(answer)
        except StateLost as error:
            raise Violation(f"relay {relay} stops, though nobody tampered with anything: {error}") from error

    def _kill(self, relay: int, _: str) -> None:
        self.relays[relay].kill()

    def _expire(self, *_: object) -> None:
        self.pg.expire()

    def _crash(self, keep: int, _: str) -> None:
        self.pg.crash(keep)
        for relay in self.relays:
            relay.disconnect()

    def _timeout(self, *_: object) -> None:
        self.kafka.fence()

    def _late(self, *_: object) -> None:
        self.kafka.late()

    def _written(self, *_: object) -> None:
        self.kafka.written()

    def possible(self, keys: str) -> Iterator[Action]:
        """Everything that can happen now, if ``keys`` are the keys that are written, in this order."""
        if self.begun < len(keys) and self.writable(keys[self.begun]):
            yield Action("begin", keys[self.begun])
        for row in self.pg.now.writing:
            yield Action("commit", row.event_id, "async")
        for number, relay in enumerate(self.relays):
            for answer in relay.answers():
                yield Action("step", number, answer)
            if relay.phase != "acquire":
                yield Action("kill", number)
        if self.pg.now.leased:
            held = any(relay.epoch == self.pg.now.epoch for relay in self.relays)
            yield Action("expire", how="" if held else "unheld")
        for keep in range(len(self.pg.unflushed)):
            yield Action("crash", keep)
        yield from self._possible_in_kafka()

    def _possible_in_kafka(self) -> Iterator[Action]:
        if self.kafka.open:
            yield Action("timeout")
        if self.kafka.under_way:
            yield Action("late")
        if self.kafka.taken:
            yield Action("written")

    def tell(self, action: Action) -> str:
        """Say in words what the action is about to do."""
        name, who, how = action
        if name == "step":
            fate = "" if how == "ok" else f", answer {how}" if how == "lost" else f", {how}"
            return f"relay {who} {self.relays[int(who)].next_request()}{fate}"
        return " ".join(str(part) for part in action if part != "")

    def check(self) -> None:
        """Nothing twice, nothing that no durable transaction wrote, in order by key, nothing gone from both sides."""
        published = self.kafka.promised
        if wrong := _wrong(published, self.pg.durable.history):
            raise Violation(wrong)
        self._check_lost(set(published))

    def _check_lost(self, seen: set[str]) -> None:
        kept = seen.union(row.event_id for row in self.pg.now.rows)
        kept.update(*(relay.batch.event_ids for relay in self.relays if relay.batch))
        if lost := [row.event_id for row in self.pg.now.history if row.event_id not in kept]:
            raise Violation(f"lost, neither in the table nor on the topic: {lost}")

    def drain(self) -> None:
        """Let one healthy relay work off everything, then demand that every event is on the topic, once."""
        for row in self.pg.now.writing:
            self.apply(Action("commit", row.event_id))
        for number in range(len(self.relays)):
            self.apply(Action("kill", number))
        self.apply(Action("expire"))
        for _ in range(14 + 5 * len(self.pg.now.rows)):
            self.apply(Action("step", 0))
        self.apply(Action("written"))
        if self.pg.now.rows:
            raise Violation(f"a healthy relay leaves rows behind: {self.pg.now.rows}")
        if sorted(self.kafka.topic) != sorted(row.event_id for row in self.pg.now.history):
            raise Violation(f"on the topic: {self.kafka.topic}, written: {self.pg.now.history}")


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


def explore(
    keys: str, *, relays: int, batch_size: int, faults: int, mutations: Iterable[str] = (), most: int = 1_000_000
) -> Search:
    """Try every order of actions with at most ``faults`` faults, breadth first, until a violation or the end.

    A state is remembered by its hash. Relays are alike, so states that differ only in their numbers are one state.
    """
    world = World(relays, batch_size, mutations)
    start = world.save()
    parents: dict[int, tuple[int, Action] | None] = {_key(start, faults): None}
    frontier = [(start, faults)]
    depth = steps = 0
    while frontier:
        depth += 1
        following = []
        for saved, left in frontier:
            moved = False
            world.load(saved)
            here = _key(saved, left)
            for action in list(world.possible(keys)):
                if action.fault and not left:
                    continue
                steps += 1
                world.load(saved)
                violation = ""
                try:
                    world.apply(action)
                except Violation as error:
                    violation = str(error)
                reached = world.save()
                remaining = left - action.fault
                there = _key(reached, remaining)
                if violation:
                    trace = _trace(world, start, _actions(parents, here, action))
                    return Search(len(parents), steps, depth, False, trace, violation)
                moved = moved or (there != here and not action.fault)
                if there not in parents:
                    parents[there] = (here, action)
                    following.append((reached, remaining))
            world.load(saved)
            if not moved and world.pg.now.rows:
                trace = _trace(world, start, _actions(parents, here))
                return Search(len(parents), steps, depth, False, trace, f"stuck with {world.pg.now.rows}")
        frontier = following
        if len(parents) > most:
            return Search(len(parents), steps, depth, False)
    return Search(len(parents), steps, depth, True)


def _key(saved: tuple[Any, ...], faults: int) -> int:
    """Name a state by its hash. Relays are alike, and of an epoch it only counts whether it is the current one.

    With unflushed commits an older epoch may come back, so then all of them count.
    """
    (tables, unflushed), (producer, *kafka), relays, begun = saved
    current = 0 if unflushed else tables.epoch
    if current:
        tables = tables._replace(epoch=0)
    names = []
    for relay in relays:
        epoch = relay[0] == current if current else relay[0]
        names.append(hash((epoch, relay[1] == producer, relay[2:])))
    names.sort()
    return hash((tables, unflushed, tuple(kafka), tuple(names), begun, faults))


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
