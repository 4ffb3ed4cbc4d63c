"""A worker that streams, loop and all, on real Postgres; Kafka is a list in memory that knows transactions.

Real brokers and real relays are in acceptance/test_wal_failures.py.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import psycopg
import pytest
from standby import Standby
from support import backlog, wait_until

from outbox import Event, Outbox
from outbox._app import migrate as db
from outbox._message import message_prefix
from outbox.errors import ConfigurationError, OutboxError, SchemaError
from relay import loop
from relay.config import SourceKind
from relay.database import Connector
from relay.kafka.routing import OnFailure, Route, Router
from relay.kafka.transactional import reached
from relay.lanes import LaneTable
from relay.lease import HeldLanes, Lease
from relay.loop import LoopSettings, WorkerLoop
from relay.marker import Identity, Marker, StateLost
from relay.operations import wal_setup as cdc
from relay.operations.dead_letters import DeadLetters, Selection
from relay.operations.wal_setup import Cdc, CdcRefused
from relay.ports import (
    PUBLISHED,
    Batches,
    BatchRefused,
    Claim,
    Completed,
    Confirm,
    Failed,
    Kind,
    LaneBusy,
    LaneLost,
    Receipt,
    Refused,
    Result,
    Sent,
    Unavailable,
)
from relay.position import WalPosition
from relay.retries import FailurePolicy, Failures
from relay.wal import source as wal_source
from relay.wal.lane import CatchingUp
from relay.wal.lane_hash import lane_of
from relay.wal.replication import Replication
from relay.wal.session import Stream, StreamLimits
from relay.wal.slot import IDLE_BYTES, SlotNames, heartbeat_prefix
from relay.wal.source import StreamSource

BLOCK = Router({"Order": Route("orders"), "Bill": Route("bills")})
SKIP = Router({"Order": Route("orders", OnFailure.SKIP)})
MANY = 1000


class Killed(BaseException):
    """The relay is gone in this moment."""


class Kafka:
    """What is committed, and the last marker of every lane. Names and keys in ``bad`` are refused.

    ``missing`` are aggregate types whose topic is missing, ``stuck`` lanes that can't be taken over. ``kill`` is asked
    at "before" and "after" a turn is committed, and at "between" two lanes of a turn without a transaction; ``fail`` is
    asked for the error of a turn ("before"), of which an acknowledgement is lost ("after"), and whether a key's events
    fail (its name).
    """

    def __init__(self) -> None:
        self.published: list[Claim] = []
        self.markers: dict[int, Marker] = {}
        self.bad: set[str] = set()
        self.missing: set[str] = set()
        self.stuck: set[int] = set()
        self.away = False
        self.kill: Callable[[str], bool] = lambda _point: False
        self.fail: Callable[[str], Unavailable | None] = lambda _point: None

    def names(self, key: str | None = None) -> list[str]:
        return [claim.event_type for claim in self.published if key in {None, claim.aggregate_id}]


class Producer:
    """A worker's publisher, with markers (exactly-once) or without. Follows the two in relay.kafka."""

    def __init__(self, kafka: Kafka, source: StreamSource, *, once: bool) -> None:
        self._kafka = kafka
        self._store = source.store
        self._once = once
        self._joined: dict[int, tuple[Lease, Identity]] = {}
        self._paused: set[str] = set()
        self._closed = False

    def join(self, leases: Sequence[Lease]) -> Mapping[int, OutboxError]:
        stuck: dict[int, OutboxError] = {
            lease.lane: StateLost(f"lane {lease.lane}") for lease in leases if lease.lane in self._kafka.stuck
        }
        leases = [lease for lease in leases if lease.lane not in stuck]
        if not self._once or not leases:
            return stuck
        identity, lost = self._store.identity(leases)
        assert (identity, lost) != (None, {})
        failed = {**lost, **stuck}
        for lease in leases:
            if lease.lane in failed:
                continue
            adopted, identity = self._store.adopt(lease, self._kafka.markers.get(lease.lane), "me")
            self._joined[lease.lane] = lease, identity
            if adopted is None:
                self._kafka.markers[lease.lane] = self._marker(lease.lane, 1, ())
                self._store.adopt(lease, self._kafka.markers[lease.lane], "me")
        return failed

    def _marker(self, lane: int, batch: int, sent: Sequence[Claim], up_to: WalPosition | None = None) -> Marker:
        lease, identity = self._joined[lane]
        return Marker(
            batch,
            lease.epoch,
            identity.system_identifier,
            identity.timeline,
            tuple(claim.position for claim in sent),
            tuple(claim.event_id for claim in sent),
            up_to,
        )

    def publish(self, batches: Batches, _confirm: Confirm | None = None) -> Sent:
        kafka = self._kafka
        assert not self._closed
        assert all(batches.values())
        assert all(claim.lane == lane for lane, claims in batches.items() for claim in claims)
        if kafka.away:
            return Failed(Unavailable("away"))
        if kafka.kill("before"):
            raise Killed
        blamed = [lane for lane, claims in batches.items() if any("whole" in claim.event_type for claim in claims)]
        if blamed:
            return Failed(BatchRefused("something in it"), blamed=blamed)
        if failure := kafka.fail("before"):
            return Failed(failure)
        sent = self._in_one_transaction(batches) if self._once else self._one_by_one(batches)
        if kafka.kill("after"):
            raise Killed
        return sent

    def _in_one_transaction(self, batches: Batches) -> Sent:
        kafka = self._kafka
        divided = {lane: self._divided(claims) for lane, claims in batches.items()}
        gaps = [
            lane
            for lane, claims in batches.items()
            if len(divided[lane][0]) < len(claims) and any(not claim.has_row for claim in claims)
        ]
        if any(sent for sent, _, _ in divided.values()) and gaps:
            return Completed({lane: Receipt(needs_rows=True) for lane in gaps}, publisher_unusable=True)
        receipts = {}
        for lane, (sent, refused, left_out) in divided.items():
            batch = None
            if sent:
                batch = kafka.markers[lane].batch + 1
                kafka.markers[lane] = self._marker(lane, batch, sent, reached(batches[lane], sent))
                kafka.published += sent
            receipts[lane] = Receipt([(claim, PUBLISHED) for claim in sent] + refused, batch, left_out=left_out)
        if failure := kafka.fail("after"):
            # Committed, and nobody knows.
            return Failed(failure)
        return Completed(receipts)

    def _one_by_one(self, batches: Batches) -> Sent:
        kafka = self._kafka
        receipts = {}
        failure = None
        for lane, claims in batches.items():
            sent, refused, left_out = self._divided(claims)
            failing = {key for key in {claim.aggregate_id for claim in claims} if (error := kafka.fail(key))}
            failure = failure or (error if failing else None)
            sent = [claim for claim in sent if claim.aggregate_id not in failing]
            refused = [result for result in refused if result[0].aggregate_id not in failing]
            kafka.published += sent
            results = [(claim, PUBLISHED) for claim in sent] + refused
            receipts[lane] = Receipt(results, left_out=left_out and failure is None)
            if kafka.kill("between"):
                raise Killed
        return Completed(receipts) if failure is None else Failed(failure, receipts)

    def _divided(self, claims: Sequence[Claim]) -> tuple[list[Claim], list[Result], bool]:
        sent: list[Claim] = []
        refused: list[Result] = []
        waiting: set[str] = set()
        left_out = False
        for claim in claims:
            if claim.aggregate_id in waiting:
                continue
            if claim.aggregate_type in self._kafka.missing:
                waiting.add(claim.aggregate_id)
                self._paused.add(claim.aggregate_type)
                left_out = True
            elif self._kafka.bad & {claim.event_type, claim.aggregate_id}:
                waiting.add(claim.aggregate_id)
                refused.append((claim, Refused("bad")))
            else:
                sent.append(claim)
        return sent, refused, left_out

    def paused(self) -> frozenset[Kind]:
        return frozenset((kind, False) for kind in self._paused & self._kafka.missing)

    def serve(self) -> None: ...

    def close(self) -> None:
        self._closed = True


