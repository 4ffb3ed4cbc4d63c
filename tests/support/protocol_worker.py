"""The worker of the protocol's model. It sends one request a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from protocol_servers import (
    SYSTEM,
    Base,
    FakeKafka,
    FakePostgres,
    Fenced,
    LaneRow,
    Row,
    Saved,
    TransactionalId,
    without,
)
from protocol_variants import ANSWERS, CONCURRENT, EXACTLY, PRODUCE_FIRST, RENEW, REPLACE, SPLIT_FETCH

from relay.core.marker import Identity, Marker, StateLost, resume

if TYPE_CHECKING:
    from protocol_model import World


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


class WorkerModel(Saved):
    """A worker that follows the protocol, one request a step.

    ``phase`` is that of the turn: init (twice) → idle → (secure) → send → idle. Lanes are taken and released while it
    is idle. ``rows`` is what was read and may not be durable yet, ``queue`` what is still to be produced.
    ``unconfirmed`` are the lanes and epochs of a turn that is being produced while its statement is still to come.
    ``refused`` are the producers that are to be initialized again, because the broker has refused a message of theirs.
    """

    fields = ("base", "phase", "which", "refused", "lanes", "rows", "queue")
    fields += ("stale", "fenced", "unconfirmed", "abandoned")

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
        self.refused: frozenset[int] = frozenset()
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

    def requests(self) -> Iterator[Request]:  # noqa: C901 - one case for each phase
        if self.phase == "init":
            yield Request("init")
            if RENEW in self.mutations and any(map(self.kafka.busy, self._own_ids())):
                yield Request("renew")
            return
        if self.phase == "secure":
            yield Request("secure")
            return
        if self.which in self.refused and self.phase in {"idle", "send"}:
            yield Request("replace")
        if self.phase == "send":
            if self.which in self.refused:
                return
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
            if len(self.refused) < self.producers:
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
            if self.queue:
                return ("ok", "failed", "refused") if REPLACE in self.mutations else ("ok", "failed")
            return ANSWERS
        if request.name == "read" or (request.name == "turn" and SPLIT_FETCH in self.mutations):
            return ("ok",)
        return ("ok", "lost")

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

    def _replace(self) -> None:
        assert self.base is not None
        self.kafka.init_transactions((self.base, self.which))
        self.refused -= {self.which}

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

    def next_fenced(self, lane: Lane) -> int:
        return 1 if "fence_second_only" in self.mutations else lane.fenced

    def _fence(self, lanes: tuple[int, ...]) -> None:
        """Fence one id; it counts for all lanes that were acquired before and that name it."""
        chosen = self.lanes[lanes[0]]
        assert chosen
        assert chosen.former is not None
        self.kafka.fence((chosen.former, self.next_fenced(chosen)))
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
        marker = resume(number, row.last_batch, lane.marker, Identity(SYSTEM, 1, None))
        if marker is None:
            return self.pg.now.rows, None
        rows = without(self.pg.now.rows, marker)
        missing = len(self.pg.now.rows) - len(rows) != len(marker.positions)
        if "adopt_without_settling" in self.mutations:
            rows = self.pg.now.rows
        elif row.last_batch != marker.batch and missing:
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
        return without((row for row in self.pg.now.rows if row.lane == number), lane.pending)

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
            rows = without(rows, lane.pending)
            last = self._next(lane)
            settled = settled or lane.pending is not None
            batch = lane.batch
            if not behind:
                fetched = read[number]
                batch = None if fetched is None else self._batch(last, fetched)
            if batch and "settle_before_ack" in self.mutations:
                rows = without(rows, batch)
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
        if self.which in self.refused and "resend_refused" not in self.mutations:
            self.which = (self.which + 1) % self.producers
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
                if answer == "refused":
                    self.kafka.abort(transaction)
                    self._refused()
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

    def _refused(self) -> None:
        """Nothing of the turn is published, nor will be: go on with the lanes, and with the other producer."""
        self.refused |= {self.which}
        if "resend_refused" in self.mutations:
            self._start()
            return
        self.queue, self.unconfirmed = (), ()
        self._each_held(lambda lane: lane._replace(batch=None))
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
        self.which, self.refused = 0, frozenset()
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
            rows = without(self.pg.now.rows, lane.pending)
            freed = self.pg.with_lane(number, leased=False, base=None, last_batch=self._next(lane))
            self.pg.commit(rows=rows, lanes=freed)
        self._set(number, None)

    def _set(self, number: int, lane: Lane | None) -> None:
        self.lanes = (*self.lanes[:number], lane, *self.lanes[number + 1 :])

    def _each_held(self, change: Any) -> None:
        self.lanes = tuple(change(lane) if lane and lane.stage == "held" else lane for lane in self.lanes)
