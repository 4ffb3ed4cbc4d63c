"""Debezium's outbox EventRouter beside our relay, and one in the other's place, as docs/operations/debezium.md says."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from peers.connect import Worker
from peers.page import blocks
from psycopg import sql
from support import Load, check, wait_until
from uuid_utils.compat import uuid7

from outbox import Event, Outbox


@pytest.fixture(scope="module")
def worker(outbox_kafka_cluster, tmp_path_factory) -> Iterator[Worker]:
    with Worker(tmp_path_factory.mktemp("connect"), outbox_kafka_cluster.bootstrap_servers) as started:
        yield started


class Debezium:
    """The page's connectors on one database, under names that no other test has."""

    def __init__(self, worker: Worker, database) -> None:
        self.worker = worker
        self.name = database.name
        self._database = database
        self._admin = database.connect(autocommit=True)
        self._connectors: list[str] = []
        self._page = blocks(self.name)

    def run(self, words: str) -> list[int]:
        """Run the page's block of SQL that holds these words, each statement in a transaction of its own as in psql.

        Gives how many rows each one touched.
        """
        with psycopg.connect(self._database.url, autocommit=True) as session:
            return [session.execute(statement).rowcount for statement in self._page.statements(words)]

    def start(self, *, of_bytes: bool = False) -> str:
        """Start the page's connector for JSON, or the one for bytes. Gives its name."""
        address = urlsplit(self._database.url)
        name = f"{self.name}_bytes" if of_bytes else self.name
        config = self._page.json[0] | (self._page.json[1] if of_bytes else {})
        config |= {
            "database.hostname": address.hostname,
            "database.port": str(address.port),
            "database.dbname": self._database.name,
        }
        self._connectors.append(name)
        self.worker.create(name, config)
        return name

    def close(self) -> None:
        if self.worker.running:
            for name in self._connectors:
                self.worker.delete(name)
        wait_until(lambda: not self._slots("active"), what="the slots to be free")
        for slot in self._slots("true"):
            self._admin.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
        role = sql.Identifier(self.name)
        if self._admin.execute("SELECT FROM pg_roles WHERE rolname = %s", (self.name,)).fetchone() is not None:
            self._admin.execute(sql.SQL("DROP OWNED BY {}").format(role))
            self._admin.execute(sql.SQL("DROP ROLE {}").format(role))

    def _slots(self, condition: str) -> list[str]:
        slots = f"SELECT slot_name FROM pg_replication_slots WHERE database = %s AND {condition}"
        return [name for (name,) in self._admin.execute(slots, (self.name,))]


@pytest.fixture
def debezium(worker, outbox_postgres, outbox_kafka) -> Iterator[Debezium]:
    made = Debezium(worker, outbox_postgres)
    yield made
    made.close()


def write(database, *events: Event) -> None:
    with database.connect() as connection:
        for event in events:
            Outbox().add(connection, event)


LARGE = {"text": "".join(chr(0x100 + n % 0x400) for n in range(200_000))}
JSON: list[Any] = [
    {"total_cents": 4200},
    {"ü": [1, {"😀": None}], "b": True, "a": {"z": [], "y": {}}, "long key": '\\ " \n \u2028 \x7f </script>'},
    [1.5, -0.0, 1e-7, 12345678901234567890, 2**53 + 1],
    {},
    [],
    LARGE,
]
# What SQL can write and our writer refuses or can't say: scalars, numbers that no float holds.
TEXTS = ['"text"', '" "', '""', "null", "0", '{"n": 1.10, "m": 1e400, "o": 0.10000000000000000555111512312578}']
BYTES = [b"\x00\xff\xfe", b"", b"{}", bytes(range(256)) * 100]
KEYS = ["4711", "schlüssel 😀", "x" * 990, " ", "null", "0", "a,b:c=d", '"q"']


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def write_all(database, kinds: list[str]) -> dict[str, dict[str, str]]:
    """Write every payload under every kind, ten to a transaction. Gives what each brings itself, by event id."""
    own: dict[str, dict[str, str]] = {}

    def event(number: int, payload: Any) -> Event:
        # JSON and bytes go through different connectors: no order between them, so no common keys.
        key = KEYS[number % len(KEYS)] + (" bytes" if isinstance(payload, bytes) else "")
        headers = {"tenant": "acme", "sprache": "größe", "traceparent": TRACE} if number % 2 else {}
        content_type = "application/vnd.order+json" if payload == JSON[0] else None
        made = Event(
            *(kinds[number % len(kinds)], key, f"Type{number % 3}", payload),
            headers=headers,
            content_type=content_type,
            event_id=uuid7(),
        )
        own[str(made.event_id)] = (
            headers
            | ({"ce_traceparent": TRACE} if headers else {})
            | ({} if content_type is None else {"content-type": content_type})
        )
        return made

    payloads = [*JSON, *BYTES, None] * len(KEYS)
    events = [event(number, payload) for number, payload in enumerate(payloads)]
    for first in range(0, len(events), 10):
        write(database, *events[first : first + 10])
    with database.connect() as connection:
        for number, text in enumerate(TEXTS):
            insert = (
                "INSERT INTO outbox.events (aggregate_type, aggregate_id, event_type, payload) "
                "VALUES (%s, %s, 'FromSql', %s::text::jsonb) RETURNING event_id::text"
            )
            row = connection.execute(insert, (kinds[0], f"sql {number}", text)).fetchone()
            own[row[0]] = {}
    return own


