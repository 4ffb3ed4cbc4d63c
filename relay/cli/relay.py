"""``outbox relay``: run a relay, repair lanes, switch the source. ``pause`` and its like are in pauses.py."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from outbox._app.console import AsJson, DatabaseUrl, Reason, print_json, require_reason, say
from outbox._clients.counting import counted
from outbox.errors import ConfigurationError
from outbox.stopping import Stopping
from relay.cli import pauses
from relay.cli.session import outbox_session
from relay.config import Delivery, Settings, SourceKind, load

if TYPE_CHECKING:
    from relay.operations.lane_rows import LaneComparison
    from relay.operations.reconcile import Findings

SHOWN: Final = 5
"""How many events are listed of each kind."""
SUPERSEDED: Final = (
    "are not on Kafka, and later events of their keys are, in topics that may be compacted; whether they ever were "
    "there is not known"
)

app = typer.Typer(help="Publish events from the outbox to Kafka.", no_args_is_help=True)


@app.command()
def run(
    database_url: DatabaseUrl = None,
    create_topics: Annotated[
        bool | None, typer.Option("--create-topics/--no-create-topics", help="OUTBOX_CREATE_TOPICS")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, console or json.")] = None,
    workers: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that share the lanes, such as one per core.")
    ] = 1,
    worker: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Publish until SIGTERM or SIGINT. Relays divide the lanes among themselves.

    The first signal lets batches in flight finish; a second one leaves them to the next relay.
    """
    # Batches hold tens of thousands of tuples, which are never in a reference cycle: looking for cycles every 700 new
    # objects, the default, would cost a tenth of the throughput.
    gc.set_threshold(100_000, 20, 50)
    import structlog

    from outbox._app import logs, tracing
    from relay import failpoints
    from relay.wiring import build
    from relay.workers import ABANDON, be_worker, run_workers

    settings = load(database_url=database_url, create_topics=create_topics, log_format=log_format)
    logs.configure(settings.log_level, settings.log_format, settings.given_name)
    if workers > 1:
        if settings.source is SourceKind.WAL:
            raise ConfigurationError("--workers: the WAL is one stream, which one relay reads for all lanes")
        topics = None if create_topics is None else str(create_topics).lower()
        given = {"DATABASE_URL": database_url, "CREATE_TOPICS": topics, "LOG_FORMAT": log_format}
        more = {f"OUTBOX_{name}": value for name, value in given.items() if value is not None}
        # NAME_FILE is the same setting as NAME, and both are refused.
        kept = {name: value for name, value in os.environ.items() if name.upper().removesuffix("_FILE") not in more}
        raise typer.Exit(run_workers(workers, kept | more))
    tracing.configure("outbox-relay")
    stop, abandon = Stopping(), Stopping()
    if worker is not None:
        be_worker(worker, settings)
    if failpoints.arm_from_environment():
        structlog.get_logger("relay").warning("failpoints are armed: this relay fails on purpose")
    # The thread that reads ahead, or the WAL, needs the interpreter for every 16 KB that Postgres sends. Meanwhile the
    # loop keeps it, to give events to librdkafka.
    sys.setswitchinterval(0.001)
    seconds = settings.relay.shutdown_seconds + 10.0
    _stop_on_signals(stop, abandon, seconds, abandon_at=None if worker is None else ABANDON)
    supervisor = build(settings)
    # No collection looks at what was imported.
    gc.freeze()
    abandoned = supervisor.run(stop, abandon)
    if abandoned:
        # The worker's loop still waits for Kafka; it can't settle anything any more.
        os._exit(1)


def _stop_on_signals(
    stop: Stopping, abandon: Stopping, seconds: float, *, abandon_at: signal.Signals | None = None
) -> None:
    """Set ``stop`` at the first signal, and ``abandon`` at the next, or only ``abandon_at`` that one.

    Each ends the process if that takes too long.
    """
    # Without a standard error there is nowhere to show the threads, but the end comes all the same.
    shown = sys.stderr if sys.stderr is not None else Path(os.devnull).open("w")  # noqa: SIM115  until the process ends

    def on_signal(number: int, _frame: FrameType | None) -> None:
        again = stop.is_set() if abandon_at is None else number == abandon_at
        if (abandon if again else stop).is_set():
            return
        stop.set()
        if again:
            abandon.set()
        # Ends it even if the main thread hangs in a statement that no server answers: batches in flight are then as
        # after a kill, which loses nothing. Where each thread stands is the only trace of what hung.
        faulthandler.dump_traceback_later(5.0 if again else seconds, exit=True, file=shown)

    for each in (signal.SIGTERM, signal.SIGINT, *([] if abandon_at is None else [abandon_at])):
        signal.signal(each, on_signal)


