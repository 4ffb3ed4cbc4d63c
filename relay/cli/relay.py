"""``outbox relay run``: one relay process. ``outbox relay reconcile``: what to do about a lane that stopped."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from relay.cli.common import AsJson, DatabaseUrl, failing_clearly, print_json, require_reason
from relay.config import Settings, SourceKind, load

if TYPE_CHECKING:
    from relay.database import Connector
    from relay.supervisor import Supervisor, Upkeep

_IDLE_SECONDS: Final = 0.002
_WATCH_SECONDS: Final = 10.0
_ARCHIVE_SECONDS: Final = 60.0

app = typer.Typer(help="Publish events from the outbox to Kafka.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command()
@failing_clearly
def run(
    database_url: DatabaseUrl = None,
    create_topics: Annotated[
        bool | None, typer.Option("--create-topics/--no-create-topics", help="OUTBOX_CREATE_TOPICS")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, console or json")] = None,
) -> None:
    """Publish until SIGTERM or SIGINT. Run as many as you like: they share the lanes out among themselves.

    The first signal lets the batches in flight finish; a second one leaves them to the next relay.
    """
    import structlog

    from relay import failpoints, logs

    settings = load(database_url=database_url, create_topics=create_topics, log_format=log_format)
    logs.configure(settings.log_level, settings.log_format)
    if failpoints.arm_from_environment():
        structlog.get_logger("relay").warning("failpoints are armed: this relay fails on purpose")
    # A lane's thread works through its batch in a few dozen milliseconds. Handing the interpreter to the next lane each
    # 5 ms, the default, costs a busy relay that polls a sixth of its throughput and gains an idle one nothing. The
    # thread that reads the WAL has little to do at a time, and all lanes wait for it.
    sys.setswitchinterval(0.005 if settings.source is SourceKind.WAL else 0.05)
    # Batches are made of tens of thousands of tuples, none of which can be in a ring: to look for rings among them at
    # each 700 new ones, the default, would cost a tenth of the throughput.
    gc.set_threshold(100_000, 20, 50)
    stop, abandon = threading.Event(), threading.Event()

    def end_in(seconds: float) -> None:
        # Also when the main thread hangs in a statement that no server answers: what is in flight is then as after a
        # kill, which loses nothing.
        timer = threading.Timer(seconds, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            abandon.set()
            end_in(5.0)
        else:
            end_in(settings.relay.shutdown_seconds + 10.0)
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    abandoned = build(settings).run(stop, abandon)
    if abandoned:
        # The lanes' threads still wait for Kafka; nothing they learn now can be settled any more.
        os._exit(1)


@app.command()
@failing_clearly
def reconcile(
    apply: Annotated[bool, typer.Option("--apply", help="Repair the lanes that have a problem.")] = False,
    reason: Annotated[str | None, typer.Option("--reason", help="Why; it is kept in the audit.")] = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Compare table, marker and topics of every lane (exactly-once), and say or do what repairs a lane that stopped.

    Needs no stopped relays: a lane is fenced before it is repaired. Exit status 1 while a problem is left.
    """
    from relay.cli.wiring import build_router
    from relay.config import Delivery, client_options, producer_options, state_topic_name
    from relay.database import Connector
    from relay.reconcile import Reconciler
    from relay.transactions import StateTopic
    from relay.wal import Replication

    if apply:
        require_reason(reason, "what happened; it is kept in the audit")
    settings = load(database_url=database_url, delivery=Delivery.EXACTLY_ONCE)
    reconciler = Reconciler(
        Connector(settings.require_database(), "outbox relay reconcile"),
        settings.db_schema,
        settings.name,
        build_router(settings),
        StateTopic(client_options(settings), state_topic_name(settings), replication=settings.state_replication),
        client_options(settings),
        producer_options(settings),
        lambda: Replication(settings.require_database(), "outbox relay reconcile"),
    )
    try:
        states = reconciler.look()
        repaired = reconciler.repair(states, reason or "") if apply else []
    finally:
        reconciler.close()
    problems = [state for state in states if state.problem is not None]
    if as_json:
        print_json({"lanes": states, "repaired": repaired})
    else:
        for state in states:
            typer.echo(
                f"lane {state.lane}: last_batch {state.last_batch}, marker {state.marker_batch}, {state.rows} events "
                f"in the outbox: {state.problem or 'as it should be'}"
            )
            if state.problem is not None:
                typer.echo(
                    f"  {len(state.found)} of them stand on Kafka already: settle these, write a fresh marker, and go "
                    f"on with batch {state.next_batch + 1}"
                )
        for state in repaired:
            typer.echo(f"lane {state.lane}: repaired, {len(state.found)} events settled, {state.rows} to be published")
        if problems and not apply:
            typer.echo("Nothing was changed. To do it: outbox relay reconcile --apply --reason '…'")
    if problems and not apply:
        raise typer.Exit(1)