def test_the_messages_are_the_same(outbox_postgres, outbox_kafka, outbox_relay, debezium):
    # A type with capitals needs a route on our side: EventRouter can't write names in lower case.
    kinds = [outbox_kafka.name("order"), outbox_kafka.name("stock.item"), outbox_kafka.name("Invoice")]
    routes = {kind: outbox_kafka.create_topic(f"{kind}-events", 3) for kind in kinds}
    debezium.run("CREATE ROLE")
    debezium.run(f"CREATE PUBLICATION {debezium.name}_bytes")
    own = write_all(outbox_postgres, kinds)  # read by the snapshot
    debezium.start()
    debezium.start(of_bytes=True)
    snapshot = outbox_kafka.consume([*routes.values()], count=len(own))
    assert len(snapshot) == len(own)
    own |= write_all(outbox_postgres, kinds)  # read from the WAL
    theirs = outbox_kafka.consume([*routes.values()], count=len(own))
    outbox_relay(routes=json.dumps(routes))
    both = outbox_kafka.consume([*routes.values()], count=2 * len(own))
    places = {(m.topic(), m.partition(), m.offset()) for m in theirs}
    ours = [m for m in both if (m.topic(), m.partition(), m.offset()) not in places]
    assert len(theirs) == len(ours) == len(own)

    by_id = {headers(message)["id"].decode(): message for message in ours}
    assert set(by_id) == set(own)
    for message in theirs:
        name = headers(message)["id"].decode()
        other = by_id[name]
        assert (message.topic(), message.partition()) == (other.topic(), other.partition())
        assert (message.key(), message.value()) == (other.key(), other.value())
        their, our = headers(message), headers(other)
        assert set(their) <= set(our)
        # All that Debezium lacks is what the event brought itself.
        lacking = {key: value for key, value in our.items() if their.get(key) != value}
        assert lacking == {key: value.encode() for key, value in own[name].items()}
    assert order(theirs) == order(ours)


def headers(message) -> dict[str, bytes]:
    found = message.headers() or []
    assert len(dict(found)) == len(found)
    return dict(found)


def order(messages) -> dict[tuple[str, bytes], list[bytes]]:
    """Event ids per topic and key, in the order in which they stand there."""
    found = defaultdict(list)
    for message in messages:
        found[message.topic(), message.key()].append(headers(message)["id"])
    return dict(found)


def asynchronous(database) -> None:
    """Let writers commit before their WAL is written: what they have committed, slots don't see at once."""
    with database.connect(autocommit=True) as connection:
        alter = sql.SQL("ALTER DATABASE {} SET synchronous_commit = off")
        connection.execute(alter.format(sql.Identifier(database.name)))


def slot_is_free(database, name: str) -> bool:
    with database.connect() as connection:
        slot = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
        return connection.execute(slot, (name,)).fetchone() == (False,)


def snapshot_is_over(worker: Worker, name: str) -> bool:
    """Return whether all that stood in the table when the connector started is acknowledged, by the offsets kept."""
    offsets = worker.offsets(name)
    return bool(offsets) and not any("snapshot" in offset for offset in offsets)


def more(load: Load, events: int = 300) -> int:
    """Wait for more load; give how much is committed then."""
    goal = load.committed() + events
    wait_until(lambda: load.committed() >= goal, what="more load")
    return goal


def test_there_and_back_under_load(outbox_postgres, outbox_kafka, outbox_relay, debezium):
    asynchronous(outbox_postgres)
    url, kind = outbox_postgres.url, outbox_kafka.name("counter")
    topic = outbox_kafka.create_topic(f"{kind}-events", 3)
    with Load(url, kind) as load:
        relay = outbox_relay()
        outbox_kafka.consume(topic, count=more(load))

        relay.terminate()
        assert relay.wait() == 0
        more(load)
        debezium.run("CREATE ROLE")
        name = debezium.start()
        wait_until(lambda: snapshot_is_over(debezium.worker, name), what="the snapshot to be over")
        # Messages in the WAL are nothing to it.
        with outbox_postgres.connect() as connection:
            connection.execute("SELECT pg_logical_emit_message(true, 'outbox', 'an event')")
            connection.execute("SELECT pg_logical_emit_message(false, 'outbox', 'a mark', true)")
        outbox_kafka.consume(topic, count=more(load))

        debezium.worker.stop_connector(name)
        wait_until(lambda: slot_is_free(outbox_postgres, name), what="the slot to be free")
        more(load)
        _, standing, unpublished, deleted = debezium.run("pg_logical_slot_peek_binary_changes")
        assert unpublished >= 300
        assert deleted >= 600
        assert standing <= unpublished + deleted
        outbox_relay()
        outbox_kafka.consume(topic, count=more(load))
        debezium.worker.delete(name)
        debezium.run("pg_drop_replication_slot")
        load.drain()
    # Nothing lost, in order per key. The slot knows whole transactions only, of four events at most with this load: of
    # the one that was under way when the connector stopped, what was published is published again.
    assert check(url, outbox_kafka.consume(topic)) <= 4