class Seen:
    """What the loop tells."""

    def __init__(self) -> None:
        self.errors: list[tuple[Collection[int], Exception]] = []

    def published(self, count: int) -> None: ...
    def refused(self, lane: int, claim: Claim, reason: str) -> None: ...
    def unavailable(self, lanes: Collection[int], error: Exception, wait_seconds: float) -> None:
        self.errors.append((lanes, error))

    def recovered(self, lanes: Collection[int]) -> None: ...


class Outboxed:
    """An outbox read from the WAL, one relay of it at a time, and its worker's loop, turned by hand."""

    def __init__(self, url: str, name: str, lanes: int = 1) -> None:
        self.url = url
        self.names = SlotNames("outbox", name, "outbox_relay")
        self.lanes = lanes
        self.kafka = Kafka()
        self.dead: list[str] = []
        self.admin = psycopg.connect(url, autocommit=True)
        self.written: dict[str, list[str]] = defaultdict(list)
        self.loop: WorkerLoop | None = None
        self.held = HeldLanes()
        self.only: Collection[int] = ()
        self.seen = Seen()
        self.stream: Stream | None = None
        self.sources: list[StreamSource] = []
        if lanes != 4:
            db.change_lanes(url, lanes)
        self.cdc = Cdc(self.admin, self.names)
        self.cdc.setup()
        self.cdc.switch(SourceKind.WAL)

    def relay(
        self,
        router: Router = BLOCK,
        attempts: int = MANY,
        *,
        once: bool = False,
        limits: StreamLimits | None = None,
        batch: int = 100,
        backoff: float = 600.0,
        **options: Any,
    ) -> None:
        """A relay takes all lanes. The one before is gone."""
        self.kill()
        self.admin.execute("UPDATE outbox.lanes SET lease_until = '-infinity'")
        connect = Connector(self.url, "relay")
        table = LaneTable(self.admin, "outbox", "me", "0", 600.0, "wal")
        leases = table.acquire_all()
        assert len(leases) == self.lanes
        self.stream = stream = Stream(
            self.names, lambda: Replication(self.url, "relay"), connect, leases, limits or StreamLimits()
        )
        failures = Failures("outbox", FailurePolicy(attempts, backoff, backoff), router)

        def source() -> StreamSource:
            made = StreamSource(
                connect,
                "outbox",
                failures,
                stream=stream,
                on_dead=lambda _lane, claim: self.dead.append(claim.event_type),
                **options,
            )
            self.sources.append(made)
            return made

        self.held, self.seen = HeldLanes(), Seen()
        self.held.give(leases)
        loop = self.loop = WorkerLoop(
            source,
            lambda made: Producer(self.kafka, made, once=once),
            held=self.held,
            stop=threading.Event(),
            observer=self.seen,
            settings=LoopSettings(batch_size=batch, min_backoff_seconds=0.001, max_backoff_seconds=0.001),
        )
        all_of = loop._sizes.limits
        loop._sizes.limits = lambda ready: {n: size for n, size in all_of(ready).items() if n in self.only}  # type: ignore[method-assign]

    @property
    def source(self) -> StreamSource:
        return self.sources[-1]

    def turn(self, *lanes: int) -> bool:
        """One turn of these lanes, or of all; what a relay waits for and tries again, it tries again.

        Returns whether anything moved.
        """
        loop = self.loop
        assert loop is not None
        self.only = lanes or range(self.lanes)
        try:
            return loop._turn()
        except (Unavailable, SchemaError) as error:
            loop._back_off(error)
            return True

    def turned(self, *lanes: int) -> bool:
        """One turn, of which only the effect counts."""
        self.turn(*lanes)
        return True

    def turns(self, count: int = 1) -> None:
        for _ in range(count):
            self.turn()

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Turn all lanes until it holds."""

        def turned() -> Any:
            self.turns()
            return condition()

        wait_until(turned, 60, what)

    def published(self, *names: str) -> None:
        """Turn until these are published, in this order, and then nothing else comes for a few turns."""
        self.until(lambda: len(self.kafka.names()) >= len(names), f"{names} after {self.kafka.names()}")
        self.turns(5)
        assert self.kafka.names() == list(names)

    def streams(self) -> None:
        """Turn until all lanes stream."""
        self.until(self.streaming, "the lanes to stream")

    def streaming(self, *lanes: int) -> bool:
        numbers = list(lanes or range(self.lanes))
        return self.rows("SELECT bool_and(streaming) FROM outbox.lanes WHERE lane = ANY(%s)", numbers) == [(True,)]

    def kill(self) -> None:
        """As by SIGKILL: no settling, no last feedback."""
        self.admin.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE application_name = 'relay' AND datname = current_database()"
        )
        for source in self.sources:
            source.close()
        self.sources, self.loop = [], None
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def add(self, *names: str, message: bool = False, commit: bool = True, kind: str = "Order") -> None:
        """Write events called key-number, as in a1, in one transaction."""
        with psycopg.connect(self.url) as connection:
            Outbox(**self.transport(message=message)).add_many(
                connection, [Event(kind, name[0], name, {"n": name}) for name in names]
            )
            if not commit:
                connection.rollback()
        for name in names if commit else ():
            self.written[name[0]].append(name)

    def transport(self, *, message: bool) -> dict[str, Any]:
        return {"transport": "message", "slot": self.names.slot} if message else {}

    def rows(self, query: str, *values: Any) -> list[Any]:
        return self.admin.execute(query, values).fetchall()

    def failed(self) -> list[str]:
        return [key for (key,) in self.rows("SELECT aggregate_id FROM outbox.failures ORDER BY id")]

    def hurry(self) -> None:
        self.admin.execute("UPDATE outbox.failures SET next_attempt_at = now() WHERE isfinite(next_attempt_at)")

    def session(self) -> Any:
        assert self.stream is not None
        return self.stream._session

    def held_back(self) -> tuple[int, int]:
        return self.session()._held_events, self.session()._held_bytes

    def nothing_left(self) -> None:
        """Nothing is held of the stream, not even a note."""
        assert self.held_back() == (0, 0)
        for channel in self.session()._channels.values():
            assert (list(channel._taken), list(channel._waiting), channel._settled) == ([], [], set())

    def read(self, count: int) -> None:
        """Wait until the stream has given so many events."""
        wait_until(lambda: sum(channel.put_count for channel in self.session()._channels.values()) >= count)

    def fail_over(self, standby: Standby, url: str) -> None:
        """The relay is gone, and so is the primary."""
        wait_until(standby.caught_up, 60, "the standby to have all")
        self.kill()
        self.admin.close()
        standby.primary.kill()
        standby.promote()
        self.url = url
        self.admin = psycopg.connect(url, autocommit=True)

    def close(self) -> None:
        self.kill()
        self.admin.close()


@pytest.fixture
def outboxed(outbox_postgres) -> Iterator[Callable[..., Outboxed]]:
    made: list[Outboxed] = []

    def make(lanes: int = 1) -> Outboxed:
        made.append(Outboxed(outbox_postgres.url, outbox_postgres.name, lanes))
        return made[-1]

    yield make
    for each in made:
        each.close()


both = pytest.mark.parametrize("once", [False, True], ids=["at-least-once", "exactly-once"])
of_either_kind = pytest.mark.parametrize("message", [False, True], ids=["rows", "messages"])


# --- refused events --------------------------------------------------------------------------------------------------


@both
@of_either_kind
def test_a_refused_events_key_waits_in_the_table_and_the_others_go_on(outboxed, once, message):
    box = outboxed()
    box.relay(once=once)
    box.streams()
    box.kafka.bad = {"a"}
    box.add("a1", "b1", "a2", "c1", message=message)
    box.published("b1", "c1")
    assert not box.streaming()
    assert box.failed() == ["a"]
    box.add("a3", "b2", message=message)
    box.published("b1", "c1", "b2")
    assert backlog(box.url) == 3
    box.kafka.bad = set()
    box.turns(5)
    assert backlog(box.url) == 3
    box.hurry()
    box.published("b1", "c1", "b2", "a1", "a2", "a3")
    box.streams()
    assert (backlog(box.url), box.failed()) == (0, [])
    box.add("a4", message=message)
    box.published("b1", "c1", "b2", "a1", "a2", "a3", "a4")
    assert (box.held_back(), box.streaming()) == ((0, 0), True)


def test_what_was_refused_in_one_state_goes_out_before_what_came_in_the_other(outboxed):
    """A message of a key whose earlier one has become a row, and a key that changes from rows to messages."""
    box = outboxed()
    box.relay()
    box.streams()
    box.kafka.bad = {"a"}
    box.add("a1", "b1")
    box.add("a2", "b2", message=True)
    box.published("b1", "b2")
    box.kafka.bad = set()
    box.hurry()
    box.add("a3")
    box.published("b1", "b2", "a1", "a2", "a3")


def test_a_relay_that_takes_over_in_the_table_state_goes_on_there(outboxed):
    box = outboxed()
    box.relay(once=True)
    box.streams()
    box.kafka.bad = {"a"}
    box.add("a1", "b1", message=True)
    box.published("b1")
    box.relay(once=True)
    box.add("a2", "b2", message=True)
    box.published("b1", "b2")
    assert box.failed() == ["a"]
    box.kafka.bad = set()
    box.hurry()
    box.published("b1", "b2", "a1", "a2")
    box.streams()


@both
def test_with_skip_the_key_goes_on_and_a_dead_letter_can_be_put_back(outboxed, once):
    box = outboxed()
    box.relay(SKIP, attempts=1, once=once)
    box.streams()
    box.kafka.bad = {"a1", "b1"}
    box.add("a1", "b1", "a2", message=True)
    box.published("a2")
    assert sorted(box.dead) == ["a1", "b1"]
    box.streams()
    desk = DeadLetters(box.admin, "outbox")
    ids = [row["event_id"] for row in desk.list(Selection())]
    assert desk.discard(Selection(ids[1:]), "no")[0]["event_type"] == "b1"
    box.kafka.bad = set()
    # The lane may learn of it as of a failure, or from the stream.
    assert desk.retry(Selection()) == ids[:1]
    box.published("a2", "a1")
    assert (backlog(box.url), box.failed()) == (0, [])
    box.streams()


def test_a_retried_dead_letter_goes_before_the_later_events_of_its_key(outboxed):
    box = outboxed()
    box.relay(attempts=1)
    box.streams()
    box.kafka.bad = {"a1"}
    box.add("a1", "a2", message=True)
    box.until(lambda: box.dead == ["a1"], "the dead letter")
    # The stream may have given a1 alone; a row must not be written before a2 has become one.
    a2 = "SELECT count(*) FROM outbox.events WHERE event_type = 'a2'"
    box.until(lambda: box.rows(a2) == [(1,)], "a2 to be in the table")
    box.add("a3", "b1")
    box.published("b1")
    box.kafka.bad = set()
    DeadLetters(box.admin, "outbox").retry(Selection())
    box.published("b1", "a1", "a2", "a3")
    box.streams()


@of_either_kind
def test_a_batch_that_is_refused_as_a_whole_is_halved_until_the_event_is_found(outboxed, message):
    box = outboxed()
    box.relay(batch=8)
    box.streams()
    box.add("a1", "b1", "c1", "d whole", "d2", "e1", "f1", "g1", message=message)
    box.published("a1", "b1", "c1", "e1", "f1", "g1")
    assert box.failed() == ["d"]
    assert backlog(box.url) == 2


@both
def test_while_kafka_is_away_nothing_is_lost_and_nothing_counted(outboxed, once):
    box = outboxed()
    box.relay(once=once, limits=StreamLimits(max_events=10), batch=4)
    box.streams()
    box.kafka.away = True
    sent = [f"a{number:02}" for number in range(60)]
    for name in sent:
        box.add(name, message=name > "a30")
    box.read(10)
    box.turns(5)
    held = box.held_back()[0]
    assert 10 <= held < 60
    assert (box.failed(), box.kafka.names()) == ([], [])
    box.kafka.away = False
    box.published(*sent)
    assert box.held_back() == (0, 0)


def test_while_kafka_is_away_no_more_is_held_than_may_be_by_bytes(outboxed):
    """100 messages of 900 kB without a row: 90 MB, of which the stream may hold 64 MiB."""
    box = outboxed()
    limit = StreamLimits().max_bytes
    box.relay()
    box.streams()
    box.kafka.away = True
    sent = [f"a{number:03}" for number in range(100)]
    outbox = Outbox(**box.transport(message=True))
    for name in sent:
        with box.admin.transaction():
            outbox.add(box.admin, Event("Order", "a", name, b"x" * 900_000))
    # The server can't get rid of what comes next: the relay reads no more of it.
    stuck = "SELECT wait_event FROM pg_stat_activity JOIN pg_replication_slots ON pid = active_pid WHERE slot_name = %s"
    wait_until(
        lambda: box.held_back()[1] >= limit and box.rows(stuck, box.names.slot) == [("WalSenderWriteData",)],
        what="the stream to be full",
    )
    box.turns(5)
    events, held = box.held_back()
    # Besides, what the driver had read from the socket by then.
    assert limit <= held < limit + (8 << 20), events
    box.kafka.away = False
    box.published(*sent)
    box.nothing_left()


def test_a_heartbeat_is_written_for_some_wal_and_not_for_less(outboxed):
    """Each is WAL itself: an outbox at rest, on a server at rest, must not write WAL for ever."""
    box = outboxed()

    def beats() -> int:
        # What is read is flushed, and a message outside of a transaction is not by itself.
        box.rows("SELECT pg_logical_emit_message(true, 'flush', '')")
        query = (
            "SELECT count(*) FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1', "
            "'publication_names', 'outbox_relay', 'messages', 'true') WHERE position(%s::bytea IN data) > 0"
        )
        return box.rows(query, box.names.slot, heartbeat_prefix("outbox").encode())[0][0]

    def at_rest() -> list[int]:
        """Return how many more there are after a try; nothing where others, as autovacuum, wrote WAL meanwhile."""
        before, began = beats(), now_at(box)
        box.cdc._slot.heartbeat(began)
        added = beats() - before
        return [added] if now_at(box) - began < IDLE_BYTES else []

    assert wait_until(at_rest, what="a server at rest") == [0]
    before, began = beats(), now_at(box)
    box.rows("SELECT pg_logical_emit_message(false, 'filler', repeat('x', %s))", IDLE_BYTES + 1)
    box.cdc._slot.heartbeat(began)
    assert beats() == before + 1


def test_what_is_published_is_not_sent_again_because_it_can_not_be_settled(outboxed):
    """At-least-once, rows and events without one: neither again and again, nor an older one after a newer one."""
    box = outboxed()
    box.relay()
    box.streams()
    box.kafka.bad = {"b"}
    box.admin.execute("ALTER TABLE outbox.failures ADD CONSTRAINT mine CHECK (aggregate_id <> 'b')")
    box.add("a1", "b1", "c1", message=True)
    box.add("d1")
    box.until(lambda: "c1" in box.kafka.names(), "those beside the refused one")
    box.turns(10)
    assert sorted(box.kafka.names()) in (["a1", "c1"], ["a1", "c1", "d1"])
    box.admin.execute("ALTER TABLE outbox.failures DROP CONSTRAINT mine")
    box.kafka.bad = set()
    box.until(lambda: {"b1", "d1"} <= set(box.kafka.names()), "the others")
    box.streams()
    assert sorted(box.kafka.names()) == ["a1", "b1", "c1", "d1"]
    box.admin.execute("""
        CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE query_canceled; END $$;
        CREATE TRIGGER stop BEFORE DELETE ON outbox.events FOR EACH ROW EXECUTE FUNCTION stop()""")
    with psycopg.connect(box.url) as connection:
        Outbox(**box.transport(message=True)).add(connection, Event("Order", "a", "a2"))
        Outbox().add(connection, Event("Order", "a", "a3"))
    box.until(lambda: "a3" in box.kafka.names(), "both")
    box.turns(5)
    box.admin.execute("DROP FUNCTION stop CASCADE")
    box.until(lambda: backlog(box.url) == 0, "the row to be settled")
    box.turns(5)
    assert box.kafka.names("a") == ["a1", "a2", "a3"]


@pytest.mark.parametrize("error", ["22000", "57014"], ids=["unreadable", "takes too long"])
def test_a_repair_that_may_lose_messages_does_not_depend_on_reading_them(outboxed, monkeypatch, error):
    box = outboxed()
    box.admin.execute(
        "CREATE FUNCTION peek() RETURNS bigint LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION 'not now' USING ERRCODE = '{error}'; END $$"
    )
    monkeypatch.setattr(cdc, "_UNREAD", "SELECT peek()")
    box.add("a1")
    box.rows("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", box.names.slot)
    with pytest.raises((Unavailable, SchemaError), match="not now"):
        box.cdc.repair("its slot is too far behind")
    box.cdc.repair("its slot is too far behind", lose_messages=True)
    assert box.rows("SELECT details ->> 'messages_lost_at_most' FROM outbox.audit WHERE what = 'cdc repair'") == [
        (None,)
    ]
    assert box.cdc.status().problem is None


# --- what is no event ------------------------------------------------------------------------------------------------


def foreign(box: Outboxed, content: bytes, *, transactional: bool = True) -> None:
    prefix = message_prefix("outbox")
    box.admin.execute("SELECT pg_logical_emit_message(%s, %s, %s::bytea)", (transactional, prefix, content))


def begun(outboxed: Callable[..., Outboxed], *, failing: bool) -> Outboxed:
    """Return an outbox whose lane streams, or reads its table because it has a failure."""
    box = outboxed()
    box.relay()
    box.streams()
    if failing:
        box.kafka.bad = {"z"}
        box.add("z1")
        box.until(lambda: box.failed() == ["z"], "a failure")
    return box


@pytest.mark.parametrize("failing", [False, True], ids=["streaming", "table"])
def test_a_message_that_is_no_event_becomes_a_dead_letter_and_stops_nothing(outboxed, failing):
    box = begun(outboxed, failing=failing)
    box.add("a1", message=True)
    foreign(box, b"\x00\xff no event")
    foreign(box, b"{}\n")
    # More than a row can hold.
    foreign(box, b"x" * 3_000_000)
    box.add("a2", message=True)
    box.published("a1", "a2")
    dead = box.rows("SELECT aggregate_type, event_type, length(payload_bytes) FROM outbox.dead_letters ORDER BY id")
    assert [kind for kind, _, _ in dead] == ["unreadable-message"] * 3
    assert [size for _, _, size in dead] == [11, 3, 990_000]
    assert "3,000,000 bytes" in dead[2][1]
    assert box.dead == [reason for _, reason, _ in dead]
    assert len(DeadLetters(box.admin, "outbox").list(Selection())) == 3 + failing
    assert box.streaming() is not failing
    assert box.failed() == ["z"] * failing


def test_events_without_a_row_do_not_become_dead_letters_because_a_setting_was_forgotten(outboxed):
    """Where some were published before, a relay that takes none does not begin, unless that is what was set."""
    box = outboxed()
    box.relay()
    box.streams()
    box.add("a1", message=True)
    box.published("a1")
    wait_until(lambda: box.turned() and box.cdc.status().slot.message_at, what="a message in the checkpoint")
    box.add("a2", message=True)
    box.relay(limits=StreamLimits(messages=False))
    with pytest.raises(ConfigurationError, match="OUTBOX_WAL__MESSAGES"):
        wait_until(lambda: box.turned() and False, what="the relay to refuse")
    assert box.rows("SELECT FROM outbox.dead_letters") == []
    box.relay()
    box.published("a1", "a2")
    box.relay(limits=StreamLimits(messages=False, refuses_messages=True))
    box.streams()
    box.add("a3", message=True)
    box.until(lambda: len(box.dead) == 1, "a dead letter")
    assert box.kafka.names() == ["a1", "a2"]
    [(content,)] = box.rows("SELECT payload_bytes FROM outbox.dead_letters")
    assert b'"a3"' in content


def test_what_is_no_event_does_not_count_as_one(outboxed):
    """Any role can write it, and must not be able to keep a relay from starting that takes no messages."""
    box = outboxed()
    box.relay(limits=StreamLimits(messages=False))
    box.streams()
    foreign(box, b"no event")
    box.until(lambda: len(box.dead) == 1, "a dead letter")
    passed = now_at(box)
    box.add("a1")
    box.published("a1")
    box.until(lambda: told(box) >= passed, "the checkpoint to be written")
    assert box.cdc.status().slot.message_at is None
    box.relay(limits=StreamLimits(messages=False))
    box.add("a2")
    box.published("a1", "a2")


def test_whatever_a_foreign_program_writes_stops_nothing(outboxed):
    """Heads that are nearly right, with every odd character in every field."""
    box = outboxed()
    box.relay()
    box.streams()
    good = '"version":1,"event_id":"0198a7c4-5d3e-7b21-9c55-2f6d8e1a4b70","payload":"none"'
    odd = ["\\u0000", "\\ud800", "é" * 300, "\\u007f\\u0001", "", "'\\\"", "\U0001f600"]
    fields = ("aggregate_type", "aggregate_id", "event_type", "more\\u0000", "headers")
    count = 0
    for text in odd:
        for field in fields:
            values = {"aggregate_type": "Order", "aggregate_id": "o", "event_type": "o"} | {field: text}
            line = ",".join(f'"{name}":"{value}"' for name, value in values.items() if name != "headers")
            if field == "headers":
                line += f',"headers":{{"x{text}":"{text}"}}'
            foreign(box, ("{" + good + "," + line + "}\n").encode())
            count += 1
    box.add("a1", message=True)
    box.until(lambda: "a1" in box.kafka.names(), "the event behind them")
    (unreadable,) = box.rows("SELECT count(*) FROM outbox.dead_letters")[0]
    assert unreadable + len(box.kafka.published) == count + 1
    assert unreadable > count // 2


@pytest.mark.parametrize("failing", [False, True], ids=["streaming", "table"])
def test_an_event_outside_of_its_transaction_becomes_a_dead_letter(outboxed, failing):
    """Whoever writes with transactional = false has it published although he may roll back: nobody may rely on that."""
    box = begun(outboxed, failing=failing)
    box.kafka.away = True
    # The commit's record is the next one in the WAL: a place of its own all the same.
    with box.admin.transaction():
        Outbox(**box.transport(message=True)).add(box.admin, Event("Order", "a", "a1"))
        foreign(box, b"{}\n not of a transaction", transactional=False)
    box.add("a2", message=True)
    dead = "SELECT aggregate_type, event_type, convert_from(payload_bytes, 'UTF8') FROM outbox.dead_letters"
    box.until(lambda: box.rows(dead), "the dead letter")
    ((kind, reason, payload),) = box.rows(dead)
    assert (kind, payload) == ("unreadable-message", "{}\n not of a transaction")
    assert "transactional = false" in reason
    # Whoever goes on passes by what is done with, and no more.
    box.relay()
    box.kafka.away = False
    box.published("a1", "a2")
    assert len(box.rows(dead)) == 1
    end = box.rows("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint")[0][0]
    box.cdc._slot.heartbeat(0)
    box.until(lambda: box.cdc.status().slot.confirmed_lsn >= end, "the slot to move on")


def test_messages_of_others_and_of_none_are_passed_by(outboxed):
    box = outboxed()
    box.relay()
    box.streams()
    box.add("a1", message=True, commit=False)
    box.admin.execute("SELECT pg_logical_emit_message(true, 'outbox.other', 'x')")
    with psycopg.connect(box.url) as connection:
        outbox = Outbox(**box.transport(message=True))
        outbox.add(connection, Event("Order", "b", "b1"))
        with connection.transaction(force_rollback=True):
            outbox.add(connection, Event("Order", "b", "b2"))
        with connection.transaction():
            outbox.add(connection, Event("Order", "b", "b3"))
    box.published("b1", "b3")
    assert box.rows("SELECT count(*) FROM outbox.dead_letters") == [(0,)]


# --- setting up, switching and repairing -----------------------------------------------------------------------------


def test_a_place_in_another_servers_wal_is_not_gone_on_from(outboxed):
    """Moved by dump and restore: the lanes' places are from a server that had written more WAL than this one."""
    box = outboxed()
    box.relay()
    box.streams()
    box.add("a1", message=True)
    box.published("a1")
    box.kill()
    moved = "UPDATE outbox.lanes SET commit_lsn = commit_lsn + (1::bigint << 40)"
    box.cdc.switch(SourceKind.POLLING, leave_messages=True)
    box.cdc.drop()
    box.admin.execute(moved)
    box.cdc.setup()
    box.cdc.switch(SourceKind.WAL)
    box.relay()
    box.streams()
    box.add("a2", message=True)
    box.add("a3")
    box.published("a1", "a2", "a3")
    # The checkpoint came along too.
    box.kill()
    box.admin.execute(moved)
    with pytest.raises(CdcRefused, match="has not written so much"):
        box.cdc.setup()
    box.admin.execute("SELECT pg_drop_replication_slot(%s)", (box.names.slot,))
    box.cdc.repair("moved")
    box.relay()
    box.streams()
    box.add("a4", message=True)
    box.published("a1", "a2", "a3", "a4")


