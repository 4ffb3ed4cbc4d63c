"""Builds a relay from settings: the one place where its parts are assembled."""

from __future__ import annotations

import os
import secrets
import socket
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry

from outbox import __version__
from outbox._app.prometheus import serve
from outbox._app.settings import client_options
from outbox._clients.clock import DatabaseClock
from outbox.urls import display_url
from relay.config import Delivery, Settings, SourceKind, delivery_seconds, producer_options, state_topic_name
from relay.core.lane import LoopSettings
from relay.core.lease import Lease
from relay.core.pauses import CurrentPauses
from relay.core.ports import Claim, IdBusy, Publisher, Source, TakeoverStore, TopicUnusable, kind_of
from relay.core.reports import LoopReports, TurnMetrics
from relay.database import LOCK_PART, Connector
from relay.kafka.client import accepted_before, log_unreachable
from relay.kafka.fencing import Fencing, ShortLivedProducer
from relay.kafka.idempotent import IdempotentPublisher
from relay.kafka.open_transactions import TransactionWatch
from relay.kafka.ordered import OrderedProducer
from relay.kafka.partition_counts import PartitionCounts
from relay.kafka.producer import Sending
from relay.kafka.routing import NoRoute
from relay.kafka.state_topic import StateTopic
from relay.kafka.takeover import Takeover, own_ids
from relay.kafka.topics import Topics
from relay.kafka.transactional import TransactionalPublisher
from relay.metrics.delays import PublishDelays
from relay.metrics.groups import GroupWatch
from relay.metrics.outbox import OutboxWatch
from relay.metrics.relay import RelayMetrics, SlotWatch, build_info, slot_repairs
from relay.metrics.storage import Place, StorageWatch
from relay.metrics.topics import TopicBacklogs
from relay.operations.wal_setup import SlotHealing
from relay.parts import build_failures, build_open_transactions, build_router, build_topics
from relay.polling.at_most_once import AtMostOnceSource
from relay.polling.kept_marks import KeptMarks
from relay.polling.source import PollingSource
from relay.sessions import RelayConnector
from relay.settle.settlement import RENEW_PART
from relay.supervisor import Components, Supervisor
from relay.tasks import idempotency_keys
from relay.tasks.archive import Retention
from relay.tasks.scheduled import NextDue, ScheduledEvents
from relay.upkeep import MaintenanceTask
from relay.wal.replication import Replication
from relay.wal.session import Stream, StreamSession
from relay.wal.slot import slot_names
from relay.wal.source import StreamSource

log = structlog.get_logger("relay")

_WATCH_SECONDS: Final = 10.0
# Without a statement while nothing is due.
_SCHEDULED_SECONDS: Final = 0.2
_ARCHIVE_SECONDS: Final = 60.0
_KEYS_SECONDS: Final = 600.0
_TRANSACTIONS_SECONDS: Final = 60.0
_PARTITIONS_SECONDS: Final = 60.0
# The part of a lease, besides the time for a turn, for reading, settling, and clock differences.
_SPARE_PART: Final = 0.1
# The bases of transactional ids that a worker remembers as its own. Lanes' rows name at most the last few of them; an
# older one is fenced like another worker's.
_BASES: Final = 8