def test_debezium_is_killed_and_we_take_over(outbox_postgres, outbox_kafka, outbox_relay, tmp_path):
    asynchronous(outbox_postgres)
    url, kind = outbox_postgres.url, outbox_kafka.name("counter")
    topic = outbox_kafka.create_topic(f"{kind}-events", 3)
    with (
        Worker(tmp_path, outbox_kafka.bootstrap_servers) as worker,
        closing(Debezium(worker, outbox_postgres)) as debezium,
    ):
        with Load(url, kind) as load:
            debezium.run("CREATE ROLE")
            name = debezium.start()
            wait_until(lambda: snapshot_is_over(worker, name), what="the snapshot to be over")
            outbox_kafka.consume(topic, count=more(load))
            worker.kill()
            wait_until(lambda: slot_is_free(outbox_postgres, name), what="the slot to be free")
            more(load)
            debezium.run("pg_logical_slot_peek_binary_changes")
            outbox_relay()
            more(load)
            load.drain()
    check(url, outbox_kafka.consume(topic))


def test_rows_are_deleted_while_debezium_runs(outbox_postgres, outbox_kafka, debezium):
    asynchronous(outbox_postgres)
    url, kind = outbox_postgres.url, outbox_kafka.name("counter")
    topic = outbox_kafka.create_topic(f"{kind}-events", 3)
    admin = outbox_postgres.connect(autocommit=True)
    with Load(url, kind) as load:
        debezium.run("CREATE ROLE")
        name = debezium.start()
        passed = (
            f"SELECT (SELECT max(lsn) FROM {name}_standing) <= confirmed_flush_lsn "
            "FROM pg_replication_slots WHERE slot_name = %s"
        )
        wait_until(lambda: snapshot_is_over(debezium.worker, name), what="the snapshot to be over")
        for _ in range(3):
            more(load)
            (marked,) = debezium.run("pg_current_wal_insert_lsn")
            assert debezium.run("DELETE FROM outbox.events AS e USING passed")[0] <= marked
            (marked,) = debezium.run("pg_current_wal_insert_lsn")
            wait_until(lambda: admin.execute(passed, (name,)).fetchone() == (True,), what="the slot to pass")
            assert debezium.run("DELETE FROM outbox.events AS e USING passed")[0] == marked > 0
        load.stop()
        outbox_kafka.consume(topic, count=load.committed())
        # Nothing was deleted that Debezium had not published.
        assert check(url, outbox_kafka.consume(topic)) == 0


def test_what_the_slot_can_not_see_yet_stays(outbox_postgres, debezium):
    """Slots see what is written to disk; with synchronous_commit = off a committed row can be there before that."""
    asynchronous(outbox_postgres)
    admin = outbox_postgres.connect(autocommit=True)
    debezium.run("CREATE ROLE")
    admin.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (debezium.name,))
    writer = outbox_postgres.connect()
    for number in range(50):
        with writer.transaction():
            # In a savepoint, whose rows have a transaction id of their own.
            with writer.transaction():
                Outbox().add(writer, Event("Order", str(number), "OrderPlaced", {}))
        *_, unpublished, deleted = debezium.run("pg_logical_slot_peek_binary_changes")
        assert (unpublished, deleted) == (number + 1, 0)


def test_why_the_publication_is_of_inserts_alone(outbox_postgres):
    """Postgres refuses each DELETE on a table whose deletes are published without a column of the primary key."""
    admin = outbox_postgres.connect(autocommit=True)
    if admin.info.server_version < 180000:
        pytest.skip("older Postgres takes no notice; run this with 18 or newer")
    write(outbox_postgres, Event("Order", "4711", "OrderPlaced", {}))
    admin.execute("CREATE PUBLICATION by_itself FOR TABLE outbox.events")
    with pytest.raises(psycopg.errors.InvalidColumnReference, match="generated columns"):
        admin.execute("DELETE FROM outbox.events")
    admin.execute("DROP PUBLICATION by_itself")
    assert admin.execute("DELETE FROM outbox.events").rowcount == 1
