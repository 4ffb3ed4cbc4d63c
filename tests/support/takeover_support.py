"""Workers that take lanes over from one another, step by step: on real servers, without processes and their timing.

``place`` is for import.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import pytest
from polling_support import polling
from support import carry_out, tried, write

from outbox import Event
from outbox._app import migrate as db
from outbox._app.settings import client_options
from outbox.errors import OutboxError
from relay.config import delivery_seconds, load, producer_options, state_topic_name
from relay.core.lease import Lease
from relay.core.ports import Batches, Completed, Receipt, Sent
from relay.kafka.fencing import fence
from relay.kafka.idempotent import IdempotentPublisher
from relay.kafka.producer import Sending
from relay.kafka.state_topic import StateTopic
from relay.kafka.takeover import Takeover
from relay.kafka.transactional import TransactionalPublisher
from relay.lanes import LaneTable
from relay.parts import build_router, build_topics
from relay.polling.source import PollingSource

LANES = 6

_ROW = "id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_bytes, headers, created_at"


class Tables:
    """One database with some lanes. ``acquire`` takes them over from whoever holds them."""

    def __init__(self, database, lanes: int) -> None:
        self.url = database.url
        db.change_lanes(self.url, lanes)
        self.table = LaneTable(database.connect(autocommit=True), "outbox", "me", "0", 600.0)
        self.opened: list[PollingSource] = []

    def acquire(self, lanes: Collection[int], table: LaneTable | None = None) -> list[Lease]:
        self.run("UPDATE outbox.lanes SET lease_until = '-infinity' WHERE lane = ANY(%s)", list(lanes))
        leases = (table or self.table).acquire(len(lanes))
        assert [lease.lane for lease in leases] == sorted(lanes)
        return leases

    def source(self, leases: Collection[Lease], *, archive: bool = False) -> PollingSource:
        # What is refused comes back in no test, however slow the machine is.
        self.opened.append(polling(self.url, leases, policy=tried(10, 600.0, 600.0), archive=archive))
        return self.opened[-1]

    def add(self, *keys: str, kind: str = "Order") -> None:
        write(self.url, [Event(kind, key, "T", {}) for key in keys])

    def run(self, query: str, *values: object) -> list[tuple]:
        return carry_out(self.url, query, values)

    def save(self) -> None:
        """Keep the rows as they are now, for ``restore``."""
        self.run(f"CREATE TABLE saved_events AS SELECT {_ROW} FROM outbox.events")
        self.run("CREATE TABLE saved_lanes AS SELECT lane, epoch, transactional_id, last_batch FROM outbox.lanes")

    def restore(self) -> None:
        """Undo what was committed since, as a failover to a standby that was behind does."""
        self.run(
            f"INSERT INTO outbox.events ({_ROW}) OVERRIDING SYSTEM VALUE SELECT {_ROW} FROM saved_events AS s "
            "WHERE NOT EXISTS (SELECT FROM outbox.events AS e WHERE e.id = s.id)"
        )
        self.run(
            "UPDATE outbox.lanes AS l SET epoch = s.epoch, last_batch = s.last_batch, "
            "transactional_id = s.transactional_id FROM saved_lanes AS s WHERE s.lane = l.lane"
        )

    def left(self) -> list[str]:
        return [key for (key,) in self.run("SELECT aggregate_id FROM outbox.events ORDER BY id")]

    def ids(self) -> dict[int, str | None]:
        return dict(self.run("SELECT lane, transactional_id FROM outbox.lanes ORDER BY lane"))

    def batches(self) -> dict[int, int | None]:
        return dict(self.run("SELECT lane, last_batch FROM outbox.lanes ORDER BY lane"))


class Worker:
    """A source and a publisher over some lanes, put together as in wiring.py."""

    def __init__(self, place: Place, base_id: str, leases: Collection[Lease], *, exact: bool = True) -> None:
        self.place = place
        self.base_id = place.settings.name + ".relay." + base_id
        self.leases = list(leases)
        self.exact = exact
        self.source = place.tables.source(leases)
        self.fenced: list[str] = []
        self.abandoned: list[str] = []
        self.publisher = self.new_publisher()

    def new_publisher(self) -> TransactionalPublisher | IdempotentPublisher:
        settings, options = self.place.settings, producer_options(self.place.settings)
        if not self.place.slow_commits_count:
            # The long ones are there to recognize a clean commit.
            options |= {"retry.backoff.ms": "50", "retry.backoff.max.ms": "200"}
        sending = Sending(options, build_router(settings), build_topics(settings), "/test", delivery_seconds(settings))

        # Not self: librdkafka's threads end with the last reference to a producer, and a cycle waits for the collector.
        fenced = self.fenced

        def fencing(transactional_id: str) -> None:
            fenced.append(transactional_id)
            fence(options, transactional_id)

        takeover = Takeover(
            self.source.store, self.place.state, fencing, self.base_id if self.exact else None, abandoned=self.abandoned
        )
        if not self.exact:
            made = IdempotentPublisher(sending, takeover)
        else:
            made = TransactionalPublisher(
                sending, base_id=self.base_id, takeover=takeover, lane_count=LANES, state=self.place.state
            )
            if not self.place.slow_commits_count:
                made._clean_seconds = 3600.0
        self.place.opened.append(made)
        return made

    def renew(self, base_id: str) -> None:
        """Go on under other ids, as where the broker does not lend the old ones."""
        self.publisher.close()
        self.abandoned.append(self.base_id)
        self.base_id = self.place.settings.name + ".relay." + base_id
        self.publisher = self.new_publisher()

    def join(self) -> Mapping[int, OutboxError]:
        return self.publisher.join(self.leases)

    def publish(self, limit: int = 3) -> Sent:
        """Read a turn of all lanes and publish it, without settling it."""
        fetched = self.source.fetch({lease.lane: limit for lease in self.leases})
        assert fetched.failed == {}
        return self.publisher.publish(fetched.batches, self.source.confirm if fetched.unconfirmed else None)

    def unsettled(self, limit: int = 2) -> Completed:
        """Publish a turn; its settling is not in Postgres yet."""
        sent = self.publish(limit)
        assert isinstance(sent, Completed)
        self.source.settle(sent.receipts)
        return sent

    def in_hand(self) -> Batches:
        """Read a turn, which is not published."""
        batches = self.source.fetch({lease.lane: 2 for lease in self.leases}).batches
        self.source.settle({lane: Receipt() for lane in batches})
        return batches

    def turn(self, limit: int = 3) -> int:
        """Publish a turn and settle it; give the number of its events. 0 when there are no more."""
        if not self.place.tables.left():
            return 0
        sent = self.publish(limit)
        assert isinstance(sent, Completed)
        assert self.source.settle(sent.receipts) == {}
        assert self.source.flush(list(sent.receipts)) == {}
        if sent.publisher_unusable:
            # A commit that librdkafka had to ask for twice.
            self.publisher.close()
            self.publisher = self.new_publisher()
            assert self.join() == {}
        return sum(receipt.count for receipt in sent.receipts.values())

    def drain(self) -> None:
        while self.turn(50):
            pass


class Place:
    """An outbox with some lanes, a name, and a topic that no other test has; with ``name``, that of another outbox.

    ``address`` is where the workers reach the brokers, if not where the test does. Which of its producers a worker has
    at hand, most tests count: no commit is so slow that it makes new ones, but where ``slow_commits_count``.
    """

    def __init__(
        self, database, kafka, address: str | None = None, *, slow_commits_count: bool = False, name: str | None = None
    ) -> None:
        self.slow_commits_count = slow_commits_count
        self.kafka = kafka
        self.tables = Tables(database, LANES)
        self.kind = kafka.name("Bill" if name else "Order")
        self.topic = kafka.create_topic(f"{self.kind.lower()}-events", 3)
        self.settings = load(
            database_url=database.url,
            name=name or kafka.name("outbox"),
            delivery="exactly-once",
            create_topics=True,
            # Two thirds of it, a turn may take.
            relay={"lease_seconds": 60.0},
            kafka={"bootstrap.servers": address or kafka.bootstrap_servers},
        )
        self.state = StateTopic(client_options(self.settings), state_topic_name(self.settings))
        self.opened: list[TransactionalPublisher | IdempotentPublisher] = []
        self.count = 0

    def worker(self, base_id: str, lanes: Collection[int] = range(LANES), *, exact: bool = True) -> Worker:
        return Worker(self, base_id, self.tables.acquire(lanes), exact=exact)

    def joined(self, base_id: str, lanes: Collection[int] = range(LANES), *, exact: bool = True) -> Worker:
        worker = self.worker(base_id, lanes, exact=exact)
        assert worker.join() == {}
        return worker

    def add(self, count: int | None = None) -> None:
        """Add events: so many, and more until every lane has one of them; None: six of them, for several turns.

        A key's lane depends on the type's random name.
        """
        least = 6 if count is None else 1
        count = 60 if count is None else count
        first = f"k{self.count:04}"
        lanes: list[tuple] = []
        while lanes != [(LANES,)]:
            self.tables.add(*[f"k{n:04}" for n in range(self.count, self.count + count)], kind=self.kind)
            self.count += count
            lanes = self.tables.run(
                "SELECT count(*) FROM (SELECT FROM outbox.events WHERE aggregate_id >= %s "
                "GROUP BY lane HAVING count(*) >= %s) AS lanes",
                first,
                least,
            )
            count = 10

    def read(self) -> Counter[str]:
        """How often each event stands in the topic, for readers of what is committed."""
        return Counter(message.key().decode() for message in self.kafka.consume(self.topic))

    def all_once(self) -> bool:
        assert self.tables.left() == []
        read = self.read()
        return read == Counter({f"k{n:04}": 1 for n in range(self.count)})

    def close(self) -> None:
        for publisher in self.opened:
            publisher.close()
        for source in self.tables.opened:
            source.close()
        self.opened.clear()


@pytest.fixture
def place(outbox_postgres, outbox_kafka):
    place = Place(outbox_postgres, outbox_kafka)
    yield place
    place.close()