@both
def test_a_repair_after_a_change_of_the_publication_keeps_what_is_in_the_slot(outboxed, once):
    """The slot has every event without a row still; rows that were not published meanwhile are read from the table."""
    box = outboxed()
    box.relay(once=once)
    box.streams()
    box.add("m1", message=True)
    box.published("m1")
    ((columns,),) = box.rows("SELECT string_agg(attname, ', ') FROM pg_publication_tables, unnest(attnames) AS attname")
    box.kafka.away = True
    expected = ["m1"]
    changes = [
        "ALTER PUBLICATION outbox_relay SET (publish = 'update')",
        "ALTER PUBLICATION outbox_relay SET (publish = 'insert')",
        "ALTER PUBLICATION outbox_relay SET TABLE outbox.events (id)",
    ]
    if box.admin.info.server_version >= 180000:
        # Before, the slot can't be read past that.
        changes += [
            "DROP PUBLICATION outbox_relay",
            f"CREATE PUBLICATION outbox_relay FOR TABLE outbox.events ({columns}) WITH (publish = 'insert')",
        ]
    with psycopg.connect(box.url) as writer:
        for number, change in enumerate(changes):
            box.admin.execute(change)
            box.add(f"m{number + 2}", message=True)
            box.add(f"r{number}")
            Outbox().add(writer, Event("Order", "o", f"o{number}", {"n": number}))
            expected += [f"m{number + 2}", f"r{number}", f"o{number}"]
        with pytest.raises(CdcRefused, match=r"was changed.*--leave-messages"):
            box.cdc.switch(SourceKind.POLLING)
        box.kill()
        assert box.cdc.repair("somebody changed it")
        writer.commit()
    assert box.rows("SELECT details ->> 'slot_kept' FROM outbox.audit WHERE what = 'cdc repair'") == [("true",)]
    box.kafka.away = False
    box.relay(once=once)
    box.streams()
    box.add("m7", message=True)
    box.add("r7")
    box.until(lambda: len(box.kafka.names()) >= len(expected) + 2, f"{expected} after {box.kafka.names()}")
    box.turns(5)
    assert sorted(box.kafka.names()) == sorted([*expected, "m7", "r7"])
    assert box.kafka.names("m") == sorted(box.kafka.names("m"))
    # Where nothing is wrong a repair takes nothing away either.
    box.kafka.away = True
    box.add("m8", message=True)
    box.kill()
    assert box.cdc.repair("to be sure")
    box.kafka.away = False
    box.relay(once=once)
    box.until(lambda: "m8" in box.kafka.names(), "what the slot had")
    assert len(set(box.kafka.names())) == len(box.kafka.names())


