"""A worker that streams, loop and all, on real Postgres; Kafka is a list in memory that knows transactions."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import psycopg
import pytest
from standby import Standby
from support import tried, wait_until, write

from outbox import Event
from outbox._app import migrate as db
from outbox._app.choices import OnFailure
from outbox.errors import OutboxError, SchemaError
from relay.config import SourceKind
from relay.core.lane import LoopSettings
from relay.core.lease import HeldLanes, Lease
from relay.core.loop import WorkerLoop
from relay.core.marker import Identity, Marker, StateLost
from relay.core.ports import (
    Batches,
    BatchRefused,
    Claim,
    Completed,
    Confirm,
    Failed,
    Kind,
    Receipt,
    Refusal,
    Sent,
    Unavailable,
    UnsettledBatch,
)
from relay.database import Connector
from relay.kafka.routing import Route, Router
from relay.lanes import LaneTable
from relay.operations.wal_setup import Cdc
from relay.settle.retries import Failures
from relay.wal import session
from relay.wal.replication import Replication
from relay.wal.session import Stream, StreamSession
from relay.wal.slot import SlotNames
from relay.wal.source import StreamSource

BLOCK = Router({"Order": Route("orders")})
SKIP = Router({"Order": Route("orders", OnFailure.SKIP)})
MANY = 1000


class Killed(BaseException):
    """The relay is gone in this moment."""


class Kafka:
    """What is committed, and the last marker of every lane. Names and keys in ``bad`` are refused.

    ``stuck`` are lanes that can't be taken over. ``kill`` is asked at "before" and "after" a turn is committed, and at
    "between" two lanes of a turn without a transaction; ``fail`` is asked for the error of a turn ("before"), of which
    an acknowledgement is lost ("after"), and whether a key's events fail (its name).
    """

    def __init__(self) -> None:
        self.published: list[Claim] = []
        self.markers: dict[int, Marker] = {}
        self.bad: set[str] = set()
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

    def _marker(self, lane: int, batch: int, sent: Sequence[Claim]) -> Marker:
        lease, identity = self._joined[lane]
        return Marker(
            batch,
            lease.epoch,
            identity.system_identifier,
            identity.timeline,
            tuple(claim.position for claim in sent),
            tuple(claim.event_id for claim in sent),
            sent[-1].at.commit_lsn if sent and sent[-1].at else None,
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
        receipts = {}
        for lane, (sent, refused) in divided.items():
            batch = None
            if sent:
                batch = kafka.markers[lane].batch + 1
                kafka.markers[lane] = self._marker(lane, batch, sent)
                kafka.published += sent
            receipts[lane] = Receipt(UnsettledBatch(sent, number=batch), refused)
        if failure := kafka.fail("after"):
            # Committed, and nobody knows.
            return Failed(failure)
        return Completed(receipts)

    def _one_by_one(self, batches: Batches) -> Sent:
        kafka = self._kafka
        receipts = {}
        failure = None
        for lane, claims in batches.items():
            sent, refused = self._divided(claims)
            failing = {key for key in {claim.aggregate_id for claim in claims} if (error := kafka.fail(key))}
            failure = failure or (error if failing else None)
            sent = [claim for claim in sent if claim.aggregate_id not in failing]
            refused = [result for result in refused if result[0].aggregate_id not in failing]
            kafka.published += sent
            receipts[lane] = Receipt(UnsettledBatch(sent), refused)
            if kafka.kill("between"):
                raise Killed
        return Completed(receipts) if failure is None else Failed(failure, receipts)

    def _divided(self, claims: Sequence[Claim]) -> tuple[list[Claim], list[Refusal]]:
        sent: list[Claim] = []
        refused: list[Refusal] = []
        waiting: set[str] = set()
        for claim in claims:
            if claim.aggregate_id in waiting:
                continue
            if self._kafka.bad & {claim.event_type, claim.aggregate_id}:
                waiting.add(claim.aggregate_id)
                refused.append((claim, "bad"))
            else:
                sent.append(claim)
        return sent, refused

    def unpublishable_kinds(self) -> frozenset[Kind]:
        return frozenset()

    def serve(self) -> None: ...

    def close(self) -> None:
        self._closed = True


class Seen:
    """What the loop tells."""

    def __init__(self) -> None:
        self.errors: list[tuple[Collection[int], Exception]] = []

    def published(self, *_: object) -> None: ...
    def refused(self, lane: int, claim: Claim, reason: str) -> None: ...
    def unavailable(self, lanes: Collection[int], error: Exception, wait_seconds: float) -> None:
        self.errors.append((lanes, error))

    def turn(self, *_: float) -> None: ...
    def turn_limits(self, events: int, lanes: int) -> None: ...

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
        max_events: int = 30_000,
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
        # Only what is written later moves a stream at rest, and lanes wait for that before they stream.
        self.stream = stream = Stream(
            lambda leases: StreamSession(
                self.names, lambda: Replication(self.url, "relay"), connect, leases, max_events, heartbeat_seconds=0.05
            )
        )
        stream.begin(leases)
        failures = Failures("outbox", tried(attempts, backoff, backoff), router)

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
        """Turn all lanes until it holds, without a wait behind a turn that moved something."""

        def turned() -> Any:
            for _ in range(20):
                moved = self.turn()
                if found := condition():
                    return found
                if not moved:
                    break
            return None

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
            self.stream.end()
            self.stream = None

    def add(self, *names: str) -> None:
        """Write events called key-number, as in a1, in one transaction."""
        write(self.url, [Event("Order", name[0], name, {"n": name}) for name in names])
        for name in names:
            self.written[name[0]].append(name)

    def rows(self, query: str, *values: Any) -> list[Any]:
        return self.admin.execute(query, values).fetchall()

    def failed(self) -> list[str]:
        return [key for (key,) in self.rows("SELECT aggregate_id FROM outbox.failures ORDER BY id")]

    def hurry(self) -> None:
        self.admin.execute("UPDATE outbox.failures SET next_attempt_at = now() WHERE isfinite(next_attempt_at)")

    def session(self) -> Any:
        assert self.stream is not None
        return self.stream._session

    def held_back(self) -> int:
        return self.session()._buffered_events

    def nothing_left(self) -> None:
        """Nothing is held of the stream, not even a note."""
        assert self.held_back() == 0
        for channel in self.session()._channels.values():
            assert (list(channel._taken), list(channel._waiting), channel._settled) == ([], [], set())

    def given(self) -> int:
        """Return how many events the stream has given."""
        return sum(channel.put_count for channel in self.session()._channels.values())

    def read(self, count: int) -> None:
        """Wait until the stream has given so many events."""
        wait_until(lambda: self.given() >= count)

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
def outboxed(outbox_postgres, monkeypatch) -> Iterator[Callable[..., Outboxed]]:
    # How often feedback says how far the stream is used.
    monkeypatch.setattr(session, "_STATUS_SECONDS", 0.2)
    made: list[Outboxed] = []

    def make(lanes: int = 1) -> Outboxed:
        made.append(Outboxed(outbox_postgres.url, outbox_postgres.name, lanes))
        return made[-1]

    yield make
    for each in made:
        each.close()


both = pytest.mark.parametrize("once", [False, True], ids=["at-least-once", "exactly-once"])


def confirmed_flush(box: Outboxed) -> int:
    """Up to where the server may forget the WAL."""
    query = "SELECT (confirmed_flush_lsn - '0/0'::pg_lsn)::bigint FROM pg_replication_slots WHERE slot_name = %s"
    return int(box.rows(query, box.names.slot)[0][0])


def now_at(box: Outboxed) -> int:
    return int(box.rows("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint")[0][0])


def noted(box: Outboxed) -> list[None]:
    """Return where each turn of the stream that was not read ahead is noted from now on."""
    reader, sent = box.source._stream_reader, list[None]()
    send = reader._send
    reader._send = lambda announced: sent.append(send(announced))  # type: ignore[method-assign]
    return sent