@app.command()
@failing_clearly
def switch(
    to: Annotated[SourceKind, typer.Argument(help="Where events are read from now on.")],
    reason: Annotated[str | None, typer.Option("--reason", help="Why; it is kept in the audit.")] = None,
    wait_seconds: Annotated[
        float, typer.Option(min=0, help="To polling: how long the stream may take to give what has no row.")
    ] = 60.0,
    leave_messages: Annotated[
        bool, typer.Option("--leave-messages", help="To polling: do not wait; what has no row stays in the slot.")
    ] = False,
    database_url: DatabaseUrl = None,
) -> None:
    """Have the outbox read by polling, or from the WAL, from now on. Needs no stopped relays and no stopped writers.

    Relays of the one source finish what is under way and let go of their lanes; those of the other take them up. Run
    both kinds beside each other for as long as it takes.
    """
    from relay.cdc import Cdc
    from relay.database import Connector
    from relay.slot import slot_names

    settings = load(database_url=database_url)
    connection = Connector(settings.require_database(), "outbox relay switch")()
    try:
        cdc = Cdc(connection, slot_names(settings))
        switched = cdc.switch(to, wait_seconds=wait_seconds, leave_messages=leave_messages, reason=reason)
        slot_there = cdc.status().slot.there
    finally:
        connection.close()
    typer.echo(f"Every lane is read from {to} now." if switched else f"Every lane was read from {to} already.")
    if switched:
        typer.echo(f"Relays with OUTBOX_SOURCE={to} take the lanes up as soon as the others have let go of them.")
    if to is SourceKind.POLLING and slot_there:
        typer.echo(
            f"The slot {settings.wal.slot!r} keeps WAL all the same: `outbox cdc drop`, unless you go back soon."
        )


