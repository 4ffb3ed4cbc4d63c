"""What a run goes on: the brokers that several runs share, and a database and topics of its own."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, Self

import psycopg
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions, ResourceType  # type: ignore[attr-defined]
from hostile_messages import TOPIC as ANY_TIME
from kafka_proxy import KafkaProxy, ProxiedKafka
from proxy import TcpProxy
from standby import Standby, either, require_standby
from wal_support import to_wal

from chaos.course import KIND_NAMES, LATER, MAX_SIZE, REFUSED_BYTES, SMALL, STRICT, Course
from chaos.faults import Servers
from chaos.history import EventIds, Kind, Place
from chaos.reading import LiveReader
from chaos.workload import prepare
from outbox._app import migrate as db
from outbox.sandbox._process import patience
from outbox.sandbox.errors import ServiceError
from outbox.sandbox.kafka import KafkaCluster
from outbox.sandbox.postgres import USER, PostgresServer
from outbox.testing.fixtures import Topics, migrate
from relay.audit import ledger

# Small batches: many turns. With 256 lanes each has its part of them.
_BATCH: Final = {4: 200, 64: 1000, 256: 1000}
_BATCHES_OF_A_TURN: Final = 8
_PARTITIONS: Final = 4
_WAL_SLOT: Final = "chaos"
_ADMIN_SECONDS: Final = 5.0
_IDS_BEFORE_SECONDS: Final = 90.0
# By its settings Kafka may delete records of any age: without that, the audit takes those for missing whose places the
# archive does not know.
_LIMITED: Final = {"retention.bytes": str(1 << 40)}

# SIGKILL leaves what was written to the kernel. What commits asynchronously stays in the server for up to 2 seconds.
_POSTGRES: Final = {"fsync": "off", "wal_writer_delay": "2s", "max_connections": "100", "autovacuum_naptime": "5s"}


# The audit knows the archive of a time if it has events from before.
_ARCHIVED_BEFORE: Final = """
INSERT INTO outbox.published (lane, id, event_id, aggregate_type, aggregate_id, event_type, created_at, published_at)
SELECT 0, 0, gen_random_uuid(), 'Before', 'k', 'E', at, at FROM (SELECT now() - interval '3 hours' AS at) AS before"""

# At-most-once there is no archive; the ledger knows what was written.
_COUNTED_BEFORE: Final = "UPDATE outbox.ledger_state SET since = since - interval '3 hours'"


class KafkaSite:
    """The brokers of several runs, one after the other, and a proxy before each of them."""

    def __init__(self, brokers: int) -> None:
        self._brokers = brokers
        self._opened = ExitStack()
        self.cluster: KafkaCluster
        self.proxies: list[KafkaProxy] = []

    @classmethod
    def on(cls, cluster: KafkaCluster, *proxies: KafkaProxy) -> Self:
        """Return a site on brokers that run already, behind these proxies. It does not end them."""
        site = cls(len(proxies))
        site.cluster, site.proxies = cluster, list(proxies)
        return site

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            self.proxies = [opened.enter_context(KafkaProxy()) for _ in range(self._brokers)]
            self.cluster = opened.enter_context(ProxiedKafka(*self.proxies))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def for_relays(self) -> str:
        """The addresses that relays are given."""
        return ",".join(proxy.address for proxy in self.proxies)


class Stage:
    """One run's own part: ``topics`` and ``kinds``, ``servers``, and what relays are told in ``settings``.

    ``url`` leads the writers and the checker to the database, past the proxies. All is closed with ``opened``.
    """

    def __init__(self, course: Course, site: KafkaSite, opened: ExitStack) -> None:
        self._course = course
        self._site = site
        self._opened = opened
        # No id is of a time to come, of which an audit would say nothing yet.
        self.ids = EventIds(secrets.token_hex(8), time.time() - _IDS_BEFORE_SECONDS)
        self.topics = opened.enter_context(Topics(site.cluster.bootstrap_servers))
        self.kinds = self._kinds()
        self.results, self.refused = self.topics.name("results"), self.topics.name("refused")
        self._partitions = {number: [_PARTITIONS] for number in self.kinds}
        self._mended: set[int] = set()
        self.deleted: dict[Place, int] = {}
        """Up to which offset records of events were deleted, or may have been."""
        self.servers, self.url, relays_url = self._postgres()
        opened.callback(self.servers.heal_kafka)
        self._create_topics()
        self.settings = self._settings(relays_url)
        if course.configuration.source == "wal":
            to_wal(self.url, self.settings)

    @property
    def turn_events(self) -> int:
        """How many events a turn of a relay may have: see relay/core/loop.py."""
        return _BATCHES_OF_A_TURN * _BATCH[self._course.lanes]

    @property
    def first_topics(self) -> list[str]:
        """The topics of events that are there from the beginning."""
        return [kind.topic for number, kind in self.kinds.items() if number != LATER]

    @property
    def limited_topics(self) -> list[str]:
        """The topics that take no large requests."""
        return [self.kinds[number].topic for number in (SMALL, STRICT)]

    @property
    def dead_letter_topics(self) -> list[str]:
        """The topics of copies of dead letters."""
        return sorted({kind.dead_letter_topic for kind in self.kinds.values() if kind.dead_letter_topic})

    @property
    def final_kinds(self) -> dict[int, Kind]:
        """Return the kinds with what operators have made of their topics."""
        return {
            number: replace(kind, partitions=tuple(self._partitions[number]), mended=number in self._mended)
            for number, kind in self.kinds.items()
        }

    def take(self, number: int, size: int) -> None:
        """Let a topic take requests up to this size. Raises KafkaException."""
        self._mended.add(number)
        entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, self.kinds[number].topic, incremental_configs=[entry])
        self.topics._admin.incremental_alter_configs([resource], request_timeout=_ADMIN_SECONDS)[resource].result()

    def add_partitions(self, number: int, more: int, reader: LiveReader) -> bool:
        """Give a topic more partitions. Returns False where it is not there. Raises KafkaException, ServiceError."""
        topic = self.kinds[number].topic
        there = len(self.topics._partitions(topic))
        if not there:
            return False
        # Known before it is asked for: the answer may be lost, and the partitions be there.
        self._partitions[number].append(there + more)
        created = self.topics._admin.create_partitions(
            [NewPartitions(topic, there + more)], operation_timeout=_ADMIN_SECONDS, request_timeout=_ADMIN_SECONDS
        )
        created[topic].result()
        reader.follow([topic])
        return True

    def delete(self, ends: Mapping[Place, int]) -> bool:
        """Delete the records before these offsets, as a short retention would. Raises KafkaException."""
        # Known before it is asked for, as with partitions.
        self.deleted |= ends
        places = [TopicPartition(topic, part, end) for (topic, part), end in ends.items()]
        for deleted in self.topics._admin.delete_records(places, request_timeout=_ADMIN_SECONDS).values():
            deleted.result()
        return bool(ends)

    def ends(self) -> dict[Place, int]:
        """Return where the topics of events end, with what is not committed. Raises KafkaException, ServiceError."""
        topics = set(self.topics._admin.list_topics(timeout=_ADMIN_SECONDS).topics)
        ends = self.topics._ends([kind.topic for kind in self.kinds.values() if kind.topic in topics], committed=False)
        if not ends:
            raise ServiceError("a partition has no leader")
        return ends

    def await_standby(self) -> None:
        """Wait until the standby has the slot: a relay has to read from it before it is worth anything over there."""
        if self.servers.standby is not None and self._course.configuration.source == "wal":
            self.servers.standby.await_slot(_WAL_SLOT)

    def _kinds(self) -> dict[int, Kind]:
        dead = self.topics.name("dead")
        return {
            number: Kind(
                name,
                self.topics.name(f"{name.lower()}-events"),
                blocks=number == STRICT,
                dead_letter_topic=dead if number in {SMALL, STRICT} else None,
            )
            for number, name in enumerate(KIND_NAMES)
        }

    def _postgres(self) -> tuple[Servers, str, str]:
        """Start Postgres, and its standby; return them with the address for writers and that for relays."""
        primary = self._opened.enter_context(PostgresServer(settings=_POSTGRES))
        url = primary.create_database("chaos")
        migrate(url)
        if self._course.lanes != 4:
            db.change_lanes(url, self._course.lanes)
        prepare(url)
        with psycopg.connect(url) as connection:
            connection.execute(_ARCHIVED_BEFORE)
            if self._course.configuration.lossy:
                ledger.turn_on(connection, "outbox", None)
                connection.execute(_COUNTED_BEFORE)
        proxies = [self._opened.enter_context(TcpProxy("127.0.0.1", primary.port))]
        synced_slots = self._course.configuration.source == "wal"
        servers = Servers(primary, self._site.cluster, proxies, self._site.proxies)
        if not self._course.standby:
            return servers, url, f"postgresql://{USER}@{proxies[0].address}/chaos"
        servers.standby = self._opened.enter_context(Standby(primary, synced_slots=synced_slots))
        require_standby(primary)
        proxies.append(self._opened.enter_context(TcpProxy("127.0.0.1", servers.standby.port)))
        addresses = ",".join(each.address for each in proxies)
        relays_url = f"postgresql://{USER}@{addresses}/chaos?target_session_attrs=read-write"
        return servers, either(primary, servers.standby, "chaos"), relays_url

    def _create_topics(self) -> None:
        for number in self.kinds:
            if number != LATER:
                self._create(number)
        self.topics.create_topic(self.kinds[SMALL].dead_letter_topic or "", 1)
        self.topics.create_topic(self.results, _PARTITIONS)
        self.topics.create_topic(self.refused, 1, {"max.message.bytes": str(2 * MAX_SIZE)})

    def _create(self, number: int) -> None:
        # Strangers write messages of any time.
        config = ANY_TIME | ({"max.message.bytes": str(REFUSED_BYTES)} if number in {SMALL, STRICT} else {})
        if self._course.retention:
            config |= _LIMITED
        self.topics.create_topic(self.kinds[number].topic, _PARTITIONS, config)

    def create_late(self, reader: LiveReader) -> None:
        """Create the topic that was missing, as soon as the brokers let us."""
        topic = self.kinds[LATER].topic
        deadline = time.monotonic() + 60 * patience()
        while True:
            try:
                if not self.topics._partitions(topic):
                    self._create(LATER)
                reader.follow([topic])
            except (KafkaException, ServiceError):
                # One of them is away just now.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            else:
                return

    def _settings(self, relays_url: str) -> dict[str, Any]:
        configuration = self._course.configuration
        routes = {
            kind.name: {
                "topic": kind.topic,
                "on_failure": "block" if kind.blocks else "skip",
                **({"dead_letter_topic": kind.dead_letter_topic} if kind.dead_letter_topic else {}),
            }
            for kind in self.kinds.values()
        }
        settings: dict[str, Any] = {
            "database_url": relays_url,
            "bootstrap_servers": self._site.for_relays,
            "delivery": configuration.delivery,
            "source": configuration.source,
            "name": self.topics.name("outbox"),
            "routes": json.dumps(routes),
            "create_topics": False,
            "log_format": "json",
            "wal__slot": _WAL_SLOT,
            "relay__batch_size": _BATCH[self._course.lanes],
            "relay__lease_seconds": 5,
            "relay__max_backoff_seconds": 1,
            "failures__max_attempts": 3,
            "failures__min_backoff_seconds": 0.2,
            "failures__max_backoff_seconds": 1,
            "kafka__reconnect_backoff_max_ms": 500,
        }
        if configuration.audited and not configuration.lossy:
            settings["relay__archive_days"] = 1
        return settings