def test_going_back_to_polling_waits_for_a_message_of_an_open_transaction(outboxed, outbox_postgres_server):
    box = outboxed()
    box.relay()
    box.streams()

    def switched(seconds: float) -> Any:
        done: list[Any] = []

        def switch() -> None:
            with psycopg.connect(box.url, autocommit=True) as own:
                try:
                    done.append(Cdc(own, box.names).switch(SourceKind.POLLING, wait_seconds=seconds))
                except CdcRefused as error:
                    done.append(str(error))

        thread = threading.Thread(target=switch)
        thread.start()
        while thread.is_alive():
            box.turns()
        return done[0]

    with psycopg.connect(outbox_postgres_server.url()) as elsewhere, psycopg.connect(box.url) as writer:
        # A transaction of another database holds no event of ours.
        elsewhere.execute("SELECT pg_current_xact_id()")
        Outbox(**box.transport(message=True)).add(writer, Event("Order", "a", "a1"))
        refused = switched(1)
        assert f"server process {writer.info.backend_pid}" in refused
        assert "--leave-messages" in refused
        writer.commit()
        assert switched(30) is True
    assert box.kafka.names() == ["a1"]


# --- the table, and back ---------------------------------------------------------------------------------------------


@of_either_kind
def test_what_is_committed_at_each_step_of_catching_up_comes_once_and_in_order(outboxed, message):
    """The lane begins with a backlog; between all of its turns another event is committed, old ids late."""
    box = outboxed()
    sent = [f"a{number:03}" for number in range(200)]
    box.add(*sent[:100])
    late = psycopg.connect(box.url)
    Outbox().add(late, Event("Order", "z", "z1"))
    box.relay(batch=30)
    for number, name in enumerate(sent[100:]):
        box.add(name, message=message)
        box.turns()
        if number == 5:
            late.commit()
    late.close()
    box.until(lambda: len(box.kafka.published) == 201, "all events")
    box.turns(5)
    assert box.kafka.names("a") == sent
    assert box.kafka.names("z") == ["z1"]
    assert box.streaming()
    assert box.held_back() == (0, 0)