def build(settings: Settings) -> Supervisor:
    """Put a relay together. Raises ConfigurationError before anything is connected."""
    from outbox import __version__
    from relay.cli.wiring import build_router, build_topics, failure_policy
    from relay.config import (
        Delivery,
        client_options,
        delivery_seconds,
        producer_options,
        state_topic_name,
    )
    from relay.database import Connector
    from relay.failures import Failures
    from relay.lanes import Lease
    from relay.loop import Pace
    from relay.polling import DeletingSource, PollingSource
    from relay.ports import Publisher, Source
    from relay.publisher import IdempotentPublisher
    from relay.slot import slot_names
    from relay.stream import Stream, StreamLimits
    from relay.stream_source import StreamSource
    from relay.supervisor import Events, Plan, Supervisor
    from relay.transactions import StateTopic, TransactionalPublisher, TransactionFigures
    from relay.wal import Replication

    options, seconds = producer_options(settings), delivery_seconds(settings)
    router, topics = build_router(settings), build_topics(settings)
    archive = settings.relay.archive_days > 0
    wal = settings.source is SourceKind.WAL
    schema = settings.db_schema
    failures = Failures(schema, failure_policy(settings), router)
    figures = TransactionFigures()
    state = StateTopic(client_options(settings), state_topic_name(settings), replication=settings.state_replication)
    # An option librdkafka does not know ends the command here, not a lane later.
    IdempotentPublisher(options, router, topics, settings.ce_source, seconds).close()
    instance = settings.relay.instance or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    connect = Connector(settings.require_database(), f"outbox relay {instance}"[:63])

    def new_stream(leases: Sequence[Lease]) -> Stream:
        name = f"outbox relay {instance}"[:63]
        return Stream(
            slot_names(settings),
            lambda: Replication(settings.require_database(), name),
            connect,
            leases,
            StreamLimits(
                max_events=4 * settings.relay.batch_size * len(leases),
                heartbeat_seconds=settings.wal.heartbeat_seconds,
            ),
        )

    def new_source(lease: Lease, events: Events, stream: Stream | None) -> PollingSource:
        if stream is not None:
            wait_seconds = settings.relay.max_idle_seconds
            return StreamSource(
                connect,
                schema,
                lease,
                failures,
                archive=archive,
                on_dead=events.dead,
                stream=stream,
                wait_seconds=wait_seconds,
            )
        if settings.delivery is Delivery.AT_MOST_ONCE:
            return DeletingSource(connect, schema, lease, failures, on_dead=events.dead, on_lost=events.lost)
        return PollingSource(connect, schema, lease, failures, archive=archive, on_dead=events.dead)

    def new_publisher(lease: Lease, lanes: int, source: Source) -> Publisher:
        if settings.delivery is not Delivery.EXACTLY_ONCE:
            once = settings.delivery is Delivery.AT_MOST_ONCE
            return IdempotentPublisher(options, router, topics, settings.ce_source, seconds, places=archive, once=once)
        assert isinstance(source, PollingSource)
        return TransactionalPublisher(
            options,
            router,
            topics,
            settings.ce_source,
            seconds,
            transactional_id=f"{settings.name}.relay.{lease.lane}",
            lane=lease.lane,
            epoch=lease.epoch,
            lanes=lanes,
            state=state,
            ledger=source,
            figures=figures,
            places=archive,
        )

    return Supervisor(
        Plan(
            instance=instance,
            version=__version__,
            schema=schema,
            lease_seconds=settings.relay.lease_seconds,
            shutdown_seconds=settings.relay.shutdown_seconds,
            pace=Pace(
                batch_size=settings.relay.batch_size,
                min_idle_seconds=min(_IDLE_SECONDS, settings.relay.max_idle_seconds),
                # The stream wakes its lanes by itself.
                max_idle_seconds=_IDLE_SECONDS if wal else settings.relay.max_idle_seconds,
                max_backoff_seconds=settings.relay.max_backoff_seconds,
            ),
            connect=connect,
            stream=new_stream if wal else None,
            source=new_source,
            publisher=new_publisher,
            upkeep=_upkeep(settings, connect),
            figures=figures.summary if settings.delivery is Delivery.EXACTLY_ONCE else dict,
        )
    )


def _upkeep(settings: Settings, connect: Connector) -> list[Upkeep]:
    """Give what a relay does beside publishing, and open its metrics. Raises ConfigurationError for an address."""
    from prometheus_client import CollectorRegistry

    from relay.metrics import SlotWatch, serve
    from relay.retention import Retention
    from relay.slot import slot_names
    from relay.supervisor import Upkeep

    registry = CollectorRegistry()
    # A slot that is not read, before a switch or after one, fills the disk as well; then polling relays are the only
    # ones that see it.
    watch = SlotWatch(
        connect,
        slot_names(settings),
        settings.wal.retained_limit_bytes,
        registry,
        by_book=settings.source is not SourceKind.WAL,
    )
    tasks = [Upkeep(watch.look, _WATCH_SECONDS)]
    if settings.relay.archive_days > 0:
        retention = Retention(connect, settings.db_schema, settings.relay.archive_days)
        tasks.append(Upkeep(retention.keep, _ARCHIVE_SECONDS))
    if settings.relay.metrics_address is not None:
        serve(settings.relay.metrics_address, registry)
    return tasks
