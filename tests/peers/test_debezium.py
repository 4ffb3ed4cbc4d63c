"""Debezium's outbox EventRouter beside our relay, and one in the other's place. The settings are docs/debezium.md's."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from peers.connect import Worker
from psycopg import sql

from outbox import Event, Outbox

PAGE = Path(__file__).parents[2] / "docs" / "debezium.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = "debezium_outbox"
"""Of role, slot, publication and topic prefix on the page."""


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
        # Roles and slots belong to the whole server.
        blocks = BLOCK.findall(PAGE.read_text().replace(NAME, self.name))
        self._sql = [text for language, text in blocks if language == "sql"]
        self._json = [json.loads(text) for language, text in blocks if language == "json"]

    def run(self, number: int) -> None:
        """Run one of the page's blocks of SQL, each statement in a transaction of its own as in psql."""
        for statement in re.split(r";$", self._sql[number], flags=re.MULTILINE):
            if statement.strip():
                self._admin.execute(statement)

    def start(self, name: str, **settings: str) -> str:
        """Start the page's connector."""
        address = urlsplit(self._database.url)
        config = self._json[0] | settings
        config |= {
            "database.hostname": address.hostname,
            "database.port": str(address.port),
            "database.dbname": self._database.name,
        }
        self._connectors.append(name)
        self.worker.create(name, config)
        return name

    def close(self) -> None:
        for name in self._connectors:
            self.worker.delete(name)
        slots = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s"
        self._admin.execute(slots, (self.name,))
        role = sql.Identifier(self.name)
        if self._admin.execute("SELECT FROM pg_roles WHERE rolname = %s", (self.name,)).fetchone() is not None:
            self._admin.execute(sql.SQL("DROP OWNED BY {}").format(role))
            self._admin.execute(sql.SQL("DROP ROLE {}").format(role))


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
TEXTS = [
    '"text"',
    '" "',
    '""',
    "null",
    "0",
    '{"n": 1.10, "m": 1e400, "o": 0.10000000000000000555111512312578}',
]
BYTES = [b"\x00\xff\xfe", b"", b"{}", bytes(range(256)) * 100]
KEYS = ["4711", "schlüssel 😀", "x" * 990, " ", "null", "0", "a,b:c=d", '"q"']


def write_all(database, kinds: list[str]) -> dict[str, dict[str, str]]:
    """Write every payload under every kind, in transactions of one and of many events. Gives their own headers."""
    own: dict[str, dict[str, str]] = {}

    def event(number: int, payload: Any) -> Event:
        # JSON and bytes go through different connectors: no order between them, so no common keys.
        key = KEYS[number % len(KEYS)] + (" bytes" if isinstance(payload, bytes) else "")
        headers = {"tenant": "acme", "sprache": "größe"} if number % 2 else {}
        made = Event(kinds[number % len(kinds)], key, f"Type{number % 3}", payload, headers=headers)
        own[str(made.event_id)] = headers
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
    debezium.run(0)
    debezium.run(1)
    own = write_all(outbox_postgres, kinds)  # read by the snapshot
    debezium.start(debezium.name)
    debezium.start(f"{debezium.name}_bytes", **debezium._json[1])
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
        assert set(headers(message).items()) <= set(headers(other).items())
        # All that Debezium lacks is what the event brought itself.
        assert {k: v for k, v in headers(other).items() if k not in headers(message)} == {
            k: v.encode() for k, v in own[name].items()
        }
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