def test_an_event_that_was_open_while_the_lane_went_to_the_table_and_back(outboxed):
    box = outboxed()
    box.relay()
    box.streams()
    with psycopg.connect(box.url) as late:
        Outbox().add(late, Event("Order", "z", "z1"))
        box.kafka.bad = {"a1"}
        box.add("a1", "b1")
        box.published("b1")
        box.kafka.bad = set()
        box.hurry()
        box.published("b1", "a1")
        box.streams()
    box.published("b1", "a1", "z1")


def test_a_lane_with_a_backlog_does_not_hold_up_the_others(outboxed):
    """What the stream gives for it is in its table: nothing is kept for it until it has nearly caught up."""
    box = outboxed(2)
    slow, quick = keys_of_lanes()
    box.add(*(f"{slow}{number:04}" for number in range(1500)))
    box.relay(limits=StreamLimits(max_events=20), batch=10)
    box.until(lambda: box.rows("SELECT streaming FROM outbox.lanes WHERE lane = 1") == [(True,)], "a lane to stream")
    more = [f"{slow}{number:04}" for number in range(1500, 1560)]
    for number in range(30):
        box.add(*more[2 * number : 2 * number + 2], f"{quick}{number:02}")

    def quick_ones() -> bool:
        # However long the stream takes, the slow lane's table is not nearly read.
        if len(box.kafka.names(slow)) < 1000:
            box.turn(0)
        box.turn(1)
        return len(box.kafka.names(quick)) == 30

    assert len(box.kafka.names(slow)) < 1000
    wait_until(quick_ones, 20, "the other lane's events")
    box.until(lambda: len(box.kafka.published) == 1590, "all")
    box.streams()
    assert box.kafka.names(slow) == sorted(box.kafka.names(slow))