def build(settings: Settings) -> Supervisor:
    """Return a relay that is ready to run. Raises ConfigurationError before connecting."""
    instance = settings.relay.instance or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    name = f"outbox relay {instance}"[:63]
    connect = RelayConnector(settings.require_database(), name)
    exact = settings.delivery is Delivery.EXACTLY_ONCE
    renew_part = min(max(RENEW_PART, delivery_seconds(settings) / settings.relay.lease_seconds + _SPARE_PART), 1.0)
    if settings.delivery is Delivery.AT_MOST_ONCE:
        # A turn's rows are deleted: what is not sent in time is lost.
        renew_part = 1.0
    if settings.relay.shutdown_seconds < delivery_seconds(settings):
        log.warning(
            "a stop may leave a turn in flight, which may take longer; raise OUTBOX_RELAY__SHUTDOWN_SECONDS, and what "
            "the process manager waits",
            shutdown_seconds=settings.relay.shutdown_seconds,
            turn_seconds=delivery_seconds(settings),
        )
    pauses = CurrentPauses()
    # As of the current turn: at-most-once, rows are deleted before they are sent.
    topics = build_topics(settings, lambda: pauses.obeyed.topics)
    new_publisher = _publisher(settings, topics)
    stream = _stream(settings, connect, name) if settings.source is SourceKind.WAL else None
    registry = CollectorRegistry()
    upkeep = [MaintenanceTask("server", connect.look, _WATCH_SECONDS), *_upkeep(settings, connect, instance, registry)]
    clock = DatabaseClock()
    meter = TurnMetrics(registry)
    if settings.relay.metrics_address is not None:
        meter.delays = PublishDelays(registry, clock, build_router(settings)).observe
        # Not the publisher's router, which another thread uses.
        topic_backlogs = TopicBacklogs(settings.db_schema, build_router(settings))
        expected = settings.relay.expected_relays
        outbox = OutboxWatch(connect, settings.db_schema, instance, registry, topic_backlogs, expected)
        upkeep.append(MaintenanceTask("backlog", outbox.look, _WATCH_SECONDS))
        groups = GroupWatch(
            settings.relay.sink_url or settings.require_database(),
            settings.consumer_schema,
            client_options(settings),
            outbox.shows,
            registry,
            required=settings.relay.sink_url is not None,
        )
        upkeep.append(MaintenanceTask("groups", groups.look, _WATCH_SECONDS))
        storage = StorageWatch(_places(settings, connect, name), outbox.shows, registry)
        upkeep.append(MaintenanceTask("storage", storage.look, _WATCH_SECONDS))
    next_due = NextDue()
    scheduled = ScheduledEvents(connect, settings.db_schema, next_due)
    upkeep.append(MaintenanceTask("scheduled events", scheduled.look, _SCHEDULED_SECONDS))
    hanging: Callable[[], Sequence[float]] = tuple
    grown: Callable[[], Mapping[str, str]] = dict
    if exact:
        transactions = TransactionWatch(build_open_transactions(settings))
        partitions = PartitionCounts(client_options(settings), build_router(settings).may_write)
        upkeep.append(MaintenanceTask("transactions", transactions.look, _TRANSACTIONS_SECONDS))
        upkeep.append(MaintenanceTask("partitions", partitions.look, _PARTITIONS_SECONDS))
        hanging, grown = transactions.hanging, partitions.grown
    relay = Supervisor(
        Components(
            instance=instance,
            version=__version__,
            schema=settings.db_schema,
            lease_seconds=settings.relay.lease_seconds,
            shutdown_seconds=settings.relay.shutdown_seconds,
            loop=LoopSettings(
                batch_size=settings.relay.batch_size,
                delivery_seconds=delivery_seconds(settings),
                max_idle_seconds=settings.relay.max_idle_seconds,
                max_backoff_seconds=settings.relay.max_backoff_seconds,
            ),
            connect=connect,
            source=_source(settings, connect, renew_part, topics, stream),
            publisher=new_publisher,
            begin_stream=None if stream is None else stream.begin,
            end_stream=(lambda: None) if stream is None else stream.end,
            sends_again=settings.delivery is not Delivery.AT_MOST_ONCE,
            upkeep=upkeep,
            hanging=hanging,
            topics=topics.reasons,
            grown=grown,
            meter=meter,
            clock=clock,
            pauses=pauses,
            next_due=next_due,
            first_contact=partial(log_unreachable, client_options(settings)),
            about=_about(settings),
        )
    )
    registry.register(RelayMetrics(relay.health))
    build_info(registry, __version__, settings.delivery, settings.source)
    if settings.relay.metrics_address is not None:
        serve(settings.relay.metrics_address, registry, health=relay.health, outbox=settings.name)
    return relay


def _places(settings: Settings, connect: Connector, name: str) -> list[Place]:
    """Return the schemas whose tables' sizes are shown: those of the outbox, and of its consumers."""
    sink = settings.relay.sink_url
    to_sink = connect if sink is None else Connector(sink, name)
    archive = {"published": settings.relay.archive_days} if settings.relay.archive_days else {}
    return [
        Place(connect, settings.db_schema, archive),
        Place(to_sink, settings.consumer_schema, {"processed_messages": settings.consumer.keep_days}),
    ]


def _about(settings: Settings) -> dict[str, object]:
    """Return what decides where events go and what is promised of them. No addresses with credentials in them."""
    routes = settings.routes or {}
    return {
        "name": settings.name,
        "delivery": str(settings.delivery),
        "source": str(settings.source),
        "database": display_url(settings.require_database()),
        "brokers": settings.require_kafka(),
        "topics": sorted({route.topic for route in routes.values()}) or settings.topic_template,
        "create_topics": settings.create_topics,
    }


def _stream(settings: Settings, connect: Connector, name: str) -> Stream:
    def new_session(leases: Sequence[Lease]) -> StreamSession:
        return StreamSession(
            slot_names(settings),
            lambda: Replication(settings.require_database(), name),
            connect,
            leases,
            max_events=4 * settings.relay.batch_size * min(len(leases), 8),
            heartbeat_seconds=settings.wal.heartbeat_seconds,
        )

    return Stream(new_session)