@app.command()
def reconcile(
    lane: Annotated[list[int] | None, typer.Option("--lane", min=0, help="Only this lane; repeatable.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Repair the lanes that have a problem.")] = False,
    reason: Reason = None,
    database_url: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Compare table, marker and topics (exactly-once), and repair stopped lanes with --apply.

    Relays may keep running. Needs a direct connection to Postgres. Exit status 1 while a problem remains.
    """
    from relay.operations.reconcile import Reconciler

    why = require_reason(reason, "what happened", needed=apply)
    with closing(Reconciler(reconciler_settings(database_url))) as reconciler:
        findings = reconciler.look(lane, search=not apply)
        repaired = reconciler.repair(findings, why) if apply else []
    if as_json:
        print_json({"lanes": findings.lanes, "hanging": findings.hanging, "repaired": repaired})
    else:
        _print_findings(findings, repaired, apply=apply)
    alone = [part for part in findings.hanging if part.of_another or part.would_lose]
    if alone or (not apply and (findings.problems or findings.hanging)):
        raise typer.Exit(1)


@app.command()
def upgraded(reason: Reason = None, database_url: DatabaseUrl = None) -> None:
    """Accept the new system identifier after pg_upgrade (exactly-once), and write new markers.

    Refuses, with exit status 1, if a lane has stopped for any other reason.
    """
    from relay.operations.reconcile import Reconciler

    why = require_reason(reason, "from which version to which")
    with closing(Reconciler(reconciler_settings(database_url))) as reconciler:
        repaired = reconciler.repair(reconciler.upgraded(), why)
    for state in repaired:
        say(f"lane {state.lane}: continues, {counted(state.found, 'event')} settled, {state.rows} to be published")


def reconciler_settings(database_url: str | None, schema: str | None = None) -> Settings:
    """Return the settings of a Reconciler, and arm its failpoints. The relays may have another delivery."""
    from relay import failpoints

    failpoints.arm_from_environment()
    settings = load(database_url=database_url, schema=schema)
    # What their delivery allows, and exactly-once sets itself.
    own = {"retry.backoff.ms", "retry.backoff.max.ms"}
    kafka = {name: value for name, value in settings.kafka.items() if name not in own}
    return settings.model_copy(update={"delivery": Delivery.EXACTLY_ONCE, "kafka": kafka})


def _print_findings(findings: Findings, repaired: Sequence[LaneComparison], *, apply: bool) -> None:
    for state in findings.lanes:
        say(
            f"lane {state.lane}: last_batch {state.last_batch}, marker {state.marker_batch}, "
            f"{counted(state.rows, 'event')} in the outbox: {state.problem or 'consistent'}"
        )
        if state.problem is not None and not apply:
            also = f", and {len(state.superseded)} are superseded" if state.superseded else ""
            say(
                f"  {state.found - len(state.superseded)} of them are on Kafka already{also}: settle these, write a "
                f"new marker, and continue with batch {state.next_batch + 1}"
            )
            _print_superseded(state)
    for part in findings.hanging:
        say(
            f"{part.topic} partition {part.partition}: read_committed readers wait at offset {part.stable} for "
            f"the end of a transaction. {counted(part.events, 'event')} may be in it; the outbox still has the rows of "
            f"{part.held}"
        )
        if part.of_another:
            say(f"  of another program, and left alone. If that does not need its records, abort it: {part.command}")
        elif part.would_lose:
            say(f"  aborting it would lose the others; it is left alone. {part.way_out}")
        elif not apply:
            say("  abort it, and publish them again")
    for state in repaired:
        say(f"lane {state.lane}: repaired, {counted(state.found, 'event')} settled, {state.rows} to be published")
        _print_superseded(state)
    if (findings.problems or findings.hanging) and not apply:
        say("Nothing was changed. To apply: outbox relay reconcile --apply --reason '…'")


def _print_superseded(state: LaneComparison) -> None:
    if state.superseded:
        say(f"  {len(state.superseded)} {SUPERSEDED}:")
    for event_id in state.superseded[:SHOWN]:
        say(f"    {event_id}")


@app.command()
def release(
    lane: Annotated[int, typer.Argument(min=0, help="The lane to release.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also from a relay that is alive: at-most-once, a key's order may break.")
    ] = False,
    reason: Reason = None,
    database_url: DatabaseUrl = None,
) -> None:
    """End the lease of a lane whose relay is gone, for example after the database's clock jumped back."""
    from relay.operations.holding import release_lane

    why = require_reason(reason, "what happened")
    with outbox_session(database_url, "relay release") as (connection, settings):
        freed = release_lane(connection, settings.db_schema, lane, why, force=force)
    if freed is None:
        say(f"Lane {lane} is already free.")
    else:
        owner, lease_until = freed
        say(f"Lane {lane} is free: {owner} held it until {lease_until}.")


@app.command()
def switch(
    to: Annotated[SourceKind, typer.Argument(help="The source to read events from.")],
    reason: Reason = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Switch the outbox to polling, or to the WAL. Relays and writers may keep running.

    Relays of the old source release their lanes and relays of the new one take them: run both until then.
    """
    from relay.operations.wal_setup import Cdc
    from relay.wal.slot import slot_names

    with outbox_session(database_url, "relay switch") as (connection, settings):
        cdc = Cdc(connection, slot_names(settings))
        switched = cdc.switch(to, reason)
        slot_exists = cdc.status().slot.exists
    say(f"Every lane is read from {to} now." if switched else f"Every lane was read from {to} already.")
    if switched:
        say(f"Relays with OUTBOX_SOURCE={to} take the lanes as soon as the others have released them.")
    if to is SourceKind.POLLING and slot_exists:
        say(f"The slot {settings.wal.slot!r} still retains WAL: run `outbox cdc drop`, unless you switch back soon.")


for _command in (pauses.pause, pauses.resume, pauses.drain, pauses.wait):
    app.command()(_command)