def test_a_session_that_ends_while_a_lane_catches_up_begins_anew_at_once(outboxed):
    """A turn has three rows of its table, which are large, and the others wait for it: they are 40."""
    box = outboxed(2)
    slow, quick = keys_of_lanes()
    box.relay(turn_bytes=100_000)
    box.streams()
    box.kafka.bad = {slow}
    with psycopg.connect(box.url) as connection:
        Outbox().add_many(
            connection, [Event("Order", slow, f"{slow}{number}", b"x" * 40_000) for number in range(10, 50)]
        )
    box.until(lambda: box.failed() == [slow] and not box.streaming(0), "lane 0 to be in the table")
    box.kafka.bad = set()
    box.hurry()
    lane = box.source._lanes[0]
    wait_until(lambda: box.turned(0) and isinstance(lane.state, CatchingUp), what="lane 0 to catch up")
    box.admin.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", (box.names.slot,)
    )
    wait_until(lambda: box.session().error is not None, what="the session's end")
    box.add(f"{quick}1")
    before = len(box.kafka.names(slow))
    assert before < 20
    # The next session begins when both have joined it, and this one alone is asked to.
    for _ in range(4):
        box.turn(0)
    wait_until(lambda: box.turned(1) and box.kafka.names(quick), what="the other lane's event")
    assert len(box.kafka.names(slow)) - before < 20
    box.until(lambda: len(box.kafka.published) == 41, "all")
    assert box.kafka.names(slow) == [f"{slow}{number}" for number in range(10, 50)]


def keys_of_lanes() -> tuple[str, str]:
    """Keys of lane 0 and of lane 1, of two."""
    keys = [next(key for key in "abcdefgh" if lane_of("Order", key, 2) == lane) for lane in (0, 1)]
    return keys[0], keys[1]


def test_events_are_archived_with_their_place_and_those_without_a_row_are_not(outboxed):
    box = outboxed()
    box.relay(archive=True)
    box.streams()
    box.add("a1")
    box.add("b1", message=True)
    box.published("a1", "b1")
    box.kafka.bad = {"b2"}
    box.add("b2", message=True)
    box.until(lambda: box.failed() == ["b"], "a failure")
    box.kafka.bad = set()
    box.hurry()
    box.published("a1", "b1", "b2")
    assert box.rows("SELECT event_type FROM outbox.published ORDER BY id") == [("a1",), ("b2",)]


# --- several lanes in one turn ---------------------------------------------------------------------------------------


@both
@of_either_kind
def test_a_missing_topic_holds_up_its_own_events_alone(outboxed, once, message):
    """They stay in the table; the stream, which has other lanes too, must not fill up with what comes behind them."""
    box = outboxed(2)
    slow, quick = keys_of_lanes()
    box.relay(once=once, limits=StreamLimits(max_events=10), batch=5)
    box.streams()
    box.kafka.missing = {"Bill"}
    bill = next(key for key in "ABCDEFGH" if lane_of("Bill", key, 2) == 0)
    box.add(f"{bill}1", f"{bill}2", kind="Bill", message=message)
    names = [f"{key}{number:02}" for number in range(30) for key in (slow, quick)]
    for name in names:
        box.add(name, message=message)
    box.until(lambda: len(box.kafka.names()) >= 60, "all others")
    assert box.kafka.names(slow) + box.kafka.names(quick) == sorted(names, key=lambda name: (name[0] != slow, name))
    box.until(lambda: backlog(box.url) == 2, "them to be settled")
    assert (box.failed(), box.streaming(0), box.streaming(1)) == ([], False, True)
    box.kafka.missing = set()
    box.until(lambda: len(box.kafka.names()) >= 62, "the bills")
    box.streams()
    assert box.kafka.names(bill) == [f"{bill}1", f"{bill}2"]
    box.nothing_left()


def lose_lane_0(box: Outboxed) -> None:
    box.admin.execute("UPDATE outbox.lanes SET epoch = epoch + 1, protocol_epoch = epoch + 1 WHERE lane = 0")


@pytest.mark.parametrize("where", ["in the stream", "on the way out of it", "in the table"])
def test_a_lane_that_is_lost_is_the_only_one_to_stop(outboxed, monkeypatch, where):
    """Wherever it turns out."""
    monkeypatch.setattr(wal_source, "_LOOK_SECONDS", 0.0)
    box = outboxed(2)
    slow, quick = keys_of_lanes()
    box.relay()
    box.streams()
    match where:
        case "in the stream":
            lose_lane_0(box)
            box.add(f"{slow}1")
        case "on the way out of it":
            # A failure makes it leave, and nothing else is there to find the loss with.
            with box.admin.transaction():
                box.admin.execute(
                    "INSERT INTO outbox.failures VALUES "
                    "(0, 1, gen_random_uuid(), 'Order', %s, true, 1, 'bad', now(), now(), 'infinity')",
                    (slow,),
                )
                lose_lane_0(box)
        case "in the table":
            box.kafka.bad = {slow}
            box.add(f"{slow}0")
            box.until(lambda: box.failed() == [slow] and not box.streaming(0), "lane 0 to be in the table")
            lose_lane_0(box)
            box.add(f"{slow}1", message=True)
    box.add(f"{quick}1")
    box.until(lambda: box.kafka.names(quick), f"the other lane's event, {box.kafka.names()} {box.seen.errors}")
    box.until(lambda: box.seen.errors, "the loss")
    assert box.kafka.names() == [f"{quick}1"]
    assert [(lanes, type(error)) for lanes, error in box.seen.errors] == [([0], LaneLost)]
    assert [gone.lease.lane for gone in box.held.take_let_go() if gone.lost] == [0]


def told(box: Outboxed) -> int:
    """Up to where the server may forget the WAL."""
    query = "SELECT (confirmed_flush_lsn - '0/0'::pg_lsn)::bigint FROM pg_replication_slots WHERE slot_name = %s"
    return int(box.rows(query, box.names.slot)[0][0])


def now_at(box: Outboxed) -> int:
    return int(box.rows("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint")[0][0])