def _source(
    settings: Settings, connect: Connector, renew_part: float, topics: Topics, stream: Stream | None
) -> Callable[[LoopReports], Source]:
    router = build_router(settings)
    failures = build_failures(settings)
    at_most_once = settings.delivery is Delivery.AT_MOST_ONCE
    options: dict[str, Any] = {"archive": settings.relay.archive_days > 0, "renew_part": renew_part}
    if not at_most_once:
        # Otherwise a dead letter that waits longer is lost.
        options["lock_seconds"] = settings.relay.lease_seconds * LOCK_PART
    if stream is not None:
        options["stream"] = stream
    else:
        options |= {"watch_seconds": settings.relay.watch_seconds, "kept": KeptMarks()}

    def must_stay(claim: Claim) -> bool:
        try:
            topics.require_for(kind_of(claim), router.topic(claim))
        except TopicUnusable:
            return True
        except NoRoute:
            pass
        return False

    def new_source(reports: LoopReports) -> Source:
        source: Callable[..., Source] = PollingSource if stream is None else StreamSource
        if at_most_once:
            source = partial(AtMostOnceSource, on_lost=reports.lost, must_stay=must_stay)
        return source(connect, settings.db_schema, failures, on_dead=reports.dead, **options)

    return new_source


def _publisher(settings: Settings, topics: Topics) -> Callable[[Source], Publisher]:
    sending = Sending(
        producer_options(settings),
        build_router(settings),
        topics,
        settings.ce_source,
        delivery_seconds(settings),
        headers=settings.headers,
        record_offsets=settings.relay.archive_days > 0,
        at_most_once=settings.delivery is Delivery.AT_MOST_ONCE,
        outbox=settings.name,
    )
    state = StateTopic(client_options(settings), state_topic_name(settings), replication=settings.state_replication)
    # Lanes' rows have the last one; a new publisher fences its predecessor.
    bases = deque([_new_base(settings)], maxlen=_BASES)
    fence_options: Mapping[str, str] = sending.options
    own_id = own_ids(bases[-1])[0]
    # What librdkafka refuses, some of it only with a transactional.id, ends the command here, not a turn later.
    if settings.delivery is Delivery.EXACTLY_ONCE:
        OrderedProducer(sending, own_id).close()
    else:
        IdempotentPublisher(sending).close()
        # Neither may be longer than a transaction, and here they are meant for a producer without any.
        others = {name: value for name, value in sending.options.items() if name != "socket.timeout.ms"}
        fence_options = {**others, "delivery.timeout.ms": "0"}
        ShortLivedProducer(fence_options, own_id).purge()
    fencing = Fencing(fence_options)

    def transactional(store: TakeoverStore) -> TransactionalPublisher:
        *abandoned, base_id = bases
        takeover = Takeover(store, state, fencing, base_id, abandoned=abandoned)
        return TransactionalPublisher(
            sending, base_id=base_id, takeover=takeover, lane_count=store.lane_count(), state=state
        )

    @accepted_before()
    def new_publisher(source: Source) -> Publisher:
        store = source.store
        if settings.delivery is not Delivery.EXACTLY_ONCE:
            return IdempotentPublisher(sending, Takeover(store, state, fencing, None))
        try:
            return transactional(store)
        except IdBusy as error:
            bases.append(_new_base(settings))
            log.warning("publishing with new transactional ids", error=str(error), ids=bases[-1])
            return transactional(store)

    return new_publisher


def _new_base(settings: Settings) -> str:
    return f"{settings.name}.relay.{uuid.uuid4()}"


def _upkeep(
    settings: Settings, connect: Connector, instance: str, registry: CollectorRegistry
) -> list[MaintenanceTask]:
    # Before and after a switch, a slot that is not read also fills the disk, and only polling relays can notice that.
    watch = SlotWatch(
        connect,
        slot_names(settings),
        settings.wal.retained_limit_bytes,
        registry,
        by_checkpoint=settings.source is not SourceKind.WAL,
    )
    tasks = [MaintenanceTask("slot", watch.look, _WATCH_SECONDS)]
    if settings.source is SourceKind.WAL:
        healing = SlotHealing(connect, slot_names(settings), instance, slot_repairs(registry).inc)
        tasks.append(MaintenanceTask("slot_repair", healing.look, _WATCH_SECONDS))
    forget = partial(idempotency_keys.forget, connect, settings.db_schema, settings.relay.idempotency_days)
    tasks.append(MaintenanceTask("idempotency_keys", forget, _KEYS_SECONDS))
    if settings.relay.archive_days > 0:
        retention = Retention(connect, settings.db_schema, settings.relay.archive_days)
        tasks.append(MaintenanceTask("archive", retention.keep, _ARCHIVE_SECONDS))
    return tasks
