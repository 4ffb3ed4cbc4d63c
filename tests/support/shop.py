"""A shop that writes events of few keys, and a sink that applies them, for tests in which a server is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import psycopg
from chaos.history import partition_of
from inbox_member import FAST as INBOX
from inbox_support import Running
from restored import KEPT
from rows_and_roles import execute
from support import look_up
from wal_support import to_wal

from outbox import Event, Outbox
from outbox._app import migrate as db
from outbox.inbox import Consumer, KafkaMessage
from outbox.sandbox.postgres import PostgresServer
from relay.wal.lane_hash import lane_of

FAST = {"fsync": "off", "autovacuum": "off", **KEPT}


class Shop:
    """Events of four keys, one in each partition of each of two lanes, with revisions that the database counts."""

    def __init__(self, kafka: Any, kind: str = "Order") -> None:
        self.kafka = kafka
        self.kind = kafka.name(kind)
        self.topic = kafka.create_topic(f"{self.kind.lower()}-events", 2)
        places = [(lane, partition) for lane in range(2) for partition in range(2)]
        self.keys = [next(key for key in map(str, range(1000)) if self._place_of(key) == place) for place in places]

    def prepare(self, url: str) -> None:
        """Make its table; two lanes."""
        db.change_lanes(url, 2)
        execute(url, "CREATE TABLE shop (key text PRIMARY KEY, revision int NOT NULL)")

    def write(self, url: str, rounds: int) -> list[str]:
        """Write so many events of each of four keys, each key's in one transaction. Returns their ids."""
        ids = []
        with psycopg.connect(url) as connection:
            for number in range(4 * rounds):
                key = self.keys[number % 4]
                [(revision,)] = connection.execute(
                    "INSERT INTO shop VALUES (%s, 1) ON CONFLICT (key) DO UPDATE SET revision = shop.revision + 1"
                    " RETURNING revision",
                    (key,),
                ).fetchall()
                event = Event(self.kind, key, "Changed", {"revision": revision})
                ids.append(str(Outbox().add(connection, event)))
        return ids

    def published(self) -> Counter[str]:
        """How often each event can be read."""
        return Counter(self._read())

    def in_order(self, ids: list[str]) -> bool:
        """Whether these events, each key's in this order, are read in the order of their keys."""
        return in_order(ids, self._read())

    def consumer(self, sink: str, **options: Any) -> Running:
        """Run a consumer of the topic, whose effects are in the database ``sink``."""
        kafka = {"bootstrap.servers": self.kafka.bootstrap_servers, **INBOX}
        return Running(Consumer(sink, [self.topic], group="g", kafka=kafka, **options), _apply_id)

    def _place_of(self, key: str) -> tuple[int, int]:
        return lane_of(self.kind, key, 2), partition_of(key, 2)

    def _read(self) -> list[str]:
        return [dict(message.headers())["ce_id"].decode() for message in self.kafka.consume(self.topic)]


def in_order(ids: list[str], seen: Sequence[str]) -> bool:
    """Whether events, each key's in the order in which Shop.write has returned them, are seen in that order."""
    number = {event_id: at for at, event_id in enumerate(ids)}
    found = [number[event_id] for event_id in seen if event_id in number]
    return all([at for at in found if at % 4 == key] == list(range(key, len(ids), 4)) for key in range(4))


def outbox_of(private_postgres: Any, shop: Shop, settings: dict[str, Any]) -> tuple[PostgresServer, str]:
    """Make a server with the outbox of a shop, which is read from the settings' source."""
    settings["wal__slot"] = shop.kafka.name("slot").replace("-", "_")
    primary = private_postgres(FAST)
    url = private_postgres.database(primary).url
    shop.prepare(url)
    if settings["source"] == "wal":
        to_wal(url, settings)
    return primary, url


def _apply_id(connection: psycopg.Connection[Any], message: KafkaMessage) -> None:
    """Insert the id of a message's event."""
    headers = dict(message.headers() or [])
    connection.execute("INSERT INTO applied (event_id) VALUES (%s)", (headers["ce_id"].decode(),))


def prepare_sink(url: str) -> None:
    """Make the table of a consumer's effects."""
    execute(url, "CREATE TABLE applied (n bigint GENERATED ALWAYS AS IDENTITY, event_id text)")


def applied(url: str) -> list[str]:
    """Return the ids of the events that were applied, in the order in which they were."""
    return [event_id for (event_id,) in look_up(url, "SELECT event_id FROM applied ORDER BY n")]