@both
@pytest.mark.parametrize("streamed", [False, True])
def test_a_lane_that_can_not_be_taken_over_does_not_hold_up_the_others(outboxed, monkeypatch, once, streamed):
    """Its rows wait in the table: more of them than the stream holds go by, and come once and in order when it is back.

    It could not be taken over from the start, or has streamed before; then its last batch may be on Kafka or not.
    """
    monkeypatch.setattr(loop, "_ABSENT_SECONDS", 0.05)
    box = outboxed(2)
    slow, quick = keys_of_lanes()
    names = {key: [f"{key}{number:03}" for number in range(60)] for key in (slow, quick)}
    if not streamed:
        box.kafka.stuck = {0}
    box.relay(once=once, limits=StreamLimits(max_events=20), batch=5)
    if streamed:
        box.streams()
        box.add(*names[slow][:3], *names[quick][:3])
        failing = "after" if once else slow
        box.kafka.fail = lambda point: Unavailable("nobody knows") if point == failing else None
        box.until(lambda: box.seen.errors, "a failure")
        box.kafka.stuck = {0}
        box.kafka.fail = lambda _point: None
    for key in (slow, quick):
        for number in range(3 if streamed else 0, 60):
            box.add(names[key][number])
    box.until(lambda: box.kafka.names(quick) == names[quick], "the other lane's events")
    settled = now_at(box)
    box.until(lambda: box.rows("SELECT count(*) FROM outbox.events WHERE lane = 1") == [(0,)], "them to be settled")
    box.add(f"{quick}end")
    box.until(lambda: told(box) >= settled, "the server to be told")
    assert len(box.kafka.names(slow)) in ({3} if streamed and once else {0, 3})
    assert (box.streaming(0), box.streaming(1)) == (False, True)
    assert box.held_back()[0] < 20
    box.kafka.stuck = set()
    box.until(lambda: box.kafka.names(slow)[-1:] == names[slow][-1:], "the lane's events")
    box.streams()
    box.add(f"{slow}end")
    box.until(lambda: box.kafka.names(slow)[-1] == f"{slow}end", "the last one")
    assert box.kafka.names(slow) == [*names[slow], f"{slow}end"]
    assert box.kafka.names(quick) == [*names[quick], f"{quick}end"]
    box.until(lambda: backlog(box.url) == 0, "all to be settled")
    box.nothing_left()


def test_the_stream_does_not_go_past_an_event_without_a_row_whose_lane_can_not_be_taken_over(outboxed, monkeypatch):
    """Only the WAL has it, and a transaction that is not decided yet may have published it: it can't be written down.

    The others go on until as many events as the stream may hold are behind it; it is neither lost nor doubled.
    """
    monkeypatch.setattr(loop, "_ABSENT_SECONDS", 0.05)
    box = outboxed(2)
    slow, quick = keys_of_lanes()
    box.relay(once=True, limits=StreamLimits(max_events=20), batch=5)
    box.streams()
    before = now_at(box)
    box.add(f"{slow}1", message=True)
    box.kafka.fail = lambda point: Unavailable("committed, and nobody knows") if point == "after" else None
    box.until(lambda: box.kafka.names(slow) and box.seen.errors, "a batch that is on Kafka")
    box.kafka.fail = lambda _point: None
    box.kafka.stuck = {0}
    box.add(f"{slow}2", f"{slow}3")
    box.add(f"{slow}4", message=True)
    box.add(*(f"{quick}{number:02}" for number in range(60)))
    box.until(lambda: len(box.kafka.names(quick)) == 60, "the other lane's events")
    box.turns(5)
    assert told(box) <= before
    box.kill()
    box.relay(once=True, limits=StreamLimits(max_events=20), batch=5)
    box.turns(5)
    box.kafka.stuck = set()
    box.until(lambda: len(box.kafka.names(slow)) >= 4, "the lane's events")
    box.streams()
    box.turns(5)
    assert sorted(box.kafka.names(slow)) == [f"{slow}{number}" for number in range(1, 5)]
    assert box.kafka.names(quick) == [f"{quick}{number:02}" for number in range(60)]


@both
def test_a_locked_lane_loses_no_event_that_was_announced(outboxed, once):
    """Its row is locked while its last batch is to be settled and the next is there."""
    box = outboxed(2)
    slow, quick = keys_of_lanes()
    box.relay(once=once)
    box.streams()
    box.add(f"{slow}1")
    box.until(lambda: box.kafka.names(slow), "the first")
    # Published, and not settled.
    assert backlog(box.url) == 1
    with psycopg.connect(box.url) as other:
        other.execute("SELECT FROM outbox.lanes WHERE lane = 0 FOR UPDATE")
        box.add(f"{slow}2", f"{quick}1")
        box.read(3)
        box.until(lambda: box.kafka.names(quick), "the other lane")
        assert any(isinstance(error, LaneBusy) for _, error in box.seen.errors)
    box.add(f"{slow}3")
    box.until(lambda: len(box.kafka.names(slow)) >= 3, "the events of the lane that was locked")
    assert box.kafka.names(slow) == [f"{slow}1", f"{slow}2", f"{slow}3"]
    box.until(lambda: backlog(box.url) == 0, "all to be settled")
    box.nothing_left()


def test_a_turn_holds_no_more_than_its_bytes_and_all_lanes_have_theirs(outboxed):
    """Rows and messages of 40 KB; the turn may hold 200 KB."""
    box = outboxed(2)
    keys = keys_of_lanes()
    box.relay(turn_bytes=200_000, batch=100)
    box.streams()
    turns: list[Batches] = []
    published = Producer.publish
    with pytest.MonkeyPatch.context() as patch, psycopg.connect(box.url) as connection:
        patch.setattr(Producer, "publish", lambda self, batches, *_: turns.append(batches) or published(self, batches))
        for message in (True, False):
            outbox = Outbox(**box.transport(message=message))
            for number in range(30):
                for key in keys:
                    name = f"{key}{message}{number:02}"
                    outbox.add(connection, Event("Order", key, name, {"n": "x" * 40_000}))
            connection.commit()
        # What comes one by one would have turns of one lane.
        box.read(120)
        box.until(lambda: len(box.kafka.published) == 120, "all")
    sizes = [sum(len(claim.value) for claims in batches.values() for claim in claims) for batches in turns]
    assert max(sizes) < 300_000
    assert sum(len(batches) == 2 for batches in turns) > len(turns) // 2
    for key in keys:
        assert box.kafka.names(key) == [f"{key}{kind}{n:02}" for kind in (True, False) for n in range(30)]
    box.turns(3)
    box.nothing_left()


def test_a_place_is_not_settled_without_what_goes_with_it(outboxed):
    """Writing messages into the table fails while the connection goes on: they must not be passed by."""
    box = begun(outboxed, failing=True)
    box.admin.execute("""
        CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE query_canceled; END $$;
        CREATE TRIGGER stop BEFORE UPDATE ON outbox.lanes FOR EACH ROW WHEN (new.commit_lsn > old.commit_lsn
        AND pg_trigger_depth() = 0 AND current_setting('idle_in_transaction_session_timeout') <> '0')
        EXECUTE FUNCTION stop()""")
    box.add("a1", message=True)
    box.until(lambda: any("writing events" in str(error) for _, error in box.seen.errors), "it to fail")
    box.relay()
    box.turns(3)
    box.admin.execute("DROP FUNCTION stop CASCADE")
    box.until(lambda: box.kafka.names("a") == ["a1"], "the event")


@both
def test_what_was_taken_and_not_published_comes_again_to_the_source_that_goes_on(outboxed, chance, once):
    """A part of each lane's events fails, again and again, and the source survives."""
    box = outboxed(2)
    box.relay(once=once, batch=20)
    box.streams()
    keys = "abcdefgh"
    for number in range(100):
        box.add(*(f"{key}{number:02}" for key in keys[:4]))
        box.add(*(f"{key}{number:02}" for key in keys[4:]), message=True)
    refused = BatchRefused("something")
    box.kafka.fail = lambda point: refused if point != "after" and chance.random() < 0.1 else None
    source = box.source

    def go_on() -> bool:
        # What is refused alone is an event that waits: it is due at once.
        box.hurry()
        return len(set(box.kafka.names())) == 800

    box.until(go_on, "all")
    assert source is box.source
    box.kafka.fail = lambda _point: None
    box.streams()
    for key in keys:
        assert box.kafka.names(key) == box.written[key]
    box.turns(3)
    box.nothing_left()


# --- what is committed and not visible -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hanging_server() -> Iterator[Any]:
    from outbox.testing.fixtures import PrivatePostgres

    with PrivatePostgres() as factory:
        yield factory, factory()


