"""``outbox relay run``: one relay process."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from relay.cli.common import failing_clearly
from relay.config import Settings, load

if TYPE_CHECKING:
    from relay.supervisor import Supervisor

app = typer.Typer(help="Publish events from the outbox to Kafka.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command()
@failing_clearly
def run(
    database_url: Annotated[str | None, typer.Option(help="OUTBOX_DATABASE_URL")] = None,
    create_topics: Annotated[
        bool | None, typer.Option("--create-topics/--no-create-topics", help="OUTBOX_CREATE_TOPICS")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, console or json")] = None,
) -> None:
    """Publish until SIGTERM or SIGINT. Run as many as you like: they share the lanes out among themselves.

    The first signal lets the batches in flight finish; a second one leaves them to the next relay.
    """
    from relay import logs

    settings = load(database_url=database_url, create_topics=create_topics, log_format=log_format)
    logs.configure(settings.log_level, settings.log_format)
    # A lane's thread works through its batch in a few dozen milliseconds. Handing the interpreter to the next lane each
    # 5 ms, the default, costs about a third of the throughput of a busy relay and gains an idle one nothing.
    sys.setswitchinterval(0.05)
    stop, abandon = threading.Event(), threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            abandon.set()
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    abandoned = build(settings).run(stop, abandon)
    if abandoned:
        # The lanes' threads still wait for Kafka; nothing they learn now can be settled any more.
        os._exit(1)


def build(settings: Settings) -> Supervisor:
    """Put a relay together. Raises ConfigurationError before anything is connected."""
    from outbox import __version__
    from relay.config import client_options, delivery_seconds, producer_options, refuse_what_is_not_there
    from relay.database import Connector
    from relay.loop import Pace
    from relay.polling import PollingSource
    from relay.publisher import IdempotentPublisher, Topics
    from relay.routing import Router
    from relay.supervisor import Plan, Supervisor

    refuse_what_is_not_there(settings)
    options, seconds = producer_options(settings), delivery_seconds(settings)
    router = Router(settings.routes, settings.topic_template)
    topics = Topics(
        client_options(settings),
        create=settings.create_topics,
        partitions=settings.topic_partitions,
        replication=settings.topic_replication,
    )

    def new_publisher() -> IdempotentPublisher:
        return IdempotentPublisher(options, router, topics, settings.ce_source, seconds)

    # An option librdkafka does not know ends the command here, not a lane later.
    new_publisher().close()
    instance = settings.relay.instance or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    connect = Connector(settings.require_database(), f"outbox relay {instance}"[:63])
    return Supervisor(
        Plan(
            instance=instance,
            version=__version__,
            schema=settings.db_schema,
            lease_seconds=settings.relay.lease_seconds,
            shutdown_seconds=settings.relay.shutdown_seconds,
            pace=Pace(
                batch_size=settings.relay.batch_size,
                max_idle_seconds=settings.relay.max_idle_seconds,
                max_backoff_seconds=settings.relay.max_backoff_seconds,
            ),
            connect=connect,
            source=lambda lease: PollingSource(connect, settings.db_schema, lease),
            publisher=new_publisher,
        )
    )