def set_standbys(server: Any, value: str) -> None:
    """Every commit waits for a standby of this name, or for none."""
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute(psycopg.sql.SQL("ALTER SYSTEM SET synchronous_standby_names = {}").format(value))
        admin.execute("SELECT pg_reload_conf()")

    def reloaded() -> bool:
        with psycopg.connect(server.url(), autocommit=True) as look:
            return look.execute("SHOW synchronous_standby_names").fetchone() == (value,)

    wait_until(reloaded, what="the setting")


@of_either_kind
@pytest.mark.parametrize("table", [False, True], ids=["streaming", "table"])
def test_nothing_is_published_that_no_standby_has(hanging_server, message, table):
    """The commit stands in the WAL, and the stream gives it; until it is visible a failover could undo it."""
    factory, server = hanging_server
    name = f"hanging_{message}_{table}".lower()
    database = factory.database(server, name)
    box = Outboxed(database.url, name)
    try:
        box.relay(once=True)
        box.streams()
        if table:
            box.kafka.bad = {"z"}
            box.add("z1")
            box.until(lambda: box.failed() == ["z"], "a failure")
        before = sum(channel.put_count for channel in box.session()._channels.values())
        set_standbys(server, "nobody")
        writer = threading.Thread(target=box.add, args=("a1", "b1"), kwargs={"message": message})
        writer.start()
        turning = None
        try:
            box.read(before + 2)
            waits = (
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = current_database()"
            )
            wait_until(lambda: box.rows(waits)[0][0] > 0, what="the commit to hang")
            if table:
                # The commit that makes sure of what the table gave waits for a standby too.
                turning = threading.Thread(target=box.turns, args=(5,))
                turning.start()
                turning.join(1)
            else:
                box.turns(50)
            assert writer.is_alive()
            assert box.kafka.names() == []
            assert box.held_back()[0] == 2
        finally:
            set_standbys(server, "")
            writer.join(20)
            if turning is not None:
                turning.join(20)
        box.published("a1", "b1")
        if not table:
            box.add("a2", message=message)
            box.published("a1", "b1", "a2")
            assert box.streaming()
    finally:
        box.close()
        database.close()


# --- everything at once ----------------------------------------------------------------------------------------------


class RandomHistory:
    """A random history of one outbox: writers, refusals, dead servers and dead relays, switched on and off."""

    KEYS = "abcdefgh"

    def __init__(self, box: Outboxed, chance: random.Random, *, once: bool) -> None:
        self.box = box
        self.once = once
        self.random = chance
        self.count = 0
        box.kafka.kill = lambda point: self.random.random() < 0.04

    def start(self) -> None:
        self.box.relay(
            once=self.once,
            limits=StreamLimits(max_events=self.random.choice([5, 50, 5000])),
            batch=self.random.choice([1, 3, 20]),
            backoff=0.001,
        )

    def write(self) -> None:
        """A transaction of several keys: those of the second half as messages. Some of it is rolled back."""
        box, chance = self.box, self.random
        committed = []
        with psycopg.connect(box.url) as connection, connection.transaction() as whole:
            for key in chance.choices(self.KEYS, k=chance.randint(1, 5)):
                self.count += 1
                name = f"{key}{self.count:05}"
                outbox = Outbox(**box.transport(message=key > "d"))
                with connection.transaction(force_rollback=chance.random() < 0.2) as savepoint:
                    outbox.add(connection, Event("Order", key, name))
                if not savepoint.force_rollback:
                    committed.append((key, name))
            if chance.random() < 0.1:
                committed = []
                raise psycopg.Rollback(whole)
        for key, name in committed:
            box.written[key].append(name)

    def step(self) -> None:
        box, chance = self.box, self.random
        try:
            match chance.randint(0, 11):
                case 0 | 1 | 2:
                    self.write()
                case 3:
                    box.kafka.bad = set(chance.choices(self.KEYS, k=chance.randint(0, 2)))
                case 4:
                    box.kafka.bad = set()
                case 5 if chance.random() < 0.3:
                    box.kafka.away = not box.kafka.away
                case 6 if chance.random() < 0.2:
                    box.admin.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'relay' "
                        "AND datname = current_database() AND random() < 0.5"
                    )
                case 7 if chance.random() < 0.2:
                    self.start()
                case _:
                    for _ in range(chance.randint(1, 10)):
                        box.turn(*chance.choice([(), (), (chance.randrange(box.lanes),)]))
        except Killed:
            self.start()

    def end(self) -> None:
        box = self.box
        box.kafka.bad, box.kafka.away, box.kafka.kill = set(), False, lambda _point: False
        wanted = sum(map(len, box.written.values()))
        done = {name for names in box.written.values() for name in names}
        box.until(lambda: done <= set(box.kafka.names()), f"{wanted} events")
        box.streams()
        box.until(lambda: backlog(box.url) == 0, "all to be settled")
        # A relay that was started a moment ago reads much of the stream again: up to here, all of it is done with.
        end = now_at(box)
        box.cdc._slot.heartbeat(0)
        box.until(lambda: told(box) >= end, "the stream to be read to its end")
        box.turns(5)
        assert backlog(box.url) == 0
        for key in self.KEYS:
            names = box.kafka.names(key)
            first = list(dict.fromkeys(names))
            assert first == box.written[key]
            if self.once:
                assert names == first
        box.nothing_left()


def test_a_message_of_the_last_batch_before_a_failover_is_never_published_again(private_postgres, monkeypatch):
    """Whatever the lane publishes next, and however long another lane keeps the slot from going on."""
    primary = private_postgres({"fsync": "off", "autovacuum": "off"})
    url = private_postgres.database(primary).url
    box = Outboxed(url, "outbox_relay", 2)
    a, b = (next(key for key in "abcdefghijk" if lane_of("Order", key, 2) == lane) for lane in range(2))
    with Standby(primary, synced_slots=True) as standby:
        box.relay(SKIP, 1, once=True)
        box.streams()
        box.kafka.bad = {a}
        box.add(f"{a}1")
        box.until(lambda: box.dead, "the dead letter")
        box.kafka.bad = set()
        box.streams()
        standby.await_slot("outbox_relay")
        # From here on lane 1 hangs, and with it the slot.
        box.add(f"{b}1")
        box.add(f"{a}2", message=True)
        box.kafka.kill = lambda point: point == "after"
        with pytest.raises(Killed):
            wait_until(lambda: box.turned(0) and False, 20, "the kill")
        box.kafka.kill = lambda point: False
        box.fail_over(standby, url.replace(f":{primary.port}/", f":{standby.port}/"))
        try:
            place = "SELECT commit_lsn FROM outbox.lanes WHERE lane = 0"
            before = box.rows(place)
            box.relay(SKIP, 1, once=True)
            box.turn(1)
            wait_until(lambda: box.turned(0) and box.rows(place) > before, 20, "the place of lane 0")
            # Its batch comes out of the table, and knows of no place in the WAL.
            monkeypatch.setattr(wal_source, "_LOOK_SECONDS", 0.0)
            DeadLetters(box.admin, "outbox").retry(Selection())
            wait_until(lambda: box.turned(0) and f"{a}1" in box.kafka.names(), 20, "the dead letter")
            assert box.kafka.markers[0].stream is None
            box.relay(SKIP, 1, once=True)
            box.until(lambda: f"{b}1" in box.kafka.names(), "lane 1")
            box.streams()
            box.turns(5)
            assert sorted(box.kafka.names()) == sorted([f"{a}1", f"{a}2", f"{b}1"])
        finally:
            box.close()


@both
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_random_history(outboxed, chance, lanes, once):
    history = RandomHistory(outboxed(lanes), chance, once=once)
    history.start()
    for _ in range(120):
        history.step()
    history.end()
